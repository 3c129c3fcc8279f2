"""chunked_fused: a chunk's softmax and P V as one kernel, then its scores too (prefill/chunked_fused.cu)."""
from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

from cuattn.kernels.base import (
    ELEMENT_BYTES,
    GRID_LIMIT,
    MMA_ROWS,
    Chunked,
    Cost,
    Launch,
    Plan,
    Row,
    Unsupported,
    ceil_div,
    check_choice,
    check_grid,
    resolve,
    round_up,
    tile_row,
)
from cuattn.kernels.chunked_unfused import (
    MOST_TILE_N,
    Arguments,
    QueryChunk,
    check_chunk,
    check_count,
    check_streams,
    check_tile,
    compiled_for,
    for_lanes,
    host_loop,
    key_chunks,
    pair_scratch,
    query_chunks,
    row_launch,
    score_tile_bytes,
    scores_launch,
    sum_dtype,
    walked_keys,
)
from cuattn.kernels.shapes import AttentionShape

FILE = "prefill/chunked_fused.cu"
CHOICES = {"scores": ("shared", "global"), "parallel": ("grid", "serial")}
SLICES, TILES = (128, 64, 32, 16), (64, 32, 16)  # rows, and keys at once: the first that fit


def _smem(d: int, chosen, tile_m: int, tile_n: int) -> tuple[int, int]:
    """sizeof(Slice), sizeof(SliceSmem)."""
    row, by_rows = 2 * tile_row(d), chosen["layout"] == "row"
    scores = chosen["chunk"] // tile_n * score_tile_bytes(tile_m, tile_n, by_rows)
    pair = scores + 3 * 4 * tile_m + 2 * tile_n * row
    return pair, pair + tile_m * row


def _step(shape: AttentionShape, chosen) -> int:
    """Queries of a launch."""
    return max(shape.m, 1) if chosen["parallel"] == "grid" else chosen["chunk"]


def check_tiles(kernel: str, chosen) -> None:
    """Refuses chunks, slices and tiles that make no sense on any device."""
    check_chunk(kernel, chosen)
    tile_m, tile_n = chosen["tile_m"] or MMA_ROWS, chosen["tile_n"] or MMA_ROWS
    if tile_m % MMA_ROWS or tile_m > SLICES[0]:
        raise Unsupported(f"{kernel}: tile_m must be a multiple of {MMA_ROWS} and at most {SLICES[0]}, got "
                          f"{tile_m}; change it")
    check_tile(kernel, "tile_n", tile_n, chosen["chunk"], MOST_TILE_N)


def slice_tiles(kernel: str, shape: AttentionShape, device, chosen, rows: int, smem_of) -> tuple[int, int]:
    """Rows of a slice and keys of a tile: as many rows as fit, but not far beyond the `rows` there are."""
    chunk, most = chosen["chunk"], max(round_up(min(rows, shape.m), MMA_ROWS), MMA_ROWS)
    slices = [chosen["tile_m"]] if chosen["tile_m"] else [tile for tile in SLICES if tile <= most]
    tiles = [chosen["tile_n"]] if chosen["tile_n"] else [keys for keys in TILES if chunk % keys == 0]
    for tile_m, tile_n in product(slices, tiles):
        smem = smem_of(tile_m, tile_n)
        if smem <= device.smem_per_block:
            return tile_m, tile_n
    raise Unsupported(f"{kernel}: {tile_m} rows of {chunk} scores at head dim {shape.d} need {smem} bytes of "
                      f"shared memory, {device.name} grants {device.smem_per_block}; choose a smaller chunk "
                      "or tile")


def square_tiles(shape: AttentionShape, device, chosen) -> dict:
    """The constants of chunked_unfused.cu with the largest square tiles that divide the chunk and fit."""
    for tile in SLICES:
        constants = compiled_for(shape, {**chosen, "tile_m": tile, "tile_n": tile})
        smem = max(constants["SCORES_SMEM_BYTES"], constants["OUTPUT_SMEM_BYTES"])
        if chosen["chunk"] % tile == 0 and smem <= device.smem_per_block:
            break
    return constants


