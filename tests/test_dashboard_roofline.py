"""The page Roofline: where rows stand under measured ceilings, and the page on recorded and odd runs."""

from __future__ import annotations

import dashboard_rows as made
import numpy as np
import pandas as pd
import pytest
import suite_rows
from dashboard_pages import opener, shown, words

from dashboard import charts_roofline, rows
from dashboard.charts_roofline import ONCE, REQUESTED
from experiments import store
from experiments.ceilings import Ceilings

TOP = Ceilings(4000.0, {"bfloat16": 600.0})


@pytest.fixture
def open_page(tmp_path, monkeypatch):
    """Runs one page on the given folders; see `dashboard_pages.opener`."""
    return opener(tmp_path, monkeypatch)


def prepared(lines: list[dict]) -> pd.DataFrame:
    return rows.latest(rows.prepare(made.frame(lines)))


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    return suite_rows.rows_of("roofline")


@pytest.fixture(scope="module")
def frame(lines) -> pd.DataFrame:
    return prepared(lines)


def test_the_roof_is_the_lower_of_both_ceilings(frame):
    found = charts_roofline.placed(frame, REQUESTED, TOP)
    moved = frame["modelled_bytes_loaded"] + frame["modelled_bytes_stored"]
    assert found["intensity"].to_numpy() == pytest.approx((frame["modelled_flops"] / moved).to_numpy())
    lower = np.minimum(600.0, found["intensity"] * 4.0)
    assert found["roof"].to_numpy() == pytest.approx(lower.to_numpy())
    assert (found["binds"] == np.where(found["intensity"] < 150, "memory", "compute")).all()
    assert found["of_roof"].to_numpy() == pytest.approx((found["tflops"] / lower).to_numpy())


def test_inputs_and_outputs_are_the_shapes_and_a_librarys_too(lines):
    """A library's row has no bytes of its own; standard's scores are no input and no output."""
    flash = next(row for row in lines if row["kernel"] == "flash")
    peer = {name: None if name.startswith("modelled_") else value for name, value in flash.items()}
    peer.update(kernel="torch_cudnn", case_id="peer", modelled_flops=flash["modelled_flops"])
    same = [row for row in lines if row["n"] == flash["n"] and row["family"] == "prefill"]
    found = charts_roofline.placed(prepared([*same, peer]), ONCE, TOP)
    assert "torch_cudnn" in set(found["kernel"]) and found["intensity"].nunique() == 1
    asked = charts_roofline.placed(prepared([*same, peer]), REQUESTED, TOP)
    assert "torch_cudnn" not in set(asked["kernel"])
    assert (asked["intensity"] <= found["intensity"].max()).all()


@pytest.mark.parametrize("top", [Ceilings(), Ceilings(4000.0), Ceilings(None, {"bfloat16": 600.0})])
def test_what_was_not_measured_is_no_roof(frame, top):
    found = charts_roofline.placed(frame, ONCE, top)
    assert found["of_roof"].isna().all() and set(found["binds"]) == {""}
    chart = charts_roofline.roofline(found, top, ONCE)
    assert len(shown(chart, "name")) == (2 if top else 0)  # the two ends of a line
    said = chart.to_dict()["title"]["subtitle"][1]
    assert ("have not been measured" in said) == (not top) and charts_roofline.shares(found) is None


def test_the_roof_bends_where_both_ceilings_meet(frame):
    found = charts_roofline.placed(frame, ONCE, TOP)
    chart = charts_roofline.roofline(found, TOP, ONCE)
    ends = {(row["intensity"], row["tflops"]) for row in shown(chart, "name")}
    assert (150.0, 600.0) in ends and len(ends) == 3
    assert "they meet at 150 flop/B" in chart.to_dict()["title"]["subtitle"][1]
    drawn = shown(chart, "kernel", "tflops")
    assert len(drawn) == len(frame)
    assert all(row["tflops_low"] <= row["tflops"] <= row["tflops_high"] for row in drawn)
    percent = [row["percent"] for row in shown(charts_roofline.shares(found), "percent")]
    assert sorted(percent) == pytest.approx(sorted(100 * found["of_roof"]))


def test_rows_without_a_result_have_no_mark(lines):
    lost = [suite_rows.failed(row, "incorrect", "why") for row in lines[:3]]
    found = charts_roofline.placed(prepared([*lost, *lines[3:]]), ONCE, TOP)
    assert len(shown(charts_roofline.roofline(found, TOP, ONCE), "kernel")) == len(lines) - 3
    only = charts_roofline.placed(prepared(lost), ONCE, TOP)
    assert charts_roofline.roofline(only, TOP, ONCE) is None and charts_roofline.shares(only) is None


def test_the_cpu_machine_knows_flops_a_byte_and_no_rate():
    counted = rows.prepare(store.read_runs(store.RECORDED / "cpu" / "roofline").frame)
    assert charts_roofline.roofline(charts_roofline.placed(counted, ONCE, TOP), TOP, ONCE) is None
    chart = charts_roofline.intensity(counted)
    drawn = shown(chart, "source")
    sources = [row["source"] for row in drawn]
    assert sources.count(charts_roofline.COUNTED) == sources.count(charts_roofline.MODELLED) == len(counted)
    assert chart.to_dict()["encoding"]["shape"]["scale"]["domain"] == [
        charts_roofline.COUNTED,
        charts_roofline.MODELLED,
    ]


# --- the page


def test_the_page_of_a_gpu_with_its_ceilings(open_page, tmp_path, lines):
    suite_rows.write(tmp_path / "runs", "roofline", lines)
    made.write(tmp_path / "runs", {"ceilings": made.h200_rows()["ceilings"]})
    app = open_page("roofline", runs=tmp_path / "runs")
    assert words(app)[0] == "Roofline: useful TFLOP/s over flops a byte" and len(words(app)) == 2
    assert all(len(chart.proto.alt) > 40 for chart in app.get("vega_lite_chart"))
    assert "measured share of the roof" in app.dataframe[0].value
    assert any("Measured ceilings of NVIDIA H200" in caption.value for caption in app.caption)


def test_another_devices_ceilings_are_never_borrowed(open_page, tmp_path, lines):
    suite_rows.write(tmp_path / "runs", "roofline", [{**row, "device": "Card 9000"} for row in lines])
    made.write(tmp_path / "runs", {"ceilings": made.h200_rows()["ceilings"]})
    app = open_page("roofline", runs=tmp_path / "runs", roof_bytes=REQUESTED)
    assert "python -m experiments run ceilings" in [code.value for code in app.code]
    assert len(words(app)) == 1 and "measured share of the roof" not in app.dataframe[0].value


def test_the_recorded_run_of_the_cpu_machine_and_nothing(open_page):
    app = open_page("roofline", shipped=store.RECORDED / "cpu", run="roofline")
    assert words(app) == ["Useful flops a byte of each kernel"] and "models no time" in app.info[0].value
    assert open_page("roofline").info
