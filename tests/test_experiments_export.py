"""Export: every row with status and units, no number that was not measured, files other tools can read."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from commands import call
from compared_rows import row

from experiments import exporting, schema, store
from experiments.store import RECORDED

NAN, INF = math.nan, math.inf
SAMPLES = [4.96, 5.408]


@pytest.fixture
def run(tmp_path):
    """A run of three rows: right, out of memory with numbers it should not have, right with odd floats."""
    rows = [
        row("good", None, measured_time_us=5.0, measured_samples_us=SAMPLES, causal=True, page_size=16),
        row("oom", None, status="oom", error='no room for "S",\nnor for P', measured_time_us=0.0,
            measured_tflops=0.0, measured_samples_us=[0.0], modelled_scratch_bytes=7),
        row("odd", None, measured_time_us=5.0, max_err=NAN, tolerance=INF, lse_err=-INF),
    ]
    folder = tmp_path / "mine"
    folder.mkdir()
    store.write_manifest(folder, {"run_id": "run-0"})
    store.write_part(folder, rows, {"run_id": "run-0"})
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """command(words): exit code, standard output, standard error."""

    def run(*words) -> tuple[int, str, str]:
        code, out, err = call(monkeypatch, capsys, "export", *words)
        return code, out, " ".join(err.split())

    return run


def by_case(rows, key="case_id"):
    return {line[key]: line for line in rows}


def strict(text: str):
    """JSON as the standard has it: NaN and Infinity are refused."""
    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def test_csv_has_units_in_its_heads_and_empty_cells_for_what_is_absent(run, command):
    code, out, err = command(run)
    assert code == 0 and err == "3 rows of 1 run"
    lines = by_case(csv.DictReader(io.StringIO(out)))
    head = next(csv.reader(io.StringIO(out)))
    assert len(head) == len(schema.NAMES) and "measured_time_us [µs]" in head and "kernel" in head
    assert "page_size [tokens]" in head and "measured_power_w [W]" in head
    good, oom, odd = lines["good"], lines["oom"], lines["odd"]
    assert good["measured_time_us [µs]"] == "5.0" and good["causal"] == "true"
    assert json.loads(good["measured_samples_us [µs]"]) == SAMPLES and good["page_size [tokens]"] == "16"
    assert good["started_at"] == "2026-11-29T12:00:00.000000+00:00"
    assert oom["status"] == "oom" and oom["error"] == 'no room for "S",\nnor for P'
    assert oom["modelled_scratch_bytes [B]"] == "7"
    for name in ("measured_time_us [µs]", "measured_tflops [TFLOP/s]", "measured_samples_us [µs]"):
        assert oom[name] == ""
    assert (odd["max_err"], odd["tolerance"], odd["lse_err"]) == ("nan", "inf", "-inf")
    assert odd["lse_tolerance"] == ""


def test_json_is_strict_and_says_what_its_columns_are(run, command):
    code, out, _ = command(run, "--to", "json")
    document = strict(out)
    assert code == 0 and document["columns"]["measured_time_us"] == {
        "unit": "µs", "kind": "measured", "meaning": "median time of one run"}
    rows = by_case(document["rows"])
    assert all(list(line) == list(schema.NAMES) for line in rows.values())
    assert rows["good"]["measured_samples_us"] == SAMPLES and rows["good"]["measured_time_us"] == 5.0
    assert rows["oom"]["status"] == "oom" and rows["oom"]["measured_time_us"] is None
    assert rows["odd"]["max_err"] == "nan" and rows["odd"]["tolerance"] == "inf"
    assert schema.decode(rows["odd"])["tolerance"] == INF


def test_parquet_has_types_units_and_nulls(run, command, tmp_path):
    path = tmp_path / "rows.parquet"
    code, out, err = command(run, "--to", "parquet", "--out", path)
    assert code == 0 and out == "" and "3 rows of 1 run into" in err
    table = pq.read_table(path)
    assert table.schema.equals(schema.ARROW)
    assert table.schema.field("measured_time_us").metadata[b"unit"] == "µs".encode()
    rows = by_case(table.to_pylist())
    assert rows["oom"]["measured_time_us"] is None and rows["oom"]["status"] == "oom"
    assert math.isnan(rows["odd"]["max_err"]) and rows["odd"]["lse_tolerance"] is None


@pytest.mark.parametrize("to", exporting.FORMATS)
def test_a_file_has_what_the_terminal_has_and_is_not_overwritten(run, command, tmp_path, to):
    path = tmp_path / f"rows.{to}"
    assert command(run, "--to", to, "--out", path)[0] == 0
    if to in exporting.TEXT:
        assert path.read_text(encoding="utf-8") == command(run, "--to", to)[1]
    before = path.read_bytes()
    code, _, err = command(run, "--to", to, "--out", path)
    assert code == 2 and "exists; name a new file" in err and path.read_bytes() == before


def test_every_recorded_run_goes_out_in_every_format():
    loaded = store.read_runs(RECORDED)
    rows = exporting.rows_of(loaded.frame)
    assert len(rows) == len(loaded.frame) > 400
    assert {r["status"] for r in rows} >= {"ok", "oom"}
    assert all(r["measured_time_us"] is None for r in rows if r["status"] == "oom" or r["machine"] == "cpu")
    assert len(strict(exporting.as_json(rows))["rows"]) == len(rows)
    assert len(list(csv.DictReader(io.StringIO(exporting.as_csv(rows))))) == len(rows)
    assert exporting.as_parquet(rows).num_rows == len(rows)


def test_several_runs_and_what_cannot_be_read(run, command, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    store.write_part(other, [row("x", 3.0, 1)], {"run_id": "run-1"})
    (other / "bad.parquet").write_bytes(b"PAR1")
    code, out, err = command(run, other)
    assert code == 0 and "4 rows of 2 runs" in err and "set aside" in err and "bad.parquet" in err
    assert len(list(csv.DictReader(io.StringIO(out)))) == 4


def test_wrong_arguments_end_in_one_sentence(run, command, tmp_path):
    (tmp_path / "empty").mkdir()
    for words, said in (
        ([tmp_path / "nowhere"], "does not exist; name a run's folder"),
        ([tmp_path / "empty"], "holds no row"),
        ([run, "--to", "cvs"], "--to: 'cvs' is not a format; did you mean 'csv'?"),
        ([run, "--to", "parquet"], "--out: expected a file for parquet"),
        ([run, "--out", tmp_path / "no" / "rows.csv"], "is not a folder"),
        ([run, "--to", "parquet", "--out", run / "copy.parquet"], "is a run's folder"),
    ):
        code, out, err = command(*words)
        assert code == 2 and said in err and out == "", words


def test_a_reader_that_stops_early_is_no_error(run):
    command = f"{sys.executable} -m experiments export {RECORDED} --to json | head -c 10"
    words = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stdout == '{"columns"' and "rror" not in done.stderr and done.returncode == 0
