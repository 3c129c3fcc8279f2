"""What a reader should see at one glance: slowdowns, failures on the formula's line, the cost of paging."""

from __future__ import annotations

import json

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
    labels,
    rows,
)


@pytest.fixture(scope="module")
def h200() -> pd.DataFrame:
    return rows.latest(rows.prepare(made.frame(made.h200_rows())))


@pytest.fixture(scope="module")
def decode(h200) -> pd.DataFrame:
    return rows.with_floor(h200[h200["family"] == "decode"], h200)


def prefill(*kernels, n: int = 4096, run: str = "r", **more) -> list[dict]:
    return made.prefill(made.Maker(run, "quick"), kernels, "Llama-3-8B", n, True, **more)


def test_slowdown_is_against_the_fastest_of_the_shape():
    frame = rows.prepare(made.frame(prefill("flash", "cudnn") + prefill("standard", n=131072)))
    table = charts_prefill.slowdowns(frame).set_index("kernel")
    assert table.loc["cudnn", "factor"] == 1.0 and table.loc["cudnn", "fastest"]
    times = frame.set_index("kernel")["measured_time_us"]
    assert table.loc["flash", "factor"] == pytest.approx(times["flash"] / times["cudnn"])
    assert table.loc["flash", "text"] == f"{times['flash'] / times['cudnn']:.1f}×"
    assert table.loc["standard", "text"] == "✕ oom" and np.isnan(table.loc["standard", "factor"])


def test_kernels_are_compared_with_what_ran_beside_them():
    beside = prefill("flash", "standard", "cudnn", run="all")
    alone = prefill("flash", run="alone") + prefill("flash", n=8192, run="alone")
    tuned = prefill("standard", run="all", constants='{"head_group": 4}')
    shared = charts_prefill.compared(rows.prepare(made.frame(beside + alone + tuned)))
    assert set(shared["run_id"]) == {"all"} and sorted(shared["variant"]) == ["cudnn", "flash", "standard"]
    only = charts_prefill.compared(rows.prepare(made.frame(tuned)))
    assert list(only["variant"]) == ["standard head_group=4"]
    assert charts_prefill.compared(rows.prepare(made.frame([]))).empty


def layers(spec: dict, text: str) -> list[list[dict]]:
    """Data of the layers that draw a field of that name as text."""
    found = [
        layer for layer in spec["layer"] if layer.get("encoding", {}).get("text", {}).get("field") == text
    ]
    return [spec["datasets"][layer["data"]["name"]] for layer in found]


def test_a_failure_is_a_cross_where_the_formula_puts_it(h200):
    one = h200[(h200["panel"] == "Llama-3-8B · B1 · full") & (h200["family"] == "prefill")]
    lost = rows.failed(one)
    crosses = layers(charts_memory.peak_over_n(one).to_dict(), "cross")[0]
    assert [row["n"] for row in crosses] == list(lost["n"]) and len(lost)
    assert [row["amount"] for row in crosses] == pytest.approx(list(lost["formula_gb"]))
    without = one.assign(formula_gb=one["formula_gb"].where(one["status"] == "ok"))
    spec = charts_memory.peak_over_n(without).to_dict()
    assert not layers(spec, "cross")
    assert any(row.get("text") == "✕ oom" for table in spec["datasets"].values() for row in table)


def test_memory_of_the_device_is_drawn_where_a_curve_comes_near(h200):
    one = h200[(h200["panel"] == "Llama-3-8B · B1 · full") & (h200["family"] == "prefill")]
    for held, seen in ((150e9, True), (150e12, False), (np.nan, False)):
        spec = charts_memory.peak_over_n(one.assign(device_bytes=held)).to_dict()
        words = [row.get("text", "") for table in spec["datasets"].values() for row in table]
        assert any("memory of the device, 150 GB" in str(text) for text in words) == seen


