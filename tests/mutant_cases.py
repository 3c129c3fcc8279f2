"""The runs that mutants of kernels are tried in: of each family some planned ones, on small shapes with many tiles."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import cuattn
from cuattn.verdict import Verdict

DIM = 16
# Tunables with which small shapes have many tiles, and every entry of a file runs. Other kernels take their
# defaults.
_CHUNKED = {"chunk": 32, "tile_m": 32, "tile_n": 16}
CONSTANTS = {"cascade": ({"rows": 32, "keys": 16, "warps": 2, "stages": 3, "shares": 3},
                         {"rows": 16, "keys": 16, "warps": 1, "stages": 2, "shares": 5}),
             "chunked_atomic": (_CHUNKED,),
             "chunked_fused": (_CHUNKED, {**_CHUNKED, "scores": "global"}),
             "chunked_unfused": (_CHUNKED,),
             "flash": ({"block_m": 32, "block_n": 16, "warps": 2},),
             # With many stages shared memory has room for neither a second Q nor O.
             "flash_hopper": ({"block_m": 128, "block_n": 32}, {"block_m": 128, "block_n": 32, "stages": 25}),
             "mla": ({"rows": 16, "keys": 16, "stages": 3, "groups": 5},
                     {"rows": 32, "keys": 32, "stages": 2, "groups": 2}),
             "mla_hopper": ({"rows": 16, "keys": 32, "stages": 4, "share": 32, "groups": 5, "bulk": 8},
                            {"rows": 32, "keys": 64, "stages": 2, "share": 64, "groups": 2, "bulk": 8},
                            {"rows": 32, "keys": 64, "stages": 2, "share": 64, "groups": 2, "bulk": 128}),
             "paged": ({"splits": 3, "warps": 2, "stages": 3},),
             "paged_stream": ({"keys": 16, "warps": 2, "stages": 3, "groups": 5},
                              {"keys": 16, "warps": 2, "stages": 2, "groups": 2},
                              {"keys": 16, "warps": 2, "team": 2, "stages": 2, "groups": 3})}
PERSISTENT = ("flash_hopper",)  # kernels with as many blocks as multiprocessors


def _upload(machine, rng, *shape) -> np.ndarray:
    return machine.upload(rng.standard_normal(shape).astype("float16"))


@dataclass
class Case:
    """One planned run: what launches it, what it writes, and how that is judged."""

    run: Callable[[], object]
    outputs: dict[str, np.ndarray]
    judge: Callable[[], Verdict]


def _prefill(machine, row, constants, rng) -> Iterator[Case]:
    """Many tiles and ragged ends; blocks of which no row, or only some, sees a key; no keys at all; and, where a
    block takes several tiles of queries, more of these than blocks."""
    causal = "causal" in row.features
    shapes = [(1, 70, 150), (1, 180, 40), (1, 33, 0)]
    if row.name in PERSISTENT:
        shapes.append((30, 70, 90))
    for b, m, n in shapes:
        q, k, v = (_upload(machine, rng, b, length, 1, DIM) for length in (m, n, n))
        planned = cuattn.plan_attention(q, k, v, causal=causal, kernel=row.name, constants=constants)
        o, lse = planned.outputs
        yield Case(planned.run, {"o": o, "lse": lse}, lambda: cuattn.compare.check_attention(
            q, k, v, o, lse, causal=causal, rounding=planned.plan.rounding))
    if constants is not CONSTANTS.get(row.name, (constants,))[0]:
        return  # what other constants change has nothing to do with where rows lie
    if "varlen" in row.features:
        yield _packed(machine, row, constants, rng)
    if "paged" in row.features:
        yield _in_pages(machine, row, constants, rng)


def _packed(machine, row, constants, rng) -> Case:
    """Packed sequences; one has no queries, and NaN for keys and values, beside those of its neighbour."""
    q, k, v = (_upload(machine, rng, rows, 1, DIM) for rows in (160, 245, 245))
    k[150:180], v[150:180] = np.nan, np.nan
    offsets = (0, 70, 70, 160), (0, 150, 180, 245)
    arrays = [q, k, v, *(machine.upload(np.array(x, np.int32)) for x in offsets)]
    planned = cuattn.plan_attention_varlen(*arrays, max_seqlen_q=90, max_seqlen_k=150, causal=True,
                                           kernel=row.name, constants=constants)
    o, lse = planned.outputs
    return Case(planned.run, {"o": o, "lse": lse}, lambda: cuattn.compare.check_attention_varlen(
        *arrays, o, lse, causal=True, rounding=planned.plan.rounding))


def _in_pages(machine, row, constants, rng) -> Case:
    """Packed queries over keys and values in pages of no order: of many tiles, and of none."""
    queries, keys, page, width = (70, 33), (150, 0), 16, 10
    table = rng.permutation(2 * width).astype(np.int32).reshape(2, width)
    q, k, v = _upload(machine, rng, sum(queries), 1, DIM), *(_upload(machine, rng, 2 * width, page, 1, DIM)
                                                             for _ in range(2))
    offsets = [machine.upload(np.cumsum((0, *lengths), dtype=np.int32)) for lengths in (queries, keys)]
    planned = cuattn.plan_attention_varlen(q, k, v, *offsets, max_seqlen_q=70, max_seqlen_k=150, causal=True,
                                           block_table=machine.upload(table), kernel=row.name,
                                           constants=constants)
    rows = [x[table[0]].reshape(-1, 1, DIM)[: keys[0]] for x in (k, v)]
    o, lse = planned.outputs
    return Case(planned.run, {"o": o, "lse": lse}, lambda: cuattn.compare.check_attention_varlen(
        q, *rows, *offsets, o, lse, causal=True, rounding=planned.plan.rounding))


def _decode(machine, row, constants, rng) -> Iterator[Case]:
    """Splits of many tiles, of fewer than a ring holds, and empty ones; a sequence without keys. Of as many rows as
    warps that are a team take."""
    lengths, page, width = np.array([130, 5, 0, 1000], np.int32), 16, 64
    pages = rng.permutation(len(lengths) * width).astype(np.int32)
    k, v = (_upload(machine, rng, len(pages), page, 2, DIM) for _ in range(2))
    arrays = [_upload(machine, rng, len(lengths), 1, 40 if constants.get("team") else 4, DIM), k, v,
              machine.upload(pages.reshape(-1, width)), machine.upload(lengths)]
    planned = cuattn.plan_decode(*arrays, kernel=row.name, constants=constants)
    yield _of_parts(planned, lambda o, lse: cuattn.compare.check_decode(
        *arrays, o, lse, rounding=planned.plan.rounding))
    if "quantised" in row.features and constants is CONSTANTS[row.name][0]:
        yield _quantised(machine, row, constants, rng)


def _quantised(machine, row, constants, rng) -> Case:
    """The same over a cache of int8, whose rows are whole steps of a product."""
    lengths, page, width, d = np.array([130, 5], np.int32), 16, 16, 32
    pages = rng.permutation(len(lengths) * width).astype(np.int32)
    k, v = (machine.upload(rng.integers(-127, 128, (len(pages), page, 2, d)).astype("int8")) for _ in range(2))
    arrays = [_upload(machine, rng, len(lengths), 1, 4, d), k, v,
              machine.upload(pages.reshape(-1, width)), machine.upload(lengths)]
    cache = {"kv_dtype": "int8", "k_scale": 0.02, "v_scale": 0.02}
    planned = cuattn.plan_decode(*arrays, **cache, kernel=row.name, constants=constants)
    return _of_parts(planned, lambda o, lse: cuattn.compare.check_decode(
        *arrays, o, lse, **cache, rounding=planned.plan.rounding))


def _of_parts(planned, judge) -> Case:
    """What one block leaves for another is poisoned too, or a run would find that of the run before."""
    o, lse = planned.outputs
    parts = {name: planned.tensors[name].array for name in planned.plan.scratch if name not in planned.plan.zeroed}
    return Case(planned.run, {"o": o, "lse": lse, **parts}, lambda: judge(o, lse))


def _decode_mla(machine, row, constants, rng) -> Iterator[Case]:
    """Sequences of many tiles, of fewer than a ring holds, and without keys; heads that leave a tile rows over."""
    lengths, page, width = np.array([90, 5, 0, 130], np.int32), 16, 16
    pages = rng.permutation(len(lengths) * width).astype(np.int32)
    arrays = [_upload(machine, rng, len(lengths), 1, 20, 576), _upload(machine, rng, len(pages), page, 1, 576),
              machine.upload(pages.reshape(-1, width)), machine.upload(lengths)]
    planned = cuattn.plan_decode_mla(*arrays, softmax_scale=192**-0.5, kernel=row.name, constants=constants)
    yield _of_parts(planned, lambda o, lse: cuattn.compare.check_decode_mla(
        *arrays, o, lse, softmax_scale=192**-0.5))


def _decode_cascade(machine, row, constants, rng) -> Iterator[Case]:
    """Groups of many tiles of keys, of few and of none, more rows than a tile has, and keys behind them."""
    page, width = 16, 16
    pages = rng.permutation(4 * width).astype(np.int32).reshape(-1, width)
    q, (k, v) = _upload(machine, rng, 20, 1, 4, DIM), (_upload(machine, rng, 4 * width, page, 2, DIM) for _ in range(2))
    levels = [[machine.upload(np.array(x, np.int32)) for x in (offsets, table, lengths)]
              for offsets, table, lengths in (([0, 17, 18, 20], pages[:3], [130, 0, 40]), ([0, 20], pages[3:], [70]))]
    planned = cuattn.plan_decode_cascade(q, k, v, levels, kernel=row.name, constants=constants)
    yield _of_parts(planned, lambda o, lse: cuattn.compare.check_decode_cascade(q, k, v, levels, o, lse))


CASES = {"prefill": _prefill, "decode": _decode, "mla": _decode_mla, "cascade": _decode_cascade}
