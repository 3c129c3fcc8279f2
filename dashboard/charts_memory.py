"""Charts of memory: peak over N beside its formula, and throughput against peak. Pure, like `charts`."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from dashboard import rows, style
from dashboard.charts import column_failures, columns, rate_columns, tooltips

HEIGHT, NARROW = 460, 430
NAME_WIDTH, NAME_HEIGHT = 0.3, 0.04  # of a plot, that the name of a point takes
MEASURED_PEAK, FORMULA = "measured peak", "modelled"


def peak_over_n(frame: pd.DataFrame, narrow: bool = False):
    """Peak memory over N, both axes logarithmic: measured marks, the formula a dashed line.

    `narrow` is for half a page.

    A failure is a cross on the line of its formula, which says what it would have needed.
    """
    drawn = frame[frame["n"] > 0]
    long = _long(drawn)
    if long.empty:
        return None
    wrap = {"columns": 3} if narrow else {}
    colour = style.kernel_colour(long["kernel"], "kernel", **wrap)
    x = style.log2_x("n", "N, keys", long["n"])
    unit, scale = ("GB", 1) if long["gb"].max() >= 0.5 else ("MB", 1000)
    long = long.assign(amount=long["gb"] * scale)
    y = style.log_y("amount", unit, long["amount"], room=2.5)  # a failure has its name above it
    tell = [
        style.text("variant", "kernel"),
        style.text("shape", "shape"),
        style.text("source", "value is"),
        style.number("amount", unit),
        style.text("device", "device"),
        style.text("stale", "stale"),
    ]
    measured = long[long["source"] == MEASURED_PEAK]
    formula = alt.Chart(long[long["source"] == FORMULA])
    lines = formula.mark_line(strokeWidth=1.6, strokeDash=[5, 4]).encode(
        x=x, y=y, color=colour, detail=["variant:N", "run_id:N"], tooltip=tell
    )
    shape = style.kernel_shape(long["kernel"], "kernel", **wrap)
    points = [
        alt.Chart(measured[measured["kernel"] == kernel])
        .mark_point(filled=True, size=95, xOffset=shift)
        .encode(x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(), tooltip=tell)
        for kernel, shift in _side_by_side(measured)
    ]
    names = [*_line_names(long, x, y, colour, 110 if narrow else 230), *_failures(drawn, scale, x, y, colour)]
    chart = alt.layer(*_capacity(drawn, long["amount"].max(), scale, unit), lines, *points, *names)
    words = f"Peak memory over N, {unit}"
    kind = [" · ".join([*drawn["panel"].unique(), *drawn["device"].unique()])]
    kind += ["marks: measured peak of the pool, equal ones side by side"] if len(measured) else []
    kind += ["dashed: modelled, inputs + outputs + scratch"]
    worst = long.loc[long["gb"].idxmax()]
    speak = (
        f"{words}, log-log, for {', '.join(sorted(long['kernel'].unique()))}; most is {worst['gb']:.3g} GB "
        f"by {worst['kernel']} at N {worst['n']:.0f} ({worst['source']})."
    )
    chart = chart.properties(height=NARROW if narrow else HEIGHT, width="container")
    return style.finish(chart, words, kind, speak)


def _long(drawn: pd.DataFrame) -> pd.DataFrame:
    """One row a source and point. Only cases that passed have a measured peak; the formula holds for all."""
    good = rows.ok(drawn)
    long = pd.concat(
        [
            good.assign(source=MEASURED_PEAK, gb=good["peak_gb"]),
            drawn.assign(source=FORMULA, gb=drawn["formula_gb"]),
        ]
    )
    # Later rows are drawn on top: the toolkit's own kernels, where lines coincide.
    place = list(style.kernel_table(long["kernel"]))
    long = long[long["gb"] > 0].assign(
        place=[place.index(kernel) for kernel in long.loc[long["gb"] > 0, "kernel"]]
    )
    return columns(
        long.sort_values("place", ascending=False, kind="stable"),
        "n",
        "gb",
        "formula_gb",
        "source",
        "kernel",
        "variant",
        "shape",
        "run_id",
        "series",
        "mode",
        "device",
        "cache_mode",
        "stale",
    )


def _capacity(drawn: pd.DataFrame, most: float, scale: float, unit: str) -> list:
    """A line at the memory there is, the device's or what a limit leaves, where a curve comes near it."""
    left = (drawn["memory_limit_bytes"] - drawn["memory_reserve_bytes"]).max()
    name = "memory of the device" if np.isnan(left) else "what the memory limit leaves"
    held = (drawn["device_bytes"].max() if np.isnan(left) else left) / 1e9 * scale
    if not held <= 3 * most:
        return []
    amount = f"{held:,.0f}" if held >= 10 else f"{held:.2g}"
    data = pd.DataFrame({"amount": [held], "text": [f"{name}, {amount} {unit}"]})
    base = alt.Chart(data).encode(y=alt.Y(field="amount", type="quantitative"))
    rule = base.mark_rule(color=style.INK, strokeDash=[2, 3])
    words = base.mark_text(align="left", dx=6, dy=9, fontSize=11.5, color=style.SLATE)
    return [rule, words.encode(x=alt.value(0), text="text:N")]


