"""chunked_unfused: query chunks × key chunks as a host loop of launches (prefill/chunked_unfused.cu)."""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cuattn.kernels.base import (
    ELEMENT_BYTES,
    MMA_ROWS,
    AttentionShape,
    Chunked,
    Cost,
    Launch,
    Plan,
    Row,
    Unsupported,
    ceil_div,
    check_grid,
    resolve,
    round_up,
    tile_row,
)

FILE = "prefill/chunked_unfused.cu"
ROW_WARPS = 4  # rows a block takes in the passes that give each a warp
KEY_STEP = 64  # keys of P V at once, at most
MOST_CHUNK, MOST_TILE_M, MOST_TILE_N = 2048, 128, 256  # more would not stay in registers
MOST_LAUNCHES = 1 << 19  # seconds of launching; beyond, the host would hold gigabytes of them


class QueryChunk(NamedTuple):
    """`rows` queries from m0 on, and how many leading keys they walk: whole chunks, at most N."""

    m0: int
    rows: int
    keys: int


def query_chunks(shape: AttentionShape, chunk: int) -> Iterator[QueryChunk]:
    """The chunks of queries; one without rows where there are no queries."""
    for m0 in range(0, max(shape.m, 1), chunk):
        rows = min(chunk, shape.m - m0)
        limit = m0 + rows + shape.n - shape.m if shape.causal else shape.n  # keys that the last row sees
        yield QueryChunk(m0, rows, min(shape.n, round_up(max(limit, 0), chunk)) if rows else 0)


