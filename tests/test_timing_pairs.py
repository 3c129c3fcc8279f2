"""Two calls timed in turn, against a machine whose clock is a number: order, stop rules, modes."""
import itertools

import numpy as np
import pytest
from test_timing import FakeMachine

from cuattn import open_machine, timing
from cuattn.timing import measure_pair


@pytest.fixture
def turns(monkeypatch):
    """measure_pair() of two calls on a fake machine, a taking 100 µs and b 200, drift and all."""

    def start(*, a=100.0, b=200.0, settled=lambda pairs: False, **options):
        machine = FakeMachine([], clocks=options.pop("clocks", None))
        monkeypatch.setattr(timing.time, "perf_counter", lambda: machine.now)

        def call(name, us):
            def launch():
                machine.log.append(name)
                machine.now += (us() if callable(us) else us) * 1e-6

            return launch

        return machine, measure_pair(call("a", a), call("b", b), machine, settled=settled, **options)

    return start


def test_pairs_are_taken_a_b_b_a_and_all_kept(turns):
    machine, result = turns(max_pairs=6)
    calls = [word for word in machine.log if word in "ab"]
    assert calls[-12:] == list("abba" * 3)
    assert np.array(result.pairs_us) == pytest.approx(np.array([(100, 200)] * 6))
    assert result.stop_reason == "max_pairs"
    assert (result.host_a_us, result.host_b_us) == pytest.approx((100, 200))
    assert (result.cache_mode, result.mode, result.sm_clock_mhz) == ("cold", "launch", None)


def test_each_sample_of_a_pair_is_taken_as_measure_takes_it(turns):
    machine, _ = turns(max_pairs=2)
    assert machine.log[-24:] == [
        word for name in "abba" for word in ("flush", "hold", "record", name, "record", "synchronize")
    ]
    assert machine.held[-4:] == pytest.approx([220, 420, 420, 220])  # as each host needs
    machine, result = turns(max_pairs=2, cache="warm")
    assert machine.log[-12:-6] == ["b", "hold", "record", "b", "record", "synchronize"]
    assert "flush" not in machine.log and result.cache_mode == "warm"


def test_a_pair_keeps_the_order_in_time(turns):
    """Each call takes 1 µs more than the one before it: b is later in pairs 0, 2, …, a in the others."""
    count = itertools.count(100)
    _, result = turns(a=lambda: next(count), b=lambda: next(count), max_pairs=4, timeout_s=60)
    assert [round(b - a) for a, b in result.pairs_us] == [1, -1, 1, -1]


def test_whoever_asked_says_when_it_is_enough_and_is_asked_ever_less_often(turns):
    asked = []

    def settled(pairs):
        asked.append(len(pairs))
        return len(pairs) >= 100

    _, result = turns(settled=settled)
    assert result.stop_reason == "settled" and len(result.pairs_us) == asked[-1] < 130
    assert asked[:4] == [2, 4, 6, 8]
    assert all(later >= 1.25 * early for early, later in zip(asked[3:], asked[4:]))


def test_a_pair_that_is_slow_ends_at_the_timeout_with_a_group_at_least(turns):
    _, result = turns(a=3e6, b=3e6, timeout_s=1.0)
    assert (len(result.pairs_us), result.stop_reason) == (2, "timeout")


def test_both_calls_are_warmed_up_and_captured_for_graphs(turns):
    machine, result = turns(max_pairs=2, graph=True)
    calls = [word for word in machine.log if word in "ab"]
    assert calls.count("a") > 100 and calls.count("b") > 100 and result.mode == "graph"
    assert machine.log[:2] == ["capture"] * 2 and machine.log.count("replay") == len(calls)


def test_the_clock_is_sampled_over_the_pairs(turns):
    _, result = turns(max_pairs=12, clocks=[1980.0, 1900.0, 1970.0])
    assert (result.sm_clock_mhz, result.sm_clock_min_mhz) == (1970.0, 1900.0)


@pytest.mark.parametrize("options, words", [
    (dict(cache="hot"), "cache: expected 'cold' or 'warm', got 'hot'"),
    (dict(max_pairs=1), "max_pairs: expected at least 2, one A B B A, got 1"),
    (dict(timeout_s=0), "timeout_s: expected seconds above 0, got 0"),
])
def test_arguments_of_a_pair_that_make_no_sense_are_refused(turns, options, words):
    with pytest.raises(ValueError, match=words):
        turns(**options)


def test_the_cpu_machine_times_no_pair(cpu):
    with pytest.raises(ValueError, match="machine: expected a GPU.*models no time"):
        measure_pair(print, print, cpu, settled=lambda pairs: True)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_pairs_on_a_gpu_find_the_same_copy_the_same_and_two_copies_twice_as_long(graph):
    gpu = open_machine("gpu")
    source, target = gpu.empty((64 << 20,), "float16"), gpu.empty((64 << 20,), "float16")

    def copy(times):
        for _ in range(times):
            target[...] = source

    for times in (1, 2):
        taken = measure_pair(lambda: copy(1), lambda n=times: copy(n), gpu, settled=lambda pairs: False,
                             max_pairs=60, graph=graph)
        ratio = np.median([b / a for a, b in taken.pairs_us])
        assert ratio == pytest.approx(times, rel=0.02 if times == 1 else 0.1) and len(taken.pairs_us) == 60
