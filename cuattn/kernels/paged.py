"""paged: decode over a paged cache, one launch for the batch (decode/paged.cu).

It is split over keys where the batch is small.
"""
from __future__ import annotations

import numpy as np

from cuattn.kernels import scores
from cuattn.kernels.base import (
    ELEMENT_BYTES,
    GRID_LIMIT,
    MAX_THREADS,
    MMA_ROWS,
    Cost,
    Launch,
    Plan,
    Row,
    Unsupported,
    ceil_div,
    check_grid,
    resolve,
    round_up,
    tile_row,
)
from cuattn.kernels.shapes import DecodeShape

KEYS = 16  # keys of a warp's tile
MAX_SPLITS = 128


def smem_bytes(d: int, warps: int, stages: int) -> int:
    """sizeof(Smem): Q, and the larger of the rings and the warps' final states."""
    d_pad = round_up(d, MMA_ROWS)
    row = 2 * tile_row(d)
    ring = warps * stages * 2 * KEYS * row
    states = warps * 4 * (2 * MMA_ROWS + MMA_ROWS * d_pad)
    return MMA_ROWS * row + max(ring, states)


def _shape_of_block(d: int, device, chosen) -> tuple[int, int, int]:
    """(warps, stages, blocks an SM).

    The deepest rings of which two blocks fit an SM, else one block that fits.
    """
    candidates = [(4, 4), (4, 3), (4, 2), (2, 3), (2, 2), (1, 2)]
    candidates = [(chosen["warps"] or w, chosen["stages"] or s) for w, s in candidates]
    for blocks in (2, 1):
        for warps, stages in candidates:
            smem = smem_bytes(d, warps, stages)
            if smem <= device.smem_per_block and blocks * (smem + 1024) <= device.smem_per_sm:
                return warps, stages, blocks
    raise Unsupported(f"paged: {candidates[0][0]} warps with {candidates[0][1]} stages at head dim {d} do "
                      f"not fit the {device.smem_per_block} bytes of shared memory of {device.name}; "
                      "choose fewer")


