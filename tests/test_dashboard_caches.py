"""The charts of caches of bytes and of latents, and where they stand on their page, on made-up rows."""

from __future__ import annotations

import dashboard_rows as made
import numpy as np
import pandas as pd
import pytest
from dashboard_pages import opener, shown, words

from dashboard import charts_caches, charts_floor, charts_latent, charts_order, rows

LENGTHS = {1: 10.0, 16: 80.0, 64: 300.0}  # time over a plain cache by batch, µs
OF_PLAIN = {"float8_e4m3": 0.55, "int8": 0.6}
CACHES, LATENTS = "Decode over caches of bytes beside plain ones, time in µs", "Decode over latents, time in µs"


def quantised_rows() -> list[dict]:
    """Loads over a plain cache and over two quantised ones of half the bytes, the largest load first."""
    maker = made.Maker("kv-1", "kv-dtype")
    lines = []
    for b, time in sorted(LENGTHS.items(), reverse=True):
        plain = made.decode(maker, b, 4096, 16, "shuffled", mode="graph") | {"measured_time_us": time}
        lines.append(plain)
        for cache, share in OF_PLAIN.items():
            half = {"kv_dtype": cache, "modelled_bytes_loaded": plain["modelled_bytes_loaded"] // 2}
            lines.append(plain | half | {"measured_time_us": share * time, "case_id": f"{cache}-{b}"})
    return lines


def latent_rows() -> list[dict]:
    """Two kernels over four batches at 16 and 128 heads; at 20 heads a single load."""
    maker = made.Maker("mla-1", "mla")
    shapes = [(kernel, h, b) for kernel in ("mla", "mla_hopper") for h in (16, 128) for b in (1, 4, 16, 64)]
    return [
        maker.row(
            family="mla", kernel=kernel, b=b, h=h, hkv=1, n=4096, d=576, tokens=4096 * b, max_len=4096,
            page_size=64, page_order="shuffled", lengths_source="uniform", mode="graph",
            modelled_flops=2 * h * 1088 * 4096 * b, modelled_bytes_loaded=1152 * 4096 * b,
            time_us=(20 + b * h / 8) * (2 if kernel == "mla" else 1),
        )
        for kernel, h, b in [*shapes, ("mla", 20, 3)]
    ]  # fmt: skip


def prepared(lines: list[dict]) -> pd.DataFrame:
    return rows.prepare(made.frame(lines))


@pytest.fixture(scope="module")
def quantised() -> pd.DataFrame:
    frame = prepared(quantised_rows())
    return frame.assign(floor_us=frame["measured_time_us"] / 1.25)


@pytest.fixture(scope="module")
def latent() -> pd.DataFrame:
    frame = prepared(latent_rows())
    return frame.assign(floor_us=frame["modelled_bytes"] / 4e6)


def test_a_quantised_cache_is_set_beside_the_plain_one_of_its_load(quantised):
    """Of its run: another run's plain cache is no partner, nor is a failed one."""
    beside = charts_caches.beside_plain(quantised)
    assert beside.groupby("cache")["of_plain"].max().dropna().to_dict() == pytest.approx(OF_PLAIN)
    assert beside["of_plain"].notna().sum() == 6 and beside["shape"].nunique() == 3
    plain = quantised["kv_dtype"] == ""
    lost = [quantised.assign(run_id=quantised["run_id"].where(~plain, "another")),
            quantised.assign(status=quantised["status"].where(~plain, "oom"))]
    for frame in lost:
        made_of = charts_caches.beside_plain(frame)
        assert made_of["of_plain"].isna().all() and charts_caches.shares(made_of) == []
        assert charts_caches.times(made_of) is not None
    assert charts_caches.beside_plain(quantised[plain]).empty  # plain loads alone are no subject here


def test_caches_are_lanes_of_loads_that_stand_by_their_bytes(quantised):
    spec = charts_caches.times(charts_caches.beside_plain(quantised)).to_dict()
    points = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "point")["encoding"]
    assert points["y"]["sort"] == [f"Llama-3-8B · {b} × 4K · page 16" for b in LENGTHS]
    assert points["yOffset"]["sort"] == ["bfloat16", "float8_e4m3", "int8"]
    assert {layer["mark"]["type"] for layer in spec["layer"]} >= {"tick", "point", "text"}
    said = "float8_e4m3 takes 0.55 to 0.55 of the time over bfloat16, 0.55 in the median of 3 loads"
    assert said in spec["title"]["subtitle"] and said in spec["description"]


