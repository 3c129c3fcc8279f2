"""Timing against a machine whose clock is a number: stop rules, warm-up, modes."""
import itertools
import time

import numpy as np
import pytest

import cuattn
from cuattn import open_machine, timing
from cuattn.timing import measure, median_noise


class FakeEvent:
    def __init__(self, machine):
        self.machine, self.at = machine, None

    def record(self):
        self.machine.log.append("record")
        self.at = self.machine.now


class FakeMachine:
    """Time passes only by launched work; `times_us` are the durations of successive calls."""

    name = "gpu"

    def __init__(self, times_us, host_us=2.0, flush_us=50.0, clocks=None):
        self.times, self.host_us, self.flush_us = iter(times_us), host_us, flush_us
        self.now, self.log, self.held = 0.0, [], []
        self.clocks = itertools.repeat(None) if clocks is None else iter(clocks)

    def call(self):
        self.log.append("call")
        self.now += next(self.times) * 1e-6

    def event(self):
        return FakeEvent(self)

    def elapsed_us(self, start, stop):
        return (stop.at - start.at) * 1e6

    def flush_l2(self):
        self.log.append("flush")
        self.now += self.flush_us * 1e-6

    def hold(self, us):
        self.log.append("hold")
        self.held.append(us)

    def capture(self, fn):
        self.log.append("capture")

        def replay():
            self.log.append("replay")
            fn()

        return replay

    def synchronize(self):
        self.log.append("synchronize")

    def sm_clock_mhz(self):
        return next(self.clocks)


@pytest.fixture
def run(monkeypatch):
    """measure() on a fake machine; the host's clock is the machine's."""

    def start(times_us, fn=None, *, fake=None, **options):
        machine = fake or FakeMachine(times_us)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: machine.now)
        return machine, measure(fn or machine.call, machine, **options)

    return start


def test_constant_times_stop_at_the_minimum(run):
    _, result = run(itertools.repeat(100.0))
    assert (result.n_samples, result.stop_reason) == (10, "noise")
    assert result.samples_us == pytest.approx([100.0] * 10)
    for value in (result.median_us, result.q1_us, result.q3_us, result.min_us, result.host_us):
        assert value == pytest.approx(100.0)
    assert (result.cache_mode, result.mode) == ("cold", "launch")
    assert result.empty_us is result.sm_clock_mhz is result.sm_clock_min_mhz is None


def test_noise_takes_more_samples_until_the_median_is_known(run):
    rng = np.random.default_rng(0)
    _, result = run(iter(rng.normal(100, 3, 100000)), max_samples=5000)
    assert result.stop_reason == "noise" and 10 < result.n_samples < 100
    assert median_noise(result.samples_us) <= 0.005 < median_noise(result.samples_us[:-1])
    assert abs(result.median_us - 100) < 3 and result.q1_us < result.median_us < result.q3_us
    assert result.min_us == min(result.samples_us)


def test_the_maximum_ends_a_noisy_run(run):
    rng = np.random.default_rng(0)
    _, result = run(iter(rng.uniform(50, 150, 100000)), max_samples=25)
    assert (result.n_samples, result.stop_reason) == (25, "max_samples")


def test_the_timeout_ends_a_slow_run_with_one_sample_at_least(run):
    _, result = run(itertools.repeat(3e6), timeout_s=1.0)
    assert (result.n_samples, result.stop_reason) == (1, "timeout")
    assert result.median_us == result.q1_us == result.q3_us == pytest.approx(3e6)


def test_the_timeout_counts_the_warm_up(run):
    _, result = run(itertools.repeat(0.4e6), timeout_s=3.0, rel_noise=0.0, max_samples=100)
    assert result.stop_reason in ("noise", "timeout") and result.n_samples <= 10


def test_times_of_zero_neither_divide_nor_count_as_precise(run):
    _, result = run(itertools.repeat(0.0), max_samples=30)
    assert (result.median_us, result.n_samples, result.stop_reason) == (0.0, 30, "max_samples")
    assert median_noise([0.0, 0.0]) == float("inf")


def test_a_zero_at_the_start_of_the_warm_up_is_harmless(run):
    _, result = run(itertools.chain([0.0] * 20, itertools.repeat(80.0)))
    assert result.median_us == pytest.approx(80.0)


def test_the_warm_up_waits_until_times_settle(run):
    falling = [100 + 100 * 0.998**i for i in range(4000)]
    _, result = run(itertools.chain(falling, itertools.repeat(100.0)))
    assert max(result.samples_us) < 110


def test_the_warm_up_has_a_limit(run):
    growing = (100.0 * 1.02 ** (i % 200) for i in itertools.count())
    machine, result = run(growing, timeout_s=60.0, max_samples=20)
    assert result.n_samples == 20 and machine.now < 3.0


def test_an_outlier_is_kept_and_does_not_move_the_median(run):
    spiky = (5000.0 if i % 17 == 0 else 100.0 for i in itertools.count())
    _, result = run(spiky, min_samples=40)
    assert max(result.samples_us) == pytest.approx(5000.0) and result.median_us == pytest.approx(100.0)


