"""Charts of the claims: their verdicts at a glance, and what was found beside what is quoted. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

import altair as alt
import pandas as pd

from dashboard import style
from experiments.claims.findings import Finding, PartFinding
from experiments.claims.words import quoted, span

TILE, ACROSS = 46, 10  # pixels of a tile, and tiles in a row
ROW, BELOW = 42, 9  # pixels of a row that holds words and, so far below its middle, marks


def tiles(findings: Iterable[Finding]) -> pd.DataFrame:
    """One row a claim: the article it is first found in, its place among that one's, its verdict and sign."""
    table = pd.DataFrame(
        [
            {
                "number": one.claim.number,
                "article": one.claim.place[0],
                "verdict": one.verdict,
                "text": f"{style.VERDICTS[one.verdict][1]} {one.claim.number}",
                "claim": one.claim.statement,
                "evidence": one.sentence,
                "known": ", ".join(one.how) if one.verdict != "not tested" else "",
            }
            for one in findings
        ]
    )
    if table.empty:
        return table
    place = table.groupby("article").cumcount()
    return table.assign(column=place % ACROSS, row=table["article"] + (place // ACROSS).astype(str))


def glance(findings: Iterable[Finding]):
    """A tile a claim, rows by article, coloured and signed by verdict."""
    table = tiles(findings)
    if table.empty:
        return None
    x = alt.X(field="column", type="ordinal", axis=None)
    first = "slice(datum.value, 1) === '0' ? slice(datum.value, 0, 1) : ''"
    axis = alt.Axis(domain=False, ticks=False, grid=False, labelPadding=10, labelExpr=first)
    y = alt.Y(field="row", type="nominal", title=None, axis=axis, scale=alt.Scale(paddingInner=0.12))
    tell = [
        style.text("number", "claim"),
        style.text("claim", "says"),
        style.text("verdict", "verdict"),
        style.text("known", "how known"),
        style.text("evidence", "evidence"),
    ]
    base = alt.Chart(table).encode(x=x, y=y, tooltip=tell)
    colour = style.verdict_colour(table["verdict"])
    colour.legend = None  # the signs say the same, and the line above them names them
    rects = base.mark_rect(cornerRadius=5, stroke="white", strokeWidth=2).encode(color=colour)
    light = alt.condition("datum.verdict === 'confirmed' || datum.verdict === 'refuted'", alt.value("white"),
                          alt.value(style.INK))
    words = base.mark_text(fontSize=12.5, fontWeight=600).encode(text="text:N", color=light)
    chart = alt.layer(rects, words).resolve_scale(color="independent")
    chart = chart.properties(width=alt.Step(TILE), height=alt.Step(TILE))
    said = {verdict: int((table["verdict"] == verdict).sum()) for verdict in style.VERDICTS}
    counts = ", ".join(f"{count} {verdict}" for verdict, count in said.items())
    signs = " · ".join(f"{sign} {verdict}" for verdict, (_, sign) in style.VERDICTS.items())
    title = "Claims of the articles and their verdicts"
    return style.finish(chart, title, signs, f"{title}: of {len(table)} claims {counts}.")


def compared(findings: Iterable[Finding]) -> pd.DataFrame:
    """One row a part with a number quoted and a number found: both in their unit, and found over quoted.

    A quoted range stands for its geometric middle, and is kept as `quoted_low`, `quoted_high` over that.
    """
    return pd.DataFrame(
        [_compared(one, part) for one in findings for part in one.parts
         if part.cases and part.part.quoted and min(part.part.quoted) > 0
         and min(case.value for case in part.cases) > 0]
    )


def _compared(one: Finding, found: PartFinding) -> dict:
    part, values = found.part, [case.value for case in found.cases]
    low, high = min(part.quoted), max(part.quoted)
    middle = math.sqrt(low * high)
    return {
        "label": f"{one.claim.number} · {part.says}",
        "number": one.claim.number,
        "says": part.says,
        "verdict": found.verdict,
        "known": found.how[0],
        "device": ", ".join(found.devices) or "arithmetic",
        "cases": len(values),
        "found": span(values, part.unit),
        "quoted": quoted(part),
        "ratio": found.middle / middle,
        "ratio_low": min(values) / middle,
        "ratio_high": max(values) / middle,
        "quoted_low": low / middle,
        "quoted_high": high / middle,
        "text": f"{one.claim.number} · {span(values, part.unit)}, quoted {quoted(part)} · {part.says}",
    }


def against_quoted(table: pd.DataFrame):
    """Found over quoted on a logarithmic axis, a row a part: 1 is what the article says.

    Parameters
    ----------
    table : `compared`, or some of its rows

    Returns
    -------
    alt.Chart or None
    """
    if table.empty:
        return None
    y = alt.Y(field="label", type="nominal", sort=table["label"].tolist(), axis=None)
    reach = [*table["ratio_low"], *table["ratio_high"], *table["quoted_low"], *table["quoted_high"], 1.0]
    x = style.log_x("ratio", "found ÷ quoted", reach)
    base = alt.Chart(table)
    tell = [style.text(name, word) for name, word in (
        ("label", "claim"), ("found", "found"), ("quoted", "quoted"), ("verdict", "verdict"),
        ("known", "how known"), ("device", "device"), ("cases", "cases"))]
    one = alt.Chart(pd.DataFrame({"ratio": [1.0]})).mark_rule(color=style.MUTED, strokeDash=[2, 3]).encode(x=x)
    ranges = base.transform_filter("datum.quoted_low < datum.quoted_high").mark_bar(
        height=13, color=style.FAINT, opacity=0.55, yOffset=BELOW
    ).encode(x=alt.X(field="quoted_low", type="quantitative"), x2="quoted_high", y=y, tooltip=tell)
    colour = style.verdict_colour(table["verdict"])
    spread = base.mark_rule(strokeWidth=2, yOffset=BELOW).encode(
        x=alt.X(field="ratio_low", type="quantitative"), x2="ratio_high", y=y, color=colour)
    said = base.mark_text(align="left", dy=-BELOW, fontSize=12, color=style.MUTED).encode(
        x=alt.value(0), y=y, text="text:N")
    layers = [one, ranges, spread, *_marks(base, x, y, colour, tell), said]
    chart = alt.layer(*layers).properties(height=alt.Step(ROW), width="container")
    words = "What was found over what the articles quote"
    marks = {"measured": "filled circle measured", "counted": "hollow circle counted",
             "modelled": "upright stroke modelled", "compared": "diamond compared with float64",
             "inferred": "triangle inferred by diagnose"}
    said = [text for name, text in marks.items() if name in set(table["known"])]
    kind = " · ".join(["1 is as quoted", "grey bar the quoted range", "mark the median, line all", *said])
    far = table.loc[table["ratio"].map(lambda ratio: abs(math.log(ratio))).idxmax()]
    spoken = (f"{words}: {len(table)} sentences; the farthest from its quoted number is claim "
              f"{far['number']}, {far['found']} instead of {far['quoted']}.")
    return style.finish(chart, words, kind, spoken)


def _marks(base: alt.Chart, x, y, colour, tell) -> list:
    """The medians: a mark of its own for each way of knowing a number."""
    made = []
    for known, (shape, filled) in style.KNOWN.items():
        rows = base.transform_filter(f"datum.known === '{known}'")
        point = {"shape": shape, "filled": filled, "size": 90, "strokeWidth": 2, "opacity": 1, "yOffset": BELOW}
        stroke = {"thickness": 3, "height": 14, "opacity": 1, "yOffset": BELOW}
        mark = rows.mark_tick(**stroke) if shape == "stroke" else rows.mark_point(**point)
        made.append(mark.encode(x=x, y=y, color=colour, tooltip=tell))
    return made
