"""Paged decode: what page size, page order and uneven lengths cost."""

from __future__ import annotations

import streamlit as st

from dashboard import charts_decode, charts_runs, data, rows, views

RATES = {"Achieved GB/s": "gbps", "Time, µs": "measured_time_us"}


def page(loaded: data.Loaded) -> None:
    views.heading(
        "Paged decode", "Does the page size matter, does the order of pages, and how far is the floor?"
    )
    if views.nothing(loaded, "results"):
        return
    frame = loaded.frame[loaded.frame["family"] == "decode"]
    if frame.empty:
        st.info("These runs hold no decode cases; the suite `page-size` makes them.")
        st.code("python -m experiments run page-size", language="bash")
        return
    timed = rows.gpu(frame)
    if len(timed):
        measured(timed, loaded.frame)
    if len(rows.cpu(frame)):
        st.header("Bytes, counted")
        views.show(
            charts_runs.counted_against_modelled(rows.cpu(frame)),
            rows.cpu(frame),
            "decode-counted",
            "No decode case of the CPU machine has counters.",
        )


def measured(frame, everything) -> None:
    with views.choices():
        device = views.choose("Device", list(frame["device"].value_counts().index), "decode_device")
        frame = frame[frame["device"] == device]
        models = frame.groupby("what")["page_size"].nunique().sort_values(ascending=False, kind="stable")
        model = views.choose("Model", [*models.index, "all"], "decode_model")
        frame = frame if model in ("all", "") else frame[frame["what"] == model]
        words = st.segmented_control(
            "Show",
            list(RATES),
            default="Achieved GB/s",
            required=True,
            key="decode_rate",
            bind="query-params",
        )
    frame = rows.with_floor(frame, everything)
    st.header("Page size")
    even = frame[~frame["ragged"]]
    views.show(
        charts_decode.over_pages(even, RATES.get(words, "gbps")),
        even,
        "page-size",
        "No batch of equal lengths has been timed in these runs.",
    )
    single = len(even) - len(charts_decode.varied(even))
    if single:
        st.caption(f"Loads with a single page size are only in the table ({views.some(single, 'row')}).")
    if frame["floor_us"].isna().all():
        st.caption("No floor is drawn: the suite `ceilings` has not measured this device's read rate.")
    st.header("Page order")
    views.show(
        charts_decode.order_cost(frame),
        charts_decode.order_ratios(frame).assign(stale=False, status="ok", constants="", suite="page-size"),
        "page-order",
        "No case was timed with both sorted and shuffled pages.",
    )
    st.header("Real request lengths")
    views.show(
        charts_decode.ragged(frame),
        frame[frame["ragged"]],
        "ragged",
        "No batch of real request lengths is in these runs; give the suite a request log.",
    )
    if frame[frame["ragged"]].empty:
        st.code("python -m experiments run page-size --lengths FILE", language="bash")


page(st.session_state["loaded"])
