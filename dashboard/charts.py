"""Charts of throughput, and what all charts share. Pure: a prepared DataFrame in, an Altair chart out.

A builder returns None when no row can be drawn, and the page says so in a sentence. *Measured* is a filled
mark with a bar over the quartiles, *modelled* a dashed line or a thin tick, *counted* a hollow circle or bar:
the three never share a mark.
"""

from __future__ import annotations

import altair as alt
import pandas as pd

from dashboard import rows, style

RATES = {
    "tflops": ("tflops_low", "tflops_high", "TFLOP/s"),
    "gbps": ("gbps_low", "gbps_high", "GB/s"),
    "measured_time_us": ("time_low", "time_high", "µs"),
}


def known_by(rate: str, frame: pd.DataFrame) -> str:
    """How a rate of `RATES` is known, and of which rows, for a chart's subtitle."""
    how = "bytes modelled, time measured" if rate == "gbps" else "measured"
    return f"{how} on {rows.provenance(frame)} · median; the bar spans the quartiles"


def legend(rate: str) -> str:
    """The same in a word, for the legend of kernels."""
    return f"kernel ({'bytes modelled' if rate == 'gbps' else 'measured'})"


def panels(layers: list, data: pd.DataFrame, order: list[str]) -> alt.FacetChart:
    """Small multiples by `panel`, in rows that come out even and fill a window of 1400 pixels."""
    across = {1: 1, 2: 2, 4: 2}.get(len(order), 3)
    width = {1: 700, 2: 395, 3: 248}[across]
    return (
        alt.layer(*layers)
        .properties(width=width, height=210)
        .facet(
            facet=alt.Facet(field="panel", type="nominal", sort=order, title=None),
            columns=across,
            data=data,
            spacing=28,
        )
    )


