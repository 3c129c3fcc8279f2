"""Decode over latents: its time between that of its bytes and that of its products. Pure, like `charts`."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt
import numpy as np
import pandas as pd

from dashboard import rows, style
from dashboard.charts import columns, panels, rate_columns, summary, tooltips
from dashboard.charts_decode import FLOOR


def over_keys(frame: pd.DataFrame, tflops: Mapping[str, float]):
    """Time over the keys of all sequences, log-log, a panel a number of heads and a line a kernel.

    A line goes through the medians of loads with about as many keys. Graph replays alone where there are
    any, and kernels with their own constants; numbers of heads with less than half as many loads as the
    others are left to the table.

    Parameters
    ----------
    frame : prepared rows of family mla, with `rows.with_floor`
    tflops : mapping of dtype to float
        What `mma.sync` was measured to reach on their device, TFLOP/s; a dtype without it has no such line.
    """
    good = _drawn(rows.ok(frame))
    if good.empty:
        return None
    rate = good["dtype"].map(dict(tflops)).astype("float64")
    good = good.assign(products_us=good["modelled_flops"] / rate / 1e6)
    good = good.assign(about=2.0 ** np.log2(good["keys"]).round())
    middle = good.groupby(["what", "kernel", "about"], as_index=False).agg(
        keys=("keys", "median"), middle_us=("measured_time_us", "median")
    )
    points = columns(good, *rate_columns("measured_time_us"), "keys", "load")
    data = pd.concat([points, middle, _least(good)], ignore_index=True)
    data["panel"], data["stale"] = data["what"], [value is True for value in data["stale"]]
    order = good.sort_values(["h", "what"])["what"].unique().tolist()
    chart = panels(_layers(good), data, order)
    words = "Decode over latents, time in µs over the keys of all sequences"
    kind = [f"measured on {rows.provenance(good)} · lines: medians of loads with about as many keys"]
    kind += _said(good, tflops)
    speak = " ".join([summary(good, "measured_time_us", words, "µs"), *(f"{line}." for line in kind[1:])])
    return style.finish(chart, words, kind, speak)


def _drawn(good: pd.DataFrame) -> pd.DataFrame:
    keys = good["tokens"].fillna(good["b"] * good["n"])
    good = rows.as_served(good.assign(keys=keys)[(good["measured_time_us"] > 0) & (keys > 0)])
    loads = good.groupby("what")["load"].nunique()
    return good[good["what"].isin(loads.index[2 * loads >= loads.max()])]


def _least(good: pd.DataFrame) -> pd.DataFrame:
    """What bytes and products take at the least: of loads with about as many keys, the least for a key."""
    least = good.groupby(["what", "about", "keys"], as_index=False)[["floor_us", "products_us"]].min()
    least = least.assign(each=least["floor_us"] / least["keys"]).sort_values("each", kind="stable")
    least = least.groupby(["what", "about"], as_index=False).head(1).drop(columns="each")
    return least.rename(columns={"floor_us": "bytes_us"})


def _said(good: pd.DataFrame, tflops: Mapping[str, float]) -> list[str]:
    lines = [f"dotted: {FLOOR}"] if good["floor_us"].notna().any() else []
    rates = [f"{tflops[dtype]:,.0f} TFLOP/s in {dtype}" for dtype in sorted(set(good["dtype"])) if dtype in tflops]
    if rates:
        lines.append(f"dashed: modelled flops over the measured rate of mma.sync, {', '.join(rates)}")
    if len(lines) == 2:
        most = good[good["keys"] == good["keys"].max()]
        far = most["measured_time_us"] / most[["floor_us", "products_us"]].max(axis=1)
        spread = far.groupby(most["kernel"]).agg(["min", "max"])
        times = ", ".join(f"{kernel} {low:.2f} to {high:.2f} ×" for kernel, low, high in spread.itertuples())
        lines.append(f"at the most keys, over the longer of both: {times}")
    return lines


def _layers(good: pd.DataFrame) -> list:
    base, every = alt.Chart(), pd.concat([good["measured_time_us"], good["floor_us"][good["floor_us"] > 0]])
    x = style.log2_x("keys", "keys", good["about"])
    y = style.log_y("measured_time_us", "µs", every, room=1.25)
    colour, shape = style.kernel_colour(good["kernel"]), style.kernel_shape(good["kernel"])
    layers = []
    for field, dash, what in (("bytes_us", [2, 3], "read floor, µs"), ("products_us", [7, 4], "products, µs")):
        line = base.transform_filter(f"datum.{field} > 0").mark_line(
            color=style.INK, strokeDash=dash, strokeWidth=1.3, clip=True
        )
        height = alt.Y(field=field, type="quantitative", title="µs")
        layers.append(line.encode(x=x, y=height, tooltip=[style.number(field, what)]))
    line = base.transform_filter("isValid(datum.middle_us)").mark_line(strokeWidth=2)
    points = base.transform_filter("isValid(datum.measured_time_us)").mark_point(filled=True, size=45)
    middle = alt.Y(field="middle_us", type="quantitative", title="µs")
    return [
        *layers,
        line.encode(x=x, y=middle, color=colour),
        points.encode(
            x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(0.7),
            tooltip=[style.text("load", "batch × context"), *tooltips("measured_time_us", "µs")],
        ),
    ]  # fmt: skip
