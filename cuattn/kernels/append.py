"""append: new K and V rows into the pages of a cache (cache/append.cu)."""
from __future__ import annotations

from cuattn.kernels import quantised
from cuattn.kernels.base import (
    ELEMENT_BYTES,
    Cost,
    Launch,
    Plan,
    Row,
    check_grid,
    resolve,
)
from cuattn.kernels.shapes import AppendShape

THREADS = 128


def plan(shape: AppendShape, device, overrides=None) -> Plan:
    """One block a new token."""
    resolve(ROW.constants, overrides)
    check_grid("append", "sequences", shape.b)
    compiled = {"HEAD_DIM": shape.d, "HKV": shape.hkv, "PAGE_SIZE": shape.page_size, "Element": shape.dtype,
                **quantised.constants(shape)}
    return Plan((Launch("cache/append.cu", "append", (shape.t, shape.b, 1), THREADS, 0, compiled),), {})


def cost(shape: AppendShape, plan: Plan, lengths=None) -> Cost:
    """Each row once in and once out; every thread reads the length and the page number, and for 8 elements the
    scales where there are arrays of them."""
    tokens, elements = shape.b * shape.t, shape.hkv * shape.d
    loaded = 2 * elements * ELEMENT_BYTES[shape.dtype] + 8 * THREADS
    if shape.scales != "one":
        loaded += 2 * 4 * elements // 8
    return Cost(0, tokens * loaded, tokens * 2 * elements * ELEMENT_BYTES[shape.stored], plan.launch_count)


def rows(t) -> list:
    """Where new rows come from and go to."""
    return [(name, t[name]) for name in ("k", "v", "k_cache", "v_cache", "block_table", "cache_seqlens")]


def arguments(shape: AppendShape, plan: Plan, t) -> list:
    return [[*rows(t), *quantised.arguments(t)]]


ROW = Row(
    name="append", family="cache", file="cache/append.cu", archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"paged", "quantised"}), constants={},
    teaches="A page table turns growing a sequence into writing rows: nothing moves, nothing is reallocated.",
    plan=plan, cost=cost, arguments=arguments,
)
