"""Chart of a step's slowdown at every shape of a run, beside what an article quotes of it. Pure."""

from __future__ import annotations

import altair as alt
import pandas as pd

from dashboard import rows, style
from dashboard.charts import columns
from dashboard.reach import Quote


def slowdowns(made: pd.DataFrame, quote: Quote):
    """A mark a shape and mode on a logarithmic axis, and the quoted factor as a line.

    Parameters
    ----------
    made : pandas.DataFrame
        Not empty; from `reach.everywhere`.
    """
    every = [*made["x_standard"], quote.value]
    x = style.log_x("x_standard", "× standard", every, room=1.8)
    y = style.row_axis("point", list(dict.fromkeys(made["point"])))
    carried = ("point", "x_standard", "kernel", "variant", "at_once", "launch_share", "modelled_launches")
    base = alt.Chart(columns(made.assign(words=_words(made)), "words", *carried, "device", "stale", "run_id"))
    tell = [
        style.text("point", "shape"),
        style.text("variant", "kernel"),
        style.number("x_standard", "time over that of standard"),
        style.number("at_once", "heads of all sequences"),
        style.number("modelled_launches", "launches"),
        style.number("launch_share", "launches in the time", ".0%"),
        *style.origin(),
    ]
    colour, shape = style.kernel_colour(made["kernel"]), style.kernel_shape(made["kernel"])
    points = base.mark_point(filled=True, size=120).encode(
        x=x, y=y, color=colour, shape=shape, opacity=style.stale_opacity(), tooltip=tell
    )
    words = base.mark_text(align="left", dx=11, fontSize=12, fontWeight=600, color=style.MUTED).encode(
        x=x, y=y, text="words:N"
    )
    said = alt.Chart(pd.DataFrame({"x_standard": [quote.value], "says": [quote.says]}))
    line = said.mark_rule(strokeDash=[2, 3], strokeWidth=1.5, color=style.MUTED).encode(
        x=alt.X(field="x_standard", type="quantitative"),
        tooltip=[style.text("says", "quoted"), style.number("x_standard", "× standard")],
    )
    chart = alt.layer(line, points, words).properties(height=alt.Step(30), width="container")
    title = f"Step {quote.step} at every shape, time over that of standard"
    kind = [
        f"measured on {rows.provenance(made)} · median · dotted: quoted, of a whole model on another card",
        "%: launches times an empty kernel's time, over the time; above 100 % launches overlap",
    ]
    speak = (
        f"Time of step {quote.step} over that of standard, at {made['point'].nunique()} shapes and modes: "
        f"{made['x_standard'].min():.3g} to {made['x_standard'].max():.3g}; {quote.value:.3g} is quoted."
    )
    return style.finish(chart, title, kind, speak)


def _words(made: pd.DataFrame) -> list[str]:
    shares = made["launch_share"].mask(made["replayed"])  # a replayed launch takes less than an empty kernel
    said = ["" if pd.isna(share) else f" · launches {share:.0%}" for share in shares]
    return [f"× {value:.3g}{share}" for value, share in zip(made["x_standard"], said)]