def _side_by_side(measured: pd.DataFrame) -> list[tuple[str, int]]:
    """Pixels by which a kernel's marks are moved, or marks of equal memory would hide each other.

    Only kernels that need about as much memory as one of the toolkit's own at some N are moved, left and
    right of it by turns.
    """
    table = list(style.kernel_table(measured["kernel"]))
    present = sorted(set(measured["kernel"]), key=table.index, reverse=True)
    own = measured[measured["kernel"].isin(style.OWN)]
    pairs = measured[~measured["kernel"].isin(style.OWN)].merge(own, on="n", suffixes=("", "_own"))
    near = set(pairs.loc[np.log(pairs["gb"] / pairs["gb_own"]).abs() < 0.25, "kernel"])
    moved = [kernel for kernel in present if kernel in near]
    steps = {kernel: (place // 2 + 1) * (-12 if place % 2 else 12) for place, kernel in enumerate(moved)}
    return [(kernel, steps.get(kernel, 0)) for kernel in present]


def _line_names(long: pd.DataFrame, x, y, colour, most: int) -> list:
    """The name, of `most` pixels, at the right end of every formula's line where no other stands already."""
    lines = long[long["source"] == FORMULA]
    ends = lines.sort_values("n").groupby("variant").tail(1).sort_values(["amount", "variant"])
    kept, span = [], np.log(long["amount"].max() / long["amount"].min()) or 1.0
    for index, amount in ends["amount"].items():
        if not kept or np.log(amount / ends.loc[kept[-1], "amount"]) > 0.05 * span:
            kept.append(index)
    text = alt.Chart(ends.loc[kept]).mark_text(align="left", dx=14, fontSize=12, limit=most)
    return [text.encode(x=x, y=y, text="variant:N", color=colour)]


def _failures(drawn: pd.DataFrame, scale: float, x, y, colour) -> list:
    """A cross on the formula's line where a case failed; above the plot where there is no formula."""
    bad = rows.failed(drawn)
    on_line = bad[bad["formula_gb"] > 0].drop_duplicates(["n", "variant", "status"])
    layers = column_failures(rows.lost(drawn[~drawn.index.isin(on_line.index)], ["n"]), x, colour)
    if on_line.empty:
        return layers
    data = columns(
        on_line.assign(
            amount=on_line["formula_gb"] * scale,
            cross="✕",
            text=on_line["status"].str.replace("_", " "),
        ),
        *("n", "amount", "kernel", "variant", "status", "error", "cross", "text"),
    )
    tell = [style.text("variant", "kernel"), style.text("status", "status"), style.text("error", "why")]
    base = alt.Chart(data).encode(x=x, y=y, color=colour, tooltip=tell)
    cross = base.mark_text(fontSize=19, fontWeight=700).encode(text="cross:N")
    return [*layers, cross, base.mark_text(dy=-16, fontSize=12, fontWeight=600).encode(text="text:N")]


def pareto(frame: pd.DataFrame):
    """Throughput against peak memory for one shape: the front as a step line, dominated points grey.

    Cases without a time stand in words at the right end of the axis, most expensive memory last.
    """
    good = rows.ok(frame)
    good = good[(good["peak_gb"] > 0) & (good["tflops"] > 0)]
    if good.empty:
        return None
    good = good.assign(front=rows.pareto(good, "peak_gb", "tflops"))
    data = columns(good, *rate_columns("tflops"), "peak_gb", "front")
    x = style.log_x("peak_gb", "measured peak memory, GB (10⁹ bytes)", good["peak_gb"], room=1.8)
    top = alt.Scale(domain=[0, good["tflops"].max() * 1.15])
    y = alt.Y(field="tflops", type="quantitative", title="TFLOP/s", scale=top)
    colour, base = style.kernel_colour(good["kernel"]), alt.Chart(data)
    grey = alt.condition("datum.front", colour, alt.value(style.FAINT))
    front = (
        alt.Chart(_front_line(data))
        .mark_line(interpolate="step-after", color=style.INK, strokeWidth=1.3, opacity=0.5)
        .encode(x=x, y=y)
    )
    bars = base.mark_rule(strokeWidth=2).encode(
        x=x,
        y=alt.Y(field="tflops_low", type="quantitative", title="TFLOP/s"),
        y2=alt.Y2("tflops_high"),
        color=grey,
    )
    points = base.mark_point(filled=True, size=150).encode(
        x=x,
        y=y,
        color=grey,
        shape=style.kernel_shape(good["kernel"]),
        opacity=style.stale_opacity(),
        tooltip=[style.number("peak_gb", "peak, GB"), *tooltips("tflops", "TFLOP/s")],
    )
    names = alt.Chart(_named(data)).mark_text(align="left", dx=12, dy=-10, fontSize=12, fontWeight=600)
    names = names.encode(x=x, y=y, text="variant:N", color=colour)
    end = _without_time(frame)
    chart = alt.layer(front, bars, points, names, *end).properties(height=HEIGHT, width="container")
    words = f"Throughput against peak memory: {good['shape'].iloc[0]}"
    kind = f"measured on {rows.provenance(good)} · up and left is better; grey points are beaten in both"
    names_front = ", ".join(data.loc[data["front"], "variant"])
    return style.finish(chart, words, kind, f"{words}. On the front: {names_front}.")


def _named(data: pd.DataFrame) -> pd.DataFrame:
    """One point a variant, those whose names would be written over another's left out: the front first."""
    first = data.sort_values(["front", "tflops"], ascending=False).drop_duplicates("variant")
    places = pd.DataFrame({"x": np.log10(first["peak_gb"]), "y": first["tflops"] / first["tflops"].max()})
    wide, kept = max(1.0, np.ptp(places["x"])), []
    for index, place in places.iterrows():
        taken = (places.loc[kept] - place).abs() < [NAME_WIDTH * wide, NAME_HEIGHT]
        if not taken.all(axis=1).any():
            kept.append(index)
    return first.loc[kept]


def _front_line(data: pd.DataFrame) -> pd.DataFrame:
    """The front's points in order of memory, then level to the most expensive point."""
    front = data.loc[data["front"], ["peak_gb", "tflops"]].sort_values("peak_gb")
    end = pd.DataFrame({"peak_gb": [data["peak_gb"].max()], "tflops": [front["tflops"].max()]})
    return pd.concat([front, end], ignore_index=True)


def _without_time(frame: pd.DataFrame) -> list:
    """Failures in words at the right end of the memory axis."""
    table = rows.lost(frame, ["shape"])
    if table.empty:
        return []
    lines = "\n".join("✕ " + table["variant"] + ": " + table["status"])
    why = " · ".join(filter(None, table["error"]))
    data = pd.DataFrame({"text": [lines], "error": [why]})
    words = alt.Chart(data).mark_text(
        align="right", baseline="bottom", lineBreak="\n", fontSize=12, color=style.VERMILLION, dx=-6
    )
    return [
        words.encode(
            x=alt.value("width"), y=alt.value("height"), text="text:N", tooltip=[style.text("error", "why")]
        )
    ]
