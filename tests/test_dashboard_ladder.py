"""The page Ladder: its steps, its charts on made-up rows of a GPU, and the page on recorded and odd runs."""

from __future__ import annotations

import json

import dashboard_rows as made
import numpy as np
import pandas as pd
import pytest
import suite_rows
from dashboard_pages import opener, shown, words

from dashboard import against, charts_ladder, charts_reach, data, quotes, reach, rows, steps
from dashboard.charts_ladder import COUNTED, MEASURED, MODELLED
from experiments import ladder, store
from experiments.ceilings import Ceilings
from experiments.suite import load_suite

RUNGS = list(load_suite("ladder").rungs)
TOPS = {suite_rows.DEVICE: Ceilings(4400.0, {"float16": 640.0})}


@pytest.fixture
def open_page(tmp_path, monkeypatch):
    """Runs one page on the given folders; see `dashboard_pages.opener`."""
    return opener(tmp_path, monkeypatch)


def climbed(lines: list[dict], rungs=RUNGS) -> pd.DataFrame:
    """The steps among made-up rows of one run."""
    stored = made.frame(lines).assign(run_path="a")
    latest = against.others(rows.latest(rows.prepare(stored)), stored, {}, TOPS)
    return steps.of(latest, {"a": rungs})


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    return suite_rows.rows_of("ladder")


@pytest.fixture(scope="module")
def timed(lines) -> pd.DataFrame:
    return climbed(lines)


def test_steps_are_the_rungs_in_their_order(timed):
    assert list(timed.sort_values("place")["step"]) == [rung.name for rung in RUNGS]
    assert set(timed["point"]) == {"2/1 heads · D64 · B1 · N1K · full · float16 · launch"}
    assert timed["name"].iloc[0] == "0 · standard"


def test_a_point_with_a_single_step_is_no_ladder(timed):
    """Flash with few queries has the constants of a rung, but nothing beside it."""
    assert not (timed["m"] == 32).any()


def test_rungs_are_those_of_the_runs_own_manifest(lines):
    assert climbed(lines, RUNGS[:3])["step"].nunique() == 3
    assert climbed(lines, ()).empty


def test_a_step_is_set_against_the_one_it_comes_after(timed):
    found = steps.climb(timed, "measured_time_us", "time_low", "time_high").set_index("step")
    for rung in RUNGS[1:]:
        assert found.loc[rung.name, "before"] == found.loc[rung.after, "value"]
    assert np.isnan(found.loc["0", "before"])
    assert (found["low"] <= found["value"]).all() and (found["value"] <= found["high"]).all()


def test_slowdowns_are_those_of_the_reader(timed):
    found = steps.climb(timed, "measured_time_us", "time_low", "time_high", "x_flash")
    np.testing.assert_allclose(found["value"], found["x_flash"])
    time = found.set_index("step")["measured_time_us"]
    np.testing.assert_allclose(found["value"], (time / time["7"]).to_numpy())
    np.testing.assert_allclose(found["low"] / found["value"], found["time_low"] / found["measured_time_us"])


def test_the_staircase_says_what_each_step_buys(timed):
    chart = charts_ladder.staircase(timed, "Time")
    spec = chart.to_dict()
    assert spec["title"]["text"] == "Ladder, time of one call, ms" and len(spec["description"]) > 40
    values = {row["name"]: row for row in shown(chart, "value", "buys")}
    assert len(values) == len(RUNGS)
    for row in values.values():
        if row.get("before"):
            ratio = row["value"] / row["before"]
            assert row["buys"] == steps.gain(ratio)


def test_gains_in_words():
    assert [steps.gain(x) for x in (0.5, 2.0, 1.001, np.nan)] == ["÷ 2", "× 2", "= 1", ""]


def test_a_failure_is_words_and_no_time(lines):
    lost = {"4": lambda row: suite_rows.failed(row, "incorrect", "O differs")}
    frame = climbed([lost.get(row["rung"], dict)(row) for row in lines])
    stairs = charts_ladder.staircase(frame, "× standard")
    assert "4 · scores in shared memory" in stairs.to_dict()["layer"][0]["encoding"]["y"]["sort"]
    drawn = {row["name"][:2].strip(" ·"): row for row in shown(stairs, "value", "buys")}
    assert "4" not in drawn and drawn["5b"].get("before") is None and drawn["5b"]["buys"] == ""
    assert [row["text"] for row in shown(stairs, "text")] == ["✕ incorrect"]


