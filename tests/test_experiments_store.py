"""The store: nothing written is lost, nothing damaged is believed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_rows import ODD, WHEN, make_run, row

from experiments import disk, schema, store


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


METRICS = [c.name for c in schema.COLUMNS if pa.types.is_floating(c.type)]
SAMPLES = [c.name for c in schema.COLUMNS if pa.types.is_list(c.type)]


@pytest.mark.parametrize("part", [True, False])
def test_no_number_is_mistaken_for_another_in_any_metric(tmp_path, part):
    values = [math.nan, math.inf, -math.inf, None, 0.0, -0.0, 5e-324, 1.7976931348623157e308, -1.5]
    rows = [row(i, **dict.fromkeys(METRICS, value)) for i, value in enumerate(values)]
    lists = [[math.nan, math.inf], [-math.inf], [], None, [0.0, -0.0]]
    rows += [row(f"list {i}", **dict.fromkeys(SAMPLES, value)) for i, value in enumerate(lists)]
    integers = [0, -(2**63), 2**63 - 1, None]
    counts = [c.name for c in schema.COLUMNS if pa.types.is_integer(c.type) and c.name != "attempt"]
    rows += [row(f"int {i}", **dict.fromkeys(counts, value)) for i, value in enumerate(integers)]
    frame = store.read_runs(make_run(tmp_path / "run", rows, part)).frame.set_index("case_id")
    expected = [repr(None if v is None else v) for v in values]
    for name in METRICS:
        column = frame[name].loc[[str(i) for i in range(len(values))]]
        assert [repr(None if v is pd.NA else float(v)) for v in column] == expected, name
        assert column.isna().tolist() == [v is None for v in values], name
    for name in SAMPLES:
        column = [frame[name][f"list {i}"] for i in range(len(lists))]
        assert [None if v is pd.NA else repr([float(x) for x in v]) for v in column] == [
            None if v is None else repr(v) for v in lists], name
    for name in counts:
        column = [frame[name][f"int {i}"] for i in range(len(integers))]
        assert [None if v is pd.NA else int(v) for v in column] == integers, name


@pytest.mark.parametrize("part", [True, False])
def test_rows_of_nothing_but_nulls(tmp_path, part):
    bare = [{"case_id": f"{i}", "attempt": 1, "status": "crash"} for i in range(3)]
    make_run(tmp_path / "bare", bare, part)
    make_run(tmp_path / "full", [row("a", model="m", measured_samples_us=[1.0])], part)
    frame = store.read_runs(tmp_path).frame
    assert len(frame) == 4 and frame.run_id.isna().sum() == 3
    types = {c.name: pd.ArrowDtype(c.type) for c in schema.COLUMNS}
    assert {name: frame[name].dtype for name in schema.NAMES} == types


def test_runs_of_equal_name_stay_two(tmp_path):
    first = make_run(tmp_path / "a" / ODD, [row("x", tokens=1), row("x", 2, tokens=2)])
    second = make_run(tmp_path / "b" / ODD, [row("x", tokens=3)], part=False)
    loaded = store.read_runs(tmp_path)
    assert loaded.frame[["run_path", "tokens"]].values.tolist() == [[str(first), 2], [str(second), 3]]
    assert [info.run_id for info in loaded.runs] == ["run", "run"]
    assert len(store.read_runs([first, second, first], attempts="all").frame) == 3


def test_a_name_that_is_not_utf8_is_set_aside(tmp_path):
    try:
        make_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/l\xe4ufe")), [row("b")], part=False)
    except OSError as error:
        pytest.skip(f"this file system takes no such name ({error.strerror})")
    make_run(tmp_path / "good", [row("a")])
    loaded = store.read_runs(tmp_path)
    assert loaded.frame.case_id.tolist() == ["a"] and "not UTF-8" in loaded.quarantined[0][1]
    loaded.quarantined[0][1].encode()  # it can be printed


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


def test_attempts(tmp_path):
    rows = [row("a", 1, status="timeout"), row("b", 1), row("a", 2)]
    run = make_run(tmp_path / "run", rows, part=False)
    store.write_part(run, rows, {"run_id": "run"})  # both hold the same attempts
    assert store.read_runs(run).frame[["case_id", "attempt"]].values.tolist() == [["b", 1], ["a", 2]]
    assert len(store.read_runs(run, attempts="all").frame) == 3
    with pytest.raises(ValueError, match="attempts"):
        store.read_runs(run, attempts="last")


# --- what does not belong there


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
    for text in ("{", "[" * 100000, "\xff", ""):
        (run / store.MANIFEST).write_text(text, encoding="latin-1")
        loaded = store.read_runs(run)
        assert loaded.frame.case_id.tolist() == ["a"] and "is not JSON" in loaded.quarantined[0][1]
    with pytest.raises(store.StoreError, match="is this a run"):
        store.read_manifest(tmp_path)


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


def test_new_names_are_on_the_disk_too(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    disk.Journal(tmp_path / "journal-0.jsonl").close()
    assert synced == [str(tmp_path)]
    disk.write_atomic(tmp_path / "x", lambda hidden: hidden.write_text("x"))
    assert synced[1:] == [str(tmp_path / f".x.{os.getpid()}"), str(tmp_path)]

    def fail(code):
        def fsync(fd):
            raise OSError(code, os.strerror(code))
        return fsync

    monkeypatch.setattr(os, "fsync", fail(22))
    disk.sync_folder(tmp_path)  # a file system that cannot: its own business
    monkeypatch.setattr(os, "fsync", fail(5))
    with pytest.raises(store.StoreError, match="Input/output error"):
        disk.write_atomic(tmp_path / "x", lambda hidden: hidden.write_text("y"))


def test_only_halves_of_our_own_are_swept(tmp_path):
    kept = (".notes.txt.1", ".part.parquet.swp", "part.parquet.1", ".lock")
    for name in (".part.parquet.77", ".manifest.json.1234", *kept):
        (tmp_path / name).write_text("")
    disk.remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)


def test_text_that_is_no_utf8_is_stored_readable(tmp_path):
    run = make_run(tmp_path / "run", [row("a", error=os.fsdecode(b"g++: l\xe4uft"))])
    assert store.read_runs(run).frame.error.tolist() == ["g++: l?uft"]


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
    assert schema.derive(dict(timed))["modelled_gbps"] == 100.0
    assert schema.derive(dict(timed))["measured_tokens_per_s"] == 2e6
    for change in ({"measured_time_us": None}, {"measured_time_us": 0.0}, {"measured_time_us": math.nan}):
        assert schema.derive({**timed, **change})["measured_tflops"] is None
        assert schema.derive({**timed, **change})["modelled_gbps"] is None
    assert schema.derive({**timed, "modelled_flops": 0})["measured_tflops"] is None
