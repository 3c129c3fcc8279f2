"""paged_launches: a launch of `paged` for each request, or for each page (decode/paged_launches.cu)."""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from cuattn.kernels import paged
from cuattn.kernels.base import (
    ELEMENT_BYTES,
    Cost,
    Launch,
    Plan,
    Row,
    ceil_div,
    check_choice,
    check_launches,
    resolve,
)
from cuattn.kernels.shapes import DecodeShape

FILE = "decode/paged_launches.cu"
THREADS = 256  # of a block that computes lengths of pages


def plan(shape: DecodeShape, device, overrides=None) -> Plan:
    """The host loop, written out."""
    chosen = resolve(ROW.constants, overrides)
    check_choice("paged_launches", chosen, "launch", ("request", "page"))
    tuned = {name: chosen[name] for name in ("warps", "stages")}
    one = paged.plan(replace(shape, b=1), device, {**tuned, "splits": 1})
    chosen = {**one.constants, "launch": chosen["launch"]}
    del chosen["splits"]
    attend, = one.launches
    if chosen["launch"] == "request":
        check_launches("paged_launches", shape.b, "for the batch", "split it")
        return Plan((attend,) * shape.b, chosen)
    pages = shape.b * shape.max_pages
    check_launches("paged_launches", pages + 2, f"with pages of {shape.page_size}", "choose larger pages")
    lengths = Launch(FILE, "page_lengths", (ceil_div(pages, THREADS), 1, 1), THREADS, 0, {})
    attend = replace(attend, constants={**attend.constants, "Output": "float32"})
    merge = paged.combine_launch(shape.b, shape.h, shape.d, "float32", shape.dtype)
    scratch = {"page_lengths": ((pages,), "int32"),
               "part": ((shape.b, shape.max_pages, shape.h, shape.d), "float32"),
               "part_lse": ((shape.b, shape.h, shape.max_pages), "float32")}
    return Plan((lengths, *(attend,) * pages, merge), chosen, scratch)


def cost(shape: DecodeShape, plan: Plan, lengths) -> Cost:
    """What `paged` takes unsplit; by page Q, O and LSE once a page of the table, the lengths and the merge."""
    tokens, results, warps = sum(lengths), shape.b, plan.constants["warps"]
    out_bytes, loaded, stored = ELEMENT_BYTES[shape.dtype], 0, 0
    if plan.constants["launch"] == "page":
        out_bytes, results = 4, shape.b * shape.max_pages
        busy = sum(ceil_div(length, shape.page_size) for length in lengths)
        loaded, stored = paged.merged(shape, results, busy)
        loaded, stored = loaded + 4 * results, stored + 4 * results
    more_loaded, more_stored = paged.attended(shape, warps, tokens, results, out_bytes)
    return Cost(4 * shape.h * tokens * shape.d, loaded + more_loaded, stored + more_stored, plan.launch_count,
                plan.scratch_bytes)


def arguments(shape: DecodeShape, plan: Plan, t) -> list:
    scores = paged.score_arguments(shape, t)
    caches = [("k_cache", t["k_cache"]), ("v_cache", t["v_cache"])]

    def sequence(b: int, *names: str) -> list:
        return [(name, t[name].only(0, b)) for name in names]

    if plan.constants["launch"] == "request":
        return [sequence(b, "q") + caches + sequence(b, "block_table", "cache_seqlens", "o", "lse") + scores
                for b in range(shape.b)]
    bound = [[("cache_seqlens", t["cache_seqlens"]), ("page_lengths", t["page_lengths"]),
              ("SLOTS", np.int32(shape.b * shape.max_pages)),
              ("MAX_PAGES", np.int32(shape.max_pages)), ("PAGE_SIZE", np.int32(shape.page_size))]]
    for b in range(shape.b):
        (q, (_, table), (_, part), (_, lse)) = sequence(b, "q", "block_table", "part", "part_lse")
        for page in range(shape.max_pages):
            length = t["page_lengths"].only(0, b * shape.max_pages + page)
            bound.append([q, *caches, ("block_table", table.only(1, page)), ("page_lengths", length),
                          ("part", part.only(1, page)), ("part_lse", lse.only(2, page)), *scores])
    return [*bound, paged.combine_arguments(t)]


ROW = Row(
    name="paged_launches", family="decode", file=FILE, archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"gqa", "lse", "paged"}),
    constants={"launch": "request", "warps": None, "stages": None},
    teaches="Small launches queue one behind another: one a request leaves most multiprocessors idle, one a "
            "page takes microseconds for a few keys.",
    plan=plan, cost=cost, arguments=arguments,
)
