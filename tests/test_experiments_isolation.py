"""Whatever a kernel does, its case ends as a row that says so, and the cases before and after are unharmed."""
from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from planted import AFTER, SUITE, asleep, command, finished, lines, plant, suite_file, wait_for, warm
from test_experiments_case import PREFILL, QUICK, PlayedGpu

from experiments import case, environment, runner, store, worker
from experiments.catalog import PEERS, catalog
from experiments.schema import PERFORMANCE

STATUSES = {
    "abort": ("crash", "SIGABRT while building"),
    "sleep": ("timeout", "killed after 6 s of building"),
    "leave": ("crash", "exit code 3 while building"),
    "killed": ("crash", "SIGKILL while building"),
    "late": ("crash", "SIGABRT while running"),
    "hang": ("timeout", "killed after 2 s of running"),
    "trap": ("cuda_error", "planted_trap: an illegal instruction"),
    "outside": ("cuda_error", "planted_outside: write of 4 bytes"),
    "nothing": ("incorrect", "NaN"),
    "wrong": ("incorrect", "LSE: error"),
    "hungry": ("oom", "Unable to allocate"),
    "picky": ("unsupported", "dislikes"),
    "uncompiled": ("compile_error", "nowhere"),
    "typo": ("crash", "ZeroDivisionError"),
    "boastful": ("crash", "cannot be stored"),
}


@pytest.fixture(scope="module", autouse=True)
def warm_cache(tmp_path_factory):
    warm(tmp_path_factory.mktemp("warm"))


def test_every_failure_is_a_row_and_its_neighbours_are_unharmed(tmp_path):
    fine = [f"fine{i}" for i in range(len(STATUSES))]
    kernels = plant(tmp_path / "außen", [name for pair in zip(STATUSES, fine) for name in pair])
    options = [word for path in kernels for word in ("--kernel", path)]
    run = tmp_path / "ein lauf"
    out = finished(
        "run", suite_file(tmp_path, SUITE + AFTER), "--machine", "cpu", "--out", run, *options, code=1
    )
    frame = store.read_runs(run).frame
    assert len(frame) == 2 + 2 * len(STATUSES) and "compile_error" in out
    for name, (status, words) in STATUSES.items():
        [row] = frame[frame.kernel == name].to_dict("records")
        assert row["status"] == status and words in row["error"], (name, row["status"], row["error"])
        assert "\n" not in row["error"] and len(row["error"]) <= 600
        assert (row["emulation_s"] is not None) is (status == "incorrect")
    assert frame[list(PERFORMANCE)].isna().all(axis=None)
    good = frame[frame.kernel.isin(["flash", "paged", *fine])]
    assert len(good) == 2 + len(fine) and set(good.status) == {"ok"}, good[["kernel", "status", "error"]].values
    assert good.error.isna().all() and (good.attempt == 1).all()
    assert (good.counted_bytes_loaded == good.modelled_bytes_loaded).all()
    assert (good.counted_bytes_stored == good.modelled_bytes_stored).all()
    assert (good.counted_launches == good.modelled_launches).all()
    assert good.measured_time_us.isna().all() and (good.check == "full").all()
    assert not list(run.glob(".*"))


def test_right_before_timing_and_wrong_after_it(cpu, tmp_path, monkeypatch):
    [path] = plant(tmp_path, ["fickle"])
    monkeypatch.setattr(environment, "sensors", dict)
    params = {**PREFILL, "kernel": "fickle"}
    row = case.run_case(PlayedGpu(cpu), params, QUICK, catalog([path]))
    assert row["status"] == "incorrect" and row["error"].startswith("LSE: error")
    assert not any(row.get(name) for name in PERFORMANCE)


def test_a_worker_killed_while_others_work(tmp_path):
    [kernel] = plant(tmp_path / "k", ["sleep"])
    text = SUITE.replace("compile_s = 6", "compile_s = 60").replace("n = 16", f"n = {list(range(16, 24))}")
    run = tmp_path / "run"
    process = command("run", suite_file(tmp_path, text), "--machine", "cpu", "--out", run, "--kernel", kernel,
                      "--jobs", "2", "--limit", "9")
    killed = set()
    for _ in range(4):  # every second case sleeps
        wait_for(lambda: asleep(kernel) - killed)
        pid = min(asleep(kernel) - killed)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in out + err, out + err
    rows = store.read_runs(run, attempts="all").frame
    assert len(rows) == rows.case_id.nunique() == 9
    assert set(rows[rows.kernel == "flash"].status) == {"ok"}
    lost = rows[rows.kernel == "sleep"]
    assert set(lost.status) == {"crash"} and all("SIGKILL while building" in e for e in lost.error)
    assert len(lost) == 4 and lines(run) == 9


def test_who_is_free_does_the_rest_while_one_hangs(tmp_path):
    [kernel] = plant(tmp_path / "k", ["sleep"])
    text = SUITE.replace("compile_s = 6", "compile_s = 60") + """
[cpu.rest]
kernels = ["paged"]
h = 2
hkv = 1
d = 64
n = [20, 21, 22, 23, 24]
"""
    run = tmp_path / "run"
    process = command("run", suite_file(tmp_path, text), "--machine", "cpu", "--out", run, "--kernel", kernel,
                      "--jobs", "2")
    wait_for(lambda: lines(run) == 6)  # all but the one that sleeps
    [pid] = asleep(kernel)
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, out + err
    rows = store.read_runs(run).frame
    assert rows.status.value_counts().to_dict() == {"ok": 6, "crash": 1}
    names = [runner.journal_name(k) for k in range(2)]
    assert sorted(p.name for p in run.glob("journal-*")) == names
    assert sorted((run / name).read_bytes().count(b"\n") for name in names)[0] >= 1
    assert "Nothing is missing" in finished("resume", run, code=1)


