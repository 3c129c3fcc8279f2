"""Roofline: which ceiling holds each kernel, computing or memory, and how near it comes."""

from __future__ import annotations

import streamlit as st

from dashboard import charts_roofline, data, rows, views
from experiments.ceilings import Ceilings

# By the bytes requested, a kernel that L2 serves well looks bound by memory.
BYTES = (charts_roofline.ONCE, charts_roofline.REQUESTED)
ALL = "all"


def page(loaded: data.Loaded) -> None:
    views.heading("Roofline", "Does computing or memory bind each kernel, and how near is it to the ceiling?")
    if views.nothing(loaded, "results"):
        return
    frame = loaded.frame[loaded.frame["family"].isin(["prefill", "decode"])]
    if frame.empty:
        st.info("These runs hold no prefill and no decode cases; the suite `roofline` makes some.")
        st.code("python -m experiments run roofline", language="bash")
        return
    if len(rows.gpu(frame)):
        measured(rows.gpu(frame), loaded)
    else:
        st.info(
            "These rows come from the CPU machine, which counts bytes and models no time: a kernel's flops a "
            "byte are known, its rate is not. On a GPU these commands measure the ceilings and the rates.",
            icon=":material/calculate:",
        )
        st.code("python -m experiments run ceilings\npython -m experiments run roofline", language="bash")
    if len(rows.cpu(frame)):
        counted(rows.cpu(frame))


def measured(frame, loaded: data.Loaded) -> None:
    """Timed rows under the ceilings of their own device."""
    with views.choices():
        device = views.choose("Device", list(frame["device"].value_counts().index), "roof_device")
        frame = frame[frame["device"] == device]
        suites = list(frame["suite"].value_counts().index)
        named = [ALL, *suites] if len(suites) > 1 else suites
        suite = views.choose("Suite", named, "roof_suite", "roofline" if "roofline" in suites else ALL)
        frame = frame if suite in (ALL, "") else frame[frame["suite"] == suite]
        dtype = views.choose("dtype", list(frame["dtype"].value_counts().index), "roof_dtype")
        frame = frame[frame["dtype"] == dtype]
        models = list(frame["what"].value_counts().index)
        model = views.choose("Model", [ALL, *models] if len(models) > 1 else models, "roof_model")
        frame = frame if model in (ALL, "") else frame[frame["what"] == model]
        per = st.segmented_control(
            "Bytes", BYTES, default=BYTES[0], required=True, key="roof_bytes", bind="query-params"
        )
    per = per if per in BYTES else BYTES[0]
    top = loaded.tops.get(device) or Ceilings()
    made = charts_roofline.placed(frame, per, top)
    missing = "No prefill or decode case of this choice ended ok with a time, flops and bytes."
    views.show(charts_roofline.roofline(made, top, per), made, "roofline", missing)
    views.ceilings_of(loaded, device)
    if top and dtype not in top.tflops:
        st.caption(f"No mma.sync rate was measured in {dtype}, so nothing says where computing would bind.")
    left = len(frame) - len(made)
    if left:
        st.caption(f"Without flops or bytes, and so without a place here: {views.some(left, 'row')}.")
    st.caption(
        "Flops are useful ones. Inputs and outputs once are the fewest bytes there are; the bytes requested "
        "of global memory (the closed form, which counts equal to the byte) are the most, for L2 may serve "
        "some. Libraries that use Hopper's asynchronous instructions can go beyond the mma.sync rate."
    )
    if not made["of_roof"].notna().any():
        return
    st.header("Share of the roof")
    views.show(charts_roofline.shares(made), made, "roof-shares", missing)


def counted(frame) -> None:
    """Rows of the CPU machine: flops a byte alone."""
    st.header("Flops a byte, counted")
    suites = list(frame["suite"].value_counts().index)
    suite = views.choose("Suite", suites, "roof_counted", "roofline")
    frame = frame[frame["suite"] == suite] if suite else frame
    missing = "No case of the CPU machine ended ok with counters."
    views.show(charts_roofline.intensity(frame), frame, "intensity", missing)


page(st.session_state["loaded"])
