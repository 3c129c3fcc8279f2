"""Rows with windows, caps, sinks, several queries, packing and pages: named apart, drawn beside plain ones."""

from __future__ import annotations

import dashboard_rows as made
import numpy as np
import pandas as pd
import pytest
from dashboard_pages import opener, shown, words
from suite_rows import rows_of

from dashboard import charts_features, charts_floor, charts_prefill, rows

SUITES = ("decode-features", "prefill-features")
DECODE = {"", "window 100", "softcap 30", "sinks", "2 queries", "8 queries",
          "4 queries · window 100 · softcap 30 · sinks"}
PREFILL = {"", "window 40", "softcap 30", "sinks", "packed", "packed · pages of 16", "packed · pages of 64"}


def prepared(suite: str) -> pd.DataFrame:
    frame = rows.prepare(made.frame(rows_of(suite)))
    return frame.assign(floor_us=frame["measured_time_us"] / 1.25, floor_gbps=1.0)


@pytest.fixture(scope="module")
def decode() -> pd.DataFrame:
    return prepared("decode-features")


@pytest.fixture(scope="module")
def prefill() -> pd.DataFrame:
    return prepared("prefill-features")


def test_each_feature_is_another_subject(decode, prefill):
    assert set(decode["features"]) == DECODE and set(prefill["features"]) == PREFILL
    for frame in (decode, prefill):
        plain = frame[frame["features"] == ""]
        assert not frame.duplicated(["shape", "variant"]).any() and not plain["what"].str.contains("window").any()
    assert set(prefill["shape"]) > {"2/1 heads · D64 · window 40 · B2 · N150 · causal"}


def test_nulls_and_old_rows_are_plain(decode):
    without = decode.drop(columns=["window", "softcap", "sinks", "layout"])
    assert set(rows.prepare(without)["features"]) == {"", "2 queries", "4 queries", "8 queries"}
    none = decode.assign(window=None, softcap=np.nan, sinks=pd.array([pd.NA] * len(decode), "boolean"), layout=None)
    assert not rows.prepare(none)["with_sinks"].any()


def test_features_stand_below_the_plain_load_in_one_chart(decode, prefill):
    for frame, asked, title in ((decode, DECODE, "Decode"), (prefill, PREFILL, "Prefill")):
        beside = charts_features.beside_plain(frame)
        assert set(beside["features"]) == asked
        chart = charts_features.times(beside)
        drawn = shown(chart, "measured_time_us", "shape")
        assert {row["shape"] for row in drawn} == set(frame["shape"])
        assert chart.to_dict()["title"]["text"].startswith(f"{title} by what it is asked for")


def test_a_load_without_features_and_constants_of_ones_own_are_left_out(decode):
    other = decode[decode["features"] == ""].assign(b=77.0)
    own = decode.assign(constants='{"warps": 4}')
    beside = charts_features.beside_plain(pd.concat([decode, other, own], ignore_index=True))
    assert len(beside) == len(decode) and 77 not in set(beside["b"])
    for frame in (decode[decode["features"] == ""], decode.assign(status="oom"), decode[:0]):
        assert charts_features.times(charts_features.beside_plain(frame)) is None


def test_features_stay_out_of_lines_through_plain_loads(decode, prefill):
    far = shown(charts_floor.over_floor(decode), "far", "shape")
    assert len(far) == 2 and not any("window" in row["shape"] or "queries" in row["shape"] for row in far)
    compared = charts_prefill.compared(prefill)
    assert compared.groupby("shape")["kernel"].nunique().max() == 2


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("page", ["overview", "decode", "memory", "roofline", "numerics", "ladder", "health"])
def test_every_page_opens_on_them(tmp_path, monkeypatch, suite, page):
    runs = made.write(tmp_path / "runs", {suite: rows_of(suite)})
    app = opener(tmp_path, monkeypatch)(page, runs=runs)
    assert not app.exception
    title = "Decode by what it is asked for" if suite == "decode-features" else "Prefill by what it is asked for"
    home = {"decode-features": "decode", "prefill-features": "overview"}[suite]
    assert any(name.startswith(title) for name in words(app)) == (page == home)


def test_the_page_says_which_suite_makes_them(tmp_path, monkeypatch):
    runs = made.write(tmp_path / "runs", {"decode-batch": rows_of("decode-batch")})
    app = opener(tmp_path, monkeypatch)("decode", runs=runs)
    assert "the suite `decode-features` makes them" in " ".join(info.value for info in app.info)


def test_written_rows_and_pages_stand_beside_a_librarys(tmp_path, monkeypatch):
    """Its time does, for it says nothing of its bytes."""
    lines = rows_of("cache-writes")
    other = {"append": "flashinfer_append", "copy_pages": "torch_copy"}
    unknown = dict.fromkeys(("modelled_bytes_loaded", "modelled_bytes_stored", "modelled_gbps", "source_hash"))
    theirs = [row | unknown | {"kernel": other[row["kernel"]], "case_id": f"their-{row['case_id']}"}
              for row in lines if row["kernel"] in other]
    frame = rows.prepare(made.frame(lines + theirs))
    assert not frame.duplicated(["shape", "variant", "family"]).any()
    assert {"5 new rows", ""} == set(frame.loc[frame["family"] == "cache", "features"])
    title = "Appends and copies of pages beside libraries', time in µs"
    for some, there in ((lines, False), (lines + theirs, True)):
        runs = made.write(tmp_path / f"runs-{there}", {"cache-writes": [*some, *rows_of("decode-batch")]})
        app = opener(tmp_path, monkeypatch)("decode", runs=runs)
        assert not app.exception and any(name.startswith(title) for name in words(app)) == there
