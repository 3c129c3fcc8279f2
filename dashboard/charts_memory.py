"""Charts of memory: peak over N beside its formula, and throughput against peak. Pure, like `charts`."""

from __future__ import annotations

import altair as alt
import pandas as pd

from dashboard import rows, style
from dashboard.charts import column_failures, columns, rate_columns, tooltips

HEIGHT = 460
MEASURED_PEAK, FORMULA = "measured peak (memory pool)", "modelled: inputs + outputs + scratch"


def peak_over_n(frame: pd.DataFrame):
    """Peak memory over N, both axes logarithmic: measured marks, the formula a dashed line.

    Failures stand above the plot, at their N.
    """
    drawn = frame[frame["n"] > 0]
    long = _long(drawn)
    if long.empty:
        return None
    colour = style.kernel_colour(long["kernel"], "kernel")
    x = style.log2_x("n", "N, keys", long["n"])
    unit, scale = ("GB", 1) if long["gb"].max() >= 0.5 else ("MB", 1000)
    long = long.assign(amount=long["gb"] * scale)
    y = style.log_y("amount", unit, long["amount"])
    tell = [
        style.text("variant", "kernel"),
        style.text("shape", "shape"),
        style.text("source", "value is"),
        style.number("amount", unit),
        style.text("device", "device"),
        style.text("stale", "stale"),
    ]
    measured = long[long["source"] == MEASURED_PEAK]
    formula, marks = alt.Chart(long[long["source"] == FORMULA]), alt.Chart(measured)
    lines = formula.mark_line(strokeWidth=1.6).encode(
        x=x, y=y, color=colour, strokeDash=_line_legend(), detail=["variant:N", "run_id:N"], tooltip=tell
    )
    points = marks.mark_point(filled=True, size=105).encode(
        x=x,
        y=y,
        color=colour,
        shape=style.kernel_shape(long["kernel"], "kernel"),
        opacity=style.stale_opacity(),
        tooltip=tell,
    )
    failures = column_failures(rows.lost(drawn, ["n"]), x, colour)
    chart = alt.layer(lines, *([points] if len(measured) else []), *_variant_names(long, x, y), *failures)
    words = f"Peak memory over N, in {unit}"
    kind = "dashed: modelled as inputs + outputs + scratch; no measured peak in these rows"
    if len(measured):
        devices = ", ".join(measured["device"].unique())
        kind = f"marks: measured peak of the memory pool on {devices} · dashed: modelled"
    worst = long.loc[long["gb"].idxmax()]
    speak = (
        f"{words}, log-log, for {', '.join(sorted(long['kernel'].unique()))}; most is {worst['gb']:.3g} GB "
        f"by {worst['kernel']} at N {worst['n']:.0f} ({worst['source']})."
    )
    return style.finish(chart.properties(height=HEIGHT, width="container"), words, kind, speak)


def _line_legend() -> alt.StrokeDash:
    """Names the dashed line in the legend; measured marks have no line."""
    scale = alt.Scale(domain=[FORMULA], range=[[5, 4]])
    return alt.StrokeDash(
        field="source", type="nominal", scale=scale, legend=alt.Legend(title="line", symbolLimit=0)
    )


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


def _variant_names(long: pd.DataFrame, x, y) -> list:
    """The constants at the right end of a line, where a kernel was run with several."""
    many = long[long["variant"] != long["kernel"]]
    ends = many.sort_values(["n", "source"], ascending=[True, False]).groupby(["variant"]).tail(1)
    if ends.empty:
        return []
    return [
        alt.Chart(ends)
        .mark_text(align="right", dx=-8, dy=-9, fontSize=11, color=style.SLATE)
        .encode(x=x, y=y, text="variant:N")
    ]


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
    names = base.mark_text(align="left", dx=12, dy=-10, fontSize=12, color=style.SLATE).encode(
        x=x, y=y, text="variant:N"
    )
    end = _without_time(frame)
    chart = alt.layer(front, bars, points, names, *end).properties(height=HEIGHT, width="container")
    words = f"Throughput against peak memory: {good['shape'].iloc[0]}"
    kind = f"measured on {rows.provenance(good)} · up and left is better; grey points are beaten in both"
    names_front = ", ".join(data.loc[data["front"], "variant"])
    return style.finish(chart, words, kind, f"{words}. On the front: {names_front}.")


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
