"""mla: decode of multi-head latent attention, one row a key for all query heads (decode/mla.cu)."""
from __future__ import annotations

import numpy as np

from cuattn.kernels import shares
from cuattn.kernels.base import (
    ELEMENT_BYTES,
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
from cuattn.kernels.shapes import DecodeShape

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE  # elements of a row of the cache and of q
WARPS = 8  # the kernel's own
MOST_PARTS = 32  # of a sequence, in the mean; the kernel's own
HEADS, TILE_KEYS = (16, 32, 64), (16, 32, 64)
TILES = ((64, 3), (64, 2), (32, 3), (32, 2), (16, 3), (16, 2))  # (keys, stages), the longest tiles first


def smem_bytes(rows: int, keys: int, stages: int) -> int:
    """sizeof(Smem): Q, the ring, P and the rows' states."""
    pieces = min(rows * keys // MMA_ROWS**2, WARPS)
    groups = max(pieces // (rows // MMA_ROWS), 1)  # of a tile's keys
    tiles = 2 * (WIDTH * (rows + stages * keys) + rows * keys)
    return round_up(tiles + 4 * rows * (2 * groups + 2), 128)


def _shape_of_block(shape: DecodeShape, device, chosen) -> tuple[int, int, int]:
    """(rows, keys, stages): as many heads as there are up to 64, then the longest tiles that fit."""
    for name, known in (("rows", HEADS), ("keys", TILE_KEYS)):
        if chosen[name] not in (None, *known):
            raise Unsupported(f"mla: {name} must be {', '.join(map(str, known))}, got {chosen[name]}; "
                              "change it")
    if chosen["stages"] == 1:
        raise Unsupported("mla: needs at least 2 stages, got 1; change them")
    wanted = min(round_up(max(shape.h, 1), MMA_ROWS), HEADS[-1])
    most = next(rows for rows in HEADS if rows >= wanted)
    for rows in (chosen["rows"],) if chosen["rows"] else [rows for rows in HEADS[::-1] if rows <= most]:
        for keys, stages in TILES:
            keys, stages = chosen["keys"] or keys, chosen["stages"] or stages
            if smem_bytes(rows, keys, stages) <= device.smem_per_block:
                return rows, keys, stages
    raise Unsupported(f"mla: {rows} rows with {stages} stages of {keys} keys do not fit the "
                      f"{device.smem_per_block} bytes of shared memory of {device.name}; choose fewer")


def plan(shape: DecodeShape, device, overrides=None) -> Plan:
    """As many blocks as are resident; the lengths, and with them the shares, are the kernel's own business."""
    chosen = resolve(ROW.constants, overrides)
    if (shape.hkv, shape.d) != (1, WIDTH):
        raise Unsupported(f"mla: expected one KV head and head dim {WIDTH}, got {shape.hkv} and {shape.d}; "
                          "choose a decode kernel")
    rows, keys, stages = _shape_of_block(shape, device, chosen)
    units = ceil_div(shape.h, rows)
    groups = chosen["groups"] or max(device.sms // max(units, 1), 1)
    most = shape.b * max(ceil_div(shape.max_pages * shape.page_size, keys), 1)
    shares.check_list("mla", most, groups, f"tiles of {keys} keys", "split the call")
    check_grid("mla", "groups", groups)
    compiled = {"ROWS": rows, "KEYS": keys, "STAGES": stages, "PAGE_SIZE": shape.page_size,
                "Element": shape.dtype, "SMEM_BYTES": smem_bytes(rows, keys, stages)}
    grid = (units, groups if shape.b else 0, 1)
    places = 2 * units * groups  # for a block the rest of a sequence, and the start of another
    scratch = {"part": ((places, rows, LATENT), "float32"), "part_lse": ((places, rows), "float32"),
               "tickets": ((shape.b * units,), "int32")}
    launch = Launch("decode/mla.cu", "mla", grid, WARP * WARPS, compiled["SMEM_BYTES"], compiled)
    tunables = {"rows": rows, "keys": keys, "stages": stages, "groups": groups}
    return Plan((launch,), tunables, scratch, zeroed=frozenset({"tickets"}))


def cost(shape: DecodeShape, plan: Plan, lengths) -> Cost:
    """Rows and page numbers once a unit; for each stretch Q and what it leaves; every part read once more."""
    (units, groups, _), threads = plan.launches[0].grid, plan.launches[0].block
    if not units or not groups:
        return Cost(0, 0, 0, plan.launch_count, plan.scratch_bytes)
    size, tokens = ELEMENT_BYTES[shape.dtype], sum(lengths)
    taken = shares.stretches(lengths, plan.constants["keys"], plan.constants["groups"], MOST_PARTS)
    loaded, stored = shares.results(taken, shape.h, LATENT, size)
    loaded += sum(map(len, taken)) * shape.h * WIDTH * size
    loaded += units * (tokens * (WIDTH * size + 4) + shares.lengths_read(taken, shape.b, groups, threads))
    flops = 2 * shape.h * tokens * (WIDTH + LATENT)
    return Cost(flops, loaded, stored, plan.launch_count, plan.scratch_bytes)


def arguments(shape: DecodeShape, plan: Plan, t) -> list:
    arrays = [(name, t[name]) for name in ("q", "kv_cache", "block_table", "cache_seqlens", "o", "lse",
                                           "part", "part_lse", "tickets")]
    return [[*arrays, ("sigma", np.float32(t["softmax_scale"])), ("BATCH", np.int32(shape.b)),
             ("HEADS", np.int32(shape.h))]]


ROW = Row(
    name="mla", family="mla", file="decode/mla.cu", archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(WIDTH, WIDTH + 1), features=frozenset({"gqa", "lse", "paged"}),
    constants={"rows": None, "keys": None, "stages": None, "groups": None},
    choices={"rows": HEADS, "keys": TILE_KEYS, "stages": (2, 3, 4)},
    teaches="One latent row serves all heads as key and as value: it is read once, and the more heads multiply "
            "it, the less is memory what binds.",
    plan=plan, cost=cost, arguments=arguments,
)