@pytest.fixture(scope="module")
def counted() -> pd.DataFrame:
    """What is recorded of the CPU machine."""
    recorded = store.read_runs(store.RECORDED / "cpu" / "ladder")
    return steps.of(rows.prepare(recorded.frame), {str(recorded.runs[0].path): RUNGS})


def test_kinds_of_knowledge_never_share_a_mark(timed, counted):
    marks: dict[str, set] = {}
    for frame in (timed, counted):
        for layer in charts_ladder.costs(frame).to_dict()["spec"]["layer"]:
            source = layer["transform"][0]["filter"].split("'")[1]
            marks.setdefault(source, set()).add((layer["mark"]["filled"], layer["mark"].get("shape")))
    assert set(marks) == {MEASURED, COUNTED, MODELLED}
    assert all(len(ways) == 1 for ways in marks.values()) and len(set.union(*marks.values())) == 3


def test_costs_of_the_cpu_machine_are_counted_to_the_byte(counted):
    found = shown(charts_ladder.costs(counted), "panel", "value")
    by = {(row["name"], row["panel"].split(",")[0], row["source"]): row["value"] for row in found}
    moved = {name: value for (name, *kind), value in by.items() if kind == ["bytes requested", COUNTED]}
    assert len(moved) == len(RUNGS)
    for name, value in moved.items():
        assert value == by[name, "bytes requested", MODELLED]
        assert by[name, "launches", COUNTED] == by[name, "launches", MODELLED]
    assert charts_ladder.staircase(counted, "Time") is None  # no time, no staircase


def test_use_is_that_of_the_reader(timed):
    found = shown(charts_ladder.uses(timed), "panel", "value")
    use = {row["name"]: row["value"] for row in found if row["panel"].startswith("tensor")}
    expected = 100 * timed.set_index("name")["measured_tflops"] / 640.0
    assert use == pytest.approx(expected.to_dict())
    assert "p99 over median" not in {row["panel"] for row in found}  # forty samples have none


def test_facts_are_within_a_run_and_its_shards(lines):
    """Shards of one run are read against each other; another run's standard is no yardstick."""
    flash = {**next(row for row in lines if row["rung"] == "7"), "run_id": "b"}
    standard = next(row for row in lines if row["rung"] == "0")
    stored = made.frame([standard, flash]).assign(run_path=["a", "b"])
    latest = rows.latest(rows.prepare(stored))
    apart = against.others(latest, stored, {"a": "a", "b": "b"}, {})
    assert np.isnan(apart["x_standard"].iloc[1]) and apart["x_standard"].iloc[0] == 1
    assert against.others(latest, stored, {"a": "one", "b": "one"}, {})["x_standard"].iloc[1] > 0
    assert set(ladder.FACTS) <= set(against.others(latest[:0], stored, {}, {}))


# --- what articles say


@pytest.fixture(scope="module")
def claims() -> list:
    return list(data.claims().claims.values())


@pytest.fixture(scope="module")
def articles(timed) -> pd.DataFrame:
    """The steps as if at the article's shape."""
    return timed.assign(n=8192.0, m=8192.0, d=128.0, h=32.0)


def test_quoted_slowdowns_stand_at_the_steps_they_speak_of(articles, claims):
    said = quotes.times(articles, claims, "x_standard")
    assert {("1", 67.6), ("6", 1.32)} <= set(zip(said["step"], said["value"]))
    assert said["says"].str.contains("claim 2, A 1, 7").any()
    assert "7" not in set(said["step"]) and "0" not in set(said["step"])


def test_quoted_gains_are_of_one_step_over_the_one_before(articles, claims):
    found = quotes.gains(articles, claims)
    assert found["2a"] == 1 / 20 and found["4"] == pytest.approx(1 / 1.82)
    assert found["5b"] == pytest.approx(1 / 1.44) and found["6"] == 1.023 and found["1"] == 67.6
    assert "2b" not in found and "7" not in found


def test_nothing_is_quoted_of_another_shape_or_mode(timed, articles, claims):
    assert quotes.times(timed, claims, "x_standard").empty
    replayed = articles.assign(mode="graph")
    assert quotes.times(replayed, claims, "x_standard").empty and not quotes.gains(replayed, claims)


def test_quoted_shares(articles, claims):
    assert quotes.shares(articles, claims, "sm_busy") == {"1": 8}
    assert quotes.shares(articles, claims, "bytes_share") == {"1": 70}


