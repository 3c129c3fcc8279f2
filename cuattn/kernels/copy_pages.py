"""copy_pages: whole pages of a cache to other pages, of K and of V (cache/copy_pages.cu)."""
from __future__ import annotations

import numpy as np

from cuattn.kernels.base import (
    ELEMENT_BYTES,
    Cost,
    Launch,
    Plan,
    Row,
    ceil_div,
    check_grid,
    resolve,
)
from cuattn.kernels.shapes import PagesShape

THREADS, MOST_STEPS, WORD = 256, 4, 16


def _tiling(shape: PagesShape) -> tuple[int, int, int]:
    """(lanes that share a page, 16-byte words of it each takes, blocks it takes); a page may be empty."""
    words = shape.page_bytes // WORD
    lanes = max(1, min(words, THREADS))
    steps = max(1, min(ceil_div(words, lanes), MOST_STEPS))
    return lanes, steps, ceil_div(words, lanes * steps)


def plan(shape: PagesShape, device, overrides=None) -> Plan:
    """One launch over the pairs of pages and, where a page is large, its slices."""
    resolve(ROW.constants, overrides)
    lanes, steps, slices = _tiling(shape)
    check_grid("copy_pages", f"slices of {lanes * steps * WORD} bytes a page", slices)
    pairs = THREADS // lanes
    compiled = {"WIDTH": shape.width, "ROW_WORDS": max(shape.d * shape.width // WORD, 1),
                "HKV": max(shape.hkv, 1), "PAGE_SIZE": shape.page_size,
                "LANES": lanes, "PAIRS": pairs, "STEPS": steps}
    grid = (ceil_div(shape.n, pairs), slices, 1)
    return Plan((Launch("cache/copy_pages.cu", "copy_pages", grid, THREADS, 0, compiled),), {})


def cost(shape: PagesShape, plan: Plan, lengths=None) -> Cost:
    """Each page of K and of V in and out; every thread that stays in a page reads both its numbers."""
    lanes, _, slices = _tiling(shape)
    moved = 2 * shape.n * shape.page_bytes
    return Cost(0, moved + 8 * shape.n * lanes * slices, moved, plan.launch_count)


def arguments(shape: PagesShape, plan: Plan, t) -> list:
    given = [(name, t[name]) for name in ("k_cache", "v_cache", "src", "dst")]
    to = [(f"{name}_out", t.get(f"{name}_out", t[f"{name}_cache"])) for name in "kv"]
    return [[*given, *to, ("n", np.int32(shape.n))]]


ROW = Row(
    name="copy_pages", family="pages", file="cache/copy_pages.cu", archs=("sm_80+",),
    dtypes=tuple(ELEMENT_BYTES), head_dims=range(8, 1025, 8), features=frozenset({"paged"}), constants={},
    teaches="What sharing pages costs when it ends: a fork that writes copies one page, not its sequence.",
    plan=plan, cost=cost, arguments=arguments,
)
