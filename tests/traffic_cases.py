"""Kernels and shapes whose traffic is pinned. Every constant is given, so that any machine has the same plan."""
from __future__ import annotations

from collections import Counter

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

import cuattn
from cuattn.binding import Planned
from cuattn.probing import plan_probe

CHUNKED = {"chunk": 128, "tile_m": 32, "tile_n": 64}
FUSED = {"chunk": 128, "tile_m": 64, "tile_n": 64, "parallel": "serial"}
FLASH = {"block_m": 128, "block_n": 64, "warps": 4}


def _arrays(machine, *shapes):
    rng = np.random.default_rng(7)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    return [machine.upload(array.astype("bfloat16")) for array in arrays]


def _decode(machine, lengths, kernel="paged", heads=8, **constants) -> Planned:
    pages = -(-max(lengths) // 16)
    q, k, v = _arrays(machine, (len(lengths), 1, heads, 128), *[(len(lengths) * pages, 16, 2, 128)] * 2)
    order = np.random.default_rng(8).permutation(len(lengths) * pages).astype(np.int32)
    table, lengths = machine.upload(order.reshape(-1, pages)), machine.upload(np.array(lengths, np.int32))
    return cuattn.plan_decode(q, k, v, table, lengths, kernel=kernel,
                              constants={"warps": 4, "stages": 3, **constants})


def _decode_mla(machine, lengths, heads, kernel="mla", **constants) -> Planned:
    pages = -(-max(lengths) // 16)
    q, kv = _arrays(machine, (len(lengths), 1, heads, 576), (len(lengths) * pages, 16, 1, 576))
    order = np.random.default_rng(8).permutation(len(lengths) * pages).astype(np.int32)
    table, lengths = machine.upload(order.reshape(-1, pages)), machine.upload(np.array(lengths, np.int32))
    return cuattn.plan_decode_mla(q, kv, table, lengths, softmax_scale=192**-0.5, kernel=kernel,
                                  constants=constants)


def _decode_cascade(machine, levels, **constants) -> Planned:
    """`levels`: of each where its groups begin and end, and their keys."""
    counts = [[-(-n // 16) for n in keys] for _, keys in levels]
    total, taken, made = sum(map(sum, counts)), 0, []
    q, k, v = _arrays(machine, (4, 1, 8, 128), *[(total, 16, 2, 128)] * 2)
    order = np.random.default_rng(8).permutation(total).astype(np.int32)
    for (offsets, keys), used in zip(levels, counts):
        table = np.zeros((len(used), max(used)), np.int32)
        for g, count in enumerate(used):
            table[g, :count], taken = order[taken : taken + count], taken + count
        made.append([machine.upload(np.array(x, np.int32)) for x in (offsets, table, keys)])
    return cuattn.plan_decode_cascade(q, k, v, made, constants=constants)


def _append(machine, rotary: int = 0) -> Planned:
    new, cache = (4, 3, 2, 128), (16, 16, 2, 128)
    k_new, v_new, k, v, q = _arrays(machine, new, new, cache, cache, (4, 3, 8, 128))
    table = machine.upload(np.arange(16, dtype=np.int32)[::-1].reshape(4, 4).copy())
    tables = [machine.upload(x) for x in cuattn.reference.rotary_tables(33, rotary)]
    rope = dict(zip(("cos", "sin", "q"), (*tables, q))) if rotary else {}
    return cuattn.plan_append(k_new, v_new, k, v, table, machine.upload(np.array([0, 15, 16, 30], np.int32)),
                              **rope)


def _copy_pages(machine) -> Planned:
    k, v = _arrays(machine, *[(16, 16, 2, 128)] * 2)
    src, dst = (machine.upload(np.array(pages, np.int32)) for pages in ([0, 3, 3, 7], [8, 9, 15, 12]))
    return cuattn.plan_copy_pages(k, v, src, dst)


def _prefill(machine, kernel: str, causal: bool, constants: dict) -> Planned:
    q, k, v = _arrays(machine, (1, 300, 4, 64), (1, 333, 2, 64), (1, 333, 2, 64))
    return cuattn.plan_attention(q, k, v, causal=causal, kernel=kernel, constants=constants)


def _packed(machine, kernel: str, constants: dict) -> Planned:
    """Everything at once: packed sequences with a window, a cap and sinks."""
    arrays = _arrays(machine, (300, 4, 64), (460, 2, 64), (460, 2, 64))
    offsets = [machine.upload(np.array(x, np.int32)) for x in ([0, 130, 130, 300], [0, 60, 100, 460])]
    sinks = machine.upload(np.array([-1, 0, 1, 2], np.float32))
    return cuattn.plan_attention_varlen(*arrays, *offsets, max_seqlen_q=170, max_seqlen_k=360, causal=True,
                                        window_size=(100, -1), softcap=20.0, sinks=sinks, kernel=kernel,
                                        constants=constants)


CASES = {
    "flash": lambda m: _prefill(m, "flash", False, FLASH),
    "flash causal": lambda m: _prefill(m, "flash", True, FLASH),
    "flash_hopper": lambda m: _prefill(m, "flash_hopper", True, {"block_m": 128, "block_n": 64}),
    "flash packed": lambda m: _packed(m, "flash", FLASH),
    "flash_hopper packed": lambda m: _packed(m, "flash_hopper", {"block_m": 128, "block_n": 64}),
    "standard": lambda m: _prefill(m, "standard", False, {"head_group": 4}),
    "chunked_unfused": lambda m: _prefill(m, "chunked_unfused", False, CHUNKED),
    "chunked_fused": lambda m: _prefill(m, "chunked_fused", False, FUSED),
    "chunked_fused, scores in memory": lambda m: _prefill(m, "chunked_fused", False,
                                                          {**FUSED, "scores": "global"}),
    "chunked_fused, by columns": lambda m: _prefill(m, "chunked_fused", False, {**FUSED, "layout": "column"}),
    "chunked_atomic": lambda m: _prefill(m, "chunked_atomic", False, {"chunk": 128, "tile_m": 64, "tile_n": 64}),
    "paged": lambda m: _decode(m, [1, 500, 1000, 777], splits=1),
    "paged, 3 splits": lambda m: _decode(m, [1, 500, 1000, 777], splits=3),
    "paged_gather": lambda m: _decode(m, [1, 500, 1000, 777], "paged_gather", splits=1),
    "paged_launches": lambda m: _decode(m, [1, 500, 1000, 777], "paged_launches"),
    "paged_launches, by page": lambda m: _decode(m, [1, 100], "paged_launches", launch="page"),
    "paged_stream": lambda m: _decode(m, [1, 500, 1000, 777], "paged_stream", keys=16, groups=3),
    "paged_stream, 80 heads": lambda m: _decode(m, [1, 300], "paged_stream", 80, keys=16, stages=2, groups=2, team=4),
    "cascade": lambda m: _decode_cascade(m, [([0, 4], [200]), ([0, 1, 4], [40, 70])], rows=16, keys=16, warps=1,
                                         stages=2, shares=3),
    "mla": lambda m: _decode_mla(m, [1, 500, 300], 16, rows=16, keys=64, stages=2, groups=3),
    "mla, 80 heads": lambda m: _decode_mla(m, [1, 200], 80, rows=64, keys=32, stages=2, groups=2),
    "mla_hopper": lambda m: _decode_mla(m, [1, 500, 300], 16, "mla_hopper", keys=32, stages=4, share=32, groups=3,
                                        bulk=8),
    "mla_hopper, row by row": lambda m: _decode_mla(m, [1, 500, 300], 16, "mla_hopper", keys=32, stages=4, share=32,
                                                    groups=3, bulk=128),
    "append": _append,
    "append_rope": lambda m: _append(m, rotary=96),
    "copy_pages": _copy_pages,
    "copy": lambda m: plan_probe(m, "copy", bytes=1 << 18, constants={"threads": 256, "blocks_per_sm": 1}),
}


def summary(sites) -> dict[str, dict[str, int]]:
    """Of each entry, what SUMS names: sectors, passes through the banks, conflicts, tensor instructions."""
    out: dict[str, Counter] = {}
    for site in sites:
        sums = out.setdefault(site.entry, Counter())
        for name, accesses, column in SUMS:
            if site.access in accesses:
                sums[name] += getattr(site, column)
    return {entry: {name: sums[name] for name, *_ in SUMS} for entry, sums in out.items()}


#: What is compared: a name, the accesses it sums over, and the column.
SUMS = [
    ("load sectors", ("global load",), "sectors"),
    ("copy sectors", ("global copy", "bulk load"), "sectors"),
    ("store sectors", ("global store",), "sectors"),
    ("atomic sectors", ("global atomic",), "sectors"),
    ("shared load passes", ("shared load", "ldmatrix"), "wavefronts"),
    ("shared load conflicts", ("shared load", "ldmatrix"), "conflicts"),
    ("shared store passes", ("shared store",), "wavefronts"),
    ("shared store conflicts", ("shared store",), "conflicts"),
    ("shared copy passes", ("shared copy",), "wavefronts"),
    ("wgmma passes", ("wgmma",), "wavefronts"),
    ("tensor instructions", ("mma", "wgmma"), "instructions"),
]
