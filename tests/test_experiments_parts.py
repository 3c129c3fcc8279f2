"""A run's parquet: no damage is believed, and every version ever written can be read."""
from __future__ import annotations

import json
import random

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import schema_fixtures as fixtures
from store_rows import make_run, row

from experiments import parts, schema, store

# --- damage


def damaged(data: bytes, how: str) -> bytes:
    """The file after an accident; the bit that flips lies in the first page."""
    flipped = data[:40] + bytes([data[40] ^ 4]) + data[41:]
    halves = {"empty": b"", "cut": data[: len(data) // 2], "tail": data[-100:], "text": b"hello"}
    return {**halves, "bit": flipped}[how]


@pytest.mark.parametrize("how", ["empty", "cut", "tail", "text", "bit"])
def test_a_broken_parquet_is_set_aside_and_the_others_are_read(tmp_path, how):
    for name in ("before", "bad", "later"):
        make_run(tmp_path / name, [row(name)])
    bad = tmp_path / "bad" / store.PART
    bad.write_bytes(damaged(bad.read_bytes(), how))
    loaded = store.read_runs(tmp_path)
    assert loaded.frame.case_id.tolist() == ["before", "later"]
    [(path, reason)] = loaded.quarantined
    assert path == bad and str(bad) in reason and "\n" not in reason
    assert ("is empty" if how == "empty" else "cannot be read") in reason


def test_every_way_of_damage_at_once_costs_only_the_damaged(tmp_path):
    for name in ("good", "good too", "empty", "cut", "tail", "text", "bit"):
        make_run(tmp_path / name, [row(name)])
    for name in ("empty", "cut", "tail", "text", "bit"):
        path = tmp_path / name / store.PART
        path.write_bytes(damaged(path.read_bytes(), name))
    (tmp_path / "folder.parquet").mkdir()
    loaded = store.read_runs(tmp_path)
    assert loaded.frame.case_id.tolist() == ["good", "good too"]
    assert len(loaded.quarantined) == 5 and all(reason for _, reason in loaded.quarantined)


@pytest.mark.parametrize("size", range(1, 400, 7))
def test_a_parquet_of_any_length_is_set_aside(tmp_path, size):
    path = make_run(tmp_path / "run", [row("a")]) / store.PART
    data = path.read_bytes()
    for kept in (data[: len(data) * size // 400], data[:size], data[-size:]):
        path.write_bytes(kept)
        assert store.read_runs(path).frame.empty and len(store.read_runs(path).quarantined) == 1


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


# --- versions


def same(a: pa.Table, b: pa.Table) -> bool:
    """Equal values, NaN being one."""
    return a.schema.equals(b.schema) and repr(a.to_pylist()) == repr(b.to_pylist())


def rewritten(path, version: int, change=lambda table: table) -> None:
    """The part as another schema version would have written it."""
    table = change(pq.read_table(path))
    footer = {"schema_version": str(version), "rows_sha256": parts.digest(table)}
    pq.write_table(table.replace_schema_metadata(footer), path)


def test_newer_versions_are_refused_and_older_ones_lifted(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", [row("a", kernel="flash", max_err=float("nan"), tolerance=2.0)])
    path = run / store.PART
    rewritten(path, schema.SCHEMA_VERSION + 1)
    assert f"newer than the {schema.SCHEMA_VERSION} known here" in store.read_runs(path).quarantined[0][1]

    def old_name(table):
        return table.rename_columns(["kernal" if n == "kernel" else n for n in table.column_names])

    rewritten(path, 0, old_name)
    [(_, reason)] = store.read_runs(path).quarantined
    assert "schema version 0 is not known here" in reason
    monkeypatch.setitem(schema.LIFTS, 0, lambda r: {"kernel": r.pop("kernal"), **r})
    frame = store.read_runs(path).frame
    assert frame.kernel.tolist() == ["flash"] and frame.tolerance.tolist() == [2.0]
    assert repr(frame.max_err[0]) == "nan" and frame.model.isna().all()


def test_journals_of_other_versions_are_lifted_or_named(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", [row("a")], part=False)
    plain = schema.encode(row("b"))
    plain["kernal"] = plain.pop("kernel")
    newer = {**schema.encode(row("c")), "schema_version": schema.SCHEMA_VERSION + 1}
    for name, one in (("1", {**plain, "schema_version": 0}), ("2", newer)):
        (run / f"journal-{name}.jsonl").write_text(json.dumps(one) + "\n")
    monkeypatch.setitem(schema.LIFTS, 0, lambda r: {"kernel": r.pop("kernal"), **r})
    loaded = store.read_runs(run)
    assert loaded.frame[["case_id", "kernel"]].values.tolist() == [["a", "flash"], ["b", "flash"]]
    [(path, reason)] = loaded.quarantined
    assert path.name == "journal-2.jsonl" and "1 lines have a newer schema version" in reason
    assert loaded.torn_lines == 0


def test_missing_columns_are_added_typed(tmp_path):
    path = make_run(tmp_path / "run", [row("a")]) / store.PART
    rewritten(path, schema.SCHEMA_VERSION, lambda table: table.drop_columns(["measured_power_w", "model"]))
    frame = store.read_runs(path).frame
    assert frame.measured_power_w.dtype == pd.ArrowDtype(pa.float64()) and frame.model.isna().all()


def test_every_version_has_its_fixtures():
    lacking = fixtures.missing(schema.SCHEMA_VERSION)
    assert not lacking, f"{lacking}: run python -m tests.schema_fixtures before the version is released"
    assert len(fixtures.missing(schema.SCHEMA_VERSION + 1)) == len(fixtures.KINDS)


@pytest.mark.parametrize("version", range(1, schema.SCHEMA_VERSION + 1))
def test_files_of_every_version_hold_what_was_stored(tmp_path, version):
    plain = json.loads(fixtures.path(version, "json").read_text(encoding="utf-8"))
    lifted = [schema.decode(schema.lift(one, version)) for one in plain]
    expected = parts.to_table(lifted)
    assert len(plain) == 5 and len(plain[0]) > 80  # of which the first fills every column
    assert same(parts.read_part(fixtures.path(version, "parquet")), expected)
    (tmp_path / "journal-0.jsonl").write_bytes(fixtures.path(version, "jsonl").read_bytes())
    rows, torn, bad = store.read_journals(tmp_path)
    assert same(parts.to_table(rows), expected) and repr(rows) == repr(lifted) and torn == 0 and bad == []


def test_version_1_called_the_rate_of_modelled_bytes_measured():
    old, new = (json.loads(fixtures.path(version, "json").read_text(encoding="utf-8")) for version in (1, 2))
    assert schema.lift(old[0], 1)["modelled_gbps"] == old[0]["measured_gbps"]
    assert "measured_gbps" in old[0] and "measured_gbps" not in new[0] and "modelled_gbps" in new[0]


def test_recorded_runs_have_their_rates_whatever_version_they_are_of():
    loaded = store.read_runs(store.RECORDED / "h200")
    rows = loaded.frame[loaded.frame["measured_time_us"].notna() & (loaded.frame["modelled_bytes_loaded"] > 0)]
    moved = rows["modelled_bytes_loaded"] + rows["modelled_bytes_stored"]
    expected = moved / rows["measured_time_us"] / 1e3
    assert loaded.quarantined == [] and len(rows) > 1000
    assert ((rows["modelled_gbps"] / expected - 1).abs() < 1e-9).all()


@pytest.mark.parametrize("row, told", [
    ({"lse_err": 0.0, "lse_tolerance": 1e-5, "n": 64, "m": 64, "causal": True}, True),
    ({"lse_err": 0.0, "lse_tolerance": 1e-5, "n": 64, "m": 128, "causal": False}, True),
    ({"lse_err": 0.0, "lse_tolerance": 1e-5, "n": 64}, True),
    ({"lse_err": 0.0, "lse_tolerance": 1e-5, "n": 64, "m": 65, "causal": True}, False),  # a query sees no key
    ({"lse_err": 0.0, "lse_tolerance": 1e-5, "tokens": 64}, False),  # a ragged batch: a sequence may be empty
    ({"lse_err": 0.0, "lse_tolerance": 0.0}, True),  # a probe
    ({"lse_err": 0.0, "lse_tolerance": 1.3e-5, "n": 64, "m": 64}, False),
    ({"lse_err": 1e-7, "lse_tolerance": 1e-5, "n": 64, "m": 64}, False),
    ({"lse_err": "nan", "lse_tolerance": 0.0, "n": 64, "m": 64}, False),
    ({}, False),
])
def test_version_1_called_an_lse_that_is_not_there_exact(row, told):
    lifted = schema.lift(dict(row), 1)
    assert lifted == ({k: v for k, v in row.items() if not k.startswith("lse")} if told else row)


def test_of_the_recorded_rows_those_without_an_lse_are_told():
    frame = store.read_runs(store.RECORDED / "h200").frame
    frame = frame[frame["status"] == "ok"]
    none = {"torch_math", "torch_flash", "torch_cudnn", "flashinfer", "flashinfer_decode", "flashinfer_cascade"}
    expected = frame["kernel"].isin(none) | frame["family"].isin(["probe", "cache", "pages"])
    expected |= frame["kernel"].isin(["fa3", "fa3_decode"]) & frame["sinks"].fillna(False).astype(bool)
    assert (frame["lse_err"].isna() == expected).all() and (frame["lse_tolerance"].isna() == expected).all()


def test_a_column_that_changes_needs_a_new_version():
    today = {field.name: field.type for field in schema.ARROW}
    for field in pq.read_schema(fixtures.path(schema.SCHEMA_VERSION, "parquet")):
        assert today.get(field.name) == field.type, f"{field.name}: raise SCHEMA_VERSION and add a lift"