def test_kernels_of_one_load_stand_below_each_other(quantised):
    """A library says nothing of its bytes, and stands beside the kernel of its load all the same."""
    library = quantised.assign(kernel="flashinfer_decode", variant="flashinfer_decode", modelled_bytes=np.nan,
                               floor_us=np.nan, measured_time_us=2 * quantised["measured_time_us"],
                               status=quantised["status"].where(quantised["kv_dtype"] != "int8", "unsupported"))
    beside = charts_caches.beside_plain(pd.concat([quantised, library], ignore_index=True))
    chart = charts_caches.times(beside)
    spec = chart.to_dict()
    points = next(layer for layer in spec["layer"] if layer["mark"]["type"] == "point")["encoding"]
    loads = [f"Llama-3-8B · {b} × 4K · page 16" for b in LENGTHS]
    assert points["y"]["sort"] == [f"{load} · {kernel}" for load in loads for kernel in ("flashinfer_decode", "paged")]
    assert len(shown(chart, "of_plain", "shape")) == 9 and "flashinfer_decode" in spec["description"]
    assert [line.split(" takes")[0] for line in charts_caches.shares(rows.ok(beside))] == [
        "float8_e4m3 by flashinfer_decode", "float8_e4m3 by paged", "int8 by paged"]
    lost = [row for row in shown(chart, "text", "shape") if "✕" in row["text"]]
    assert {row["shape"] for row in lost} == {f"{load} · flashinfer_decode" for load in loads}


def test_a_load_that_failed_over_a_quantised_cache_is_named_by_its_load(quantised):
    status = quantised["status"].where(quantised["kv_dtype"] != "int8", "oom")
    chart = charts_caches.times(charts_caches.beside_plain(quantised.assign(status=status)))
    lost = [row for row in shown(chart, "text", "shape") if "✕" in row["text"]]
    assert {row["shape"] for row in lost} == {f"Llama-3-8B · {b} × 4K · page 16" for b in LENGTHS}


def test_quantised_rows_stay_out_of_plain_charts(quantised):
    far = shown(charts_floor.over_floor(quantised), "far", "shape")
    assert len(far) == 3 and not any("cache" in row["shape"] for row in far)
    assert charts_floor.over_floor(quantised[quantised["kv_dtype"] != ""]) is None
    both = pd.concat([quantised, quantised.assign(page_order="sorted", measured_time_us=1.0)])
    ratios = charts_order.order_ratios(both)
    assert sorted(ratios["ratio"]) == pytest.approx(sorted(quantised["measured_time_us"]))


def test_latents_stand_over_bytes_and_products(latent):
    chart = charts_latent.over_keys(latent, {"bfloat16": 600.0})
    points = shown(chart, "measured_time_us", "keys")
    assert len(points) == 16 and {row["panel"] for row in points} == {"16/1 heads · D576", "128/1 heads · D576"}
    assert {row["shape"] for row in points if row["b"] == 4} == {
        f"{h}/1 heads · D576 · 4 × 4K · page 64" for h in (16, 128)}  # fmt: skip
    products = {(row["panel"], row["keys"]): row["products_us"] for row in shown(chart, "products_us")}
    assert products["128/1 heads · D576", 4096] == pytest.approx(2 * 128 * 1088 * 4096 / 600e6)
    floors = {row["keys"]: row["bytes_us"] for row in shown(chart, "bytes_us")}
    assert floors[65536 * 4] == pytest.approx(1152 * 65536 * 4 / 4e6)
    text = " ".join(chart.to_dict(validate=False)["title"]["subtitle"])
    assert "dotted" in text and "dashed" in text and "600 TFLOP/s in bfloat16" in text and "mla_hopper" in text


def test_latents_without_ceilings_have_no_lines_of_them(latent):
    chart = charts_latent.over_keys(latent.assign(floor_us=np.nan), {})
    assert shown(chart, "measured_time_us") and not shown(chart, "bytes_us") and not shown(chart, "products_us")
    text = " ".join(chart.to_dict(validate=False)["title"]["subtitle"])
    assert "dotted" not in text and "dashed" not in text


def test_nothing_and_failures_draw_nothing(quantised, latent):
    for change in (lambda frame: frame[:0], lambda frame: frame.assign(status="oom"),
                   lambda frame: frame.assign(measured_time_us=np.nan)):
        assert charts_caches.times(charts_caches.beside_plain(change(quantised))) is None
        assert charts_latent.over_keys(change(latent), {"bfloat16": 600.0}) is None


@pytest.mark.parametrize("suites", [("kv-dtype",), ("mla",), ("kv-dtype", "mla")])
def test_the_page_has_both_or_says_why_not(tmp_path, monkeypatch, suites):
    lines = {"kv-dtype": quantised_rows(), "mla": latent_rows()}
    runs = made.write(tmp_path / "runs", {suite: lines[suite] for suite in suites})
    app = opener(tmp_path, monkeypatch)("decode", runs=runs)
    titles, infos = words(app), " ".join(info.value for info in app.info)
    for suite, title in (("kv-dtype", CACHES), ("mla", LATENTS)):
        assert any(name.startswith(title) for name in titles) == (suite in suites)
        assert (f"the suite `{suite}` makes them" in infos) == (suite not in suites)
    said = any("No floor is drawn" in caption.value for caption in app.caption)
    assert said == ("kv-dtype" in suites)  # of latents alone no floor could have been drawn there
