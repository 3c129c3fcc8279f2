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
WARP_ROWS = 16  # of a warp
PATTERN_ROWS = 8  # after which a swizzle repeats


def smem_bytes(d: int, dv: int, block_m: int, block_n: int, stages: int, o_over_q: bool) -> int:
    """sizeof(Smem): the tiles, then the mbarriers."""
    (row, row_v), consumers = (2 * round_up(x, PANEL) for x in (d, dv)), block_m // WARPGROUP_ROWS
    tiles = row * ((1 if o_over_q else 2) * block_m + stages * block_n) + row_v * stages * block_n
    return round_up(tiles + 8 * (2 * consumers + 4 * stages), ALIGNMENT)


# Rows and keys of a tile, by padded head dim: as many rows as a block's registers hold beside O, and keys as
# shared memory has. The last number is how fast a row goes, against the first tile of that head dim.
TILES = {
    64: ((192, 128, 1.0), (128, 128, 0.87)),
    128: ((128, 128, 1.0),),
    192: ((128, 96, 1.0),),
    256: ((128, 80, 1.0),),
}
# For what takes registers too: a cap on scores; of three warpgroups also packed sequences with a window, and pages
# under a mask.
CAPPED = {**TILES, 64: TILES[64][1:], 128: ((128, 112, 1.0),), 256: ((128, 64, 1.0),)}
FEW_ROWS = {**TILES, 64: TILES[64][1:]}
PAGED_KEYS = {256: 64}  # of a tile of pages, so that it is few copies

ROUNDS_OF_SINGLES = 2  # so many turns of each block, in pairs, are dealt out tile by tile, where any are