def test_the_memory_page_draws_what_the_limit_leaves():
    cases = made.prefill(made.Maker("r", "memory"), ["flash", "standard"], "Llama-3-8B", 8192, True)
    limit = {"memory_limit_bytes": 24 * 10**9, "memory_reserve_bytes": 18 * 10**9}
    held = made.frame(cases).assign(device_bytes=150e9, **limit)
    spec = charts_memory.peak_over_n(rows.prepare(held)).to_dict()
    words = [str(row.get("text", "")) for table in spec["datasets"].values() for row in table]
    assert any("what the memory limit leaves, 6" in text for text in words)
    assert not any("memory of the device" in text for text in words)


def test_only_marks_that_would_hide_each_other_move_apart():
    measured = pd.DataFrame(
        {
            "kernel": ["flash", "torch_flash", "torch_cudnn", "torch_math"],
            "n": [4096] * 4,
            "gb": [0.1, 0.1, 0.11, 5.0],
        }
    )
    moved = dict(charts_memory._side_by_side(measured))
    assert moved["flash"] == moved["torch_math"] == 0
    assert moved["torch_flash"] == -moved["torch_cudnn"] != 0


def test_spread_compares_page_sizes_of_one_load_and_order():
    maker = made.Maker("r", "page-size")
    lines = [made.decode(maker, 4, 1024, page, "sorted") for page in (16, 64)]
    for line, time in zip(lines, (100.0, 112.0)):
        line["measured_time_us"] = time
    (said,) = charts_decode.spread(rows.prepare(made.frame(lines)))
    assert "at most 12 % (paged, 4 × 1K)" in said
    assert charts_decode.spread(rows.prepare(made.frame(lines[:1]))) == []


def test_a_kernel_far_slower_does_not_press_the_others_to_the_ground():
    maker = made.Maker("r", "page-size")
    lines = [made.decode(maker, 4, 1024, page, "sorted") for page in (16, 64)]
    for slowest, kind in ((150.0, "linear"), (90_000.0, "log")):
        for line, time in zip(lines, (100.0, slowest)):
            line["measured_time_us"] = time
        good = rows.prepare(made.frame(lines))
        scale = charts_decode._height(good, "measured_time_us", "µs").to_dict()["scale"]
        assert scale.get("type", "linear") == kind and scale.get("zero", False) is (kind == "linear")
        assert charts_decode._height(good, "gbps", "GB/s").to_dict()["scale"] == {"zero": True}


def test_the_floor_is_that_of_the_fewest_bytes():
    """A kernel that copies pages first requests more; that is no floor of the others."""
    maker = made.Maker("r", "page-size")
    lines = [made.decode(maker, 4, 1024, page, "sorted") for page in (16, 64)]
    both = [*lines, *({**line, "kernel": "paged_gather", "case_id": line["case_id"] + "g"} for line in lines)]
    good = rows.prepare(made.frame(both)).assign(floor_us=[10.0, 10.0, 30.0, 30.0])
    glance = charts_decode.at_a_glance(good).to_dict()
    floors = [table for table in glance["datasets"].values() if "measured_time_us" not in table[0]]
    assert [[row["floor_us"] for row in table] for table in floors] == [[10.0, 10.0]]
    panels = json.dumps(charts_decode.over_pages(good, "measured_time_us").to_dict())
    assert '"aggregate": "min", "field": "floor_us"' in panels


def test_names_of_points_are_not_written_over_each_other():
    data = pd.DataFrame({
        "variant": ["flash", "flash", "near", "far", "low"],
        "peak_gb": [0.1, 0.1, 0.11, 3.0, 0.1],
        "tflops": [300.0, 295.0, 299.0, 298.0, 50.0],
        "front": [True, False, False, False, False],
    })  # fmt: skip
    assert list(charts_memory._named(data)["variant"]) == ["flash", "far", "low"]
    assert list(charts_memory._named(data[:1])["variant"]) == ["flash"]


