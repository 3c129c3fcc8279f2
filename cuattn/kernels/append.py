"""append: new K and V rows into the pages of a cache (cache/append.cu)."""
from __future__ import annotations

from cuattn.kernels.base import ELEMENT_BYTES, AppendShape, Cost, Launch, Plan, Row, check_grid, resolve

THREADS = 128


def plan(shape: AppendShape, device, overrides=None) -> Plan:
    """One block a new token."""
    resolve(ROW.constants, overrides)
    check_grid("append", "sequences", shape.b)
    compiled = {"HEAD_DIM": shape.d, "HKV": shape.hkv, "PAGE_SIZE": shape.page_size, "Element": shape.dtype}
    return Plan((Launch("cache/append.cu", "append", (shape.t, shape.b, 1), THREADS, 0, compiled),), {})


def cost(shape: AppendShape, plan: Plan, lengths=None) -> Cost:
    """Each row once in and once out; every thread reads the length and the page number."""
    tokens, row = shape.b * shape.t, 2 * shape.hkv * shape.d * ELEMENT_BYTES[shape.dtype]
    return Cost(0, tokens * (row + 8 * THREADS), tokens * row, plan.launch_count)


def arguments(shape: AppendShape, plan: Plan, t) -> list:
    return [[(name, t[name]) for name in ("k", "v", "k_cache", "v_cache", "block_table", "cache_seqlens")]]


ROW = Row(
    name="append", family="cache", file="cache/append.cu", archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"paged"}), constants={},
    teaches="A page table turns growing a sequence into writing rows: nothing moves, nothing is reallocated.",
    plan=plan, cost=cost, arguments=arguments,
)
