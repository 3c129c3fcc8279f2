"""Charts of paged decode: over page size, ragged batches, page order. Pure, like `charts`."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from dashboard import rows, style
from dashboard.charts import (
    RATES,
    column_failures,
    columns,
    dot_layers,
    panels,
    rate_columns,
    row_failures,
    summary,
    tooltips,
)

FLOOR = "floor: the read probe over as many bytes, measured"


def _drawn(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the floor columns of `rows.with_floor`, empty where the page has added none."""
    return frame if "floor_us" in frame else frame.assign(floor_us=np.nan, floor_gbps=np.nan)


def varied(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of loads that were run with several page sizes; all rows where there is no such load."""
    sizes = frame.groupby(["what", "load"])["page_size"].transform("nunique")
    return frame[sizes > 1] if (sizes > 1).any() else frame


def over_pages(frame: pd.DataFrame, rate: str):
    """Small multiples over page size, one panel a load; dashed where pages are shuffled.

    Parameters
    ----------
    frame : prepared decode rows, with a floor (see `rows.with_floor`) or without
    rate : "gbps" or "measured_time_us"
    """
    low, high, unit = RATES[rate]
    drawn = varied(_drawn(frame[(frame["page_size"] > 0) & ~frame["ragged"]]))
    good = rows.ok(drawn)
    good = good[good[rate] > 0]
    if good.empty:
        return None
    drawn = drawn.assign(panel=drawn["what"] + " · " + drawn["load"])
    good = good.assign(panel=good["what"] + " · " + good["load"])
    lost = rows.lost(drawn, ["panel", "page_size"])
    floor = "floor_gbps" if rate == "gbps" else "floor_us"
    names = (*rate_columns(rate), "page_size", "order", floor)
    data = pd.concat([columns(good, *names), lost], ignore_index=True)
    data["stale"] = [value is True for value in data["stale"]]
    words = "Paged decode over page size, " + ("achieved GB/s" if rate == "gbps" else "time in µs")
    kind = f"measured on {rows.provenance(good)} · median; the bar spans the quartiles"
    bounded = good[floor].notna().any()
    if bounded:
        kind += f" · dotted: {FLOOR}"
    order = list(dict.fromkeys(drawn.sort_values(["what", "b", "length"])["panel"]))
    chart = panels(_page_layers(good, rate, floor if bounded else "", lost), data, order)
    if rate != "gbps":
        chart = chart.resolve_scale(y="independent")
    return style.finish(chart, words, kind, summary(good, rate, words, unit))


def _page_layers(good: pd.DataFrame, rate: str, floor: str, lost: pd.DataFrame) -> list:
    low, high, unit = RATES[rate]
    base = alt.Chart().transform_filter(f"isValid(datum.{rate})")
    x = style.log2_x("page_size", "page size, tokens", good["page_size"])
    y = alt.Y(field=rate, type="quantitative", title=unit, scale=alt.Scale(zero=True))
    colour = style.kernel_colour(good["kernel"])
    dash = alt.StrokeDash(
        field="order",
        type="nominal",
        legend=alt.Legend(title="pages in the pool"),
        scale=alt.Scale(domain=list(style.ORDER_DASH), range=list(style.ORDER_DASH.values())),
    )
    layers = [
        base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash, detail="series:N"),
        base.mark_rule(strokeWidth=2).encode(
            x=x, y=alt.Y(field=low, type="quantitative", title=unit), y2=alt.Y2(high), color=colour
        ),
        base.mark_point(filled=True, size=70).encode(
            x=x,
            y=y,
            color=colour,
            shape=style.kernel_shape(good["kernel"]),
            opacity=style.stale_opacity(),
            tooltip=[style.text("order", "pages"), *tooltips(rate, unit)],
        ),
    ]
    layers += column_failures(lost, x, colour, alt.Chart())
    if floor:
        layers.append(
            alt.Chart()
            .mark_rule(color=style.INK, strokeDash=[2, 3])
            .encode(y=alt.Y(field=floor, type="quantitative", aggregate="mean", title=unit))
        )
    return layers


def ragged(frame: pd.DataFrame):
    """Batches of real request lengths: time of each kernel, and the floor of the batch's bytes as a tick."""
    drawn = _drawn(frame[frame["ragged"]])
    good = rows.ok(drawn)
    good = good[good["measured_time_us"] > 0]
    if good.empty:
        return None
    y = style.row_axis(
        "shape", drawn.sort_values(["lengths_source", "b", "page_size"])["shape"].unique().tolist()
    )
    tell = (
        style.text("order", "pages"),
        style.number("tokens", "tokens", ","),
        style.number("max_len", "longest", ","),
        style.number("gbps", "GB/s"),
    )
    marks = dot_layers(good, "measured_time_us", y, ("order", "tokens", "max_len", "gbps"), tell)
    floors = alt.Chart(columns(good[good["floor_us"].notna()], "shape", "floor_us"))
    floors = floors.mark_tick(color=style.INK, thickness=2, size=20).encode(
        x=alt.X(field="floor_us", type="quantitative", title="µs"),
        y=y,
        tooltip=[style.number("floor_us", "floor, µs")],
    )
    chart = alt.layer(*marks, floors, *row_failures(drawn, y)).properties(
        height=alt.Step(34), width="container"
    )
    words = "Decode of ragged batches, time in µs"
    kind = f"measured on {rows.provenance(good)}" + (
        f" · black tick: {FLOOR}" if good["floor_us"].notna().any() else ""
    )
    return style.finish(chart, words, kind, summary(good, "measured_time_us", words, "µs"))


def order_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Time with shuffled pages over time with sorted ones, for every case that has both."""
    good = rows.ok(frame)
    good = good[(good["measured_time_us"] > 0) & (good["page_size"] > 0)]
    key = [
        "run_id",
        "series",
        "mode",
        "device",
        "variant",
        "kernel",
        "what",
        "load",
        "b",
        "length",
        "page_size",
        "dtype",
    ]
    wide = good.pivot_table(index=key, columns="page_order", values="measured_time_us", aggfunc="median")
    if not {"sorted", "shuffled"} <= set(wide.columns):
        return pd.DataFrame(columns=[*key, "ratio"])
    wide = wide.dropna(subset=["sorted", "shuffled"])
    table = wide.assign(ratio=wide["shuffled"] / wide["sorted"]).reset_index()
    pages = [rows.count(size) for size in table["page_size"]]
    return table.assign(shape=table["what"] + " · " + table["load"] + " · page " + pages)


def order_cost(frame: pd.DataFrame):
    """What shuffled pages cost: one row a load, one mark a page size, 1.00 where order does not matter."""
    table = order_ratios(frame)
    if table.empty:
        return None
    table["case"] = table["variant"] + " · " + table["what"] + " · " + table["load"]
    order = table.sort_values(["what", "b", "length"])["case"].unique().tolist()
    table["page"] = [str(int(size)) for size in table["page_size"]]
    sizes = [str(int(size)) for size in sorted(table["page_size"].unique())]
    span = max(0.05, float((table["ratio"] - 1).abs().max()) * 1.25)
    data = columns(table, "case", "page", "ratio", "sorted", "shuffled", "device", "run_id")
    y = style.row_axis("case", order)
    scale = alt.Scale(domain=[1 - span, 1 + span], nice=False, zero=False)
    axis = {"title": "time with shuffled pages ÷ time with sorted pages", "scale": scale}
    viridis, legend = alt.Scale(scheme="viridis"), alt.Legend(title="page size, tokens")
    points = (
        alt.Chart(data)
        .mark_point(filled=True, size=110, shape="diamond", opacity=0.95)
        .encode(
            x=alt.X(field="ratio", type="quantitative", axis=alt.Axis(format=".2f", tickCount=8), **axis),
            y=y,
            yOffset=alt.YOffset(field="page", type="ordinal", sort=sizes),
            color=alt.Color(field="page", type="ordinal", sort=sizes, scale=viridis, legend=legend),
            tooltip=[
                style.text("case", "case"),
                style.text("page", "page size"),
                style.number("ratio", "ratio", ".3f"),
                style.number("sorted", "sorted, µs"),
                style.number("shuffled", "shuffled, µs"),
            ],
        )
    )
    rule = alt.Chart(pd.DataFrame({"one": [1.0]})).mark_rule(color=style.INK, strokeDash=[2, 3])
    one = rule.encode(x=alt.X(field="one", type="quantitative", **axis))
    chart = alt.layer(one, points).properties(height=alt.Step(11, **{"for": "offset"}), width="container")
    worst = table.loc[table["ratio"].idxmax()]
    words = "What shuffled pages cost, as a ratio of times"
    kind = (
        f"ratio of measured medians · 1.00: the order of pages costs nothing · largest {worst['ratio']:.2f}"
    )
    return style.finish(
        chart, words, kind, f"{words}: {len(table)} pairs; largest {worst['ratio']:.3f} at {worst['case']}."
    )
