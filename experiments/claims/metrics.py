"""What a test may ask of a row: its numeric columns, and what is derived of them; each says how it is known.

A quantity that rests on a time is *measured* and is asked of a GPU's rows alone: how long the CPU machine
takes is no time. Counts come from its counters where the row has them, else from the closed form, which is
*modelled* and equals them to the byte; so is a rate of such bytes, however well its time is known. The error
of a result is *compared* with float64, on either machine. What `diagnose` names is *inferred*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from experiments import ladder
from experiments.ceilings import Ceilings, of_rows
from experiments.schema import COLUMNS, TAIL_SAMPLES
from experiments.suite import load_suite

MEASURED, COUNTED, MODELLED, COMPARED, INFERRED = HOW = (
    "measured", "counted", "modelled", "compared", "inferred",
)
Known = tuple[float, str]  # a value, and how it is known


@dataclass(frozen=True)
class Beside:
    """What a row is read against: its device's ceilings, its run's minutes, what `diagnose` says of it.

    Attributes
    ----------
    ceilings : mapping of device to Ceilings
    minutes : mapping of run
        From its first row's start to its last row's end.
    causes : mapping of (run, case)
        As `triage.causes` gives them.
    """

    ceilings: Mapping[str, Ceilings] = field(default_factory=dict)
    minutes: Mapping[str, float] = field(default_factory=dict)
    causes: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, frame: pd.DataFrame, causes: Mapping[tuple[str, str], str]) -> Beside:
        """From rows that may be judged by."""
        ceilings = {device: of_rows(frame, device) for device in frame["device"].dropna().unique()}
        spans = frame.groupby("run_id").agg({"started_at": "min", "finished_at": "max"}).dropna()
        minutes = {run: (last - first).total_seconds() / 60 for run, first, last in spans.itertuples()}
        return cls(ceilings, minutes, causes)

    def read_gbps(self, device: str) -> float | None:
        """The rate at which its read probe read, in GB/s."""
        return self.ceilings.get(device, Ceilings()).read_gbps

    def tflops(self, device: str, dtype: str) -> float | None:
        """The rate of its mma.sync probe, in TFLOP/s."""
        return self.ceilings.get(device, Ceilings()).tflops.get(dtype)


@dataclass(frozen=True)
class Metric:
    """A quantity: its unit ("B", "share" for a part of 1, else as in tables) and what finds it in a row.

    `find(row, beside)` gives the value and how it is known, or None where the row does not have it.
    """

    unit: str
    timed: bool
    find: Callable[[Mapping[str, Any], Beside], Known | None]


@lru_cache
def known() -> dict[str, Metric]:
    """Every metric by name."""
    return {column.name: _column(column) for column in COLUMNS if _numeric(column.type)} | DERIVED


def value_of(row: Mapping[str, Any], name: str, beside: Beside) -> Known | None:
    """The metric of a row; None where the row has none, or only a time that is none."""
    metric = known()[name]
    if metric.timed and row["machine"] != "gpu":
        return None
    found = metric.find(row, beside)
    return None if found is None or not np.isfinite(found[0]) else found


def _numeric(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _column(column) -> Metric:
    timed = column.kind in ("measured", "derived")
    how = {"derived": column.name.partition("_")[0], "outcome": COMPARED}.get(column.kind, column.kind)

    def find(row: Mapping[str, Any], _: Beside) -> Known | None:
        value = row[column.name]
        return None if value is None else (float(value), how)

    return Metric(column.unit, timed, find)


def _counted_or_modelled(*names: str) -> Callable[[Mapping[str, Any], Beside], Known | None]:
    """The sum of counters, or where one is missing of the closed forms of the same names."""

    def find(row: Mapping[str, Any], _: Beside) -> Known | None:
        for how in (COUNTED, MODELLED):
            values = [row[f"{how}_{name}"] for name in names]
            if None not in values:
                return float(sum(values)), how
        return None

    return find


def _bytes_share(row: Mapping[str, Any], beside: Beside) -> Known | None:
    rate, top = row["modelled_gbps"], beside.read_gbps(row["device"])
    return (rate / top, MODELLED) if rate and top else None


def _compute_share(row: Mapping[str, Any], beside: Beside) -> Known | None:
    rate, top = row["measured_tflops"], beside.tflops(row["device"], row["dtype"])
    return (rate / top, MEASURED) if rate and top else None


def _intensity(row: Mapping[str, Any], beside: Beside) -> Known | None:
    """Useful flops per byte of inputs and outputs, over those at which both ceilings take equally long."""
    top, read = beside.tflops(row["device"], row["dtype"]), beside.read_gbps(row["device"])
    flops, peak, scratch = (row[f"modelled_{name}"] for name in ("flops", "peak_bytes", "scratch_bytes"))
    if not (top and read and flops and peak) or scratch is None:
        return None
    return flops / (peak - scratch) / (1e3 * top / read), MODELLED


def _tail(row: Mapping[str, Any], _: Beside) -> Known | None:
    samples = row["measured_samples_us"]
    if samples is None or len(samples) < TAIL_SAMPLES:
        return None
    return float(np.percentile(samples, 99) / np.median(samples)), MEASURED


def _busy(row: Mapping[str, Any], _: Beside) -> Known | None:
    share = row["measured_sm_busy"]  # of a build with stamps, which not every run has
    return None if share is None else (share, MEASURED)


def _minutes(row: Mapping[str, Any], beside: Beside) -> Known | None:
    minutes = beside.minutes.get(row["run_id"])
    return None if minutes is None else (minutes, MEASURED)


def _named_fault(row: Mapping[str, Any], beside: Beside) -> Known | None:
    """1 where what `diagnose` names first is a fault that the rung was built with, or both are none."""
    built = _faults().get((row["kernel"], row["constants"]))
    cause = beside.causes.get((row["run_id"], row["case_id"]))
    if built is None or cause is None:
        return None
    return float(cause in built if built else not cause), INFERRED


@lru_cache
def _faults() -> dict[tuple[str, str | None], frozenset[str]]:
    return ladder.faults(load_suite("ladder").rungs)


_REQUESTED = _counted_or_modelled("bytes_loaded", "bytes_stored")
DERIVED = {
    "requested_bytes": Metric("B", False, _REQUESTED),
    "launches": Metric("", False, _counted_or_modelled("launches")),
    "bytes_share": Metric("share", True, _bytes_share),
    "compute_share": Metric("share", True, _compute_share),
    "intensity_over_ridge": Metric("", False, _intensity),
    "p99_over_median": Metric("", True, _tail),
    "sm_busy": Metric("share", True, _busy),
    "run_minutes": Metric("min", True, _minutes),
    "named_fault": Metric("share", True, _named_fault),
}
