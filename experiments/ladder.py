"""A ladder of kernels: the names of its rungs, and what each buys, read from the rows of one run.

A row knows its rung by name (column `rung`); the run's manifest says what the rung is and what it changes.
What compares rows with each other, or with a device's ceilings, is computed here when rows are read: a row is
written before the others are there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from experiments.ceilings import Ceilings
from experiments.suite import AXES, Rung

# What two rows must share for one to be a yardstick of the other.
PLACE = ("device", "family", *(name for name in AXES if name not in ("bytes", "flops")), "lengths_source",
         "tokens")
FACTS = {
    "x_standard": "time over that of `standard` at the same shape, in this run",
    "x_flash": "time over that of `flash` at the same shape, in this run",
    "mean_us": "mean of the samples",
    "tail": "99th percentile of the samples over their median; none with fewer than 100 samples",
    "tensor_use": "useful flop/s over the mma.sync rate that was measured on this device for this dtype",
    "bandwidth_use": "modelled bytes over the time, over the read rate measured on this device; the same "
    "number is the share of the time that these bytes alone explain; above 1, L2 served some",
    "launch_share": "modelled launches times an empty kernel's time, over the time",
}


def named(rungs: Iterable[Rung]) -> dict[tuple[str, str | None], str]:
    """(kernel, `constants` as rows hold them) → the rung's name."""
    return {_key(rung): rung.name for rung in rungs}


def faults(rungs: Iterable[Rung]) -> dict[tuple[str, str | None], frozenset[str]]:
    """(kernel, `constants` as rows hold them) → the faults it was built with, of rungs that state them."""
    return {_key(rung): frozenset(rung.faults) for rung in rungs if rung.faults is not None}


def _key(rung: Rung) -> tuple[str, str | None]:
    return rung.kernel, json.dumps(rung.constants, sort_keys=True) if rung.constants else None


def rungs_of(manifest: Mapping[str, Any]) -> list[Rung]:
    """The rungs a run's manifest names, in their order; none where it has none or they are no rungs."""
    try:
        rungs = [Rung(**one) for one in manifest.get("rungs") or ()]
    except TypeError:
        return []
    return [rung for rung in rungs if isinstance(rung.kernel, str) and isinstance(rung.name, str)]


def yardstick(frame: pd.DataFrame, kernel: str, column: str = "measured_time_us") -> pd.Series:
    """For each row the `column` of `kernel` at the same shape and in the same mode on the same device.

    The kernel with its defaults counts where that row is ok; else, where it did not fit say, the least that
    any of its rows has.

    Parameters
    ----------
    frame : pandas.DataFrame
        Rows of one run, or of all its shards.

    Returns
    -------
    pandas.Series of float64
        NaN where the run has no such row.
    """
    found: dict[tuple, tuple[bool, float]] = {}
    places = _places(frame)
    right = (frame["kernel"] == kernel) & (frame["status"] == "ok") & frame[column].notna()
    for place, constants, value in zip(
        [p for p, yes in zip(places, right) if yes], frame.loc[right, "constants"], frame.loc[right, column]
    ):
        key = (pd.notna(constants), float(value))
        found[place] = min(found.get(place, key), key)
    return pd.Series([found.get(place, (True, np.nan))[1] for place in places], frame.index, "float64")


def _places(frame: pd.DataFrame) -> list[tuple]:
    columns = [[None if pd.isna(x) else x for x in frame[name]] for name in PLACE]
    return list(zip(*columns))


def facts(frame: pd.DataFrame, tops: Mapping[str, Ceilings]) -> pd.DataFrame:
    """What `FACTS` names, for each row; NaN where it cannot be known, so always on the CPU machine.

    Parameters
    ----------
    frame : pandas.DataFrame
        Rows of one run, as `store.read_runs` gives them.
    tops : mapping
        Device → what was measured of it (`ceilings.measured`).
    """
    wanted = ["measured_time_us", "measured_p99_us", "measured_tflops", "modelled_gbps", "measured_empty_us",
              "modelled_launches"]
    x = {name: frame[name].astype("float64") for name in wanted}
    time = x["measured_time_us"].where((frame["status"] == "ok") & (x["measured_time_us"] > 0))
    known = [tops.get(device, Ceilings()) for device in frame["device"]]
    read = pd.Series([top.read_gbps for top in known], frame.index, "float64")
    compute = [top.tflops.get(dtype) for top, dtype in zip(known, frame["dtype"])]
    return pd.DataFrame({
        "x_standard": time / yardstick(frame, "standard"),
        "x_flash": time / yardstick(frame, "flash"),
        "mean_us": frame["measured_samples_us"].map(_mean).where(time.notna()).astype("float64"),
        "tail": x["measured_p99_us"] / time,
        "tensor_use": x["measured_tflops"] / pd.Series(compute, frame.index, "float64"),
        "bandwidth_use": x["modelled_gbps"] / read,
        "launch_share": x["modelled_launches"] * x["measured_empty_us"] / time,
    })


def _mean(samples) -> float:
    return np.nan if samples is None or np.ndim(samples) != 1 or not len(samples) else float(np.mean(samples))
