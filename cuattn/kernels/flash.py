"""flash: one pass over the keys with the scores in registers (prefill/flash.cu)."""
from __future__ import annotations

import numpy as np

from cuattn.kernels import scores
from cuattn.kernels.base import (
    ELEMENT_BYTES,
    MAX_THREADS,
    MMA_ROWS,
    Cost,
    Launch,
    Plan,
    Row,
    Unsupported,
    ceil_div,
    resolve,
    round_up,
    tile_row,
)
from cuattn.kernels.shapes import AttentionShape

FEATURES = (*scores.FEATURES, "varlen")
NO_TABLE = np.void(bytes(16))  # a table that the kernel does not read: its address and its stride
STAGES = 2  # tiles of K and V in shared memory, as in the kernel


def smem_bytes(d: int, dv: int, block_m: int, block_n: int) -> int:
    """sizeof(Smem) of the kernel."""
    return 2 * (tile_row(d) * (block_m + STAGES * block_n) + tile_row(dv) * STAGES * block_n)


def _tiles(shape: AttentionShape) -> list[tuple[int, int, int]]:
    """Candidate (block_m, block_n, warps), the preferred first.

    A warp holds its rows of S and O in registers: 32 rows while O is at most 128 wide, 16 beyond. Few queries
    take the small tile, since rows past M are computed for nothing. Caps and packed sequences take registers
    too.
    """
    width = round_up(shape.d, MMA_ROWS)
    if shape.m <= 64:
        return [(64, 64, 4), (64, 32, 4), (32, 32, 2), (16, 16, 1)]
    if width > 128:
        return [(128, 64, 8), (64, 32, 4), (32, 32, 2), (16, 16, 1)]
    wide = 0 if shape.softcap else 80 if shape.packed else 96
    return [(128, 64, 4)] * (width <= wide) + [(128, 32, 4), (64, 32, 4)]


def feature_constants(shape: AttentionShape) -> dict:
    """What is compiled into the loop over keys, and what not."""
    return {"HEAD_DIM": shape.d, "VALUE_DIM": shape.value_dim, "PAGE_SIZE": shape.page_size or 0,
            "VARLEN": "varlen" in shape.features, **scores.constants(shape)}


def plan(shape: AttentionShape, device, overrides=None) -> Plan:
    """Tiles by head dim and by the shared memory the device grants a block."""
    chosen = resolve(ROW.constants, overrides)
    for block_m, block_n, warps in _tiles(shape):
        block_m, block_n = chosen["block_m"] or block_m, chosen["block_n"] or block_n
        warps = chosen["warps"] or warps
        smem = smem_bytes(shape.d, shape.value_dim, block_m, block_n)
        if smem <= device.smem_per_block:
            break
    else:
        raise Unsupported(f"flash: tiles {block_m} × {block_n} at head dim {shape.d} need {smem} bytes of "
                          f"shared memory, {device.name} grants {device.smem_per_block}; "
                          "choose smaller block_m or block_n")
    if 32 * warps > MAX_THREADS:
        raise Unsupported(f"flash: warps must be at most {MAX_THREADS // 32}, the threads a block may have, "
                          f"got {warps}; choose fewer")
    if block_m % (MMA_ROWS * warps) or block_n % MMA_ROWS:
        raise Unsupported("flash: block_m must be a multiple of 16·warps and block_n of 16, got "
                          f"block_m={block_m}, block_n={block_n}, warps={warps}; change them")
    constants = {"block_m": block_m, "block_n": block_n, "warps": warps}
    compiled = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "WARPS": warps, "Element": shape.dtype, "SMEM_BYTES": smem,
        **feature_constants(shape),
        "BLOCKS_PER_SM": 2 if 2 * (smem + 1024) <= device.smem_per_sm else 1,
    }
    grid = (ceil_div(shape.m, block_m), shape.h, shape.b)
    return Plan((Launch("prefill/flash.cu", "flash", grid, 32 * warps, smem, compiled),), constants)


def cost(shape: AttentionShape, plan: Plan, lengths=None) -> Cost:
    """Each block reads its rows of Q and every K and V row from its first tile to its last.

    Of packed sequences it asks at the start where its own lies, and again at the end if there is work; of a
    paged cache for each 16 bytes of a row in which page that is.
    """
    warps, blocks = plan.constants["warps"], plan.launches[0].grid[0] * shape.b
    asked = 16 * warps * (shape.packed is not None)
    pages = 4 * (shape.d + shape.value_dim) // 8 * (shape.page_size is not None)
    return tiles_cost(shape, plan, warps, asked * blocks, asked, lengths, lambda keys: pages * keys)


def tiles_cost(shape: AttentionShape, plan: Plan, warps: int, before: int, asked: int, lengths,
               pages=lambda keys: 0, blind: bool = True) -> Cost:
    """The same of tiles of queries that have `warps` warps each, wherever they are computed.

    `before` and `asked`: bytes of offsets that a head reads once, and each of its tiles. `pages`: of the numbers
    of pages that a tile reads of so many keys. `blind`: whether queries are read that see no key.
    """
    block_m, block_n = plan.constants["block_m"], plan.constants["block_n"]
    size, loaded, rows, pairs = ELEMENT_BYTES[shape.dtype], before, 0, 0
    for one, count in shape.sequences(lengths).items():
        for m0 in range(0, one.m, block_m):
            last = min(m0 + block_m, one.m)
            begin, end = one.keys(m0, last - 1)
            keys = min(one.n, round_up(end, block_n)) - begin // block_n * block_n
            queries = last - m0 if keys or blind else 0
            elements = (queries + keys) * shape.d + keys * shape.value_dim
            sinks = (warps if keys or blind else 1) * shape.sinks
            loaded += count * (elements * size + 4 * sinks + asked + pages(keys))
        rows, pairs = rows + count * one.m, pairs + count * one.visible
    return Cost(
        flops=2 * shape.h * pairs * (shape.d + shape.value_dim),
        bytes_loaded=shape.h * loaded,
        bytes_stored=shape.h * rows * (shape.value_dim * size + 4),
        launches=plan.launch_count,
    )


def score_arguments(shape: AttentionShape, t) -> list:
    """What makes weights of scores; of packed sequences their offsets, and their pages."""
    offsets = [(name, t.get(name, scores.NOTHING)) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    return [*scores.arguments(shape, t), *offsets, ("block_table", t.get("block_table", NO_TABLE))]


def arguments(shape: AttentionShape, plan: Plan, t) -> list:
    return [[
        ("q", t["q"]), ("k", t["k"]), ("v", t["v"]), ("o", t["o"]), ("lse", t["lse"]),
        ("M", np.int32(shape.m)), ("N", np.int32(shape.n)), ("GROUP", np.int32(shape.group)),
        *score_arguments(shape, t),
    ]]


ROW = Row(
    name="flash", family="prefill", file="prefill/flash.cu", archs=("sm_80+",),
    dtypes=("float16", "bfloat16"), head_dims=range(8, 257, 8),
    features=frozenset({"causal", "gqa", "lse", "dv", "paged", *FEATURES}),
    constants={"block_m": None, "block_n": None, "warps": None},
    choices={"block_m": (64, 128), "block_n": (32, 64, 128), "warps": (4, 8)},
    teaches="Keep the scores on the chip: one pass over the keys with a running maximum and sum.",
    plan=plan, cost=cost, arguments=arguments,
)
