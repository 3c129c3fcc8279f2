"""The runner, end to end on the CPU machine: every case ends as one row, whatever its kernel does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cuattn
from cuattn.compile import build
from cuattn.machine import open_machine
from experiments import inputs, runner, store
from experiments.suite import Repeat
from experiments.words import UserError
from experiments.worker import Unavailable, Worker

ROOT = Path(__file__).resolve().parent.parent

# Kernels that misbehave: a module and its `.cu`, as a user would write them outside the project.
PLANTED_CU = """
#include "prim/gmem.cuh"
KERNEL(32, 1) planted_nothing() {}
KERNEL(32, 1) planted_hang() { for (volatile int x = 1; x;) {} }
KERNEL(32, 1) planted_outside(const View<float, 3> g_lse) {
  store_global(g_lse.at(0, 0) + (1ll << 40), 1.f);
}
"""
PLANTED_PY = """
import dataclasses, os, time
from pathlib import Path
from cuattn.kernels.base import Cost, Launch, Plan, Unsupported
from cuattn.kernels.flash import ROW as FLASH

NAME = Path(__file__).stem
CU = str(Path(__file__).with_name("planted.cu"))

def plan(shape, device, overrides=None):
    if NAME == "abort":
        os.abort()
    if NAME == "sleep":
        time.sleep(600)
    if NAME == "hungry":
        raise MemoryError("no room for 9 GB")
    if NAME == "picky":
        raise Unsupported("picky: dislikes this shape; take another")
    if NAME == "typo":
        raise ZeroDivisionError("division by zero")
    file = "/nowhere.cu" if NAME == "uncompiled" else CU
    return Plan((Launch(file, "planted_" + NAME, (1, 1, 1), 32, 0, {}),), {})

def arguments(shape, plan, t):
    return [[("lse", t["lse"])]] if NAME == "outside" else [[]]

ROW = dataclasses.replace(FLASH, name=NAME, file=CU, constants={}, plan=plan, arguments=arguments,
                          cost=lambda shape, plan, lengths=None: Cost(1, 2, 3, 1))
"""
STATUSES = {
    "abort": ("crash", "SIGABRT while building"),
    "sleep": ("timeout", "killed after 3 s of building"),
    "hang": ("timeout", "killed after 2 s of running"),
    "outside": ("cuda_error", "planted_outside: write of 4 bytes"),
    "nothing": ("incorrect", "NaN"),
    "hungry": ("oom", "no room"),
    "picky": ("unsupported", "dislikes"),
    "uncompiled": ("compile_error", "nowhere"),
    "typo": ("crash", "ZeroDivisionError"),
}
SUITE = """
title = "Planted"
question = "Does every case end as a row?"
[repeat]
compile_s = 3
deadline_s = 2
[cpu.small]
kernels = ["flash"]
h = 2
hkv = 1
d = 64
n = 16
"""
AFTER = """
[cpu.after]
kernels = ["paged"]
h = 2
hkv = 1
d = 64
n = 24
"""


def plant(folder: Path, names) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "planted.cu").write_text(PLANTED_CU)
    for name in names:
        (folder / f"{name}.py").write_text(PLANTED_PY)
    return [str(folder / f"{name}.py") for name in names]


def suite_file(folder: Path, text: str = SUITE) -> str:
    path = folder / "planted suite ü.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def command(*words, **options) -> subprocess.Popen:
    """`python -m experiments …` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", *map(str, words)],
        text=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **options,
    )


def finished(*words, code: int = 0) -> str:
    process = command(*words)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, out + err
    assert "Traceback" not in out + err
    return out + err


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def lines(run: Path) -> int:
    path = run / runner.JOURNAL
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module", autouse=True)
def warm_cache(tmp_path_factory):
    """Compile once, outside the deadlines that these tests set."""
    folder = tmp_path_factory.mktemp("warm")
    plant(folder, [])
    for entry in ("nothing", "hang", "outside"):
        build(str(folder / "planted.cu"), f"planted_{entry}", {}, "cpu")
    machine = open_machine("cpu")
    params = {
        "b": 1,
        "h": 2,
        "hkv": 1,
        "d": 64,
        "dtype": "bfloat16",
        "seed": 0,
        "page_size": 16,
        "layout": "bshd",
        "page_order": "sorted",
        "m": 16,
        "n": 16,
    }
    cuattn.plan_attention(**inputs.build(machine, {**params, "family": "prefill"}))
    cuattn.plan_decode(**inputs.build(machine, {**params, "family": "decode", "n": 24}))


