"""The page Block size: what is read of rows that walk chunks, its charts, and the page on odd runs."""

from __future__ import annotations

import json

import dashboard_rows as made
import numpy as np
import pandas as pd
import pytest
import suite_rows
from dashboard_pages import opener, shown, words

from dashboard import asking, charts_chunks, chunks, rows
from experiments import store

DEFAULTS = {"chunked_fused": 128.0, "chunked_unfused": 128.0}


@pytest.fixture
def open_page(tmp_path, monkeypatch):
    """Runs one page on the given folders; see `dashboard_pages.opener`."""
    monkeypatch.setattr(asking, "default_chunks", lambda: DEFAULTS)
    return opener(tmp_path, monkeypatch)


def prepared(lines: list[dict]) -> pd.DataFrame:
    return chunks.of(rows.latest(rows.prepare(made.frame(lines))))


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    return suite_rows.rows_of("block-size")


@pytest.fixture(scope="module")
def scan(lines) -> pd.DataFrame:
    return chunks.scanned(prepared(lines))


@pytest.fixture(scope="module")
def fused(scan) -> pd.DataFrame:
    return scan[scan["kernel"] == "chunked_fused"]


@pytest.fixture(scope="module")
def counted() -> pd.DataFrame:
    """What is recorded of the CPU machine."""
    frame = chunks.of(rows.prepare(store.read_runs(store.RECORDED / "cpu" / "block-size").frame))
    return chunks.scanned(frame)


def test_chunks_are_read_from_the_constants_as_used():
    row = suite_rows.rows_of("precision")[0]
    used = {"chunk": 16, "accumulate": "input", "tile_m": 64, "tile_n": 16}
    row.update(constants=None, constants_used=json.dumps(used), n=100)
    found = prepared([row]).iloc[0]
    assert (found["chunk"], found["chunks"], found["accumulate"]) == (16, 7, row["dtype"])
    assert found["tile"] == "64 × 16" and found["rest"] == ""


def test_rows_without_a_chunk_are_left_out():
    flash = made.prefill(made.Maker("r", "quick"), ("flash",), "Llama-3-8B", 4096, True)[0]
    odd = [{**flash, "constants_used": text} for text in (None, "{", "[]", '{"chunk": "x"}', '{"chunk": 0}')]
    found = prepared(odd)
    assert found.empty and chunks.scanned(found).empty


def test_a_single_chunk_is_no_scan(scan):
    one = scan[scan["chunk"] == 64]
    assert len(one) and chunks.scanned(one).empty


def test_curves_have_a_line_a_head_dim_and_mark_best_and_default(fused):
    chart = charts_chunks.over_chunk(fused, 128.0)
    drawn = shown(chart, "tflops", "chunk")
    assert {row["dim"] for row in drawn} == {"D64", "D80"}
    assert {row["panel"] for row in drawn} == {"N256", "N512"}
    best = {(row["panel"], row["dim"]): row["chunk"] for row in drawn if row["best"]}
    (ring,) = (layer for layer in chart.to_dict()["spec"]["layer"] if layer["mark"].get("filled") is False)
    assert ring["transform"][-1] == {"filter": "datum.best"}
    for (panel, dim), chunk in best.items():
        line = [row for row in drawn if (row["panel"], row["dim"]) == (panel, dim)]
        assert chunk == max(line, key=lambda row: row["tflops"])["chunk"]
    assert len(best) == 4 and all(row["tflops_low"] <= row["tflops"] <= row["tflops_high"] for row in drawn)
    spec = chart.to_dict()
    assert "default, 128" in spec["title"]["subtitle"][1] and "TFLOP/s" in spec["title"]["text"]
    assert "default" not in charts_chunks.over_chunk(fused).to_dict()["title"]["subtitle"][1]


def test_a_failure_is_a_sign_at_its_chunk_and_never_the_best(lines):
    fast = {"measured_tflops": 1e6, "measured_time_us": 1e-3}
    lost = [{**row, **fast, "status": "incorrect", "error": "O differs"} for row in lines[:1]]
    frame = chunks.scanned(prepared([*lost, *lines[1:]]))
    chart = charts_chunks.over_chunk(frame[frame["kernel"] == "chunked_fused"])
    assert max(row["tflops"] for row in shown(chart, "tflops")) < 1e6
    assert chunks.best(frame)["tflops"].max() < 1e6 and chunks.gains(frame, 64.0)["gain"].min() >= 1
    signs = [(row["text"], row["chunk"], row["panel"]) for row in shown(chart, "slot")]
    assert signs == [("✕ D64", 64, "N256")]


def test_gains_are_times_of_the_default_over_those_of_the_best(fused):
    found = chunks.gains(fused, 64.0).set_index(["d", "n"])
    for (d, n), row in found.iterrows():
        line = fused[(fused["d"] == d) & (fused["n"] == n)].set_index("chunk")["measured_time_us"]
        assert row["gain"] == pytest.approx(line[64.0] / line.min()) and row["chunk"] == line.idxmin()
    assert chunks.gains(fused, 4096.0)["gain"].isna().all()
    says = {row["says"] for row in shown(charts_chunks.optima(fused, 4096.0), "says")}
    assert says <= {"64", "128", "256"}


