"""append_rope: new rows into the pages of a cache, K rotated by its position (cache/append_rope.cu)."""
from __future__ import annotations

from cuattn.kernels import append, quantised
from cuattn.kernels.base import (
    ELEMENT_BYTES,
    WARP,
    Cost,
    Launch,
    Plan,
    Row,
    check_grid,
    resolve,
)
from cuattn.kernels.shapes import AppendShape

FILE = "cache/append_rope.cu"
MOST_WARPS = 16


def _warps(shape: AppendShape) -> int:
    """A head each, as far as a block goes: of a single token no head should wait for another."""
    return max(1, min(max(shape.h, shape.hkv), MOST_WARPS))


def plan(shape: AppendShape, device, overrides=None) -> Plan:
    """One block a new token, with its queries where there are some."""
    resolve(ROW.constants, overrides)
    check_grid("append_rope", "sequences", shape.b)
    warps = _warps(shape)
    compiled = {"HEAD_DIM": shape.d, "H": shape.h, "HKV": shape.hkv, "PAGE_SIZE": shape.page_size,
                "WARPS": warps, "ROTARY": shape.rotary, "INTERLEAVED": shape.interleaved,
                "Element": shape.dtype, **quantised.constants(shape)}
    entry = "append_rope_q" if shape.h else "append_rope"
    return Plan((Launch(FILE, entry, (shape.t, shape.b, 1), WARP * warps, 0, compiled),), {})


def cost(shape: AppendShape, plan: Plan, lengths=None) -> Cost:
    """Each row once in and once out; the angles once a warp, the length and the page number once a thread.

    A pair takes four products and two sums. Where there are arrays of scales, K's are read by each lane of a
    head, V's once for 8 elements.
    """
    tokens, warps, size = shape.b * shape.t, _warps(shape), ELEMENT_BYTES[shape.dtype]
    queries, new = shape.h * shape.d, 2 * shape.hkv * shape.d
    loaded = (queries + new) * size + warps * (4 * shape.rotary + 8 * WARP)
    if shape.scales != "one":
        loaded += 4 * shape.hkv * (WARP + shape.d // 8)
    stored = queries * size + new * ELEMENT_BYTES[shape.stored]
    flops = 6 * (shape.hkv + shape.h) * shape.rotary // 2
    return Cost(tokens * flops, tokens * loaded, tokens * stored, plan.launch_count)


def arguments(shape: AppendShape, plan: Plan, t) -> list:
    names = ("cos", "sin", "q", "q_rotated") if shape.h else ("cos", "sin")
    return [[*append.rows(t), *((name, t[name]) for name in names), *quantised.arguments(t)]]


ROW = Row(
    name="append_rope", family="cache", file=FILE, archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"paged", "rope", "quantised"}), constants={},
    teaches="A position needs no kernel of its own: the row that is written anyway is turned on its way.",
    plan=plan, cost=cost, arguments=arguments,
)
