"""Ratios of times and what may be said of them: intervals that hold, verdicts that do not guess."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest

from cuattn import timing
from experiments.ab import statistics
from experiments.ab.statistics import (
    FASTER,
    SAME,
    SLOWER,
    UNDECIDED,
    Interval,
    paired_ratio,
    ratio_of_medians,
)

MARGIN = 0.02


# --- intervals


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_ranks_are_those_of_the_binomial_distribution(confidence):
    for count in range(1, 100):
        below = [Fraction(total, 2**count) for total in accumulate(math.comb(count, k) for k in range(count))]
        expected = sum(2 * p <= 1 - confidence for p in below[: count // 2])
        assert statistics.order_rank(count, confidence) == expected, count


def test_the_fewest_samples_that_have_an_interval():
    assert [statistics.fewest(c) for c in (0.9, 0.95, 0.99)] == [5, 6, 8]
    assert statistics.median_interval([3, 1, 2]) == (2, -math.inf, math.inf)
    assert statistics.median_interval([6, 1, 5, 2, 4, 3]) == (3.5, 1, 6)


SHAPES = {
    "normal": lambda rng, n: rng.normal(0, 0.01, n),
    "wide": lambda rng, n: rng.normal(0, 0.04, n),
    "outliers": lambda rng, n: rng.normal(0, 0.01, n) + (rng.random(n) < 0.1) * rng.exponential(0.5, n),
    "tail": lambda rng, n: rng.exponential(0.01, n) - 0.01 * math.log(2),
    "steps": lambda rng, n: np.round(rng.normal(0, 0.01, n), 2),
}


def held(rng, shapes, counts, trials: int = 1000) -> float:
    """How often the interval of a ratio of medians that are equal holds 1."""
    hits = 0
    for _ in range(trials):
        a, b = (100 * np.exp(SHAPES[shape](rng, n)) for shape, n in zip(shapes, counts))
        interval = ratio_of_medians(a, b)
        hits += interval.low <= 1 + 1e-12 and interval.high >= 1 - 1e-12
    return hits / trials


@pytest.mark.parametrize("counts", [(6, 6), (10, 10), (10, 60), (50, 50)])
@pytest.mark.parametrize(
    "shapes",
    [("normal", "normal"), ("normal", "wide"), ("tail", "normal"), ("tail", "wide"), ("steps", "steps")],
)
def test_the_interval_of_two_medians_holds_whatever_the_shapes(rng, shapes, counts):
    """Even where A and B differ in shape and width, which a rank test for a shift would not survive."""
    assert held(rng, shapes, counts) >= 0.95


def test_outliers_widen_nothing_much(rng):
    clean, dirty = (
        [ratio_of_medians(*(np.exp(SHAPES[s](rng, 40)) for _ in "ab")).half_width for _ in range(200)]
        for s in ("normal", "outliers")
    )
    assert np.median(dirty) < 1.5 * np.median(clean)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_interval_of_pairs_holds_for_any_shape(rng, shape):
    hits = 0
    for _ in range(1000):
        a, b = (np.exp(SHAPES[shape](rng, 40)) for _ in "ab")
        interval = paired_ratio(np.stack([a, 1.05 * b], axis=1))
        hits += interval.low <= 1.05 + 1e-9 and interval.high >= 1.05 - 1e-9
    assert hits >= 950


def test_a_straight_drift_and_a_favoured_second_call_cancel_within_a_group():
    drift = 1.01 ** np.arange(48)  # 1 % a call: A of a group's end is 3 % slower than that of its beginning
    times = 100 * drift * np.tile([1, 1 / 1.2], 24)  # and every second call is 20 % faster
    turns = times.reshape(-1, 4)
    pairs = np.stack([turns[:, [0, 3]].reshape(-1), turns[:, [1, 2]].reshape(-1)], axis=1)
    interval = paired_ratio(pairs)
    assert interval.ratio == pytest.approx(1) and interval.half_width < 1e-9
    single = np.log(pairs[:, 1] / pairs[:, 0])
    assert np.abs(single).min() > 0.15  # no pair alone says so


def test_an_odd_pair_belongs_to_no_group():
    assert paired_ratio([(1, 2)] * 13) == paired_ratio([(1, 2)] * 12)
    assert paired_ratio([(1, 2)] * 12).count == 6
    with pytest.raises(ValueError, match="A B B A at least"):
        paired_ratio([(1, 2)])


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_refused(bad):
    with pytest.raises(ValueError, match="above 0"):
        paired_ratio([(1.0, bad), (1.0, 1.0)])
    with pytest.raises(ValueError, match="above 0"):
        ratio_of_medians([1.0] * 9, [1.0] * 9 + [bad])
    assert not statistics.usable([1.0, bad]) and not statistics.usable([]) and statistics.usable([0.1])


# --- verdicts


@pytest.mark.parametrize(
    "low, high, verdict",
    [
        (1.021, 1.5, SLOWER),
        (1.019, 1.5, UNDECIDED),
        (0.981, 1.02, SAME),
        (1.01, 1.02, SAME),  # a difference, and too small to matter
        (0.9, 1.1, UNDECIDED),
        (0.9, 1.0, UNDECIDED),
        (0.5, 0.979, FASTER),
        (0.0, math.inf, UNDECIDED),
        (math.nan, math.nan, UNDECIDED),
    ],
)
def test_the_verdict_is_the_intervals_and_not_the_estimates(low, high, verdict):
    """The estimate itself plays no part, and swapping the sides swaps the verdict."""
    for ratio in (0.5, 1.0, 2.0):
        assert statistics.verdict(Interval(ratio, low, high, 9, 6), MARGIN) == verdict
    if low > 0:
        swapped = statistics.verdict(Interval(1.0, 1 / high, 1 / low, 9, 6), MARGIN)
        assert swapped == {SLOWER: FASTER, FASTER: SLOWER}.get(verdict, verdict)


def test_a_slowdown_is_ruled_out_by_the_upper_end_alone():
    assert not statistics.may_be_slower(Interval(1, 0.5, 1.02, 9, 6), MARGIN)
    assert statistics.may_be_slower(Interval(1, 0.99, 1.021, 9, 6), MARGIN)
    assert statistics.may_be_slower(Interval(1, 0, math.nan, 9, 6), MARGIN)


def test_too_few_samples_decide_nothing():
    interval = ratio_of_medians([100.0] * 5, [300.0] * 5)
    assert interval.ratio == pytest.approx(3) and (interval.low, interval.high) == (0, math.inf)
    assert statistics.verdict(interval, MARGIN) == UNDECIDED and (interval.count, interval.needed) == (5, 6)
    assert interval.half_width == math.inf
    assert statistics.verdict(ratio_of_medians([100.0] * 6, [300.0] * 6), MARGIN) == SLOWER


def test_the_geometric_mean_is_even_handed():
    assert statistics.geometric_mean([2, 0.5]) == pytest.approx(1)
    assert math.isnan(statistics.geometric_mean([]))


# --- trials on a simulated GPU


class NoisyGpu:
    """A GPU whose calls take lognormal times with outliers, on a clock that drifts."""

    name = "gpu"

    def __init__(self, seed: int, drift=lambda seconds: 1.0):
        self.rng, self.drift, self.now = np.random.default_rng(seed), drift, 0.0

    def kernel(self, base_us: float):
        def call():
            us = base_us * self.drift(self.now) * math.exp(0.01 * self.rng.standard_normal())
            if self.rng.random() < 0.03:
                us *= 1 + self.rng.exponential(0.5)
            self.now += us * 1e-6

        return call

    def event(self):
        machine = self

        class Event:
            def record(self):
                self.at = machine.now

        return Event()

    def elapsed_us(self, start, stop):
        return (stop.at - start.at) * 1e6

    def flush_l2(self):
        self.now += 50e-6

    def hold(self, us):
        pass

    def synchronize(self):
        pass

    def sm_clock_mhz(self):
        return None


def wander(seconds: float) -> float:
    """A clock that falls slowly and sways as it does: 2 % a second, and 1 % up and down."""
    return 1 + 0.02 * seconds + 0.01 * math.sin(seconds / 0.4)


@pytest.fixture
def in_turn(monkeypatch):
    """in_turn(seed, slowdown, drift): the interval of B against A by pairs."""

    def trial(seed, slowdown=1.0, drift=wander) -> Interval:
        gpu = NoisyGpu(seed, drift)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.now)
        calls = gpu.kernel(4000.0), gpu.kernel(4000.0 * slowdown)
        taken = timing.measure_pair(
            *calls, gpu, settled=lambda pairs: paired_ratio(pairs).half_width <= MARGIN / 5, timeout_s=60
        )
        assert taken.stop_reason == "settled"
        return paired_ratio(taken.pairs_us)

    return trial


def apart(seed: int, slowdown: float, samples: int = 150) -> Interval:
    """The interval of B against A from two runs, each with a drift of its own."""
    sides = []
    for side, factor in enumerate((1.0, slowdown)):
        gpu = NoisyGpu(2 * seed + side, lambda seconds: 1 + 0.005 * math.sin(seconds / 0.4))
        call, times = gpu.kernel(4000.0 * factor), []
        for _ in range(samples):
            before = gpu.now
            call()
            times.append((gpu.now - before) * 1e6)
        sides.append(times)
    return ratio_of_medians(*sides)


@pytest.mark.parametrize("slowdown, expected", [(1.0, SAME), (1.03, SLOWER), (1 / 1.03, FASTER)])
def test_a_hundred_trials_in_turn(in_turn, slowdown, expected):
    found = [statistics.verdict(in_turn(seed, slowdown), MARGIN) for seed in range(100)]
    assert found.count(expected) >= 95, found
    assert set(found) <= {expected, UNDECIDED}  # never the wrong verdict, at worst none


@pytest.mark.parametrize("slowdown, expected", [(1.0, SAME), (1.03, SLOWER), (1 / 1.03, FASTER)])
def test_a_hundred_trials_of_two_runs(slowdown, expected):
    found = [statistics.verdict(apart(seed, slowdown), MARGIN) for seed in range(100)]
    assert found.count(expected) >= 95, found
    assert set(found) <= {expected, UNDECIDED}


def test_a_slowdown_at_the_margin_is_left_undecided(in_turn):
    found = [statistics.verdict(in_turn(seed, 1 + MARGIN), MARGIN) for seed in range(40)]
    assert found.count(UNDECIDED) >= 34


def test_sampling_until_the_interval_is_narrow_nearly_keeps_its_promise(in_turn):
    """Whoever looks again and again and stops at a width stops too early now and then."""
    intervals = [in_turn(seed, 1.01) for seed in range(1000, 1200)]
    assert np.mean([i.low <= 1.01 <= i.high for i in intervals]) >= 0.91
    assert max(i.half_width for i in intervals) <= MARGIN / 5


def test_what_drifts_is_no_regression_in_turn_and_is_one_after_another(in_turn, monkeypatch):
    """A card that warms up: 3 % a second slower, the same kernel on both sides."""

    def warming(seconds):
        return 1 + 0.03 * seconds

    for seed in range(20):
        gpu = NoisyGpu(seed, warming)
        monkeypatch.setattr(timing.time, "perf_counter", lambda gpu=gpu: gpu.now)
        call, sides = gpu.kernel(4000.0), []
        for _ in "ab":
            options = {"min_samples": 400, "max_samples": 400, "timeout_s": 60}
            sides.append(timing.measure(call, gpu, **options).samples_us)
        assert statistics.verdict(ratio_of_medians(*sides), MARGIN) == SLOWER
        assert statistics.verdict(in_turn(seed, 1.0, warming), MARGIN) == SAME
