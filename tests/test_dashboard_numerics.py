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
    made = prepared(lines)
    return made[made["key_order"] == ""]


@pytest.fixture(scope="module")
def orders(lines) -> pd.DataFrame:
    made = prepared(lines)
    return made[made["key_order"] != ""]


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
    assert len(shown(charts_numerics.time_over_chunks(frame), "chunks")) == 41


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


def test_an_order_of_keys_is_no_part_of_what_is_held_but_of_the_subject(orders):
    assert orders["held"].nunique() == 1 and orders["setting"].nunique() == 3 * 2 * 3
    assert all(f"keys {row.key_order}" in row.shape for row in orders[["key_order", "shape"]].itertuples())
    assert orders["panel"].nunique() == 3


def test_errors_by_the_order_of_keys(orders):
    chart = charts_numerics.by_order(orders)
    spec = chart.to_dict()
    layers = spec["spec"]["layer"]
    assert [layer["mark"]["type"] for layer in layers] == ["point", "point", "text"]  # an order is no scale
    assert all(layer["encoding"]["x"]["sort"] == ["mixed", "rising", "falling"] for layer in layers)
    drawn = shown(chart, "max_err", "tolerance")
    assert len(drawn) == 18 and {row["key_order"] for row in drawn} == {"mixed", "rising", "falling"}
    assert {row["panel"] for row in drawn} == {"N1K · float16 · 64 chunks", "N1K · bfloat16 · 64 chunks"}
    assert "float64" in spec["title"]["text"] and "equal keys" in spec["title"]["subtitle"][2]
    assert charts_numerics.by_order(orders.assign(max_err=float("nan"))) is None


def test_an_incorrect_result_of_an_order_is_a_cross(orders):
    lost = orders.assign(status=["incorrect", *orders["status"][1:]])
    chart = charts_numerics.by_order(lost)
    assert [row["status"] for row in shown(chart, "status")].count("incorrect") == 1
    assert "✕: incorrect" in chart.to_dict()["title"]["subtitle"][1]


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
        "Largest error against float64 by the order in which chunks are added",
        "Largest error of every result over its tolerance",
    ]
    assert all(len(chart.proto.alt) > 40 for chart in app.get("vega_lite_chart"))
    assert [len(table.value) for table in app.dataframe] == [24, 24, 18, 42]
    assert "order of keys" in app.dataframe[2].value and "order of keys" not in app.dataframe[0].value
    assert "error ÷ tolerance" in app.dataframe[3].value


def test_the_recorded_run_of_the_cpu_machine_has_errors_and_no_times(open_page):
    app = open_page("numerics", shipped=store.RECORDED / "cpu", run="precision")
    assert len(words(app)) == 3 and "models no time" in app.info[0].value
    assert "python -m experiments run precision --machine cpu" in [code.value for code in app.code]


def test_without_sums_the_page_still_has_every_margin(open_page, tmp_path, lines):
    assert open_page("numerics").info
    one = [row for row in lines if '"float32"' in row["constants"]]
    plain = [row for row in one if row["key_order"] is None]
    suite_rows.write(tmp_path / "plain", "precision", plain)
    app = open_page("numerics", runs=tmp_path / "plain")
    assert "python -m experiments run precision" in [code.value for code in app.code]
    assert words(app) == ["Largest error of every result over its tolerance"]
    suite_rows.write(tmp_path / "runs", "precision", one)
    app = open_page("numerics", runs=tmp_path / "runs")
    assert len(words(app)) == 2 and "by the order in which chunks are added" in words(app)[0]


def test_rows_of_one_order_are_compared_with_none(open_page, tmp_path, lines):
    one = [row for row in lines if row["key_order"] in (None, "mixed")]
    suite_rows.write(tmp_path / "runs", "precision", one)
    app = open_page("numerics", runs=tmp_path / "runs")
    assert len(words(app)) == 3 and "several orders" in app.info[0].value


def test_a_result_without_an_lse_shows_a_dash_for_its_error(open_page):
    app = open_page("numerics", shipped=store.RECORDED / "h200", run="peers")
    (table,) = (frame for frame in app.dataframe if "largest error of the LSE" in frame.value)
    none = table.value["largest error of the LSE"].isna()
    without = {"torch_flash", "torch_cudnn", "flashinfer", "flashinfer_decode"}
    assert set(table.value["kernel"][none]) == without
    assert {"flash", "fa3"} <= set(table.value["kernel"][~none]) and table.proto.placeholder == "–"