def columns(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The named columns only: a chart carries no more data than it shows."""
    return frame[list(dict.fromkeys(names))].reset_index(drop=True)


def by_load(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order one reads loads in: by model, equal lengths before ragged ones, small to large."""
    length = frame["length"].where(~frame["ragged"], 0)
    keys = ["what", "ragged", "b", "_length", "lengths_source", "tokens", "page_size"]
    return frame.assign(_length=length).sort_values(keys, kind="stable").drop(columns="_length")


def summary(frame: pd.DataFrame, rate: str, words: str, unit: str) -> str:
    """The sentence a screen reader speaks: what is shown, how much of it, and the best value."""
    top = frame.loc[frame[rate].idxmin() if unit == "µs" else frame[rate].idxmax()]
    best = "shortest" if unit == "µs" else "highest"
    kernels = ", ".join(sorted(frame["kernel"].unique()))
    return (
        f"{words}: {len(frame)} timed points for {kernels}; the {best} is "
        f"{top[rate]:.4g} {unit} by {top['kernel']} at {top['shape']}."
    )


def tooltips(rate: str, unit: str) -> list[alt.Tooltip]:
    """What every measured mark tells."""
    low, high, _ = RATES[rate]
    return [
        style.text("variant", "kernel"),
        style.text("shape", "shape"),
        style.text("dtype", "dtype"),
        style.number(rate, f"median, {unit}"),
        style.number(low, "quartile, low"),
        style.number(high, "quartile, high"),
        style.number("measured_n_samples", "samples"),
        style.text("device", "device"),
        style.text("stale", "stale"),
        style.text("mode", "launch or graph"),
        style.text("run_id", "run"),
    ]


def rate_columns(rate: str) -> tuple[str, ...]:
    low, high, _ = RATES[rate]
    return (
        "kernel",
        "variant",
        "shape",
        "what",
        "mask",
        "n",
        "b",
        "panel",
        "dtype",
        rate,
        low,
        high,
        "measured_n_samples",
        "device",
        "stale",
        "run_id",
        "series",
        "mode",
    )


def dots(frame: pd.DataFrame, rate: str, words: str, ceiling: float = float("nan"), ceiling_name: str = ""):
    """One row a shape, one mark a kernel, a bar over the quartiles; failures in words at the right.

    Parameters
    ----------
    frame : prepared rows
    rate : key of `RATES`
    words : str
        The title: what is shown, in which unit.
    ceiling : float
        Measured ceiling of the same device in the same unit; NaN draws none.

    Returns
    -------
    alt.Chart or None
    """
    unit = RATES[rate][2]
    good = rows.ok(frame)
    good = good[good[rate] > 0]
    if good.empty:
        return None
    order = (
        frame.sort_values(["what", "mask", "ragged", "b", "length", "page_size"])["shape"].unique().tolist()
    )
    y = style.row_axis("shape", order)
    layers = [*dot_layers(good, rate, y), *row_failures(frame, y)]
    if ceiling > 0:
        layers += ceiling_rule(ceiling, unit, ceiling_name)
    chart = alt.layer(*layers).properties(height=alt.Step(30), width="container")
    return style.finish(chart, words, known_by(rate, good), summary(good, rate, words, unit))


def dot_layers(good: pd.DataFrame, rate: str, y: alt.Y, more: tuple[str, ...] = (), tell: tuple = ()) -> list:
    """A bar over the quartiles and a mark at the median, at each row of `y`.

    `more` names columns to carry beside the usual ones, and `tell` are tooltips that precede the usual ones.
    """
    low, high, unit = RATES[rate]
    base = alt.Chart(columns(good, *rate_columns(rate), *more))
    colour = style.kernel_colour(good["kernel"], legend(rate))
    bars = base.mark_rule(strokeWidth=2, opacity=0.6).encode(
        x=alt.X(field=low, type="quantitative", title=unit), x2=alt.X2(high), y=y, color=colour
    )
    axis, scale = alt.Axis(tickCount=8), alt.Scale(zero=True)
    points = base.mark_point(filled=True, size=95).encode(
        x=alt.X(field=rate, type="quantitative", title=unit, scale=scale, axis=axis),
        y=y,
        color=colour,
        shape=style.kernel_shape(good["kernel"], legend(rate)),
        opacity=style.stale_opacity(),
        tooltip=[*tell, *tooltips(rate, unit)],
    )
    return [bars, points]


def row_failures(frame: pd.DataFrame, y) -> list:
    """Failures in words, right of the plot, at their row."""
    table = rows.lost(frame, ["shape"])
    if table.empty:
        return []
    table["text"] = "✕ " + table["kernel"] + table["text"].str.replace("✕", ":")
    table = table.groupby("shape", as_index=False).agg(text=("text", "  ".join), error=("error", " · ".join))
    words = alt.Chart(table).mark_text(align="left", fontSize=11, color=style.VERMILLION, dx=8)
    why = [style.text("text", "no mark"), style.text("error", "why")]
    return [words.encode(x=alt.value("width"), y=y, text="text:N", tooltip=why)]


def column_failures(table: pd.DataFrame, x, colour, base=None) -> list:
    """Failures above the plot at their x, in the kernel's colour, stacked where several kernels failed.

    `base` is a chart that already holds `table` among other rows (in a facet, where words go to the right of their
    cross); None draws `table` itself.
    """
    layers, words = [], {} if base is None else {"align": "left", "dx": -5}
    if base is not None and len(table):
        # Every panel gets the same room above it, or their headers would not line up.
        room = base.mark_text(opacity=0, baseline="bottom", fontSize=10.5)
        layers.append(room.encode(y=alt.value(-5 - 13 * int(table["slot"].max())), text=alt.value("✕")))
    for slot in sorted(table["slot"].unique()):
        chart = alt.Chart(table) if base is None else base
        chart = chart.transform_filter(f"isValid(datum.slot) && datum.slot === {slot}")
        layers.append(
            chart.mark_text(fontSize=10.5, fontWeight=600, baseline="bottom", **words).encode(
                x=x,
                y=alt.value(-5 - 13 * int(slot)),
                text="text:N",
                color=colour,
                tooltip=[
                    style.text("variant", "kernel"),
                    style.text("status", "status"),
                    style.text("error", "why"),
                ],
            )
        )
    return layers


def ceiling_rule(value: float, unit: str, name: str) -> list:
    """A dashed rule with its name, for a ceiling measured on the same device."""
    frame = pd.DataFrame({"ceiling": [value], "text": [f"{name} {value:,.0f} {unit}"]})
    rule = alt.Chart(frame).mark_rule(color=style.INK, strokeDash=[2, 3]).encode(x="ceiling:Q")
    label = (
        alt.Chart(frame)
        .mark_text(align="right", dx=-6, dy=-8, fontSize=11, color=style.SLATE)
        .encode(x="ceiling:Q", y=alt.value(0), text="text:N")
    )
    return [rule, label]


def is_sweep(frame: pd.DataFrame) -> bool:
    """Whether most panels have at least three lengths, so that lines over N say more than dots."""
    good = rows.ok(frame)
    return bool(len(good)) and bool((good.groupby("panel")["n"].nunique() >= 3).mean() > 0.5)


def over_n(frame: pd.DataFrame, rate: str, words: str, ceiling: float = float("nan"), ceiling_name: str = ""):
    """Small multiples: throughput over N, one panel a model, batch and mask."""
    low, high, unit = RATES[rate]
    drawn = frame[frame["n"] > 0].assign(ceiling=ceiling)
    good = rows.ok(drawn)
    good = good[good[rate] > 0]
    if good.empty:
        return None
    table = rows.said_once(rows.lost(drawn, ["panel", "n"]))
    data = pd.concat([columns(good, *rate_columns(rate), "ceiling"), table], ignore_index=True)
    data["stale"] = [value is True for value in data["stale"]]
    base = alt.Chart().transform_filter(f"isValid(datum.{rate})")
    x = style.log2_x("n", "N, keys", good["n"])
    colour = style.kernel_colour(drawn["kernel"], legend(rate))
    line = base.mark_line(strokeWidth=2).encode(
        x=x,
        y=alt.Y(field=rate, type="quantitative", title=unit),
        color=colour,
        detail="series:N",
    )
    bars = base.mark_rule(strokeWidth=2).encode(
        x=x, y=alt.Y(field=low, type="quantitative", title=unit), y2=alt.Y2(high), color=colour
    )
    points = base.mark_point(filled=True, size=70).encode(
        x=x,
        y=alt.Y(field=rate, type="quantitative", title=unit),
        color=colour,
        shape=style.kernel_shape(drawn["kernel"], legend(rate)),
        opacity=style.stale_opacity(),
        tooltip=tooltips(rate, unit),
    )
    layers = [line, bars, points]
    layers += column_failures(table, x, colour, alt.Chart())
    kind = known_by(rate, good)
    if ceiling > 0:
        layers.append(alt.Chart().mark_rule(color=style.INK, strokeDash=[2, 3]).encode(y="max(ceiling):Q"))
        kind += f" · dotted: {ceiling_name} {ceiling:,.0f} {unit}"
    order = list(dict.fromkeys(drawn.sort_values(["what", "mask", "b"])["panel"]))
    chart = panels(layers, data, order)
    return style.finish(chart, words, kind, summary(good, rate, words, unit))


def over_bytes(frame: pd.DataFrame):
    """Rate of the memory probes over the bytes they move; dashed where a CUDA graph was replayed."""
    good = rows.ok(frame)
    good = good[(good["modelled_bytes"] > 0) & (good["gbps"] > 0) & ~(good["modelled_flops"] > 0)]
    if good.empty:
        return None
    good = good.assign(mode=good["mode"].replace("", "launch"))
    data = columns(good, *rate_columns("gbps"), "modelled_bytes")
    colour, base = style.kernel_colour(good["kernel"], legend("gbps")), alt.Chart(data)
    x = style.log_x("modelled_bytes", "bytes moved", good["modelled_bytes"], "~s")
    y = alt.Y(field="gbps", type="quantitative", title="GB/s", scale=alt.Scale(zero=True))
    modes = alt.Scale(domain=list(style.MODE_DASH), range=list(style.MODE_DASH.values()))
    dash = alt.StrokeDash(
        field="mode", type="nominal", scale=modes, legend=alt.Legend(title="how it is launched")
    )
    line = base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash, detail="series:N")
    bars = base.mark_rule(strokeWidth=2).encode(
        x=x,
        y=alt.Y(field="gbps_low", type="quantitative", title="GB/s"),
        y2=alt.Y2("gbps_high"),
        color=colour,
    )
    points = base.mark_point(filled=True, size=80).encode(
        x=x,
        y=y,
        color=colour,
        shape=style.kernel_shape(good["kernel"], legend("gbps")),
        opacity=style.stale_opacity(),
        tooltip=tooltips("gbps", "GB/s"),
    )
    chart = alt.layer(line, bars, points).properties(height=360, width="container")
    words = "What the device can move, GB/s, over bytes moved at once"
    return style.finish(chart, words, known_by("gbps", good), summary(good, "gbps", words, "GB/s"))