def test_every_failure_is_a_row_and_its_neighbours_are_unharmed(tmp_path):
    kernels = plant(tmp_path / "außen", STATUSES)
    options = [word for path in kernels for word in ("--kernel", path)]
    run = tmp_path / "ein lauf"
    out = finished(
        "run", suite_file(tmp_path, SUITE + AFTER), "--machine", "cpu", "--out", run, *options, code=1
    )
    frame = store.read_runs(run).frame
    assert len(frame) == 2 + len(STATUSES) and "compile_error" in out
    for name, (status, words) in STATUSES.items():
        rows = frame[frame.kernel == name]
        assert set(rows.status) == {status} and all(words in e for e in rows.error), rows[
            ["status", "error"]
        ].values
        assert rows.emulation_s.isna().all() or status == "incorrect"
    good = frame[frame.kernel.isin(["flash", "paged"])]
    assert (
        len(good) == 2
        and set(good.status) == {"ok"}
        and good.error.isna().all()
        and (good.attempt == 1).all()
    )
    assert (good.counted_bytes_loaded == good.modelled_bytes_loaded).all()
    assert (good.counted_bytes_stored == good.modelled_bytes_stored).all()
    assert (good.counted_launches == good.modelled_launches).all()
    assert good.measured_time_us.isna().all() and (good.check == "full").all()
    assert not list(run.glob(".*"))


