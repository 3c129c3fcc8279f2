"""Ctrl-C at any moment ends as one sentence: while the program loads, starts its workers, runs, and stops."""
from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from planted import SUITE, asleep, command, lines, plant, suite_file, wait_for

from experiments import cli, store

STOPPED = 130


def maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


def interrupted(process, *, times: int = 1) -> tuple[str, str]:
    """Press Ctrl-C: a terminal sends the signal to every process in the foreground."""
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    out, err = process.communicate(timeout=30)
    assert process.returncode == STOPPED and "Traceback" not in out + err, out + err
    return out, err


@pytest.fixture
def begin(tmp_path):
    """Start a run of many cases, in `tmp_path / "run"`."""
    text = SUITE.replace("n = 16", f"n = {list(range(1, 200))}")
    return lambda *more: command("run", suite_file(tmp_path, text), "--machine", "cpu",
                                 "--out", tmp_path / "run", *more)


@pytest.mark.parametrize("library", ["_multiarray_umath", "libarrow", "pandas/_libs"])
def test_while_libraries_load(begin, library, tmp_path):
    process = begin()
    wait_for(lambda: library in maps(process.pid))
    out, err = interrupted(process)
    assert (out, err) == ("", "Stopped before anything began.\n") and not (tmp_path / "run").exists()


def test_while_workers_start(begin, tmp_path):
    process = begin("--jobs", "2")
    wait_for(lambda: len(children(process.pid)) >= 2)  # the first of them keeps count of the others
    out, err = interrupted(process)
    assert (out, err) == ("Stopped before the run began.\n", "") and not (tmp_path / "run").exists()


@pytest.mark.parametrize("tenths", range(0, 20, 2))
def test_at_any_moment_of_the_first_seconds(begin, tenths, tmp_path):
    process = begin()
    wait_for(lambda: "_multiarray_umath" in maps(process.pid))
    time.sleep(tenths / 10)
    out, err = interrupted(process)
    began = (tmp_path / "run" / store.MANIFEST).exists()
    assert ("Stopped. What was done is kept; go on with: " in out) if began else "Stopped before" in out + err


def test_where_no_command_answers_it(monkeypatch, capsys):
    """Between the words of a command line and what it does, and in what keeps nothing."""
    handler = signal.getsignal(signal.SIGINT)

    def press():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "suite_names", press)
    try:
        with pytest.raises(SystemExit) as stopped:
            cli.app(["list"])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert stopped.value.code == STOPPED and capsys.readouterr().err == "Stopped before it was done.\n"


@pytest.mark.parametrize("jobs", [1, 2])
def test_impatient_fingers(tmp_path, jobs):
    kernel = plant(tmp_path / "k", ["sleep"])[0]
    text = SUITE.replace("compile_s = 6", "compile_s = 600").replace("n = 16", "n = [16, 17, 18]")
    process = command("run", suite_file(tmp_path, text), "--machine", "cpu", "--out", tmp_path / "run",
                      "--kernel", kernel, "--jobs", jobs)
    wait_for(lambda: len(asleep(kernel)) == jobs and lines(tmp_path / "run") >= 1)
    out, _ = interrupted(process, times=6)
    assert "go on with: python -m experiments resume" in out
    frame = store.read_runs(tmp_path / "run").frame
    assert set(frame.status) <= {"ok", "interrupted"}
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in asleep(kernel)), 15)


def test_every_worker_notes_what_it_was_at(tmp_path):
    kernel = plant(tmp_path / "k", ["sleep"])[0]
    text = SUITE.replace("compile_s = 6", "compile_s = 600").replace("n = 16", "n = [16, 17, 18]")
    process = command("run", suite_file(tmp_path, text), "--machine", "cpu", "--out", tmp_path / "run",
                      "--kernel", kernel, "--jobs", "2")
    wait_for(lambda: len(asleep(kernel)) == 2)
    interrupted(process)
    frame = store.read_runs(tmp_path / "run").frame
    assert (frame[frame.kernel == "sleep"].status == "interrupted").sum() == 2
    assert set(frame[frame.kernel == "flash"].status) == {"ok"}


def test_a_runner_in_the_background_ignores_it_as_its_shell_said(begin, tmp_path):
    process = command("list", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    wait_for(lambda: "_multiarray_umath" in maps(process.pid))
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "quick" in out and err == ""
