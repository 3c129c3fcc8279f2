"""Memory vs throughput: what a kernel costs in memory, and what that memory buys."""

from __future__ import annotations

import streamlit as st

from dashboard import charts_memory, data, rows, views


def page(loaded: data.Loaded) -> None:
    views.heading(
        "Memory vs throughput",
        "How much memory does each kernel need as contexts grow, and what does it buy?",
    )
    if views.nothing(loaded, "results"):
        return
    frame = loaded.frame[loaded.frame["family"] == "prefill"]
    if frame.empty:
        st.info("These runs hold no prefill cases; the suite `memory` makes them.")
        st.code("python -m experiments run memory", language="bash")
        return
    with views.choices():
        devices = list(frame["device"].value_counts().index)
        timed = list(rows.gpu(frame)["device"].value_counts().index)
        device = views.choose("Device", devices, "memory_device", timed[0] if timed else None)
        frame = frame[frame["device"] == device]
        dtype = views.choose("dtype", list(frame["dtype"].value_counts().index), "memory_dtype")
        frame = frame[frame["dtype"] == dtype]
        panels = list(frame["panel"].value_counts().index)
        panel = views.choose("Model, batch and mask", panels, "memory_panel")
        frame = frame[frame["panel"] == panel]
    st.header("Peak memory over context")
    views.show(
        charts_memory.peak_over_n(frame),
        frame,
        "peak-memory",
        "No case here has a length and a peak, measured or modelled.",
    )
    trade_off(frame)


def trade_off(frame) -> None:
    st.header("What the memory buys")
    shapes = list(dict.fromkeys(frame.sort_values("n")["shape"]))
    good = rows.ok(frame)
    good = good[(good["peak_gb"] > 0) & (good["tflops"] > 0)]
    kernels = good.groupby("shape")["variant"].nunique()
    # The longest context at which most kernels still ran says most about the trade.
    most = [shape for shape in shapes if kernels.get(shape, 0) == kernels.max()] if len(kernels) else []
    shape = views.choose("Shape", shapes, "memory_shape", most[-1] if most else None)
    one = frame[frame["shape"] == shape]
    views.show(
        charts_memory.pareto(one),
        one,
        "trade-off",
        f"No case of {shape or 'this shape'} has both a measured time and a measured peak; both need a GPU.",
    )
    unknown = int((rows.ok(one)["peak_gb"].isna() & rows.ok(one)["tflops"].notna()).sum())
    if unknown:
        st.caption(f"{unknown} timed rows of this shape have no measured peak and are only in the table.")


page(st.session_state["loaded"])
