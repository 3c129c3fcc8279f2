"""The store: nothing written is lost, nothing damaged is believed."""

from __future__ import annotations

import json
import math
import random
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments import schema, store

WHEN = datetime(2026, 3, 1, 12, 30, 0, 123456, timezone.utc)
ODD = "läufe und ähnliches 実験"


def row(case: int | str, attempt: int = 1, **columns):
    return {
        "run_id": "run",
        "suite": "s",
        "case_id": str(case),
        "attempt": attempt,
        "status": "ok",
        "kernel": "flash",
        "started_at": WHEN,
        **columns,
    }


def make_run(folder: Path, rows, part: bool = True, run_id: str = "run") -> Path:
    folder.mkdir(parents=True)
    manifest = {"run_id": run_id, "environment": {"host": "größer"}}
    store.write_manifest(folder, manifest)
    journal = store.Journal(folder / "journal-0.jsonl")
    for one in rows:
        journal.append(one)
    journal.close()
    if part:
        store.write_part(folder, rows, manifest)
        (folder / "journal-0.jsonl").unlink()
    return folder


@pytest.mark.parametrize("part", [True, False])
def test_rows_come_back_as_they_went(tmp_path, part):
    rows = [
        row("a", max_err=math.nan, measured_time_us=math.inf, tokens=2**53 + 1, causal=True, error="naïve"),
        row("b", max_err=None, tolerance=-math.inf, measured_samples_us=[1.5, math.nan], causal=False),
        row("c", max_err=0.0, measured_samples_us=[]),
    ]
    loaded = store.read_runs(make_run(tmp_path / ODD / "run 1", rows, part))
    frame = loaded.frame.set_index("case_id")
    assert list(loaded.frame.columns) == [*schema.NAMES, "run_path"]
    assert math.isnan(frame.max_err["a"]) and frame.max_err["b"] is pd.NA and frame.max_err["c"] == 0
    assert frame.max_err.isna().tolist() == [False, True, False]
    assert frame.measured_time_us["a"] == math.inf and frame.tolerance["b"] == -math.inf
    assert frame.tokens["a"] == 2**53 + 1
    assert frame.causal["a"] is np.True_ or frame.causal["a"] is True
    assert frame.error["a"] == "naïve" and frame.started_at["a"] == pd.Timestamp(WHEN)
    assert list(frame.measured_samples_us["c"]) == [] and frame.measured_samples_us["a"] is pd.NA
    assert math.isnan(frame.measured_samples_us["b"][1])
    assert loaded.quarantined == [] and loaded.torn_lines == 0
    assert [info.complete for info in loaded.runs] == [part]


def test_empty_places_have_every_column(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path, tmp_path / "nowhere", []):
        loaded = store.read_runs(path)
        assert list(loaded.frame.columns) == [*schema.NAMES, "run_path"] and loaded.frame.empty
        assert loaded.frame.max_err.dtype == pd.ArrowDtype(pa.float64())


def test_columns_that_are_empty_in_one_run_keep_their_type(tmp_path):
    make_run(tmp_path / "1", [row("a")])
    make_run(tmp_path / "2", [row("a", measured_power_w=700.0, model="m")])
    frame = store.read_runs(tmp_path).frame
    assert (
        frame.measured_power_w.dtype == pd.ArrowDtype(pa.float64())
        and frame.measured_power_w.notna().sum() == 1
    )
    assert len(frame) == 2  # equal run ids in two folders are two runs' rows
    assert pq.read_schema(tmp_path / "1" / store.PART).field("model").type == pa.string()


