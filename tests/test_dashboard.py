"""The dashboard's pages, run without a browser: recorded-like runs, nothing at all, and damaged files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import dashboard_rows as made
import pytest
from dashboard_pages import APP, opener, specs, words

from dashboard import data
from experiments import store

PAGES = ("overview", "memory", "decode", "health")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("recorded")
    made.write(root / "h200", made.h200_rows())
    made.write(root / "cpu", made.cpu_rows())
    return root


@pytest.fixture
def open_page(tmp_path, monkeypatch):
    """Runs one page on the given folders; see `dashboard_pages.opener`."""
    return opener(tmp_path, monkeypatch)


def test_overview_shows_each_family_with_its_unit(open_page, recorded):
    app = open_page("overview", shipped=recorded)
    assert words(app) == [
        "Prefill throughput, TFLOP/s",
        "Peak memory over N, GB",
        "Decode time over page size, µs",
        "Cases by suite and status",
    ]
    assert {metric.label: metric.value for metric in app.metric}["Cases"] == "157"


def test_every_chart_has_alternative_text(open_page, recorded):
    for page in PAGES:
        charts = open_page(page, shipped=recorded).get("vega_lite_chart")
        assert charts and all(len(chart.proto.alt) > 20 for chart in charts)


def test_overview_of_the_cpu_machine_counts_and_times_nothing(open_page, recorded):
    app = open_page("overview", shipped=recorded / "cpu")
    assert words(app) == [
        "Global bytes a run requests: counted and modelled",
        "Cases by suite and status",
    ]
    assert "models no time" in app.info[0].value


def test_memory_page_opens_where_most_kernels_ran(open_page, recorded):
    app = open_page("memory", shipped=recorded)
    assert words(app)[0] == "Peak memory over N, GB"
    assert words(app)[1].startswith("Throughput against peak memory: Llama-3-8B · B1 · N8K")


def test_decode_page_shows_pages_order_and_ragged_batches(open_page, recorded):
    app = open_page("decode", shipped=recorded)
    assert words(app)[:5] == [
        "Decode time over the read floor",
        "Decode of batches of one length over page size, time in µs",
        "Decode of real request lengths over page size, time in µs",
        "Time with shuffled pages ÷ time with sorted pages",
        "What the device can move, GB/s, over bytes moved at once",
    ]


def test_decode_page_shows_each_width_of_a_load_in_a_row(open_page, tmp_path):
    layout = made.Maker("layout-1", "layout")
    loads = [
        layout.row(family="probe", kernel="words", bytes=size, modelled_bytes_loaded=size,
                   constants=f'{{"width": {width}}}', time_us=size / width / 3e5)
        for size in (2**30, 2**26) for width in (16, 2, 8, 4)
    ]
    app = open_page("decode", runs=made.write(tmp_path / "runs", {**made.h200_rows(), "layout": loads}))
    assert words(app)[-2:] == ["What the device can move, GB/s, over bytes moved at once",
                               "Equal bytes by bytes a load, GB/s"]
    moved, widths = map(json.dumps, specs(app)[-2:])
    rows = [f"{size} · width={width}" for size in ("67.1 MB", "1.07 GB") for width in (2, 4, 8, 16)]
    assert json.dumps(rows) in widths and "width=" not in moved


def test_a_recorded_run_says_so_where_an_own_run_has_its_name(open_page, recorded):
    app = open_page("overview", runs=recorded / "cpu", shipped=recorded / "cpu")
    assert app.multiselect(key="run").options == ["quick", "recorded/quick"]


@pytest.mark.parametrize("page", ["decode", "health"])
def test_a_run_that_lacks_cases_is_named(open_page, tmp_path, page):
    runs = made.write(tmp_path / "runs", made.h200_rows())
    assert not any("planned" in caption.value for caption in open_page(page, runs=runs).caption)
    store.write_manifest(runs / "page-size", {"run_id": "page-size-1", "cases": [{}] * 60})
    said = [caption.value for caption in open_page(page, runs=runs).caption if "planned" in caption.value]
    assert len(said) == 1 and "holds 40 of the 60 cases" in said[0]


def test_odd_manifests_are_read(open_page, tmp_path):
    runs = made.write(tmp_path / "runs", {"quick": made.cpu_rows()["quick"]})
    for odd in ({"cases": 7}, {"environment": {"gpus": []}}, {"environment": None}):
        store.write_manifest(runs / "quick", {"run_id": "quick-cpu", **odd})
        assert open_page("health", runs=runs).get("vega_lite_chart")


def test_links_choose_runs(open_page, recorded):
    app = open_page("overview", shipped=recorded, run="cpu/quick")
    assert app.multiselect(key="run").value == ["cpu/quick"]
    assert {metric.label: metric.value for metric in app.metric}["Cases"] == "7"


def test_own_runs_come_before_recorded_ones(open_page, recorded):
    app = open_page("overview", runs=recorded / "cpu", shipped=recorded / "h200")
    assert app.multiselect(key="run").value == ["quick"]


def test_opens_on_the_newest_own_run_of_a_suite(open_page, recorded, tmp_path):
    lines = made.cpu_rows()["quick"]
    for place, name in enumerate(("zzz", "aaa")):
        run = made.write(tmp_path / "runs" / name, {"quick": lines}) / "quick"
        store.write_manifest(run, {"run_id": "quick-cpu", "suite": "quick", "device": {"device": "cpu"}})
        os.utime(run, (place, place))
    app = open_page("overview", runs=tmp_path / "runs", shipped=recorded)
    assert app.multiselect(key="run").value == ["aaa/quick"]


def test_opens_on_all_shards_of_the_newest_run(open_page, recorded, tmp_path):
    lines = made.cpu_rows()["quick"]
    shards = {"a": (2, 2), "b": (1, 2), "c": (1, 2), "d": (1, 3), "whole": None}
    for age, (name, shard) in enumerate(shards.items()):  # the newest comes first
        run = made.write(tmp_path / "runs" / name, {"quick": lines}) / "quick"
        device = {"device": "cpu", "device_uuid": f"GPU-{age}"}
        part = shard and {"index": shard[0], "of": shard[1], "cases": 9}
        store.write_manifest(run, {"run_id": name, "suite": "quick", "device": device, "shard": part})
        os.utime(run, (99 - age, 99 - age))
    app = open_page("overview", runs=tmp_path / "runs", shipped=recorded)
    assert sorted(app.multiselect(key="run").value) == ["a/quick", "b/quick"]


def test_table_download_and_command_stand_under_a_chart(open_page, recorded):
    app = open_page("memory", shipped=recorded)
    assert "python -m experiments run memory" in [code.value for code in app.code]
    table = app.dataframe[0].value
    assert "oom" in set(table["status"]) and "measured peak, GB" in table
    assert app.get("download_button")


@pytest.mark.parametrize("page", PAGES)
def test_nothing_to_show_is_a_sentence(open_page, page):
    app = open_page(page)
    assert app.info and not app.get("vega_lite_chart")


@pytest.mark.parametrize("page", PAGES)
def test_a_cut_parquet_is_set_aside(open_page, recorded, tmp_path, page):
    whole = (recorded / "h200" / "memory" / store.PART).read_bytes()
    run = tmp_path / "runs" / "cut é"
    run.mkdir(parents=True)
    (run / store.PART).write_bytes(whole[: len(whole) // 2])
    app = open_page(page, runs=tmp_path / "runs")
    assert "1 unreadable file" in app.sidebar.warning[0].value
    if page == "health":
        assert "cannot be read" in app.table[0].value["why"].iloc[0]


@pytest.mark.parametrize("page", ["memory", "health"])
def test_a_damaged_run_does_not_hide_the_others(open_page, tmp_path, page):
    made.write(tmp_path / "runs", made.h200_rows())
    (tmp_path / "runs" / "page-size" / store.PART).write_bytes(b"")
    app = open_page(page, runs=tmp_path / "runs")
    assert app.get("vega_lite_chart")


def one_row(**values) -> dict:
    return made.Maker("one", "quick").row(**values)


ODD = {
    "all columns null": [
        {**dict.fromkeys(made.schema.NAMES), "case_id": "1", "attempt": 1, "status": "crash"}
    ],
    "one prefill row": made.prefill(made.Maker("one", "quick"), ("flash",), "Llama-3-8B", 4096, True),
    "one decode row": [made.decode(made.Maker("one", "page-size"), 4, 1024, 16, "sorted")],
    "unknown GPU and kernel": [
        one_row(
            family="prefill",
            kernel="mine",
            device="Card 9000",
            b=1,
            h=1,
            hkv=1,
            m=64,
            n=64,
            d=64,
            time_us=5.0,
            modelled_flops=10**9,
            measured_peak_pool_bytes=10**6,
        )
    ],
    "only failures": [
        one_row(family=family, kernel="flash", b=1, n=64, page_size=16, status=status, error="why")
        for family in ("prefill", "decode")
        for status in ("oom", "incorrect", "throttled")
    ],
    "no work": [
        one_row(
            family="prefill", kernel="flash", b=0, h=0, hkv=0, m=0, n=0, d=64, time_us=1.0, modelled_flops=0
        )
    ],
}


WHERE = {
    "one prefill row": ("overview", "memory"),
    "one decode row": ("overview", "decode"),
    "unknown GPU and kernel": ("overview", "memory"),
    "no work": ("overview", "memory"),
}


@pytest.mark.parametrize("case, page", [(case, page) for case in ODD for page in WHERE.get(case, PAGES)])
def test_odd_rows_render(open_page, tmp_path, page, case):
    made.write(tmp_path / "runs", {"odd": [{**row, "run_id": "odd"} for row in ODD[case]]})
    app = open_page(page, runs=tmp_path / "runs")
    assert app.info or app.get("vega_lite_chart")


@pytest.mark.parametrize("page", ["ladder", "block_size", "numerics", "roofline"])
def test_odd_rows_together_render(open_page, tmp_path, page):
    """With constants that are none, on the pages that read them."""
    odd = [{**row, "run_id": case, "constants_used": "[", "rung": "0"} for case in ODD for row in ODD[case]]
    made.write(tmp_path / "runs", {"odd": odd})
    app = open_page(page, runs=tmp_path / "runs")
    assert app.info or app.get("vega_lite_chart")


def test_a_run_in_progress_is_read_from_its_journal(open_page, tmp_path):
    run = tmp_path / "runs" / "now"
    run.mkdir(parents=True)
    journal = store.Journal(run / "journal-0.jsonl")
    journal.append(made.prefill(made.Maker("now", "quick"), ("flash",), "Llama-3-8B", 4096, True)[0])
    journal.close()
    with open(run / "journal-0.jsonl", "a", encoding="utf-8") as handle:
        handle.write('{"run_id": "now", "case')
    app = open_page("health", runs=tmp_path / "runs")
    values = {metric.label: metric.value for metric in app.metric}
    assert values["Torn journal lines"] == "1" and values["Cases not ok"] == "0"


def test_without_sources_staleness_is_unknown(open_page, recorded):
    values = {metric.label: metric.value for metric in open_page("health", shipped=recorded).metric}
    assert values["Stale rows"] == "unknown"


def test_stale_rows_are_named(open_page, recorded, monkeypatch):
    app = open_page("memory", shipped=recorded)
    assert not any("rows are stale" in caption.value for caption in app.caption)
    monkeypatch.setattr(data, "current_hashes", lambda: {"flash": "ffffffffffff"})
    app.run()
    assert any("rows are stale" in caption.value for caption in app.caption)
    app.switch_page("screens/health.py").run()
    values = {metric.label: metric.value for metric in app.metric}
    assert values["Stale rows"] == "27"


def test_a_changed_file_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "current_hashes", dict)
    root = made.write(tmp_path, {"quick": made.cpu_rows()["quick"][:2]})
    assert len(data.load(data.find(root, data.MINE)).frame) == 2
    store.write_part(root / "quick", made.cpu_rows()["quick"], {"run_id": "quick-cpu"})
    assert len(data.load(data.find(root, data.MINE)).frame) == 7


SEEN = """
import sys
from streamlit.testing.v1 import AppTest
from dashboard import data
data.RECORDED = data.RECORDED / "cpu"

def show(page, *names):
    app = AppTest.from_file(sys.argv[1], default_timeout=60)
    if page:
        app.switch_page(f"screens/{page}.py")
    app.run()
    assert not app.exception and app.metric, app
    print([name for name in sys.modules if name.startswith(names)])

show("kernel", "cupy", "cuattn")
show("", "cupy", "cuattn.gpu", "cuattn.kernels")
show("claims", "cupy", "cuattn.gpu", "cuattn.kernels")
"""


def test_no_kernel_and_no_cupy_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", SEEN, APP], capture_output=True, text=True, cwd=data.ROOT, timeout=120
    )
    assert done.stdout.split() == ["[]"] * 3, done.stderr
