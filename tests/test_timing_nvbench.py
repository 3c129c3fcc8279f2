"""NVBench as a second timer: what it refuses, how a process times many calls, and on a GPU that both agree."""
from __future__ import annotations

import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from commands import call

import cuattn
from cuattn import timing, timing_nvbench
from cuattn.kernels.base import Unsupported
from cuattn.machine import open_machine
from experiments import requests
from experiments.requests import Request
from experiments.suite import parse_suite
from experiments.words import UserError


class Gpu:
    """Just enough of one to get to the refusals, and to NVBench."""

    name, index = "gpu", 3

    def foreign(self, stream: int):
        assert stream == 0x77
        return nullcontext()

    def synchronize(self) -> None:
        """There is nothing to wait for."""


def nothing() -> None:
    """No work."""


@pytest.mark.parametrize(("options", "words"), [
    ({"cache": "warm"}, "NVBench samples with a cold cache only"),
    ({"cache": "lukewarm"}, "expected 'cold' or 'warm'"),
    ({"timeout_s": 0}, "timeout_s: expected seconds above 0"),
    ({"min_samples": 5, "max_samples": 3}, "min_samples"),
])
def test_arguments_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        timing_nvbench.measure(nothing, Gpu(), **options)


def test_the_cpu_machine_is_refused(cpu):
    with pytest.raises(ValueError, match="models no time"):
        timing_nvbench.measure(nothing, cpu)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(timing_nvbench, "available", lambda: False)
    with pytest.raises(ValueError, match="pip install cuda-bench"):
        timing_nvbench.measure(nothing, Gpu())


class State:
    """A state of NVBench's: one sample more than asked for, each as long as the samples that were asked for."""

    def __init__(self, folder: str):
        self.folder, self.files = folder, 0

    def set_min_samples(self, count: int) -> None:
        self.count = count

    def set_timeout(self, seconds: float) -> None:
        self.timeout = seconds

    def exec(self, launcher, batched: bool) -> None:
        assert not batched
        for _ in range(1 + self.count):
            launcher(SimpleNamespace(get_stream=lambda: SimpleNamespace(addressof=lambda: 0x77)))
        for kind, number in (("bin", self.timeout * 1e-6), ("freqs-bin", 1.5e9)):
            file = Path(f"{self.folder}-{kind}") / f"{self.files}.bin"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(np.full(1 + self.count, number, "<f4").tobytes())
        self.files += 1


class Bench(ModuleType):
    """cuda.bench as far as it is used: what is registered before its only run is run in it."""

    def __init__(self):
        super().__init__("cuda.bench")
        self.body, self.ran = None, []

    def register(self, body) -> None:
        assert not self.ran, "Can not register more benchmarks after benchmark was run"
        self.body = body

    def run_all_benchmarks(self, argv: list[str]) -> None:
        assert not self.ran, "Benchmarks were already executed"
        self.ran.append(argv)
        self.body(State(argv[argv.index("--jsonbin") + 1]))


@pytest.fixture
def bench(monkeypatch):
    """A process in which NVBench has not run yet."""
    made, runs = Bench(), []
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bench", made)
    monkeypatch.setattr(sys.modules["cuda"], "bench", made, raising=False)
    monkeypatch.setattr(timing_nvbench, "available", lambda: True)
    monkeypatch.setattr(timing_nvbench, "_runs", runs)
    yield made
    for run in runs:
        run._end()
        assert not run._thread.is_alive()


def test_a_process_times_any_number_of_calls_in_nvbenchs_one_run(bench):
    where = set()
    for samples, timeout_s in ((10, 5.0), (20, 7.0), (10, 5.0)):
        taken = timing_nvbench.measure(lambda: where.add(threading.get_ident()), Gpu(), min_samples=samples,
                                       max_samples=20, timeout_s=timeout_s)
        assert taken.samples_us == pytest.approx([timeout_s] * min(samples + 1, 20))
        assert (taken.stop_reason, taken.sm_clock_mhz) == ("nvbench", 1500)
    (argv,) = bench.ran
    assert argv[argv.index("--devices") + 1] == "3" and argv[argv.index("--max-noise") + 1] == "0.5"
    assert len(where) == 2  # NVBench's thread, and the host's own time


def test_nvbench_keeps_its_noise(bench):
    timing_nvbench.measure(nothing, Gpu(), rel_noise=0.01)
    with pytest.raises(Unsupported, match="rel_noise: NVBench keeps the first of a process, 0.01, got 0.005; ask"):
        timing_nvbench.measure(nothing, Gpu())


