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
    made = chunks.of(loaded.frame)
    graded = made["key_order"] != ""
    sums(made[~graded])
    orders(made[graded])
    st.header("Every result beside its tolerance")
    known = charts_numerics.margins(loaded.frame)
    views.show(charts_numerics.against_tolerance(known), known, "margins", "No result was compared here.")


def sums(made: pd.DataFrame) -> None:
    """Errors and times over the number of chunks, by the dtype of the sums."""
    made = varied(made, "accumulate", ["dtype"])
    if made.empty:
        st.info("These runs hold no sums of several precisions; the suite `precision` makes them.")
        st.code("python -m experiments run precision", language="bash")
        return
    made = chosen(made, "sums")
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


def orders(made: pd.DataFrame) -> None:
    """Errors by the order in which chunks of unequal weight are added."""
    st.header("Error by the order of chunks")
    made = varied(made, "key_order", ["dtype", "chunks", "accumulate"])
    if made.empty:
        st.info("These runs hold no keys in several orders; the suite `precision` makes them.")
        st.code("python -m experiments run precision", language="bash")
        return
    made = chosen(made, "orders")
    missing = "No case of these orders was compared with float64."
    views.show(charts_numerics.by_order(made), made, "orders-error", missing)


def varied(made: pd.DataFrame, name: str, alike: list[str]) -> pd.DataFrame:
    """The rows that stand beside others of their run which differ in `name`, and in none of `alike`."""
    if made.empty:
        return made
    key = ["run_id", "device", "kernel", "held", "n", *alike]
    return made[made.groupby(key)[name].transform("nunique") > 1]


def chosen(made: pd.DataFrame, key: str) -> pd.DataFrame:
    """The rows of the device, kernel and setting that the reader picks; a GPU comes first."""
    with views.choices():
        timed = list(rows.gpu(made)["device"].value_counts().index)
        devices = list(made["device"].value_counts().index)
        device = views.choose("Device", devices, f"{key}_device", timed[0] if timed else None)
        made = made[made["device"] == device]
        kernel = views.choose("Kernel", list(made["kernel"].value_counts().index), f"{key}_kernel")
        made = made[made["kernel"] == kernel]
        held = views.choose("Heads, batch, mask", list(made["held"].value_counts().index), f"{key}_held")
    return made[made["held"] == held]


page(st.session_state["loaded"])
