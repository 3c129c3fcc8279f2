"""The operations: check, plan, launch.

Arrays choose the machine: NumPy arrays run on the CPU machine; CuPy arrays, PyTorch tensors and anything with
`__cuda_array_interface__` run on the GPU, on the caller's current stream. Results are PyTorch tensors for
PyTorch tensors, NumPy arrays for NumPy arrays and CuPy arrays for everything else. A process uses one GPU,
the one that is current when its first array comes.
"""
from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from cuattn import compile as compiler
from cuattn import contract, kernels
from cuattn.binding import Binding, Planned, Repeat, remember, repeatable, repeats, signature
from cuattn.kernels.base import (
    GRID_LIMIT,
    AppendShape,
    AttentionShape,
    DecodeShape,
    PagesShape,
    Row,
    Unsupported,
)
from cuattn.kernels.paged import combine_arguments, combine_launch
from cuattn.machine import Tensor

HALF = ("float16", "bfloat16")
# What "auto" tries; the last one takes whatever the contract lets in.
PREFILL, DECODE = ("flash_hopper", "flash"), ("paged_stream", "paged")
OFFERED = {"window": "window_size", "softcap": "softcap", "sinks": "sinks", "varlen": "cu_seqlens_q",
           "dv": "a head dim of v that is not k's"}  # `AttentionShape.features` as arguments


def _key(plan, arrays: tuple, options: dict, constants, out) -> tuple | None:
    """What makes a GPU call one that an earlier call can serve; None where the plan has to look at it anew."""
    if out is not None or (plan is not plan_attention and _wants_checks()) or not (alike := signature(*arrays)):
        return None
    try:
        row = kernels.ROWS.get(options.get("kernel"))  # not its name: a reloaded kernel is another one
        key = (plan, row, alike, *options.values(), str(sorted(constants.items())) if constants else "")
        hash(key)
    except (AttributeError, TypeError):
        return None  # an option of some odd type; the plan says what is wrong with it
    return key


def _run(plan, arrays: tuple, names, returns, options: dict, constants=None, out=None) -> tuple:
    """Plans and runs; a GPU call like an earlier one repeats it, unless values are to be checked."""
    key = _key(plan, arrays, options, constants, out)
    if key is not None and (known := repeats.get(key)) is not None:
        return known.call(*arrays)
    more = {name: x for name, x in (("constants", constants), ("out", out)) if x is not None}
    planned = plan(**dict(zip(names, arrays)), **options, **more)
    outputs = planned.run()
    if key is not None and repeatable(planned):
        remember(key, Repeat(planned, names, returns))
    return outputs


def _choose(kernel: str, family: str, default: str) -> Row:
    return kernels.find(default if kernel == "auto" else kernel, family)


def _planned_by_first(names, binding: Binding, *what, **more) -> Planned:
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


def _offering(shape: AttentionShape) -> list[str]:
    """What "auto" tries for this shape."""
    return [name for name in PREFILL if shape.features <= kernels.ROWS[name].features]


def _check_features(row: Row, h: int, hkv: int, causal: bool = False, features=frozenset()) -> None:
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


def _check_options(causal, constants, kernel) -> None:
    """Types that Python would take for something else."""
    if not isinstance(causal, (bool, np.bool_)):
        got = repr(causal) if isinstance(causal, str) else type(causal).__name__
        raise contract.refuse("causal", "True or False", got, "name one; masks are not taken")
    if constants is not None and not isinstance(constants, dict):
        raise contract.refuse("constants", "a dict of tunables", type(constants).__name__,
                              "see the kernel's row")
    if not isinstance(kernel, str):
        raise contract.refuse("kernel", "a kernel's name", type(kernel).__name__, "name one, or 'auto'")


def _bound(sinks, **arrays) -> Binding:
    """The arrays of attention, and the sinks where there are any."""
    if sinks is not None:
        contract.rank("sinks", sinks, "H")
        arrays["sinks"] = sinks
    return Binding(**arrays)


