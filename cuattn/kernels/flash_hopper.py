"""flash_hopper: copies, products and softmax beside each other on sm_90a (prefill/flash_hopper.cu)."""
from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import gcd

import numpy as np

from cuattn.kernels.base import (
    ELEMENT_BYTES,
    Cost,
    Launch,
    Plan,
    Row,
    TileMap,
    Unsupported,
    ceil_div,
    resolve,
    round_up,
)
from cuattn.kernels.flash import FEATURES, feature_constants, score_arguments, tiles_cost
from cuattn.kernels.shapes import AttentionShape

FILE = "prefill/flash_hopper.cu"
PANEL = 64  # columns of a panel: 128 bytes, the widest swizzle
WARPGROUP_ROWS = 64  # of a warpgroup
ALIGNMENT = 1024  # of a swizzled tile
SWIZZLE = 128
ORDER_BYTES = 32  # sizeof(Order)
WARP_ROWS = 16  # of a warp
PATTERN_ROWS = 8  # after which a swizzle repeats


def smem_bytes(d: int, dv: int, block_m: int, block_n: int, stages: int, q_stages: int, o_staged: bool) -> int:
    """sizeof(Smem): the tiles, then what is said of queries, and the mbarriers."""
    (row, row_v), consumers = (2 * round_up(x, PANEL) for x in (d, dv)), block_m // WARPGROUP_ROWS
    tiles = row * ((q_stages + o_staged) * block_m + stages * block_n) + row_v * stages * block_n
    rings = ORDER_BYTES + 8 * (2 + 2 * consumers * q_stages + 4 * stages)
    return round_up(tiles + rings, ALIGNMENT)


# Rows and keys of a tile, by padded head dim, and how fast its scores go against the first's, as found on an H200:
# as many rows as a block's registers hold beside O, and keys as shared memory has. Where these fit the diagonal or the
# end badly, fewer are faster.
TILES = {
    64: ((192, 128, 1.0), (128, 128, 0.87)),
    128: ((128, 128, 1.0), (128, 160, 1.02)),
    192: ((128, 96, 1.0),),
    256: ((128, 80, 1.0), (128, 64, 0.965)),
}
# Without a mask, and sinks, there are registers for more.
UNMASKED = {**TILES, 128: (*TILES[128], (128, 176, 1.03))}
# For what takes registers, or copies, too: pages, packed sequences and windows; a cap on scores.
VARIED = {64: TILES[64][1:], 128: TILES[128][:1], 192: TILES[192], 256: TILES[256][:1]}
CAPPED = {**VARIED, 64: ((128, 112, 1.0),), 128: ((128, 112, 1.0),), 256: ((128, 64, 1.0),)}
PAGED_KEYS = {256: 64}  # of a tile of pages, so that it is few copies


def _section(shape: AttentionShape, blocks: int, block_m: int) -> int:
    """How many heads are in turn at once.

    Without a mask one: their tiles take equally long. With it as many as give a block as much to do as the longest
    tile has, so that blocks which take the longest tiles first end together; those of the last section too.
    """
    heads, group = shape.b * shape.h, shape.group
    if not shape.causal or not blocks:
        return 1
    least = round_up(ceil_div(2 * blocks, ceil_div(shape.m, block_m) + 1), group)
    return max(range(least, 2 * least, group), key=lambda section: ((heads - 1) % section + 1) / section)