def test_the_nearest_shape_is_measured_and_named(scan):
    near, differs = chunks.nearest(scan, {"d": 80, "n": 512, "b": 1, "h": 1})
    assert not differs and set(near["d"]) == {80} and set(near["n"]) == {512}
    near, differs = chunks.nearest(scan, {"d": 72, "n": 300, "b": 2, "h": 1})
    assert set(near["n"]) == {256} and near["d"].nunique() == 1
    assert "N 256 where yours is 300" in differs and "batch 1 where yours is 2" in differs


def test_a_shape_of_ones_own_shows_every_kernel(scan):
    near, _ = chunks.nearest(scan, {"d": 64, "n": 512, "b": 1, "h": 1})
    drawn = shown(charts_chunks.by_kernel(near, DEFAULTS), "tflops")
    assert {row["kernel"] for row in drawn} == {"chunked_fused", "chunked_unfused"}
    assert {row["chunk"] for row in drawn if row["usual"]} == {128}


def test_a_head_dim_is_set_beside_the_one_it_would_be_padded_to(fused):
    wide = fused.assign(d=fused["d"].replace(64, 96))
    assert chunks.beside(wide, 80) == 96 and chunks.beside(fused, 80) == 64
    assert np.isnan(chunks.beside(fused[:0], 1))
    assert chunks.odd_dims(wide) == [80, 96]
    pair = chunks.ratios(wide, 80, 96)
    first = pair.iloc[0]
    alike = wide[(wide["n"] == first["n"]) & (wide["chunk"] == first["chunk"])]
    times = alike.set_index("d")["measured_time_us"]
    assert first["ratio"] == pytest.approx(times[80] / times[96]) and len(pair) == 6
    assert (pair["ratio_low"] <= pair["ratio"]).all() and (pair["ratio"] <= pair["ratio_high"]).all()
    said = charts_chunks.padding(wide, 80).to_dict()["title"]["subtitle"]
    assert "where padding to 96 would cost nothing" in said[1]


def test_padding_in_counted_bytes_is_hollow(counted):
    spec = charts_chunks.padding(counted[counted["kernel"] == "chunked_fused"], 80).to_dict()
    points = [layer["mark"] for layer in spec["spec"]["layer"] if layer["mark"]["type"] == "point"]
    assert [(mark["filled"], mark["shape"]) for mark in points] == [(False, "circle")]
    assert {round(row["ratio"], 2) for table in spec["datasets"].values() for row in table} <= {1.24, 1.25}


def test_counts_of_the_cpu_machine_over_the_chunk(counted):
    one = counted[counted["kernel"] == "chunked_unfused"]
    found = shown(charts_chunks.counted(one, "counted_launches", "Launches"), "counted_launches")
    launches = {row["chunk"]: row["counted_launches"] for row in found if row["n"] == 512}
    assert launches == {64: 264, 128: 68, 256: 18}
    assert charts_chunks.over_chunk(one) is None and charts_chunks.optima(one, 128.0) is None


def test_tiles_inside_a_chunk_are_ordered_by_what_they_reach(lines):
    some = [next(row for row in lines if row["kernel"] == "chunked_unfused")] * 3
    tiles = []
    for i, row in enumerate(some, 1):
        given = {"chunk": 64, "tile_m": 16 * i}
        used = json.dumps({**given, "tile_n": 64})
        tiles.append({**row, "constants": json.dumps(given), "constants_used": used, "measured_tflops": i,
                      "case_id": f"tile {i}"})
    frame = prepared(tiles)
    spec = charts_chunks.tiles(chunks.tiled(frame)).to_dict()
    assert spec["layer"][0]["encoding"]["y"]["sort"] == ["48 × 64", "32 × 64", "16 × 64"]
    assert chunks.tiled(frame[:2]).empty and chunks.tiled(frame[:0]).empty


# --- the page


def test_the_page_of_a_gpu_answers_for_a_shape_of_ones_own(open_page, tmp_path, lines):
    suite_rows.write(tmp_path / "runs", "block-size", lines)
    app = open_page("block_size", runs=tmp_path / "runs", chunk_my_n="300", chunk_my_d="64", chunk_my_h="1")
    assert [title.split(",")[0] for title in words(app)] == [
        "Throughput over the chunk",
        "The best chunk",
        "Throughput over the chunk at the nearest measured shape",
        "Head dim 80 over head dim 64: time",
    ]
    said = app.warning[0].value
    assert "N 256 where yours is 300" in said and "nothing is interpolated" in said
    assert all(len(chart.proto.alt) > 40 for chart in app.get("vega_lite_chart"))
    assert "measured default ÷ best" in app.dataframe[1].value


def test_the_recorded_run_of_the_cpu_machine_counts(open_page):
    app = open_page("block_size", shipped=store.RECORDED / "cpu", run="block-size")
    assert words(app)[:2] == ["Global bytes requested over the chunk", "Launches over the chunk"]
    assert "models no time" in app.info[0].value


def test_nothing_failures_and_other_suites_are_sentences(open_page, tmp_path, lines):
    assert open_page("block_size").info
    lost = [suite_rows.failed(row, "incorrect", "why") for row in lines]
    suite_rows.write(tmp_path / "runs", "block-size", lost)
    app = open_page("block_size", runs=tmp_path / "runs")
    assert not app.get("vega_lite_chart") and "ended ok" in app.info[0].value
    assert set(app.dataframe[0].value["status"]) == {"incorrect"}


def test_default_chunks_are_asked_of_the_kernels():
    assert asking.default_chunks()["chunked_fused"] == 512.0
