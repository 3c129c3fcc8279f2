"""Charts of a ladder: time step by step, what each step requests and needs, how it uses the device. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import altair as alt
import numpy as np
import pandas as pd

from dashboard import rows, steps, style
from dashboard.charts import columns
from dashboard.charts_runs import TICK

MEASURED, COUNTED, MODELLED = "measured", "counted (CPU machine)", "modelled (closed form)"
QUOTED = "quoted by an article"
SIGNS = {
    MEASURED: "filled: measured",
    COUNTED: "hollow circle: counted on the CPU machine",
    MODELLED: "stroke: modelled, the closed form",
    QUOTED: "hollow diamond: quoted by an article, of a whole model on another card",
}
# What a bar of the ladder may say: words, unit, the column or step that divides time, µs in a unit.
SCALES = {
    "Time": ("time of one call", "ms", "", 1e3),
    "× standard": ("time over that of standard", "× standard", "x_standard", 1.0),
    "× flash": ("time over that of flash", "× flash", "x_flash", 1.0),
    "× step 6": ("time over that of one launch for the batch", "× step 6", "6", 1.0),
}
STEP = 34
# Factors on the logarithmic axis: what is kept free at its ends, and how far a step's words reach.
ROOM, WORDS = 1.6, 4.0
# A logarithmic axis leaves most labels empty; what is left is written without prefixes below 10k.
SHORT = "datum.label === '' ? '' : format(datum.value, datum.value >= 10000 ? '~s' : '~g')"


def staircase(
    made: pd.DataFrame,
    scale: str,
    quoted: pd.DataFrame | None = None,
    bought: Mapping[str, float] | None = None,
):
    """Each step's time on a logarithmic axis, and a bar from the step before it: what the step buys.

    Parameters
    ----------
    made : pandas.DataFrame
        Steps of one point of one run, as `steps.of` gives them; failures included.
    scale : key of `SCALES`
    quoted : pandas.DataFrame, optional
        `step`, `value` and `says`: what an article says of a step, in the same unit.
    bought : mapping, optional
        Step → its time over that of the step before, as an article quotes it.
    """
    words, unit, base, divisor = SCALES[scale]
    good = steps.climb(made, "measured_time_us", "time_low", "time_high", base)
    if good.empty:
        return None
    for column in ("value", "low", "high", "before"):
        good[column] = good[column] / divisor
    good["buys"] = _buys(good, bought or {})
    names = dict(zip(made["step"], made["name"]))
    said = _said(quoted, names)
    every = pd.concat([good["value"], good["before"].dropna(), said["value"]])
    y = style.row_axis("name", _order(made))
    layers = [*_stairs(_beside(good, said, every.max()), every, unit, y), *_quotes(said, y), *_lost(made, y)]
    chart = alt.layer(*layers).properties(height=alt.Step(STEP), width="container")
    kind = [
        f"measured on {rows.provenance(good)} · median; the thin bar spans the quartiles",
        "the wide bar runs from the step before to this one; ÷ 2 is twice as fast, × 2 twice as slow",
    ]
    if len(said) or bought:
        kind.append("hollow diamonds and “quoted”: an article's numbers, of a whole model on another card")
    slow, fast = good.loc[good["value"].idxmax()], good.loc[good["value"].idxmin()]
    speak = (
        f"Ladder at {good['point'].iloc[0]}, {words}: {len(good)} steps; the slowest is {slow['name']} with "
        f"{slow['value']:.4g} {unit}, the fastest {fast['name']} with {fast['value']:.4g} {unit}."
    )
    title = f"Ladder, {words}{'' if unit.startswith('×') else ', ' + unit}"
    return style.finish(chart, title, kind, speak)


def _order(made: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(made.sort_values("place", kind="stable")["name"]))


def _said(quoted: pd.DataFrame | None, names: dict[str, str]) -> pd.DataFrame:
    if quoted is None or quoted.empty:
        return pd.DataFrame({"value": pd.Series(dtype="float64"), "name": [], "says": []})
    known = quoted[quoted["step"].isin(names) & (quoted["value"] > 0)]
    return known.assign(name=known["step"].map(names), source=QUOTED)


def _stairs(good: pd.DataFrame, every: pd.Series, unit: str, y) -> list:
    carried = ("name", "value", "low", "high", "before", "buys", "beside", "left", "kernel", "variant")
    more = ("point", "measured_n_samples", "device", "stale", "run_id", "tail")
    base = alt.Chart(columns(good, *carried, *more))
    x = style.log_x("value", unit, every, room=ROOM)
    colour, shape = style.kernel_colour(good["kernel"]), style.kernel_shape(good["kernel"])
    tell = [
        style.text("name", "step"),
        style.text("variant", "kernel"),
        style.number("value", f"median, {unit}"),
        style.number("low", "quartile, low"),
        style.number("high", "quartile, high"),
        style.text("buys", "against the step before"),
        style.number("tail", "p99 over median"),
        style.number("measured_n_samples", "samples"),
        *style.origin(),
    ]
    climbed = base.transform_filter("isValid(datum.before)")
    bars = climbed.mark_bar(height=13, opacity=0.28, color=style.SLATE).encode(
        x=x, x2=alt.X2("before"), y=y, tooltip=tell
    )
    spread = base.mark_rule(strokeWidth=2).encode(
        x=alt.X(field="low", type="quantitative", title=unit), x2=alt.X2("high"), y=y, color=colour
    )
    points = base.mark_point(filled=True, size=120).encode(
        x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(), tooltip=tell
    )
    words = [
        base.transform_filter(f"datum.left === {side}")
        .mark_text(align=align, dx=dx, fontSize=12, fontWeight=600, color=style.MUTED)
        .encode(x=alt.X(field="beside", type="quantitative"), y=y, text="buys:N")
        for side, align, dx in (("true", "right", -11), ("false", "left", 11))
    ]
    return [bars, spread, points, *words]


def _beside(good: pd.DataFrame, said: pd.DataFrame, most: float) -> pd.DataFrame:
    """With `beside`, where a step's words begin, right of its bar and quotes, or end, `left` of them."""
    right, low = good[["value", "before"]].max(axis=1), good[["value", "before"]].min(axis=1)
    near = [
        max([end, *(value for value in said.loc[said["name"] == name, "value"] if end < value < WORDS * end)])
        for name, end in zip(good["name"], right)
    ]
    left = pd.Series(near, good.index) * WORDS > ROOM * most
    return good.assign(left=left, beside=low.where(left, near))


