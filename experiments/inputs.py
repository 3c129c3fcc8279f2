"""Random inputs for a case, made where they are used: seeded normal values, page tables in either order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cuattn.dense import round_to
from cuattn.kernels.base import ceil_div
from cuattn.reference import bits

CHUNK = 1 << 26  # float32 values drawn at once: 256 MiB beside the array they fill


def normal(machine, shape: tuple[int, ...], dtype: str, rng):
    """An array of N(0, 1) values in `dtype`.

    Parameters
    ----------
    machine : Machine
    shape : tuple of int
    dtype : str
    rng : Generator
        Of the machine's array module.
    """
    out = machine.empty(shape, dtype)
    flat = (bits(out) if dtype == "bfloat16" else out).reshape(-1)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        values = rng.standard_normal(part.size, dtype=np.float32)
        if dtype == "bfloat16":
            values = (round_to(values, dtype, machine.xp).view(np.uint32) >> 16).astype(np.uint16)
        part[...] = values.astype(part.dtype)
    return out


def page_table(lengths: list[int], page_size: int, order: str, seed: int) -> tuple[np.ndarray, int]:
    """(B, max_pages) int32 table over a pool with just enough pages, and their number.

    Entries that hold no token are -1. "shuffled" scatters every sequence over the whole pool.
    """
    counts = [ceil_div(n, page_size) for n in lengths]
    total = sum(counts)
    ids = np.random.default_rng(seed).permutation(total) if order == "shuffled" else np.arange(total)
    table = np.full((len(lengths), max([1, *counts])), -1, np.int32)
    start = 0
    for i, count in enumerate(counts):
        table[i, :count] = ids[start : start + count]
        start += count
    return table, max(total, 1)


def build(machine, params: Mapping[str, Any]) -> dict[str, Any]:
    """The input arrays of a case by name, as the planning functions of `cuattn` take them.

    prefill: q, k, v. decode: q, k_cache, v_cache, block_table, cache_seqlens. cache: k, v and the same cache,
    with room for the new tokens.
    """
    rng = machine.xp.random.default_rng(params["seed"])
    b, h, hkv, d, dtype = (params[key] for key in ("b", "h", "hkv", "d", "dtype"))
    if params["family"] == "prefill":
        m, n = params["m"], params["n"]
        shapes = {"q": (b, m, h, d), "k": (b, n, hkv, d), "v": (b, n, hkv, d)}
        if params["layout"] == "bhsd":
            shapes = {name: (s[0], s[2], s[1], s[3]) for name, s in shapes.items()}
        return {name: normal(machine, shape, dtype, rng) for name, shape in shapes.items()}
    lengths = list(params.get("lengths") or [params["n"]] * b)
    new = params["m"] if params["family"] == "cache" else 0
    table, pages = page_table(
        [n + new for n in lengths], params["page_size"], params["page_order"], params["seed"]
    )
    pool = (pages, params["page_size"], hkv, d)
    fresh = {"k": (b, new, hkv, d), "v": (b, new, hkv, d)} if new else {"q": (b, 1, h, d)}
    arrays = {name: normal(machine, shape, dtype, rng) for name, shape in fresh.items()}
    return arrays | {
        "k_cache": normal(machine, pool, dtype, rng),
        "v_cache": normal(machine, pool, dtype, rng),
        "block_table": machine.upload(table),
        "cache_seqlens": machine.upload(np.asarray(lengths, np.int32)),
    }


def nbytes(arrays: Mapping[str, Any]) -> int:
    """Bytes of all arrays together."""
    return sum(int(array.nbytes) for array in arrays.values())