def _paired(shape: AttentionShape, blocks: int, block_m: int) -> int:
    """Of how many heads tiles are taken two by two, which make up for each other: of all pairs.

    But for the last ones, where that pays: dealt out tile by tile these let the blocks end together. Of packed
    sequences, which have different lengths, none.
    """
    if shape.packed is not None or not shape.m:
        return 0
    m_tiles, heads = ceil_div(shape.m, block_m), shape.b * shape.h
    turns = m_tiles * (heads // 2)
    gain = 0.99 * ceil_div(turns, blocks) * blocks / max(turns, 1) - 1  # they end together but for 1 %
    price = 0.01 * shape.d / 128 + 0.18 / m_tiles  # as found on an H200: heads come from memory once more
    return 2 * (max(turns - ROUNDS_OF_SINGLES * blocks * (gain > price), 0) // m_tiles)


def _deal(shape: AttentionShape, device, block_m: int) -> tuple[int, bool]:
    """How many turns the blocks take, and whether tiles of different lengths are to make up for each other:
    under a causal mask, but none has to where every tile gets a block.
    """
    tiles = ceil_div(shape.m, block_m) * shape.b * shape.h
    pairs = shape.causal and tiles > device.sms
    paired = _paired(shape, device.sms, block_m) if pairs else 0
    return tiles - paired // 2 * ceil_div(shape.m, block_m), pairs


def _time(shape: AttentionShape, device, block_m: int, block_n: int, rate: float) -> float:
    """What the busiest block computes, in rows times tiles of keys of the first tile's rate.

    Rows past the end, and scores beyond the diagonal, count like others: the fewer, the better a tile fits.
    """
    steps = [0]
    for m0 in range(0, shape.m, block_m):
        last = min(m0 + block_m, shape.m)
        begin, end = shape.keys(m0, last - 1)
        steps.append(ceil_div(end, block_n) - begin // block_n)
    turns, pairs = _deal(shape, device, block_m)
    heads = shape.b * shape.h
    tiles = heads * ceil_div(shape.m, block_m)
    if pairs and tiles < 2 * turns:  # blocks that end together
        share = max(max(steps), heads * sum(steps) / device.sms)
    elif shape.causal and not pairs:
        share = max(steps)
    else:
        share = ceil_div(turns, device.sms) * heads * sum(steps) / max(turns, 1)
    return share * block_m / rate


def _tiles(shape: AttentionShape, device) -> tuple[int, int]:
    """The block_m and block_n with which a shape takes the least time."""
    width, windowed = round_up(shape.d, PANEL), "window" in shape.features
    tight = shape.packed is not None and (windowed or (shape.causal and shape.page_size is not None))
    tiles = (CAPPED if shape.softcap else FEW_ROWS if tight else TILES)[width]
    best = min(tiles, key=lambda tile: _time(shape, device, *tile)) if len(tiles) > 1 else tiles[0]
    return best[0], PAGED_KEYS.get(width, best[1]) if shape.page_size else best[1]


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
    o_over_q = smem_bytes(*sizes, False) > device.smem_per_block
    smem = smem_bytes(*sizes, o_over_q)
    if smem > device.smem_per_block:
        raise Unsupported(f"flash_hopper: {stages} stages of {block_n} keys and {block_m} queries at head "
                          f"dim {shape.d} need {smem} bytes of shared memory, {device.name} grants "
                          f"{device.smem_per_block}; choose smaller block_n or stages")
    turns, pairs = _deal(shape, device, block_m)
    box = _box(shape, block_n)
    compiled = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages, "BOX": box,
        "Element": shape.dtype, "SMEM_BYTES": smem, "TURNS": chosen["turns"], "O_OVER_Q": o_over_q,
        "PAIRS": pairs, **feature_constants(shape),
    }
    grid = (min(turns, device.sms), 1, 1)
    rows = {"q": WARPGROUP_ROWS, "k": box, "v": box, "o": WARP_ROWS}
    maps = {name: TileMap(name, (1, of, 1, PANEL), SWIZZLE) for name, of in rows.items()}
    threads = 128 * (block_m // WARPGROUP_ROWS + 1)
    launch = Launch(FILE, "flash_hopper", grid, threads, smem, compiled, maps=maps)
    return Plan((launch,), {**chosen, "block_m": block_m, "block_n": block_n})


def cost(shape: AttentionShape, plan: Plan, lengths=None) -> Cost:
    """As flash, with the warps that multiply. Whole tiles are copied, also what neighbours have in them.

    Two threads that copy and the warps that multiply ask of each tile where its sequence lies, and of each copy
    in which page.
    """
    warps, packed = plan.constants["block_m"] // WARP_ROWS, shape.packed is not None
    tiles = ceil_div(shape.m, plan.constants["block_m"]) * shape.b
    box = _box(shape, plan.constants["block_n"])
    pages = 4 * (shape.page_size is not None)
    base = tiles_cost(shape, plan, warps, 16 * (2 + warps) * tiles * packed, 0, lengths,
                      lambda keys: pages * ceil_div(keys, box))
    more = _neighbours(shape, plan, lengths) if packed else 0
    return replace(base, bytes_loaded=base.bytes_loaded + shape.h * more * ELEMENT_BYTES[shape.dtype])


def _neighbours(shape: AttentionShape, plan: Plan, offsets) -> int:
    """Elements of other sequences, of a page's rest, or of none, that a head's tiles bring along."""
    block_m, block_n = plan.constants["block_m"], plan.constants["block_n"]
    (total_q, total_k), elements = shape.packed, 0
    for (q0, q1), (k0, k1) in zip(*(pairwise(side) for side in offsets)):
        one = replace(shape, b=1, m=q1 - q0, n=k1 - k0, packed=None)
        for m0 in range(0, one.m, block_m):
            last = min(m0 + block_m, one.m)
            tail = round_up(one.keys(m0, last - 1)[1], block_n)
            there = total_k - k0 if shape.page_size is None else round_up(one.n, _box(shape, block_n))
            elements += (min(q0 + m0 + block_m, total_q) - (q0 + last)) * shape.d
            elements += max(min(tail, there) - one.n, 0) * (shape.d + shape.value_dim)
    return elements


def arguments(shape: AttentionShape, plan: Plan, t) -> list:
    launch = plan.launches[0]
    maps, pairs = launch.maps, launch.constants["PAIRS"]
    paired = _paired(shape, launch.grid[0], plan.constants["block_m"]) if pairs else 0
    return [[
        *maps.items(), ("g_o", t["o"]), ("lse", t["lse"]), ("B", np.int32(shape.b)), ("H", np.int32(shape.h)),
        ("M", np.int32(shape.m)), ("N", np.int32(shape.n)), ("GROUP", np.int32(shape.group)),
        ("paired", np.int32(paired)), *score_arguments(shape, t),
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