def _buys(good: pd.DataFrame, bought: Mapping[str, float]) -> list[str]:
    """What each step buys, and what an article says it does."""
    ours = [steps.gain(now / was) for now, was in zip(good["value"], good["before"])]
    theirs = [steps.gain(bought.get(step, np.nan)) for step in good["step"]]
    return [f"{one}  (quoted {other})" if one and other else one for one, other in zip(ours, theirs)]


def _quotes(said: pd.DataFrame, y) -> list:
    if said.empty:
        return []
    base = alt.Chart(columns(said, "name", "value", "says"))
    marks = base.mark_point(filled=False, shape="diamond", size=130, strokeWidth=1.8, color=style.MUTED)
    x = alt.X(field="value", type="quantitative")
    return [marks.encode(x=x, y=y, tooltip=[style.text("says", "quoted"), style.number("value", "value")])]


def _lost(made: pd.DataFrame, y) -> list:
    """Steps without a time in words, right of the plot."""
    table = rows.lost(made, ["name"])
    if table.empty:
        return []
    joined = {"text": ("text", "  ".join), "error": ("error", " · ".join)}
    table = table.groupby("name", as_index=False).agg(**joined)
    marks = alt.Chart(table).mark_text(align="left", fontSize=11, color=style.VERMILLION, dx=8)
    why = [style.text("text", "no mark"), style.text("error", "why")]
    return [marks.encode(x=alt.value("width"), y=y, text="text:N", tooltip=why)]


def costs(made: pd.DataFrame):
    """What each step requests, launches and needs: bytes, launches, peak memory, known in several ways."""
    good = made.where(made["status"] == "ok")
    total = made["modelled_bytes"]
    scale, unit = (1e9, "GB") if total.max() >= 2e9 else (1e6, "MB")
    peak = pd.concat([made["peak_gb"], made["formula_gb"]]).max()
    wide, named = (1, "GB") if peak >= 2 else (1e3, "MB")
    parts = (
        (f"bytes requested, {unit}", COUNTED, good["counted_bytes"] / scale),
        (f"bytes requested, {unit}", MODELLED, total / scale),
        ("launches", COUNTED, good["counted_launches"]),
        ("launches", MODELLED, made["modelled_launches"]),
        (f"peak memory, {named}", MEASURED, good["peak_gb"] * wide),
        (f"peak memory, {named}", COUNTED, good["counted_peak_bytes"] / 1e9 * wide),
        (f"peak memory, {named}", MODELLED, made["formula_gb"] * wide),
    )
    title = "What each step requests, launches and needs: bytes, launches, peak memory"
    return _strips(made, parts, title, log=True)


