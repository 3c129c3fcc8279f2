"""mla_hopper: latent attention with copies, scores and sums beside each other on sm_90a (decode/mla_hopper.cu)."""
from __future__ import annotations

from math import gcd

import numpy as np

from cuattn.kernels import shares
from cuattn.kernels.base import (
    ELEMENT_BYTES,
    WARP,
    Cost,
    Launch,
    Plan,
    Row,
    TileMap,
    Unsupported,
    ceil_div,
    check_grid,
    resolve,
    round_up,
)
from cuattn.kernels.flash_hopper import PANEL, PATTERN_ROWS, SWIZZLE
from cuattn.kernels.mla import LATENT, WIDTH
from cuattn.kernels.shapes import DecodeShape

FILE = "decode/mla_hopper.cu"
WARPGROUP, PRODUCT_ROWS = 128, 64  # threads; rows of a product
THREADS, MERGERS = 4 * WARPGROUP, LATENT // 4  # of the two launches
MOST_PARTS = 256  # of a sequence, in the mean; the kernel's own
HEADS, TILE_KEYS = (16, 32, 64), (32, 64)
ROOM = 16  # parts that a thread of the second launch has on their way, of 16 bytes
MERGING_BLOCKS = 7  # for each multiprocessor


def smem_bytes(rows: int, keys: int, stages: int) -> int:
    """sizeof(Smem): Q with what products read behind it, the ring, factors of rows and mbarriers."""
    q = 2 * (rows * (WIDTH - PANEL) + PRODUCT_ROWS * PANEL)
    return round_up(q, 1024) + round_up(stages * (2 * WIDTH * keys + 2 * 4 * PRODUCT_ROWS + 3 * 8), 1024)


