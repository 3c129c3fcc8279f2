"""The operations of a paged cache: attention over it, new rows into it, pages of it copied."""
from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from cuattn import contract, dispatch
from cuattn.binding import Binding, Planned
from cuattn.kernels import mla
from cuattn.kernels.base import AppendShape, DecodeShape, PagesShape, Row
from cuattn.machine import Tensor

MOST_QUERIES = 8  # a sequence that decode takes


def _check_ranks_of_cache(k_cache, v_cache, block_table) -> None:
    _check_ranks_of_pool(k_cache=k_cache, v_cache=v_cache)
    contract.rank("block_table", block_table, "B, max_pages")


def _check_ranks_of_pool(**caches) -> None:
    for name, x in caches.items():
        contract.rank(name, x, "num_pages, page_size, HKV, D")


def _check_page_size(name: str, cache: Tensor) -> None:
    if cache.shape[1] == 0:
        raise contract.refuse(name, "a page size of at least 1", 0,
                              "check its shape (num_pages, page_size, HKV, D)")


def _check_pool(t: dict[str, Tensor]) -> None:
    _check_page_size("k_cache", t["k_cache"])
    contract.same("v_cache.shape", t["v_cache"].shape, "k_cache", t["k_cache"].shape)
    contract.same("v_cache.dtype", t["v_cache"].dtype, "k_cache", t["k_cache"].dtype)
    for name in ("k_cache", "v_cache"):
        contract.vectors(name, t[name])


def _check_cache(binding: Binding, more: int = 0) -> None:
    """Shapes of a cache, its table and lengths; `more` rows are about to be written behind each length.

    Their values too where that costs no synchronisation, or with CUATTN_CHECK=1.
    """
    _check_pool(binding.tensors)
    _check_table(binding, "k_cache", more)


def _check_table(binding: Binding, cache: str, more: int = 0) -> None:
    """A table of the pages of the cache of that name, and lengths; as `_check_cache` has it."""
    t = binding.tensors
    b, (pages, page_size) = t["block_table"].shape[0], t[cache].shape[:2]
    contract.same("cache_seqlens.shape", t["cache_seqlens"].shape, "block_table", (b,))
    for name in ("block_table", "cache_seqlens"):
        contract.dtype(name, t[name], ("int32",))
        contract.contiguous(name, t[name])
    if dispatch.checks_values(binding):
        table, lengths = (binding.values(name) for name in ("block_table", "cache_seqlens"))
        contract.page_table(pages, page_size, table, lengths, more)


def _quantised(t: dict[str, Tensor], other: str, kv_dtype: str | None, numbers: dict) -> tuple[str | None, str]:
    """What the caches hold beside `other`, and the kind of their scales, which kernels find in one line."""
    stored = contract.kv_dtype(kv_dtype, t["k_cache"], other, t[other].dtype)
    kind = contract.scale_kind(stored, numbers, t)
    for name in ("k_scale", "v_scale") if kind != "one" else ():
        t[name] = replace(t[name], shape=(math.prod(t[name].shape),), strides=(1,))
    return stored, kind


