"""paged_stream: decode over a paged cache in equal shares, one launch whatever the lengths
(decode/paged_stream.cu)."""
from __future__ import annotations

from itertools import product

import numpy as np

from cuattn.kernels import quantised, scores, shares
from cuattn.kernels.base import (
    ELEMENT_BYTES,
    MAX_THREADS,
    MMA_ROWS,
    WARP,
    Cost,
    Launch,
    Plan,
    Row,
    Unsupported,
    ceil_div,
    check_grid,
    resolve,
    round_up,
)
from cuattn.kernels.paged import feature_constants, score_arguments, sink_bytes
from cuattn.kernels.shapes import DecodeShape

MOST_PARTS = 64  # of a sequence, in the mean; the kernel's own
MOST_TEAMS = 15  # a block has so many named barriers
MOST_MERGED = 288  # rows of parts, which take a block some 3 µs: measured, see the notebook


def pitches(shape: DecodeShape) -> tuple[int, int]:
    """Floats from one row of O in shared memory to the next, the better first: with it the rows that are stored
    together, 8 columns of four or over bytes 16 of two, lie in 32 banks."""
    d = round_up(shape.d, MMA_ROWS)
    return d + (16 if shape.kv_dtype else 8), d


def smem_bytes(shape: DecodeShape, keys: int, warps: int, stages: int, pitch: int) -> int:
    """sizeof(Smem): of each warp the rings of Q, K and V, whose tiles O takes the place of, and its m and l. Where
    pages have scales, those of a tile's keys lie before it."""
    rows, row = min(max(shape.rows, 1), MMA_ROWS), 2 * round_up(shape.d, MMA_ROWS)
    tile = 2 * round_up(keys * row * ELEMENT_BYTES[shape.stored] // 2, 128)
    if shape.scales == "pages":
        tile += round_up(2 * 4 * keys, 128)
    q, stage = round_up(rows * row, 128), max(tile, round_up(rows * 4 * pitch, 128))
    return warps * (stages * (q + stage) + 2 * 4 * MMA_ROWS)


def _shape_of_block(shape: DecodeShape, device, chosen) -> tuple[int, int, int, int, int]:
    """(keys, warps, stages, blocks an SM, pitch of O): one block that has the SM, with as many warps as fit."""
    row = shape.d * ELEMENT_BYTES[shape.stored]
    keys = chosen["keys"] or (32 if row <= 128 else 16)
    if keys not in (16, 32):
        raise Unsupported(f"paged_stream: keys must be 16 or 32, got {keys}; change it")
    candidates = [(8, 2), (4, 3), (4, 2), (2, 3), (2, 2), (1, 2)]
    if row <= 64:  # a tile is half of others, so there are twice as many on their way
        candidates.insert(0, (8, 3))
    candidates = [(chosen["warps"] or w, chosen["stages"] or s) for w, s in candidates]
    blocks = chosen["blocks_per_sm"] or 1
    for (warps, stages), pitch in product(candidates, pitches(shape)):
        smem = smem_bytes(shape, keys, warps, stages, pitch)
        if smem <= device.smem_per_block and blocks * (smem + 1024) <= device.smem_per_sm:
            return keys, warps, stages, blocks, pitch
    raise Unsupported(f"paged_stream: {candidates[0][0]} warps with {candidates[0][1]} stages at head dim "
                      f"{shape.d} do not fit the {device.smem_per_block} bytes of shared memory of "
                      f"{device.name}; choose fewer")


def units(shape: DecodeShape, team: int) -> int:
    """Of a sequence: its KV heads, each once for the rows of a team."""
    return shape.hkv * ceil_div(shape.rows, MMA_ROWS * team)


def team_of(shape: DecodeShape, warps: int, blocks: int) -> int:
    """Warps that share their tiles, each with 16 rows: as many as there are rows for, as long as one block does not
    have too much to merge where these are all the blocks."""
    team = 1
    while team * MMA_ROWS < shape.rows and warps % (2 * team) == 0:
        parts = blocks / max(units(shape, 2 * team) * shape.b, 1)  # of a sequence, in the mean
        if 2 * team * MMA_ROWS * parts > MOST_MERGED:
            break
        team *= 2
    return team


def plan(shape: DecodeShape, device, overrides=None) -> Plan:
    """As many blocks as are resident; the lengths, and with them the shares, are the kernel's own business."""
    chosen = resolve(ROW.constants, overrides)
    if shape.kv_dtype and shape.d % quantised.STEP:
        raise Unsupported(f"paged_stream: expected a head dim that is a multiple of {quantised.STEP} for a "
                          f"{shape.kv_dtype} cache, got {shape.d}; pad q, k and v with zeros")
    keys, warps, stages, per_sm, pitch = _shape_of_block(shape, device, chosen)
    if stages < 2 or WARP * warps > MAX_THREADS:
        raise Unsupported(f"paged_stream: needs 1 to 32 warps and at least 2 stages, got warps={warps}, "
                          f"stages={stages}; change them")
    team = chosen["team"] or team_of(shape, warps, per_sm * device.sms)
    if warps % team or team > 1 and warps > team * MOST_TEAMS:
        raise Unsupported(f"paged_stream: team must divide the {warps} warps into at most {MOST_TEAMS} teams, got "
                          f"{team}; change it")
    count = units(shape, team)
    groups = chosen["groups"] or max(per_sm * device.sms // max(count, 1), 1)
    most = shape.b * max(ceil_div(shape.seen(shape.room), keys * warps), 1)
    shares.check_list("paged_stream", most, groups, f"rounds of {keys * warps} keys",
                      "choose paged, or split the call")
    check_grid("paged_stream", "groups", groups)
    check_grid("paged_stream", "sequences", shape.b)
    grid = (count, groups if shape.b else 0, 1)
    blocks = count * groups
    smem = smem_bytes(shape, keys, warps, stages, pitch)
    compiled = {
        "HEAD_DIM": shape.d, "GROUP": max(shape.group, 1), "PAGE_SIZE": shape.page_size, "KEYS": keys,
        "WARPS": warps, "TEAM": team, "STAGES": stages, "BLOCKS_PER_SM": per_sm, "O_PITCH": pitch,
        "Element": shape.dtype, "SMEM_BYTES": smem, **quantised.constants(shape), **feature_constants(shape),
    }
    rows = min(max(shape.rows, 1), MMA_ROWS * team)
    scratch = {"part": ((2 * blocks, rows, shape.d), "float32"), "part_lse": ((2 * blocks, rows), "float32"),
               "tickets": ((shape.b * count * warps,), "int32")}
    launch = Launch("decode/paged_stream.cu", "paged_stream", grid, WARP * warps, smem, compiled)
    tunables = {"keys": keys, "warps": warps, "team": team, "stages": stages, "blocks_per_sm": per_sm,
                "groups": groups}
    return Plan((launch,), tunables, scratch, zeroed=frozenset({"tickets"}))


def stretches(plan: Plan, lengths) -> list[list[tuple[int, int, int, bool]]]:
    """What each group takes, as `shares.stretches` has it, in rounds."""
    keys = plan.constants["keys"] * plan.constants["warps"]
    return shares.stretches(lengths, keys, plan.constants["groups"], MOST_PARTS)


def cost(shape: DecodeShape, plan: Plan, lengths) -> Cost:
    """K, V, page numbers and pages' scales once a unit, heads' scales once a thread; for each stretch Q and what
    it leaves; every part read once more."""
    (count, groups, _), threads = plan.launches[0].grid, plan.launches[0].block
    if not count or not groups:
        return Cost(0, 0, 0, plan.launch_count, plan.scratch_bytes)
    size, d, rows = ELEMENT_BYTES[shape.dtype], shape.d, shape.m * shape.h
    team, warps = plan.constants["team"], threads // WARP
    keys = [shape.seen(length) for length in lengths]
    key = 2 * d * ELEMENT_BYTES[shape.stored] + 4 + 8 * (shape.scales == "pages")
    taken = stretches(plan, keys)
    loaded, stored = shares.results(taken, rows, d, size)
    loaded += sum(map(len, taken)) * warps // team * rows * d * size + sink_bytes(shape)
    loaded += count * (sum(keys) * key + shares.lengths_read(taken, shape.b, groups, threads))
    loaded += count * len(taken) * threads * 8 * (shape.scales == "heads")
    return Cost(4 * shape.h * shape.pairs(lengths) * d, loaded, stored, plan.launch_count, plan.scratch_bytes)


def arguments(shape: DecodeShape, plan: Plan, t) -> list:
    sigma, *more = score_arguments(shape, t)
    return [[
        ("q", t["q"]), ("k_cache", t["k_cache"]), ("v_cache", t["v_cache"]),
        ("block_table", t["block_table"]), ("cache_seqlens", t["cache_seqlens"]), ("o", t["o"]),
        ("lse", t["lse"]), ("part", t["part"]), ("part_lse", t["part_lse"]), ("tickets", t["tickets"]),
        sigma, ("BATCH", np.int32(shape.b)), *quantised.arguments(t), *more,
    ]]


ROW = Row(
    name="paged_stream", family="decode", file="decode/paged_stream.cu", archs=("sm_80+",),
    dtypes=("float16", "bfloat16"), head_dims=range(8, 257, 8),
    features=frozenset({"gqa", "lse", "paged", "quantised", "queries", *scores.FEATURES}),
    constants={"keys": None, "warps": None, "team": None, "stages": None, "blocks_per_sm": None, "groups": None},
    choices={"keys": (16, 32), "warps": (4, 8), "team": (1, 2, 4, 8), "stages": (2, 3, 4), "blocks_per_sm": (1, 2)},
    teaches="Divide the work by bytes, not by sequences: equal shares of one list leave no multiprocessor "
            "waiting for the longest request, and whoever finishes last merges, so one launch is enough.",
    plan=plan, cost=cost, arguments=arguments,
)
