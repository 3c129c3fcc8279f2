"""chunked_unfused: query chunks × key chunks as a host loop of launches (prefill/chunked_unfused.cu)."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

import numpy as np

from cuattn.kernels.base import (
    ELEMENT_BYTES,
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
    check_launches,
    resolve,
    round_up,
    tile_row,
)
from cuattn.kernels.shapes import AttentionShape

FILE = "prefill/chunked_unfused.cu"
ROW_WARPS = 4  # rows a block takes in the passes that give each a warp
KEY_STEP = 64  # keys of P V at once, at most
MOST_CHUNK, MOST_TILE_M, MOST_TILE_N = 2048, 128, 256  # more would not stay in registers
MOST_STREAMS = 32  # hardware queues of a device


class QueryChunk(NamedTuple):
    """`rows` queries from m0 on, and how many leading keys they walk: whole chunks, at most N."""

    m0: int
    rows: int
    keys: int


def walked_keys(shape: AttentionShape, chunk: int, end: int) -> int:
    """Leading keys up to the end of the last chunk that a query before `end` sees."""
    limit = end + shape.n - shape.m if shape.causal else shape.n
    return min(shape.n, round_up(max(limit, 0), chunk))


def query_chunks(shape: AttentionShape, chunk: int, step: int | None = None) -> Iterator[QueryChunk]:
    """Chunks of `step` queries, else of `chunk`; one without rows where there are no queries."""
    for m0 in range(0, max(shape.m, 1), step or chunk):
        rows = min(step or chunk, shape.m - m0)
        yield QueryChunk(m0, rows, walked_keys(shape, chunk, m0 + rows) if rows else 0)


def key_chunks(keys: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(first key, number of keys) of each chunk."""
    for key0 in range(0, keys, chunk):
        yield key0, min(chunk, keys - key0)


def score_tile_bytes(rows: int, cols: int, by_rows: bool) -> int:
    """sizeof(ScoreTile<rows, cols>) of prefill/chunked.cuh."""
    return 2 * (rows * tile_row(cols) if by_rows else cols * tile_row(rows))


def _smem(d: int, chosen) -> tuple[int, int]:
    """sizeof(ScoresSmem), sizeof(OutputSmem)."""
    row, tile_m, tile_n = tile_row(d), chosen["tile_m"], chosen["tile_n"]
    step, by_rows = min(tile_n, KEY_STEP), chosen["layout"] == "row"
    return 2 * row * (tile_m + tile_n), 2 * (score_tile_bytes(tile_m, step, by_rows) + 2 * step * row)


def check_chunk(kernel: str, chosen) -> None:
    """Refuses what no chunked kernel takes."""
    if chosen["chunk"] % MMA_ROWS or chosen["chunk"] > MOST_CHUNK:
        raise Unsupported(f"{kernel}: chunk must be a multiple of {MMA_ROWS} and at most {MOST_CHUNK}, got "
                          f"{chosen['chunk']}; change it")
    for name, values in (("layout", ("row", "column")), ("accumulate", ("input", *ELEMENT_BYTES))):
        if name in chosen:
            check_choice(kernel, chosen, name, values)


def check_tile(kernel: str, name: str, tile: int, chunk: int, most: int) -> None:
    """Refuses tiles that do not fit into their chunk."""
    if tile % MMA_ROWS or chunk % tile or tile > most:
        raise Unsupported(f"{kernel}: {name} must be a multiple of {MMA_ROWS} that divides the chunk, {chunk}, "
                          f"and is at most {most}, got {tile}; change it")


def _check(shape: AttentionShape, device, chosen, smem: int) -> None:
    """Refuses tiles that do not fit into their chunk, or a block."""
    check_chunk("chunked_unfused", chosen)
    for name, most in (("tile_m", MOST_TILE_M), ("tile_n", MOST_TILE_N)):
        check_tile("chunked_unfused", name, chosen[name], chosen["chunk"], most)
    if smem > device.smem_per_block:
        raise Unsupported(f"chunked_unfused: tiles {chosen['tile_m']} × {chosen['tile_n']} at head dim "
                          f"{shape.d} need {smem} bytes of shared memory, {device.name} grants "
                          f"{device.smem_per_block}; choose smaller tile_m or tile_n")


def check_count(kernel: str, shape: AttentionShape, chunk: int, count: int) -> None:
    """Refuses heads that no grid takes, and more launches than anybody waits for."""
    check_grid(kernel, "heads in all (B · H)", shape.b * shape.h)
    check_launches(kernel, count, f"with chunks of {chunk}", "choose a larger chunk")


def sum_dtype(shape: AttentionShape, chosen) -> str:
    """What O is summed in."""
    return shape.dtype if chosen["accumulate"] == "input" else chosen["accumulate"]