def plan_decode(q, k_cache, v_cache, block_table, cache_seqlens, *, causal: bool = True,
                softmax_scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
                softcap: float = 0.0, sinks=None, k_scale=None, v_scale=None, kv_dtype: str | None = None,
                kernel: str = "auto", constants: dict | None = None, out=None) -> Planned:
    """Decode over a paged cache, bound to its arrays.

    `run()` returns (o, lse) and follows lengths as they grow.

    Parameters
    ----------
    q : array, [B, M, H, D]
        The last M tokens of each sequence, whose keys the cache holds already: 1, or up to 8 that speculative
        decoding verifies together; float16 or bfloat16.
    k_cache, v_cache : array, [num_pages, page_size, HKV, D]
        Any page size; views of an interleaved pool are taken as they are. Of q's dtype or quantised, float8_e4m3fn
        (`ml_dtypes`, PyTorch) or int8: then the head dim is a multiple of 32.
    block_table : int32 array, [B, max_pages]
        Pages of each sequence, in order; entries behind its last page may hold anything.
    cache_seqlens : int32 array, [B]
        Keys of each sequence, those of its queries included. Values on a GPU are checked with CUATTN_CHECK=1
        only.
    causal : bool
        Bottom-right aligned: query m sees keys up to m + N − M, of N, and so none where a sequence is shorter
        than M − m. False shows all queries all keys, as flash-attention's `flash_attn_with_kvcache` does
        unless it is told otherwise; of one query nothing is hidden either way.
    window_size : (int, int)
        As in `plan_attention`. Keys before the first query's window are not read.
    softcap, sinks
        As in `plan_attention`.
    k_scale, v_scale : float, or float32 array [HKV] or [num_pages, HKV], optional
        What each number of a quantised cache is times, 1 by default: of the whole cache, of a KV head, or of
        its part in a page.
    kv_dtype : {"float8_e4m3", "int8"}, optional
        What a cache given as uint8 holds, as CuPy has no e4m3.
    softmax_scale, kernel, constants, out
        As in `plan_attention`; decode kernels. "auto" is paged_stream on a GPU, whose parts of a sequence
        depend on the lengths of all, and elsewhere or with constants paged: give it `splits` where a row's
        bits must not depend on the batch. A quantised cache paged_stream takes alone. A call of paged_stream
        that is not planned beforehand clears its counters first.

    Returns
    -------
    Planned
        Of o, like q, and lse, float32 [B, H, M]. A query that sees no key gives o = 0, lse = −inf, or its
        head's sink.

    Raises
    ------
    ContractError, Unsupported, MachineUnavailable, CompileError
    """
    dispatch.check_options(causal, constants, kernel)
    row = dispatch.choose(kernel, "decode", dispatch.DECODE[-1])
    contract.rank("q", q, "B, M, H, D")
    _check_ranks_of_cache(k_cache, v_cache, block_table)
    numbers, scales = contract.kv_scales(k_scale, v_scale)
    binding = dispatch.bound(sinks, q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table,
                             cache_seqlens=cache_seqlens, **scales)
    t = binding.tensors
    (b, m, h, d), (_, page_size, hkv, _) = t["q"].shape, t["k_cache"].shape
    if not 1 <= m <= MOST_QUERIES:
        raise contract.refuse("q", f"1 to {MOST_QUERIES} queries a sequence, (B, M, H, D)", tuple(q.shape),
                              "use attention_varlen for more")
    contract.dtype("q", t["q"], row.dtypes)
    stored, kind = _quantised(t, "q", kv_dtype, numbers)
    pages = t["block_table"].shape[1]
    causal, window = contract.window(window_size, bool(causal), m, pages * page_size)
    scalars = {"softmax_scale": contract.scale(softmax_scale, d), "softcap": contract.softcap(softcap), **numbers}
    shape = DecodeShape(b, h, hkv, d, page_size, pages, t["q"].dtype, stored, kind, m, causal and m > 1, window,
                        scalars["softcap"] > 0, sinks is not None)
    names = dispatch.offering(dispatch.DECODE, shape.features) if kernel == "auto" else (row.name,)
    row = dispatch.choose(kernel, "decode", names[-1])
    contract.same("k_cache head dim", t["k_cache"].shape[3], "q", d)
    contract.same("block_table rows", t["block_table"].shape[0], "q", b)
    contract.heads(h, hkv)
    contract.head_dim(d, row)
    if sinks is not None:
        contract.sinks(t["sinks"], h)
    contract.grid(b, h)
    dispatch.check_features(row, h, hkv, features=shape.features)
    contract.vectors("q", t["q"])
    _check_cache(binding)
    inputs = dict(t)
    o = binding.output("o", (b, m, h, d), t["q"].dtype, out)
    dispatch.check_out(t["o"], inputs)
    lse = binding.output("lse", (b, h, m), "float32")
    return dispatch.planned_by_first((row.name,) if constants else names, binding, shape, constants, (o, lse), scalars,
                                     lengths=binding.source("cache_seqlens"))


def decode(q, k_cache, v_cache, block_table, cache_seqlens, *, causal: bool = True,
           softmax_scale: float | None = None, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
           sinks=None, k_scale=None, v_scale=None, kv_dtype: str | None = None, kernel: str = "auto",
           constants: dict | None = None, out=None, return_lse: bool = False):
    """Attention of each sequence's last tokens over a paged cache. See `plan_decode`.

    Returns
    -------
    o, or (o, lse) with `return_lse`.
    """
    numbers, scales = contract.kv_scales(k_scale, v_scale)
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table,
              "cache_seqlens": cache_seqlens, **scales, **({} if sinks is None else {"sinks": sinks})}
    options = {"causal": causal, "softmax_scale": softmax_scale, "window_size": window_size,
               "softcap": softcap, "kernel": kernel, "kv_dtype": kv_dtype, **numbers}
    o, lse = dispatch.run(plan_decode, arrays, ("o", "lse"), options, constants, out)
    return (o, lse) if return_lse else o


