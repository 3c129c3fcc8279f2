"""Charts over the chunk: throughput, best and default, padding, tiles, counts of the CPU machine. Pure."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from dashboard import chunks, rows, style
from dashboard.charts import columns, panels, rate_columns, tooltips
from dashboard.labels import count

RATE, UNIT = "tflops", "TFLOP/s"
CARRIED = (*rate_columns(RATE), "chunk", "dim", "d", "chunks", "rest")


def over_chunk(made: pd.DataFrame, default: float = np.nan):
    """Small multiples by N: throughput over the chunk, a line a head dim, for one kernel and setting.

    Parameters
    ----------
    made : pandas.DataFrame
        From `chunks.of`, failures included.
    default : float
        The kernel's own chunk, drawn as a rule; NaN draws none.
    """
    drawn = made.assign(panel=[f"N{count(n)}" for n in made["n"]])
    good = rows.ok(drawn)
    good = good[good[RATE] > 0]
    if good.empty:
        return None
    lost = _lost(drawn, ["panel", "chunk"], "dim")
    top = set(chunks.best(good).index)
    data = columns(good.assign(best=[index in top for index in good.index]), *CARRIED, "best")
    data = pd.concat([data, lost], ignore_index=True).assign(default=default)
    data["stale"] = [value is True for value in data["stale"]]
    look = style.marks("dim", style.HEAD_DIMS, drawn["dim"], "head dim (measured)")
    layers = _curve_layers(style.log2_x("chunk", "chunk, keys", drawn["chunk"]), look, lost)
    kind = [
        f"measured on {rows.provenance(good)} · median; the bar spans the quartiles",
        f"{good['kernel'].iloc[0]} · {good['setting'].iloc[0]} · ringed: a line's best",
    ]
    if default > 0:
        x = alt.X(field="default", type="quantitative", aggregate="max")
        layers.append(alt.Chart().mark_rule(color=style.MUTED, strokeDash=[2, 3]).encode(x=x))
        kind[1] += f" · dotted: the kernel's default, {default:.0f}"
    order = list(dict.fromkeys(drawn.sort_values("n")["panel"]))
    words = f"Throughput over the chunk, {UNIT}"
    best = good.loc[good[RATE].idxmax()]
    speak = (
        f"{words}, a line a head dim, a panel a length, for {good['kernel'].iloc[0]}: {len(good)} measured "
        f"points; the highest is {best[RATE]:.4g} {UNIT} at chunks of {best['chunk']:.0f}, {best['shape']}."
    )
    return style.finish(panels(layers, data, order), words, kind, speak)


def _curve_layers(x, look: tuple, lost: pd.DataFrame, line: str = "dim") -> list:
    """A line with quartiles and marks; the best of it and what failed in signs."""
    colour, shape = look
    base = alt.Chart().transform_filter(f"isValid(datum.{RATE})")
    y = alt.Y(field=RATE, type="quantitative", title=UNIT, scale=alt.Scale(zero=True))
    low = alt.Y(field=f"{RATE}_low", type="quantitative", title=UNIT)
    tell = [style.number("chunk", "chunk, keys"), *tooltips(RATE, UNIT)]
    layers = [
        base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, detail=[f"{line}:N", "run_id:N"]),
        base.mark_rule(strokeWidth=2).encode(x=x, y=low, y2=alt.Y2(f"{RATE}_high"), color=colour),
        base.mark_point(filled=True, size=75).encode(
            x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(), tooltip=tell
        ),
        base.transform_filter("datum.best")
        .mark_point(filled=False, shape="circle", size=260, strokeWidth=1.6)
        .encode(x=x, y=y, color=colour),
    ]
    why = [style.text("variant", "kernel"), style.text("status", "status"), style.text("error", "why")]
    if len(lost):  # every panel gets the same room above it, or their headers would not line up
        room = alt.Chart().mark_text(opacity=0, baseline="bottom", fontSize=10.5)
        layers.append(room.encode(y=alt.value(-5 - 13 * int(lost["slot"].max())), text=alt.value("✕")))
    for slot in sorted(lost["slot"].unique()):
        failed = alt.Chart().transform_filter(f"isValid(datum.slot) && datum.slot === {slot}")
        words = failed.mark_text(fontSize=10.5, fontWeight=600, baseline="bottom")
        y = alt.value(-5 - 13 * int(slot))
        layers.append(words.encode(x=x, y=y, text="text:N", color=colour, tooltip=why))
    return layers


def _lost(drawn: pd.DataFrame, by: list[str], line: str) -> pd.DataFrame:
    """Failures, stacked at their chunk, in the words of their line."""
    table = rows.lost(drawn, by if line == "kernel" else [*by, line])
    table["text"] = "✕ " + table[line].astype(str)
    table["slot"] = table.groupby(by).cumcount() if len(table) else pd.Series(dtype="int64")
    return table


def by_kernel(made: pd.DataFrame, defaults: dict[str, float]):
    """Throughput over the chunk at one shape, a line a kernel and constants; best and default marked."""
    good = rows.ok(made)
    good = good[good[RATE] > 0]
    if good.empty:
        return None
    lost = _lost(made, ["chunk"], "kernel")
    top = set(chunks.best(good).index)
    data = good.assign(
        best=[index in top for index in good.index],
        usual=["default" if defaults.get(k) == c else "" for k, c in zip(good["kernel"], good["chunk"])],
    )
    data = pd.concat([columns(data, *CARRIED, "best", "usual"), lost], ignore_index=True)
    data["stale"] = [value is True for value in data["stale"]]
    x = style.log2_x("chunk", "chunk, keys", made["chunk"])
    look = style.kernel_colour(made["kernel"]), style.kernel_shape(made["kernel"])
    layers = _curve_layers(x, look, lost, "rest")
    y = alt.Y(field=RATE, type="quantitative", title=UNIT)
    named = alt.Chart().transform_filter("datum.usual === 'default'")
    layers.append(named.mark_text(dy=-13, fontSize=11).encode(x=x, y=y, text="usual:N", color=look[0]))
    chart = alt.layer(*layers, data=data).properties(height=330, width="container")
    words = f"Throughput over the chunk at the nearest measured shape, {UNIT}"
    kind = f"{good['shape'].iloc[0]} · measured on {rows.provenance(good)} · ringed: a kernel's best"
    best = good.loc[good[RATE].idxmax()]
    speak = (
        f"{words}, a line a kernel, at {good['shape'].iloc[0]}; the highest is {best[RATE]:.4g} {UNIT} by "
        f"{best['kernel']} with chunks of {best['chunk']:.0f}."
    )
    return style.finish(chart, words, kind, speak)


def optima(made: pd.DataFrame, default: float):
    """A field by N and head dim: the best chunk in words, shaded by what it gains over the default."""
    top = chunks.gains(made, default)
    if top.empty:
        return None
    lengths = list(dict.fromkeys(top.sort_values("n")["n"].map(count)))
    dims = list(dict.fromkeys(top.sort_values("d")["dim"]))
    data = top.assign(
        length=top["n"].map(count),
        says=[
            f"{chunk:.0f}" + (f" · {gain:.3g}×" if np.isfinite(gain) else "")
            for chunk, gain in zip(top["chunk"], top["gain"])
        ],
    )
    data = columns(data.assign(shade=data["gain"].fillna(1)), *CARRIED, "length", "says", "gain", "shade")
    base = alt.Chart(data).encode(
        x=alt.X(field="length", type="nominal", sort=lengths, title="N, keys", axis=alt.Axis(labelAngle=0)),
        y=alt.Y(field="dim", type="nominal", sort=dims, title="head dim"),
    )
    tell = [
        style.number("chunk", "best chunk"),
        style.number("gain", "default's time over the best's"),
        *tooltips(RATE, UNIT),
    ]
    most = max(1.5, float(np.nanmax([1.0, *data["gain"]])))
    shade = alt.Color(
        field="shade",
        type="quantitative",
        scale=alt.Scale(scheme="blues", domain=[1, 2 * most]),  # words stay legible on half the range
        legend=None,
    )
    cells = base.mark_rect(stroke="white", strokeWidth=2).encode(color=shade, tooltip=tell)
    # NOTE: cells are light whatever the page's theme, so their words are dark.
    text = base.mark_text(fontSize=13, fontWeight=600, color=style.INK).encode(text="says:N", tooltip=tell)
    chart = alt.layer(cells, text).properties(height=alt.Step(38), width="container")
    words = "The best chunk, keys, by head dim and N"
    kind = [f"measured on {rows.provenance(top)} · {top['kernel'].iloc[0]} · {top['setting'].iloc[0]}"]
    if np.isfinite(data["gain"]).any():
        kind += [f"×: how much faster than the kernel's default of {default:.0f}; the darker, the more"]
    common = top["chunk"].mode().iloc[0]
    speak = f"{words}: {len(top)} shapes; most often it is {common:.0f}."
    return style.finish(chart, words, kind, speak)


def padding(made: pd.DataFrame, d: float):
    """A head dim that is no power of two over the one it might be padded to, over the chunk.

    Measured times are filled marks with quartiles, counted bytes hollow circles.
    """
    other = chunks.beside(made, d)
    pair = chunks.ratios(made, d, other)
    if pair.empty:
        return None
    timed = bool((pair["what"] == "time").any())
    pair = pair[pair["what"] == ("time" if timed else "counted bytes")]
    pair = pair.assign(panel=[f"N{count(n)}" for n in pair["n"]], even=d / other, one=1.0)
    carried = ("panel", "n", "chunk", "ratio", "ratio_low", "ratio_high", "even", "one", "kernel", "stale")
    data = columns(pair, *carried, "run_id", "device", "variant")
    data["stale"] = [value is True for value in data["stale"]]
    x, base = style.log2_x("chunk", "chunk, keys", pair["chunk"]), alt.Chart()
    unit = f"D{d:.0f} ÷ D{other:.0f}"
    y = alt.Y(field="ratio", type="quantitative", title=unit, scale=alt.Scale(zero=False))
    tell = [style.number("ratio", unit), style.text("variant", "kernel"), style.text("device", "device"),
            style.text("run_id", "run")]
    colour = style.kernel_colour(pair["kernel"], "kernel")
    shape = style.kernel_shape(pair["kernel"], "kernel")
    rules = [
        alt.Chart().mark_rule(color=style.MUTED, strokeDash=dash).encode(
            y=alt.Y(field=field, type="quantitative", aggregate="mean")
        )
        for field, dash in (("even", [2, 3]), ("one", [6, 4]))
    ]
    if timed:
        low = alt.Y(field="ratio_low", type="quantitative", title=unit)
        bars = base.mark_rule(strokeWidth=2).encode(x=x, y=low, y2=alt.Y2("ratio_high"), color=colour)
        points = base.mark_point(filled=True, size=75).encode(
            x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(), tooltip=tell
        )
        marks, source = [bars, points], "measured: median time; the bar spans the quartiles"
    else:
        hollow = base.mark_point(filled=False, shape="circle", size=90, strokeWidth=2)
        marks = [hollow.encode(x=x, y=y, color=colour, opacity=style.stale_opacity(), tooltip=tell)]
        source = "counted on the CPU machine: global bytes requested"
    words = f"Head dim {d:.0f} over head dim {other:.0f}: {'time' if timed else 'bytes'}, all else equal"
    kind = [source, f"dotted: in proportion to the head dim, {d / other:.3g}; dashed: 1"]
    if other > d:
        kind[1] += f", where padding to {other:.0f} would cost nothing"
    order = list(dict.fromkeys(pair.sort_values("n")["panel"]))
    speak = f"{words}: from {pair['ratio'].min():.3g} to {pair['ratio'].max():.3g} in {len(pair)} cases."
    return style.finish(panels([*rules, *marks], data, order), words, kind, speak)


def tiles(made: pd.DataFrame):
    """Throughput of the tiles that cases set inside chunks of one size."""
    good = rows.ok(made)
    good = good[(good[RATE] > 0) & (good["tile"] != "")]
    if good.empty:
        return None
    order = list(good.sort_values(RATE, ascending=False)["tile"].drop_duplicates())
    data, y = columns(good, *CARRIED, "tile"), style.row_axis("tile", order)
    colour, shape = style.kernel_colour(good["kernel"]), style.kernel_shape(good["kernel"])
    base = alt.Chart(data)
    low = alt.X(field=f"{RATE}_low", type="quantitative", title=UNIT)
    bars = base.mark_rule(strokeWidth=2).encode(x=low, x2=alt.X2(f"{RATE}_high"), y=y, color=colour)
    x = alt.X(field=RATE, type="quantitative", title=UNIT, scale=alt.Scale(zero=True))
    points = base.mark_point(filled=True, size=95).encode(
        x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(), tooltip=tooltips(RATE, UNIT)
    )
    chart = alt.layer(bars, points).properties(height=alt.Step(30), width="container")
    sizes = " and ".join(f"{size:.0f}" for size in sorted(good["chunk"].unique()))
    words = f"Tiles (queries × keys) inside chunks of {sizes}, {UNIT}"
    kind = [
        f"{good['shape'].iloc[0]} · measured on {rows.provenance(good)}",
        "median; the bar spans the quartiles",
    ]
    best = good.loc[good[RATE].idxmax()]
    speak = f"{words}: {len(good)} tiles; the best is {best['tile']} with {best[RATE]:.4g} {UNIT}."
    return style.finish(chart, words, kind, speak)


def counted(made: pd.DataFrame, column: str, title: str):
    """A counter of the CPU machine over the chunk, a line a head dim, a panel a length; hollow marks."""
    good = rows.ok(made)
    good = good[good[column] > 0]
    good = good.assign(panel=[f"N{count(n)}" for n in good["n"]])
    if good.empty:
        return None
    data = columns(good, "panel", "chunk", "dim", column, "variant", "shape", "run_id", "stale", "n")
    x, base = style.log2_x("chunk", "chunk, keys", good["chunk"]), alt.Chart()
    y = alt.Y(field=column, type="quantitative", title=None, scale=alt.Scale(type="log", nice=True),
              axis=alt.Axis(format="~s", tickCount=4, grid=False))
    colour, shape = style.marks("dim", style.HEAD_DIMS, good["dim"], "head dim (counted)")
    tell = [style.text("shape", "shape"), style.text("variant", "kernel"), style.number(column, title, ",")]
    marks = [
        base.mark_line(strokeWidth=1.2, strokeDash=[1, 3]).encode(x=x, y=y, color=colour, detail="run_id:N"),
        base.mark_point(filled=False, size=90, strokeWidth=2).encode(
            x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(), tooltip=tell
        ),
    ]
    order = list(dict.fromkeys(good.sort_values("n")["panel"]))
    what = f"{good['kernel'].iloc[0]} · {good['setting'].iloc[0]}"
    kind = f"counted by the CPU machine; no time is modelled · {what}"
    speak = f"{title} over the chunk: from {good[column].min():,.0f} to {good[column].max():,.0f}."
    return style.finish(panels(marks, data, order), f"{title} over the chunk", kind, speak)
