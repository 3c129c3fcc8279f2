"""Two kernels against each other: what one may ask, and what `compare` makes of what the worker finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import call
from planted import finished, plant

from experiments import environment
from experiments.ab import live, live_cli
from experiments.ab.live import Subject
from experiments.catalog import catalog
from experiments.suite import load_suite
from experiments.words import UserError
from experiments.worker import Worker

KNOWN = catalog()


# --- what one may ask


@pytest.mark.parametrize(
    "text, label",
    [
        ("flash", "flash"),
        ("flash:block_n=32", "flash block_n=32"),
        ("flash:block_n=32,warps=4", "flash block_n=32 warps=4"),
        (" flash block_n=32  warps=4 ", "flash block_n=32 warps=4"),
        ("standard:score=input", "standard score=input"),
        ("torch_flash", "torch_flash"),
    ],
)
def test_a_kernel_with_its_constants(text, label):
    assert live.subject("--a", text, KNOWN).label == label


def test_constants_reach_the_case_as_a_suite_would_write_them():
    side = live.subject("--a", "flash:warps=4,block_n=32", KNOWN)
    point = {"family": "prefill", "n": 16}
    assert side.params(point) == {**point, "kernel": "flash", "constants": '{"block_n": 32, "warps": 4}'}
    assert Subject("flash", {}).params(point) == {**point, "kernel": "flash"}


@pytest.mark.parametrize(
    "text, words",
    [
        ("flsh", "--a: 'flsh' is not a kernel; did you mean 'flash'?"),
        ("", "--a: '' is not a kernel"),
        ("mine/x.py", "give its module with --kernel, and here its name"),
        ("flash:block_n", "--a: expected flash:name=value or the like, got 'flash:block_n'; mend 'block_n'"),
        ("flash:block_n=", "mend 'block_n='"),
        ("flash:blok_n=3", "'blok_n' is not a constant of flash; did you mean 'block_n'?"),
        ("flash:warps=2,warps=4", "warps is given twice"),
        ("torch_flash:x=1", "'x' is not a constant of torch_flash; it has none"),
    ],
)
def test_words_that_name_no_kernel(text, words):
    with pytest.raises(UserError) as caught:
        live.subject("--a", text, KNOWN)
    assert words in str(caught.value)


def points(suite: str, a: str, b: str, limit=None) -> list[dict]:
    sides = (live.subject("--a", text, KNOWN) for text in (a, b))
    return live.points_of(load_suite(suite), KNOWN, *sides, limit)


def test_shapes_are_the_suites_each_once_whatever_kernels_it_sweeps():
    found = points("quick", "flash", "flash:block_n=32")
    assert len(found) == len({json.dumps(p, sort_keys=True) for p in found}) == 16
    assert {p["family"] for p in found} == {"prefill"}
    assert not any("kernel" in p or "constants" in p for p in found)
    assert points("quick", "flash", "standard", 3) == found[:3]
    assert {p["family"] for p in points("quick", "paged", "paged:splits=2")} == {"decode"}
    assert all("bytes" in p for p in points("ceilings", "read", "read"))


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("quick", "flash", "paged"), "flash is a prefill kernel, paged is a decode kernel"),
        (("page-size", "flash", "flash"), "page-size has no shape for prefill kernels on a GPU"),
        (("quick", "flash", "flash", 0), "--limit: expected at least 1, got 0"),
    ],
)
def test_kernels_and_suites_that_do_not_belong_together(words, sentence):
    with pytest.raises(UserError) as caught:
        points(*words)
    assert sentence in str(caught.value)


def test_sampling_aims_at_a_fifth_of_the_margin_within_the_deadline():
    limits = live.repeat_for(load_suite("quick"), 0.02, 300.0)
    assert limits.rel_noise == pytest.approx(0.004) and limits.timeout_s == 300.0 < limits.deadline_s
    assert live.repeat_for(load_suite("quick"), 0.02, 5.0).deadline_s == load_suite("quick").repeat.deadline_s


# --- the command


class Fake(Worker):
    """A worker without a process: each outcome in its turn; an exception is raised."""

    outcomes: list = []

    def __init__(self, machine, kernel_paths, repeat):
        self.asked = []
        self.device = {"machine": "gpu", "device": "H200", "arch": "sm_90a", "device_uuid": "GPU-1"}
        assert machine == "gpu" and repeat.rel_noise > 0

    def start(self):
        pass

    def stop(self):
        pass

    def run(self, params):
        outcome = self.outcomes[len(self.asked) % len(self.outcomes)]
        self.asked.append(params)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def timed(ratio: float) -> dict:
    return {"status": "ok", "pairs_us": [[100.0, 100.0 * ratio]] * 20, "stop_reason": "settled"}


@pytest.fixture
def command(monkeypatch, capsys):
    """command(outcomes, words): exit code and output of `compare` where the worker finds these."""

    def run(outcomes, *words) -> tuple[int, str]:
        monkeypatch.setattr(Fake, "outcomes", outcomes)
        monkeypatch.setattr(live_cli, "Worker", Fake)
        monkeypatch.setattr(environment, "gpu_expected", lambda: bool(outcomes))
        code, out, err = call(monkeypatch, capsys, "compare", *words)
        return code, out + err

    return run


def test_a_live_comparison_from_the_command_line(command, tmp_path):
    outcomes = [
        timed(1.0),
        timed(1.1),
        {"status": "incorrect", "error": "O differs", "side": "B"},
        {"status": "timeout", "error": "killed after 120 s of running"},
        {"status": "ok", "pairs_us": [[0.0, 1.0]] * 20, "stop_reason": "timeout"},
    ]
    words = "--a", "flash", "--b", "flash:block_n=32", "--limit", 5, "--out", tmp_path / "new" / "pairs.jsonl"
    code, out = command(outcomes, *words)
    assert code == 0 and "A: flash, B: flash block_n=32, on H200" in out and "A B B A" in out
    assert "0 faster, 1 slower, 1 same, 0 undecided" in out and "over 2 of 5 cases (40 %)" in out
    for words_out in ("incorrect in B", "O differs", "timeout in A or B", "a sample that is no time"):
        assert words_out in out
    lines = [json.loads(line) for line in (tmp_path / "new" / "pairs.jsonl").read_text().splitlines()]
    assert [line["came_out"] for line in lines] == [
        "same", "slower", "incorrect in B", "timeout in A or B", "a sample that is no time",
    ]  # fmt: skip
    assert lines[0]["pairs_us"] == [[100.0, 100.0]] * 20 and lines[0]["device"] == "H200"
    assert lines[0]["b"] == {**lines[0]["a"], "constants": '{"block_n": 32}'}
    code, out = command(outcomes, *words)
    assert code == 2 and "exists already; name a new file" in out


def test_an_a_a_comparison_says_that_it_is_one(command):
    code, out = command([timed(1.0)], "--a", "paged", "--b", "paged", "--suite", "page-size", "--limit", 2)
    assert code == 0 and "A and B are the same" in out and "2 same" in out


def test_an_interrupt_keeps_what_is_done(command):
    code, out = command([timed(1.1), KeyboardInterrupt()], "--a", "flash", "--b", "standard")
    assert code == 130 and "1 slower" in out and "Stopped after 1 of 16 shapes." in out


def test_nothing_timed_is_no_success(command):
    failed = {"status": "oom", "error": "no room", "side": "A"}
    code, out = command([failed], "--a", "flash", "--b", "standard", "--limit", 2)
    assert code == 1 and "No shape was timed" in out and "oom in A" in out


def planted(folder: Path) -> Path:
    """A kernel module of one's own named `nothing`."""
    (path,) = plant(folder, ["nothing"])
    return Path(path)


