"""Attention of dense batches and of packed sequences."""
from __future__ import annotations

import numpy as np

from cuattn import contract, dispatch
from cuattn.binding import Binding, Planned
from cuattn.kernels.base import Row
from cuattn.kernels.shapes import AttentionShape
from cuattn.machine import Tensor


def _check_arrays(binding: Binding, row: Row, paged: bool = False) -> None:
    """Dtypes, head dims, heads and alignment of q, k, v, whose batches agree, and of the sinks."""
    tq, tk, tv = (binding.tensors[name] for name in "qkv")
    (b, _, h, d), (n, hkv) = tq.shape, tk.shape[1:3]
    if paged:
        b = tk.shape[0]  # a pool of pages
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


def _shape(binding: Binding, row: Row, b: int, m: int, n: int, scores: dict, **packed):
    """The shape of B sequences of M queries and N keys, or at most as many, and the kernel's numbers.

    `scores`: what becomes of scores, as `plan_attention` takes it; `packed`: of an AttentionShape.
    """
    tq, tk, tv = (binding.tensors[name] for name in "qkv")
    (h, d), hkv, dv = tq.shape[2:], tk.shape[2], tv.shape[3]
    contract.grid(b, h)
    causal, window = contract.window(scores["window_size"], bool(scores["causal"]), m, n)
    scalars = {"softmax_scale": contract.scale(scores["softmax_scale"], d),
               "softcap": contract.softcap(scores["softcap"])}
    shape = AttentionShape(b, h, hkv, m, n, d, tq.dtype, causal, window, scalars["softcap"] > 0,
                           "sinks" in binding.tensors, dv=None if dv == d else dv, **packed)
    dispatch.check_features(row, h, hkv, causal, shape.features)
    return shape, scalars


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
        A prefill kernel's name. "auto" is flash_hopper on sm_90a where its copies reach the arrays (all
        strides positive multiples of 16 bytes), else flash.
    constants : dict, optional
        Tunables of that kernel (see its row), of flash with "auto". Without any, those that `tune` found on
        this device, or the plan's own choice.
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
    dispatch.check_options(causal, constants, kernel)
    row = dispatch.choose(kernel, "prefill", dispatch.PREFILL[-1])
    for name, x in (("q", q), ("k", k), ("v", v)):
        contract.rank(name, x, "B, M, H, D" if name == "q" else "B, N, HKV, D")
    layout = contract.layout(layout, q.shape, k.shape)
    binding = dispatch.bound(q=q, k=k, v=v, sinks=sinks)
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
    dispatch.check_out(binding.tensors["o"], inputs)
    lse = binding.output("lse", (b, h, m), "float32")
    names = dispatch.offering(dispatch.PREFILL, shape.features) if kernel == "auto" and not constants else (row.name,)
    return dispatch.planned_by_first(names, binding, shape, constants, (o, lse), scalars)


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
    o, lse = dispatch.run(plan_attention, arrays, ("o", "lse"), options, constants, out, reads_values=False)
    return (o, lse) if return_lse else o