def _check_arrays(binding: Binding, row: Row) -> None:
    """Dtypes, head dims, heads and alignment of q, k, v, whose batches agree, and of the sinks."""
    tq, tk, tv = (binding.tensors[name] for name in "qkv")
    (b, _, h, d), (n, hkv) = tq.shape, tk.shape[1:3]
    contract.dtype("q", tq, row.dtypes)
    for name, t in (("k", tk), ("v", tv)):
        contract.same(f"{name}.dtype", t.dtype, "q", tq.dtype)
    contract.same("k.shape", tk.shape, "q, for batch and head dim,", (b, n, hkv, d))
    contract.same("v.shape", tv.shape, "k", (*tk.shape[:-1], tv.shape[-1]))
    contract.heads(h, hkv)
    contract.head_dim(d, row)
    contract.value_dim(tv.shape[-1], d, row)
    for name, t in (("q", tq), ("k", tk), ("v", tv)):
        contract.vectors(name, t)
    if "sinks" in binding.tensors:
        contract.sinks(binding.tensors["sinks"], h)


def _shape(binding: Binding, row: Row, b: int, m: int, n: int, scores: dict, packed=None):
    """The shape of B sequences of M queries and N keys, or at most as many, and the kernel's numbers.

    `scores`: what becomes of scores, as `plan_attention` takes it.
    """
    tq, tk, tv = (binding.tensors[name] for name in "qkv")
    (h, d), hkv, dv = tq.shape[2:], tk.shape[2], tv.shape[3]
    contract.grid(b, h)
    causal, window = contract.window(scores["window_size"], bool(scores["causal"]), m, n)
    scalars = {"softmax_scale": contract.scale(scores["softmax_scale"], d),
               "softcap": contract.softcap(scores["softcap"])}
    shape = AttentionShape(b, h, hkv, m, n, d, tq.dtype, causal, window, scalars["softcap"] > 0,
                           "sinks" in binding.tensors, packed, None if dv == d else dv)
    _check_features(row, h, hkv, causal, shape.features)
    return shape, scalars


def _check_out(out: Tensor, inputs: dict[str, Tensor]) -> None:
    contract.vectors("out", out)
    contract.writable("out", out)
    contract.apart("out", out, inputs)


def plan_attention(q, k, v, *, causal: bool = False, softmax_scale: float | None = None,
                   window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks=None,
                   layout: str | None = None, kernel: str = "auto", constants: dict | None = None,
                   out=None) -> Planned:
    """Dense attention, checked, planned and compiled, bound to its arrays; `run()` returns (o, lse).

    Parameters
    ----------
    q : array, [B, M, H, D]
        float16 or bfloat16; D a multiple of 8, at most 256; rows contiguous and 16-byte aligned, other
        strides free.
    k, v : array, [B, N, HKV, D]
        Same dtype; query head h reads KV head h // (H / HKV). V and O may have a head dim DV of their own, a
        multiple of 8 below D.
    causal : bool
        Bottom-right aligned: query m sees keys up to m + N − M.
    softmax_scale : float, optional
        1/√D by default; must be positive.
    window_size : (int, int)
        How many keys before and behind its own, m + N − M, query m sees, that one not counted; −1 is all of
        them. With `causal` none behind. Tiles outside the window are not read.
    softcap : float
        Scaled scores s become softcap · tanh(s / softcap), before the mask; 0 leaves them.
    sinks : float32 array, [H], optional
        One more logit a head, beside the scaled scores of every row: it counts in the sum of exponentials and
        in lse, and has no value.
    layout : {"bshd", "bhsd"}, optional
        "bhsd" is PyTorch's (B, H, N, D), taken without a copy; "bshd" where nothing is said.
    kernel : str
        A prefill kernel's name. "auto" is flash_hopper on sm_90a where its copies reach the arrays (all strides
        positive multiples of 16 bytes), else flash.
    constants : dict, optional
        Tunables of that kernel (see its row), of flash with "auto". Without any, those that `tune` found on this
        device, or the plan's own choice.
    out : array, [B, M, H, D], optional
        Where O goes, in `layout`.

    Returns
    -------
    Planned
        Of o, like q, and lse, float32 [B, H, M], the natural logarithm of Σ e^(scaled scores). A row that
        sees no key gives o = 0, lse = −inf, or its head's sink.

    Raises
    ------
    ContractError, Unsupported, MachineUnavailable, CompileError
        One sentence each.
    """
    _check_options(causal, constants, kernel)
    row = _choose(kernel, "prefill", PREFILL[-1])
    for name, x in (("q", q), ("k", k), ("v", v)):
        contract.rank(name, x, "B, M, H, D" if name == "q" else "B, N, HKV, D")
    layout = contract.layout(layout, q.shape, k.shape)
    binding = _bound(q=q, k=k, v=v, sinks=sinks)
    if layout == "bhsd":
        binding.tensors |= {name: _swap(binding.tensors[name]) for name in "qkv"}
    b, m, h, _ = binding.tensors["q"].shape
    _check_arrays(binding, row)
    scores = {"causal": causal, "softmax_scale": softmax_scale, "window_size": window_size,
              "softcap": softcap}
    shape, scalars = _shape(binding, row, b, m, binding.tensors["k"].shape[1], scores)
    inputs = dict(binding.tensors)
    o = binding.output("o", (*q.shape[:-1], shape.value_dim), shape.dtype, out)
    if layout == "bhsd":
        binding.tensors["o"] = _swap(binding.tensors["o"])
    _check_out(binding.tensors["o"], inputs)
    lse = binding.output("lse", (b, h, m), "float32")
    names = _offering(shape) if kernel == "auto" and not constants else (row.name,)
    return _planned_by_first(names, binding, shape, constants, (o, lse), scalars)