def test_a_kernel_from_outside_is_compared_by_its_name(command, tmp_path):
    one, two = planted(tmp_path / "one"), planted(tmp_path / "two")
    words = "--a", "flash", "--b", "nothing", "--limit", 1
    code, out = command([timed(0.5)], *words, "--kernel", one)
    assert code == 0 and "B: nothing" in out and "1 faster" in out
    code, out = command([timed(1.0)], *words, "--kernel", one, "--kernel", two)
    assert code == 2 and "two modules define 'nothing'" in out and str(one) in out and str(two) in out


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--a", "flash"], "--b: is missing; name two kernels"),
        (["--suite", "quick"], "--a: is missing"),
        (["--a", "flash", "--b", "flash", "--suite", "quik"], "did you mean 'quick'?"),
        (["--a", "flash", "--b", "flash", "--timeout", "0"], "--timeout: expected seconds above 0, got 0"),
        (["--a", "flash", "--b", "flash", "--machine", "gpo"], "did you mean 'gpu'?"),
        (["--a", "flash", "--b", "flash", "--machine", "cpu"], "the CPU machine models no time"),
        (["--a", "flash", "--b", "flash"], "no GPU here with CuPy, and the CPU machine models no time"),
        (["--a", "flash", "--b", "x", "--kernel", "/nowhere/x.py"], "is not a file"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(command, words, sentence):
    code, out = command([], *words)
    assert code == 2 and out.startswith("error: ") and out.count("\n") == 1 and sentence in out


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_is_the_same_as_itself_and_faster_than_the_formula(tmp_path):
    words = "compare", "--limit", "2", "--a", "flash"
    assert " 2 same" in finished(*words, "--b", "flash", "--margin", "5%")
    out = finished(*words, "--b", "standard", "--out", tmp_path / "pairs.jsonl")
    assert " 2 slower" in out and len((tmp_path / "pairs.jsonl").read_text().splitlines()) == 2
