"""Decode with several queries a sequence, windows, caps on scores and sinks, in every kernel that offers them."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from counted import run_counted
from offering import TILES, offering
from test_decode import make_cache, run

import cuattn
from cuattn import dispatch
from cuattn.cpu import check_schedules
from cuattn.kernels import ROWS
from cuattn.kernels.shapes import DecodeShape

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
    p, *_ = run(cpu, "paged", randn(1, 1, 4, 64), cache, causal=causal, constants=TILES["paged"])
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


# --- windows


@offering("window", "decode")
@pytest.mark.parametrize("m, causal, window", [
    (1, True, (0, -1)), (1, True, (16, 0)), (1, False, (40, 3)), (3, True, (0, 0)), (3, True, (5, -1)),
    (3, True, (31, 0)), (3, False, (7, 1)), (3, False, (-1, 1)), (3, False, (14, -1))])
def test_windows(machine, rng, randn, kernel, m, causal, window):
    """Narrower than a tile and than the queries, over several rounds, on one side alone."""
    cache = make_cache(rng, lengths_around(m), 16, 2, 64)
    q = randn(len(cache.lengths), m, 8, 64)
    run(machine, kernel, q, cache, causal=causal, window_size=window, constants=TILES[kernel])


@offering("window", "decode")
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("width", [0, 17])
def test_a_window_sees_exactly_its_keys(machine, rng, kernel, m, width):
    """(W, 0) sees W + 1 keys: the uniform probe counts them."""
    lengths = [300, 40, 2]
    probe = cuattn.compare.uniform_probe(3, 8, 2, m, 300, 64, causal=True, lengths=lengths, window_size=(width, 0))
    assert (probe.visible[0] == width + 1).all()
    _, o, lse = run(machine, kernel, probe.q, cache_of(rng, probe, lengths), window_size=(width, 0),
                    constants=TILES[kernel])
    cuattn.compare.check_probe(o, lse, probe).raise_if_bad()


@offering("window", "decode")
@pytest.mark.parametrize("m", [1, 3])
def test_keys_before_every_window_are_not_read(machine, rng, randn, kernel, m):
    """They may be NaN; of what is read nothing but the lengths' values differs from sequences without them."""
    lengths, seen = [300, 9, 120], [19 + m, 9, 19 + m]
    cache = make_cache(rng, lengths, 16, 2, 64)
    arrays = [machine.upload(x) for x in (randn(3, m, 8, 64), cache.k, cache.v, cache.table, cache.lengths)]
    for b, position in ((b, i) for b, n in enumerate(lengths) for i in range(n - seen[b])):
        for x in arrays[1:3]:
            x[cache.table[b, position // 16], position % 16] = np.nan
    p = cuattn.plan_decode(*arrays, kernel=kernel, window_size=(19, 0), constants=TILES[kernel])
    assert all(np.isfinite(x).all() for x in run_counted(machine, p))
    plain = replace(p.shape, window=(-1, -1))
    assert p.cost().bytes_loaded == p.row.cost(plain, p.plan, seen).bytes_loaded
    assert p.cost().flops == 4 * 8 * 64 * (2 * 20 * m + sum(9 - m + i + 1 for i in range(m)))


def test_a_window_that_hides_nothing_is_none(cpu, rng, randn):
    """As long as what the table can name, or behind the last query."""
    cache = make_cache(rng, [33], 16, 2, 64)  # a table of 4 pages
    arrays = randn(1, 3, 8, 64), cache.k, cache.v, cache.table, cache.lengths
    for window, kept in (((63, 0), (-1, -1)), ((62, 0), (62, -1)), ((-1, 2), (-1, -1)), ((5, 2), (5, -1))):
        p = cuattn.plan_decode(*arrays, causal=False, window_size=window, constants=TILES["paged"])
        assert p.shape.window == kept and p.shape.causal == (window[1] == 0)


@offering("window", "decode")
def test_a_window_follows_growing_lengths(machine, rng, randn, kernel):
    cache, q = make_cache(rng, [100, 60], 16, 2, 64), randn(2, 3, 8, 64)
    lengths = machine.upload(np.array([7, 60], np.int32))
    p = cuattn.plan_decode(*(machine.upload(x) for x in (q, cache.k, cache.v, cache.table)), lengths,
                           kernel=kernel, window_size=(20, 0), constants=TILES[kernel])
    for now in ([7, 60], [99, 2]):
        lengths[...] = machine.upload(np.array(now, np.int32))
        o, lse = run_counted(machine, p)
        cuattn.compare.check_decode(q, cache.k, cache.v, cache.table, np.array(now), o, lse,
                                    window_size=(20, 0)).raise_if_bad()


# --- softcap


@offering("softcap", "decode")
@pytest.mark.parametrize("cap", [1.0, 50.0])
def test_softcaps(machine, rng, randn, kernel, cap):
    cache = make_cache(rng, [0, 1, 40, 200], 16, 2, 64)
    run(machine, kernel, 8 * randn(4, 1, 8, 64), cache, softcap=cap, constants=TILES[kernel])


# --- sinks


@offering("sinks", "decode")
@pytest.mark.parametrize("parts", [1, 3, 40])
def test_a_sink_is_counted_once(machine, rng, kernel, parts):
    """Scores of 0 and values of 1: LSE = ln(n + e^sink), O = n / (n + e^sink); also with more parts than keys."""
    sinks, lengths = np.array([0, 3, -2, 1], "float32"), np.array([0, 1, 17, 200])
    cache = make_cache(rng, lengths, 16, 1, 64)
    cache.k[...], cache.v[...] = (np.where(np.isnan(x), np.nan, 1) for x in (cache.k, cache.v))
    constants = {**TILES[kernel], "splits" if kernel == "paged" else "groups": parts}
    _, o, lse = run(machine, kernel, np.zeros((4, 1, 4, 64), "float16"), cache, sinks=sinks, constants=constants)
    total = lengths[:, None] + np.exp(sinks.astype(float))  # (B, H)
    np.testing.assert_allclose(lse[..., 0], np.log(total), rtol=3e-7, atol=1e-7)
    np.testing.assert_allclose(o[:, 0, :, 5].astype(float), lengths[:, None] / total, rtol=6e-4)


@offering("sinks", "decode")
def test_a_query_that_sees_no_key_has_its_sink(machine, rng, randn, kernel):
    """And a sink of −∞ is none. NOTE: not counted, for a part that is empty all the same is not merged."""
    sinks, cache = np.array([1.25, -7.5, -np.inf, 0], "float32"), make_cache(rng, [0, 1, 2], 16, 1, 64)
    arrays = [machine.upload(x) for x in (randn(3, 3, 4, 64), cache.k, cache.v, cache.table, cache.lengths)]
    p = cuattn.plan_decode(*arrays, kernel=kernel, sinks=machine.upload(sinks), constants=TILES[kernel])
    p.run()
    machine.synchronize()
    o, lse = (machine.download(x) for x in p.outputs)
    for b, blind in enumerate((3, 2, 1)):
        assert (o[b, :blind] == 0).all() and (lse[b, :, :blind] == sinks[:, None]).all()
        assert np.isfinite(lse[b, :, blind:]).all()


def test_sinks_that_are_none_are_refused(rng, randn):
    cache = make_cache(rng, [20], 16, 1, 64)
    arrays = randn(1, 1, 2, 64), cache.k, cache.v, cache.table, cache.lengths
    with pytest.raises(cuattn.ContractError, match=r"sinks.shape: expected \(2,\) as q's heads has, got \(3,\)"):
        cuattn.decode(*arrays, sinks=np.zeros(3, "float32"))


# --- all of them

ALL = {"window_size": (25, 0), "softcap": 20.0, "sinks": np.array([-3, 0, 2, 5], "float32")}


@offering("sinks", "decode")
@pytest.mark.parametrize("m", [1, 3])
def test_all_features_together(machine, rng, randn, kernel, m):
    cache = make_cache(rng, lengths_around(m), 16, 1, 64)
    q = randn(len(cache.lengths), m, 4, 64)
    p, *_ = run(machine, kernel, q, cache, constants=TILES[kernel], **ALL)
    assert p.shape.features == {"window", "softcap", "sinks", *(["queries"] if m > 1 else [])} <= p.row.features


@offering("sinks", "decode")
def test_features_give_equal_bits_under_every_schedule(cpu, rng, randn, kernel):
    cache = make_cache(rng, [130, 300, 0, 2], 16, 1, 64)
    check_bits(cpu, randn(4, 3, 4, 64), cache, kernel, **ALL | {"sinks": cpu.upload(ALL["sinks"])})


@pytest.mark.gpu
@offering("sinks", "decode")
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_both_machines_agree(cpu, rng, randn, kernel, options):
    cache, q = make_cache(rng, [300, 2, 77], 16, 1, 128, "bfloat16"), randn(3, 3, 4, 128, dtype="bfloat16")
    (_, o, lse), (_, o_gpu, lse_gpu) = (run(machine, kernel, q, cache, **options)
                                        for machine in (cpu, cuattn.open_machine("gpu")))
    tol = cuattn.compare.check_decode(q, cache.k, cache.v, cache.table, cache.lengths, o, lse, **options).tol
    assert np.abs(o.astype(float) - o_gpu.astype(float)).max() <= tol
    np.testing.assert_allclose(lse, lse_gpu, atol=1e-5, rtol=2**-21)


@pytest.mark.gpu
def test_calls_that_repeat_take_their_own_sinks(rng, randn):
    machine = cuattn.open_machine("gpu")
    cache, q = make_cache(rng, [300, 0, 90], 16, 1, 64), randn(3, 2, 4, 64)
    arrays = [machine.upload(x) for x in (q, cache.k, cache.v, cache.table, cache.lengths)]
    for shift in range(3):
        options = {**ALL, "sinks": ALL["sinks"] + shift}
        o, lse = (machine.download(x) for x in cuattn.decode(
            *arrays, return_lse=True, **options | {"sinks": machine.upload(options["sinks"])}))
        cuattn.compare.check_decode(q, cache.k, cache.v, cache.table, cache.lengths, o, lse,
                                    **options).raise_if_bad()


# --- who offers what

ASKED = {"queries": {}, "window": {"window_size": (2, 0)}, "softcap": {"softcap": 30.0},
         "sinks": {"sinks": np.zeros(1, "float32")}}


@pytest.mark.parametrize("feature, said", [("queries", "several queries a sequence"), ("window", "window_size"),
                                           ("softcap", "softcap"), ("sinks", "sinks")])
def test_kernels_that_lack_a_feature_say_who_has_it(rng, randn, feature, said):
    cache = make_cache(rng, [20], 16, 1, 64)
    arrays = randn(1, 1 + (feature == "queries"), 1, 64), cache.k, cache.v, cache.table, cache.lengths
    lacking = [name for name, row in ROWS.items() if row.family == "decode" and feature not in row.features]
    for name in lacking:
        with pytest.raises(cuattn.ContractError, match=rf"one that offers {said} \(paged or paged_stream\), got "
                                                       f"'{name}'; choose one, or 'auto'"):
            cuattn.decode(*arrays, kernel=name, **ASKED[feature])
    assert lacking == ["paged_gather", "paged_launches"]


def test_auto_takes_a_kernel_that_offers_all():
    plain = DecodeShape(1, 4, 1, 64, 16, 4, "float16")
    asked = replace(plain, m=2, window=(5, -1), softcap=True, sinks=True)
    assert dispatch.offering(("paged_launches", "paged"), plain.features) == ("paged_launches", "paged")
    assert dispatch.offering(("paged_launches", *dispatch.DECODE), asked.features) == dispatch.DECODE