def _tiles_of_keys(shape: AttentionShape, m0: int, end: int, block_n: int) -> range:
    """Those of which some query from m0 to end − 1 sees a key."""
    first, last = shape.keys(m0, end - 1)
    return range(first // block_n, ceil_div(last, block_n))


def _time(shape: AttentionShape, device, block_m: int, block_n: int, rate: float) -> float:
    """What the busiest block computes, in scores of the first tile's rate.

    Rows past the end, and scores beyond the diagonal, count like others: the fewer, the better a tile fits.
    """
    steps = [0]
    for m0 in range(0, shape.m, block_m):
        steps.append(len(_tiles_of_keys(shape, m0, min(m0 + block_m, shape.m), block_n)))
    heads, turns = shape.b * shape.h, len(steps) - 1
    if shape.causal:  # blocks end together
        share = max(max(steps), heads * sum(steps) / device.sms)
    else:
        share = ceil_div(heads * turns, device.sms) * max(steps)
    return share * block_m * block_n / rate


def _tiles(shape: AttentionShape, device) -> tuple[int, int]:
    """The block_m and block_n with which a shape takes the least time."""
    width, paged = round_up(shape.d, PANEL), shape.page_size is not None
    if shape.softcap:
        tiles = CAPPED
    elif paged or shape.packed is not None or "window" in shape.features:
        tiles = VARIED
    else:
        tiles = TILES if shape.causal or shape.sinks else UNMASKED
    best = min(tiles[width], key=lambda tile: _time(shape, device, *tile))
    return best[0], PAGED_KEYS.get(width, best[1]) if paged else best[1]


def _box(shape: AttentionShape, block_n: int) -> int:
    """Keys that one copy brings: a tile of them, or what of one lies in one page."""
    if shape.page_size is None:
        return block_n
    box = gcd(shape.page_size, block_n)
    if box % PATTERN_ROWS:
        raise Unsupported(f"flash_hopper: expected a page size that is a multiple of {PATTERN_ROWS}, got "
                          f"{shape.page_size}; choose flash")
    return box


def plan(shape: AttentionShape, device, overrides=None) -> Plan:
    """One launch of as many blocks as there are multiprocessors, or tiles."""
    chosen = resolve(ROW.constants, overrides)
    block_m, block_n = _tiles(shape, device)
    block_m, block_n = chosen["block_m"] or block_m, chosen["block_n"] or block_n
    stages = chosen["stages"]
    rows_fit = block_m in (2 * WARPGROUP_ROWS, 3 * WARPGROUP_ROWS)
    if not rows_fit or block_n % 16 or not 16 <= block_n <= 256 or stages < 1:
        raise Unsupported("flash_hopper: block_m must be 128 or 192, block_n a multiple of 16 up to 256 and "
                          f"stages at least 1, got block_m={block_m}, block_n={block_n}, stages={stages}; "
                          "change them")
    sizes = shape.d, shape.value_dim, block_m, block_n, stages
    memories = [(smem_bytes(*sizes, *kept), *kept) for kept in ((2, True), (1, True), (1, False))]
    smem, q_stages, o_staged = next((m for m in memories if m[0] <= device.smem_per_block), memories[-1])
    if smem > device.smem_per_block:
        raise Unsupported(f"flash_hopper: {stages} stages of {block_n} keys and {block_m} queries at head "
                          f"dim {shape.d} need {smem} bytes of shared memory, {device.name} grants "
                          f"{device.smem_per_block}; choose smaller block_n or stages")
    box = _box(shape, block_n)
    compiled = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages, "BOX": box,
        "Element": shape.dtype, "SMEM_BYTES": smem, "TURNS": chosen["turns"], "Q_STAGES": q_stages,
        "O_STAGED": o_staged, **feature_constants(shape),
    }
    grid = (min(ceil_div(shape.m, block_m) * shape.b * shape.h, device.sms), 1, 1)
    rows = {"q": WARPGROUP_ROWS, "k": box, "v": box, "o": WARP_ROWS}
    maps = {name: TileMap(name, (1, of, 1, PANEL), SWIZZLE) for name, of in rows.items()}
    threads = 128 * (block_m // WARPGROUP_ROWS + 1)
    launch = Launch(FILE, "flash_hopper", grid, threads, smem, compiled, maps=maps)
    tunables = {**chosen, "block_m": block_m, "block_n": block_n}
    return Plan((launch,), tunables, {"taken": ((1,), "int32")}, zeroed=frozenset({"taken"}))


def cost(shape: AttentionShape, plan: Plan, lengths=None) -> Cost:
    """As flash, with the warps that multiply. Whole tiles are copied, also what neighbours have in them.

    One warp asks of each tile where its sequence lies, and those that copy keys and values of each copy in which
    page.
    """
    warps, packed = plan.constants["block_m"] // WARP_ROWS, shape.packed is not None
    tiles = ceil_div(shape.m, plan.constants["block_m"]) * shape.b
    box = _box(shape, plan.constants["block_n"])
    pages = 2 * 4 * (shape.page_size is not None)
    base = tiles_cost(shape, plan, warps, 16 * tiles * packed, 0, lengths,
                      lambda keys: pages * ceil_div(keys, box), blind=False)
    more = _neighbours(shape, plan, lengths) if packed else 0
    return replace(base, bytes_loaded=base.bytes_loaded + shape.h * more * ELEMENT_BYTES[shape.dtype],
                   scratch_bytes=plan.scratch_bytes)


def _neighbours(shape: AttentionShape, plan: Plan, offsets) -> int:
    """Elements of other sequences, of a page's rest, or of none, that a head's tiles bring along."""
    block_m, block_n = plan.constants["block_m"], plan.constants["block_n"]
    (total_q, total_k), elements = shape.packed, 0
    for (q0, q1), (k0, k1) in zip(*(pairwise(side) for side in offsets)):
        one = replace(shape, b=1, m=q1 - q0, n=k1 - k0, packed=None)
        for m0 in range(0, one.m, block_m):
            last = min(m0 + block_m, one.m)
            seen = _tiles_of_keys(one, m0, last, block_n)
            if not seen:
                continue
            tail = seen.stop * block_n
            there = total_k - k0 if shape.page_size is None else round_up(one.n, _box(shape, block_n))
            elements += (min(q0 + m0 + block_m, total_q) - (q0 + last)) * shape.d
            elements += max(min(tail, there) - one.n, 0) * (shape.d + shape.value_dim)
    return elements


def arguments(shape: AttentionShape, plan: Plan, t) -> list:
    launch = plan.launches[0]
    section = _section(shape, launch.grid[0], plan.constants["block_m"])
    return [[
        *launch.maps.items(), ("g_o", t["o"]), ("lse", t["lse"]), ("B", np.int32(shape.b)),
        ("H", np.int32(shape.h)), ("M", np.int32(shape.m)), ("N", np.int32(shape.n)),
        ("GROUP", np.int32(shape.group)), ("section", np.int32(section)), *score_arguments(shape, t),
        ("taken", t["taken"]),
    ]]


ROW = Row(
    name="flash_hopper", family="prefill", file=FILE, archs=("sm_90a",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"causal", "gqa", "lse", "dv", "paged", *FEATURES}),
    constants={"block_m": None, "block_n": None, "stages": 2, "turns": True},
    choices={"block_m": (128, 192), "block_n": (64, 80, 96, 128, 176), "stages": (2, 3),
             "turns": (False, True)},
    teaches="Copy, multiply and exponentiate at the same time: bulk copies into rings, products that run by "
            "themselves, warps with roles.",
    plan=plan, cost=cost, arguments=arguments,
)
