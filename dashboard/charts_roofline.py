"""The roofline: useful flop/s over flops a byte, under the ceilings measured on the same device. Pure."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from dashboard import rows, style
from dashboard.charts import columns, tooltips
from dashboard.charts_runs import TICK
from experiments.ceilings import Ceilings

RATE, UNIT = "tflops", "TFLOP/s"
REQUESTED, ONCE = "bytes requested", "inputs and outputs once"
COUNTED, MODELLED = "counted (CPU machine): bytes requested", f"modelled: {ONCE}"
MEMORY, COMPUTE = "memory", "compute"
CARRIED = ("kernel", "variant", "shape", "dtype", "device", "stale", "mode", "run_id", "intensity", RATE)
CARRIED += ("roof", "binds")
# What inputs and outputs depend on: rows that share it share them, also those of a library.
SHAPE = ["family", "b", "h", "hkv", "m", "n", "d", "dtype", "page_size", "tokens", "max_len"]


def placed(frame: pd.DataFrame, per: str, top: Ceilings) -> pd.DataFrame:
    """Rows with flops and bytes, with where they stand under the roof.

    Adds `intensity` (useful flops a byte), `roof` (TFLOP/s: the lower of both ceilings there, of the row's
    dtype), `of_roof` (the measured rate as a share of it) and `binds` (whose the roof is there).

    Parameters
    ----------
    frame : prepared rows
    per : REQUESTED or ONCE
        The bytes to divide by. What is requested may be served by L2, so that a rate beyond the memory's roof
        is no error; inputs and outputs moved once are the least there is.
    top : Ceilings
        Of the rows' device; without any there is no roof.
    """
    moved = frame["counted_bytes"].fillna(frame["modelled_bytes"])
    if per == ONCE:
        arrays = frame.assign(_arrays=frame["modelled_peak_bytes"] - frame["modelled_scratch_bytes"])
        moved = arrays.groupby(SHAPE, dropna=False)["_arrays"].transform("max")
    attention = frame["family"].isin(["prefill", "decode"])
    known = attention & (frame["modelled_flops"] > 0) & (moved > 0)
    out = frame[known].assign(intensity=(frame["modelled_flops"] / moved)[known])
    compute = out["dtype"].map(dict(top.tflops)).astype("float64")
    memory = out["intensity"] * (np.nan if top.read_gbps is None else top.read_gbps) / 1e3
    roof = np.minimum(compute, memory)  # NaN where either is unknown
    binds = np.where(memory < compute, MEMORY, COMPUTE)
    return out.assign(roof=roof, of_roof=out[RATE] / roof, binds=np.where(roof > 0, binds, ""))


def roofline(made: pd.DataFrame, top: Ceilings, per: str):
    """Every timed row at its flops a byte; the roof is what the device was measured to do.

    Parameters
    ----------
    made : pandas.DataFrame
        From `placed`, of one device and dtype.
    top : Ceilings
        Drawn as far as they are known.
    per : REQUESTED or ONCE
    """
    good = rows.ok(made)
    good = good[good[RATE] > 0]
    if good.empty:
        return None
    dtype = good["dtype"].iloc[0]
    compute, read = top.tflops.get(dtype), top.read_gbps
    ridge = 1e3 * compute / read if compute and read else np.nan
    spread = pd.concat([good["intensity"], pd.Series([ridge]).dropna()])
    rates = pd.concat([good[RATE], pd.Series([compute or np.nan]).dropna()])
    x = style.log_x("intensity", f"useful flops a byte ({per})", spread, room=2)
    y = style.log_y(RATE, UNIT, rates, room=1.8)
    more = (f"{RATE}_low", f"{RATE}_high", "measured_n_samples", "of_roof")
    base = alt.Chart(columns(good, *CARRIED, *more))
    colour, shape = style.kernel_colour(good["kernel"]), style.kernel_shape(good["kernel"])
    tell = [
        style.number("intensity", "flops a byte"),
        style.number("of_roof", "share of the roof", ".1%"),
        style.text("binds", "the roof is of"),
        *tooltips(RATE, UNIT),
    ]
    low = alt.Y(field=f"{RATE}_low", type="quantitative", title=UNIT)
    bars = base.mark_rule(strokeWidth=2).encode(x=x, y=low, y2=alt.Y2(f"{RATE}_high"), color=colour)
    points = base.mark_point(filled=True, size=70).encode(
        x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(0.85), tooltip=tell
    )
    layers = [*_roofs(spread, compute, read, ridge, x, y), bars, points]
    chart = alt.layer(*layers).properties(height=470, width="container")
    words = f"Roofline: useful {UNIT} over flops a byte"
    kind = [f"{dtype} · measured on {rows.provenance(good)} · median; the bar spans the quartiles"]
    kind.append(_said(dtype, compute, read, ridge))
    best = good.loc[good[RATE].idxmax()]
    speak = (
        f"{words}, log-log: {len(good)} measured points; the highest is {best[RATE]:.4g} {UNIT} by "
        f"{best['kernel']} at {best['shape']}. {_said(dtype, compute, read, ridge)}."
    )
    return style.finish(chart, words, kind, speak)


def _said(dtype: str, compute: float | None, read: float | None, ridge: float) -> str:
    parts = [f"reading {read:,.0f} GB/s"] if read else []
    parts += [f"mma.sync {compute:,.0f} {UNIT} in {dtype}"] if compute else []
    if not parts:
        return "no roof: the ceilings of this device have not been measured"
    return "roof, measured: " + ", ".join(parts) + (f"; they meet at {ridge:.3g} flop/B" if ridge > 0 else "")


def _roofs(spread: pd.Series, compute: float | None, read: float | None, ridge: float, x, y) -> list:
    """The measured ceilings as far as they are known: a slope for reading, a level for mma.sync."""
    left, right = spread.min() / 3, spread.max() * 3
    meet = ridge if ridge > 0 else right
    lines = []
    if read:
        ends = [left, max(meet, left * 1.01)]
        lines.append((ends, [end * read / 1e3 for end in ends], f"reading, {read:,.0f} GB/s"))
    if compute:
        ends = [ridge if ridge > 0 else left, right]
        lines.append((ends, [compute, compute], f"mma.sync, {compute:,.0f} {UNIT}"))
    made = []
    for ends, values, name in lines:
        base = alt.Chart(pd.DataFrame({"intensity": ends, RATE: values, "name": name}))
        line = base.mark_line(color=style.MUTED, strokeDash=[2, 3], strokeWidth=2, clip=True)
        made.append(line.encode(x=x, y=y, tooltip=[style.text("name", "measured ceiling")]))
    return made


def shares(made: pd.DataFrame):
    """Each kernel's rows as a share of the roof over them."""
    good = rows.ok(made)
    good = good[good["of_roof"] > 0]
    if good.empty:
        return None
    order = list(good.groupby("kernel")["of_roof"].max().sort_values(ascending=False).index)
    good = good.assign(percent=100 * good["of_roof"], under="under the roof of " + good["binds"])
    base = alt.Chart(columns(good, *CARRIED, "percent", "under"))
    tell = [
        style.text("variant", "kernel"),
        style.text("shape", "shape"),
        style.number("percent", "% of the roof"),
        style.number(RATE, f"median, {UNIT}"),
        style.number("roof", f"roof, {UNIT}"),
        style.text("binds", "the roof is of"),
        style.number("intensity", "flops a byte"),
        style.text("stale", "stale"),
        style.text("run_id", "run"),
    ]
    panels = [f"under the roof of {name}" for name in (MEMORY, COMPUTE) if (good["binds"] == name).any()]
    scale, axis = alt.Scale(zero=True), alt.Axis(tickCount=6)
    x = alt.X(field="percent", type="quantitative", title="% of the roof", scale=scale, axis=axis)
    points = base.mark_point(filled=True, size=70).encode(
        x=x,
        y=style.row_axis("kernel", order),
        color=style.kernel_colour(good["kernel"]),
        shape=style.kernel_shape(good["kernel"]),
        opacity=style.stale_opacity(0.7),
        tooltip=tell,
        column=alt.Column(field="under", type="nominal", sort=panels, title=None),
    )
    chart = points.properties(width=680 if len(panels) == 1 else 330, height=30 * len(order))
    words = "Measured rate as a share of the roof over it, %"
    kind = "a mark a row, measured · by bytes requested a rate may exceed 100 %, where L2 served some of them"
    best = good.loc[good["of_roof"].idxmax()]
    speak = (
        f"{words}, of {len(good)} rows; the highest is {best['percent']:.3g} % by {best['kernel']} at "
        f"{best['shape']}, under the roof of {best['binds']}."
    )
    return style.finish(chart, words, kind, speak)


