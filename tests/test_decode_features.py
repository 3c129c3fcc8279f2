"""Decode with several queries a sequence, in every kernel that offers it."""
from __future__ import annotations

import numpy as np
import pytest
from offering import TILES, offering
from test_decode import make_cache, run

import cuattn
from cuattn.cpu import check_schedules
from cuattn.kernels import ROWS

# --- several queries a sequence


def lengths_around(m: int) -> list[int]:
    """None, fewer keys than queries, as many; on and beside the ends of tiles and of rounds."""
    return sorted({0, 1, m - 1, m, m + 1, 15, 16, 17, 31, 32, 33, 15 + m, 16 + m, 200})


@offering("queries", "decode")
@pytest.mark.parametrize("m, group, page", [
    (2, 1, 16), (3, 3, 1), (8, 4, 16), (2, 8, 16), (8, 32, 16)])
def test_several_queries(machine, rng, randn, kernel, m, group, page):
    """Rows that fill a tile, part of one and several; unused slots hold NaN."""
    cache = make_cache(rng, lengths_around(m), page, 2, 64)
    q = randn(len(cache.lengths), m, 2 * group, 64)
    _, o, lse = run(machine, kernel, q, cache, constants=TILES[kernel])
    for b, n in enumerate(cache.lengths):
        blind = max(m - n, 0)
        assert (o[b, :blind] == 0).all() and np.isneginf(lse[b, :, :blind]).all()
        assert np.isfinite(lse[b, :, blind:]).all()


@offering("queries", "decode")
def test_queries_that_see_all_keys(machine, rng, randn, kernel):
    cache = make_cache(rng, lengths_around(3), 16, 2, 64)
    q = randn(len(cache.lengths), 3, 8, 64)
    _, _, lse = run(machine, kernel, q, cache, causal=False, constants=TILES[kernel])
    _, _, lse_causal = run(machine, kernel, q, cache, constants=TILES[kernel])
    same = (lse == lse_causal).all(axis=1)  # (B, M): nothing is hidden from the last query
    assert same[:, 2].all() and not same[1:, :2].any()


@pytest.mark.parametrize("causal", [True, False])
def test_of_one_query_nothing_is_hidden(cpu, rng, randn, causal):
    """What is compiled is what it is without a mask."""
    cache = make_cache(rng, [33], 16, 1, 64)
    p, *_ = run(cpu, "paged", randn(1, 1, 4, 64), cache, causal=causal)
    assert not p.shape.causal and not p.shape.features


@offering("queries", "decode")
def test_the_largest_head_dim(machine, rng, randn, kernel):
    cache = make_cache(rng, [2, 100], 16, 2, 256, "bfloat16")
    run(machine, kernel, randn(2, 3, 8, 256, dtype="bfloat16"), cache)


@offering("queries", "decode")
def test_each_query_sees_exactly_its_keys(machine, rng, kernel):
    lengths = [1, 300, 77, 0]
    probe = cuattn.compare.uniform_probe(4, 8, 2, 3, 300, 64, causal=True, lengths=lengths)
    _, o, lse = run(machine, kernel, probe.q, cache_of(rng, probe, lengths), constants=TILES[kernel])
    cuattn.compare.check_probe(o, lse, probe).raise_if_bad()


def cache_of(rng, probe, lengths):
    """The probe's keys and values on pages of 16."""
    cache = make_cache(rng, lengths, 16, probe.k.shape[2], probe.k.shape[3])
    for b, n in enumerate(lengths):
        for position in range(n):
            page, slot = cache.table[b, position // 16], position % 16
            cache.k[page, slot], cache.v[page, slot] = probe.k[b, position], probe.v[b, position]
    return cache


@offering("queries", "decode")
def test_strided_queries_and_output(machine, rng, randn, kernel):
    """Queries that lie among other tokens; O as (B, H, M, D), with a margin that stays NaN."""
    cache = make_cache(rng, [50, 3], 16, 2, 64)
    q = randn(2, 4, 3, 8, 64)
    sea = machine.empty((2, 8, 5, 64), "float16")
    machine.poison(sea)
    arrays = [machine.upload(x) for x in (q, cache.k, cache.v, cache.table, cache.lengths)]
    p = cuattn.plan_decode(arrays[0][:, 1:, 1], *arrays[1:], kernel=kernel, constants=TILES[kernel],
                           out=sea[:, :, 1:4].transpose(0, 2, 1, 3))
    o, lse = p.run()
    machine.synchronize()
    cuattn.compare.check_decode(q[:, 1:, 1], cache.k, cache.v, cache.table, cache.lengths, machine.download(o),
                                machine.download(lse)).raise_if_bad()
    assert np.isnan(machine.download(sea)[:, :, [0, 4]]).all()


@offering("queries", "decode")
def test_queries_give_equal_bits_under_every_schedule(cpu, rng, randn, kernel):
    cache = make_cache(rng, [130, 300, 0, 2], 16, 1, 64)
    check_bits(cpu, randn(4, 3, 4, 64), cache, kernel)


def check_bits(cpu, q, cache, kernel, **options):
    """Under every schedule; what blocks leave for others is poisoned too."""
    arrays = [cpu.upload(x) for x in (q, cache.k, cache.v, cache.table, cache.lengths)]
    p = cuattn.plan_decode(*arrays, kernel=kernel, constants=TILES[kernel], **options)
    o, lse = p.outputs
    parts = {name: p.tensors[name].array for name in ("part", "part_lse")}
    check_schedules(cpu, p.run, {"o": o, "lse": lse, **parts})


@pytest.mark.gpu
@offering("queries", "decode")
def test_both_machines_agree(cpu, rng, randn, kernel):
    cache, q = make_cache(rng, [300, 2, 77], 16, 2, 128, "bfloat16"), randn(3, 4, 8, 128, dtype="bfloat16")
    (_, o, lse), (_, o_gpu, lse_gpu) = (run(machine, kernel, q, cache)
                                        for machine in (cpu, cuattn.open_machine("gpu")))
    tol = cuattn.compare.check_decode(q, cache.k, cache.v, cache.table, cache.lengths, o, lse).tol
    assert np.abs(o.astype(float) - o_gpu.astype(float)).max() <= tol
    np.testing.assert_allclose(lse, lse_gpu, atol=1e-5, rtol=2**-21)


# --- who offers what


def test_kernels_that_lack_a_feature_say_who_has_it(rng, randn):
    cache = make_cache(rng, [20], 16, 1, 64)
    arrays = randn(1, 2, 1, 64), cache.k, cache.v, cache.table, cache.lengths
    lacking = [name for name, row in ROWS.items() if row.family == "decode" and "queries" not in row.features]
    for name in lacking:
        said = rf"one that offers several queries a sequence \(paged or paged_stream\), got '{name}'; choose"
        with pytest.raises(cuattn.ContractError, match=said):
            cuattn.decode(*arrays, kernel=name)
    assert lacking == ["paged_gather", "paged_launches"]

