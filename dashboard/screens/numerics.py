"""Numerics: how far results are from float64, and what the precision of sums between chunks costs."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from dashboard import charts_numerics, chunks, data, rows, views


def page(loaded: data.Loaded) -> None:
    question = "How far are results from float64, and which precision do sums between chunks need?"
    views.heading("Numerics", question)
    if views.nothing(loaded, "results"):
        return
    sums(loaded.frame)
    st.header("Every result beside its tolerance")
    known = charts_numerics.margins(loaded.frame)
    views.show(charts_numerics.against_tolerance(known), known, "margins", "No result was compared here.")


def sums(frame: pd.DataFrame) -> None:
    """Errors and times over the number of chunks, by the dtype of the sums."""
    made = chunks.of(frame)
    key = ["run_id", "device", "kernel", "held", "n", "dtype"]
    made = made[made.groupby(key)["accumulate"].transform("nunique") > 1] if len(made) else made
    if made.empty:
        st.info("These runs hold no sums of several precisions; the suite `precision` makes them.")
        st.code("python -m experiments run precision", language="bash")
        return
    with views.choices():
        timed = list(rows.gpu(made)["device"].value_counts().index)
        devices = list(made["device"].value_counts().index)
        device = views.choose("Device", devices, "sums_device", timed[0] if timed else None)
        made = made[made["device"] == device]
        kernel = views.choose("Kernel", list(made["kernel"].value_counts().index), "sums_kernel")
        made = made[made["kernel"] == kernel]
        held = views.choose("Heads, batch, mask", list(made["held"].value_counts().index), "sums_held")
    made = made[made["held"] == held]
    st.header("Error over the number of chunks")
    missing = "No case of this scan was compared with float64."
    views.show(charts_numerics.over_chunks(made), made, "sums-error", missing)
    st.header("What a sum's precision costs")
    if rows.gpu(made).empty:
        st.info(
            "These rows come from the CPU machine, which models no time. It rounds to the nearest as a GPU "
            "does; the order of sums in a tensor core is its own, so a GPU's errors differ a little.",
            icon=":material/calculate:",
        )
        return
    missing = "No case of this scan ended ok with a time."
    views.show(charts_numerics.time_over_chunks(made), made, "sums-time", missing)


page(st.session_state["loaded"])