def test_panels_say_how_far_the_floor_is(decode):
    even = decode[~decode["ragged"]]
    names = charts_decode._panel_names(even)
    ratio = (even["measured_time_us"] / even["floor_us"])[even["load"] == "16 × 4K"].median()
    assert names["Llama-3-8B", "16 × 4K"] == f"16 × 4K\n{ratio:.2f} × floor"
    unknown = charts_decode._panel_names(even.assign(floor_us=np.nan))
    assert unknown["Llama-3-8B", "16 × 4K"] == "16 × 4K"


def test_loads_are_set_against_their_floor():
    """Pages of 16, a kernel's own constants, graph replays where there are any; a line through like loads."""
    maker = made.Maker("r", "decode-batch")
    lines = [made.decode(maker, b, 1024, 16, "shuffled") | {"mode": "graph", "measured_time_us": time}
             for b, time in ((1, 12.0), (4, 15.0), (64, 90.0))]
    other = lines[0] | {"case_id": "o", "measured_time_us": 99.0}
    lines += [other | {"mode": "launch"}, other | {"constants": '{"splits": 1}'}, other | {"page_size": 64}]
    lines.append(lines[2] | {"case_id": "p", "kernel": "fa3_decode", "measured_time_us": 150.0})
    floors = [8.0, 9.0, 75.0, 8.0, 8.0, 8.0, np.nan]  # a library says nothing of its bytes
    good = rows.prepare(made.frame(lines)).assign(floor_us=floors)
    spec = charts_floor.over_floor(good).to_dict()
    points, middle = sorted((t for t in spec["datasets"].values() if "far" in t[0]), key=len, reverse=True)
    assert sorted(row["far"] for row in points) == [90 / 75, 1.5, 15 / 9, 2]
    assert sorted(row["far"] for row in middle) == [1.2, pytest.approx((1.5 + 15 / 9) / 2), 2]
    assert charts_floor.over_floor(good[:1]) is None and charts_floor.over_floor(good.assign(floor_us=np.nan)) is None


def test_glance_shows_the_context_with_most_batches(decode):
    spec = charts_decode.at_a_glance(decode).to_dict()
    loads = {row["load"] for table in spec["datasets"].values() for row in table}
    assert loads == {"16 × 4K", "64 × 4K"}
    assert charts_decode.at_a_glance(decode[decode["status"] != "ok"]) is None


def test_page_order_is_a_table_of_ratios(decode):
    spec = charts_order.order_cost(decode).to_dict()
    (table,) = spec["datasets"].values()
    ratios = charts_order.order_ratios(decode)
    assert len(table) == len(ratios) and {row["page"] for row in table} == {"1", "8", "16", "32", "64", "128"}
    assert sorted(row["ratio"] for row in table) == pytest.approx(sorted(ratios["ratio"]))


def test_ragged_loads_follow_even_ones(decode):
    ragged = list(charts.by_load(decode)["ragged"])
    assert ragged == sorted(ragged) and any(ragged)


def test_request_logs_read_well():
    assert labels.log_name("mooncake_conversation_trace.jsonl") == "mooncake conversation"
    assert labels.log_name("azure conv") == "azure conv" and labels.log_name("trace.csv") == "ragged"
    row = made.decode(made.Maker("r", "page-size"), 64, 4135, 16, "sorted", "code_trace.csv.gz")
    assert rows.prepare(made.frame([row]))["load"].iloc[0] == "64 × code · 66k tokens"


def test_arithmetic_is_no_movement_of_bytes():
    probe = made.Maker("c", "ceilings")
    lines = [
        probe.row(family="probe", kernel="read", bytes=2**30, modelled_bytes_loaded=2**30, time_us=250.0),
        probe.row(
            family="probe", kernel="mma", modelled_flops=10**12, modelled_bytes_stored=4096, time_us=1e3
        ),
    ]
    spec = charts.over_bytes(rows.prepare(made.frame(lines))).to_dict()
    assert {row["kernel"] for table in spec["datasets"].values() for row in table} == {"read"}
