"""What the order of pages costs: time with shuffled pages over time with sorted ones. Pure, like `charts`."""

from __future__ import annotations

import altair as alt
import pandas as pd

from dashboard import labels, rows, style
from dashboard.charts import by_load, columns


def order_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Time with shuffled pages over time with sorted ones, for every case that has both."""
    good = rows.ok(frame)
    good = good[(good["measured_time_us"] > 0) & (good["page_size"] > 0)]
    key = [
        "run_id",
        "series",
        "mode",
        "device",
        "variant",
        "kernel",
        "what",
        "load",
        "b",
        "length",
        "page_size",
        "dtype",
    ]
    wide = good.pivot_table(index=key, columns="page_order", values="measured_time_us", aggfunc="median")
    if not {"sorted", "shuffled"} <= set(wide.columns):
        return pd.DataFrame(columns=[*key, "ratio"])
    wide = wide.dropna(subset=["sorted", "shuffled"])
    table = wide.assign(ratio=wide["shuffled"] / wide["sorted"]).reset_index()
    pages = [labels.count(size) for size in table["page_size"]]
    return table.assign(shape=table["what"] + " · " + table["load"] + " · page " + pages)


def _loads(frame: pd.DataFrame) -> list[tuple[str, str]]:
    return list(zip(frame["what"], frame["load"]))


def order_cost(frame: pd.DataFrame):
    """A table of ratios, one row a load and one column a page size, coloured from 0.9 to 1.1."""
    table = order_ratios(frame)
    if table.empty:
        return None
    parts = [table["variant"]] * (table["variant"].nunique() > 1)
    parts += [table["what"]] * (table["what"].nunique() > 1) + [table["load"]]
    table["case"] = [" · ".join(names) for names in zip(*parts)]
    place = {key: number for number, key in enumerate(dict.fromkeys(_loads(by_load(frame))))}
    table["place"] = [place[key] for key in _loads(table)]
    order = table.sort_values(["place", "case"])["case"].unique().tolist()
    table["page"] = [str(int(size)) for size in table["page_size"]]
    sizes = [str(int(size)) for size in sorted(table["page_size"].unique())]
    cells = table.groupby(["case", "page"], as_index=False)[["ratio", "sorted", "shuffled"]].median()
    flat = alt.Axis(labelAngle=0, grid=False, domain=False, ticks=False)
    base = alt.Chart(columns(cells, "case", "page", "ratio", "sorted", "shuffled")).encode(
        x=alt.X(field="page", type="ordinal", sort=sizes, title="page size, tokens", axis=flat),
        y=alt.Y(field="case", type="nominal", sort=order, title=None, axis=flat),
        tooltip=[
            style.text("case", "case"),
            style.text("page", "page size"),
            style.number("ratio", "ratio", ".3f"),
            style.number("sorted", "sorted, µs"),
            style.number("shuffled", "shuffled, µs"),
        ],
    )
    # Grey where order does not matter: the eye is drawn only to what differs.
    ends = [style.SKY, "#F5F7F9", style.ORANGE]
    scale = alt.Scale(domain=[0.9, 1, 1.1], range=ends, interpolate="rgb", clamp=True)
    legend = alt.Legend(title="shuffled ÷ sorted", format=".2f", gradientLength=180, values=[0.9, 1, 1.1])
    colour = alt.Color(field="ratio", type="quantitative", scale=scale, legend=legend)
    rect = base.mark_rect(stroke="white", strokeWidth=2).encode(color=colour)
    text = base.mark_text(fontSize=12, color=style.INK).encode(
        text=alt.Text(field="ratio", type="quantitative", format=".2f")
    )
    chart = alt.layer(rect, text).properties(height=alt.Step(30), width="container")
    worst = table.loc[table["ratio"].idxmax()]
    words = "Time with shuffled pages ÷ time with sorted pages"
    devices = ", ".join(dict.fromkeys(table["device"]))
    kind = (
        f"ratio of medians measured on {devices} · 1.00: the order of pages costs nothing · "
        f"median {table['ratio'].median():.2f}, largest {worst['ratio']:.2f}"
    )
    return style.finish(
        chart, words, kind, f"{words}: {len(table)} pairs; largest {worst['ratio']:.3f} at {worst['case']}."
    )