def plan(shape: DecodeShape, device, overrides=None) -> Plan:
    """Splits fill the device once; a split is at least two rounds of tiles long at the table's full width."""
    chosen = resolve(ROW.constants, overrides)
    row_tiles = ceil_div(shape.rows, MMA_ROWS)
    check_grid("paged", "sequences", shape.b)
    check_grid("paged", "KV heads (each once for 16 query heads)", shape.hkv * row_tiles)
    warps, stages, per_sm = _shape_of_block(shape.d, device, chosen)
    if stages < 2 or 32 * warps > MAX_THREADS:
        raise Unsupported(f"paged: needs 1 to 32 warps and at least 2 stages, got warps={warps}, "
                          f"stages={stages}; change them")
    blocks = max(shape.b * shape.hkv * row_tiles, 1)
    longest = max(shape.seen(shape.room), 1)
    rounds = ceil_div(longest, 2 * warps * KEYS)
    splits = chosen["splits"] or max(1, min(per_sm * device.sms // blocks, rounds, MAX_SPLITS))
    if splits > GRID_LIMIT:
        raise Unsupported(f"paged: splits must be between 1 and {GRID_LIMIT}, got {splits}; change it")
    smem = smem_bytes(shape.d, warps, stages)
    compiled = {
        "HEAD_DIM": shape.d, "GROUP": max(shape.group, 1), "PAGE_SIZE": shape.page_size, "WARPS": warps,
        "STAGES": stages, "Element": shape.dtype, "Output": "float32" if splits > 1 else shape.dtype,
        "SMEM_BYTES": smem, **feature_constants(shape),
    }
    grid = (splits, shape.hkv * row_tiles, shape.b)
    launches = [Launch("decode/paged.cu", "paged", grid, 32 * warps, smem, compiled)]
    scratch = {}
    if splits > 1:
        launches.append(combine_launch(shape.b, shape.h, shape.d, "float32", shape.dtype, shape.m))
        scratch = {"part": ((shape.b, splits * shape.m, shape.h, shape.d), "float32"),
                   "part_lse": ((shape.b, shape.h, splits * shape.m), "float32")}
    return Plan(tuple(launches), {"splits": splits, "warps": warps, "stages": stages}, scratch)


def combine_launch(b: int, h: int, d: int, partial: str, dtype: str, m: int = 1) -> Launch:
    """The merge of partial states: one block a row and head, and each of m queries."""
    check_grid("combine", "rows", b)
    compiled = {"HEAD_DIM": d, "Element": dtype, "Partial": partial, "M": m}
    return Launch("decode/combine.cu", "combine", (h, b, m), round_up(d // 2, 32), 0, compiled)


def combine_arguments(t, m: int = 1) -> list:
    return [("part", t["part"]), ("part_lse", t["part_lse"]), ("o", t["o"]), ("lse", t["lse"]),
            ("SPLITS", np.int32(t["part_lse"].shape[2] // m))]


def feature_constants(shape: DecodeShape) -> dict:
    """What is compiled into the loop over keys."""
    return {"M": shape.m, **scores.constants(shape)}


def score_arguments(shape: DecodeShape, t) -> list:
    """What makes weights of scores; a window without a side is as long as any sequence."""
    return scores.arguments(shape.sequence(shape.room), t)


def busy_parts(shape: DecodeShape, plan: Plan, length: int) -> int:
    """Of how many queries and splits of a sequence the query sees keys, or a sink, which is in the first one.

    The kernel divides the keys that are seen in equal shares of whole rounds of tiles. NOTE: of a split without
    keys whose sink is −∞ nothing is read, and this counts it.
    """
    splits, one, keys = plan.constants["splits"], shape.sequence(length), shape.seen(length)
    share, first = round_up(ceil_div(keys, splits), plan.constants["warps"] * KEYS), length - keys
    seen = [one.keys(m, m) for m in range(shape.m)]
    return sum((shape.sinks and s == 0) or max(begin, first + s * share) < min(end, first + (s + 1) * share)
               for begin, end in seen for s in range(splits))


def attended(shape: DecodeShape, warps: int, tokens: int, results: int, out_bytes: int) -> tuple[int, int]:
    """(loaded, stored) by launches that leave `results` O and LSE a head, over `tokens` keys in all.

    Every K and V row once a KV head and 16 rows, its page number; Q and a length a thread for each result.
    `out_bytes` are those of an element of O.
    """
    size, block_heads = ELEMENT_BYTES[shape.dtype], shape.hkv * ceil_div(shape.rows, MMA_ROWS)
    loaded = block_heads * tokens * (2 * shape.d * size + 4)
    loaded += results * (block_heads * 32 * warps * 4 + shape.m * shape.h * shape.d * size)
    return loaded, results * shape.m * shape.h * (shape.d * out_bytes + 4)


def sink_bytes(shape: DecodeShape) -> int:
    """Each row's sink, read once."""
    return 4 * shape.b * shape.m * shape.h * shape.sinks


def merged(shape: DecodeShape, parts: int, busy: int) -> tuple[int, int]:
    """(loaded, stored) by the launch that merges `parts` float32 results a head, `busy` of which have keys."""
    size, rows = ELEMENT_BYTES[shape.dtype], shape.b * shape.m * shape.h
    return shape.h * shape.d // 2 * (parts * 4 + busy * 8), rows * (shape.d * size + 4)


def cost(shape: DecodeShape, plan: Plan, lengths) -> Cost:
    """What the splits of every sequence take; then the merge."""
    splits, warps, keys = plan.constants["splits"], plan.constants["warps"], sum(map(shape.seen, lengths))
    out_bytes = 4 if splits > 1 else ELEMENT_BYTES[shape.dtype]
    loaded, stored = attended(shape, warps, keys, shape.b * splits, out_bytes)
    loaded += sink_bytes(shape)
    if splits > 1:
        busy = sum(busy_parts(shape, plan, length) for length in lengths)
        more_loaded, more_stored = merged(shape, shape.b * shape.m * splits, busy)
        loaded, stored = loaded + more_loaded, stored + more_stored
    return Cost(4 * shape.h * shape.pairs(lengths) * shape.d, loaded, stored, plan.launch_count, plan.scratch_bytes)


def arguments(shape: DecodeShape, plan: Plan, t) -> list:
    split = plan.constants["splits"] > 1
    bound = [[
        ("q", t["q"]), ("k_cache", t["k_cache"]), ("v_cache", t["v_cache"]),
        ("block_table", t["block_table"]), ("cache_seqlens", t["cache_seqlens"]),
        ("o", t["part"] if split else t["o"]), ("lse", t["part_lse"] if split else t["lse"]),
        *score_arguments(shape, t),
    ]]
    return bound + ([combine_arguments(t, shape.m)] if split else [])


ROW = Row(
    name="paged", family="decode", file="decode/paged.cu", archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"gqa", "lse", "paged", "split", "queries", *scores.FEATURES}),
    constants={"splits": None, "warps": None, "stages": None},
    choices={"splits": (1, 2, 4, 8, 16, 32), "warps": (4, 8), "stages": (2, 3, 4)},
    teaches="Paging costs a page number a key: with enough bytes in flight a scattered cache reads as fast "
            "as a flat one.",
    plan=plan, cost=cost, arguments=arguments,
)