def attention(q, k, v, *, causal: bool = False, softmax_scale: float | None = None,
              window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks=None,
              layout: str | None = None, kernel: str = "auto", constants: dict | None = None, out=None,
              return_lse: bool = False):
    """softmax(σ q kᵀ) v. See `plan_attention` for the arguments.

    Returns
    -------
    o, or (o, lse) with `return_lse`.
    """
    options = {"causal": causal, "softmax_scale": softmax_scale, "window_size": window_size,
               "softcap": softcap, "layout": layout, "kernel": kernel}
    arrays = {"q": q, "k": k, "v": v, **({} if sinks is None else {"sinks": sinks})}
    o, lse = _run(plan_attention, tuple(arrays.values()), tuple(arrays), ("o", "lse"), options, constants,
                  out)
    return (o, lse) if return_lse else o


def plan_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q: int, max_seqlen_k: int,
                          causal: bool = False, softmax_scale: float | None = None,
                          window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks=None,
                          kernel: str = "auto", constants: dict | None = None, out=None) -> Planned:
    """Attention of B sequences packed one behind the other, bound to its arrays; `run()` returns (o, lse).

    Parameters
    ----------
    q : array, [total_q, H, D]
        As in `plan_attention`.
    k, v : array, [total_k, HKV, D]
    cu_seqlens_q, cu_seqlens_k : int32 array, [B + 1]
        Sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] − 1; it may have none. Rows of o and lse that no
        sequence has are not written. Values on a GPU are checked with CUATTN_CHECK=1 only.
    max_seqlen_q, max_seqlen_k : int
        At least the length of the longest sequence; of the queries beyond it nothing is computed.
    causal, softmax_scale, window_size, softcap, sinks, kernel, constants
        As in `plan_attention`; M and N are those of the sequence.
    out : array, [total_q, H, D], optional

    Returns
    -------
    Planned
        Of o, like q, and lse, float32 [H, total_q].

    Raises
    ------
    ContractError, Unsupported, MachineUnavailable, CompileError
    """
    _check_options(causal, constants, kernel)
    row = _choose(kernel, "prefill", PREFILL[-1])
    for name, x in (("q", q), ("k", k), ("v", v)):
        contract.rank(name, x, "total_q, H, D" if name == "q" else "total_k, HKV, D")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        contract.rank(name, x, "B + 1")
    binding = _bound(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks)
    binding.tensors |= {name: _as_batch(binding.tensors[name]) for name in "qkv"}
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    _check_offsets(binding, longest)
    _check_arrays(binding, row)
    scores = {"causal": causal, "softmax_scale": softmax_scale, "window_size": window_size,
              "softcap": softcap}
    b = binding.tensors["cu_seqlens_q"].shape[0] - 1
    shape, scalars = _shape(binding, row, b, *(int(x) for x in longest.values()), scores,
                            packed=(q.shape[0], k.shape[0]))
    inputs = dict(binding.tensors)
    o = binding.output("o", (*q.shape[:-1], shape.value_dim), shape.dtype, out)
    lse = binding.output("lse", (shape.h, q.shape[0]), "float32")
    binding.tensors |= {name: _as_batch(binding.tensors[name]) for name in ("o", "lse")}
    _check_out(binding.tensors["o"], inputs)
    names = _offering(shape) if kernel == "auto" and not constants else (row.name,)
    offsets = tuple(binding.source(f"cu_seqlens_{side}") for side in "qk")
    return _planned_by_first(names, binding, shape, constants, (o, lse), scalars, lengths=offsets)


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q: int, max_seqlen_k: int, *,
                     causal: bool = False, softmax_scale: float | None = None,
                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks=None,
                     kernel: str = "auto", constants: dict | None = None, out=None, return_lse: bool = False):
    """Attention of packed sequences. See `plan_attention_varlen`; the arguments are those of flash-attention.

    Returns
    -------
    o, or (o, lse) with `return_lse`.
    """
    arrays = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
              **({} if sinks is None else {"sinks": sinks})}
    options = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "causal": causal,
               "softmax_scale": softmax_scale, "window_size": window_size, "softcap": softcap,
               "kernel": kernel}
    o, lse = _run(plan_attention_varlen, tuple(arrays.values()), tuple(arrays), ("o", "lse"), options,
                  constants, out)
    return (o, lse) if return_lse else o


