"""Charts of errors against float64, over the number and by the order of chunks; what sums cost. Pure.

An error is *compared*, on whichever machine: its mark is hollow, and a tolerance is a stroke.
"""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from dashboard import rows, style
from dashboard.charts import columns, panels, tooltips
from dashboard.labels import count
from experiments.suite import AXES

TITLE, ORDER = "dtype of the sums", "order of keys"
CARRIED = (
    "panel",
    "chunks",
    "chunk",
    "accumulate",
    "key_order",
    "kernel",
    "variant",
    "shape",
    "device",
    "status",
    "run_id",
)
STROKE = "M-1.3,0L1.3,0"  # level, as a Vega symbol path


def _paneled(made: pd.DataFrame) -> pd.DataFrame:
    return made.assign(panel=[f"N{count(n)} · {dtype}" for n, dtype in zip(made["n"], made["dtype"])])


def _order(drawn: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(drawn.sort_values(["dtype", "n"], ascending=[False, True])["panel"]))


def over_chunks(made: pd.DataFrame):
    """Small multiples by N and dtype: largest error over the number of chunks, a line a dtype of sums.

    Parameters
    ----------
    made : pandas.DataFrame
        From `chunks.of`, of one kernel. A row that ended incorrect is a cross at its error, and on no line.
    """
    drawn = _paneled(_compared(made))
    if drawn.empty:
        return None
    x = style.log2_x("chunks", "number of chunks", drawn["chunks"])
    marks = _error_layers(drawn, x, style.number("chunks", "chunks"))
    line = alt.Chart().transform_filter("datum.status === 'ok'").mark_line(strokeWidth=1.2, opacity=0.6)
    across = {name: marks[0].encoding[name] for name in ("x", "y", "color")}
    marks.append(line.encode(**across, detail=["accumulate:N", "run_id:N"]))
    words = "Largest error against float64 over the number of chunks"
    worst = drawn.loc[drawn["max_err"].idxmax()]
    speak = (
        f"{words}, a line a dtype of sums: {len(drawn)} results; the largest error is {worst['max_err']:.3g} "
        f"with sums in {worst['accumulate']} over {worst['chunks']:.0f} chunks."
    )
    return style.finish(panels(marks, _error_data(drawn), _order(drawn)), words, _error_kind(drawn), speak)


def by_order(made: pd.DataFrame):
    """Small multiples by N, chunks and dtype: largest error by the order of keys, a mark a dtype of sums.

    Parameters
    ----------
    made : pandas.DataFrame
        From `chunks.of`, of one kernel, with a `key_order`. A row that ended incorrect is a cross.
    """
    drawn = _paneled(_compared(made))
    if drawn.empty:
        return None
    names = zip(drawn["panel"], drawn["chunks"])
    drawn = drawn.assign(panel=[f"{panel} · {number:.0f} chunks" for panel, number in names])
    flat = alt.Axis(labelAngle=0)
    x = alt.X(field="key_order", type="nominal", sort=list(AXES["key_order"].choices), title=ORDER, axis=flat)
    marks = _error_layers(drawn, x, style.text("key_order", ORDER))
    words = "Largest error against float64 by the order in which chunks are added"
    kind = [*_error_kind(drawn), "rising: those that weigh least are added first; all orders hold equal keys"]
    means = drawn.groupby(["accumulate", "key_order"])["max_err"].median()
    said = ", ".join(f"{sums} {order} {error:.3g}" for (sums, order), error in means.items())
    speak = f"{words}, a mark a dtype of sums: {len(drawn)} results; medians of the panels: {said}."
    return style.finish(panels(marks, _error_data(drawn), _order(drawn)), words, kind, speak)


def _compared(made: pd.DataFrame) -> pd.DataFrame:
    return made[(made["max_err"] > 0) & made["status"].isin(["ok", "incorrect"])]


def _error_data(drawn: pd.DataFrame) -> pd.DataFrame:
    return columns(drawn, *CARRIED, "max_err", "tolerance", "stale")


def _error_kind(drawn: pd.DataFrame) -> list[str]:
    """What is drawn and where it comes from, and what its marks are."""
    return [
        f"{drawn['kernel'].iloc[0]} · {drawn['held'].iloc[0]} · {', '.join(dict.fromkeys(drawn['device']))}",
        "hollow marks: error of the result; level strokes: the tolerance it is held to"
        + ("; ✕: incorrect" if (drawn["status"] != "ok").any() else ""),
    ]


def _error_layers(drawn: pd.DataFrame, x: alt.X, place: alt.Tooltip) -> list:
    """A hollow mark a result, a stroke at each tolerance, a cross at what is incorrect; `place` tells `x`."""
    good, bad, allowed = (
        alt.Chart().transform_filter(test)
        for test in ("datum.status === 'ok'", "datum.status !== 'ok'", "datum.tolerance > 0")
    )
    every = pd.concat([drawn["max_err"], drawn.loc[drawn["tolerance"] > 0, "tolerance"]])
    y = style.log_y("max_err", "largest |O − float64|", every, "~e")
    limit = style.log_y("tolerance", "largest |O − float64|", every, "~e")
    colour, shape = style.marks("accumulate", style.SUMS, drawn["accumulate"], TITLE)
    tell = [style.text("accumulate", TITLE), place, *_tell()]
    hollow = good.mark_point(filled=False, size=85, strokeWidth=2)
    stroke = allowed.mark_point(filled=False, shape=STROKE, size=110, strokeWidth=2, opacity=0.55)
    cross = bad.mark_text(text="✕", fontSize=15, fontWeight=700, color=style.STATUSES["incorrect"])
    return [
        hollow.encode(
            x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(), tooltip=tell
        ),
        stroke.encode(x=x, y=limit, color=colour, tooltip=tell),
        cross.encode(x=x, y=y, tooltip=tell),
    ]