@pytest.mark.parametrize("hook", ["unraisablehook", "excepthook"])
@pytest.mark.parametrize("module, told", [("cupy_backends.cuda.api.driver", False), ("builtins", True)])
def test_a_dead_context_says_nothing_when_it_is_taken_down(capsys, monkeypatch, hook, module, told):
    """What fails to be freed behind a kernel that has failed is no news, and would be a traceback.

    Cython prints an error of code without the interpreter's lock as one that nobody caught.
    """
    error = type("CUDADriverError", (RuntimeError,), {"__module__": module})("illegal address")

    class Module:
        def __del__(self):
            raise error

    for name in ("unraisablehook", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, f"__{name}__"))
    worker.hush_destructors()
    if hook == "excepthook":
        sys.excepthook(type(error), error, None)
    else:
        Module()
    assert ("illegal address" in capsys.readouterr().err) == told


GPU_SUITE = (
    SUITE.replace("[cpu.small]", "[gpu.small]").replace("compile_s = 6\ndeadline_s = 2", "timeout_s = 0.3")
    + """
[gpu.decode]
kernels = ["paged"]
h = 8
hkv = 2
d = 128
b = 3
n = [1, 700]
mode = ["launch", "graph"]
[gpu.probes]
kernels = ["read", "words", "copy", "mma", "empty"]
bytes = 1048576
flops = 1000000000
mode = ["launch", "graph"]
"""
)


def _sweep(name: str, kernels: list[str], **axes) -> str:
    """A sweep of a suite, over eight heads of 128 columns in two groups."""
    axes = {"kernels": kernels, "h": 8, "hkv": 2, "d": 128, **axes}
    return "\n".join([f"[gpu.{name}]", *(f"{axis} = {json.dumps(values)}" for axis, values in axes.items()), ""])


LOAD = {"b": 3, "n": 700}
MODES = {"mode": ["launch", "graph"]}
PEER_SUITE = """
title = "Peers"
question = "Is every peer timed, or refused in a sentence?"
[repeat]
timeout_s = 0.3
""" + "".join([
    _sweep("peers", ["torch_math", "torch_flash", "torch_cudnn", "fa3", "flashinfer"], n=512, causal=[False, True]),
    _sweep("paged_peers", ["fa3_decode", "flashinfer_decode", "vllm_decode"], page_order="shuffled", **LOAD, **MODES),
    _sweep("quantised", ["flashinfer_decode"], kv_dtype="float8_e4m3", **LOAD, **MODES),
    _sweep("prefixes", ["flashinfer_cascade"], prefix=320, page_order="shuffled", **LOAD, **MODES),
    _sweep("rows", ["flashinfer_append"], m=5, **LOAD, **MODES),
    _sweep("pages", ["torch_copy"], **LOAD, **MODES),
    _sweep("features", ["fa3_decode", "flashinfer_decode"], m=4, window=300, **LOAD, **MODES),
    _sweep("sinks", ["fa3_decode", "flashinfer_decode"], sinks=True, **LOAD, **MODES),
    _sweep("pages_of_prefill", ["fa3", "flashinfer"], causal=True, layout="thd", page_size=16, page_order="shuffled",
           **LOAD),
])
# NOTE: where tests run side by side, one of the two runs waits for the other's GPU, and for as long as it may take.
GPU_RUN_S = 240


@pytest.mark.gpu
def test_on_a_gpu_rows_are_timed_and_a_fault_harms_nobody_else(tmp_path):
    """Each planted kernel has one case, among the first: all that follow meet what it left behind."""
    planted = plant(tmp_path / "k", ["outside", "nothing", "hungry", "wrong", "fickle"])
    words = [word for path in planted for word in ("--kernel", path)]
    run = tmp_path / "run"
    finished("run", suite_file(tmp_path, GPU_SUITE), "--machine", "gpu", "--wait", "--out", run, *words, code=1,
             seconds=GPU_RUN_S)
    frame = store.read_runs(run).frame
    expected = {"outside": "cuda_error", "hungry": "oom"}
    for name, status in {**dict.fromkeys(("nothing", "wrong", "fickle"), "incorrect"), **expected}.items():
        rows = frame[frame.kernel == name]
        assert len(rows) and set(rows.status) == {status}, rows[["status", "error"]].values
        assert rows.measured_time_us.isna().all()
    ours = frame[frame.kernel.isin(["flash", "paged", "read", "words", "copy", "mma", "empty"])]
    assert len(ours) == 1 + 4 + 10
    assert set(ours.status) <= {"ok", "throttled"}, ours[["kernel", "status", "error"]].values
    assert (ours.measured_time_us > 0).all() and ours.measured_samples_us.notna().all()
    assert (ours.measured_peak_pool_bytes >= ours.modelled_peak_bytes).all() and ours.registers.notna().all()


@pytest.mark.gpu
def test_on_a_gpu_every_peer_is_timed_or_refused(tmp_path):
    run = tmp_path / "run"
    finished("run", suite_file(tmp_path, PEER_SUITE), "--machine", "gpu", "--wait", "--out", run, seconds=GPU_RUN_S)
    peers = store.read_runs(run).frame
    assert set(peers.kernel) == set(PEERS) and len(peers) == 5 * 2 + 5 * 2 + 2 * 2 + 2 * 4 + 2
    assert set(peers.status) <= {"ok", "throttled", "unsupported"}, peers[
        ["kernel", "status", "error"]
    ].values
    timed = peers[peers.status != "unsupported"]
    assert (timed.measured_time_us > 0).all() and timed.measured_samples_us.notna().all()