def _as_batch(t: Tensor) -> Tensor:
    """A batch of this one."""
    return Tensor(t.address, (1, *t.shape), (0, *t.strides), t.dtype, t.itemsize, t.array)


def _check_offsets(binding: Binding, longest: dict[str, int]) -> None:
    """Where packed sequences begin and end, and the longest's length; the values as in `_check_cache`."""
    t = binding.tensors
    for side in "qk":
        name, most = f"cu_seqlens_{side}", longest[f"max_seqlen_{side}"]
        contract.dtype(name, t[name], ("int32",))
        contract.contiguous(name, t[name])
        if t[name].shape == (0,):
            raise contract.refuse(name, "B + 1 offsets, 0 where there is no sequence", "none",
                                  "add the last end")
        if not isinstance(most, (int, np.integer)) or isinstance(most, bool) or most < 0:
            raise contract.refuse(f"max_seqlen_{side}", "an int of at least 0", repr(most),
                                  "give the longest sequence's length")
        if binding.machine.name == "cpu" or _wants_checks():
            contract.offsets(side, binding.values(name), t[side].shape[1], int(most))
    contract.same("cu_seqlens_k.shape", t["cu_seqlens_k"].shape, "cu_seqlens_q", t["cu_seqlens_q"].shape)


def _swap(t: Tensor) -> Tensor:
    """(B, H, N, D) as (B, N, H, D)."""
    (b, h, n, d), (sb, sh, sn, sd) = t.shape, t.strides
    return Tensor(t.address, (b, n, h, d), (sb, sn, sh, sd), t.dtype, t.itemsize, t.array)


def _check_ranks_of_cache(k_cache, v_cache, block_table) -> None:
    _check_ranks_of_pool(k_cache=k_cache, v_cache=v_cache)
    contract.rank("block_table", block_table, "B, max_pages")


def _check_ranks_of_pool(**caches) -> None:
    for name, x in caches.items():
        contract.rank(name, x, "num_pages, page_size, HKV, D")