def plan_decode_mla(q, kv_cache, block_table, cache_seqlens, *, softmax_scale: float, kernel: str = "auto",
                    constants: dict | None = None, out=None) -> Planned:
    """Decode of multi-head latent attention over a paged cache, bound to its arrays.

    All query heads attend to one row a key, whose first 512 elements are its value too (DeepSeek-V2,
    arXiv:2405.04434, section 2.1, with the projections absorbed): what FlashMLA's `flash_mla_with_kvcache`
    and FlashInfer's `BatchMLAPagedAttentionWrapper` compute. `run()` returns (o, lse) and follows lengths as
    they grow.

    Parameters
    ----------
    q : array, [B, 1, H, 576]
        One new query a sequence, 512 elements for the latent and 64 with RoPE; float16 or bfloat16. Any H: 16
        to 128 are usual.
    kv_cache : array, [num_pages, page_size, 1, 576]
        Latents of 512 elements and 64 rotated ones behind them. Any page size.
    block_table, cache_seqlens, out
        As in `plan_decode`.
    softmax_scale : float
        The model's, of the head dim before absorption: 1/sqrt(192) for DeepSeek-V2 and -V3 without the factor
        of a longer context. It does not follow from 576, so there is no default.
    kernel, constants
        A kernel of this kind; "auto" is mla_hopper on sm_90a, else, and where constants are given, mla. Their
        parts of a sequence depend on the lengths of all.

    Returns
    -------
    Planned
        Of o, q's dtype [B, 1, H, 512], and lse, float32 [B, H, 1], natural.

    Raises
    ------
    ContractError, Unsupported, MachineUnavailable, CompileError
    """
    dispatch.check_options(False, constants, kernel)
    row = dispatch.choose(kernel, "mla", dispatch.MLA[-1])
    contract.rank("q", q, "B, 1, H, D")
    contract.rank("kv_cache", kv_cache, "num_pages, page_size, 1, D")
    contract.rank("block_table", block_table, "B, max_pages")
    binding = Binding(q=q, kv_cache=kv_cache, block_table=block_table, cache_seqlens=cache_seqlens)
    t = binding.tensors
    b, m, h, d = t["q"].shape
    page_size, heads = t["kv_cache"].shape[1:3]
    if m != 1:
        raise contract.refuse("q", "one query a sequence, (B, 1, H, D)", tuple(q.shape), "split the call")
    if d != mla.WIDTH:
        parts = f"{mla.LATENT} of the latent and {mla.ROPE} of RoPE"
        raise contract.refuse("q", f"a head dim of {mla.WIDTH}, {parts}", d,
                              "absorb the key's projection into q first")
    if heads != 1:
        raise contract.refuse("kv_cache", "one latent head for all of q's, (num_pages, page_size, 1, D)",
                              heads, "use decode for several")
    contract.dtype("q", t["q"], row.dtypes)
    contract.same("kv_cache.dtype", t["kv_cache"].dtype, "q", t["q"].dtype)
    contract.same("kv_cache head dim", t["kv_cache"].shape[3], "q", d)
    contract.same("block_table rows", t["block_table"].shape[0], "q", b)
    contract.grid(b, h)
    _check_page_size("kv_cache", t["kv_cache"])
    for name in ("q", "kv_cache"):
        contract.vectors(name, t[name])
    _check_table(binding, "kv_cache")
    scalars = {"softmax_scale": contract.scale(softmax_scale, None)}
    inputs = dict(t)
    o = binding.output("o", (b, 1, h, mla.LATENT), t["q"].dtype, out)
    dispatch.check_out(t["o"], inputs)
    lse = binding.output("lse", (b, h, 1), "float32")
    shape = DecodeShape(b, h, 1, d, page_size, t["block_table"].shape[1], t["q"].dtype)
    names = dispatch.MLA if kernel == "auto" and not constants else (row.name,)
    return dispatch.planned_by_first(names, binding, shape, constants, (o, lse), scalars,
                                     lengths=binding.source("cache_seqlens"))


