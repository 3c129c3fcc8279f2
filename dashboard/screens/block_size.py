"""Block size: which chunk is fastest at each head dim and length, and at a shape of one's own."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from dashboard import asking, charts_chunks, chunks, data, rows, views

USUAL = {"d": 128, "n": 8192, "b": 1, "h": 32}


def page(loaded: data.Loaded) -> None:
    views.heading("Block size", "How large should a chunk of keys be, and what does the default cost?")
    if views.nothing(loaded, "results"):
        return
    every = chunks.of(loaded.frame)
    made = chunks.scanned(every)
    if made.empty:
        st.info("These runs hold no scan over the chunk; the suite `block-size` makes one.")
        st.code("python -m experiments run block-size", language="bash")
        return
    defaults = asking.default_chunks()
    with views.choices():
        timed = list(rows.gpu(made)["device"].value_counts().index)
        devices = list(made["device"].value_counts().index)
        device = views.choose("Device", devices, "chunk_device", timed[0] if timed else None)
        every, made = (part[part["device"] == device] for part in (every, made))
        kernel = views.choose("Kernel", list(made["kernel"].value_counts().index), "chunk_kernel")
        one = made[made["kernel"] == kernel]
        setting = views.choose("Heads, batch, mask and constants", chunks.settings(one), "chunk_setting")
    one = one[one["setting"] == setting]
    if len(rows.gpu(one)):
        measured(every, made, one, defaults)
    else:
        counted(one)
    padding(one)


def measured(every: pd.DataFrame, made: pd.DataFrame, one: pd.DataFrame, defaults: dict[str, float]) -> None:
    default = defaults.get(one["kernel"].iloc[0], np.nan)
    st.header("Throughput over the chunk")
    missing = "No case of this scan ended ok with a time."
    views.show(charts_chunks.over_chunk(one, default), one, "chunks", missing)
    if not default > 0:
        st.caption("The kernel's default is not marked: its sources cannot be read here.")
    st.header("The best chunk")
    views.show(charts_chunks.optima(one, default), chunks.gains(one, default), "best-chunks", missing)
    mine(made, defaults)
    tiles(chunks.tiled(every[every["kernel"] == one["kernel"].iloc[0]]))


def tiles(set_: pd.DataFrame) -> None:
    """What the tiles inside a chunk matter, where a run has tried several."""
    if set_.empty:
        return
    st.header("Tiles inside a chunk")
    names = set_["shape"] + " · chunk " + set_["chunk"].map("{:.0f}".format) + " · " + set_["dtype"]
    set_ = set_[names == views.choose("Shape and chunk", list(names.value_counts().index), "chunk_tiles")]
    views.show(charts_chunks.tiles(set_), set_, "tiles", "No case with tiles of its own ended ok.")


def mine(made: pd.DataFrame, defaults: dict[str, float]) -> None:
    """A shape of the reader's own: what was measured nearest to it, and in what that differs."""
    st.header("Your shape")
    with views.choices():
        values = {
            name: st.number_input(
                words[0].upper() + words[1:], min_value=1, max_value=2**30, value=USUAL[name], step=1,
                key=f"chunk_my_{name}", bind="query-params",
            )
            for name, words in chunks.NEAR.items()
        }
    given = {name: float(value or USUAL[name]) for name, value in values.items()}
    near, differs = chunks.nearest(made, given)
    shape = near["shape"].iloc[0]
    if differs:
        st.warning(
            f"Not measured. The nearest measured shape is {shape}: {', '.join(differs)}. What follows is of "
            "that shape; nothing is interpolated.",
            icon=":material/straighten:",
        )
    else:
        st.success(f"Measured: {shape}.", icon=":material/check_circle:")
    missing = f"No case at {shape} ended ok with a time."
    views.show(charts_chunks.by_kernel(near, defaults), near, "my-chunks", missing)


def counted(one: pd.DataFrame) -> None:
    st.info(
        "These rows come from the CPU machine, which executes the same kernels and counts their bytes and "
        "launches. It models no time, so there is no fastest chunk to show.",
        icon=":material/calculate:",
    )
    st.header("Bytes and launches over the chunk")
    missing = "No case of this scan ended ok with counters."
    parts = (("counted_bytes", "Global bytes requested"), ("counted_launches", "Launches"))
    for column, title in parts:
        views.draw(charts_chunks.counted(one, column, title), f"chunks-{column}", missing)
    views.behind(views.table(one), "chunks-counted", views.commands(one))


def padding(one: pd.DataFrame) -> None:
    """What a head dim that is no power of two costs beside its neighbour."""
    st.header("Padding a head dim")
    dims = chunks.odd_dims(one)
    if not dims:
        st.info("No head dim here would be padded: each is a power of two.")
        return
    names = {f"{d:.0f}": d for d in dims}
    d = names[views.choose("Head dim", list(names), "chunk_padded", "80")]
    pair = one[one["d"].isin([d, chunks.beside(one, d)])]
    missing = f"No case has head dim {d:.0f} and another at the same chunk and length."
    views.show(charts_chunks.padding(one, d), pair, "padding", missing)


page(st.session_state["loaded"])