def plan_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q: int, max_seqlen_k: int,
                          block_table=None, causal: bool = False, softmax_scale: float | None = None,
                          window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks=None,
                          kernel: str = "auto", constants: dict | None = None, out=None) -> Planned:
    """Attention of B sequences packed one behind the other, bound to its arrays; `run()` returns (o, lse).

    Parameters
    ----------
    q : array, [total_q, H, D]
        As in `plan_attention`.
    k, v : array, [total_k, HKV, D]
        With `block_table` a paged cache instead, [num_pages, page_size, HKV, D]: a prompt's next chunk attends
        to all that is in the cache.
    cu_seqlens_q, cu_seqlens_k : int32 array, [B + 1]
        Sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1] − 1; it may have none. Rows of o and lse that no
        sequence has are not written. Of a paged cache only the differences count, which are the lengths. Values
        on a GPU are checked with CUATTN_CHECK=1 only.
    max_seqlen_q, max_seqlen_k : int
        At least the length of the longest sequence; of the queries beyond it nothing is computed.
    block_table : int32 array, [B, max_pages], optional
        Pages of each sequence, in order; entries behind its last page may hold anything. Any page size;
        flash_hopper takes multiples of 8.
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
    dispatch.check_options(causal, constants, kernel)
    row, paged = dispatch.choose(kernel, "prefill", dispatch.PREFILL[-1]), block_table is not None
    keys = "num_pages, page_size, HKV, D" if paged else "total_k, HKV, D"
    for name, x in (("q", q), ("k", k), ("v", v)):
        contract.rank(name, x, "total_q, H, D" if name == "q" else keys)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        contract.rank(name, x, "B + 1")
    arrays = {"block_table": block_table} if paged else {}
    binding = dispatch.bound(sinks, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **arrays)
    binding.tensors |= {name: _as_batch(binding.tensors[name]) for name in ("q" if paged else "qkv")}
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    _check_offsets(binding, longest)
    _check_arrays(binding, row, paged)
    rows_k, page_size = binding.tensors["k"].shape[:2]
    if paged:
        _check_pages(binding)
    scores = {"causal": causal, "softmax_scale": softmax_scale, "window_size": window_size,
              "softcap": softcap}
    b = binding.tensors["cu_seqlens_q"].shape[0] - 1
    shape, scalars = _shape(binding, row, b, *(int(x) for x in longest.values()), scores,
                            packed=(q.shape[0], rows_k * page_size), page_size=page_size if paged else None)
    inputs = dict(binding.tensors)
    o = binding.output("o", (*q.shape[:-1], shape.value_dim), shape.dtype, out)
    lse = binding.output("lse", (shape.h, q.shape[0]), "float32")
    binding.tensors |= {name: _as_batch(binding.tensors[name]) for name in ("o", "lse")}
    dispatch.check_out(binding.tensors["o"], inputs)
    names = dispatch.offering(dispatch.PREFILL, shape.features) if kernel == "auto" and not constants else (row.name,)
    offsets = tuple(binding.source(f"cu_seqlens_{side}") for side in "qk")
    return dispatch.planned_by_first(names, binding, shape, constants, (o, lse), scalars, lengths=offsets)


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q: int, max_seqlen_k: int, *,
                     block_table=None, causal: bool = False, softmax_scale: float | None = None,
                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks=None,
                     kernel: str = "auto", constants: dict | None = None, out=None, return_lse: bool = False):
    """Attention of packed sequences. See `plan_attention_varlen`; the arguments are those of flash-attention.

    Returns
    -------
    o, or (o, lse) with `return_lse`.
    """
    arrays = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
              **{name: x for name, x in (("block_table", block_table), ("sinks", sinks)) if x is not None}}
    options = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "causal": causal,
               "softmax_scale": softmax_scale, "window_size": window_size, "softcap": softcap,
               "kernel": kernel}
    o, lse = dispatch.run(plan_attention_varlen, arrays, ("o", "lse"), options, constants, out)
    return (o, lse) if return_lse else o


def _check_pages(binding: Binding) -> None:
    """A table of k's and v's pages; its values if `checks_values`."""
    t = binding.tensors
    (pages, page_size), table = t["k"].shape[:2], t["block_table"]
    contract.rank("block_table", table, "B, max_pages")
    contract.dtype("block_table", table, ("int32",))
    contract.contiguous("block_table", table)
    contract.same("block_table rows", table.shape[0], "cu_seqlens_k, less one,", t["cu_seqlens_k"].shape[0] - 1)
    contract.page_size("k", t["k"])
    if dispatch.checks_values(binding):
        lengths = np.diff(binding.values("cu_seqlens_k").astype(np.int64))
        contract.page_table(pages, page_size, binding.values("block_table"), lengths, name="cu_seqlens_k")


def _as_batch(t: Tensor) -> Tensor:
    """A batch of this one."""
    return Tensor(t.address, (1, *t.shape), (0, *t.strides), t.dtype, t.itemsize, t.array)


def _check_offsets(binding: Binding, longest: dict[str, int]) -> None:
    """Where packed sequences begin and end, and the longest's length; the values if `checks_values`."""
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
        if dispatch.checks_values(binding):
            in_pages = side == "k" and "block_table" in t
            total = np.iinfo(np.int32).max if in_pages else t[side].shape[1]
            contract.offsets(side, binding.values(name), total, int(most))
    contract.same("cu_seqlens_k.shape", t["cu_seqlens_k"].shape, "cu_seqlens_q", t["cu_seqlens_q"].shape)


def _swap(t: Tensor) -> Tensor:
    """(B, H, N, D) as (B, N, H, D)."""
    (b, h, n, d), (sb, sh, sn, sd) = t.shape, t.strides
    return Tensor(t.address, (b, n, h, d), (sb, sn, sh, sd), t.dtype, t.itemsize, t.array)
