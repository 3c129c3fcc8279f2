"""Windows, caps on scores and sinks, in every kernel that offers them."""
from __future__ import annotations

import numpy as np
import pytest
from counted import run_counted
from hypothesis import given
from hypothesis import strategies as st
from offering import TILES, offering
from test_prefill import run

import cuattn
from cuattn import reference
from cuattn.cpu import check_schedules
from cuattn.kernels import ROWS
from cuattn.kernels.shapes import AttentionShape

# --- windows

# (m, n, causal, window): within a tile, over several, one side alone, more queries than keys, a single query
WINDOWS = [
    (70, 70, True, (5, -1)), (150, 150, True, (40, 0)), (130, 200, False, (33, 7)),
    (200, 130, False, (16, 40)), (150, 150, False, (-1, 20)), (150, 170, False, (20, -1)),
    (1, 300, True, (64, 0)), (140, 60, True, (9, -1)), (90, 90, False, (0, 0)),
]


@offering("window")
@pytest.mark.parametrize("m, n, causal, window", WINDOWS)
def test_windows(machine, randn, kernel, m, n, causal, window):
    run(machine, kernel, randn(1, m, 2, 64), randn(1, n, 1, 64), randn(1, n, 1, 64), causal=causal,
        window_size=window, constants=TILES[kernel])


@offering("window")
@pytest.mark.parametrize("window", [(0, 0), (17, 5), (-1, 3), (250, 0)])
def test_a_window_sees_exactly_its_keys(machine, kernel, window):
    """(W, 0) sees W + 1 keys: the uniform probe counts them."""
    probe = cuattn.compare.uniform_probe(1, 2, 1, 140, 300, 64, window_size=window)
    p, o, lse = run(machine, kernel, probe.q, probe.k, probe.v, window_size=window)
    assert p.shape.features == {"window"}
    cuattn.compare.check_probe(o, lse, probe).raise_if_bad()


@offering("window")
def test_a_window_as_long_as_the_keys_is_the_causal_mask(machine, randn, kernel):
    """(N − 1, 0), to the bit; and one key less hides one key of the last query."""
    q, k, v = randn(1, 70, 2, 64), randn(1, 100, 2, 64), randn(1, 100, 2, 64)
    _, o, lse = run(machine, kernel, q, k, v, causal=True)
    p, o_window, lse_window = run(machine, kernel, q, k, v, window_size=(99, 0))
    assert p.shape == AttentionShape(1, 2, 2, 70, 100, 64, "float16", True)
    assert (o == o_window).all() and (lse == lse_window).all()
    _, _, lse_window = run(machine, kernel, q, k, v, window_size=(98, 0))
    assert (lse_window != lse).any(axis=(0, 1)).tolist() == [False] * 69 + [True]


@offering("window")
def test_a_row_whose_window_lies_before_the_keys_sees_none(machine, randn, kernel):
    _, o, lse = run(machine, kernel, randn(1, 200, 2, 64), randn(1, 30, 2, 64), randn(1, 30, 2, 64),
                    window_size=(20, 10))
    assert (o[:, :160] == 0).all() and np.isneginf(lse[:, :, :160]).all()
    assert np.isfinite(lse[:, :, 160:]).all()


@offering("window")
def test_tiles_outside_every_window_are_not_read(machine, randn, kernel):
    """They may hold NaN. The first query sees keys 506 to 536, the last 569 to 599."""
    q, k, v = (machine.upload(randn(1, length, 1, 64)) for length in (64, 600, 600))
    k[:, :496], v[:, :496] = np.nan, np.nan
    p = cuattn.plan_attention(q, k, v, kernel=kernel, window_size=(30, 0), constants=TILES[kernel])
    assert np.isfinite(run_counted(machine, p)[0]).all()
    keys = {"flash": (576 - 496) + (600 - 528), "flash_hopper": 600 - 496}  # of two tiles of queries, of one
    assert p.cost().bytes_loaded == 128 * (64 + 2 * keys[kernel])


@offering("window")
@pytest.mark.parametrize("window", [(37, 0), (20, 20)])
def test_windows_give_equal_bits_under_every_schedule(cpu, randn, kernel, window):
    q, k, v = (cpu.upload(randn(1, length, 3, 64)) for length in (150, 190, 190))
    p = cuattn.plan_attention(q, k, v, kernel=kernel, window_size=window, constants=TILES[kernel])
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