def plan(shape: AttentionShape, device, overrides=None) -> Plan:
    """A launch for all queries or one a chunk of them; with scores in global memory two a chunk pair."""
    chosen = resolve(ROW.constants, overrides)
    check_tiles("chunked_fused", chosen)
    for name, values in CHOICES.items():
        check_choice("chunked_fused", chosen, name, values)
    chunk, step, heads = chosen["chunk"], _step(shape, chosen), shape.b * shape.h
    tile_m, tile_n = slice_tiles("chunked_fused", shape, device, chosen, step, lambda *tiles: _smem(
        shape.d, chosen, *tiles)[chosen["scores"] == "shared"])
    chosen |= {"tile_m": tile_m, "tile_n": tile_n}
    pair_smem, slice_smem = _smem(shape.d, chosen, tile_m, tile_n)
    compiled = {
        "CHUNK": chunk, "TILE_M": tile_m, "TILE_N": tile_n, "HEAD_DIM": shape.d, "CAUSAL": shape.causal,
        "Element": shape.dtype, "Sum": sum_dtype(shape, chosen), "BY_ROWS": chosen["layout"] == "row",
        "PAIR_SMEM_BYTES": pair_smem, "SLICE_SMEM_BYTES": slice_smem,
    }
    rounding = Chunked(chunk, compiled["Sum"], fused=True)
    queries = list(query_chunks(shape, chunk, step))
    check_streams("chunked_fused", chosen, queries)
    streams = chosen["streams"]

    def launch(entry: str, rows: int, smem: int) -> Launch:
        grid = (ceil_div(rows, tile_m), 1, heads)
        return Launch(FILE, entry, grid, 32 * (tile_m // MMA_ROWS), smem, compiled)

    if chosen["scores"] == "shared":
        check_count("chunked_fused", shape, chunk, len(queries))
        whole, last = (launch("chunked_slice", part.rows, slice_smem) for part in (queries[0], queries[-1]))
        lanes = [replace(whole, lane=lane) for lane in range(streams)]
        launches = [lanes[index % streams] for index in range(len(queries) - 1)]
        return Plan((*launches, replace(last, lane=len(launches) % streams)), chosen, {}, rounding)
    check_count("chunked_fused", shape, chunk, sum(2 * ceil_div(part.keys, chunk) + 1 for part in queries))
    scores = square_tiles(shape, device, chosen)
    check_grid("chunked_fused", f"queries (tiles of {scores['TILE_M']})", queries[0].rows,
               GRID_LIMIT * scores["TILE_M"])
    launches = host_loop(
        queries, chunk, streams,
        lambda rows, keys: (scores_launch(shape, scores, rows, keys),
                            launch("chunked_pair", rows, pair_smem)),
        lambda rows: row_launch(shape, scores, "chunked_finish", rows))
    scratch = for_lanes(pair_scratch(shape, chosen, min(step, shape.m)), streams)
    return Plan(launches, chosen, scratch, rounding)


def _slice_rows(shape: AttentionShape, plan: Plan, part: QueryChunk) -> int:
    """Rows of Q, K and V that a launch's slices load: keys up to the end of the last chunk they see."""
    chunk, tile_m, count = plan.constants["chunk"], plan.constants["tile_m"], 0
    for row0 in range(0, part.rows, tile_m):
        rows = min(tile_m, part.rows - row0)
        keys = walked_keys(shape, chunk, part.m0 + row0 + rows)
        count += 2 * keys + (rows if keys else 0)
    return count


def _pair_bytes(shape: AttentionShape, plan: Plan, part: QueryChunk) -> tuple[int, int]:
    """Bytes a head loads and stores for one chunk of queries, O and LSE aside.

    S once each way, O' for every chunk of keys.
    """
    (_, rows, keys), constants = part, plan.constants
    size, sums = ELEMENT_BYTES[shape.dtype], ELEMENT_BYTES[plan.rounding.accumulate]
    tile = plan.launches[-1].constants["TILE_M"]  # of the scores pass
    pairs, columns, wide = ceil_div(keys, constants["chunk"]), round_up(keys, 8), rows * shape.d
    copied = rows if constants["layout"] == "row" else round_up(rows, 8)  # S, 16 bytes at a time
    q, k = ceil_div(keys, tile) * wide, ceil_div(rows, tile) * keys * shape.d
    v = ceil_div(rows, constants["tile_m"]) * keys * shape.d
    state = pairs * (wide * sums + rows * 8)
    return (q + k + v + copied * columns) * size + state, rows * columns * size + state


def cost(shape: AttentionShape, plan: Plan, lengths=None) -> Cost:
    """With scores in shared memory what flash loads with tiles of a slice by a chunk."""
    constants, size = plan.constants, ELEMENT_BYTES[shape.dtype]
    heads, loaded, stored = shape.b * shape.h, 0, shape.m * (shape.d * size + 4)
    for part in query_chunks(shape, constants["chunk"], _step(shape, constants)):
        if constants["scores"] == "shared":
            loaded += _slice_rows(shape, plan, part) * shape.d * size
        else:
            loads, stores = _pair_bytes(shape, plan, part)
            loaded, stored = loaded + loads, stored + stores
    return Cost(4 * heads * shape.visible * shape.d, heads * loaded, heads * stored, plan.launch_count,
                plan.scratch_bytes)


def arguments(shape: AttentionShape, plan: Plan, t) -> list:
    constants, lanes, bound = plan.constants, Arguments.of_lanes(shape, plan, t), []
    for known, part in zip(cycle(lanes), query_chunks(shape, constants["chunk"], _step(shape, constants))):
        rows = known.integer("rows", part.rows)
        if constants["scores"] == "shared":
            bound.append([*known.arrays("q", "k", "v", "o", "lse"), known.integer("m0", part.m0), rows,
                          *known.whole, *known.heads, known.sigma])
            continue
        for key0, keys in key_chunks(part.keys, constants["chunk"]):
            bound += [
                known.scores(part, key0, keys),
                known.once("pair", part.rows, key0, make=lambda: [
                    *known.arrays("s", "v", "m", "l", "sum"), rows, *known.pair(key0, keys), *known.heads,
                    known.integer("first", key0 == 0)]),
            ]
        bound.append(known.finish(part))
    return bound


ROW = Row(
    name="chunked_fused", family="prefill", file=FILE, archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"causal", "gqa", "lse"}),
    constants={"chunk": 512, "tile_m": None, "tile_n": None, "scores": "shared", "parallel": "grid",
               "layout": "row", "accumulate": "input", "streams": 1},
    teaches="The chunks repaired step by step: softmax and P V as one kernel, scores that stay in shared "
            "memory, query chunks side by side.",
    plan=plan, cost=cost, arguments=arguments,
)