def decode_mla(q, kv_cache, block_table, cache_seqlens, *, softmax_scale: float, kernel: str = "auto",
               constants: dict | None = None, out=None, return_lse: bool = False):
    """Latent attention of one new query a sequence over a paged cache. See `plan_decode_mla`.

    Returns
    -------
    o, or (o, lse) with `return_lse`.
    """
    arrays = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "cache_seqlens": cache_seqlens}
    options = {"softmax_scale": softmax_scale, "kernel": kernel}
    o, lse = dispatch.run(plan_decode_mla, arrays, ("o", "lse"), options, constants, out)
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
                interleaved: bool = False, k_scale=None, v_scale=None, kv_dtype: str | None = None,
                kernel: str = "auto", constants: dict | None = None) -> Planned:
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
    k_scale, v_scale, kv_dtype
        Of a quantised cache, as in `plan_decode`: what is stored is the row divided by the scale of its place, in
        float32 and rounded once to the nearest number, the even one of two as near, and beyond the largest to it.
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
    dispatch.check_options(False, constants, kernel)
    default = "append" if cos is None and sin is None and q is None else "append_rope"
    row = dispatch.choose(kernel, "cache", default)
    rope = _check_rope(row, cos, sin, q, interleaved)
    for name, x in (("k", k), ("v", v)):
        contract.rank(name, x, "B, T, HKV, D")
    _check_ranks_of_cache(k_cache, v_cache, block_table)
    numbers, scales = contract.kv_scales(k_scale, v_scale)
    binding = Binding(k=k, v=v, k_cache=k_cache, v_cache=v_cache, block_table=block_table,
                      cache_seqlens=cache_seqlens, **rope, **scales)
    t = binding.tensors
    b, count, hkv, d = t["k"].shape
    page_size = t["k_cache"].shape[1]
    contract.dtype("k", t["k"], row.dtypes)
    contract.same("v.shape", t["v"].shape, "k", t["k"].shape)
    contract.same("v.dtype", t["v"].dtype, "k", t["k"].dtype)
    stored, kind = _quantised(t, "k", kv_dtype, numbers)
    contract.same("k_cache heads and head dim", t["k_cache"].shape[2:], "k", (hkv, d))
    contract.same("block_table rows", t["block_table"].shape[0], "k", b)
    contract.head_dim(d, row)
    contract.grid(b, hkv)
    for name in ("k", "v"):
        contract.vectors(name, t[name])
    for name in ("k_cache", "v_cache"):
        contract.writable(name, t[name])
    _check_cache(binding, more=count)
    shape = AppendShape(b, count, hkv, d, page_size, t["k"].dtype, kv_dtype=stored, scales=kind)
    dispatch.check_features(row, hkv, hkv, features=shape.features)
    outputs = [k_cache, v_cache]
    if rope:
        _check_angles(t)
        if dispatch.checks_values(binding):
            contract.positions(binding.values("cache_seqlens"), count, t["cos"].shape[0])
        shape = replace(shape, rotary=2 * t["cos"].shape[1], interleaved=bool(interleaved))
    if "q" in rope:
        outputs.append(binding.output("q_rotated", t["q"].shape, t["q"].dtype))
        shape = replace(shape, h=t["q"].shape[2])
    binding.inout("k_cache")
    binding.inout("v_cache")
    return binding.planned(row, shape, constants, tuple(outputs), numbers)


def append_kv(k, v, k_cache, v_cache, block_table, cache_seqlens, *, cos=None, sin=None, q=None,
              interleaved: bool = False, k_scale=None, v_scale=None, kv_dtype: str | None = None):
    """Writes new K and V rows into a paged cache, K rotated where there are tables. See `plan_append`.

    Returns
    -------
    The rotated q, where one is given; else None.
    """
    numbers, scales = contract.kv_scales(k_scale, v_scale)
    arrays = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table,
              "cache_seqlens": cache_seqlens, "cos": cos, "sin": sin, "q": q, **scales}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    returns = ("q_rotated",) if q is not None else ()
    options = {"interleaved": interleaved, **numbers, "kv_dtype": kv_dtype}
    outputs = dispatch.run(plan_append, arrays, returns, options)
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
    dispatch.check_options(False, constants, kernel)
    row = dispatch.choose(kernel, "pages", "copy_pages")
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
    if dispatch.checks_values(binding):
        pages_out = t["k_out"].shape[0] if to else pages
        contract.page_pairs(pages, pages_out, binding.values("src"), binding.values("dst"), within=not to)
    shape = PagesShape(t["src"].shape[0], page_size, hkv, d, t["k_cache"].itemsize)
    return binding.planned(row, shape, constants, tuple(to.values()) or (k_cache, v_cache), {})


def copy_pages(k_cache, v_cache, src, dst, *, k_out=None, v_out=None) -> None:
    """Copies whole pages of a paged cache, within its pool or to another. See `plan_copy_pages`."""
    arrays = {"k_cache": k_cache, "v_cache": v_cache, "src": src, "dst": dst}
    if k_out is None and v_out is None:
        dispatch.run(plan_copy_pages, arrays, (), {})
    else:  # whether the pools lie apart is asked of each call
        plan_copy_pages(**arrays, k_out=k_out, v_out=v_out).run()