def compiled_for(shape: AttentionShape, chosen) -> dict:
    """The constants of chunked_unfused.cu."""
    scores_smem, output_smem = _smem(shape.d, chosen)
    return {
        "CHUNK": chosen["chunk"], "TILE_M": chosen["tile_m"], "TILE_N": chosen["tile_n"], "HEAD_DIM": shape.d,
        "CAUSAL": shape.causal, "Element": shape.dtype, "Sum": sum_dtype(shape, chosen),
        "BY_ROWS": chosen["layout"] == "row", "SCORES_SMEM_BYTES": scores_smem,
        "OUTPUT_SMEM_BYTES": output_smem,
    }


def pair_scratch(shape: AttentionShape, chosen, rows: int) -> dict:
    """One chunk pair's scores, with `rows` queries; the sums of O and the statistics of these queries."""
    heads, columns = shape.b * shape.h, min(chosen["chunk"], max(round_up(shape.n, 8), 8))
    extent = (rows, columns) if chosen["layout"] == "row" else (columns, round_up(rows, 8))
    return {"s": ((heads, *extent), shape.dtype), "sum": ((heads, rows, shape.d), sum_dtype(shape, chosen)),
            "m": ((heads, rows), "float32"), "l": ((heads, rows), "float32")}


def scores_launch(shape: AttentionShape, compiled, rows: int, keys: int) -> Launch:
    """S of a chunk pair."""
    tile_m, smem = compiled["TILE_M"], compiled["SCORES_SMEM_BYTES"]
    grid = (ceil_div(keys, compiled["TILE_N"]), ceil_div(rows, tile_m), shape.b * shape.h)
    return Launch(FILE, "chunked_scores", grid, 32 * (tile_m // MMA_ROWS), smem, compiled)


def row_launch(shape: AttentionShape, compiled, entry: str, rows: int) -> Launch:
    """A pass that gives each row a warp."""
    grid = (ceil_div(rows, ROW_WARPS), shape.b * shape.h, 1)
    return Launch(FILE, entry, grid, 32 * ROW_WARPS, 0, compiled)


def host_loop(queries: Iterable[QueryChunk], chunk: int, streams: int, pair, finish) -> tuple[Launch, ...]:
    """Every chunk pair's launches, and those at a query chunk's end; pairs of one size share theirs.

    Query chunks take the lanes in turn.
    """
    known: dict[tuple[int, int, int], tuple[Launch, ...]] = {}
    launches: list[Launch] = []
    for index, (_, rows, keys) in enumerate(queries):
        lane = index % streams
        for _, some in key_chunks(keys, chunk):
            key = rows, some, lane
            if key not in known:
                known[key] = tuple(replace(launch, lane=lane) for launch in pair(rows, some))
            launches += known[key]
        launches.append(replace(finish(rows), lane=lane))
    return tuple(launches)


def for_lanes(scratch: dict, streams: int) -> dict:
    """The scratch once for each lane: `s`, `s1`, `s2`, …"""
    return {f"{name}{lane or ''}": what for lane in range(streams) for name, what in scratch.items()}


def check_streams(kernel: str, chosen, queries: list[QueryChunk]) -> None:
    """Refuses more streams than a device runs side by side; as many as there are query chunks are enough."""
    if chosen["streams"] > MOST_STREAMS:
        raise Unsupported(f"{kernel}: expected at most {MOST_STREAMS} streams, got {chosen['streams']}; "
                          "choose fewer")
    chosen["streams"] = min(chosen["streams"], len(queries))


def plan(shape: AttentionShape, device, overrides=None) -> Plan:
    """The host loop, written out."""
    chosen = resolve(ROW.constants, overrides)
    _check(shape, device, chosen, max(_smem(shape.d, chosen)))
    chunk, compiled = chosen["chunk"], compiled_for(shape, chosen)
    queries = list(query_chunks(shape, chunk))
    check_streams("chunked_unfused", chosen, queries)
    check_count("chunked_unfused", shape, chunk, sum(4 * ceil_div(part.keys, chunk) + 1 for part in queries))

    def pair(rows: int, keys: int) -> tuple[Launch, ...]:
        scores = scores_launch(shape, compiled, rows, keys)
        output = (scores.grid[1], 1, scores.grid[2])
        return (
            scores, row_launch(shape, compiled, "chunked_softmax", rows),
            Launch(FILE, "chunked_output", output, scores.block, compiled["OUTPUT_SMEM_BYTES"], compiled),
            row_launch(shape, compiled, "chunked_rescale", rows),
        )

    launches = host_loop(queries, chunk, chosen["streams"], pair,
                         lambda rows: row_launch(shape, compiled, "chunked_finish", rows))
    scratch = pair_scratch(shape, chosen, min(chunk, shape.m))
    scratch |= {"part": scratch["sum"], "factor": scratch["m"]}
    return Plan(launches, chosen, for_lanes(scratch, chosen["streams"]), Chunked(chunk, compiled["Sum"]))


def cost(shape: AttentionShape, plan: Plan, lengths=None) -> Cost:
    """A score of a chunk pair is stored, loaded, stored as a weight, and loaded; the rest goes by rows."""
    chunk, tile_m, tile_n = (plan.constants[name] for name in ("chunk", "tile_m", "tile_n"))
    heads, size, sums = shape.b * shape.h, ELEMENT_BYTES[shape.dtype], ELEMENT_BYTES[plan.scratch["sum"][1]]
    loaded = stored = 0
    for _, rows, keys in query_chunks(shape, chunk):
        pairs, columns, wide = ceil_div(keys, chunk), round_up(keys, 8), rows * shape.d
        tiles, tiles_n = ceil_div(rows, tile_m), ceil_div(keys, tile_n)
        copied = rows if plan.constants["layout"] == "row" else round_up(rows, 8)  # P, 16 bytes at a time
        loaded += (tiles_n * wide + 2 * tiles * keys * shape.d + (rows + copied) * columns) * size
        loaded += 2 * pairs * wide * sums  # part, and what was summed before it or is finished
        loaded += max(pairs - 1, 0) * rows * 12 + (rows * 8 if pairs else 0)  # m and l, factor; m and l
        stored += 2 * rows * columns * size + 2 * pairs * wide * sums + pairs * rows * 12
        stored += wide * size + rows * 4
    return Cost(4 * heads * shape.visible * shape.d, heads * loaded, heads * stored, plan.launch_count,
                plan.scratch_bytes)


class Arguments:
    """What the launches of a chunked kernel take.

    Lists and scalars that several take are one object: there may be many thousand launches.
    """

    def __init__(self, shape: AttentionShape, t):
        self.t, self.known = t, {}
        self.whole = [("M", np.int32(shape.m)), ("N", np.int32(shape.n))]
        self.heads = [("H", np.int32(shape.h)), ("GROUP", np.int32(shape.group))]
        self.sigma = ("sigma", np.float32(t["softmax_scale"]))

    @classmethod
    def of_lanes(cls, shape: AttentionShape, plan: Plan, t) -> list[Arguments]:
        """For each lane those with its scratch."""
        own = [name for name in plan.scratch if not name[-1].isdigit()]
        return [cls(shape, {**t, **{name: t[f"{name}{lane or ''}"] for name in own}})
                for lane in range(plan.constants["streams"])]

    def once(self, *key, make) -> list:
        """What `make` made when this key was new."""
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def arrays(self, *names: str) -> list:
        return [(name, self.t[name]) for name in names]

    def integer(self, name: str, value) -> tuple:
        return self.once(name, value, make=lambda: (name, np.int32(value)))

    def pair(self, key0: int, keys: int) -> list:
        return [self.integer("key0", key0), self.integer("keys", keys)]

    def scores(self, part: QueryChunk, key0: int, keys: int) -> list:
        """Of `chunked_scores`."""
        rows = [self.integer("m0", part.m0), self.integer("rows", part.rows)]
        return [*self.arrays("q", "k", "s"), *rows, *self.pair(key0, keys), *self.whole, *self.heads,
                self.sigma]

    def finish(self, part: QueryChunk) -> list:
        """Of `chunked_finish`."""
        return [*self.arrays("sum", "m", "l", "o", "lse"), self.integer("m0", part.m0),
                self.integer("rows", part.rows), self.heads[0], self.integer("empty", part.keys == 0)]


def arguments(shape: AttentionShape, plan: Plan, t) -> list:
    chunk, lanes, bound = plan.constants["chunk"], Arguments.of_lanes(shape, plan, t), []
    for known, part in zip(cycle(lanes), query_chunks(shape, chunk)):
        rows = known.integer("rows", part.rows)
        for key0, keys in key_chunks(part.keys, chunk):
            first = known.integer("first", key0 == 0)
            bound += [
                known.scores(part, key0, keys),
                known.once("softmax", part.rows, keys, key0 == 0, make=lambda: [
                    *known.arrays("s", "m", "l", "factor"), rows, known.integer("cols", round_up(keys, 8)),
                    first]),
                known.once("output", part.rows, key0, make=lambda: [
                    *known.arrays("s", "v", "part"), rows, *known.pair(key0, keys), *known.heads]),
                known.once("rescale", part.rows, key0 == 0, make=lambda: [
                    *known.arrays("part", "factor", "sum"), rows, first]),
            ]
        bound.append(known.finish(part))
    return bound


ROW = Row(
    name="chunked_unfused", family="prefill", file=FILE, archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"causal", "gqa", "lse"}),
    constants={"chunk": 128, "tile_m": 32, "tile_n": 64, "accumulate": "input", "layout": "row",
               "streams": 1},
    teaches="Chunks save the memory of the score matrix; looped over by the host, each one's scores still go "
            "through global memory, in four small launches.",
    plan=plan, cost=cost, arguments=arguments,
)
