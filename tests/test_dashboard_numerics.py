"""The page Numerics: errors and times over the number of chunks, and the page on recorded and odd runs."""

from __future__ import annotations

import pandas as pd
import pytest
import suite_rows
from dashboard_pages import opener, shown, words
from dashboard_rows import frame as stored

from dashboard import charts_numerics, chunks, rows
from experiments import store


@pytest.fixture
def open_page(tmp_path, monkeypatch):
    """Runs one page on the given folders; see `dashboard_pages.opener`."""
    return opener(tmp_path, monkeypatch)


def prepared(lines: list[dict]) -> pd.DataFrame:
    return chunks.of(rows.latest(rows.prepare(stored(lines))))


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    return suite_rows.rows_of("precision")


@pytest.fixture(scope="module")
def sums(lines) -> pd.DataFrame:
    return prepared(lines)


def test_what_curves_hold_fixed_leaves_the_sums_out(sums):
    assert sums["held"].nunique() == 1 and "accumulate" not in sums["held"].iloc[0]
    assert set(sums["accumulate"]) == {"float16", "bfloat16", "float32"}
    assert sorted(sums["chunks"].unique()) == [2, 8, 16, 64]


def test_errors_are_hollow_and_tolerances_are_strokes(sums):
    chart = charts_numerics.over_chunks(sums)
    spec = chart.to_dict()
    points = [layer["mark"] for layer in spec["spec"]["layer"] if layer["mark"]["type"] == "point"]
    assert [mark["filled"] for mark in points] == [False, False]
    assert points[1]["shape"] == charts_numerics.STROKE and "shape" not in points[0]
    drawn = shown(chart, "max_err", "tolerance")
    assert len(drawn) == 24 and {row["panel"] for row in drawn} == {
        f"N{n} · {dtype}" for n in ("256", "1K") for dtype in ("float16", "bfloat16")
    }
    assert "float64" in spec["title"]["text"] and len(spec["description"]) > 40


def test_an_incorrect_result_is_a_cross_at_its_error_and_has_no_time(lines):
    lost = [{**lines[0], "status": "incorrect", "max_err": 0.5}, *lines[1:]]  # with the time it took
    frame = prepared(lost)
    chart = charts_numerics.over_chunks(frame)
    assert [row["max_err"] for row in shown(chart, "status") if row["status"] == "incorrect"] == [0.5]
    assert "✕: incorrect" in chart.to_dict()["title"]["subtitle"][1]
    assert len(shown(charts_numerics.time_over_chunks(frame), "chunks")) == 23


def test_a_result_that_never_was_compared_is_not_drawn(lines):
    lost = [suite_rows.failed({**row, "max_err": None}, "oom", "why") for row in lines]
    frame = prepared(lost)
    assert charts_numerics.over_chunks(frame) is None
    assert charts_numerics.against_tolerance(charts_numerics.margins(frame)) is None


def test_times_are_medians_in_ms_with_quartiles(sums):
    drawn = shown(charts_numerics.time_over_chunks(sums), "measured_time_us")
    total = sum(row["measured_time_us"] for row in drawn)
    assert total == pytest.approx(sums["measured_time_us"].sum() / 1e3)
    assert all(row["time_low"] <= row["measured_time_us"] <= row["time_high"] for row in drawn)


def test_margins_are_errors_over_tolerances(sums):
    found = charts_numerics.margins(sums)
    assert found["margin"].to_numpy() == pytest.approx(0.25)
    odd = sums.assign(tolerance=[0.0, float("nan"), *sums["tolerance"][2:]])
    assert len(charts_numerics.margins(odd)) == len(sums) - 2


def test_the_page_of_a_gpu(open_page, tmp_path, lines):
    suite_rows.write(tmp_path / "runs", "precision", lines)
    app = open_page("numerics", runs=tmp_path / "runs")
    assert words(app) == [
        "Largest error against float64 over the number of chunks",
        "Time over the number of chunks, ms",
        "Largest error of every result over its tolerance",
    ]
    assert all(len(chart.proto.alt) > 40 for chart in app.get("vega_lite_chart"))
    assert "error ÷ tolerance" in app.dataframe[2].value


def test_the_recorded_run_of_the_cpu_machine_has_errors_and_no_times(open_page):
    app = open_page("numerics", shipped=store.RECORDED / "cpu", run="precision")
    assert len(words(app)) == 2 and "models no time" in app.info[0].value
    assert "python -m experiments run precision --machine cpu" in [code.value for code in app.code]


def test_without_sums_the_page_still_has_every_margin(open_page, tmp_path, lines):
    assert open_page("numerics").info
    one = [row for row in lines if '"float32"' in row["constants"]]
    suite_rows.write(tmp_path / "runs", "precision", one)
    app = open_page("numerics", runs=tmp_path / "runs")
    assert "python -m experiments run precision" in [code.value for code in app.code]
    assert words(app) == ["Largest error of every result over its tolerance"]