def _check_pool(t: dict[str, Tensor]) -> None:
    if t["k_cache"].shape[1] == 0:
        raise contract.refuse("k_cache", "a page size of at least 1", 0,
                              "check its shape (num_pages, page_size, HKV, D)")
    contract.same("v_cache.shape", t["v_cache"].shape, "k_cache", t["k_cache"].shape)
    contract.same("v_cache.dtype", t["v_cache"].dtype, "k_cache", t["k_cache"].dtype)
    for name in ("k_cache", "v_cache"):
        contract.vectors(name, t[name])


def _check_cache(binding: Binding, more: int = 0) -> None:
    """Shapes of a cache, its table and lengths; `more` rows are about to be written behind each length.

    Their values too where that costs no synchronisation, or with CUATTN_CHECK=1.
    """
    t = binding.tensors
    b, (pages, page_size) = t["block_table"].shape[0], t["k_cache"].shape[:2]
    _check_pool(t)
    contract.same("cache_seqlens.shape", t["cache_seqlens"].shape, "block_table", (b,))
    for name in ("block_table", "cache_seqlens"):
        contract.dtype(name, t[name], ("int32",))
        contract.contiguous(name, t[name])
    if _checks_values(binding):
        table, lengths = (binding.values(name) for name in ("block_table", "cache_seqlens"))
        contract.page_table(pages, page_size, table, lengths, more)


def _wants_checks() -> bool:
    return os.environ.get("CUATTN_CHECK") == "1"


def _checks_values(binding: Binding) -> bool:
    """Whether arrays' values are looked at: where that costs no synchronisation, or is asked for."""
    return binding.machine.name == "cpu" or _wants_checks()


def plan_decode(q, k_cache, v_cache, block_table, cache_seqlens, *, softmax_scale: float | None = None,
                kernel: str = "auto", constants: dict | None = None, out=None) -> Planned:
    """Decode over a paged cache, bound to its arrays.

    `run()` returns (o, lse) and follows lengths as they grow.

    Parameters
    ----------
    q : array, [B, 1, H, D]
        One new query a sequence; float16 or bfloat16.
    k_cache, v_cache : array, [num_pages, page_size, HKV, D]
        Any page size; views of an interleaved pool are taken as they are.
    block_table : int32 array, [B, max_pages]
        Pages of each sequence, in order; entries behind its last page may hold anything.
    cache_seqlens : int32 array, [B]
        Keys of each sequence; 0 gives o = 0, lse = −inf. Values on a GPU are checked with CUATTN_CHECK=1
        only.
    softmax_scale, kernel, constants, out
        As in `plan_attention`; decode kernels. "auto" is paged_stream on a GPU, whose parts of a sequence depend
        on the lengths of all, and elsewhere or with constants paged: give it `splits` where a row's bits must not depend on the
        batch. A call of paged_stream that is not planned beforehand clears its counters first.

    Returns
    -------
    Planned
        Of o, like q, and lse, float32 [B, H, 1].

    Raises
    ------
    ContractError, Unsupported, MachineUnavailable, CompileError
    """
    _check_options(False, constants, kernel)
    row = _choose(kernel, "decode", DECODE[-1])
    contract.rank("q", q, "B, 1, H, D")
    _check_ranks_of_cache(k_cache, v_cache, block_table)
    binding = Binding(q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table,
                      cache_seqlens=cache_seqlens)
    t = binding.tensors
    (b, m, h, d), (_, page_size, hkv, _) = t["q"].shape, t["k_cache"].shape
    if m != 1:
        raise contract.refuse("q", "one query a sequence, (B, 1, H, D)", tuple(q.shape),
                              "use attention for several")
    contract.dtype("q", t["q"], row.dtypes)
    contract.same("k_cache.dtype", t["k_cache"].dtype, "q", t["q"].dtype)
    contract.same("k_cache head dim", t["k_cache"].shape[3], "q", d)
    contract.same("block_table rows", t["block_table"].shape[0], "q", b)
    contract.heads(h, hkv)
    contract.head_dim(d, row)
    contract.grid(b, h)
    _check_features(row, h, hkv)
    contract.vectors("q", t["q"])
    _check_cache(binding)
    inputs = dict(t)
    o = binding.output("o", (b, 1, h, d), t["q"].dtype, out)
    _check_out(t["o"], inputs)
    lse = binding.output("lse", (b, h, 1), "float32")
    shape = DecodeShape(b, h, hkv, d, page_size, t["block_table"].shape[1], t["q"].dtype)
    scalars = {"softmax_scale": contract.scale(softmax_scale, d)}
    names = DECODE if kernel == "auto" and not constants else (row.name,)
    return _planned_by_first(names, binding, shape, constants, (o, lse), scalars,
                             lengths=binding.source("cache_seqlens"))