def even_groups(batch: int, most: int) -> int:
    """As many groups as have whole sequences, or whole numbers of them one, where all are equally long.

    If that costs at most a sixteenth of the groups, which merging would cost too; else as many as there are.
    """
    return next((n for n in range(most, most * 15 // 16, -1) if batch % n == 0 or n % batch == 0), most)


def _rows_of_block(shape: DecodeShape, device, chosen) -> int:
    """As many heads as there are up to 64."""
    for name, known in (("rows", HEADS), ("keys", TILE_KEYS)):
        if chosen[name] not in (None, *known):
            raise Unsupported(f"mla_hopper: {name} must be {', '.join(map(str, known))}, got {chosen[name]}; "
                              "change it")
    rows = chosen["rows"] or next((rows for rows in HEADS if rows >= shape.h), HEADS[-1])
    keys, stages = chosen["keys"], chosen["stages"]
    if stages < (least := WARPGROUP // keys):  # each team of warps that copies a tile wants one
        raise Unsupported(f"mla_hopper: expected at least {least} stages of {keys} keys, got {stages}; choose more")
    if smem_bytes(rows, keys, stages) > device.smem_per_block:
        raise Unsupported(f"mla_hopper: {rows} rows with {stages} stages of {keys} keys do not fit the "
                          f"{device.smem_per_block} bytes of shared memory of {device.name}; choose fewer")
    return rows


def _box(shape: DecodeShape, keys: int, least: int) -> int:
    """Rows of a tile that lie in one page, as one copy brings them; 0 where they are too few, or a swizzle does
    not begin with each."""
    box = gcd(shape.page_size, keys)
    return 0 if box % PATTERN_ROWS or box < least else box


def plan(shape: DecodeShape, device, overrides=None) -> Plan:
    """As many blocks as are resident, and a launch that merges; the lengths are the kernel's own business."""
    chosen = resolve(ROW.constants, overrides)
    if (shape.hkv, shape.d) != (1, WIDTH):
        raise Unsupported(f"mla_hopper: expected one KV head and head dim {WIDTH}, got {shape.hkv} and "
                          f"{shape.d}; choose a decode kernel")
    rows, keys, stages = _rows_of_block(shape, device, chosen), chosen["keys"], chosen["stages"]
    units = ceil_div(shape.h, rows)
    most = max(device.sms // max(units, 1), 1)
    groups = chosen["groups"] or even_groups(max(shape.b, 1), most)
    tiles = shape.b * max(ceil_div(shape.max_pages * shape.page_size, keys), 1)
    shares.check_list("mla_hopper", tiles, groups, f"tiles of {keys} keys", "split the call")
    check_grid("mla_hopper", "groups", groups)
    check_grid("mla_hopper", "sequences", shape.b)
    box = _box(shape, keys, chosen["bulk"])
    maps = {"kv": TileMap("kv_cache", (1, box, 1, PANEL), SWIZZLE)} if box else {}
    compiled = {"ROWS": rows, "KEYS": keys, "STAGES": stages, "SHARE": ceil_div(chosen["share"], keys),
                "BOX": box, "PAGE_SIZE": shape.page_size, "Element": shape.dtype,
                "SMEM_BYTES": smem_bytes(rows, keys, stages)}
    places = 2 * units * groups  # for a block the rest of a sequence, and the start of another
    scratch = {"part": ((places, rows, LATENT), "float32"), "part_lse": ((places, rows), "float32"),
               "cuts": ((shape.b, 2), "int32")}
    merging = min(shape.h, ceil_div(MERGING_BLOCKS * device.sms, max(shape.b, 1)))
    launches = (
        Launch(FILE, "mla_hopper", (units, groups if shape.b else 0, 1), THREADS, compiled["SMEM_BYTES"], compiled,
               maps=maps),
        Launch(FILE, "mla_hopper_merge", (merging, shape.b, 1), MERGERS, MERGERS * ROOM * 16, compiled),
    )
    return Plan(launches, {**chosen, "rows": rows, "groups": groups}, scratch)


def _lengths_read(taken, batch: int, groups: int, keys: int, box: int) -> int:
    """Bytes: what `shares.lengths_read` says of scores and sums; a team of warps goes to its last tile."""
    lanes, teams = (WARP, 1) if box else (keys, WARPGROUP // keys)
    others = THREADS - WARPGROUP
    read = shares.lengths_read(taken, batch, groups, others + lanes * teams, 0)
    read += 4 * groups * batch * (WARPGROUP - lanes * teams) // WARP  # warps that sum, and copy nothing
    for share in taken:
        first, last = share[0][0], share[-1][0]
        sequences = [b for b, _, count, _ in share for _ in range(count)]
        ends = [sequences[at::teams][-1] for at in range(min(teams, len(sequences)))]
        read += 4 * (lanes * sum(end - first for end in ends) + others * (last - first))
    return read


def cost(shape: DecodeShape, plan: Plan, lengths) -> Cost:
    """Rows and page numbers, of boxes whole ones, once a unit; for each stretch Q and what it leaves; every part
    read once more."""
    (units, groups, _), merging = plan.launches[0].grid, plan.launches[1].grid[0]
    if not units or not groups:
        return Cost(0, 0, 0, plan.launch_count, plan.scratch_bytes)
    size, tokens, keys = ELEMENT_BYTES[shape.dtype], sum(lengths), plan.constants["keys"]
    box = plan.launches[0].constants["BOX"]
    copies = sum(ceil_div(length, box or 1) for length in lengths)
    taken = shares.stretches(lengths, keys, groups, MOST_PARTS, plan.launches[0].constants["SHARE"])
    loaded, stored = shares.results(taken, shape.h, LATENT, size)
    loaded += sum(map(len, taken)) * shape.h * WIDTH * size
    loaded += units * (copies * ((box or 1) * WIDTH * size + 4) + _lengths_read(taken, shape.b, groups, keys, box))
    loaded += shape.b * merging * MERGERS * 8  # which groups have a sequence
    stored += shape.b * 8
    flops = 2 * shape.h * tokens * (WIDTH + LATENT)
    return Cost(flops, loaded, stored, plan.launch_count, plan.scratch_bytes)


def arguments(shape: DecodeShape, plan: Plan, t) -> list:
    cache = plan.launches[0].maps.get("kv", t["kv_cache"])
    inputs = [("q", t["q"]), ("kv", cache), *((name, t[name]) for name in ("block_table", "cache_seqlens"))]
    left = [(name, t[name]) for name in ("o", "lse", "part", "part_lse", "cuts")]
    heads = ("HEADS", np.int32(shape.h))
    return [[*inputs, *left, ("sigma", np.float32(t["softmax_scale"])), ("BATCH", np.int32(shape.b)), heads],
            [*left, heads]]


ROW = Row(
    name="mla_hopper", family="mla", file=FILE, archs=("sm_90a",), dtypes=("float16", "bfloat16"),
    head_dims=range(WIDTH, WIDTH + 1), features=frozenset({"gqa", "lse", "paged"}),
    constants={"rows": None, "keys": 64, "stages": 2, "groups": None, "share": 64, "bulk": 64},
    choices={"rows": HEADS, "keys": TILE_KEYS, "stages": (2, 4, 5), "share": (64, 128, 256),
             "bulk": (8, 64, 128)},
    teaches="Warpgroups with roles: one copies rows that lie anywhere, one scores, two sum; and parts are "
            "merged by all multiprocessors, not by whoever is last.",
    plan=plan, cost=cost, arguments=arguments,
)
