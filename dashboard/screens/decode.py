"""Paged decode: what page size, page order and uneven lengths cost, and what smaller caches save."""

from __future__ import annotations

import streamlit as st

from dashboard import (
    charts,
    charts_caches,
    charts_decode,
    charts_features,
    charts_floor,
    charts_latent,
    charts_order,
    charts_runs,
    data,
    labels,
    rows,
    views,
)
from experiments.catalog import PEERS
from experiments.ceilings import Ceilings

RATES = {"Time, µs": "measured_time_us", "Requested GB/s": "gbps"}


def page(loaded: data.Loaded) -> None:
    views.heading(
        "Paged decode", "Does the page size matter, does the order of pages, and how far is the floor?"
    )
    if views.nothing(loaded, "results"):
        return
    frame = loaded.frame[loaded.frame["family"].isin(["decode", "mla"])]
    if frame.empty:
        st.info("These runs hold no decode cases; the suite `page-size` makes them.")
        st.code("python -m experiments run page-size", language="bash")
        return
    timed = rows.gpu(frame)
    if len(timed):
        measured(timed, loaded)
    if len(rows.cpu(frame)):
        st.header("Bytes, counted")
        views.show(
            charts_runs.counted_against_modelled(rows.cpu(frame)),
            rows.cpu(frame),
            "decode-counted",
            "No decode case of the CPU machine has counters.",
        )


def measured(frame, loaded: data.Loaded) -> None:
    everything = loaded.frame
    with views.choices():
        device = views.choose("Device", list(frame["device"].value_counts().index), "decode_device")
        paged, latent = (
            rows.with_floor(frame[(frame["device"] == device) & (frame["family"] == family)], everything)
            for family in ("decode", "mla")
        )
        models = paged.groupby("what")["page_size"].nunique().sort_values(ascending=False, kind="stable")
        model = views.choose("Model", [*models.index, "all"], "decode_model")
        frame = paged if model in ("all", "") else paged[paged["what"] == model]
        words = st.segmented_control(
            "Show",
            list(RATES),
            default="Time, µs",
            required=True,
            key="decode_rate",
            bind="query-params",
        )
    rate, even = RATES.get(words, "measured_time_us"), frame[~frame["ragged"]]
    st.header("Batch and context")
    views.show(
        charts_floor.over_floor(frame),
        even,
        "batch-and-context",
        "No two loads with pages of 16 and a plain cache have been timed in these runs, or no read floor of "
        "this device.",
    )
    page_sizes(even, rate)
    if len(frame) and frame["floor_us"].isna().all():
        st.caption("No floor is drawn: the suite `ceilings` has not measured this device's read rate.")
    real_lengths(frame[frame["ragged"]], rate)
    views.unfinished(loaded)
    st.header("Page order")
    views.show(
        charts_order.order_cost(frame),
        charts_order.order_ratios(frame).assign(stale=False, status="ok", constants="", suite="page-size"),
        "page-order",
        "No case was timed with both sorted and shuffled pages.",
    )
    smaller_caches(paged, latent, loaded.tops.get(device, Ceilings()))
    features(paged)
    probes(everything[everything["device"] == device])


def smaller_caches(paged, latent, top: Ceilings) -> None:
    """Numbers of a byte, and a latent for all heads: caches that are less to read, of all models."""
    st.header("Cache of bytes")
    beside = charts_caches.beside_plain(paged)
    views.show(
        charts_caches.times(beside),
        beside,
        "kv-dtype",
        "No load has been timed over a quantised cache in these runs; the suite `kv-dtype` makes them.",
    )
    st.header("Latent attention")
    views.show(
        charts_latent.over_keys(latent, top.tflops),
        latent,
        "mla",
        "No decode over latents has been timed in these runs; the suite `mla` makes them.",
    )


def features(paged) -> None:
    """Windows, caps, sinks and several queries, of all models."""
    st.header("Features")
    made = charts_features.beside_plain(paged)
    views.show(
        charts_features.times(made),
        made,
        "decode-features",
        "No step with a window, a cap, sinks or several queries has been timed in these runs; the suite "
        "`decode-features` makes them.",
    )


def page_sizes(even, rate: str) -> None:
    """Batches of equal lengths: what page size costs."""
    st.header("Page size")
    views.show(
        charts_decode.over_pages(even, rate),
        even,
        "page-size",
        "No batch of equal lengths has been timed in these runs.",
    )
    single = len(even) - len(charts_decode.varied(even))
    if single:
        st.caption(f"Loads with a single page size are only in the table ({views.some(single, 'row')}).")


def real_lengths(ragged, rate: str) -> None:
    """Batches drawn from request logs: what page size costs where lengths differ."""
    st.header("Real request lengths")
    views.show(
        charts_decode.over_pages(ragged, rate, "real request lengths"),
        ragged,
        "ragged",
        "No batch of real request lengths is in these runs; give the suite a request log.",
    )
    if ragged.empty:
        st.code("python -m experiments run page-size --lengths FILE", language="bash")
    else:
        st.caption(
            "Each panel is one batch drawn from a published request log: its number of requests, and the "
            "tokens they hold together."
        )


def probes(frame) -> None:
    """What the floor is made of, and the write side."""
    measured = frame[(frame["family"] == "probe") & (frame["machine"] == "gpu")]
    loads = measured[measured["kernel"] == "words"]
    reads = measured.drop(loads.index)
    if len(reads):
        st.header("Where the floor comes from")
        chart = charts.over_bytes(reads)
        views.show(chart, reads, "ceilings", "No probe has moved bytes; the table has the others.")
    if len(loads):
        st.header("Wide and narrow loads")
        chart = charts.dots(labels.by_constants(loads), "gbps", "Equal bytes by bytes a load, GB/s")
        views.show(chart, loads, "loads", "No width of a load has been timed on this device in these runs.")
    writes = frame[frame["family"].isin(["cache", "pages"]) & (frame["machine"] == "gpu")]
    if len(writes):
        st.header("Writing the cache")
        chart = charts.dots(writes, "gbps", "Appends and copies of pages, GB/s")
        views.show(chart, writes, "append", "No append has been timed on this device in these runs.")
    libraries = writes[writes["kernel"].isin(PEERS)]
    if len(libraries):  # which say nothing of their bytes
        beside = writes[writes["shape"].isin(libraries["shape"])]
        title = "Appends and copies of pages beside libraries', time in µs"
        chart = charts.dots(beside, "measured_time_us", title)
        views.show(chart, beside, "cache-writes", "No library's has been timed on this device in these runs.")


page(st.session_state["loaded"])
