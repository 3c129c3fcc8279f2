"""The page Kernel: recorded explanations, none at all, damaged and odd ones; and its charts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from dashboard_pages import opener, specs, words

from dashboard import charts_kernel, data, source_view, style
from experiments.explain import facts, saved

RECORDED = data.RECORDED / "cpu" / "explain"
KERNELS = ("append", "copy", "flash", "flash_hopper", "paged", "standard")


@pytest.fixture(scope="module")
def documents() -> dict[str, dict]:
    """The explanations that ship with the project."""
    found = {path.parent.name: saved.read(path) for path in saved.find([RECORDED])}
    assert tuple(sorted(found)) == KERNELS
    return found


@pytest.fixture
def open_page(tmp_path, monkeypatch):
    """Runs the page on the given folders; see `dashboard_pages.opener`."""
    return opener(tmp_path, monkeypatch)


def put(folder: Path, document: dict, **changes) -> Path:
    """The document, changed, in a folder of its own; returns the folder above it."""
    folder.mkdir(parents=True)
    text = saved.dumped({**document, **changes})
    (folder / saved.DOCUMENT).write_text(text, encoding="utf-8")
    return folder.parent


@pytest.mark.parametrize("kernel", KERNELS)
def test_recorded_explanations_are_small_and_right(documents, kernel):
    document = documents[kernel]
    assert (RECORDED / kernel / saved.DOCUMENT).stat().st_size < 100_000
    assert document["verdict"]["ok"] and all(row["equal"] for row in document["totals"])
    assert document["command"].endswith(f"--out experiments/recorded/cpu/explain/{kernel}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_has_its_charts_with_words_for_screen_readers(open_page, documents, kernel):
    app = open_page("kernel", shipped=RECORDED, explained_kernel=kernel)
    titles = words(app)
    assert titles[0] == "Global bytes requested by each call site"
    assert any(title.startswith("Steps of ") for title in titles)
    uses_shared = any(part["members"] for part in documents[kernel]["shared"])
    assert any(title.startswith("Shared memory of ") for title in titles) == uses_shared
    charts = app.get("vega_lite_chart")
    assert all(len(chart.proto.alt) > 20 for chart in charts)
    assert documents[kernel]["command"] in [code.value for code in app.code]
    assert app.get("download_button") and len(app.dataframe) >= 3


def test_opens_on_flash_and_says_what_it_ran_on(open_page, documents):
    app = open_page("kernel", shipped=RECORDED)
    assert app.selectbox(key="explained_kernel").value == "flash"
    assert documents["flash"]["title"] in app.markdown[1].value
    shown = {metric.label: metric.value for metric in app.metric}
    assert shown["Counted loaded, B"] == f"{documents['flash']['counters']['bytes_loaded']:,}"
    assert "to the byte" in app.success[0].value


def html(app) -> str:
    return app.get("html")[0].proto.body


def test_the_source_is_the_documents_own_with_counts_beside_it(open_page, documents):
    text = html(open_page("kernel", shipped=RECORDED))
    source = documents["flash"]["files"]["prefill/flash.cu"]
    assert text.count("<tr") == len(source.splitlines()) + 1
    assert "load_tile_async&lt;THREADS&gt;" in text
    counts = source_view.counts_by_line(documents["flash"], "prefill/flash.cu")
    for number, row in counts.items():
        assert f'<td class="number">{number}</td>' in text
        assert not row["global, B"] or f">{row['global, B']:,}</td>" in text
    total = documents["flash"]["counters"]
    assert sum(row["global, B"] for row in counts.values()) == total["bytes_loaded"] + total["bytes_stored"]


def test_only_lines_with_counts(open_page, documents):
    app = open_page("kernel", shipped=RECORDED, explained_kernel="paged")
    app.toggle(key="explained_only").set_value(True).run()
    counts = source_view.counts_by_line(documents["paged"], "decode/paged.cu")
    assert html(app).count("<tr") == len(counts) + 1
    app.selectbox(key="explained_file").set_value("decode/combine.cu").run()
    assert "whole.merge" not in html(app) and "g_part_lse.at(b, h)" in html(app)


def test_nothing_in_a_source_becomes_markup(documents):
    file = "prefill/flash.cu"
    document = {**documents["flash"], "files": {file: "<script>alert(1)</script> & </td>"}}
    text = source_view.view(document, file)
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;/td&gt;" in text


def test_stale_explanations_say_so(open_page, monkeypatch, documents):
    app = open_page("kernel", shipped=RECORDED)
    assert any("is unknown" in caption.value for caption in app.caption) and not app.main.warning
    monkeypatch.setattr(data, "current_hashes", lambda: {"flash": "ffffffffffff"})
    app.run()
    assert app.main.warning[0].value.startswith("*Stale*")
    assert "prefill/flash.cu" in html(app)
    monkeypatch.setattr(data, "current_hashes", lambda: {"flash": documents["flash"]["source_hash"]})
    app.run()
    assert not app.main.warning and not any("is unknown" in caption.value for caption in app.caption)


def test_a_kernel_of_several_files_is_stale_when_one_has_changed(monkeypatch, documents):
    first, second = documents["paged"]["source_hash"].split("+")
    for hashes, stale in (({}, None), ({"paged": f"{second}+0+{first}"}, False), ({"paged": first}, True)):
        monkeypatch.setattr(data, "current_hashes", lambda hashes=hashes: hashes)
        assert data._stale(documents["paged"]) is stale


def test_without_explanations_there_is_a_command(open_page):
    app = open_page("kernel")
    assert "no explanation" in app.main.info[0].value and not app.get("vega_lite_chart")
    assert app.code[0].value == "python -m experiments explain flash --out runs/explain-flash"


@pytest.mark.parametrize("text, reason", [
    ("{", "is not JSON"), ("[]", "is no explanation"),
    ('{"format": "cuattn explanation"}', "schema version None"),
    ('{"format": "cuattn explanation", "schema_version": 99}', "schema version 99"),
    ('{"format": "cuattn explanation", "schema_version": 1}', "has no kernel"),
])
def test_an_unreadable_document_is_set_aside(open_page, tmp_path, documents, text, reason):
    runs = put(tmp_path / "runs" / "explain-append", documents["append"])
    (runs / "explain-cut é").mkdir()
    (runs / "explain-cut é" / saved.DOCUMENT).write_text(text)
    app = open_page("kernel", runs=runs)
    (warning,) = app.main.warning
    assert "explain-cut é" in warning.value and reason in warning.value
    assert words(app)[0] == "Global bytes requested by each call site"


def test_own_explanations_come_first_and_newest_first(open_page, tmp_path, documents):
    for place, title in enumerate(("old", "new")):
        runs = put(tmp_path / "runs" / title, documents["flash"], title=title)
        os.utime(runs / title / saved.DOCUMENT, (place, place))
    app = open_page("kernel", runs=runs, shipped=RECORDED)
    assert app.selectbox(key="explained_on_flash").options == [
        "new", "old", f"{documents['flash']['title']} (recorded)"]
    app.selectbox(key="explained_on_flash").set_value("old").run()
    assert " on old." in app.markdown[1].value


def test_explanations_of_one_shape_are_told_apart(open_page, tmp_path, documents):
    for name in ("a", "b"):
        runs = put(tmp_path / "runs" / name, documents["flash"])
    options = open_page("kernel", runs=runs).selectbox(key="explained_on_flash").options
    assert len(options) == 2 and all(documents["flash"]["title"] in option for option in options)


def test_a_folder_that_is_both_own_and_recorded_is_shown_once(tmp_path, monkeypatch, documents):
    runs = put(tmp_path / "runs" / "one", documents["append"])
    monkeypatch.setenv(data.RUNS_VARIABLE, str(runs))
    monkeypatch.setattr(data, "RECORDED", runs)
    monkeypatch.setattr(data, "current_hashes", dict)
    assert [one.origin for one in data.explanations()[0]] == [data.MINE]


ODD = {
    "no launch": {"plan": {"constants": {}, "scratch_bytes": 0, "launches": []}, "sites": [], "shared": [],
                  "timeline": {"block": 0, "steps": [], "chart": {}}},
    "no files": {"files": {}},
    "files of a foreign place": {"files": {"/elsewhere/mine.cu": "int x;"}},
    "a wrong kernel": {"verdict": {"ok": False, "message": "O differs", "max_err": None, "tolerance": 0.1},
                       "intensity": {"flops": 0, "bytes": 0, "flops_per_byte": None, "mma_flops": 0,
                                     "useful_share": None}},
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("kernel", ["flash", "append"])
def test_odd_documents_render(open_page, tmp_path, documents, what, kernel):
    runs = put(tmp_path / "runs" / "odd", documents[kernel], **ODD[what])
    app = open_page("kernel", runs=runs)
    assert app.title[0].value == "Kernel" and not app.main.warning
    if what == "a wrong kernel":
        assert "The result is WRONG: O differs." in app.error[0].value


def drawn(chart) -> list[dict]:
    """All rows a chart holds."""
    return [row for rows in chart.to_dict()["datasets"].values() for row in rows]


def test_sums_stand_beside_closed_forms_and_nothing_else_does(documents):
    chart = charts_kernel.bytes_by_site(documents["paged"])
    rows = drawn(chart)
    closed = {row["label"]: row["closed_form"] for row in rows if row.get("closed_form") is not None}
    totals = {row["what"]: row["closed_form"] for row in documents["paged"]["totals"]}
    assert closed == {"loaded, in all": totals["bytes_loaded"], "stored, in all": totals["bytes_stored"]}
    loaded = {row["label"]: row["bytes"] for row in rows if row.get("access") in facts.LOADS}
    assert sum(loaded.values()) == totals["bytes_loaded"]
    bar, tick, _ = chart.to_dict()["layer"]
    assert bar["mark"]["type"] == "bar" and bar["mark"]["fillOpacity"] < 0.3  # hollow: counted
    assert tick["mark"]["type"] == "point"


def test_a_difference_is_said_in_the_chart(documents):
    totals = [{**row, "equal": False} for row in documents["flash"]["totals"]]
    spec = charts_kernel.bytes_by_site({**documents["flash"], "totals": totals}).to_dict()
    assert "DIFFER" in spec["title"]["subtitle"] and "DIFFER" in spec["description"]


def test_conflicts_are_named_where_there_are_some(documents):
    def said(conflicts: int) -> str:
        sites = [{**site, "conflicts": conflicts if site["access"] == "shared store" else 0}
                 for site in documents["flash"]["sites"]]
        return charts_kernel.conflicts({**documents["flash"], "sites": sites}).to_dict()["title"]["subtitle"]

    assert "7 of " in said(7) and "no call site has a conflict" in said(0)
    assert charts_kernel.conflicts(documents["append"]) is None


def test_the_map_shows_members_and_who_touched_them(documents):
    part = documents["paged"]["shared"][0]
    rows = charts_kernel.shared_rows(documents["paged"], part)
    members = rows[rows["kind"] == charts_kernel.MEMBER]
    assert list(members["label"]) == ["q", "ring[16]", "state[4]"]
    assert members["end"].max() == part["bytes"]
    assert {charts_kernel.WRITTEN, charts_kernel.READ} <= set(rows["kind"])
    assert all(0 <= first < end <= part["bytes"] for first, end in zip(rows["first"], rows["end"]))


def test_the_timeline_has_a_panel_a_quantity_and_one_for_the_barriers(documents):
    spec = charts_kernel.timeline(documents["flash"], 0).to_dict()
    titles = [panel["title"]["text"] for panel in spec["vconcat"]]
    assert titles[0] == "copied, global to shared, B" and titles[-1] == "what ended the step"
    assert "multiplied, mma" in titles and spec["resolve"]["scale"]["color"] == "independent"
    assert charts_kernel.timeline(documents["flash"], 7) is None


def test_every_chart_looks_like_the_others(open_page):
    for spec in specs(open_page("kernel", shipped=RECORDED, explained_kernel="standard")):
        assert spec["title"]["subtitle"] and spec["config"]["axis"]["gridColor"] == style.GRID


def test_the_glossary_is_the_documents(open_page, documents):
    app = open_page("kernel", shipped=RECORDED)
    glossary = next(frame.value for frame in app.dataframe if "means" in frame.value)
    said = json.loads(json.dumps(documents["flash"]["glossary"]))
    assert list(glossary["means"]) == [meaning for kind in ("accesses", "columns", "steps", "counters")
                                       for meaning in said[kind].values()]
