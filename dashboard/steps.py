"""The steps of a ladder as rows: which step a row is, what it changes, and the point it was run at. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from experiments.suite import Rung

PAGED = "paged-ladder"
PAGE = 16  # of the steps that read pages; other sizes are that suite's own question
# Name, the step it comes after, what it changes. The suite names none: a step is also a page as long as its
# sequence, which no constant says.
PAGED_STEPS = (
    ("1", "", "no cache: each step is the whole prefill again"),
    ("2", "1", "a cache, each sequence in one flat piece"),
    ("2b", "2", "its keys split over the device"),
    ("3", "2", f"pages of {PAGE} tokens, gathered into flat pieces first"),
    ("3b", "3", "keys split over the device"),
    ("4", "3", "pages read in place, a launch a request"),
    ("5", "4", "a launch a page"),
    ("6", "4", "one launch for the batch"),
    ("7", "6", "keys split over the device"),
    ("8", "7", "equal shares of all keys, merged by who is last"),
)
BASE = {PAGED: "6"}  # what the others are set against, where it is neither `standard` nor `flash`
COLUMNS = ("step", "place", "name", "change", "after", "point")


def of(frame: pd.DataFrame, rungs: Mapping[str, Sequence[Rung]]) -> pd.DataFrame:
    """The rows that are a step of some ladder, with the columns `COLUMNS`.

    Parameters
    ----------
    frame : prepared rows
    rungs : mapping
        Run folder → the rungs that its manifest names.

    Returns
    -------
    pandas.DataFrame
        `place` numbers the steps from 0, `name` is the step with what it changes, `point` the shape, dtype
        and mode. Rows at a point with a single step are left out: there is nothing to climb.
    """
    fields = frame[["run_path", "suite", "rung", "kernel", "constants", "page_size", "length"]]
    found = [_step(row, rungs.get(row.run_path, ())) for row in fields.itertuples(index=False)]
    known = [step is not None for step in found]
    made = frame[known]
    steps = [step for step in found if step is not None]
    for position, column in enumerate(("place", "step", "after", "change")):
        made = made.assign(**{column: [step[position] for step in steps]})
    names = [f"{step} · {change or kernel}" for (_, step, _, change), kernel in zip(steps, made["kernel"])]
    made = made.assign(name=names)
    made = made.assign(point=[_point(row) for row in made[list(_POINT)].itertuples(index=False)])
    return made[made.groupby(["run_path", "point"])["step"].transform("nunique") > 1]


_POINT = ("suite", "what", "load", "shape", "dtype", "mode", "cache_mode")


def _point(row) -> str:
    # Without a cache a step is a prefill, whose shape has other words than a decode's.
    shape = " · ".join([row.what, row.load]) if row.suite == PAGED else row.shape
    mode = {"graph": "graph replay"}.get(row.mode, row.mode)
    warm = "warm L2" if row.cache_mode == "warm" else ""
    return " · ".join(part for part in (shape, row.dtype, mode, warm) if part)


def _step(row, rungs: Sequence[Rung]) -> tuple[int, str, str, str] | None:
    """(place, name, the step before, what it changes)."""
    if row.rung:
        for place, rung in enumerate(rungs):
            if rung.name == row.rung:
                return place, rung.name, rung.after, rung.change
    if row.suite == PAGED and (name := _paged(row)):
        for place, (step, after, change) in enumerate(PAGED_STEPS):
            if step == name:
                return place, step, after, change
    return None


def _paged(row) -> str:
    """The name of a row's step on the paged ladder; "" where it is none."""
    constants = set_constants(row.constants)
    whole = constants.get("splits") == 1
    if row.kernel == "flash":
        return "1"
    if row.kernel == "paged" and row.page_size > PAGE and row.page_size >= row.length:
        return "2" if whole else "2b"
    if row.page_size != PAGE:
        return ""
    if row.kernel == "paged_launches":
        return {"request": "4", "page": "5"}.get(constants.get("launch"), "")
    if row.kernel == "paged_stream":
        return "8" if not constants else ""
    return {"paged_gather": ("3b", "3"), "paged": ("7", "6")}.get(row.kernel, ("", ""))[whole]


def set_constants(text: str) -> dict:
    """Constants as rows hold them, in JSON; {} where there are none, or it is something else."""
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def points(made: pd.DataFrame) -> list[str]:
    """The points, those with most steps that ended ok first; then the longer, the larger, plain launches."""
    table = made.assign(good=made["step"].where(made["status"] == "ok"), plain=made["mode"] != "graph")
    table = table.groupby("point").agg(
        good=("good", "nunique"), n=("length", "max"), b=("b", "max"), plain=("plain", "max")
    )
    return list(table.sort_values(["good", "n", "b", "plain"], ascending=False, kind="stable").index)


def climb(made: pd.DataFrame, column: str, low: str, high: str, base: str = "") -> pd.DataFrame:
    """The steps of one point with `value`, its quartiles `low` and `high`, and `before`, climbed from.

    Parameters
    ----------
    made : pandas.DataFrame
        From `of`, one point of one run.
    column, low, high : str
        A time and its quartiles.
    base : str
        A step to divide by, or a column that is the ratio to something (`x_standard`); "" divides by nothing.

    Returns
    -------
    pandas.DataFrame
        Rows that ended ok and have a time, in the order of the steps; `before` is NaN where the step before
        has none.
    """
    good = made[(made["status"] == "ok") & (made[column] > 0)].sort_values("place", kind="stable")
    good = good.drop_duplicates("step", keep="last")
    if base in made:
        unit = good[base] / good[column]
    else:
        own = dict(zip(good["step"], good[column]))
        unit = pd.Series(1 / own.get(base, np.nan) if base else 1.0, good.index)
    good = good.assign(value=good[column] * unit, low=good[low] * unit, high=good[high] * unit)
    value = dict(zip(good["step"], good["value"]))
    good["before"] = [value.get(step, np.nan) for step in good["after"]]
    return good[good["value"] > 0]


def gain(value: float) -> str:
    """A ratio as one says it: "÷ 7.1" where it gains, "× 1.3" where it loses, "=" where it is neither."""
    if not np.isfinite(value):
        return ""
    if 0.995 < value < 1.005:
        return "= 1"
    return f"÷ {1 / value:.3g}" if value < 1 else f"× {value:.3g}"

