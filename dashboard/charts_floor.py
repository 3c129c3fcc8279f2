"""How far decode is from the read floor, from the smallest load to the largest. Pure, like `charts`."""

from __future__ import annotations

import math

import altair as alt
import pandas as pd

from dashboard import rows, style
from dashboard.charts import columns, rate_columns, summary, tooltips

PAGE = 16  # what most servers page by


def over_floor(frame: pd.DataFrame):
    """Time over the read floor, over that floor, which stands for the bytes of a load.

    A line is what a kernel, with its own constants, reaches in the median of loads about as large. Graph
    replays alone where there are any, which is how a server decodes. Quantised caches and features are left out:
    their loads have other bytes or other work, and a line through both would be neither's.

    Parameters
    ----------
    frame : prepared decode rows, with `rows.with_floor`
    """
    good = rows.ok(frame)
    # The floor of a load is one for all: a library says nothing of its bytes.
    good = good.assign(floor_us=good.groupby(["what", "load"])["floor_us"].transform("min"))
    good = rows.as_served(good[(good["page_size"] == PAGE) & (good["floor_us"] > 0) & (good["measured_time_us"] > 0)
                               & ~good["ragged"] & (good["kv_dtype"] == "") & (good["features"] == "")])
    if good["load"].nunique() < 2:
        return None
    data = columns(good, *rate_columns("measured_time_us"), "load", "floor_us")
    data["far"] = (good["measured_time_us"] / good["floor_us"]).to_numpy()
    data["about"] = [2.0 ** round(math.log2(floor)) for floor in data["floor_us"]]
    x = style.log_x("floor_us", "read floor of the load, µs", data["floor_us"], room=1.2)
    y = alt.Y(field="far", type="quantitative", title="times the floor", scale=alt.Scale(zero=True))
    colour = style.kernel_colour(data["kernel"], columns=3)
    base = alt.Chart(data)
    middle = data.groupby(["kernel", "about"], as_index=False).agg(far=("far", "median"),
                                                                     floor_us=("floor_us", "median"))
    line = alt.Chart(middle).mark_line(strokeWidth=2).encode(x=x, y=y, color=colour)
    points = base.mark_point(filled=True, size=45).encode(
        x=x, y=y, color=colour, shape=style.kernel_shape(data["kernel"], columns=3),
        opacity=style.stale_opacity(0.6),
        tooltip=[style.text("load", "batch × context"), style.number("far", "times the floor"),
                 *tooltips("measured_time_us", "µs")],
    )
    words = "Decode time over the read floor"
    kind = [f"pages of {PAGE} · measured on {rows.provenance(good)} · lines: medians of loads about as large",
            "the floor: a kernel that only reads the fewest bytes that a kernel of the load requests"]
    chart = alt.layer(line, points).properties(height=380, width="container")
    return style.finish(chart, words, kind, summary(good, "measured_time_us", words, "µs"))

