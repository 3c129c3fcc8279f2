"""One runner at a time in a folder and on a GPU; the lock dies with its holder, and its absence is a word."""
from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from own_cache import own_cache
from planted import ROOT, SUITE, asleep, command, finished, lines, plant, suite_file, wait_for

from experiments import locks, places, runner, store
from experiments.locks import Busy, take

HOLD = """
import os, sys, time
from pathlib import Path
from experiments.locks import take
lock = take(Path(sys.argv[1]), "it", "wait")
if "child" in sys.argv:
    os.set_inheritable(lock.handle, True)
    os.posix_spawn("/bin/sleep", ["sleep", sys.argv[-1]], os.environ)
print("held", flush=True)
time.sleep(600)
"""
CONTEND = """
import os, sys
from pathlib import Path
from experiments.locks import take
lock, inside = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(40):
    held = take(lock, "it", "wait", waiting=lambda sentence: None)
    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails where another one is inside
    inside.unlink()
    held.release()
"""


def holder(path: Path, *more: str) -> subprocess.Popen:
    """A process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, path, *more], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_one_is_refused_by_name_and_the_lock_dies_with_its_holder(tmp_path):
    path = tmp_path / "a lock ü"
    first = holder(path)
    with pytest.raises(Busy) as caught:
        take(path, "runs/x", "wait for it, or stop it")
    sentence = str(caught.value)
    assert sentence.startswith(f"runs/x is held by process {first.pid} on {socket.gethostname()} since 20")
    assert sentence.endswith("; wait for it, or stop it") and "\n" not in sentence
    end(first)  # SIGKILL
    assert path.exists()  # the file alone means nothing
    lock = take(path, "runs/x", "")
    assert json.loads(path.read_text())["pid"] == os.getpid() and lock.notice == ""
    lock.release()
    lock.release()
    assert not path.exists()


def test_what_a_killed_holder_started_is_waited_for(tmp_path):
    path = tmp_path / "lock"
    first = holder(path, "child", "1.5")
    end(first)
    start = time.monotonic()
    lock = take(path, "a GPU", "")
    assert 0.2 < time.monotonic() - start < locks.GRACE_S
    lock.release()


def test_waiting_is_said_once(tmp_path):
    path, said = tmp_path / "lock", []
    first = holder(path)

    def waiting(sentence):
        said.append(sentence)
        end(first)

    lock = take(path, "it", "", waiting)
    assert len(said) == 1 and said[0].endswith("; waiting for it") and f"process {first.pid}" in said[0]
    lock.release()


def test_no_two_are_inside_at_once(tmp_path):
    paths = [tmp_path / "lock", tmp_path / "inside"]
    contenders = [subprocess.Popen([sys.executable, "-c", CONTEND, *paths], cwd=ROOT) for _ in range(3)]
    assert [process.wait(60) for process in contenders] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_its_holder_removed_in_between_locks_nothing(tmp_path, monkeypatch):
    path, real = tmp_path / "lock", fcntl.flock
    first = take(path, "it", "")

    def slow(handle, how):
        first.release()  # after the file was opened, before it is locked
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    second = take(path, "it", "")
    with pytest.raises(Busy):
        take(path, "it", "")
    second.release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_word_and_no_failure(tmp_path, monkeypatch, code):
    def refuse(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = take(tmp_path / "lock", "runs/x", "")
    assert lock.handle is None and lock.notice.startswith("runs/x cannot be locked here (")
    lock.release()
    from test_experiments_folder import opened

    run = opened(tmp_path)
    assert run.lock.notice
    run.close()


def test_a_folder_that_takes_no_lock_file(tmp_path, monkeypatch):
    lock = take(tmp_path / "nowhere" / "lock", "it", "")
    assert lock.handle is None and "No such file" in lock.notice
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "file"))
    lock = places.lock_device("GPU-1")
    assert lock.handle is None and lock.notice.startswith("GPU-1 cannot be locked here (")


def test_the_lock_of_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
    lock = places.lock_device("GPU-1")
    assert (tmp_path / "locks" / "GPU-1.lock").exists()
    other = places.lock_device("GPU-2")
    with pytest.raises(Busy, match=r"^GPU-1 is held by process \d+ on .*; wait for it with --wait, take another"):
        places.lock_device("GPU-1")
    lock.release()
    other.release()
    places.lock_device("GPU-1").release()


def sleeper(tmp_path) -> tuple[Path, Path, subprocess.Popen]:
    """A run that sleeps in its second and last case."""
    [kernel] = plant(tmp_path / "k", ["sleep"])
    run, text = tmp_path / "run", SUITE.replace("compile_s = 6", "compile_s = 600")
    process = command("run", suite_file(tmp_path, text), "--machine", "cpu", "--out", run, "--kernel", kernel)
    wait_for(lambda: lines(run) == 1 and asleep(kernel))
    return run, Path(kernel), process


def test_two_resumes_of_one_run(tmp_path):
    run, kernel, process = sleeper(tmp_path)
    before = (run / runner.journal_name(0)).read_bytes()
    out = finished("resume", run, code=2)
    assert f"is held by process {process.pid} on {socket.gethostname()}" in out
    assert out.startswith("error: ") and out.count("\n") == 1
    out = finished("run", "quick", "--machine", "cpu", "--out", run, code=2)
    assert f"is held by process {process.pid}" in out and "name another folder" in out
    assert (run / runner.journal_name(0)).read_bytes() == before
    assert len(store.read_runs(run).frame) == 1  # reading needs no lock
    patient = command("resume", run, "--wait")
    assert "waiting for it" in patient.stderr.readline()
    kernel.write_text("from cuattn.kernels.flash import ROW as FLASH\nimport dataclasses\n"
                      "ROW = dataclasses.replace(FLASH, name='sleep')\n")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    out, err = patient.communicate(timeout=60)
    assert patient.returncode == 0 and "Traceback" not in out + err, out + err
    frame = store.read_runs(run, attempts="all").frame
    assert frame.status.tolist() == ["ok", "ok"] and not list(run.glob(".*"))


def test_no_gpu_no_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(own_cache(tmp_path / "cache")))
    text = SUITE.replace("compile_s = 6", "compile_s = 600")
    finished("run", suite_file(tmp_path, text), "--machine", "cpu", "--out", tmp_path / "run")
    assert not (tmp_path / "cache" / "locks").exists() and (tmp_path / "cache").exists()
