"""NVBench as a second timer: what it refuses, and on a GPU that both agree."""
from __future__ import annotations

import numpy as np
import pytest
from commands import call

import cuattn
from cuattn import timing, timing_nvbench
from cuattn.machine import open_machine
from experiments import requests
from experiments.requests import Request
from experiments.suite import parse_suite
from experiments.words import UserError


class Gpu:
    """Just enough of one to get to the refusals."""

    name = "gpu"


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
