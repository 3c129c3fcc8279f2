"""Overview: what was run, and the headline of each family."""

from __future__ import annotations

import streamlit as st

from dashboard import (
    charts,
    charts_decode,
    charts_features,
    charts_memory,
    charts_prefill,
    charts_runs,
    data,
    labels,
    rows,
    views,
)

# Not a ceiling: libraries that use Hopper's asynchronous tensor core instructions go beyond it.
MMA = "mma.sync probe"
NO_PREFILL = "No prefill case has been timed on this device in these runs."


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
        features(timed[timed["family"] == "prefill"])
        left, right = st.columns(2, gap="medium")
        with left:
            memory(timed[timed["family"] == "prefill"])
        with right:
            decode(timed[timed["family"] == "decode"], frame)
    elif len(rows.cpu(frame)):
        counted(rows.cpu(frame))
    st.header("What was run")
    views.show(charts_runs.statuses(frame), frame, "statuses", "No case has a status.")


def numbers(frame) -> None:
    good = rows.ok(frame)
    left, *rest = st.columns([2.2, 1, 1, 1, 1.6])
    timed = rows.gpu(frame)
    devices = [name for part in (timed, frame) for name in part["device"].value_counts().index if name]
    devices = list(dict.fromkeys(devices))
    left.metric(
        "Device", " and ".join(devices[:2]) or "unknown", help=", ".join(devices) or None, border=True
    )
    rest[0].metric("Cases", f"{len(frame):,}", border=True)
    rest[1].metric("Ended ok", f"{len(good):,}", border=True)
    rest[2].metric("Kernels", frame["kernel"].replace("", None).nunique(), border=True)
    last = frame["finished_at"].max()
    rest[3].metric("Last result, UTC", "unknown" if last != last else f"{last:%Y-%m-%d %H:%M}", border=True)


def prefill(timed, probe: float) -> None:
    st.header("Prefill")
    frame = timed[timed["family"] == "prefill"]
    if charts.is_sweep(frame):
        chart = charts.over_n(frame, "tflops", "Prefill throughput, TFLOP/s", probe, MMA)
        views.show(chart, frame, "prefill", NO_PREFILL)
        return
    shared = charts_prefill.compared(frame)
    with views.choices():
        dtype = views.choose("dtype", list(shared["dtype"].value_counts().index), "overview_dtype")
        shared = shared[shared["dtype"] == dtype]
        lengths = sorted(shared["n"].dropna().unique(), reverse=True)  # the longest says most
        name = views.choose("Context, keys", [*map(labels.count, lengths), "all"], "overview_n")
        shared = shared[(shared["n"].map(labels.count) == name) | (name == "all")]
    views.show(charts_prefill.throughput(shared, probe, MMA), shared, "prefill", NO_PREFILL)


def features(prefill) -> None:
    """Where there are such rows."""
    made = charts_features.beside_plain(prefill)
    if len(made):
        st.header("Prefill with features")
        chart = charts_features.times(made)
        views.show(chart, made, "prefill-features", "No such case has been timed on this device in these runs.")


def memory(frame) -> None:
    """The panel with most lengths; its page has the others."""
    st.header("Memory")
    panels = frame.groupby("panel")[["n", "variant"]].nunique().sort_values(["n", "variant"], kind="stable")
    one = frame[frame["panel"] == panels.index[-1]] if len(panels) else frame
    chart = charts_memory.peak_over_n(one, narrow=True)
    views.show(chart, one, "memory", "No prefill case of this device has a length and a peak.")
    st.page_link("screens/memory.py", label="Every model, and what the memory buys", icon=":material/memory:")


def decode(frame, everything) -> None:
    st.header("Decode")
    frame = rows.with_floor(frame, everything)
    chart = charts_decode.at_a_glance(frame)
    views.show(chart, frame, "decode", "No batch of one length has been timed on this device in these runs.")
    st.page_link(
        "screens/decode.py", label="Every batch, page order, real lengths", icon=":material/auto_stories:"
    )


def counted(frame) -> None:
    st.header("Bytes, counted")
    st.info(
        "These runs come from the CPU machine, which executes the same kernels and counts every byte. "
        "It models no time, so there is no throughput to show.",
        icon=":material/calculate:",
    )
    views.counted(frame)


page(st.session_state["loaded"])