def test_cold_flushes_before_the_window_and_warm_calls(run):
    machine, _ = run(itertools.repeat(100.0))
    assert machine.log[:6] == ["flush", "hold", "record", "call", "record", "synchronize"]
    machine, result = run(itertools.repeat(100.0), cache="warm")
    assert machine.log[:6] == ["call", "hold", "record", "call", "record", "synchronize"]
    assert "flush" not in machine.log and result.cache_mode == "warm"


def test_the_stream_is_held_for_longer_than_the_host_needs(run):
    machine, _ = run(itertools.repeat(100.0))  # the fake host is busy for as long as the device
    assert machine.held[0] == 20 and machine.held[-1] == pytest.approx(220)
    machine, _ = run(itertools.repeat(1e5))
    assert max(machine.held) == timing.HOLD_MAX_US


def test_calls_of_any_host_part_rest_as_long_where_it_is_asked_for(run):
    for host_us in (5.0, 100.0, 700.0):
        machine, _ = run(itertools.repeat(host_us), rest_us=1600.0)
        assert set(machine.held) == {1600.0}
    machine, _ = run(itertools.repeat(900.0), rest_us=1600.0)  # that needs more
    assert machine.held[-1] == pytest.approx(1820)
    machine, _ = run(itertools.repeat(5.0), rest_us=1e6)
    assert set(machine.held) == {timing.HOLD_MAX_US}


def test_graph_mode_captures_once_and_replays(run):
    machine, result = run(itertools.repeat(100.0), graph=True)
    assert machine.log.count("capture") == 1 and machine.log[0] == "capture" and result.mode == "graph"
    assert machine.log.count("replay") == machine.log.count("call")


def test_the_empty_kernel_is_timed_in_the_same_mode_and_not_subtracted(run):
    machine = FakeMachine(itertools.repeat(100.0))

    def empty():
        machine.now += 3e-6

    _, result = run(None, fake=machine, empty=empty, graph=True)
    assert result.empty_us == pytest.approx(3.0) and result.median_us == pytest.approx(100.0)
    assert machine.log.count("capture") == 2


def test_the_clock_is_sampled_over_the_run(run):
    machine = FakeMachine(itertools.repeat(100.0), clocks=[1980.0, 1905.0, 1980.0, 1980.0])
    _, result = run(None, fake=machine, min_samples=25)
    assert (result.sm_clock_mhz, result.sm_clock_min_mhz) == (1980.0, 1905.0)


def test_the_cpu_machine_is_refused(run):
    machine = FakeMachine([])
    machine.name = "cpu"
    with pytest.raises(ValueError, match="machine: expected a GPU.*models no time"):
        measure(machine.call, machine)


@pytest.mark.parametrize("options, words", [
    (dict(cache="hot"), "cache: expected 'cold' or 'warm', got 'hot'"),
    (dict(min_samples=0), "min_samples: expected 1"),
    (dict(min_samples=20, max_samples=10), "got 20 and 10"),
    (dict(timeout_s=0), "timeout_s: expected seconds above 0, got 0"),
])
def test_arguments_that_make_no_sense_are_refused(options, words):
    machine = FakeMachine([])
    with pytest.raises(ValueError, match=words):
        measure(machine.call, machine, **options)


def test_an_error_in_the_call_comes_through(run):
    def broken():
        raise RuntimeError("launch failed")

    with pytest.raises(RuntimeError, match="launch failed"):
        run([], broken)


@pytest.fixture
def gpu():
    return open_machine("gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_a_copy_on_a_gpu_takes_what_its_bytes_must_take(gpu, cache, graph):
    """No faster than memory or cache can be, nor absurdly slow."""
    source, target = gpu.empty((64 << 20,), "float16"), gpu.empty((64 << 20,), "float16")

    def copy():
        target[...] = source

    result = measure(copy, gpu, cache=cache, graph=graph)
    gbps = 2 * source.nbytes / result.median_us / 1e3
    assert 300 < gbps < 20000 and result.q1_us <= result.median_us <= result.q3_us
    assert result.n_samples == len(result.samples_us) >= 10 and result.host_us < result.median_us
    assert 200 < result.sm_clock_min_mhz <= result.sm_clock_mhz < 4000


@pytest.mark.gpu
def test_the_host_does_not_show_in_a_short_kernel(gpu):
    """An empty kernel takes a few µs however long the host needs to launch it."""
    empty = cuattn.plan_probe(gpu, "empty").run

    def slowly():
        until = time.perf_counter() + 200e-6
        while time.perf_counter() < until:
            pass
        empty()

    result = measure(slowly, gpu, empty=empty)
    assert result.host_us > 200 and result.median_us < 15 and result.empty_us < 15


@pytest.mark.gpu
def test_two_copies_take_twice_as_long_as_one(gpu):
    source, target = gpu.empty((64 << 20,), "float16"), gpu.empty((64 << 20,), "float16")

    def copy(times):
        for _ in range(times):
            target[...] = source

    one, two = (measure(lambda n=n: copy(n), gpu).median_us for n in (1, 2))
    assert two / one == pytest.approx(2, rel=0.1)
