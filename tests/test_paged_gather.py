"""What is particular to `paged_gather`: the flat pieces it makes, and that it then is `paged` over such a cache."""
from __future__ import annotations

import numpy as np
import pytest
from test_decode import Cache, make_cache, run

import cuattn
from cuattn.binding import repeatable
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.shapes import DecodeShape

KERNEL = "paged_gather"
CARD = for_arch("sm_90a")
SPLITS = {"splits": 2}


def plan(shape: DecodeShape):
    return ROWS[KERNEL].plan(shape, CARD, SPLITS)


def flat(cache: Cache, width: int) -> Cache:
    """The same sequences in one page each."""
    sequences, page = len(cache.lengths), cache.k.shape[1]
    table = np.arange(sequences, dtype=np.int32)[::-1, None].copy()
    k, v = (np.full((sequences, width, *cache.k.shape[2:]), np.nan, cache.k.dtype) for _ in range(2))
    for b, n in enumerate(cache.lengths):
        used = cache.table[b, : -(-n // page)]
        for to, pool in ((k, cache.k), (v, cache.v)):
            to[table[b, 0], :n] = pool[used].reshape(-1, *pool.shape[2:])[:n]
    return Cache(k, v, table, cache.lengths)


def test_the_flat_pieces_hold_the_sequences_and_nothing_else(machine, rng, randn):
    cache, q = make_cache(rng, [0, 1, 37, 300], 16, 2, 64), randn(4, 1, 4, 64)
    p = cuattn.plan_decode(*(machine.upload(x) for x in (q, cache.k, cache.v, cache.table, cache.lengths)),
                           kernel=KERNEL, constants=SPLITS)
    assert repeatable(p)  # the scratch is the operation's own: a later call on a GPU need not be planned
    made = {name: p.tensors[name].array for name in ("flat_k", "flat_v", "flat_table")}
    for array in made.values():
        machine.poison(array)
    p.run()
    machine.synchronize()
    k, v, table = (machine.download(array) for array in made.values())
    assert (table == np.arange(4)[:, None]).all() and k.shape == v.shape == (4, cache.table.shape[1] * 16, 2, 64)
    expected = flat(cache, k.shape[1])
    order = expected.table[:, 0]
    np.testing.assert_array_equal(k, expected.k[order])  # NaN behind each end, where the poison still is
    np.testing.assert_array_equal(v, expected.v[order])


def test_the_rest_is_what_paged_does_with_one_page_a_sequence(machine, rng, randn):
    """Pages of 16,384 tokens are a contiguous cache: the same bits as from one that was gathered."""
    cache, q = make_cache(rng, [300, 0, 77], 16, 2, 64), randn(3, 1, 4, 64)
    _, o, lse = run(machine, KERNEL, q, cache, constants=SPLITS)
    _, o_flat, lse_flat = run(machine, "paged", q, flat(cache, 16384), constants=SPLITS)
    assert (o == o_flat).all() and (lse == lse_flat).all()


def test_the_copy_is_twice_the_cache_and_its_scratch_the_widest_sequence_for_all():
    shape, lengths = DecodeShape(16, 32, 8, 128, 16, 256, "bfloat16"), [4096] * 8 + [100] * 8
    made, paged = plan(shape), ROWS["paged"].plan(shape, CARD, SPLITS)
    cost, fused = (row.cost(shape, p, lengths) for row, p in ((ROWS[KERNEL], made), (ROWS["paged"], paged)))
    rows = sum(lengths) * 2 * 8 * 128 * 2
    blocks = 16 * 256
    assert cost.bytes_loaded - fused.bytes_loaded == rows + 4 * sum(lengths) + blocks * 256 * 4
    assert cost.bytes_stored - fused.bytes_stored == rows + 16 * 4
    assert cost.scratch_bytes - fused.scratch_bytes == 16 * 4096 * 2 * 8 * 128 * 2 + 16 * 4
    assert (cost.launches, cost.flops) == (fused.launches + 1, fused.flops)


def test_a_wider_table_compiles_nothing_anew():
    first, second = (plan(DecodeShape(2, 4, 2, 64, 16, width, "float16")) for width in (4, 5))
    assert [launch.constants for launch in first.launches] == [launch.constants for launch in second.launches]


def test_what_no_page_holds_is_refused():
    with pytest.raises(Unsupported, match="paged_gather: expected at most 1073741824 tokens a row of block_table, "
                                          "got 1073741840; split the call"):
        plan(DecodeShape(1, 4, 2, 64, 16, (1 << 26) + 1, "float16"))