@given(st.integers(0, 40), st.integers(0, 40), st.booleans(), st.integers(-1, 45), st.integers(-1, 45))
def test_pairs_and_keys_are_those_of_the_reference(m, n, causal, left, right):
    causal, window = cuattn.contract.window((left, right), causal, m, n)
    shape = AttentionShape(1, 1, 1, m, n, 64, "float16", causal, window)
    first, end = reference.key_range(m, n, causal, (left, right))
    assert shape.visible == (end - first).sum()
    for start, stop in ((0, m // 2), (m // 3, m)):
        seen = [(a, b) for a, b in zip(first[start:stop], end[start:stop]) if a < b]
        a, b = shape.keys(start, stop - 1)
        if seen:
            assert (a, b) == (seen[0][0], seen[-1][1])
        elif start < stop:
            assert a >= b


def test_a_window_that_hides_nothing_is_none():
    window = cuattn.contract.window
    assert window((9, 3), False, 4, 10) == (False, (-1, -1)) == window((-1, -1), False, 4, 10)
    assert window((8, 2), False, 4, 10) == (False, (8, 2))
    assert window((8, 2), True, 4, 10) == (True, (8, -1)) == window((8, 0), False, 4, 10)


@pytest.mark.parametrize("size", [(3,), 3, (-2, 0), (1.0, 0), (True, 0), "ab", None])
def test_windows_that_are_none_are_refused(randn, size):
    x = randn(1, 4, 1, 64)
    with pytest.raises(cuattn.ContractError, match="window_size: expected two integers of at least -1, .*"):
        cuattn.attention(x, x, x, window_size=size)


# --- softcap


@offering("softcap")
@pytest.mark.parametrize("cap", [1.0, 50.0, 1e4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 9)}], ids=str)
def test_softcaps(machine, randn, kernel, cap, options):
    q, k, v = randn(1, 130, 2, 64), randn(1, 170, 1, 64), randn(1, 170, 1, 64)
    run(machine, kernel, 8 * q, k, v, softcap=cap, constants=TILES[kernel], **options)


@offering("softcap")
@pytest.mark.parametrize("scores", [np.linspace(-400, 400, 256), np.logspace(-4, 1, 256), [0, 6e4, -6e4]])
def test_each_capped_score_is_right(machine, kernel, scores):
    """A query with one key, whose LSE is the score; on both sides of where tanh is 1 in float32."""
    q, k = np.zeros((len(scores), 1, 1, 64), "float16"), np.ones((len(scores), 1, 1, 64), "float16")
    q[..., 0, 0] = np.asarray(scores).reshape(-1, 1)
    run(machine, kernel, q, k, k, softcap=50.0, softmax_scale=1.0)


@offering("softcap")
def test_a_cap_does_not_hide_what_is_no_number(machine, randn, kernel):
    q, k, v = (machine.upload(randn(1, 40, 1, 64)) for _ in range(3))
    q[0, 3, 0, 0] = np.nan
    o, _ = run_counted(machine, cuattn.plan_attention(q, k, v, kernel=kernel, softcap=30.0))
    assert np.isnan(o[0, 3]).all() and np.isfinite(np.delete(o, 3, 1)).all()


@offering("softcap")
def test_caps_give_equal_bits_under_every_schedule(cpu, randn, kernel):
    q, k, v = (cpu.upload(randn(1, length, 3, 64)) for length in (150, 140, 140))
    p = cuattn.plan_attention(q, k, v, causal=True, kernel=kernel, softcap=20.0, constants=TILES[kernel])
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


@pytest.mark.parametrize("cap", [-1.0, 1e-9, 1e9, float("nan"), "large", True, None])
def test_caps_that_are_none_are_refused(randn, cap):
    x = randn(1, 4, 1, 64)
    with pytest.raises(cuattn.ContractError, match="softcap: expected 0 for none, or a number from .*, got"):
        cuattn.attention(x, x, x, softcap=cap)


# --- sinks


