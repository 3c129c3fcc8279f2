"""Charts of what was run: counters beside closed forms, outcomes, attempts over time. Pure, like `charts`."""

from __future__ import annotations

import altair as alt
import pandas as pd

from dashboard import rows, style
from dashboard.charts import columns

COUNTED, MODELLED = "counted (CPU machine)", "modelled (closed form)"
TICK = "M0,-1.4L0,1.4"  # a vertical stroke, as a Vega symbol path


def counted_against_modelled(frame: pd.DataFrame):
    """Requested global bytes: counted on the CPU machine (circle), and the closed form (a tick in it)."""
    known = rows.ok(frame)
    known = known[(known["counted_bytes"] > 0) & (known["modelled_bytes"] > 0)]
    if known.empty:
        return None
    names = zip(known["variant"], known["kernel"], known["shape"])
    cases = [name if shape == kernel else f"{name} · {shape}" for name, kernel, shape in names]
    known = known.assign(case=cases)
    known = known.drop_duplicates(["case", "dtype", "counted_bytes", "modelled_bytes"])
    order = known.sort_values(["family", "kernel", "counted_bytes"])["case"].unique().tolist()
    long = pd.concat(
        [
            known.assign(source=COUNTED, bytes=known["counted_bytes"]),
            known.assign(source=MODELLED, bytes=known["modelled_bytes"]),
        ]
    )
    names = ("case", "source", "bytes", "dtype", "counted_bytes", "modelled_bytes", "counted_launches")
    long = columns(long, *names)
    key = {"domain": [COUNTED, MODELLED]}
    legend = alt.Legend(title="bytes requested", symbolLimit=0, symbolSize=110, orient="top")
    chart = (
        alt.Chart(long)
        .mark_point(filled=False, size=110, strokeWidth=2)
        .encode(
            x=style.log_x("bytes", "bytes requested of global memory", long["bytes"], "~s"),
            y=style.row_axis("case", order),
            color=alt.Color(
                field="source",
                type="nominal",
                legend=legend,
                scale=alt.Scale(**key, range=[style.SKY, style.INK]),
            ),
            shape=alt.Shape(
                field="source", type="nominal", legend=legend, scale=alt.Scale(**key, range=["circle", TICK])
            ),
            tooltip=[
                style.text("case", "case"),
                style.text("dtype", "dtype"),
                style.number("counted_bytes", "counted", ","),
                style.number("modelled_bytes", "modelled", ","),
                style.number("counted_launches", "launches", ","),
            ],
        )
        .properties(height=alt.Step(26), width="container")
    )
    equal = int((known["counted_bytes"] == known["modelled_bytes"]).sum())
    kind = f"no GPU was involved and no time is modelled · equal to the byte in {equal} of {len(known)} cases"
    words = "Global bytes a run requests: counted and modelled"
    return style.finish(chart, words, kind, f"{words}; {equal} of {len(known)} cases agree to the byte.")


def statuses(frame: pd.DataFrame):
    """How many cases of every suite and device ended how."""
    if frame.empty:
        return None
    named = frame.assign(
        suite=frame["suite"].replace("", "(no suite)"), device=frame["device"].replace("", "unknown")
    )
    named = named.assign(group=named["suite"] + " · " + named["device"])
    table = named.groupby(["group", "status"], as_index=False).size()
    place = {name: index for index, name in enumerate(style.STATUSES)}
    table["place"] = table["status"].map(place).fillna(len(place))
    base = alt.Chart(table).encode(
        y=alt.Y(field="group", type="nominal", title=None, axis=alt.Axis(domain=False, ticks=False)),
        x=alt.X(
            field="size",
            type="quantitative",
            stack="zero",
            title="cases",
            axis=alt.Axis(tickMinStep=1, tickCount=8),
        ),
        order=alt.Order(field="place", type="quantitative"),
    )
    bars = base.mark_bar(height={"band": 0.62}, stroke="white", strokeWidth=1.5).encode(
        color=style.status_colour(table["status"]),
        tooltip=[
            style.text("group", "suite · device"),
            style.text("status", "status"),
            style.number("size", "cases"),
        ],
    )
    chart = bars.properties(height=alt.Step(34), width="container")
    total, good = len(frame), int((frame["status"] == "ok").sum())
    kind = f"{good} of {total} cases ended ok · every case is a row, whatever its outcome"
    return style.finish(
        chart, "Cases by suite and status", kind, f"Cases by suite and status: {good} of {total} ok."
    )


def timeline(frame: pd.DataFrame):
    """When every attempt started, in UTC, and how it ended."""
    known = frame[frame["started_at"].notna()]
    if known.empty:
        return None
    data = columns(known, "started_at", "suite", "status", "kernel", "shape", "error")
    chart = (
        alt.Chart(data)
        .mark_tick(thickness=2.5, height={"band": 0.7})
        .encode(
            x=alt.X(
                field="started_at",
                type="temporal",
                title="start of the attempt, UTC",
                scale=alt.Scale(type="utc"),
                axis=alt.Axis(format="%d %b %H:%M", labelOverlap=True),
            ),
            y=alt.Y(field="suite", type="nominal", title=None, axis=alt.Axis(domain=False, ticks=False)),
            color=style.status_colour(known["status"]),
            tooltip=[
                style.text("kernel", "kernel"),
                style.text("shape", "shape"),
                style.text("status", "status"),
                style.text("error", "why"),
            ],
        )
        .properties(height=alt.Step(38), width="container")
    )
    span = f"{known['started_at'].min():%Y-%m-%d %H:%M} to {known['started_at'].max():%Y-%m-%d %H:%M} UTC"
    return style.finish(
        chart, "Attempts over time", span, f"{len(known)} attempts from {span}, coloured by status."
    )