def test_a_torn_journal_line_is_counted_and_costs_nothing_else(tmp_path):
    run = make_run(tmp_path / "run", [row("a"), row("b")], part=False)
    path = run / "journal-0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"run_id": "run", "case_id": "c", "att')
    assert store.read_runs(run).torn_lines == 1
    journal = store.Journal(path)  # the runner resumes after the kill
    journal.append(row("c"))
    journal.close()
    loaded = store.read_runs(run)
    assert loaded.frame.case_id.tolist() == ["a", "b", "c"] and loaded.torn_lines == 1


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1]",
        b"3",
        b"{}",
        b'{"case_id": "x", "attempt": "1", "status": "ok"}',
        b"\xff\xfe",
        b'{"case_id": "x", "attempt": 1}',
        b'{"case_id": "x", "attempt": 1, "status": "ok", "started_at": "soon"}',
        b'{"case_id": "x", "attempt": 1, "status": "ok", "max_err": "big"}',
        b"[" * 100000,
    ],
)
def test_a_line_that_is_no_row_is_counted(tmp_path, line):
    run = make_run(tmp_path / "run", [row("a")], part=False)
    with open(run / "journal-1.jsonl", "wb") as handle:
        handle.write(line + b"\n")
    loaded = store.read_runs(run)
    assert loaded.frame.case_id.tolist() == ["a"] and loaded.torn_lines == 1


def test_a_line_with_columns_of_the_future_is_a_row(tmp_path):
    run = make_run(tmp_path / "run", [], part=False)
    (run / "journal-0.jsonl").write_text('{"case_id": "x", "attempt": 1, "status": "ok", "new_column": 3}\n')
    assert store.read_runs(run).frame.case_id.tolist() == ["x"]


def test_attempts(tmp_path):
    rows = [row("a", 1, status="timeout"), row("b", 1), row("a", 2)]
    run = make_run(tmp_path / "run", rows, part=False)
    store.write_part(run, rows, {"run_id": "run"})  # both hold the same attempts
    assert store.read_runs(run).frame[["case_id", "attempt"]].values.tolist() == [["b", 1], ["a", 2]]
    assert len(store.read_runs(run, attempts="all").frame) == 3
    with pytest.raises(ValueError, match="attempts"):
        store.read_runs(run, attempts="last")


# --- damage


