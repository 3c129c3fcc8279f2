"""The runner on the command line: stopped in every way, and read while it writes."""
from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from planted import AFTER, PLANTED_PY, SUITE, command, finished, lines, plant, suite_file, wait_for, warm

from experiments import runner, store


@pytest.fixture(scope="module", autouse=True)
def warm_cache(tmp_path_factory):
    warm(tmp_path_factory.mktemp("warm"))


def test_kill_the_runner_and_resume(tmp_path):
    text = SUITE.replace("n = 16", "n = [16, 17, 18, 19, 20, 21, 22, 23, 24, 25]")
    run = tmp_path / "run"
    process = command("run", suite_file(tmp_path, text), "--machine", "cpu", "--out", run)
    wait_for(lambda: lines(run) >= 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = store.read_runs(run)
    assert not before.runs[0].complete and 2 <= len(before.frame) < 10
    journal = run / runner.journal_name(0)
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
    text = SUITE.replace("compile_s = 6", "compile_s = 60")
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
    with runner.reopen(run) as again:
        assert again.pending() == []
        assert [c.params["kernel"] for c in again.pending(retry_failed=True)] == ["sleep"]


def test_the_worker_dies_with_the_runner(tmp_path):
    [kernel] = plant(tmp_path / "k", ["sleep"])
    text = SUITE.replace("compile_s = 6", "compile_s = 60")
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