def intensity(frame: pd.DataFrame):
    """Flops a byte without a time: by counted bytes (circles), by inputs and outputs once (strokes)."""
    good = rows.ok(frame)
    none = Ceilings()
    counted, once = placed(good[good["counted_bytes"] > 0], REQUESTED, none), placed(good, ONCE, none)
    long = pd.concat([counted.assign(source=COUNTED), once.assign(source=MODELLED)])
    if counted.empty:
        return None
    several = long.groupby(["kernel", "shape", "dtype"])["variant"].transform("nunique") > 1
    named = long["variant"].where(several, long["kernel"])  # constants only where they tell rows apart
    names = zip(named, long["shape"], long["dtype"])
    long = long.assign(case=[" · ".join(parts) for parts in names])
    long = long[long["case"].isin(set(long.loc[long["source"] == COUNTED, "case"]))]
    order = list(dict.fromkeys(long.sort_values(["family", "shape", "intensity"])["case"]))
    key = {"domain": [COUNTED, MODELLED]}
    legend = alt.Legend(title="flops a byte", symbolLimit=0, symbolSize=110, orient="top")
    colour = alt.Color(field="source", type="nominal", legend=legend,
                       scale=alt.Scale(**key, range=[style.SKY, style.INK]))
    shape = alt.Shape(field="source", type="nominal", legend=legend,
                      scale=alt.Scale(**key, range=["circle", TICK]))
    tell = [style.text("case", "case"), style.text("source", "bytes are"),
            style.number("intensity", "flops a byte")]
    base = alt.Chart(columns(long, "case", "source", "intensity", "stale"))
    chart = base.mark_point(filled=False, size=110, strokeWidth=2).encode(
        x=style.log_x("intensity", "useful flops a byte", long["intensity"], "~g"),
        y=style.row_axis("case", order),
        color=colour,
        shape=shape,
        opacity=style.stale_opacity(),
        tooltip=tell,
    ).properties(height=alt.Step(26), width="container")
    words = "Useful flops a byte of each kernel"
    kind = "no GPU was involved and no time is modelled, so there is no rate and no roof"
    speak = (
        f"{words}: {long['case'].nunique()} cases from {long['intensity'].min():.3g} to "
        f"{long['intensity'].max():.3g}."
    )
    return style.finish(chart, words, kind, speak)
