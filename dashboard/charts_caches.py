"""What decode over caches of bytes takes beside the same load over a cache of the queries' dtype. Pure."""

from __future__ import annotations

import altair as alt
import pandas as pd

from dashboard import labels, rows, style
from dashboard.charts import columns, rate_columns, row_failures, summary, tooltips

# What two rows share that differ in their cache alone: the load, and how and where it was run.
SAME = ["run_id", "device", "mode", "cache_mode", "variant", "dtype", "shape", "order"]


def beside_plain(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of loads that were run over a quantised cache, whatever their own cache holds.

    Labels are those of the load, without its cache; where several kernels ran, `shape` names the row's too. Adds
    `cache`, the dtype it holds, `load_bytes`, the most that a kernel requests of the load, and `of_plain`, the
    time of a row over a quantised cache as a share of the same load's over one of the queries' dtype in the
    same run; NaN where either is missing.

    Parameters
    ----------
    frame : prepared decode rows
    """
    quantised = frame["kv_dtype"] != ""
    held = frame["kv_dtype"].where(quantised, frame["dtype"])
    out = labels.add(frame.assign(kv_dtype="")).assign(kv_dtype=frame["kv_dtype"], cache=held)
    out = out[out.assign(quantised=quantised).groupby(SAME)["quantised"].transform("any").astype(bool)]
    plain = rows.ok(out[out["kv_dtype"] == ""]).groupby(SAME)["measured_time_us"].median()
    out = out.merge(plain.rename("plain_us").reset_index(), on=SAME, how="left")
    share = (out["measured_time_us"] / out["plain_us"]).where((out["kv_dtype"] != "") & (out["status"] == "ok"))
    out = out.assign(of_plain=share, load_bytes=out.groupby("shape")["modelled_bytes"].transform("max"))
    if out["variant"].nunique() > 1:
        out["shape"] += " · " + out["variant"]
    return out.drop(columns="plain_us")


def times(made: pd.DataFrame):
    """A row a load from few bytes to many, and in it a lane a cache: the time, and a tick at its read floor.

    Parameters
    ----------
    made : pandas.DataFrame
        From `beside_plain`, of rows with `rows.with_floor`.
    """
    good = rows.ok(made)
    good = good[good["measured_time_us"] > 0]
    if not (good["kv_dtype"] != "").any():
        return None
    order = made.groupby("shape")["load_bytes"].max().sort_values(kind="stable").index.tolist()
    caches = [name for name in style.mark_table(style.CACHES, good["cache"]) if name in set(good["cache"])]
    axis = alt.Axis(domain=False, ticks=False, grid=False)  # a line through the middle lane would be its alone
    y = alt.Y(field="shape", type="nominal", sort=order, title=None, axis=axis)
    layers = [*_layers(good, y, alt.YOffset(field="cache", type="nominal", sort=caches)), *row_failures(made, y)]
    height = alt.Step(14 * len(caches) + 10, **{"for": "position"})
    chart = alt.layer(*layers).properties(height=height, width="container")
    words = "Decode over caches of bytes beside plain ones, time in µs"
    kind = [f"measured on {rows.provenance(good)} · median; the bar spans the quartiles", *shares(good)]
    if good["floor_us"].notna().any():
        kind.append("tick: floor, measured: the read probe over the bytes that the kernel requests of that cache")
    said = "; ".join([summary(good, "measured_time_us", words, "µs").removesuffix("."), *shares(good)])
    return style.finish(chart, words, kind, f"{said}.")


def shares(good: pd.DataFrame) -> list[str]:
    """The times of each kernel over each quantised cache as shares of those over the plain one: the middle and the
    range, in a line."""
    known = good.dropna(subset=["of_plain"])
    lines = []
    several = good["variant"].nunique() > 1
    for (cache, dtype, kernel), part in known.groupby(["cache", "dtype", "variant"], sort=True)["of_plain"]:
        whose = f" by {kernel}" if several else ""
        spread = f"{part.min():.2f} to {part.max():.2f} of the time over {dtype}"
        lines.append(f"{cache}{whose} takes {spread}, {part.median():.2f} in the median of {len(part)} loads")
    return lines


def _layers(good: pd.DataFrame, y: alt.Y, lane: alt.YOffset) -> list:
    text = [f"× {share:.2f}" if share > 0 else "" for share in good["of_plain"]]
    every = pd.concat([good["measured_time_us"], good["floor_us"][good["floor_us"] > 0]])
    x = style.log_x("measured_time_us", "µs", every, room=1.25)
    base = alt.Chart(columns(good.assign(text=text), *rate_columns("measured_time_us"), "cache", "floor_us",
                             "of_plain", "text"))  # fmt: skip
    colour, shape = style.marks("cache", style.CACHES, good["cache"], "cache (measured)")
    low = alt.X(field="time_low", type="quantitative", title="µs")
    floor = alt.X(field="floor_us", type="quantitative", title="µs")
    tell = [
        style.text("cache", "cache"),
        style.number("of_plain", "of the time over a plain cache", ".3f"),
        style.number("floor_us", "floor, µs"),
        *tooltips("measured_time_us", "µs"),
    ]
    floors = base.transform_filter("datum.floor_us > 0")
    points = base.mark_point(filled=True, size=80)
    ratios = base.mark_text(align="left", dx=9, fontSize=11, color=style.MUTED)
    return [
        floors.mark_rule(color=style.FAINT).encode(x=floor, x2="measured_time_us", y=y, yOffset=lane),
        floors.mark_tick(color=style.INK, thickness=1.5, size=12).encode(
            x=floor, y=y, yOffset=lane, tooltip=tell
        ),
        base.mark_rule(strokeWidth=2, opacity=0.6).encode(x=low, x2="time_high", y=y, yOffset=lane, color=colour),
        points.encode(
            x=x, y=y, yOffset=lane, color=colour, shape=shape, opacity=style.stale_opacity(), tooltip=tell
        ),
        ratios.encode(x=x, y=y, yOffset=lane, text="text:N"),
    ]
