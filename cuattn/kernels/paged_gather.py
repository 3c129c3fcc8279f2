"""paged_gather: pages copied into one flat piece a sequence, then `paged` over that (decode/paged_gather.cu)."""
from __future__ import annotations

from dataclasses import replace

from cuattn.kernels import paged
from cuattn.kernels.base import (
    ELEMENT_BYTES,
    Cost,
    Launch,
    Plan,
    Row,
    ceil_div,
    check_grid,
)
from cuattn.kernels.shapes import DecodeShape

FILE = "decode/paged_gather.cu"
THREADS, TOKENS = 256, 16  # of a block that copies
ONE_PAGE = 1 << 30  # a page that holds any sequence: for a wider table nothing is compiled anew
FLAT = {"k_cache": "flat_k", "v_cache": "flat_v", "block_table": "flat_table"}


def _flat(shape: DecodeShape) -> DecodeShape:
    """The problem after the copy: one page a sequence, as long as the table can name."""
    return replace(shape, page_size=max(shape.max_pages * shape.page_size, 1), max_pages=1)


def plan(shape: DecodeShape, device, overrides=None) -> Plan:
    """One launch that copies; then those of `paged`."""
    width = shape.max_pages * shape.page_size
    check_grid("paged_gather", "tokens a row of block_table", width, ONE_PAGE)
    attend = paged.plan(_flat(shape), device, overrides)
    launches = [replace(launch, constants={**launch.constants, "PAGE_SIZE": ONE_PAGE})
                if launch.entry == "paged" else launch for launch in attend.launches]
    compiled = {"HEAD_DIM": shape.d, "HKV": max(shape.hkv, 1), "PAGE_SIZE": shape.page_size,
                "Element": shape.dtype, "SMEM_BYTES": 4 * TOKENS}
    grid = (ceil_div(width, TOKENS) if shape.hkv else 0, shape.b, 1)
    flat = ((shape.b, width, shape.hkv, shape.d), shape.dtype)
    scratch = {"flat_k": flat, "flat_v": flat, "flat_table": ((shape.b, 1), "int32")}
    return Plan((Launch(FILE, "paged_gather", grid, THREADS, 4 * TOKENS, compiled), *launches),
                attend.constants, {**scratch, **attend.scratch})


def cost(shape: DecodeShape, plan: Plan, lengths) -> Cost:
    """Each K and V row in and out, its page number, a length a thread; then what `paged` takes."""
    after, tokens = paged.cost(_flat(shape), plan, lengths), sum(lengths)
    rows = tokens * 2 * shape.hkv * shape.d * ELEMENT_BYTES[shape.dtype]
    blocks, sequences, _ = plan.launches[0].grid
    loaded = (rows + 4 * tokens if blocks else 0) + blocks * sequences * THREADS * 4
    stored = (rows + 4 * sequences) if blocks else 0
    return replace(after, bytes_loaded=after.bytes_loaded + loaded, bytes_stored=after.bytes_stored + stored)


def arguments(shape: DecodeShape, plan: Plan, t) -> list:
    flat = {name: t[made] for name, made in FLAT.items()}
    copied = [*FLAT, "cache_seqlens", *FLAT.values()]
    return [[(name, t[name]) for name in copied], *paged.arguments(_flat(shape), plan, {**t, **flat})]


ROW = Row(
    name="paged_gather", family="decode", file=FILE, archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"gqa", "lse", "paged", "split"}), constants=paged.ROW.constants,
    choices=paged.ROW.choices,
    teaches="Gathering the pages first buys nothing: the copy reads and writes what attention alone would "
            "have read once, and takes the memory that paging saved.",
    plan=plan, cost=cost, arguments=arguments,
)