def test_kill_the_runner_and_resume(tmp_path):
    text = SUITE.replace("n = 16", "n = [16, 17, 18, 19, 20, 21, 22, 23, 24, 25]")
    run = tmp_path / "run"
    process = command("run", suite_file(tmp_path, text), "--machine", "cpu", "--out", run)
    wait_for(lambda: lines(run) >= 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = store.read_runs(run)
    assert not before.runs[0].complete and 2 <= len(before.frame) < 10
    journal = run / runner.JOURNAL
    journal.write_bytes(journal.read_bytes() + b'{"case_id": "torn')
    finished("resume", run)
    after = store.read_runs(run, attempts="all")
    assert after.runs[0].complete and after.torn_lines == 1
    assert len(after.frame) == after.frame.case_id.nunique() == 10 and set(after.frame.status) == {"ok"}
    assert set(before.frame.case_id) <= set(after.frame.case_id)
    assert "Nothing is missing" in finished("resume", run)


def test_interrupt_keeps_what_is_done_and_resume_takes_it_up(tmp_path):
    run = tmp_path / "run"
    [kernel] = plant(tmp_path / "k", ["sleep"])
    text = SUITE.replace("compile_s = 3", "compile_s = 60")
    process = command("run", suite_file(tmp_path, text), "--machine", "cpu", "--out", run, "--kernel", kernel)
    wait_for(lambda: lines(run) == 1)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "go on with: python -m experiments resume" in out, out + err
    frame = store.read_runs(run).frame
    assert frame.status.tolist() == ["ok", "interrupted"] and not (run / store.PART).exists()
    (tmp_path / "k" / "sleep.py").write_text(
        PLANTED_PY.replace("time.sleep(600)", "raise MemoryError('later')")
    )
    finished("resume", run)
    rows = store.read_runs(run, attempts="all").frame
    assert rows[["status", "attempt"]].values.tolist() == [["ok", 1], ["interrupted", 1], ["oom", 2]]
    again = runner.reopen(run)
    assert again.pending() == [] and [c.params["kernel"] for c in again.pending(retry_failed=True)] == [
        "sleep"
    ]


def test_the_worker_dies_with_the_runner(tmp_path):
    [kernel] = plant(tmp_path / "k", ["sleep"])
    text = SUITE.replace("compile_s = 3", "compile_s = 60")
    run = tmp_path / "run"
    process = command("run", suite_file(tmp_path, text), "--machine", "cpu", "--out", run, "--kernel", kernel)
    wait_for(lambda: lines(run) == 1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids = children.read_text().split()
    assert pids
    process.kill()
    process.communicate()
    wait_for(lambda: not any(_alive(pid) for pid in pids), 15)


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_reading_while_a_run_writes(tmp_path):
    run = tmp_path / "run"
    process = command("run", suite_file(tmp_path, SUITE + AFTER), "--machine", "cpu", "--out", run)
    seen = []
    while process.poll() is None:
        loaded = store.read_runs(tmp_path)
        assert loaded.quarantined == []
        seen.append(len(loaded.frame))
        time.sleep(0.01)
    process.communicate()
    assert process.returncode == 0 and seen == sorted(seen) and len(store.read_runs(run).frame) == 2


# --- refusals


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["run", "quik"], "did you mean 'quick'?"),
        (["plan", "quick", "--only", "flsh"], "did you mean 'flash'?"),
        (["run", "quick", "--machine", "gpo"], "did you mean 'gpu'?"),
        (["run", "quick", "--kernel", "/nowhere/x.py"], "is not a file"),
        (["run", "quick", "--kernel", __file__], "no ROW"),
        (["show", "/nowhere"], "does not exist"),
        (["run", "page-size", "--lengths", "/nowhere"], "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(words, sentence, capsys, monkeypatch):
    from experiments import cli

    monkeypatch.setattr(sys, "argv", ["experiments", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1 and sentence in err


def test_an_unknown_machine_says_what_is_missing():
    with pytest.raises(Unavailable, match="machine"):
        Worker("tpu", [], Repeat()).start()


class Fake(Worker):
    """A worker without a process."""

    def __init__(self):
        self.machine = "cpu"
        self.device = {"machine": "cpu", "device": "cpu", "arch": "cpu", "device_uuid": None}

    def run(self, params):
        return {"status": "ok", "max_err": 0.0}

    def stop(self):
        pass


def opened(tmp_path, out=None):
    path = suite_file(tmp_path, SUITE + AFTER)
    return runner.begin(runner.Request(path, "cpu"), Fake(), out or tmp_path / "run")


def test_a_disk_that_fills_while_journalling_stops_with_the_reason(tmp_path):
    run = opened(tmp_path)
    worker = Fake()
    runner.execute(run, worker, run.cases[:1], lambda case, row: None)
    kept = (run.path / runner.JOURNAL).read_bytes()
    (run.path / runner.JOURNAL).rename(run.path / "journal-1.jsonl")
    (run.path / runner.JOURNAL).symlink_to("/dev/full")
    with pytest.raises(store.StoreError, match="the disk is full.*resume"):
        runner.execute(run, worker, run.cases[1:], lambda case, row: None)
    (run.path / runner.JOURNAL).unlink()
    assert (run.path / "journal-1.jsonl").read_bytes() == kept and len(store.read_runs(run.path).frame) == 1
    again = runner.reopen(run.path)
    assert [c.case_id for c in again.pending()] == [run.cases[1].case_id]


def test_a_folder_that_cannot_hold_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out: .* cannot be made"):
        opened(tmp_path, tmp_path / "file" / "run")
    opened(tmp_path)
    with pytest.raises(UserError, match="already holds a run"):
        opened(tmp_path)
    if os.geteuid():  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises((UserError, store.StoreError), match="cannot be"):
            opened(tmp_path, tmp_path / "locked" / "run")


def test_a_read_only_folder(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match="Read-only file system.*writable folder"):
        runner.begin(runner.Request("quick", "cpu"), Fake(), tmp_path / "run")


def test_a_run_without_cases_cannot_be_resumed(tmp_path):
    store.write_manifest(tmp_path, {"run_id": "x"})
    with pytest.raises(store.StoreError, match="does not say suite, .*cannot be resumed"):
        runner.reopen(tmp_path)
    with pytest.raises(store.StoreError, match="is this a run"):
        runner.reopen(tmp_path / "nothing")


def test_the_manifest_repeats_the_command(tmp_path):
    run = opened(tmp_path)
    assert run.manifest["command"].startswith("python -m experiments run ")
    assert "--machine cpu" in run.manifest["command"]
    assert {c["case_id"] for c in run.manifest["cases"]} == {c.case_id for c in run.cases}
    assert run.manifest["environment"]["packages"]["numpy"]


def test_a_run_that_kept_only_its_parquet_is_resumed_without_losing_it(tmp_path):
    run = opened(tmp_path)
    runner.execute(run, Fake(), run.cases[:1], lambda case, row: None)
    runner.finish(run)
    (run.path / runner.JOURNAL).unlink()
    again = runner.reopen(run.path)
    assert [c.case_id for c in again.pending()] == [run.cases[1].case_id]
    runner.execute(again, Fake(), again.pending(), lambda case, row: None)
    runner.finish(again)
    assert len(store.read_runs(run.path).frame) == 2 and runner.reopen(run.path).pending() == []


GPU_SUITE = (
    SUITE.replace("[cpu.small]", "[gpu.small]").replace("compile_s = 3\ndeadline_s = 2", "timeout_s = 0.3")
    + """
[gpu.decode]
kernels = ["paged"]
h = 8
hkv = 2
d = 128
b = 3
n = [1, 700]
mode = ["launch", "graph"]
[gpu.peers]
kernels = ["torch_math", "torch_flash", "torch_cudnn"]
h = 8
hkv = 2
d = 128
n = 512
causal = [false, true]
[gpu.probes]
kernels = ["read", "copy", "mma", "empty"]
bytes = 1048576
flops = 1000000000
mode = ["launch", "graph"]
"""
)


@pytest.mark.gpu
def test_on_a_gpu_rows_are_timed_and_a_fault_harms_nobody_else(tmp_path):
    planted = plant(tmp_path / "k", ["outside", "nothing", "hungry"])
    words = [word for path in planted for word in ("--kernel", path)]
    run = tmp_path / "run"
    finished("run", suite_file(tmp_path, GPU_SUITE), "--machine", "gpu", "--out", run, *words, code=1)
    frame = store.read_runs(run).frame
    for name, status in (("outside", "cuda_error"), ("nothing", "incorrect"), ("hungry", "oom")):
        rows = frame[frame.kernel == name]
        assert len(rows) and set(rows.status) == {status}, rows[["status", "error"]].values
        assert rows.measured_time_us.isna().all()
    peers = frame[frame.kernel.str.startswith("torch")]
    assert set(peers.status) <= {"ok", "throttled", "unsupported"}, peers[
        ["kernel", "status", "error"]
    ].values
    ours = frame[frame.kernel.isin(["flash", "paged", "read", "copy", "mma", "empty"])]
    assert set(ours.status) <= {"ok", "throttled"}, ours[["kernel", "status", "error"]].values
    assert (ours.measured_time_us > 0).all() and ours.measured_samples_us.notna().all()
    assert (ours.measured_peak_pool_bytes >= ours.modelled_peak_bytes).all() and ours.registers.notna().all()
