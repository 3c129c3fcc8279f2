"""Two kernels in a worker: the same inputs, each found right before and after, timed in turn."""

from __future__ import annotations

import numpy as np
import pytest
from test_experiments_case import APPEND, DECODE, PREFILL, PROBE, PlayedGpu

from experiments import environment, subjects
from experiments.ab import pair
from experiments.catalog import catalog
from experiments.suite import Repeat
from experiments.worker import Worker

LIMITS = Repeat(max_samples=200, rel_noise=0.004, timeout_s=30.0)
KNOWN = catalog()
STANDARD = {"kernel": "standard", "constants": '{"score": "input"}'}


class ClockedGpu(PlayedGpu):
    """A played GPU whose time passes by what is run on it: `now` in µs, moved by whoever runs."""

    now = 0.0

    def event(self):
        machine = self

        class Event:
            def record(self):
                self.at = machine.now

        return Event()

    def elapsed_us(self, start, stop):
        return stop.at - start.at


@pytest.fixture
def gpu(cpu, monkeypatch):
    """A played GPU on which `standard` takes 110 µs and everything else 100."""
    machine = ClockedGpu(cpu)
    honest = subjects._Ours.run

    def run(self):
        honest(self)
        machine.now += 110.0 if self.params["kernel"] == "standard" else 100.0

    monkeypatch.setattr(subjects._Ours, "run", run)
    monkeypatch.setattr(environment, "sensors", lambda: {"measured_throttle_reasons": ""})
    monkeypatch.setattr("cuattn.timing.WARM_UP_S", 0.0)
    return machine


def pair_of(params, **b) -> dict:
    return {"a": params, "b": {**params, **b}, "confidence": 0.95}


def run_pair(machine, asked, limits=LIMITS, **options):
    return pair.run_pair(machine, asked, limits, KNOWN, **options)


def test_two_kernels_are_found_right_and_timed_in_turn(gpu):
    phases = []
    found = run_pair(gpu, pair_of(PREFILL, **STANDARD), phase=phases.append)
    assert found["status"] == "ok" and phases == ["build", "run"] and "side" not in found
    assert np.array(found["pairs_us"]) == pytest.approx(np.array([(100.0, 110.0)] * len(found["pairs_us"])))
    assert found["stop_reason"] == "settled" and len(found["pairs_us"]) >= 12


@pytest.mark.parametrize(
    "params, b",
    [
        ({**PREFILL, "layout": "bhsd"}, {}),
        (DECODE, {}),
        (APPEND, {}),
        (PROBE, {"kernel": "copy"}),
    ],
    ids=lambda p: p.get("kernel", "") if isinstance(p, dict) else "",
)
def test_every_family_has_its_pairs(gpu, params, b):
    found = run_pair(gpu, pair_of(params, **b))
    assert found["status"] == "ok", found
    assert {tuple(pair) for pair in found["pairs_us"]} == {(100.0, 100.0)}


def test_both_work_on_the_same_inputs(gpu, monkeypatch):
    made = []
    honest = subjects.make
    monkeypatch.setattr(subjects, "make", lambda *words: made.append(honest(*words)) or made[-1])
    assert run_pair(gpu, pair_of(PREFILL, **STANDARD))["status"] == "ok"
    a, b = made
    assert a.arrays is b.arrays and a.planned.outputs[0] is not b.planned.outputs[0]


@pytest.mark.parametrize("side, kernel", [("A", "flash"), ("B", "standard")])
@pytest.mark.parametrize("wrong_from", [1, 8])
def test_a_wrong_result_before_or_after_timing_leaves_no_time(gpu, monkeypatch, side, kernel, wrong_from):
    honest, runs = subjects.Prefill.run, []

    def spoil(self):
        honest(self)
        if self.params["kernel"] == kernel:
            runs.append(1)
            if len(runs) >= wrong_from:
                self.planned.outputs[0][...] = 7

    monkeypatch.setattr(subjects.Prefill, "run", spoil)
    found = run_pair(gpu, pair_of(PREFILL, **STANDARD))
    assert (found["status"], found["side"]) == ("incorrect", side) and "exceeds" in found["error"]
    assert set(found) == {"status", "error", "side"}


def test_a_kernel_that_stops_working_once_checked_is_found_out(gpu, monkeypatch):
    honest, runs = subjects.Prefill.run, []

    def lazy(self):
        runs.append(1)
        if len(runs) <= 4:  # each once to load it and once for the check
            honest(self)

    monkeypatch.setattr(subjects.Prefill, "run", lazy)
    found = run_pair(gpu, pair_of(PREFILL), Repeat(max_samples=4, timeout_s=0.1))
    assert (found["status"], found["side"]) == ("incorrect", "A")


@pytest.mark.parametrize(
    "b, status, words",
    [
        ({"kernel": "torch_flash"}, "unsupported", "torch_flash"),
        ({"constants": '{"block_n": 24}'}, "unsupported", "block_n"),
        ({"constants": '{"warps": 99}'}, "unsupported", "warps"),
    ],
)
def test_what_b_cannot_do_is_bs(gpu, b, status, words):
    found = run_pair(gpu, pair_of(PREFILL, **b))
    assert (found["status"], found["side"]) == (status, "B") and words in found["error"]
    found = run_pair(gpu, {"a": {**PREFILL, **b}, "b": PREFILL, "confidence": 0.95})
    assert (found["status"], found["side"]) == (status, "A")


def test_memory_that_runs_out_is_an_outcome(gpu, monkeypatch):
    def full(*words):
        raise MemoryError("nothing left")

    monkeypatch.setattr(subjects.inputs, "build", full)
    assert run_pair(gpu, pair_of(PREFILL)) == {"status": "oom", "error": "nothing left", "side": "A"}


def test_a_card_that_slows_down_is_said_and_a_clock_that_drifts_divides_out(gpu, monkeypatch):
    gpu.clock = [2000.0, 1500.0]
    found = run_pair(gpu, pair_of(PREFILL))
    assert found["status"] == "ok" and found["sm_clock_min_mhz"] == 1500.0
    monkeypatch.setattr(environment, "sensors", lambda: {"measured_throttle_reasons": "hw_thermal"})
    found = run_pair(gpu, pair_of(PREFILL))
    assert found["status"] == "throttled" and found["side"] == "A and B" and "hw_thermal" in found["error"]


def test_a_worker_takes_pairs_and_cases_alike():
    worker = Worker("cpu", [], LIMITS)
    worker.start()
    try:
        found = worker.run({"pair": pair_of(PREFILL)})
        assert (found["status"], found["side"]) == ("unsupported", "A and B")
        assert "the CPU machine models no time" in found["error"]
        assert worker.run(PROBE)["status"] == "ok"
    finally:
        worker.stop()
