"""The page Claims and its charts: verdicts by the chosen runs, with none at all, and by stale rows."""

from __future__ import annotations

import json
from pathlib import Path

import claims_rows as made
import pytest
from claims_rows import chunks, ladder
from dashboard_pages import opener, words
from recorded_today import as_of_today

from dashboard import asking, charts_claims, data, style
from experiments import store
from experiments.catalog import current_hashes
from experiments.claims import triage
from experiments.claims.findings import VERDICTS
from experiments.claims.judging import judge

GLANCE, QUOTED = "Claims of the articles and their verdicts", "What was found over what the articles quote"


@pytest.fixture
def open_page(tmp_path, monkeypatch):
    """Runs one page on the given folders; see `dashboard_pages.opener`."""
    return opener(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with one run: a ladder that confirms claim 2's seventy times."""
    folder = tmp_path_factory.mktemp("runs") / "ladder"
    folder.mkdir()
    store.write_manifest(folder, {"run_id": "run-1", "suite": "ladder"})
    store.write_part(folder, ladder(7000, 130), {"run_id": "run-1"})
    return folder.parent


def counted(app) -> dict[str, str]:
    """Verdict → number of claims."""
    return {metric.label.split(" ", 1)[1]: metric.value for metric in app.metric}


def test_page_shows_verdicts_at_a_glance_and_beside_the_quoted(open_page, runs):
    app = open_page("claims", runs=runs)
    assert words(app) == [GLANCE, QUOTED]
    told = counted(app)
    assert set(told) == set(VERDICTS) and sum(map(int, told.values())) == 44
    assert any("Judged by 3 rows" in caption.value for caption in app.caption)
    assert all(len(chart.proto.alt) > 20 for chart in app.get("vega_lite_chart"))


def test_without_runs_arithmetic_answers(open_page):
    app = open_page("claims", claim="24")
    assert "only arithmetic answers" in app.info[0].value
    assert words(app) == [GLANCE, QUOTED] and int(counted(app)["refuted"]) >= 3
    assert any("not 53.7 GB" in text.value for text in app.markdown)


def test_a_link_opens_a_claim_with_its_rows_and_command(open_page, runs):
    app = open_page("claims", runs=runs, claim="2")
    assert app.selectbox(key="claim").value == "2"
    assert any(text.value.endswith("· confirmed") for text in app.markdown)
    behind = [frame.value for frame in app.dataframe if "case id" in frame.value]
    assert behind and set(behind[0]["run"]) == {"run-1"} and set(behind[0]["how known"]) == {"measured"}
    assert any("claims --claim 2" in code.value for code in app.code)


def test_a_link_to_no_claim_opens_the_page(open_page, runs):
    assert open_page("claims", runs=runs, claim="99").selectbox(key="claim").value in map(str, range(1, 45))


def test_claims_are_chosen_by_verdict(open_page, runs):
    table = open_page("claims", runs=runs, verdict="refuted").dataframe[1].value
    assert set(table["verdict"]) == {"✗ refuted"} and {24, 36, 42} <= set(table["claim"])


def test_stale_rows_are_named_and_judge_nothing(open_page, runs, monkeypatch):
    app = open_page("claims", runs=runs, claim="2")
    fresh = counted(app)
    assert any("unknown" in caption.value for caption in app.caption)
    monkeypatch.setattr(data, "current_hashes", lambda: {"chunked_unfused": "ffffffffffff"})
    app.run()
    assert any("*stale*" in caption.value for caption in app.caption)
    assert int(counted(app)["not tested"]) > int(fresh["not tested"])


def test_without_its_arithmetic_the_page_stands(open_page, monkeypatch):
    monkeypatch.setattr(data, "figures", lambda: "[]")
    app = open_page("claims", claim="24")
    assert counted(app)["not tested"] == "44" and words(app) == [GLANCE]


@pytest.fixture(scope="module")
def found():
    rows = ladder(7000, 170) + chunks(1, 2, 3, 4, 5, 6)
    return judge(made.the_book(), made.frame(rows), {}, {}, {})


def test_a_part_stands_beside_its_quoted_number(found):
    table = charts_claims.compared(found).set_index("label")
    seventy = table.loc[next(label for label in table.index if label.startswith("2 · Chunks of 128"))]
    assert seventy["ratio"] == pytest.approx(70 / 67.6) and seventy["known"] == "measured"
    assert seventy["found"] == "70×" and seventy["verdict"] == "confirmed"
    between = table[(table["quoted_low"] < table["quoted_high"])]
    assert ((between["quoted_low"] * between["quoted_high"]).round(9) == 1).all()


def test_each_way_of_knowing_has_a_mark_of_its_own(found):
    spec = charts_claims.against_quoted(charts_claims.compared(found)).to_dict()
    marks = {}
    for layer in spec["layer"]:
        for step in layer.get("transform", ()):
            if "known" in str(step.get("filter")):
                marks[step["filter"]] = str({k: v for k, v in layer["mark"].items() if k != "tooltip"})
    assert len(marks) == len(set(marks.values())) == len(style.KNOWN)


def test_every_claim_is_a_tile(found):
    table = charts_claims.tiles(found)
    assert sorted(table["number"]) == list(range(1, 45))
    assert not table.duplicated(["row", "column"]).any()
    assert all(text.startswith(style.VERDICTS[verdict][1]) for text, verdict in
               zip(table["text"], table["verdict"]))


def test_what_diagnose_names_is_asked_of_a_child(open_page, monkeypatch, tmp_path):
    shipped = tmp_path / "shipped"
    as_of_today(shipped, "ladder", "ceilings", "block-size", "precision", "layout", "crossover", "scaling")
    app = open_page("claims", shipped=shipped, claim="8")
    assert any("have a fault named" in text.value for text in app.markdown)
    known = [set(frame.value["how known"]) for frame in app.dataframe if "case id" in frame.value]
    assert known == [{"measured"}, {"measured"}, {"inferred"}, {"inferred"}]
    (eight,) = (line for line in app.dataframe[1].value.to_dict("records") if line["claim"] == 8)
    assert eight["how known"] == "measured, inferred"
    paths = (str(shipped / "ladder"), str(shipped / "ceilings"))
    told = {(run, case): cause for run, case, cause in json.loads(data.causes(paths, ()))}
    assert told == triage.causes(store.read_runs(list(map(Path, paths))).frame, current_hashes())
    assert set(told.values()) > {"", "score-traffic", "launches", "unexplained"}
    monkeypatch.setattr(asking.sys, "executable", "/no/python")
    asking.causes.clear()
    assert data.causes(paths, ()) == "[]"


def test_nothing_to_draw_is_no_chart(found):
    assert charts_claims.glance([]) is None
    assert charts_claims.against_quoted(charts_claims.compared([])) is None