def decode(q, k_cache, v_cache, block_table, cache_seqlens, *, softmax_scale: float | None = None,
           kernel: str = "auto", constants: dict | None = None, out=None, return_lse: bool = False):
    """Attention of one new query a sequence over a paged cache. See `plan_decode`.

    Returns
    -------
    o, or (o, lse) with `return_lse`.
    """
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table,
              "cache_seqlens": cache_seqlens}
    options = {"softmax_scale": softmax_scale, "kernel": kernel}
    o, lse = _run(plan_decode, tuple(arrays.values()), tuple(arrays), ("o", "lse"), options, constants, out)
    return (o, lse) if return_lse else o


def _check_rope(row: Row, cos, sin, q, interleaved) -> dict:
    """The arrays that rotate, by name: the two tables, or none, and queries beside them."""
    if not isinstance(interleaved, (bool, np.bool_)):
        raise contract.refuse("interleaved", "True or False", type(interleaved).__name__, "name one")
    given = {name: x for name, x in (("cos", cos), ("sin", sin), ("q", q)) if x is not None}
    if given and not {"cos", "sin"} <= set(given):
        missing = "sin" if "cos" in given else "cos"
        raise contract.refuse(missing, f"a table beside {next(iter(given))}", None, "give cos and sin")
    if interleaved and not given:
        raise contract.refuse("interleaved", "False without tables to rotate by", True, "give cos and sin")
    if bool(given) != ("rope" in row.features):
        expected, got = ("None", "a table") if given else ("a table", "None")
        raise contract.refuse("cos", f"{expected} for kernel '{row.name}'", got, "choose another kernel")
    for name in ("cos", "sin"):
        if given:
            contract.rank(name, given[name], "max_position, rotary_dim / 2")
    if q is not None:
        contract.rank("q", q, "B, T, H, D")
    return given


def _check_angles(t: dict[str, Tensor]) -> None:
    """Shapes and types of what rotates beside k, and of what is rotated with it."""
    b, count, _, d = t["k"].shape
    contract.same("sin.shape", t["sin"].shape, "cos", t["cos"].shape)
    columns = t["cos"].shape[1]
    if columns % 2 or not 0 < columns <= d // 2:
        raise contract.refuse("cos", f"an even number of columns up to {d // 2}, half the elements to rotate",
                              columns, "check its shape (max_position, rotary_dim / 2)")
    for name in ("cos", "sin"):
        contract.dtype(name, t[name], ("float32",))
        contract.vectors(name, t[name], contract.PAIR)
    if "q" in t:
        contract.same("q.dtype", t["q"].dtype, "k", t["k"].dtype)
        contract.same("q.shape without its heads", (*t["q"].shape[:2], t["q"].shape[3]), "k", (b, count, d))
        contract.grid(b, t["q"].shape[2])
        contract.vectors("q", t["q"])


