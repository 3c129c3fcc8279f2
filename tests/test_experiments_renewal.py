"""`record`: what a run lacks or has aged in it is run, and nothing else."""
from __future__ import annotations

import pytest
from commands import call
from planted import suite_file
from test_experiments_folder import FakeCrew

from experiments import renewal, runner, store
from experiments.places import Place
from experiments.suite import Repeat
from experiments.words import UserError

SUITE = """
title = "Small"
question = "What has aged?"
[repeat]
min_samples = 20
[cpu.small]
kernels = ["flash", "standard"]
h = 2
hkv = 1
d = 64
n = [16, 17]
"""


def made(tmp_path, change=lambda row: row):
    """A finished run of four cases, whose rows `change` has had."""
    crew = FakeCrew("cpu", [Place()], [], Repeat())
    crew.start()
    run = runner.begin(runner.Request(suite_file(tmp_path, SUITE), "cpu"), crew, tmp_path / "run")
    runner.execute(run, crew, run.cases, lambda case, row: None)
    run.rows = [change(dict(row)) for row in run.rows]
    for journal in run.path.glob("journal-*"):
        journal.unlink()
    store.write_part(run.path, run.rows, run.manifest)
    run.close()
    return run


def aged(run) -> list[tuple[str, int]]:
    with renewal.renew(run.path) as opened:
        return [(c.params["kernel"], c.params["n"]) for c in renewal.aged(opened)]


@pytest.mark.parametrize(
    "columns, again",
    [
        ({}, False),
        ({"source_hash": "0" * 12}, True),
        ({"status": "timeout"}, True),
        ({"status": "interrupted"}, True),
        ({"status": "oom"}, False),
        ({"status": "unsupported"}, False),
        ({"measured_n_samples": 19}, True),
        ({"measured_n_samples": 20}, False),
    ],
)
def test_what_has_aged(tmp_path, columns, again):
    picked = ("flash", 17)
    run = made(tmp_path, lambda row: row | (columns if (row["kernel"], row["n"]) == picked else {}))
    assert aged(run) == [picked] * again


def test_a_suite_that_changed_brings_its_new_cases_and_drops_the_rest(tmp_path, monkeypatch, capsys):
    run = made(tmp_path)
    suite_file(tmp_path, SUITE.replace("n = [16, 17]", "n = [17, 18]").replace("Small", "Other"))
    assert aged(run) == [("flash", 18), ("standard", 18)]
    kept = {row["case_id"]: row for row in store.read_rows(run.path) if row["n"] == 17}
    code, out, _ = call(monkeypatch, capsys, "record", run.path)
    assert code == 0 and "Other: 2 cases on" in out
    rows = store.read_rows(run.path)
    assert sorted((r["kernel"], r["n"]) for r in rows) == [
        ("flash", 17), ("flash", 18), ("standard", 17), ("standard", 18)]
    assert {r["case_id"]: r for r in rows if r["n"] == 17} == kept
    manifest = store.read_manifest(run.path)
    assert manifest["title"] == "Other" and len(manifest["cases"]) == 4 and len(manifest["renewals"]) == 1
    assert sorted(p.name for p in run.path.iterdir() if p.name != ".lock") == ["manifest.json", store.PART]
    before = (run.path / store.PART).read_bytes()
    code, out, _ = call(monkeypatch, capsys, "record", run.path)
    assert code == 0 and "Nothing has aged: 4 cases" in out
    assert store.read_manifest(run.path) == manifest and (run.path / store.PART).read_bytes() == before


def test_a_renewal_that_stops_has_lost_nothing_and_goes_on(tmp_path):
    run = made(tmp_path, lambda row: row | {"source_hash": "0" * 12})
    crew = FakeCrew("cpu", [Place()], [], Repeat())
    crew.start()
    with renewal.renew(run.path) as opened:
        cases = renewal.aged(opened)
        runner.execute(opened, crew, cases[:1], lambda case, row: None)
    assert len(store.read_runs(run.path).frame) == 4
    with renewal.renew(run.path) as opened:
        assert renewal.aged(opened) == cases[1:]
        runner.execute(opened, crew, cases[1:], lambda case, row: None)
        renewal.finish(opened)
    assert [row["attempt"] for row in store.read_rows(run.path)] == [2, 2, 2, 2]


def test_a_log_that_is_gone_is_named(tmp_path):
    run = made(tmp_path)
    manifest = store.read_manifest(run.path)
    manifest["request"]["lengths"] = "gone.csv"
    store.write_manifest(run.path, manifest)
    with pytest.raises(UserError, match="the request log 'gone.csv', which is not here.*--lengths"):
        renewal.renew(run.path)
