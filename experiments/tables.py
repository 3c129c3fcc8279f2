"""Result rows as a table in the terminal. Every column's head says whether it was measured, counted or modelled."""
from __future__ import annotations

import pandas as pd
from rich.table import Table

STYLES = {"ok": "green", "unsupported": "dim", "oom": "yellow", "interrupted": "yellow", "throttled": "yellow"}
PARAMETERS = ("kernel", "model", "b", "h", "hkv", "m", "n", "d", "dtype", "causal", "page_size", "page_order",
              "lengths_source", "tokens", "bytes", "mode", "constants")
RESULTS = (
    ("measured_time_us", "measured µs", 1, "{:.1f}"),
    ("measured_tflops", "measured TFLOP/s", 1, "{:.1f}"),
    ("measured_gbps", "measured GB/s", 1, "{:.0f}"),
    ("measured_peak_pool_bytes", "measured peak MB", 1e6, "{:.1f}"),
    ("counted_launches", "counted launches", 1, "{:.0f}"),
    ("counted_bytes_loaded", "counted MB read", 1e6, "{:.2f}"),
    ("counted_bytes_stored", "counted MB written", 1e6, "{:.2f}"),
    ("counted_mma", "counted mma", 1, "{:.0f}"),
    ("modelled_peak_bytes", "modelled peak MB", 1e6, "{:.1f}"),
)


def results(frame: pd.DataFrame, title: str) -> Table:
    """The rows of one run; parameters that never change go into the caption, empty columns are left out."""
    shown, fixed = [], []
    for name in PARAMETERS:
        values = frame[name].dropna().unique() if len(frame) else []
        if len(values) > 1 or name == "kernel" or (len(values) == 1 and frame[name].isna().any()):
            shown.append(name)
        elif len(values) == 1:
            fixed.append(f"{name} {values[0]}")
    present = [c for c in RESULTS if len(frame) and frame[c[0]].notna().any()]
    table = Table(title=title, caption=" · ".join(fixed), title_justify="left", caption_justify="left")
    for name in shown:
        table.add_column(name, justify="left" if frame[name].dtype == "string[pyarrow]" else "right")
    table.add_column("status")
    for _, head, _, _ in present:
        table.add_column(head, justify="right")
    for _, row in frame.iterrows():
        status = str(row["status"])
        cells = [_cell(row[name]) for name in shown]
        cells.append(f"[{STYLES.get(status, 'red')}]{status}[/]")
        table.add_row(*cells, *(_number(row[name], unit, form) for name, _, unit, form in present))
    return table


def _cell(value) -> str:
    return "" if pd.isna(value) else str(value).replace("[", "\\[")


def _number(value, unit: float, form: str) -> str:
    return "" if pd.isna(value) else form.format(value / unit)


def problems(frame: pd.DataFrame, limit: int = 20) -> Table | None:
    """What did not end ok, with each reason once and how many cases it struck."""
    bad = frame[frame["status"] != "ok"]
    if bad.empty:
        return None
    table = Table(title="Not ok", title_justify="left")
    for head in ("status", "kernel", "cases", "reason"):
        table.add_column(head, justify="right" if head == "cases" else "left", overflow="fold")
    groups = bad.groupby(["status", "kernel", "error"], dropna=False, sort=False).size()
    for (status, kernel, error), count in list(groups.items())[:limit]:
        table.add_row(str(status), _cell(kernel), str(count), _cell(error))
    return table
