"""A slowdown that an article quotes: how near a run's rows come to it, and what adds to it. Pure.

What is quoted holds for one shape. Fewer heads in a launch are what a host runs that loops over heads as
well, and a CUDA graph is the same launches without the host's gaps between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True)
class Quote:
    """What an article says of a step: times as slow as `standard`, and where it says so."""

    step: str
    value: float
    says: str


def furthest(said: pd.DataFrame) -> Quote | None:
    """The largest of some quoted slowdowns (`quotes.times`); None without any."""
    if said.empty:
        return None
    top = said.loc[said["value"].idxmax()]
    return Quote(top["step"], float(top["value"]), top["says"])


def everywhere(made: pd.DataFrame, step: str) -> pd.DataFrame:
    """That step's rows at every point of a run where `x_standard` is known, those with most heads first.

    Adds `at_once`, the heads of all sequences, and `replayed`.
    """
    good = made[(made["status"] == "ok") & (made["step"] == step) & (made["x_standard"] > 0)]
    good = good.assign(at_once=(good["b"] * good["h"]).astype("int64"), replayed=good["mode"] == "graph")
    return good.sort_values(["at_once", "length", "replayed"], ascending=[False, False, True], kind="stable")


def found(rows: pd.DataFrame, quote: Quote) -> list[str]:
    """Sentences: what was measured beside the quote, and what adds to it, as rows show it.

    Parameters
    ----------
    rows : pandas.DataFrame
        Not empty; from `everywhere`.
    """
    low, high = rows["x_standard"].min(), rows["x_standard"].max()
    there = rows[rows["x_standard"] >= quote.value]
    reached = f"reached at {there['point'].iloc[0]}" if len(there) else "reached nowhere in this run"
    first = (
        f"Quoted of step {quote.step}: × {quote.value:.3g}. Measured: × {low:.3g} to × {high:.3g}; the quote "
        f"is {reached}."
    )
    return [sentence for sentence in (first, _fewer_heads(rows), _no_gaps(rows)) if sentence]


def _fewer_heads(rows: pd.DataFrame) -> str:
    plain = rows[~rows["replayed"]]
    if plain["at_once"].nunique() < 2:
        return ""
    many, few = plain.iloc[0], plain.loc[plain["at_once"].idxmin()]
    return (
        f"Heads looped over by the host add to it: with {many['at_once']} in a launch × "
        f"{many['x_standard']:.3g}, with {few['at_once']} × {few['x_standard']:.3g} "
        f"({few['shape']}){_share(many, few)}."
    )


def _share(many: pd.Series, few: pd.Series) -> str:
    if pd.isna(many["launch_share"]) or pd.isna(few["launch_share"]):
        return ""
    return f"; launches are {many['launch_share']:.0%} of the time there, and {few['launch_share']:.0%} here"


def _no_gaps(rows: pd.DataFrame) -> str:
    """The point that replaying quickens most."""
    keys = ["shape", "dtype", "cache_mode"]
    rows = rows[[*keys, "x_standard", "measured_time_us", "replayed"]]
    pairs = rows[~rows["replayed"]].merge(rows[rows["replayed"]], on=keys, suffixes=("", "_replayed"))
    if pairs.empty:
        return ""
    pairs = pairs.assign(gain=pairs["measured_time_us"] / pairs["measured_time_us_replayed"])
    top = pairs.loc[pairs["gain"].idxmax()]
    return (
        f"So do the host's gaps between launches: × {top['x_standard']:.3g} launched one by one, × "
        f"{top['x_standard_replayed']:.3g} as a CUDA graph without them ({top['shape']})."
    )