def uses(made: pd.DataFrame, quoted: Mapping[str, Mapping[str, float]] | None = None):
    """How a step uses the device: shares of its measured ceilings and of its time, and its tail.

    `quoted`: by panel ("bandwidth use, %", "multiprocessors busy, %"), step → what an article says, in %.
    """
    good = made.where(made["status"] == "ok")
    quotes = (quoted or {}).items()
    parts = (
        ("tensor use, %", MEASURED, 100 * good["tensor_use"]),
        ("bandwidth use, %", MODELLED, 100 * good["bandwidth_use"]),
        ("multiprocessors busy, %", MEASURED, 100 * good["measured_sm_busy"]),
        ("launches in the time, %", MODELLED, 100 * good["launch_share"]),
        ("p99 over median", MEASURED, good["tail"]),
        *((panel, QUOTED, made["step"].map(dict(said)).astype("float64")) for panel, said in quotes),
    )
    return _strips(made, parts, "How each step uses the device: %, and p99 over median", log=False)


def _strips(made: pd.DataFrame, parts, words: str, log: bool):
    """Panels side by side that share the steps; a mark says how its value is known."""
    fields = made[["name", "place", "kernel", "variant", "device", "stale", "run_id"]]
    named = [fields.assign(panel=panel, source=source, value=value) for panel, source, value in parts]
    long = pd.concat(named)
    long = long[np.isfinite(long["value"]) & (long["value"] > 0 if log else True)].drop_duplicates()
    if long.empty:
        return None
    long = long.assign(stale=[value is True for value in long["stale"]])
    panels = [panel for panel in dict.fromkeys(panel for panel, *_ in parts) if panel in set(long["panel"])]
    y = style.row_axis("name", _order(made))
    across = min(len(panels), 5)
    width = {1: 560, 2: 285, 3: 180, 4: 130, 5: 98}[across]
    chart = (
        alt.layer(*_known_marks(long, y, log))
        .properties(width=width, height=26 * max(1, made["name"].nunique()))
        .facet(
            facet=alt.Facet(field="panel", type="nominal", sort=panels, title=None),
            columns=across,
            data=columns(long, *long.columns),
            spacing=22,
        )
        .resolve_scale(x="independent")
    )
    known = [source for source in (MEASURED, COUNTED, MODELLED, QUOTED) if source in set(long["source"])]
    subtitle = [f"{made['point'].iloc[0]} · {rows.provenance(made)}", ", ".join(SIGNS[one] for one in known)]
    speak = f"{words}, for {made['name'].nunique()} steps; {', '.join(known)}; panels: {', '.join(panels)}."
    return style.finish(chart, words, subtitle, speak)


def _known_marks(long: pd.DataFrame, y, log: bool) -> list:
    """Measured: a filled mark in the kernel's colour; counted: a hollow circle; modelled: a thin stroke;
    quoted: a hollow diamond.
    """
    scale = alt.Scale(type="log", nice=True) if log else alt.Scale(zero=True)
    axis = alt.Axis(format="~g", labelExpr=SHORT, grid=False, tickCount=4, labelOverlap=True)
    x = alt.X(field="value", type="quantitative", title=None, scale=scale, axis=axis)
    tell = [
        style.text("name", "step"),
        style.text("variant", "kernel"),
        style.text("panel", "what"),
        style.text("source", "value is"),
        style.number("value", "value"),
        *style.origin(),
    ]

    def of(source: str):
        return alt.Chart().transform_filter(f"datum.source === '{source}'")

    layers, present = [], set(long["source"])
    if QUOTED in present:
        diamond = of(QUOTED).mark_point(filled=False, shape="diamond", size=120, strokeWidth=1.8)
        layers.append(diamond.encode(x=x, y=y, color=alt.value(style.MUTED), tooltip=tell))
    if MODELLED in present:
        stroke = of(MODELLED).mark_point(filled=False, shape=TICK, size=110, strokeWidth=2, color=style.MUTED)
        layers.append(stroke.encode(x=x, y=y, opacity=style.stale_opacity(), tooltip=tell))
    if COUNTED in present:
        hollow = of(COUNTED).mark_point(filled=False, shape="circle", size=110, strokeWidth=2)
        colour = style.kernel_colour(long["kernel"], "kernel")
        layers.append(hollow.encode(x=x, y=y, color=colour, opacity=style.stale_opacity(), tooltip=tell))
    if MEASURED in present:
        dot = of(MEASURED).mark_point(filled=True, size=90)
        names = long.loc[long["source"] == MEASURED, "kernel"]
        colour, shape = style.kernel_colour(long["kernel"], "kernel"), style.kernel_shape(names, "kernel")
        layers.append(
            dot.encode(x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(), tooltip=tell)
        )
    return layers
