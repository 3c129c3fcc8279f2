"""What windows, caps, sinks, several queries, packing and pages of prefill cost beside plain attention. Pure."""

from __future__ import annotations

import pandas as pd

from dashboard import rows
from dashboard.charts import dots

# What two rows share that differ in their features alone; pages are a feature of prefill.
_PLACE = ["run_id", "device", "dtype", "mode", "cache_mode", "family", "b", "h", "hkv", "d", "length", "load",
          "mask", "order", "kv_dtype", "key_order", "prefix", "memory_limit_bytes", "memory_reserve_bytes", "_page"]


def beside_plain(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of loads that were run with features, those without any of the same loads among them.

    Parameters
    ----------
    frame : prepared prefill or decode rows
    """
    paged = frame["page_size"].where(frame["family"] == "decode")
    order = frame["order"].where(frame["family"] == "decode", "")
    places = frame.assign(_page=paged, order=order, _asked=frame["features"] != "")
    asked = places.groupby(_PLACE, dropna=False)["_asked"].transform("any").astype(bool)
    return frame[asked & frame["constants"].isin(["", "{}"])]


def times(made: pd.DataFrame):
    """One row a load and its features, one mark a kernel.

    Parameters
    ----------
    made : pandas.DataFrame
        From `beside_plain`.
    """
    if not (rows.ok(made)["features"] != "").any():
        return None
    what = "Prefill" if (made["family"] == "prefill").all() else "Decode"
    return dots(made, "measured_time_us", f"{what} by what it is asked for, time in µs")
