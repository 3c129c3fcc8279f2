"""Results over disjoint sets of keys, merged."""
from __future__ import annotations

from cuattn import compile as compiler
from cuattn import contract
from cuattn.binding import Binding
from cuattn.kernels.base import GRID_LIMIT
from cuattn.kernels.paged import combine_arguments, combine_launch


def merge_states(o_a, lse_a, o_b, lse_b):
    """Attention over two disjoint sets of keys, from the results over each.

    As FlashInfer's merge_state, with the natural logarithm.

    Parameters
    ----------
    o_a, o_b : array, [B, M, H, D]
        float16, bfloat16 or float32.
    lse_a, lse_b : float32 array, [B, H, M]

    Returns
    -------
    (o, lse)
        Two empty states give (0, −inf); an empty one leaves the other's values as they are.
    """
    for name, x in (("o_a", o_a), ("o_b", o_b)):
        contract.rank(name, x, "B, M, H, D")
    for name, x in (("lse_a", lse_a), ("lse_b", lse_b)):
        contract.rank(name, x, "B, H, M")
    binding = Binding(o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
    t = binding.tensors
    b, m, h, d = t["o_a"].shape
    contract.dtype("o_a", t["o_a"], ("float16", "bfloat16", "float32"))
    contract.same("o_b", (t["o_b"].shape, t["o_b"].dtype), "o_a", (t["o_a"].shape, t["o_a"].dtype))
    for name in ("lse_a", "lse_b"):
        contract.same(name, (t[name].shape, t[name].dtype), "o_a's rows", ((b, h, m), "float32"))
    if d % 2 or not 0 < d <= 2048:
        raise contract.refuse("o_a", "an even head dim up to 2048", d, "pad it with zeros")
    contract.grid(b, h)
    return _merge(binding, b, m, h, d)


def _merge(binding: Binding, b: int, m: int, h: int, d: int):
    """Lays the states side by side as two splits for `combine` to merge, a grid's worth of rows at a time."""
    machine, first, rows = binding.machine, binding.first, b * m
    dtype, make = binding.tensors["o_a"].dtype, machine.like
    part, part_lse = make(first, (rows, 2, h, d), dtype), make(first, (rows, h, 2), "float32")
    for i, side in enumerate("ab"):
        part[:, i] = binding.source(f"o_{side}").reshape((rows, h, d))
        part_lse[:, :, i] = binding.source(f"lse_{side}").swapaxes(1, 2).reshape((rows, h))
    o, lse = make(first, (rows, 1, h, d), dtype), make(first, (rows, h, 1), "float32")
    for start in range(0, rows if h else 0, GRID_LIMIT):
        some = slice(start, min(start + GRID_LIMIT, rows))
        launch = combine_launch(some.stop - start, h, d, dtype, dtype)
        built = compiler.build(launch.file, launch.entry, launch.constants, machine.device.arch)
        bound = {"part": part[some], "part_lse": part_lse[some], "o": o[some], "lse": lse[some]}
        args = combine_arguments({name: machine.tensor(x) for name, x in bound.items()})
        with machine.stream(first):
            machine.launch(built, launch.grid, launch.block, launch.smem_bytes, args)
    return o.reshape((b, m, h, d)), lse.reshape((b, m, h)).swapaxes(1, 2)