def test_what_a_call_raises_comes_as_it_is_and_the_next_is_timed(bench):
    def faulty() -> None:
        raise LookupError("no such page")

    with pytest.raises(LookupError, match="no such page"):
        timing_nvbench.measure(faulty, Gpu())
    assert timing_nvbench.measure(nothing, Gpu()).n_samples == 11


def test_an_nvbench_that_takes_no_sample_says_so(bench, monkeypatch):
    monkeypatch.setattr(State, "exec", lambda self, launcher, batched: None)
    with pytest.raises(RuntimeError, match="NVBench took no sample"):
        timing_nvbench.measure(nothing, Gpu())


def test_an_nvbench_that_does_not_start_says_why(bench, monkeypatch):
    def refuse(argv) -> None:
        raise OSError("no device 3")

    monkeypatch.setattr(bench, "run_all_benchmarks", refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="NVBench has ended its run, OSError: no device 3; time in another"):
            timing_nvbench.measure(nothing, Gpu())


def test_a_call_that_nobody_waits_for_is_given_up(bench, monkeypatch):
    """Control-C reaches whoever waits, not NVBench's thread."""
    calls, begun = [], threading.Event()

    def slow() -> None:
        calls.append(1)
        begun.set()
        time.sleep(0.01)

    class Interrupted(timing_nvbench.Future):
        def result(self):
            assert begun.wait(10)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(timing_nvbench, "Future", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            timing_nvbench.measure(slow, Gpu(), min_samples=10**6, max_samples=10**6)
    assert timing_nvbench.measure(nothing, Gpu()).n_samples == 11 and len(calls) < 1000


def normal(gpu, shape):
    return gpu.upload(np.random.default_rng(0).standard_normal(shape, np.float32).astype("bfloat16"))


def prefill(gpu, kernel: str):
    q, k, v = (normal(gpu, (1, 2048, heads, 128)) for heads in (8, 2, 2))
    return cuattn.plan_attention(q, k, v, kernel=kernel)


def decode(gpu):
    q, k, v = (normal(gpu, shape) for shape in ((8, 1, 32, 128), (512, 16, 8, 128), (512, 16, 8, 128)))
    table = gpu.upload(np.random.default_rng(1).permutation(512).astype(np.int32).reshape(8, 64))
    return cuattn.plan_decode(q, k, v, table, gpu.upload(np.full(8, 1024, np.int32)))


CALLS = {
    "flash": lambda gpu: prefill(gpu, "flash"),
    "standard": lambda gpu: prefill(gpu, "standard"),
    "paged": decode,
    "read": lambda gpu: cuattn.plan_probe(gpu, "read", bytes=1 << 23),
    "copy": lambda gpu: cuattn.plan_probe(gpu, "copy", bytes=1 << 28),
    "mma": lambda gpu: cuattn.plan_probe(gpu, "mma", flops=10**11),
}


@pytest.mark.gpu
@pytest.mark.skipif(not timing_nvbench.available(), reason="needs cuda-bench (pip install cuda-bench)")
@pytest.mark.parametrize("name", ["flash", "standard", "paged", "read", "copy", "mma"])
def test_both_timers_agree_within_three_percent(name):
    gpu = open_machine("gpu")
    run = CALLS[name](gpu).run
    ours, theirs = (timer.measure(run, gpu).median_us for timer in (timing, timing_nvbench))
    assert ours == pytest.approx(theirs, rel=0.03)


@pytest.mark.parametrize(("words", "said"), [
    (("--timer", "nvbenc"), "'nvbenc' is not a timer; did you mean 'nvbench'?"),
    (("--timer", "nvbench", "--machine", "cpu"), "--timer nvbench: the CPU machine models no time, so leave it out"),
])
def test_the_command_refuses_a_timer_that_cannot_be_had(monkeypatch, capsys, tmp_path, words, said):
    code, _, err = call(monkeypatch, capsys, "run", "quick", "--out", tmp_path / "run", *words)
    assert code == 2 and said in " ".join(err.split()) and not (tmp_path / "run").exists()


def test_a_run_asked_for_another_timer_says_so_and_is_asked_again_alike():
    request = Request("quick", "gpu", timer="nvbench")
    assert requests.plan(request)[0].repeat.timer == "nvbench"
    assert requests.command_line(request) == "run quick --machine gpu --timer nvbench"
    assert "timer" not in requests.command_line(Request("quick"))


def test_no_suite_chooses_its_timer():
    text = {"title": "x", "question": "x", "claims": [], "repeat": {"timer": "nvbench"}}
    with pytest.raises(UserError, match="'timer'"):
        parse_suite("x", text | {"cpu": {"x": {"kernels": ["flash"], "h": 1, "hkv": 1, "d": 64, "n": 1}}}, "x")