def plan_append(k, v, k_cache, v_cache, block_table, cache_seqlens, *, cos=None, sin=None, q=None,
                interleaved: bool = False, kernel: str = "auto", constants: dict | None = None) -> Planned:
    """New K and V rows into a paged cache, bound to its arrays; K, and queries beside it, rotated on the way.

    The rotation is RoPE's (RoFormer, arXiv:2104.09864): pairs (x, y) of elements become
    (x cos − y sin, y cos + x sin), in float32 and rounded once.

    Parameters
    ----------
    k, v : array, [B, T, HKV, D]
        T new rows a sequence.
    k_cache, v_cache, block_table
        As in `plan_decode`; the caches are written in place.
    cache_seqlens : int32 array, [B]
        Rows each sequence holds already: row t goes to position cache_seqlens[b] + t. It is not changed.
    cos, sin : float32 array, [max_position, rotary_dim / 2], optional
        Row p holds the cosines and sines by which the pairs of a row at position p are rotated; 8-byte
        aligned. rotary_dim is a multiple of 4, at most D; elements from it on stay as they are.
    q : array, [B, T, H, D], optional
        Queries at the same positions, to be rotated in the same launch; k's dtype.
    interleaved : bool
        Pair i is the elements 2i and 2i + 1 (GPT-J), else i and i + rotary_dim / 2 (GPT-NeoX, Llama).
    kernel : str
        A kernel of this kind; "auto" is append_rope where there are tables, else append.

    Returns
    -------
    Planned
        Of the two caches and, where q is given, the rotated queries, like q.

    Raises
    ------
    ContractError
        Also where the block table has no room for a row, or the angles no row for its position (checked as in
        `plan_decode`).
    """
    _check_options(False, constants, kernel)
    row = _choose(kernel, "cache", "append" if cos is None and sin is None and q is None else "append_rope")
    rope = _check_rope(row, cos, sin, q, interleaved)
    for name, x in (("k", k), ("v", v)):
        contract.rank(name, x, "B, T, HKV, D")
    _check_ranks_of_cache(k_cache, v_cache, block_table)
    binding = Binding(k=k, v=v, k_cache=k_cache, v_cache=v_cache, block_table=block_table,
                      cache_seqlens=cache_seqlens, **rope)
    t = binding.tensors
    b, count, hkv, d = t["k"].shape
    page_size = t["k_cache"].shape[1]
    contract.dtype("k", t["k"], row.dtypes)
    contract.same("v.shape", t["v"].shape, "k", t["k"].shape)
    contract.same("v.dtype", t["v"].dtype, "k", t["k"].dtype)
    contract.same("k_cache.dtype", t["k_cache"].dtype, "k", t["k"].dtype)
    contract.same("k_cache heads and head dim", t["k_cache"].shape[2:], "k", (hkv, d))
    contract.same("block_table rows", t["block_table"].shape[0], "k", b)
    contract.head_dim(d, row)
    contract.grid(b, hkv)
    for name in ("k", "v"):
        contract.vectors(name, t[name])
    for name in ("k_cache", "v_cache"):
        contract.writable(name, t[name])
    _check_cache(binding, more=count)
    shape, outputs = AppendShape(b, count, hkv, d, page_size, t["k"].dtype), [k_cache, v_cache]
    if rope:
        _check_angles(t)
        if _checks_values(binding):
            contract.positions(binding.values("cache_seqlens"), count, t["cos"].shape[0])
        shape = replace(shape, rotary=2 * t["cos"].shape[1], interleaved=bool(interleaved))
    if "q" in rope:
        outputs.append(binding.output("q_rotated", t["q"].shape, t["q"].dtype))
        shape = replace(shape, h=t["q"].shape[2])
    binding.inout("k_cache")
    binding.inout("v_cache")
    return binding.planned(row, shape, constants, tuple(outputs), {})


def append_kv(k, v, k_cache, v_cache, block_table, cache_seqlens, *, cos=None, sin=None, q=None,
              interleaved: bool = False):
    """Writes new K and V rows into a paged cache, K rotated where there are tables. See `plan_append`.

    Returns
    -------
    The rotated q, where one is given; else None.
    """
    arrays = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table,
              "cache_seqlens": cache_seqlens, "cos": cos, "sin": sin, "q": q}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    returns = ("q_rotated",) if q is not None else ()
    outputs = _run(plan_append, tuple(arrays.values()), tuple(arrays), returns, {"interleaved": interleaved})
    return outputs[-1] if returns else None


