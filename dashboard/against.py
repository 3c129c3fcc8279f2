"""Rows beside other rows: what `ladder.FACTS` names, joined to the rows the pages draw. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from experiments import ladder
from experiments.ceilings import Ceilings


def others(
    latest: pd.DataFrame, stored: pd.DataFrame, together: Mapping[str, str], tops: Mapping[str, Ceilings]
) -> pd.DataFrame:
    """The rows with what `ladder.FACTS` names; NaN where it cannot be known.

    Parameters
    ----------
    latest : pandas.DataFrame
        Prepared rows, the last attempt of each case; a part of `stored` by index.
    stored : pandas.DataFrame
        The same rows as the store gives them, with their `run_path`.
    together : mapping
        Run folder → what it shares with the runs it may be read against: all shards of one run.
    tops : mapping
        Device → what was measured of it.
    """
    mine = stored.loc[latest.index]
    keys = pd.Series([together.get(path, path) for path in mine["run_path"]], mine.index, dtype=object)
    parts = [ladder.facts(part, tops) for _, part in mine.groupby(keys, sort=False)]
    if not parts:
        return latest.assign(**dict.fromkeys(ladder.FACTS, pd.Series(dtype="float64")))
    return latest.join(pd.concat(parts).astype("float64"))