def _key_chunks(keys: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(first key, number of keys) of each chunk."""
    for key0 in range(0, keys, chunk):
        yield key0, min(chunk, keys - key0)


def _smem(d: int, tile_m: int, tile_n: int) -> tuple[int, int]:
    """sizeof(ScoresSmem), sizeof(OutputSmem)."""
    row, step = tile_row(d), min(tile_n, KEY_STEP)
    return 2 * row * (tile_m + tile_n), 2 * 2 * (tile_m * tile_row(step) + step * row)


def check_tiles(kernel: str, chosen) -> None:
    """Refuses chunks and tiles that do not fit into each other."""
    chunk = chosen["chunk"]
    if chunk % MMA_ROWS or chunk > MOST_CHUNK:
        raise Unsupported(f"{kernel}: chunk must be a multiple of {MMA_ROWS} and at most {MOST_CHUNK}, got "
                          f"{chunk}; change it")
    for name, most in (("tile_m", MOST_TILE_M), ("tile_n", MOST_TILE_N)):
        tile = chosen[name]
        if tile % MMA_ROWS or chunk % tile or tile > most:
            raise Unsupported(f"{kernel}: {name} must be a multiple of {MMA_ROWS} that divides the chunk, {chunk}, "
                              f"and is at most {most}, got {tile}; change it")
    if chosen["accumulate"] not in ("input", *ELEMENT_BYTES):
        raise Unsupported(f"{kernel}: accumulate must be 'input', 'float16', 'bfloat16' or 'float32', got "
                          f"{chosen['accumulate']!r}; choose one")


def _pair(shape: AttentionShape, chosen, smem, compiled, rows: int, keys: int) -> tuple[Launch, ...]:
    """The four launches of a chunk pair."""
    heads, threads = shape.b * shape.h, 32 * (chosen["tile_m"] // MMA_ROWS)
    tiles, by_row = ceil_div(rows, chosen["tile_m"]), (ceil_div(rows, ROW_WARPS), heads, 1)
    tiles_n = ceil_div(keys, chosen["tile_n"])
    return (
        Launch(FILE, "chunked_scores", (tiles_n, tiles, heads), threads, smem[0], compiled),
        Launch(FILE, "chunked_softmax", by_row, 32 * ROW_WARPS, 0, compiled),
        Launch(FILE, "chunked_output", (tiles, 1, heads), threads, smem[1], compiled),
        Launch(FILE, "chunked_rescale", by_row, 32 * ROW_WARPS, 0, compiled),
    )


def plan(shape: AttentionShape, device, overrides=None) -> Plan:
    """The host loop, written out; pairs of one size share their launches."""
    chosen = resolve(ROW.constants, overrides)
    check_tiles("chunked_unfused", chosen)
    chunk, heads, sums = chosen["chunk"], shape.b * shape.h, chosen["accumulate"]
    sums = shape.dtype if sums == "input" else sums
    check_grid("chunked_unfused", "heads in all (B · H)", heads)
    smem = _smem(shape.d, chosen["tile_m"], chosen["tile_n"])
    if max(smem) > device.smem_per_block:
        raise Unsupported(f"chunked_unfused: tiles {chosen['tile_m']} × {chosen['tile_n']} at head dim {shape.d} "
                          f"need {max(smem)} bytes of shared memory, {device.name} grants "
                          f"{device.smem_per_block}; choose smaller tile_m or tile_n")
    queries = list(query_chunks(shape, chunk))
    count = sum(4 * ceil_div(part.keys, chunk) + 1 for part in queries)
    if count > MOST_LAUNCHES:
        raise Unsupported(f"chunked_unfused: expected at most {MOST_LAUNCHES} launches, got {count} with chunks of "
                          f"{chunk}; choose a larger chunk")
    compiled = {
        "CHUNK": chunk, "TILE_M": chosen["tile_m"], "TILE_N": chosen["tile_n"], "HEAD_DIM": shape.d,
        "CAUSAL": shape.causal, "Element": shape.dtype, "Sum": sums, "SCORES_SMEM_BYTES": smem[0],
        "OUTPUT_SMEM_BYTES": smem[1],
    }
    pairs: dict[tuple[int, int], tuple[Launch, ...]] = {}
    launches: list[Launch] = []
    for _, rows, keys in queries:
        for _, some in _key_chunks(keys, chunk):
            if (rows, some) not in pairs:
                pairs[rows, some] = _pair(shape, chosen, smem, compiled, rows, some)
            launches += pairs[rows, some]
        launches.append(Launch(FILE, "chunked_finish", (ceil_div(rows, ROW_WARPS), heads, 1), 32 * ROW_WARPS, 0,
                               compiled))
    rows, columns = min(chunk, shape.m), min(chunk, max(round_up(shape.n, 8), 8))
    scratch = {"s": ((heads, rows, columns), shape.dtype), "part": ((heads, rows, shape.d), sums),
               "sum": ((heads, rows, shape.d), sums)}
    scratch |= {name: ((heads, rows), "float32") for name in ("m", "l", "factor")}
    return Plan(tuple(launches), chosen, scratch, Chunked(chunk, sums))


def cost(shape: AttentionShape, plan: Plan, lengths=None) -> Cost:
    """A score of a chunk pair is stored, loaded, stored as a weight, and loaded; the rest goes by rows."""
    chunk, tile_m, tile_n = (plan.constants[name] for name in ("chunk", "tile_m", "tile_n"))
    heads, size, sums = shape.b * shape.h, ELEMENT_BYTES[shape.dtype], ELEMENT_BYTES[plan.scratch["sum"][1]]
    loaded = stored = 0
    for _, rows, keys in query_chunks(shape, chunk):
        pairs, columns = ceil_div(keys, chunk), round_up(keys, 8)
        tiles, tiles_n, wide = ceil_div(rows, tile_m), ceil_div(keys, tile_n), rows * shape.d
        loaded += (tiles_n * wide + 2 * tiles * keys * shape.d + 2 * rows * columns) * size  # Q, K and V, S and P
        loaded += 2 * pairs * wide * sums  # part, and what was summed before it or is finished
        loaded += max(pairs - 1, 0) * rows * 12 + (rows * 8 if pairs else 0)  # m and l, factor; m and l
        stored += 2 * rows * columns * size + 2 * pairs * wide * sums + pairs * rows * 12
        stored += wide * size + rows * 4
    return Cost(4 * heads * shape.visible * shape.d, heads * loaded, heads * stored, plan.launch_count,
                plan.scratch_bytes)


def arguments(shape: AttentionShape, plan: Plan, t) -> list:
    """Lists and scalars that several launches take are one object: there may be many thousand launches."""
    chunk = plan.constants["chunk"]
    h, group, sigma = ("H", np.int32(shape.h)), ("GROUP", np.int32(shape.group)), np.float32(t["softmax_scale"])
    whole = [("M", np.int32(shape.m)), ("N", np.int32(shape.n)), h, group, ("sigma", sigma)]
    s, p, part, sums = ("s", t["s"]), ("p", t["s"]), ("part", t["part"]), ("sum", t["sum"])
    state, factor = [("m", t["m"]), ("l", t["l"])], ("factor", t["factor"])
    bound, known = [], {}

    def shared(key, make) -> list:
        if key not in known:
            known[key] = make()
        return known[key]

    for m0, rows, keys in query_chunks(shape, chunk):
        first_row, count = ("m0", np.int32(m0)), shared(rows, lambda: ("rows", np.int32(rows)))
        for key0, some in _key_chunks(keys, chunk):
            pair = shared((key0, some), lambda: [("key0", np.int32(key0)), ("keys", np.int32(some))])
            first = ("first", np.int32(key0 == 0))
            bound += [
                [("q", t["q"]), ("k", t["k"]), s, first_row, count, *pair, *whole],
                shared(("softmax", rows, some, key0 == 0), lambda: [
                    s, *state, factor, count, ("cols", np.int32(round_up(some, 8))), first]),
                shared(("output", rows, key0), lambda: [p, ("v", t["v"]), part, count, *pair, h, group]),
                shared(("rescale", rows, key0 == 0), lambda: [part, factor, sums, count, first]),
            ]
        bound.append([sums, *state, ("o", t["o"]), ("lse", t["lse"]), first_row, count, h,
                      ("empty", np.int32(keys == 0))])
    return bound


ROW = Row(
    name="chunked_unfused", family="prefill", file=FILE, archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"causal", "gqa", "lse"}),
    constants={"chunk": 128, "tile_m": 32, "tile_n": 64, "accumulate": "input"},
    teaches="Chunks save the memory of the score matrix; looped over by the host, every one's scores still go "
            "through global memory, in four small launches.",
    plan=plan, cost=cost, arguments=arguments,
)
