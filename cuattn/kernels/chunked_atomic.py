"""chunked_atomic: chunks of keys side by side, added up with atomics (prefill/chunked_atomic.cu)."""
from __future__ import annotations

from cuattn.kernels.base import (
    ELEMENT_BYTES,
    GRID_LIMIT,
    MMA_ROWS,
    Chunked,
    Cost,
    Launch,
    Plan,
    Row,
    ceil_div,
    check_grid,
    resolve,
    tile_row,
)
from cuattn.kernels.chunked_fused import check_tiles, slice_tiles, square_tiles
from cuattn.kernels.chunked_unfused import (
    ROW_WARPS,
    Arguments,
    QueryChunk,
    row_launch,
    score_tile_bytes,
    walked_keys,
)
from cuattn.kernels.shapes import AttentionShape

FILE = "prefill/chunked_atomic.cu"


def _smem(d: int, chunk: int, tile_m: int, tile_n: int) -> tuple[int, int]:
    """sizeof(MaxSmem), sizeof(AddSmem)."""
    most = 2 * tile_row(d) * (tile_m + 2 * tile_n)
    return most, most + chunk // tile_n * score_tile_bytes(tile_m, tile_n, True)


def plan(shape: AttentionShape, device, overrides=None) -> Plan:
    """Four launches, whatever the shape."""
    chosen = resolve(ROW.constants, overrides)
    check_tiles("chunked_atomic", chosen)
    chunk, heads = chosen["chunk"], shape.b * shape.h
    tile_m, tile_n = slice_tiles("chunked_atomic", shape, device, chosen, shape.m,
                                 lambda *tiles: _smem(shape.d, chunk, *tiles)[1])
    chosen |= {"tile_m": tile_m, "tile_n": tile_n}
    chunks = ceil_div(shape.n, chunk)
    check_grid("chunked_atomic", "heads in all (B · H)", heads)
    check_grid("chunked_atomic", f"keys (chunks of {chunk})", shape.n, GRID_LIMIT * chunk)
    max_smem, add_smem = _smem(shape.d, chunk, tile_m, tile_n)
    compiled = {
        "CHUNK": chunk, "TILE_M": tile_m, "TILE_N": tile_n, "HEAD_DIM": shape.d, "CAUSAL": shape.causal,
        "Element": shape.dtype, "BY_ROWS": True, "MAX_SMEM_BYTES": max_smem, "ADD_SMEM_BYTES": add_smem,
    }
    grid, threads = (ceil_div(shape.m, tile_m), chunks, heads), 32 * (tile_m // MMA_ROWS)
    finish = square_tiles(shape, device, {**chosen, "layout": "row", "accumulate": "float32"})
    launches = (
        Launch(FILE, "chunked_clear", (ceil_div(shape.m, ROW_WARPS), heads, 1), 32 * ROW_WARPS, 0, compiled),
        Launch(FILE, "chunked_max", grid, threads, max_smem, compiled),
        Launch(FILE, "chunked_add", grid, threads, add_smem, compiled),
        row_launch(shape, finish, "chunked_finish", shape.m),
    )
    scratch = {"sum": ((heads, shape.m, shape.d), "float32"), "m": ((heads, shape.m), "float32"),
               "l": ((heads, shape.m), "float32")}
    # One maximum for all keys, and float32 sums: as if they were one chunk.
    return Plan(launches, chosen, scratch, Chunked(max(shape.n, 1), "float32", fused=True))


def cost(shape: AttentionShape, plan: Plan, lengths=None) -> Cost:
    """Bytes of loads and stores; what atomics read and write is not among them."""
    chunk, tile_m = plan.constants["chunk"], plan.constants["tile_m"]
    heads, size, rows_read, maxima = shape.b * shape.h, ELEMENT_BYTES[shape.dtype], 0, 0
    for m0 in range(0, shape.m, tile_m):
        rows = min(tile_m, shape.m - m0)
        keys = walked_keys(shape, chunk, m0 + rows)
        rows_read += 2 * ceil_div(keys, chunk) * rows + 3 * keys
        maxima += ceil_div(keys, chunk) * rows
    state = shape.m * (4 * shape.d + 8)  # O', m and l: cleared, and loaded at the end
    loaded = rows_read * shape.d * size + 4 * maxima + state
    return Cost(4 * heads * shape.visible * shape.d, heads * loaded,
                heads * (state + shape.m * (shape.d * size + 4)), plan.launch_count, plan.scratch_bytes)


def arguments(shape: AttentionShape, plan: Plan, t) -> list:
    known = Arguments(shape, t)
    where = [*known.whole, *known.heads, known.sigma]
    return [
        [*known.arrays("m", "l", "sum"), known.integer("rows", shape.m)],
        [*known.arrays("q", "k", "m"), *where],
        [*known.arrays("q", "k", "v", "m", "l", "sum"), *where],
        known.finish(QueryChunk(0, shape.m, max(shape.n, 1))),  # cleared, so never somebody else's
    ]


ROW = Row(
    name="chunked_atomic", family="prefill", file=FILE, archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"causal", "gqa", "lse"}),
    constants={"chunk": 512, "tile_m": None, "tile_n": None},
    teaches="Chunks of keys side by side, for few queries: they need one maximum beforehand, so the scores "
            "twice, and add to one O with atomics in any order.",
    plan=plan, cost=cost, arguments=arguments, deterministic=False,
)
