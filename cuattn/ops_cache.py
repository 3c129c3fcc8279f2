"""New rows into a paged cache, and pages of it copied."""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from cuattn import contract, dispatch, pool
from cuattn.binding import Binding, Planned
from cuattn.kernels.base import Row
from cuattn.kernels.shapes import AppendShape, PagesShape
from cuattn.machine import Tensor


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
    pool.check_ranks(k_cache, v_cache, block_table)
    numbers, scales = contract.kv_scales(k_scale, v_scale)
    binding = Binding(k=k, v=v, k_cache=k_cache, v_cache=v_cache, block_table=block_table,
                      cache_seqlens=cache_seqlens, **rope, **scales)
    t = binding.tensors
    b, count, hkv, d = t["k"].shape
    page_size = t["k_cache"].shape[1]
    contract.dtype("k", t["k"], row.dtypes)
    contract.same("v.shape", t["v"].shape, "k", t["k"].shape)
    contract.same("v.dtype", t["v"].dtype, "k", t["k"].dtype)
    stored, kind = pool.quantised(t, "k", kv_dtype, numbers)
    contract.same("k_cache heads and head dim", t["k_cache"].shape[2:], "k", (hkv, d))
    contract.same("block_table rows", t["block_table"].shape[0], "k", b)
    contract.head_dim(d, row)
    contract.grid(b, hkv)
    for name in ("k", "v"):
        contract.vectors(name, t[name])
    for name in ("k_cache", "v_cache"):
        contract.writable(name, t[name])
    pool.check_cache(binding, more=count)
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
    pool.check_ranks_of_pool(k_cache=k_cache, v_cache=v_cache, **to)
    for name, x in (("src", src), ("dst", dst)):
        contract.rank(name, x, "n")
    binding = Binding(k_cache=k_cache, v_cache=v_cache, src=src, dst=dst, **to)
    t = binding.tensors
    contract.words(t["k_cache"])
    pool.check_pool(t)
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
