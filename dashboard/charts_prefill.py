"""The headline of prefill: throughput at the shapes kernels share, and slowdowns beside it. Pure."""

from __future__ import annotations

import altair as alt
import pandas as pd

from dashboard import rows, style
from dashboard.charts import ceiling_rule, dot_layers, summary

COLUMN = 58  # pixels a kernel's column of slowdowns takes


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of shapes that most kernels ran at, with the constants each kernel chooses by itself.

    Where several runs hold such a shape, those with the most kernels speak for it: a kernel is compared with
    what ran beside it.
    """
    plain = frame[frame["variant"] == frame["kernel"]]
    frame = plain if len(plain) else frame
    if frame.empty:
        return frame
    kernels = frame.groupby(["shape", "dtype", "run_id"])["kernel"].transform("nunique")
    return frame[kernels == kernels.max()]


def slowdowns(frame: pd.DataFrame) -> pd.DataFrame:
    """Time of each kernel over that of the fastest at the same shape; the outcome in words where it has none.

    Returns
    -------
    pandas.DataFrame
        One row a shape and variant: `factor` (1.0 is the fastest, NaN a failure), `text`, `fastest`.
    """
    good = rows.ok(frame)
    good = good[good["measured_time_us"] > 0]
    table = good.groupby(["shape", "variant", "kernel"], as_index=False)["measured_time_us"].min()
    table["factor"] = table["measured_time_us"] / table.groupby("shape")["measured_time_us"].transform("min")
    bad = rows.failed(frame).drop_duplicates(["shape", "variant"])[["shape", "variant", "kernel", "status"]]
    bad = bad.merge(table[["shape", "variant"]], how="left", indicator=True)
    bad = bad[bad["_merge"] == "left_only"].drop(columns="_merge")
    table = pd.concat([table, bad], ignore_index=True)
    failures = table["factor"].isna()
    table["text"] = [
        "✕ " + str(status).replace("_", " ") if failed else f"{factor:.1f}×"
        for failed, status, factor in zip(failures, table.get("status", ""), table["factor"])
    ]
    return table.assign(fastest=table["factor"] == 1.0)


def throughput(frame: pd.DataFrame, ceiling: float = float("nan"), ceiling_name: str = ""):
    """One row a shape: TFLOP/s of every kernel as a mark, and at the right its slowdown against the fastest.

    Parameters
    ----------
    frame : prepared prefill rows of one device, failures included
    ceiling : float
        A probe's TFLOP/s on the same device; NaN draws none.
    ceiling_name : str

    Returns
    -------
    alt.Chart or None
    """
    good = rows.ok(frame)
    good = good[good["tflops"] > 0]
    if good.empty:
        return None
    order = frame.sort_values(["what", "mask", "b", "n"])["shape"].unique().tolist()
    y = style.row_axis("shape", order)
    layers = dot_layers(good, "tflops", y)
    if ceiling > 0:
        layers += ceiling_rule(ceiling, "TFLOP/s", ceiling_name)
    layers += _columns(slowdowns(frame), y)
    chart = alt.layer(*layers).properties(height=alt.Step(31), width="container")
    words = "Prefill throughput, TFLOP/s, and slowdown against the fastest kernel of the row"
    kind = f"measured on {rows.provenance(good)} · median; the bar spans the quartiles"
    kind += " · slowdown: ratio of medians"
    chart = style.finish(chart, words, kind, _speak(good, frame))
    # Names of kernels stand above their columns, where a legend would lie in a narrow window.
    chart.config = {**style.CONFIG, "legend": {**style.LEGEND, "offset": 38}}
    return chart


def _columns(table: pd.DataFrame, y) -> list:
    """A column of slowdowns a kernel, right of the plot, under the kernel's name in its colour."""
    layers, colours = [], style.kernel_table(table["kernel"])
    order = list(colours)
    names = set(zip(table["kernel"], table["variant"]))
    for number, (kernel, variant) in enumerate(sorted(names, key=lambda pair: (order.index(pair[0]), pair))):
        shift, one = 38 + COLUMN * number, table[table["variant"] == variant]
        name = variant.replace("_", "\n").replace(" ", "\n")
        head = alt.Chart(pd.DataFrame({"name": [name]})).mark_text(
            dx=shift,
            fontSize=11.5,
            fontWeight=600,
            color=colours[kernel][0],
            baseline="bottom",
            lineBreak="\n",
        )
        layers.append(
            head.encode(x=alt.value("width"), y=alt.value(-6 - 14 * name.count("\n")), text="name:N")
        )
        layers += [
            _cells(part, shift, 700 if fastest else 400, y) for fastest, part in one.groupby("fastest")
        ]
    return layers


def _cells(part: pd.DataFrame, shift: int, weight: int, y):
    cells = alt.Chart(part[["shape", "variant", "text"]])
    cells = cells.mark_text(dx=shift, fontSize=12.5, fontWeight=weight, color=style.INK)
    tell = [style.text("variant", "kernel"), style.text("shape", "shape"), style.text("text", "slowdown")]
    return cells.encode(x=alt.value("width"), y=y, text="text:N", tooltip=tell)


def _speak(good: pd.DataFrame, frame: pd.DataFrame) -> str:
    table = slowdowns(frame)
    middle = table.groupby("variant")["factor"].median().dropna().sort_values()
    said = ", ".join(f"{name} {factor:.1f}" for name, factor in middle.items())
    return (
        summary(good, "tflops", "Prefill throughput", "TFLOP/s")
        + f" Median slowdown against the fastest: {said}."
    )
