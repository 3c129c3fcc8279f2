"""A ladder's rungs as tables in the terminal: one a shape, and what each rung is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from rich.markup import escape
from rich.table import Table

from experiments import ceilings, ladder
from experiments.suite import Rung
from experiments.tables import STYLES, new_table

_SHAPE = ("model", "b", "h", "hkv", "m", "n", "d", "dtype", "causal", "mode", "cache_mode")


# (column or fact, or several to add up; head; what a unit of it is; form), as in `tables.RESULTS`.
_RESULTS = (
    ("measured_time_us", "measured\nms", 1e3, "{:.3f}"),
    ("x_standard", "measured\n× standard", 1, "{:.2f}"),
    ("x_flash", "measured\n× flash", 1, "{:.2f}"),
    ("measured_tokens_per_s", "attention\nonly, token/s", 1, "{:,.0f}"),
    ("measured_tflops", "measured\nTFLOP/s", 1, "{:.1f}"),
    ("tensor_use", "measured\ntensor\nuse", 1, "{:.0%}"),
    ("bandwidth_use", "modelled\nbandwidth\nuse", 1, "{:.0%}"),
    ("measured_sm_busy", "SMs\nbusy", 1, "{:.0%}"),
    ("launch_share", "modelled\nlaunch\nshare", 1, "{:.0%}"),
    ("mean_us", "mean\nms", 1e3, "{:.3f}"),
    ("measured_p99_us", "p99\nms", 1e3, "{:.3f}"),
    ("tail", "p99 /\nmedian", 1, "{:.2f}"),
    ("measured_n_samples", "samples", 1, "{:.0f}"),
    ("measured_peak_pool_bytes", "measured\npeak MB", 1e6, "{:,.1f}"),
    ("counted_launches", "counted\nlaunches", 1, "{:,.0f}"),
    (("counted_bytes_loaded", "counted_bytes_stored"), "counted\nMB moved", 1e6, "{:,.2f}"),
    ("modelled_launches", "modelled\nlaunches", 1, "{:,.0f}"),
    (("modelled_bytes_loaded", "modelled_bytes_stored"), "modelled\nMB moved", 1e6, "{:,.2f}"),
    ("modelled_peak_bytes", "modelled\npeak MB", 1e6, "{:,.1f}"),
)


def tables(frame: pd.DataFrame, rungs: Sequence[Rung], path: Path) -> Iterator[Table]:
    """Nothing where the run has no rungs.

    Parameters
    ----------
    frame : pandas.DataFrame
        Rows of one run.
    rungs : sequence of Rung
        Of its manifest.
    path : Path
        The run's folder, to find its device's ceilings from.
    """
    order = {rung.name: i for i, rung in enumerate(rungs)}
    frame = frame[frame["rung"].isin(order)]
    if frame.empty:
        return
    yield _legend(rungs)
    tops = {device: ceilings.measured(device, path) for device in frame["device"].dropna().unique()}
    rows = pd.concat([frame, ladder.facts(frame, tops)], axis=1).to_dict("records")
    shapes: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=lambda row: order[row["rung"]]):
        shapes.setdefault(tuple((k, row[k]) for k in _SHAPE if pd.notna(row[k])), []).append(row)
    for shape, steps in shapes.items():
        if len(steps) > 1:
            yield _steps(" · ".join(f"{name} {value}" for name, value in shape), steps)


def _legend(rungs: Sequence[Rung]) -> Table:
    table = new_table("Rungs")
    for head in ("rung", "kernel", "constants", "what it changes"):
        table.add_column(head, overflow="fold")
    names = [rung.name for rung in rungs]
    for before, rung in zip(["", *names], rungs):
        constants = " ".join(f"{name}={value}" for name, value in rung.constants.items())
        against = f" (against {rung.after})" if rung.after not in ("", before) else ""
        table.add_row(*(escape(text) for text in (rung.name, rung.kernel, constants, rung.change + against)))
    return table


def _steps(title: str, steps: list[dict]) -> Table:
    table = new_table(title)
    table.add_column("rung", no_wrap=True)
    table.add_column("status", no_wrap=True)
    cells = [[_number(row, what, unit, form) for what, _, unit, form in _RESULTS] for row in steps]
    shown = [i for i in range(len(_RESULTS)) if any(line[i] for line in cells)]
    for i in shown:
        table.add_column(_RESULTS[i][1], justify="right", no_wrap=True)
    for row, line in zip(steps, cells):
        status = str(row["status"])
        style = STYLES.get(status, "red")
        table.add_row(escape(row["rung"]), f"[{style}]{status}[/]", *(line[i] for i in shown))
    return table


def _number(row: dict, what: str | tuple[str, ...], unit: float, form: str) -> str:
    parts = [row[name] for name in ([what] if isinstance(what, str) else what)]
    return "" if any(pd.isna(part) for part in parts) else form.format(sum(parts) / unit)
