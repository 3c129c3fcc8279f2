"""Charts of paged decode over page size: small multiples, and all in one plot. Pure, like `charts`."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from dashboard import rows, style
from dashboard.charts import (
    RATES,
    by_load,
    column_failures,
    columns,
    known_by,
    legend,
    panels,
    rate_columns,
    summary,
    tooltips,
)

FLOOR = "floor, measured: the read probe over the fewest bytes that a kernel of the load requests"


def _drawn(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the floor columns of `rows.with_floor`, empty where the page has added none."""
    return frame if "floor_us" in frame else frame.assign(floor_us=np.nan, floor_gbps=np.nan)


def varied(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of loads that were run with several page sizes; all rows where there is no such load."""
    sizes = frame.groupby(["what", "load"])["page_size"].transform("nunique")
    return frame[sizes > 1] if (sizes > 1).any() else frame


def over_pages(frame: pd.DataFrame, rate: str, loads: str = "batches of one length"):
    """Small multiples over page size, one panel a load; dashed where pages are shuffled.

    Parameters
    ----------
    frame : prepared decode rows, with a floor (see `rows.with_floor`) or without
    rate : "gbps" or "measured_time_us"
    loads : str
        What the panels are, for the title.
    """
    unit = RATES[rate][2]
    drawn = varied(_drawn(frame[frame["page_size"] > 0]))
    good = rows.ok(drawn)
    good = good[good[rate] > 0]
    if good.empty:
        return None
    names = _panel_names(drawn)
    drawn, good = (part.assign(panel=[names[key] for key in _loads(part)]) for part in (drawn, good))
    lost = rows.said_once(rows.lost(drawn, ["panel", "page_size"]))
    floor = "floor_gbps" if rate == "gbps" else "floor_us"
    carried = (*rate_columns(rate), "page_size", "order", floor)
    data = pd.concat([columns(good, *carried), lost], ignore_index=True)
    data["stale"] = [value is True for value in data["stale"]]
    words = f"Decode of {loads} over page size, " + ("requested GB/s" if rate == "gbps" else "time in µs")
    kind = [known_by(rate, good)]
    bounded = good[floor].notna().any()
    if bounded:
        kind[0] += f" · dotted: {FLOOR}"
    kind += spread(good)
    order = list(dict.fromkeys(by_load(drawn)["panel"]))
    chart = panels(_page_layers(good, rate, floor if bounded else "", lost), data, order)
    if rate != "gbps":
        chart = chart.resolve_scale(y="independent")
    return style.finish(chart, words, kind, summary(good, rate, words, unit))


def _loads(frame: pd.DataFrame) -> list[tuple[str, str]]:
    return list(zip(frame["what"], frame["load"]))


def _panel_names(drawn: pd.DataFrame) -> dict[tuple[str, str], str]:
    """A panel's heading: the load, its model where there are several, how far it is from the floor."""
    good = rows.ok(drawn)
    ratio = good.assign(ratio=good["measured_time_us"] / good["floor_us"]).groupby(["what", "load"])["ratio"]
    far = ratio.median().dropna().to_dict()
    several = drawn["what"].nunique() > 1
    names = {}
    for what, load in dict.fromkeys(_loads(drawn)):
        parts = [what] * several + [load]
        if (what, load) in far:
            parts.append(f"{far[what, load]:.2f} × floor")
        names[what, load] = "\n".join(parts).replace(" · ", "\n")  # a line each: a panel is narrow
    return names


def spread(good: pd.DataFrame) -> list[str]:
    """How much page size changes time, in a line: the middle load and the worst, pages in the same order."""
    key = ["what", "load", "variant", "order", "device", "run_id"]
    times = good.groupby([*key, "page_size"])["measured_time_us"].median().groupby(key)
    ratio = (times.max() / times.min())[times.size() > 1] - 1
    if ratio.empty:
        return []
    _, worst, kernel, *_ = ratio.idxmax()
    return [
        f"from its fastest to its slowest page size, a load takes {100 * ratio.median():.0f} % longer in the "
        f"median, at most {100 * ratio.max():.0f} % ({kernel}, {worst})"
    ]


def at_a_glance(frame: pd.DataFrame):
    """Time over page size with the floor under it, in one plot: the batches of the context most were run at.

    Both axes are logarithmic, so that equal ratios to the floor look equal.
    """
    drawn = _drawn(varied(frame[(frame["page_size"] > 0) & ~frame["ragged"] & (frame["length"] > 0)]))
    good = rows.ok(drawn)
    good = good[good["measured_time_us"] > 0]
    if good.empty:
        return None
    loads = good.groupby(["what", "length"])["load"].nunique().sort_values(kind="stable")
    what, length = loads.index[-1]
    good = good[(good["what"] == what) & (good["length"] == length)]
    x = style.log2_x("page_size", "page size, tokens", good["page_size"])
    every = pd.concat([good["measured_time_us"], good["floor_us"].dropna()])
    y = style.log_y("measured_time_us", "µs", every, room=1.25)
    carried = (*rate_columns("measured_time_us"), "page_size", "order", "load", "floor_us")
    layers = _glance_layers(columns(good, *carried), x, y)
    words = "Decode time over page size, µs"
    kind = [f"{what} · batch × context", f"measured on {rows.provenance(good)}"]
    if good["floor_us"].notna().any():
        kind += [f"dotted: {FLOOR}"]
    chart = alt.layer(*layers).properties(height=430, width="container")
    return style.finish(chart, words, kind, summary(good, "measured_time_us", words, "µs"))


def _glance_layers(data: pd.DataFrame, x, y) -> list:
    colour, dash, base = style.kernel_colour(data["kernel"], columns=2), _order_dash(), alt.Chart(data)
    line = base.mark_line(strokeWidth=2).encode(
        x=x, y=y, color=colour, strokeDash=dash, detail=["series:N", "load:N"]
    )
    points = base.mark_point(filled=True, size=60).encode(
        x=x,
        y=y,
        color=colour,
        shape=style.kernel_shape(data["kernel"], columns=2),
        opacity=style.stale_opacity(),
        tooltip=[style.text("order", "pages"), *tooltips("measured_time_us", "µs")],
    )
    ends = data.sort_values("page_size").groupby("load").tail(1)
    names = alt.Chart(ends).mark_text(align="left", dx=12, fontSize=12, fontWeight=600, color=style.INK)
    layers = [line, points, names.encode(x=x, y=y, text="load:N")]
    floors = data[data["floor_us"] > 0].groupby(["load", "page_size"], as_index=False)["floor_us"].min()
    if len(floors):
        rule = alt.Chart(floors).mark_line(color=style.INK, strokeDash=[2, 3], strokeWidth=1.3)
        height = alt.Y(field="floor_us", type="quantitative")
        tell = [style.number("floor_us", "floor, µs")]
        layers.append(rule.encode(x=x, y=height, detail="load:N", tooltip=tell))
    return layers


def _order_dash() -> alt.StrokeDash:
    return alt.StrokeDash(
        field="order",
        type="nominal",
        legend=alt.Legend(title="pages in the pool"),
        scale=alt.Scale(domain=list(style.ORDER_DASH), range=list(style.ORDER_DASH.values())),
    )


def _height(good: pd.DataFrame, rate: str, unit: str) -> alt.Y:
    """From zero; logarithmic where a panel's slowest kernel would press the others to the ground."""
    range_ = good.groupby("panel")[rate].agg(["min", "max"])
    if rate == "gbps" or not (range_["max"] > 20 * range_["min"]).any():
        return alt.Y(field=rate, type="quantitative", title=unit, scale=alt.Scale(zero=True))
    decades = {"condition": {"test": "datum.label !== ''", "value": 1}, "value": 0}
    axis = alt.Axis(format="~s", tickCount=4, labelOverlap=True, gridOpacity=decades)
    return alt.Y(field=rate, type="quantitative", title=unit, scale=alt.Scale(type="log"), axis=axis)


def _page_layers(good: pd.DataFrame, rate: str, floor: str, lost: pd.DataFrame) -> list:
    low, high, unit = RATES[rate]
    base = alt.Chart().transform_filter(f"isValid(datum.{rate})")
    x = style.log2_x("page_size", "page size, tokens", good["page_size"])
    y = _height(good, rate, unit)
    colour = style.kernel_colour(good["kernel"], legend(rate))
    dash = _order_dash()
    layers = [
        base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash, detail="series:N"),
        base.mark_rule(strokeWidth=2).encode(
            x=x, y=alt.Y(field=low, type="quantitative", title=unit), y2=alt.Y2(high), color=colour
        ),
        base.mark_point(filled=True, size=70).encode(
            x=x,
            y=y,
            color=colour,
            shape=style.kernel_shape(good["kernel"], legend(rate)),
            opacity=style.stale_opacity(),
            tooltip=[style.text("order", "pages"), *tooltips(rate, unit)],
        ),
    ]
    layers += column_failures(lost, x, colour, alt.Chart())
    if floor:
        layers.append(
            alt.Chart()
            .mark_rule(color=style.INK, strokeDash=[2, 3])
            .encode(y=alt.Y(field=floor, type="quantitative", aggregate="min", title=unit))
        )
    return layers
