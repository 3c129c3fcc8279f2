"""standard: scores, softmax and output as three launches, S and P in global memory (prefill/standard.cu)."""
from __future__ import annotations

import numpy as np

from cuattn.kernels.base import (
    ELEMENT_BYTES,
    GRID_LIMIT,
    Cost,
    Launch,
    Plan,
    Row,
    ceil_div,
    check_choice,
    check_grid,
    resolve,
    round_up,
    tile_row,
)
from cuattn.kernels.shapes import AttentionShape

KEY_STEP, WARPS = 64, 8
SOFTMAX_SMEM = 8 * WARPS
FILE = "prefill/standard.cu"


def _smem(d: int, block: int) -> tuple[int, int]:
    """sizeof(ScoresSmem), sizeof(OutputSmem)."""
    row = tile_row(d)
    return 2 * row * 2 * block, 2 * 2 * (block * tile_row(KEY_STEP) + KEY_STEP * row)


def padded_columns(n: int) -> int:
    """Columns of S and P: N rounded up to 8, so that every row is 16-byte aligned."""
    return max(8, round_up(n, 8))


def plan(shape: AttentionShape, device, overrides=None) -> Plan:
    """Passes over groups of heads; the scratch holds S and P of one group."""
    chosen = resolve(ROW.constants, overrides)
    check_choice("standard", chosen, "score", ("float32", "input"))
    score = "float32" if chosen["score"] == "float32" else shape.dtype
    heads = shape.b * shape.h
    group = min(chosen["head_group"] or heads, heads, GRID_LIMIT)
    block = next((b for b in (128, 64) if max(_smem(shape.d, b)) <= device.smem_per_block), 64)
    check_grid("standard", f"queries (tiles of {block})", shape.m, GRID_LIMIT * block)
    scores_smem, output_smem = _smem(shape.d, block)
    columns = padded_columns(shape.n)
    compiled = {
        "BLOCK": block, "HEAD_DIM": shape.d, "CAUSAL": shape.causal, "Element": shape.dtype, "Score": score,
        "SCORES_SMEM_BYTES": scores_smem, "SOFTMAX_SMEM_BYTES": SOFTMAX_SMEM,
        "OUTPUT_SMEM_BYTES": output_smem,
    }
    tiles, tiles_n = ceil_div(shape.m, block), ceil_div(columns, block)
    launches = []
    for head0 in range(0, heads, max(group, 1)):
        count = min(group, heads - head0)
        launches += [
            Launch(FILE, "standard_scores", (tiles_n, tiles, count), 32 * WARPS, scores_smem, compiled),
            Launch(FILE, "standard_softmax", (shape.m, count, 1), 32 * WARPS, SOFTMAX_SMEM, compiled),
            Launch(FILE, "standard_output", (tiles, 1, count), 2 * block, output_smem, compiled),
        ]
    scratch = {"s": ((group, shape.m, columns), score), "p": ((group, shape.m, columns), shape.dtype)}
    constants = {"head_group": group, "score": chosen["score"], "block": block}
    return Plan(tuple(launches), constants, scratch, "input" if chosen["score"] == "input" else "weights")


def cost(shape: AttentionShape, plan: Plan, lengths=None) -> Cost:
    """S is written once and read twice, P written and read once.

    Every tile of scores reads its rows of Q and K.
    """
    heads, size, m, n, d = shape.b * shape.h, ELEMENT_BYTES[shape.dtype], shape.m, shape.n, shape.d
    score = ELEMENT_BYTES[plan.scratch["s"][1]]
    columns, block = padded_columns(n), plan.constants["block"]
    tiles_m, tiles_n = ceil_div(m, block), ceil_div(columns, block)
    scores = (tiles_n * m + tiles_m * n) * d * size
    softmax = 2 * m * columns * score
    output = (m * columns * size if n else 0) + tiles_m * n * d * size  # without keys P is not read
    stored = m * columns * (score + size) + m * (d * size + 4)
    return Cost(4 * heads * shape.visible * d, heads * (scores + softmax + output), heads * stored,
                plan.launch_count, plan.scratch_bytes)


def arguments(shape: AttentionShape, plan: Plan, t) -> list:
    m, n, cols = np.int32(shape.m), np.int32(shape.n), np.int32(padded_columns(shape.n))
    h, group = np.int32(shape.h), np.int32(shape.group)
    bound = []
    for head0 in range(0, shape.b * shape.h, max(plan.constants["head_group"], 1)):
        first = ("head0", np.int32(head0))
        bound += [
            [("q", t["q"]), ("k", t["k"]), ("s", t["s"]), first, ("M", m), ("N", n), ("COLS", cols), ("H", h),
             ("GROUP", group), ("sigma", np.float32(t["softmax_scale"]))],
            [("s", t["s"]), ("p", t["p"]), ("lse", t["lse"]), first, ("COLS", cols), ("H", h)],
            [("p", t["p"]), ("v", t["v"]), ("o", t["o"]), first, ("M", m), ("N", n), ("COLS", cols), ("H", h),
             ("GROUP", group)],
        ]
    return bound


ROW = Row(
    name="standard", family="prefill", file=FILE, archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"causal", "gqa", "lse"}),
    constants={"head_group": None, "score": "float32"},
    choices={"head_group": (1, 2, 4, 8, 16)},
    teaches="The formula as it stands: the M × N scores travel to memory and back, and set both the time and "
            "the footprint.",
    plan=plan, cost=cost, arguments=arguments,
)
