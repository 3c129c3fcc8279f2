"""The chart builders and the preparation of rows, on made-up rows."""

from __future__ import annotations

import dashboard_rows as made
import numpy as np
import pandas as pd
import pytest

from dashboard import (
    charts,
    charts_decode,
    charts_floor,
    charts_memory,
    charts_order,
    charts_prefill,
    charts_runs,
    labels,
    rows,
    style,
    views,
)

H200 = "NVIDIA H200"


@pytest.fixture(scope="module")
def h200() -> pd.DataFrame:
    return rows.latest(rows.prepare(made.frame(made.h200_rows())))


@pytest.fixture(scope="module")
def cpu() -> pd.DataFrame:
    return rows.latest(rows.prepare(made.frame(made.cpu_rows())))


def family(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    return frame[frame["family"] == name]


def drawn(spec: dict, field: str) -> list:
    """Values of a field in all of a chart's data."""
    return [row[field] for table in spec["datasets"].values() for row in table if pd.notna(row.get(field))]


def walk(node):
    """Every dictionary of a specification."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)


@pytest.fixture(scope="module")
def built(h200) -> dict:
    """Specification of every chart of the made-up H200 run."""
    frame, prefill, decode = h200, family(h200, "prefill"), rows.with_floor(family(h200, "decode"), h200)
    one = prefill[prefill["panel"] == "Llama-3-8B · B1 · full"]
    made_charts = {
        "over_n": charts.over_n(prefill, "tflops", "Prefill throughput, TFLOP/s", 660.0, "ceiling"),
        "dots": charts.dots(prefill, "tflops", "Prefill throughput, TFLOP/s", 660.0, "ceiling"),
        "peak_over_n": charts_memory.peak_over_n(one),
        "pareto": charts_memory.pareto(one[one["n"] == 8192]),
        "pages": charts_decode.over_pages(decode, "gbps"),
        "pages, time": charts_decode.over_pages(decode, "measured_time_us"),
        "ragged": charts_decode.over_pages(decode[decode["ragged"]], "measured_time_us", "ragged batches"),
        "glance": charts_decode.at_a_glance(decode),
        "floor": charts_floor.over_floor(decode),
        "order": charts_order.order_cost(decode),
        "throughput": charts_prefill.throughput(prefill[prefill["n"] == 32768], 660.0, "mma.sync probe"),
        "bytes": charts.over_bytes(family(frame, "probe")),
        "statuses": charts_runs.statuses(frame),
        "timeline": charts_runs.timeline(frame),
    }
    return {name: chart.to_dict() for name, chart in made_charts.items()}


def test_every_chart_has_title_kind_and_description(built):
    for name, spec in built.items():
        assert spec["title"]["text"] and spec["title"]["subtitle"], name
        assert len(spec["description"]) > 20, name


def test_kernels_keep_their_colour_whatever_is_filtered(h200):
    prefill = family(h200, "prefill")
    for kept in (prefill, prefill[prefill["kernel"] == "flash"]):
        spec = charts.dots(kept, "tflops", "words").to_dict()
        scales = [node["scale"] for node in walk(spec) if node.get("field") == "kernel" and "scale" in node]
        colours = [scale for scale in scales if str(scale["range"][0]).startswith("#")]
        assert colours and all(
            dict(zip(scale["domain"], scale["range"]))["flash"] == style.BLUE for scale in colours
        )


def test_legend_lists_only_what_is_shown(h200):
    spec = charts.dots(family(h200, "decode"), "gbps", "words").to_dict()
    title = "kernel (bytes modelled)"
    assert {tuple(node["values"]) for node in walk(spec) if node.get("title") == title} == {("paged",)}


def test_unknown_kernels_get_a_colour_and_shape_each():
    table = style.kernel_table(["mine", "yours", "flash"])
    assert table["mine"] != table["yours"] and table["flash"] == style.KERNELS["flash"]
    assert table == style.kernel_table(["yours", "mine"])


def test_failures_are_written_into_the_chart(built):
    for name in ("over_n", "dots", "peak_over_n", "pages", "throughput"):
        texts = drawn(built[name], "text")
        assert any("oom" in text or "timeout" in text for text in texts), name


def test_pareto_writes_what_ran_out_of_memory(h200):
    prefill = family(h200, "prefill")
    one = prefill[(prefill["panel"] == "Llama-3-8B · B1 · full") & (prefill["n"] == 32768)]
    assert drawn(charts_memory.pareto(one).to_dict(), "text") == ["✕ standard: oom"]


def test_log_axes_hold_positive_values_only(h200):
    prefill = family(h200, "prefill").copy()
    prefill.loc[prefill.index[:3], ["n", "peak_gb", "formula_gb"]] = [0, -1, 0]
    spec = charts_memory.peak_over_n(prefill).to_dict()
    assert min(drawn(spec, "n")) > 0 and min(drawn(spec, "gb")) > 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, -1.0])
def test_times_without_meaning_draw_nothing(value):
    row = made.prefill(made.Maker("r", "quick"), ("flash",), "Llama-3-8B", 4096, True)[0]
    row.update(measured_time_us=value, measured_tflops=value, modelled_gbps=value)
    frame = rows.prepare(made.frame([row]))
    assert charts.dots(frame, "tflops", "words") is None
    assert charts.over_n(frame, "tflops", "words") is None


def test_quartiles_of_a_rate_surround_it(h200):
    good = rows.ok(family(h200, "prefill"))
    assert (good["tflops_low"] <= good["tflops"]).all() and (good["tflops"] <= good["tflops_high"]).all()
    expected = good["modelled_flops"] / good["measured_time_q3_us"] / 1e6
    assert np.allclose(good["tflops_low"], expected)


def test_measured_and_modelled_memory_use_different_marks(built):
    spec = built["peak_over_n"]
    marks = {}
    for layer in spec["layer"]:
        sources = {row.get("source") for row in spec["datasets"][layer["data"]["name"]]}
        for source in sources & {charts_memory.MEASURED_PEAK, charts_memory.FORMULA}:
            marks.setdefault(source, set()).add(layer["mark"]["type"])
    assert marks[charts_memory.FORMULA] == {"line", "text"}  # the text is the line's name
    assert marks[charts_memory.MEASURED_PEAK] == {"point"}


def test_counted_and_modelled_bytes_use_different_shapes(cpu):
    spec = charts_runs.counted_against_modelled(cpu).to_dict()
    assert spec["encoding"]["shape"]["scale"]["domain"] == [charts_runs.COUNTED, charts_runs.MODELLED]
    assert "4 of 6 cases" in spec["title"]["subtitle"]


def test_a_rate_of_modelled_bytes_is_not_called_measured(h200):
    decode, probes = (family(h200, name) for name in ("decode", "probe"))
    made = [charts.dots(decode, "gbps", "words"), charts_decode.over_pages(decode, "gbps"),
            charts.over_bytes(probes)]
    for chart in made:
        spec = chart.to_dict()
        assert "bytes modelled, time measured on" in str(spec["title"]["subtitle"])
        assert "kernel (measured)" not in str(spec) and "measured points" not in spec["description"]
    spec = charts.dots(family(h200, "prefill"), "tflops", "words").to_dict()
    assert str(spec["title"]["subtitle"]).count("measured on") == 1 and "bytes" not in str(spec["title"])


def test_cpu_rows_have_no_time_to_draw(cpu):
    assert charts.dots(cpu, "tflops", "words") is None
    assert charts_decode.over_pages(cpu, "gbps") is None


def test_ceiling_is_the_devices_own(h200):
    assert rows.ceiling(h200, "read", "gbps", H200) == pytest.approx(4300, rel=0.05)
    assert np.isnan(rows.ceiling(h200, "read", "gbps", "another card"))


def test_floor_follows_the_read_probe(h200):
    probe = made.Maker("c", "ceilings")
    times = {10**6: 5.0, 10**8: 30.0, 10**9: 250.0}
    reads = [
        probe.row(
            family="probe", kernel="read", bytes=size, modelled_bytes_loaded=size, measured_time_us=time
        )
        for size, time in times.items()
    ]
    everything = rows.prepare(made.frame(reads))
    wanted = everything.assign(modelled_bytes=[10**5, 10**8, 2 * 10**9])
    assert rows.floor_us(wanted, everything) == pytest.approx([0.5, 30.0, 500.0])
    assert np.isnan(rows.floor_us(wanted.assign(device="another card"), everything)).all()


def test_pareto_front():
    frame = pd.DataFrame(
        {"cost": [1, 2, 2, 3, 4, np.nan], "gain": [5, 9, 7, 8, 10, 99]}, index=list("abcdef")
    )
    assert list(frame.index[rows.pareto(frame, "cost", "gain")]) == ["a", "b", "e"]


def test_order_ratio_needs_both_orders(h200):
    decode = family(h200, "decode")
    ratios = charts_order.order_ratios(decode)
    assert len(ratios) == 18 and ratios["ratio"].between(0.9, 1.2).all()
    assert charts_order.order_ratios(decode[decode["page_order"] == "sorted"]).empty


def test_latest_attempt_wins():
    first = made.Maker("r", "quick").row(kernel="flash", status="crash")
    second = {**first, "attempt": 2, "status": "ok"}
    other = {**first, "run_id": "s"}
    frame = rows.latest(rows.prepare(made.frame([first, second, other])))
    assert sorted(zip(frame["run_id"], frame["status"])) == [("r", "ok"), ("s", "crash")]


def test_a_panel_says_once_why_marks_are_missing():
    lost = pd.DataFrame({"panel": ["1K", "1K", "1K", "4K"], "page_size": [16, 64, 64, 16], "kernel": ["a", "a", "b", "a"],
                         "text": ["✕ oom", "✕ oom", "✕ oom", "✕ timeout"]})
    assert list(rows.said_once(lost)["text"]) == ["✕", "✕ oom", "✕ oom", "✕ timeout"]


def test_times_are_utc(h200):
    assert str(h200["started_at"].dt.tz) == "UTC"
    spec = charts_runs.timeline(h200).to_dict()
    assert spec["encoding"]["x"]["scale"]["type"] == "utc" and "UTC" in spec["title"]["subtitle"]


def test_table_drops_empty_columns_and_names_kinds(h200, cpu):
    timed = views.table(family(h200, "decode"))
    assert "measured median, µs" in timed and "counted loaded, B" not in timed
    counted = views.table(cpu)
    assert "counted loaded, B" in counted and "measured median, µs" not in counted


def test_commands_quote_the_suite():
    assert views.commands(pd.DataFrame({"suite": ["memory", "my suite", ""]})) == [
        "python -m experiments run memory",
        "python -m experiments run 'my suite'",
    ]


def test_commands_are_those_of_the_manifest():
    frame = pd.DataFrame({"suite": ["memory"] * 3, "command": ["run it --limit 3", "", "run it --limit 3"]})
    assert views.commands(frame) == ["run it --limit 3"]


def test_labels():
    assert [labels.count(value) for value in (1024, 1000, 131072, np.nan)] == ["1K", "1000", "128K", "?"]
    assert [labels.size(value) for value in (2**30, 999, np.nan)] == ["1.07 GB", "999 B", "?"]