def _check_other_pool(t: dict[str, Tensor]) -> None:
    """Of a pool that pages are copied to: pages like those of the first, in memory of its own."""
    contract.same("v_out.shape", t["v_out"].shape, "k_out", t["k_out"].shape)
    for name in ("k_out", "v_out"):
        contract.same(f"{name}.shape without its pages", t[name].shape[1:], "k_cache", t["k_cache"].shape[1:])
        contract.same(f"{name}.dtype", t[name].dtype, "k_cache", t["k_cache"].dtype)
        contract.vectors(name, t[name])
        contract.apart(name, t[name], {cache: t[cache] for cache in ("k_cache", "v_cache")})
    if t["v_out"].address == t["k_out"].address and not t["v_out"].empty:
        raise contract.refuse("v_out", "memory apart from k_out", "the same memory",
                              "give it memory of its own")


def plan_copy_pages(k_cache, v_cache, src, dst, *, k_out=None, v_out=None, kernel: str = "auto",
                    constants: dict | None = None) -> Planned:
    """Whole pages of K and of V copied to other pages in one launch, bound to its arrays.

    What a fork takes that writes to a shared page (copy-on-write: PagedAttention, arXiv:2309.06180, section
    4.4), a pool that is packed anew, or a sequence that is swapped to another pool and back.

    Parameters
    ----------
    k_cache, v_cache : array, [num_pages, page_size, HKV, D]
        As in `plan_decode`, but elements of any type of 1, 2, 4 or 8 bytes, and rows of whole 16-byte words.
        Written in place unless there is another pool.
    src, dst : int32 array, [n]
        Page src[i] is copied to page dst[i], the pairs in any order: no page may be the destination of two
        pairs, nor within one pool the source of one and the destination of another. Values on a GPU are
        checked with CUATTN_CHECK=1 only.
    k_out, v_out : array, [num_pages_out, page_size, HKV, D], optional
        Another pool to copy to, in memory of its own.

    Returns
    -------
    Planned
        Of the two caches that are written.

    Raises
    ------
    ContractError, Unsupported, MachineUnavailable, CompileError
    """
    _check_options(False, constants, kernel)
    row = _choose(kernel, "pages", "copy_pages")
    to = {name: x for name, x in (("k_out", k_out), ("v_out", v_out)) if x is not None}
    if len(to) == 1:
        missing, = {"k_out", "v_out"} - set(to)
        raise contract.refuse(missing, f"a cache beside {next(iter(to))}", None, "give both or neither")
    _check_ranks_of_pool(k_cache=k_cache, v_cache=v_cache, **to)
    for name, x in (("src", src), ("dst", dst)):
        contract.rank(name, x, "n")
    binding = Binding(k_cache=k_cache, v_cache=v_cache, src=src, dst=dst, **to)
    t = binding.tensors
    contract.words(t["k_cache"])
    _check_pool(t)
    if to:
        _check_other_pool(t)
    for name in to or ("k_cache", "v_cache"):
        contract.writable(name, t[name])
        binding.inout(name)
    contract.same("dst.shape", t["dst"].shape, "src", t["src"].shape)
    for name in ("src", "dst"):
        contract.dtype(name, t[name], ("int32",))
        contract.contiguous(name, t[name])
    pages, page_size, hkv, d = t["k_cache"].shape
    if _checks_values(binding):
        pages_out = t["k_out"].shape[0] if to else pages
        contract.page_pairs(pages, pages_out, binding.values("src"), binding.values("dst"), within=not to)
    shape = PagesShape(t["src"].shape[0], page_size, hkv, d, t["k_cache"].itemsize)
    return binding.planned(row, shape, constants, tuple(to.values()) or (k_cache, v_cache), {})


def copy_pages(k_cache, v_cache, src, dst, *, k_out=None, v_out=None) -> None:
    """Copies whole pages of a paged cache, within its pool or to another. See `plan_copy_pages`."""
    arrays = {"k_cache": k_cache, "v_cache": v_cache, "src": src, "dst": dst}
    if k_out is None and v_out is None:
        _run(plan_copy_pages, tuple(arrays.values()), tuple(arrays), (), {})
    else:  # whether the pools lie apart is asked of each call
        plan_copy_pages(**arrays, k_out=k_out, v_out=v_out).run()


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
    contract.dtype("o_a", t["o_a"], (*HALF, "float32"))
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