def test_quotes_are_marks_and_words_of_their_own(articles, claims):
    said = quotes.times(articles, claims, "x_standard")
    chart = charts_ladder.staircase(articles, "× standard", said, quotes.gains(articles, claims))
    marks = [layer["mark"] for layer in chart.to_dict()["layer"] if layer["mark"].get("shape") == "diamond"]
    assert [mark["filled"] for mark in marks] == [False]
    assert {row["value"] for row in shown(chart, "says")} >= {67.6, 1.32}
    words_ = {row["name"]: row["buys"] for row in shown(chart, "buys")}
    assert words_["2a · chunks of 512"].endswith("(quoted ÷ 20)")
    shares = {"multiprocessors busy, %": quotes.shares(articles, claims, "sm_busy")}
    drawn = shown(charts_ladder.uses(articles, shares), "panel", "value")
    assert [row["value"] for row in drawn if row["source"] == charts_ladder.QUOTED] == [8]


# --- where a quoted factor could come from


@pytest.fixture(scope="module")
def many(lines) -> pd.DataFrame:
    """The articles' shape twice as slow as `standard`; fewer heads, and those replayed, more."""
    def at(heads: int, mode: str, us: float) -> list[dict]:
        shape = {"h": heads, "hkv": heads, "m": 8192, "n": 8192, "d": 128, "mode": mode}
        one, standard = (next(row for row in lines if row["rung"] == name) for name in ("1", "0"))
        pair = ({**one, **shape, "measured_time_us": us}, {**standard, **shape, "measured_time_us": 100.0})
        return [{**row, "case_id": f"{row['case_id']}-{heads}-{mode}"} for row in pair]

    return climbed([*at(32, "launch", 200.0), *at(1, "launch", 9000.0), *at(1, "graph", 3000.0)])


def test_the_quote_stands_beside_the_step_at_every_shape(many, claims):
    quote = reach.furthest(quotes.times(many, claims, "x_standard"))
    assert (quote.step, quote.value) == ("1", 67.6)
    at = reach.everywhere(many, quote.step)
    assert list(zip(at["at_once"], at["x_standard"], at["replayed"])) == [
        (32, 2, False), (1, 90, False), (1, 30, True)
    ]  # fmt: skip
    assert reach.furthest(quotes.times(many, [], "x_standard")) is None
    assert reach.everywhere(many[many["step"] == "0"], "1").empty


def test_what_adds_to_the_factor_is_named_from_rows(many, claims):
    quote = reach.furthest(quotes.times(many, claims, "x_standard"))
    at = reach.everywhere(many, "1")
    first, heads, gaps = reach.found(at, quote)
    assert "× 2 to × 90" in first and "reached at 1/1 heads" in first
    assert "32 in a launch × 2, with 1 × 90" in heads and "launches are" in heads
    assert "× 90 launched one by one, × 30 as a CUDA graph" in gaps
    first, *more = reach.found(at[at["at_once"] == 32], quote)
    assert "reached nowhere" in first and not more


def test_a_reader_sees_slowdowns_and_the_quote(many, claims):
    quote = reach.furthest(quotes.times(many, claims, "x_standard"))
    chart = charts_reach.slowdowns(reach.everywhere(many, "1"), quote)
    assert [row["x_standard"] for row in shown(chart, "says")] == [67.6]
    words_ = [row["words"] for row in shown(chart, "words")]
    assert words_[0].startswith("× 2 · launches") and words_[2] == "× 30"
    chart.to_dict()


def test_words_stand_clear_of_bars_and_quotes(articles, claims):
    said = quotes.times(articles, claims, "x_standard")
    chart = charts_ladder.staircase(articles, "× standard", said, quotes.gains(articles, claims))
    quoted = {(row["name"], row["value"]) for row in shown(chart, "says")}
    for row in shown(chart, "buys", "before"):
        ends = row["value"], row["before"]
        assert row["beside"] <= min(ends) if row["left"] else row["beside"] >= max(ends)
        reach_ = (row["beside"], charts_ladder.WORDS * row["beside"])
        assert row["left"] or not any(n == row["name"] and reach_[0] < v < reach_[1] for n, v in quoted)


# --- the paged ladder


@pytest.fixture(scope="module")
def paged() -> pd.DataFrame:
    return climbed(suite_rows.rows_of("paged-ladder"), ())


def test_the_paged_ladder_has_every_step_at_every_point(paged):
    found = paged.groupby("point")["step"].apply(lambda names: sorted(names))
    assert len(found) == 4 and all(names == sorted(step for step, *_ in steps.PAGED_STEPS) for names in found)


