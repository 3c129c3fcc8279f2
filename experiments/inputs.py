"""Random inputs for a case, made where they are used.

Seeded normal values; for prefill, keys of unequal weight in an order of it; page tables in either order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuattn.dense import round_to
from cuattn.kernels.base import ceil_div
from cuattn.quantise import quantise
from cuattn.reference import bits, rotary_tables, widen
from experiments.costs import key_rows, offsets_of, rotates, shared_pages
from experiments.suite import PACKED
from experiments.sweep import window_of

CHUNK = 1 << 26  # float32 values drawn at once: 256 MiB beside the array they fill
KV_SCALES = {"float8_e4m3": 2.0**-6, "int8": 2.0**-5}  # by which N(0, 1) fills a quantised cache: up to ±4
MOST_GRADE = 3.0  # the largest factor of a graded key


def quantised(params: Mapping[str, Any]) -> dict[str, Any]:
    """What a case says of its quantised caches beside the arrays, as `cuattn.decode` takes it; else nothing."""
    if not (held := params.get("kv_dtype")):
        return {}
    return {"kv_dtype": held, "k_scale": KV_SCALES[held], "v_scale": KV_SCALES[held]}


def scores(params: Mapping[str, Any]) -> dict[str, Any]:
    """What a case makes of its scores beside the arrays, as `cuattn.attention` and `decode` take it."""
    return {"window_size": window_of(params), "softcap": params.get("softcap") or 0.0}


def normal(machine, shape: tuple[int, ...], dtype: str, rng):
    """An array of N(0, 1) values in `dtype`.

    Parameters
    ----------
    machine : Machine
    shape : tuple of int
    dtype : str
        Of `KV_SCALES`: uint8, the bytes of values over that scale.
    rng : Generator
        Of the machine's array module.
    """
    out = machine.empty(shape, "uint8" if dtype in KV_SCALES else dtype)
    flat = bits(out).reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        values = rng.standard_normal(part.size, dtype=np.float32)
        if dtype in KV_SCALES:
            part[...] = quantise(values, dtype, KV_SCALES[dtype], machine.xp)
        else:
            part[...] = _rounded(values, out.dtype, machine.xp)
    return out


def _rounded(values, dtype, xp):
    """float32 values in `dtype`, as `reference.bits` gives them."""
    if dtype.name == "bfloat16":
        return (round_to(values, "bfloat16", xp).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def grade(k, v, axis: int, order: str, rng, xp) -> None:
    """Gives keys unequal weights, and lays them with their values in an order of weight; in place.

    A kernel that goes over keys in chunks adds the chunks in the order of their keys, and normal keys make
    all chunks weigh alike. Key j is therefore multiplied by f_j, drawn evenly from 0 to `MOST_GRADE`, one for
    all sequences and heads. Its scores with normal queries have the standard deviation f_j, so that it
    weighs e^(f_j² / 2) in the mean: from 1 to 90, and of many chunks none makes up the sum alone. Every order
    has the same pairs of key and value, so the exact result is the same, and only its rounding differs.

    Parameters
    ----------
    k, v : array
        Normal keys and values, (B, N, HKV, D) or (B, HKV, N, D).
    axis : int
        That of N.
    order : {"mixed", "rising", "falling"}
        As drawn; by f_j, the least first; the greatest first.
    rng : Generator
        Of the array module `xp`.
    """
    n = k.shape[axis]
    factor = MOST_GRADE * rng.random(n, dtype=np.float32)
    place = xp.arange(n) if order == "mixed" else xp.argsort(factor)
    place = place[::-1] if order == "falling" else place
    factor = factor.reshape([n if i == axis else 1 for i in range(k.ndim)])
    bits(k)[...] = _rounded((widen(k, np.float32) * factor).take(place, axis=axis), k.dtype, xp)
    bits(v)[...] = bits(v).take(place, axis=axis)


def page_table(lengths: list[int], page_size: int, order: str, seed: int, shared: int = 0) -> tuple[np.ndarray, int]:
    """(B, max_pages) int32 table over a pool with just enough pages, and their number.

    Entries that hold no token are -1. "shuffled" scatters every sequence over the whole pool. `shared`: as many
    pages at the start are the same ones for all.
    """
    counts = [ceil_div(n, page_size) for n in lengths]
    total = sum(counts) - (shared * (len(counts) - 1) if counts else 0)
    ids = np.random.default_rng(seed).permutation(total) if order == "shuffled" else np.arange(total)
    table = np.full((len(lengths), max([1, *counts])), -1, np.int32)
    table[:, :shared] = ids[:shared]
    start = shared
    for i, count in enumerate(counts):
        table[i, shared:count] = ids[start : start + count - shared]
        start += count - shared
    return table, max(total, 1)


def build(machine, params: Mapping[str, Any]) -> dict[str, Any]:
    """The input arrays of a case by name, as the planning functions of `cuattn` take them.

    prefill: q, k, v; packed, cu_seqlens_q and cu_seqlens_k with them, and over pages block_table. decode, cascade:
    q, k_cache, v_cache, block_table, cache_seqlens. mla: one kv_cache for both. All with sinks, if the case has
    them. cache: k, v and the cache of decode, with room for the new tokens; for a kernel that rotates cos and sin.
    pages: k_cache, v_cache, src, dst.
    """
    rng = machine.xp.random.default_rng(params["seed"])
    if params["family"] == "prefill":
        build_family = _packed if params["layout"] == PACKED else _dense
    else:
        build_family = _paged
    arrays = build_family(machine, params, rng)
    if params.get("sinks"):
        arrays["sinks"] = _sinks(machine, params["h"], rng)
    return arrays


def _sinks(machine, heads: int, rng):
    """Logits of the size of scores, float32 that bfloat16 holds too, as libraries want them in either."""
    drawn = machine.download(rng.standard_normal(heads, dtype=np.float32))
    return machine.upload(round_to(drawn, "bfloat16", np))


def _dense(machine, params: Mapping[str, Any], rng) -> dict[str, Any]:
    b, h, hkv, d, m, n = (params[key] for key in ("b", "h", "hkv", "d", "m", "n"))
    shapes = {"q": (b, m, h, d), "k": (b, n, hkv, d), "v": (b, n, hkv, d)}
    if params["layout"] == "bhsd":
        shapes = {name: (s[0], s[2], s[1], s[3]) for name, s in shapes.items()}
    arrays = {name: normal(machine, shape, params["dtype"], rng) for name, shape in shapes.items()}
    if order := params.get("key_order"):
        axis = 2 if params["layout"] == "bhsd" else 1
        grade(arrays["k"], arrays["v"], axis, order, rng, machine.xp)
    return arrays


def _packed(machine, params: Mapping[str, Any], rng) -> dict[str, Any]:
    """Sequences of one length one behind the other; keys in pages of a pool where the case has a page size."""
    b, h, hkv, d, page = (params.get(key) for key in ("b", "h", "hkv", "d", "page_size"))
    keys = (key_rows(params), hkv, d) if page is None else (key_rows(params) // page, page, hkv, d)
    shapes = {"q": (b * params["m"], h, d), "k": keys, "v": keys}
    arrays = {name: normal(machine, shape, params["dtype"], rng) for name, shape in shapes.items()}
    for name, offsets in zip(("cu_seqlens_q", "cu_seqlens_k"), offsets_of(params)):
        arrays[name] = machine.upload(np.asarray(offsets, np.int32))
    if page is not None:
        table, _ = page_table([params["n"]] * b, page, params["page_order"], params["seed"])
        arrays["block_table"] = machine.upload(table)
    return arrays


def _paged(machine, params: Mapping[str, Any], rng) -> dict[str, Any]:
    b, h, hkv, d, dtype = (params[key] for key in ("b", "h", "hkv", "d", "dtype"))
    lengths = list(params.get("lengths") or [params["n"]] * b)
    if params["family"] == "pages":
        return _copied(machine, params, lengths, rng)
    new = params["m"] if params["family"] == "cache" else 0
    table, pages = page_table([n + new for n in lengths], params["page_size"], params["page_order"], params["seed"],
                              shared_pages(params))
    pool = (pages, params["page_size"], hkv, d)
    fresh = {"k": (b, new, hkv, d), "v": (b, new, hkv, d)} if new else {"q": (b, params.get("m", 1), h, d)}
    caches = ("kv_cache",) if params["family"] == "mla" else ("k_cache", "v_cache")
    arrays = {name: normal(machine, shape, dtype, rng) for name, shape in fresh.items()}
    if new and rotates(params):
        tables = rotary_tables(max(lengths, default=0) + new, d)
        arrays |= {name: machine.upload(table) for name, table in zip(("cos", "sin"), tables)}
    return arrays | {
        **{name: normal(machine, pool, params.get("kv_dtype") or dtype, rng) for name in caches},
        "block_table": machine.upload(table),
        "cache_seqlens": machine.upload(np.asarray(lengths, np.int32)),
    }


def _copied(machine, params: Mapping[str, Any], lengths: list[int], rng) -> dict[str, Any]:
    """A cache in whose second half every page of every sequence, which lie in the first, gets its copy."""
    table, pages = page_table(lengths, params["page_size"], params["page_order"], params["seed"])
    pool = (2 * pages, params["page_size"], params["hkv"], params["d"])
    src = table[table >= 0]
    return {
        "k_cache": normal(machine, pool, params["dtype"], rng),
        "v_cache": normal(machine, pool, params["dtype"], rng),
        "src": machine.upload(src),
        "dst": machine.upload(src + np.int32(pages)),
    }


def nbytes(arrays: Mapping[str, Any]) -> int:
    """Bytes of all arrays together."""
    return sum(int(array.nbytes) for array in arrays.values())