def damaged(data: bytes, how: str) -> bytes:
    return {"empty": b"", "cut": data[: len(data) // 2], "tail": data[-100:], "text": b"hello"}[how]


@pytest.mark.parametrize("how", ["empty", "cut", "tail", "text"])
def test_a_broken_parquet_is_set_aside_and_the_others_are_read(tmp_path, how):
    make_run(tmp_path / "good", [row("a")])
    bad = make_run(tmp_path / "bad", [row("b")]) / store.PART
    bad.write_bytes(damaged(bad.read_bytes(), how))
    loaded = store.read_runs(tmp_path)
    assert loaded.frame.case_id.tolist() == ["a"]
    [(path, reason)] = loaded.quarantined
    assert path == bad and str(bad) in reason and "\n" not in reason
    assert ("is empty" if how == "empty" else "cannot be read") in reason


def test_no_flipped_bit_passes(tmp_path):
    rows = [row(i, max_err=i / 7, measured_samples_us=[i, 2 * i], tokens=i) for i in range(20)]
    path = make_run(tmp_path / "run", rows) / store.PART
    data, expected = path.read_bytes(), repr(store.read_runs(path).frame.to_dict("list"))
    rng, caught = random.Random(1), 0
    for _ in range(150):
        spoilt = bytearray(data)
        spoilt[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(spoilt)
        loaded = store.read_runs(path)
        caught += bool(loaded.quarantined)
        assert loaded.quarantined or repr(loaded.frame.to_dict("list")) == expected
    assert caught > 75


def test_a_lost_parquet_is_made_up_from_the_journal(tmp_path):
    run = make_run(tmp_path / "run", [row("a")], part=False)
    (run / store.PART).write_bytes(b"PAR1")
    loaded = store.read_runs(run)
    assert loaded.frame.case_id.tolist() == ["a"] and len(loaded.quarantined) == 1


def test_foreign_files_are_left_alone_or_set_aside(tmp_path):
    run = make_run(tmp_path / "run", [row("a")])
    pq.write_table(pa.table({"x": [1]}), run / "other.parquet")
    (run / ".part.parquet.123").write_bytes(b"half")
    (run / "notes.json").write_text("{}")
    (run / ".hidden").mkdir()
    (run / ".hidden" / "part.parquet").write_bytes(b"")
    [(path, reason)] = store.read_runs(tmp_path).quarantined
    assert path.name == "other.parquet" and "no schema_version" in reason


def test_a_manifest_that_cannot_be_read(tmp_path):
    run = make_run(tmp_path / "run", [row("a")])
    (run / store.MANIFEST).write_text("{")
    loaded = store.read_runs(run)
    assert loaded.frame.case_id.tolist() == ["a"] and "is not JSON" in loaded.quarantined[0][1]
    with pytest.raises(store.StoreError, match="is this a run"):
        store.read_manifest(tmp_path)


# --- versions


def rewritten(path: Path, version: int, change=lambda table: table) -> None:
    """The part as another schema version would have written it."""
    table = change(pq.read_table(path))
    footer = {"schema_version": str(version), "rows_sha256": store._digest(table)}
    pq.write_table(table.replace_schema_metadata(footer), path)


def test_newer_versions_are_refused_and_older_ones_lifted(tmp_path, monkeypatch):
    path = make_run(tmp_path / "run", [row("a", kernel="flash")]) / store.PART
    rewritten(path, schema.SCHEMA_VERSION + 1)
    assert "newer than the 1 known here" in store.read_runs(path).quarantined[0][1]

    def old_name(table):
        return table.rename_columns(["kernal" if n == "kernel" else n for n in table.column_names])

    rewritten(path, 0, old_name)
    assert len(store.read_runs(path).quarantined) == 1  # nobody knows how to lift version 0
    back = {0: lambda t: t.rename_columns(["kernel" if n == "kernal" else n for n in t.column_names])}
    monkeypatch.setattr(store, "MIGRATIONS", back)
    assert store.read_runs(path).frame.kernel.tolist() == ["flash"]


def test_missing_columns_are_added_typed(tmp_path):
    path = make_run(tmp_path / "run", [row("a")]) / store.PART
    rewritten(path, 1, lambda table: table.drop_columns(["measured_power_w", "model"]))
    frame = store.read_runs(path).frame
    assert frame.measured_power_w.dtype == pd.ArrowDtype(pa.float64()) and frame.model.isna().all()


# --- writing


def test_a_full_disk_is_one_sentence_and_keeps_what_was_written(tmp_path):
    full = store.Journal(Path("/dev/full"))
    with pytest.raises(store.StoreError, match="the disk is full.*resume"):
        full.append(row("a"))
    with pytest.raises(store.StoreError, match="the disk is full"):
        store.write_atomic(tmp_path / "x", lambda hidden: Path("/dev/full").write_text("x"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(store.StoreError, match="cannot be written"):
        store.write_manifest(tmp_path / "missing", {})
    with pytest.raises(store.StoreError, match="cannot be written"):
        store.Journal(tmp_path / "missing" / "journal-0.jsonl")


def test_a_column_that_does_not_exist_is_a_mistake():
    with pytest.raises(KeyError):
        schema.encode({"no_such_column": 1})


def test_the_footer_carries_the_environment(tmp_path):
    path = make_run(tmp_path / "run", [row("a")]) / store.PART
    footer = pq.read_schema(path).metadata
    assert json.loads(footer[b"environment"]) == {"host": "größer"} and footer[b"run_id"] == b"run"


def test_stale_rows(tmp_path):
    rows = [
        row("a", source_hash="aa"),
        row("b", source_hash="aa+bb"),
        row("c", source_hash="cc"),
        row("d"),
        row("e", kernel="mine", source_hash="zz"),
    ]
    frame = store.read_runs(make_run(tmp_path / "run", rows)).frame
    assert store.stale(frame, {"flash": "aa+bb"}).tolist() == [False, False, True, False, False]


def test_derived_columns_never_invent_a_number():
    timed = {"measured_time_us": 10.0, "modelled_flops": 10**9, "modelled_bytes_loaded": 10**6, "tokens": 20}
    assert schema.derive(dict(timed))["measured_tflops"] == 100.0
    assert schema.derive(dict(timed))["measured_gbps"] == 100.0
    assert schema.derive(dict(timed))["measured_tokens_per_s"] == 2e6
    for change in ({"measured_time_us": None}, {"measured_time_us": 0.0}, {"measured_time_us": math.nan}):
        assert schema.derive({**timed, **change})["measured_tflops"] is None
    assert schema.derive({**timed, "modelled_flops": 0})["measured_tflops"] is None