def _tell() -> list[alt.Tooltip]:
    """What every mark of an error tells."""
    return [
        style.text("variant", "kernel"),
        style.text("shape", "shape"),
        style.number("max_err", "largest error", ".3e"),
        style.number("tolerance", "tolerance", ".3e"),
        style.text("status", "status"),
        *style.origin(),
    ]


def time_over_chunks(made: pd.DataFrame):
    """Small multiples by N and dtype: measured time over the number of chunks, a line a dtype of sums."""
    good = rows.ok(made)
    good = _paneled(good[good["measured_time_us"] > 0])
    if good.empty:
        return None
    for name in ("measured_time_us", "time_low", "time_high"):
        good[name] = good[name] / 1e3
    more = ("mode", "dtype", "stale", "measured_n_samples", "measured_time_us", "time_low", "time_high")
    data = columns(good, *CARRIED, *more)
    x = style.log2_x("chunks", "number of chunks", good["chunks"])
    y = alt.Y(field="measured_time_us", type="quantitative", title="ms", scale=alt.Scale(zero=True))
    low = alt.Y(field="time_low", type="quantitative", title="ms")
    colour, shape = style.marks("accumulate", style.SUMS, good["accumulate"], f"{TITLE} (measured)")
    tell = [style.text("accumulate", TITLE), style.number("chunks", "chunks"),
            *tooltips("measured_time_us", "ms")]
    base = alt.Chart()
    layers = [
        base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, detail=["accumulate:N", "run_id:N"]),
        base.mark_rule(strokeWidth=2).encode(x=x, y=low, y2=alt.Y2("time_high"), color=colour),
        base.mark_point(filled=True, size=75).encode(
            x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(), tooltip=tell
        ),
    ]
    words = "Time over the number of chunks, ms"
    kind = f"measured on {rows.provenance(good)} · median; the bar spans the quartiles"
    chart = panels(layers, data, _order(good)).resolve_scale(y="independent")
    worst = good.loc[good["measured_time_us"].idxmax()]
    speak = (
        f"{words}, a line a dtype of sums: {len(good)} measured points; the longest is "
        f"{worst['measured_time_us']:.4g} ms over {worst['chunks']:.0f} chunks in {worst['accumulate']}."
    )
    return style.finish(chart, words, kind, speak)


def margins(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that were compared, with `margin`: their largest error over what it may be."""
    judged = frame["status"].isin(["ok", "incorrect"])
    known = frame[judged & (frame["tolerance"] > 0) & (frame["max_err"] >= 0)]
    margin = known["max_err"] / known["tolerance"]
    return known.assign(margin=margin)[np.isfinite(margin)]


def against_tolerance(known: pd.DataFrame):
    """Every compared result of every kernel: its error as a share of the tolerance; not beyond 1."""
    if known.empty:
        return None
    order = list(known.groupby("kernel")["margin"].max().sort_values(ascending=False).index)
    fields = ("kernel", "variant", "shape", "dtype", "margin", "max_err", "tolerance", "status", "device")
    base = alt.Chart(columns(known, *fields, "run_id", "stale"))
    y = style.row_axis("kernel", order)
    title, axis = "error ÷ tolerance", alt.Axis(tickCount=8)
    x = alt.X(field="margin", type="quantitative", title=title, scale=alt.Scale(zero=True), axis=axis)
    tell = [style.number("margin", title), style.text("dtype", "dtype"), *_tell()]
    good, bad = (base.transform_filter(f"datum.status {sign} 'ok'") for sign in ("===", "!=="))
    marks = good.mark_point(filled=False, size=60, strokeWidth=1.5).encode(
        x=x,
        y=y,
        color=style.kernel_colour(known["kernel"], "kernel"),
        shape=style.kernel_shape(known["kernel"], "kernel"),
        opacity=style.stale_opacity(0.6),
        tooltip=tell,
    )
    crosses = bad.mark_text(text="✕", fontSize=14, fontWeight=700, color=style.VERMILLION)
    limit = alt.Chart(pd.DataFrame({"margin": [1.0]})).mark_rule(color=style.MUTED, strokeDash=[2, 3])
    layers = [limit.encode(x="margin:Q"), marks, crosses.encode(x=x, y=y, tooltip=tell)]
    chart = alt.layer(*layers).properties(height=alt.Step(30), width="container")
    lost = int((known["status"] != "ok").sum())
    words = "Largest error of every result over its tolerance"
    kind = f"compared with float64: {len(known)} results, {lost} incorrect (✕) · dotted: the tolerance"
    worst = known.loc[known["margin"].idxmax()]
    speak = f"{words}: the nearest to it is {worst['kernel']} at {worst['shape']} with {worst['margin']:.3g}."
    return style.finish(chart, words, kind, speak)
