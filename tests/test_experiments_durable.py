"""Runs that are killed, many at once, and read while they write: nothing is lost, nothing is there twice."""
from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_rows import row
from stub_runner import ROOT, RUNS, SUITE, Forks

from experiments import store

MOMENTS = 20


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """A process that runs the runner again and again; its cases are stubs."""
    started = Forks(tmp_path_factory.mktemp("forks") / "log")
    yield started
    started.close()


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "stub.toml"
    path.write_text(SUITE)
    return path


def said(forks) -> str:
    return forks.log.read_text() if forks.log.exists() else ""


def identities(rows) -> list[tuple[str, int]]:
    return sorted((r["case_id"], r["attempt"]) for r in rows)


def check_complete(run: Path) -> None:
    """Every case of the manifest exactly once, and the parquet holds what the journals hold."""
    planned = sorted(case["case_id"] for case in store.read_manifest(run)["cases"])
    journalled, torn, bad = store.read_journals(run)
    assert not bad
    stored = store.read_part(run / store.PART).to_pylist()
    assert identities(journalled) == identities(stored) == [(case, 1) for case in planned]
    by_case = {r["case_id"]: r for r in stored}
    one, other = store.to_table(journalled), store.to_table(by_case[r["case_id"]] for r in journalled)
    assert one.equals(other)
    loaded = store.read_runs(run, attempts="all")
    assert loaded.quarantined == [] and sorted(loaded.frame.case_id) == planned
    assert set(loaded.frame.status) == {"ok"} and loaded.runs[0].complete
    assert not list(run.glob(".*"))


def test_twenty_kills_and_every_case_is_there_once(forks, suite, tmp_path):
    start = time.monotonic()
    words = ["run", suite, "--machine", "cpu", "--out"]
    assert forks.run(*words, tmp_path / "whole") == 0, said(forks)
    whole_s, rng, states = time.monotonic() - start, random.Random(6), set()
    check_complete(tmp_path / "whole")
    for i in range(MOMENTS):  # half of them anywhere in a run, half of them while cases run
        run = tmp_path / f"killed {i}"
        end = {"kill_after": 1.1 * whole_s * i / MOMENTS * 2}
        if i >= MOMENTS // 2:
            end = {"kill_after": 0.02 * rng.random(), "rows": rng.randrange(8), "folder": str(run)}
        log = str(tmp_path / "killed.log")  # a worker that was being born may say how it lost its parent
        status = forks.run(*words, run, "--jobs", 1 + i % 2, log=log, **end)
        before = store.read_journals(run)[0] if run.is_dir() else []
        began = (run / store.MANIFEST).exists()
        states.add("done" if status == 0 else "some" if before else "planned" if began else "nothing")
        assert status in (0, -9), said(forks)
        again = ["resume", run] if began else [*words, run]
        assert forks.run(*again) == 0, said(forks)
        check_complete(run)
        kept = {r["case_id"]: r for r in store.read_journals(run)[0]}
        assert all(kept[r["case_id"]] == r for r in before)
    assert {"nothing", "some"} <= states, states
    assert "Traceback" not in said(forks)


def polled(forks, place: Path, told: Path | None = None) -> list[int]:
    """How many rows another process than the writers saw, again and again until they were done."""
    seen = []
    while not forks.ended():
        loaded = store.read_runs(place)
        assert loaded.quarantined == []
        seen.append(len(loaded.frame))
        if told:
            told.write_text(str(seen[-1]))
    assert seen == sorted(seen)
    return seen


def test_eight_writers_in_one_run_folder(forks, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    forks.begin(*(["journal", run, k, 40] for k in range(8)))
    polled(forks, run)
    assert forks.statuses() == [0] * 8, said(forks)
    loaded = store.read_runs(run)
    assert sorted(loaded.frame.case_id) == sorted(f"{k}-{i}" for k in range(8) for i in range(40))
    assert loaded.torn_lines == 0 and loaded.quarantined == []


def test_eight_runs_under_one_root_read_while_they_write(forks, suite, tmp_path):
    runs, told = [tmp_path / "all" / f"läuft {k}" for k in range(RUNS)], tmp_path / "seen"
    told.touch()
    forks.begin(*(["run", suite, "--machine", "cpu", "--out", run] for run in runs), seen=str(told))
    seen = polled(forks, tmp_path / "all", told)
    assert forks.statuses() == [0] * RUNS, said(forks)
    assert {RUNS * k for k in range(8)} <= set(seen)  # it did look on while they wrote
    for run in runs:
        check_complete(run)
    assert len(store.read_runs(tmp_path / "all").frame) == 8 * RUNS


READER = """
import sys
from experiments import store
from pathlib import Path
most = 0
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    loaded = store.read_runs(sys.argv[1])
    assert loaded.quarantined == [], loaded.quarantined
    assert len(loaded.frame) >= most, (len(loaded.frame), most)
    most = len(loaded.frame)
    print(most, flush=True)
"""


def test_a_reader_in_a_process_of_its_own_never_stumbles(tmp_path):
    run, stop = tmp_path / "runs" / "run", tmp_path / "stop"
    run.mkdir(parents=True)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, run.parent, stop], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    assert reader.stdout.readline() == "ready\n"
    store.write_manifest(run, {"run_id": "run"})
    journal, rows = store.Journal(run / "journal-0.jsonl"), []
    for i in range(30):
        rows.append(row(i, error="x" * 20000))  # more than a page, so that a line may be seen half written
        journal.append(rows[-1])
        if i % 10 == 9:
            assert int(reader.stdout.readline()) <= len(rows)  # it looks on
            store.write_part(run, rows, {"run_id": "run"})
            store.write_manifest(run, {"run_id": "run"})
    journal.close()
    (run / "journal-0.jsonl").unlink()  # its rows are in the parquet
    while int(reader.stdout.readline()) < len(rows):
        pass
    stop.touch()
    reader.communicate(timeout=30)
    assert reader.returncode == 0
