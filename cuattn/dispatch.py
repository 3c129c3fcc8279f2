"""What the operations share; each is check, plan, launch.

Arrays choose the machine: NumPy arrays run on the CPU machine; CuPy arrays, PyTorch tensors and anything with
`__cuda_array_interface__` run on the GPU, on the caller's current stream. Results are PyTorch tensors for
PyTorch tensors, NumPy arrays for NumPy arrays and CuPy arrays for everything else. A process uses one GPU,
the one that is current when its first array comes.
"""
from __future__ import annotations

import os

import numpy as np

from cuattn import contract, kernels
from cuattn.binding import Binding, Planned, Repeat, remember, repeatable, repeats, signature
from cuattn.kernels.base import Row, Unsupported
from cuattn.machine import Tensor

# What "auto" tries; the last one takes whatever the contract lets in.
PREFILL, DECODE, MLA = ("flash_hopper", "flash"), ("paged_stream", "paged"), ("mla_hopper", "mla")
OFFERED = {"window": "window_size", "softcap": "softcap", "sinks": "sinks", "varlen": "cu_seqlens_q",
           "paged": "block_table", "dv": "a head dim of v that is not k's",
           "queries": "several queries a sequence",
           "quantised": "a quantised cache"}  # the shapes' `features` as arguments


def _key(plan, arrays: dict, options: dict, constants, out) -> tuple | None:
    """What makes a GPU call one that an earlier call can serve.

    None where the plan has to look at it anew.
    """
    if out is not None or not (alike := signature(*arrays.values())):
        return None
    try:
        row = kernels.ROWS.get(options.get("kernel"))  # not its name: a reloaded kernel is another one
        key = (plan, row, alike, *options.values(), str(sorted(constants.items())) if constants else "")
        hash(key)
    except (AttributeError, TypeError):
        return None  # an option of some odd type; the plan says what is wrong with it
    return key


def run(plan, arrays: dict, returns, options: dict, constants=None, out=None,
        reads_values: bool = True) -> tuple:
    """Plans and runs; a GPU call like an earlier one repeats it, unless values are to be checked.

    `reads_values`: whether the plan is one that checks them.
    """
    key = None if reads_values and _wants_checks() else _key(plan, arrays, options, constants, out)
    if key is not None and (known := repeats.get(key)) is not None:
        return known.call(*arrays.values())
    more = {name: x for name, x in (("constants", constants), ("out", out)) if x is not None}
    planned = plan(**arrays, **options, **more)
    outputs = planned.run()
    if key is not None and repeatable(planned):
        remember(key, Repeat(planned, tuple(arrays), returns))
    return outputs


def bound(sinks, **arrays) -> Binding:
    """The arrays of attention, and the sinks where there are any."""
    if sinks is not None:
        contract.rank("sinks", sinks, "H")
        arrays["sinks"] = sinks
    return Binding(**arrays)


def choose(kernel: str, family: str, default: str) -> Row:
    return kernels.find(default if kernel == "auto" else kernel, family)


def offering(names, features: frozenset[str]) -> tuple[str, ...]:
    """Those of the kernels that offer all of these features."""
    return tuple(name for name in names if features <= kernels.ROWS[name].features)


def planned_by_first(names, binding: Binding, *what, **more) -> Planned:
    """By the first of these kernels that is made for this GPU and takes the arrays; else by the last.

    The CPU machine, where nothing is faster for being made for a GPU, takes the last.
    """
    *rows, last = (kernels.ROWS[name] for name in names)
    for row in rows:
        if binding.machine.name == "gpu" and row.runs_on(binding.machine.device.arch):
            try:
                return binding.planned(row, *what, **more)
            except Unsupported:
                pass
    return binding.planned(last, *what, **more)


def check_options(causal, constants, kernel) -> None:
    """Types that Python would take for something else."""
    if not isinstance(causal, (bool, np.bool_)):
        got = repr(causal) if isinstance(causal, str) else type(causal).__name__
        raise contract.refuse("causal", "True or False", got, "name one; masks are not taken")
    if constants is not None and not isinstance(constants, dict):
        raise contract.refuse("constants", "a dict of tunables", type(constants).__name__,
                              "see the kernel's row")
    if not isinstance(kernel, str):
        raise contract.refuse("kernel", "a kernel's name", type(kernel).__name__, "name one, or 'auto'")


def check_features(row: Row, h: int, hkv: int, causal: bool = False, features=frozenset()) -> None:
    if h != hkv and "gqa" not in row.features:
        raise contract.refuse("k", f"as many heads as q ({h}) for kernel '{row.name}'", hkv,
                              "repeat them, or choose another")
    if causal and "causal" not in row.features:
        raise contract.refuse("causal", f"False for kernel '{row.name}'", True, "choose another kernel")
    for feature in sorted(features - row.features):
        offer = sorted(name for name, other in kernels.ROWS.items()
                       if other.family == row.family and feature in other.features)
        raise contract.refuse("kernel", f"one that offers {OFFERED[feature]} ({' or '.join(offer)})",
                              f"'{row.name}'", "choose one, or 'auto'")


def check_out(out: Tensor, inputs: dict[str, Tensor]) -> None:
    contract.vectors("out", out)
    contract.writable("out", out)
    contract.apart("out", out, inputs)


def _wants_checks() -> bool:
    return os.environ.get("CUATTN_CHECK") == "1"


def checks_values(binding: Binding) -> bool:
    """Whether arrays' values are looked at: where that costs no synchronisation, or is asked for."""
    return binding.machine.name == "cpu" or _wants_checks()