@offering("sinks")
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window_size": (30, 4)}, {"causal": True, "softcap": 20.0},
    {"softmax_scale": 1e-6},
], ids=str)
def test_sinks(machine, randn, kernel, options):
    """Below the scores, among them and above; a window that leaves rows without a key."""
    sinks = np.array([-1e4, -3, 0, 2.5, 40], "float32")
    q, k, v = randn(1, 150, 5, 64), randn(1, 100, 1, 64), randn(1, 100, 1, 64)
    run(machine, kernel, q, k, v, sinks=sinks, constants=TILES[kernel], **options)


@offering("sinks")
@pytest.mark.parametrize("n", [1, 200])
def test_a_sink_is_counted_once(machine, kernel, n):
    """Scores of 0 and values of 1: LSE = ln(n + e^sink), O = n / (n + e^sink)."""
    sinks = np.array([0.0, 3.0], "float32")
    q, ones = np.zeros((1, 3, 2, 64), "float16"), np.ones((1, n, 2, 64), "float16")
    _, o, lse = run(machine, kernel, q, ones, ones, sinks=sinks)
    total = n + np.exp(sinks.astype(float))
    np.testing.assert_allclose(lse[0], np.log(total)[:, None].repeat(3, 1), rtol=3e-7)
    np.testing.assert_allclose(o[0, 0, :, 0].astype(float), n / total, rtol=6e-4)


@offering("sinks")
def test_a_row_that_sees_no_key_has_its_sink(machine, randn, kernel):
    """With fewer keys than queries, with none, and a sink of −∞, which is none."""
    sinks = np.array([1.25, -7.5, -np.inf], "float32")
    q, x, none = randn(1, 70, 3, 64), randn(1, 20, 3, 64), randn(1, 0, 3, 64)
    _, o, lse = run(machine, kernel, q, x, x, causal=True, sinks=sinks)
    assert (o[0, :50] == 0).all() and (lse[0, :, :50] == sinks[:, None]).all()
    _, o, lse = run(machine, kernel, q, none, none, sinks=sinks)
    assert (o == 0).all() and (lse[0] == sinks[:, None]).all()


@offering("sinks")
def test_sinks_give_equal_bits_under_every_schedule(cpu, randn, kernel):
    q, k, v = (cpu.upload(randn(1, length, 3, 64)) for length in (150, 140, 140))
    p = cuattn.plan_attention(q, k, v, causal=True, kernel=kernel, constants=TILES[kernel],
                              sinks=cpu.upload(np.array([1, 2, 3], "float32")))
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


def test_sinks_that_are_none_are_refused(cpu, randn):
    x = cpu.upload(randn(1, 4, 2, 64))
    wrong = [
        (np.zeros(3, "float32"), r"sinks.shape: expected \(2,\) as q's heads has, got \(3,\)"),
        (np.zeros(2), "sinks: expected dtype float32, got float64; convert"),
        (np.zeros((1, 2), "float32"), r"sinks: expected shape \(H\), got \(1, 2\)"),
        (1.0, r"sinks: expected an array \(H\), got float"),
        (cpu.upload(np.zeros((2, 2), "float32"))[:, 0], "expected a contiguous last dimension"),
    ]
    for sinks, said in wrong:
        with pytest.raises(ValueError, match=said):
            cuattn.attention(x, x, x, sinks=sinks)


# --- who offers what

ASKED = {"window": {"window_size": (2, 2)}, "softcap": {"softcap": 30.0},
         "sinks": {"sinks": np.zeros(1, "float32")}}


@pytest.mark.parametrize("feature", ASKED)
def test_kernels_that_lack_a_feature_say_who_has_it(randn, feature):
    x = randn(1, 9, 1, 64)
    (argument,) = ASKED[feature]
    for name, row in ROWS.items():
        if row.family == "prefill" and feature not in row.features:
            said = rf"one that offers {argument} \(flash or flash_hopper\), got '{name}'; choose one, or"
            with pytest.raises(cuattn.ContractError, match=said):
                cuattn.attention(x, x, x, kernel=name, **ASKED[feature])


def test_auto_takes_a_kernel_that_offers_all(randn):
    x = randn(1, 9, 1, 64)
    for feature, asked in ASKED.items():
        p = cuattn.plan_attention(x, x, x, **asked)
        assert p.shape.features == {feature} <= p.row.features
