"""Overview: what was run, and the headline of each family."""

from __future__ import annotations

import streamlit as st

from dashboard import charts, charts_runs, data, rows, views


def page(loaded: data.Loaded) -> None:
    views.heading("Overview", "What was run, how fast each kernel is, and what went wrong.")
    if views.nothing(loaded, "results"):
        return
    frame = loaded.frame
    numbers(frame)
    timed = rows.gpu(frame)
    if len(timed):
        device = views.choose("Device", list(timed["device"].value_counts().index), "overview_device")
        timed = timed[timed["device"] == device]
        prefill(timed, rows.ceiling(timed, "mma", "tflops", device))
        decode(timed, rows.ceiling(timed, "read", "gbps", device))
        probes(timed)
    if len(rows.cpu(frame)):
        counted(rows.cpu(frame), alone=timed.empty)
    st.header("What was run")
    views.show(charts_runs.statuses(frame), frame, "statuses", "No case has a status.")


def numbers(frame) -> None:
    good = rows.ok(frame)
    left, *rest = st.columns([2.2, 1, 1, 1, 1.6])
    timed = rows.gpu(frame)
    devices = [name for part in (timed, frame) for name in part["device"].value_counts().index if name]
    devices = list(dict.fromkeys(devices))
    more = f" + {len(devices) - 1}" if len(devices) > 1 else ""
    left.metric("Device", (devices or ["unknown"])[0] + more, help=", ".join(devices) or None, border=True)
    rest[0].metric("Cases", f"{len(frame):,}", border=True)
    rest[1].metric("Ended ok", f"{len(good):,}", border=True)
    rest[2].metric("Kernels", frame["kernel"].replace("", None).nunique(), border=True)
    last = frame["finished_at"].max()
    rest[3].metric("Last result, UTC", "unknown" if last != last else f"{last:%Y-%m-%d %H:%M}", border=True)


def prefill(timed, roof: float) -> None:
    st.header("Prefill")
    frame = timed[timed["family"] == "prefill"]
    build = charts.over_n if charts.is_sweep(frame) else charts.dots
    chart = build(frame, "tflops", "Prefill throughput, TFLOP/s", roof, "measured mma ceiling")
    views.show(chart, frame, "prefill", "No prefill case has been timed on this device in these runs.")


def decode(timed, roof: float) -> None:
    st.header("Decode")
    frame = timed[timed["family"] == "decode"]
    best = representative(frame)
    chart = charts.dots(best, "gbps", "Decode, achieved GB/s", roof, "measured read ceiling")
    views.show(chart, best, "decode", "No decode case has been timed on this device in these runs.")
    if len(best) < len(frame):
        st.caption("Pages of 16 tokens, in order; the page Paged decode shows them all.")


def probes(timed) -> None:
    frame = timed[timed["family"] == "probe"]
    if len(frame):
        st.header("Ceilings")
        views.show(
            charts.over_bytes(frame), frame, "ceilings", "No probe has moved bytes; the table has the others."
        )
    frame = timed[timed["family"] == "cache"]
    if len(frame):
        st.header("Writing the cache")
        chart = charts.dots(frame, "gbps", "Cache append, GB/s")
        views.show(chart, frame, "append", "No append has been timed on this device in these runs.")


def representative(frame):
    """The page size services use most, pages in order; everything where a suite has no such rows."""
    usual = frame[(frame["page_size"] == 16) & ((frame["order"] == "sorted") | frame["ragged"])]
    return usual if len(usual) else frame


def counted(frame, alone: bool) -> None:
    st.header("Bytes, counted")
    if alone:
        st.info(
            "These runs come from the CPU machine, which executes the same kernels and counts every byte. "
            "It models no time, so there is no throughput to show.",
            icon=":material/calculate:",
        )
    suites = [suite for suite in dict.fromkeys(frame["suite"]) if suite]
    suite = views.choose("Suite", suites, "counted_suite", "quick")
    frame = frame[frame["suite"] == suite] if suites else frame
    views.show(
        charts_runs.counted_against_modelled(frame),
        frame,
        "counted",
        "No case of the CPU machine has counters.",
    )


page(st.session_state["loaded"])