def test_paged_steps_are_what_their_constants_say(paged):
    kernels = paged.groupby("step")["kernel"].agg(set).to_dict()
    assert kernels["1"] == {"flash"} and kernels["3"] == {"paged_gather"} == kernels["3b"]
    assert kernels["4"] == kernels["5"] == {"paged_launches"} and kernels["7"] == {"paged"}
    whole = paged[paged["step"].isin(["2", "3", "6"])]["constants"]
    assert all(json.loads(text) == {"splits": 1} for text in whole)
    assert (paged.loc[paged["step"] == "2", "page_size"] == paged.loc[paged["step"] == "2", "length"]).all()


def test_paged_steps_are_set_against_one_launch_for_the_batch(paged):
    one = paged[paged["point"] == paged["point"].iloc[0]]
    found = steps.climb(one, "measured_time_us", "time_low", "time_high", "6").set_index("step")
    assert found.loc["6", "value"] == 1
    assert found.loc["5", "value"] > found.loc["4", "value"] >= 1


def test_the_article_speaks_of_launches_by_request_and_by_page(paged, claims):
    one = paged[paged["point"] == paged["point"].iloc[0]].assign(b=16.0)
    said = quotes.times(one, claims, "6")
    assert set(zip(said["step"], said["value"])) == {("4", 70), ("5", 70)}


# --- the page


def test_the_page_of_a_gpu(open_page, tmp_path, lines):
    """Its ceilings come from a run that lies beside it and is not chosen."""
    suite_rows.write(tmp_path / "runs", "ladder", lines)
    suite_rows.write(tmp_path / "runs", "ceilings", made.h200_rows()["ceilings"])
    app = open_page("ladder", runs=tmp_path / "runs", run="ladder")
    assert [title.split(",")[0] for title in words(app)] == [
        "Ladder",
        "What each step requests",
        "How each step uses the device: %",
    ]
    assert all(len(chart.proto.alt) > 40 for chart in app.get("vega_lite_chart"))
    table = app.dataframe[0].value
    assert "measured × standard" in table and "modelled bandwidth use" in table
    assert {"measured mean, µs", "measured, attention only, token/s", "measured TFLOP/s"} <= set(table)
    assert any("not among the chosen ones" in caption.value for caption in app.caption)
    assert app.get("download_button")


def test_the_recorded_run_of_the_cpu_machine_has_no_times(open_page):
    app = open_page("ladder", shipped=store.RECORDED / "cpu")
    assert len(words(app)) == 1 and "models no time" in app.info[0].value
    assert "counted launches" in app.dataframe[0].value
    assert "python -m experiments run ladder --machine cpu" in [code.value for code in app.code]


def test_the_page_says_where_the_quoted_factor_could_come_from(open_page):
    app = open_page("ladder", shipped=store.RECORDED / "h200")
    assert "Where 67.6 times could come from" in [header.value for header in app.header]
    said = next(text.value for text in app.markdown if "Quoted of step 1" in text.value)
    assert "Heads looped over by the host" in said and "CUDA graph" in said


def test_links_choose_the_ladder_and_the_unit(open_page, tmp_path, lines):
    """Here without ceilings: the page says which command measures them."""
    suite_rows.write(tmp_path / "runs", "ladder", lines)
    suite_rows.write(tmp_path / "runs", "paged-ladder", suite_rows.rows_of("paged-ladder"))
    link = {"ladder_suite": "Paged decode", "ladder_scale_6": "Time"}
    app = open_page("ladder", runs=tmp_path / "runs", **link)
    assert words(app)[0] == "Ladder, time of one call, ms" and app.dataframe[0].value["step"].nunique() == 10
    assert "python -m experiments run ceilings" in [code.value for code in app.code]


def test_a_ladder_without_any_result_is_a_sentence(open_page, tmp_path, lines):
    lost = [suite_rows.failed(row, "incorrect", "why") for row in lines]
    suite_rows.write(tmp_path / "runs", "ladder", lost)
    app = open_page("ladder", runs=tmp_path / "runs")
    assert any("no step has a time" in info.value for info in app.info)
    assert len(words(app)) == 1  # closed forms hold whatever became of the row


def test_stale_steps_are_named_and_faint(open_page, tmp_path, lines, monkeypatch):
    suite_rows.write(tmp_path / "runs", "ladder", lines)
    monkeypatch.setattr(data, "current_hashes", lambda: {"flash": "ffffffffffff"})
    app = open_page("ladder", runs=tmp_path / "runs")
    assert any("1 of 13 rows are stale" in caption.value for caption in app.caption)


def test_nothing_and_no_ladder_are_sentences(open_page, tmp_path):
    assert open_page("ladder").info
    made.write(tmp_path / "runs", made.cpu_rows())
    app = open_page("ladder", runs=tmp_path / "runs")
    assert "no ladder" in app.info[0].value and not app.get("vega_lite_chart")
