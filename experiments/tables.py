"""Result rows as tables in the terminal; every head says whether it was measured, counted or modelled."""

from __future__ import annotations

import json

import pandas as pd
from rich import box
from rich.markup import escape
from rich.table import Table

from experiments.quantities import gb

STYLES = {
    "ok": "green",
    "unsupported": "dim",
    "oom": "yellow",
    "interrupted": "yellow",
    "throttled": "yellow",
}
PARAMETERS = (
    "rung",
    "kernel",
    "model",
    "b",
    "h",
    "hkv",
    "m",
    "n",
    "prefix",
    "d",
    "dtype",
    "kv_dtype",
    "causal",
    "window",
    "softcap",
    "sinks",
    "layout",
    "key_order",
    "page_size",
    "page_order",
    "lengths_source",
    "tokens",
    "bytes",
    "flops",
    "mode",
    "cache_mode",
    "constants",
    "memory_limit_bytes",
    "memory_reserve_bytes",
)
SIZES = ("memory_limit_bytes", "memory_reserve_bytes")  # printed in GB
RESULTS = (
    ("measured_time_us", "measured\nµs", 1, "{:.1f}"),
    ("measured_tflops", "measured\nTFLOP/s", 1, "{:.1f}"),
    ("modelled_gbps", "modelled\nGB/s", 1, "{:.0f}"),
    ("measured_peak_pool_bytes", "measured\npeak MB", 1e6, "{:.1f}"),
    ("counted_launches", "counted\nlaunches", 1, "{:.0f}"),
    ("counted_bytes_loaded", "counted\nMB read", 1e6, "{:.2f}"),
    ("counted_bytes_stored", "counted\nMB stored", 1e6, "{:.2f}"),
    ("counted_peak_bytes", "counted\npeak MB", 1e6, "{:.1f}"),
    ("modelled_peak_bytes", "modelled\npeak MB", 1e6, "{:.1f}"),
)


def split_parameters(rows: list[dict]) -> tuple[list[str], str]:
    """(parameters that differ between the rows, a line naming the others); what others imply is left out."""
    columns = {name: [_plain(row.get(name)) for row in rows] for name in PARAMETERS}
    if columns["m"] == columns["n"] or set(columns["m"]) == {1}:
        del columns["m"]
    if len(set(columns["layout"])) == 1:
        del columns["layout"]
    if all(n is not None for n in columns["n"]):
        del columns["tokens"], columns["lengths_source"]
    if any(columns["model"]):
        for name in ("h", "hkv", "d"):
            del columns[name]
    if all(name is not None for name in columns["rung"]):
        del columns["constants"]  # the rung says them
    fixed, shown = [], []
    for name, values in columns.items():
        if name == "kernel" or len(set(values)) > 1:
            shown.append(name)
        elif values and values[0] is not None:
            fixed.append(f"{_head(name)} {_parameter(name, values[0])}")
    return shown, " · ".join(fixed)


def families(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows by kernel family: each has parameters of its own, and a table of its own."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(str(row.get("family")), []).append(row)
    return found


def new_table(title: str, caption: str = "") -> Table:
    """A table in the style of them all."""
    return Table(
        title=title,
        caption=caption or None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
    )


def _plain(value):
    return None if value is None or pd.isna(value) else value


def add_parameters(table: Table, names: list[str]) -> None:
    """A column for each parameter; names read from the left, numbers from the right."""
    for name in names:
        text = name in (
            "rung",
            "kernel",
            "model",
            "dtype",
            "kv_dtype",
            "layout",
            "key_order",
            "page_order",
            "lengths_source",
            "mode",
            "constants",
            "cache_mode",
        )
        table.add_column(_head(name).replace("_", "\n"), justify="left" if text else "right", no_wrap=True)


def parameter_cells(row: dict, names: list[str]) -> list[str]:
    """The parameters of one row as text."""
    return [_parameter(name, _plain(row.get(name))) for name in names]


def _head(name: str) -> str:
    return name.removesuffix("_bytes") if name in SIZES else name


def _parameter(name: str, value) -> str:
    if name in SIZES and value is not None:
        return gb(value)
    return _constants(value) if name == "constants" else _cell(value)


def _constants(text) -> str:
    if _plain(text) is None:
        return ""
    return " ".join(f"{name}={value}" for name, value in json.loads(text).items())


def results(frame: pd.DataFrame, title: str) -> list[Table]:
    """The rows of one run, a table a family; parameters that never change go into its caption."""
    made = []
    for family, rows in families(frame.to_dict("records")).items():
        names, caption = split_parameters(rows)
        present = [c for c in RESULTS if any(pd.notna(row[c[0]]) for row in rows)]
        table = new_table(f"{title}: {family}", caption)
        add_parameters(table, names)
        table.add_column("status", no_wrap=True)
        for _, head, _, _ in present:
            table.add_column(head, justify="right", no_wrap=True)
        for row in rows:
            status = str(row["status"])
            table.add_row(
                *parameter_cells(row, names),
                f"[{STYLES.get(status, 'red')}]{status}[/]",
                *(_number(row[name], unit, form) for name, _, unit, form in present),
            )
        made.append(table)
    return made


def _cell(value) -> str:
    return "" if value is None or pd.isna(value) else escape(str(value))


def _number(value, unit: float, form: str) -> str:
    return "" if pd.isna(value) else form.format(value / unit)


def problems(frame: pd.DataFrame, limit: int = 20) -> Table | None:
    """What did not end ok, with each reason once and how many cases it struck."""
    bad = frame[frame["status"] != "ok"]
    if bad.empty:
        return None
    table = new_table("Not ok")
    for head in ("status", "kernel", "cases", "reason"):
        table.add_column(head, justify="right" if head == "cases" else "left", overflow="fold")
    groups = bad.groupby(["status", "kernel", "error"], dropna=False, sort=False).size()
    for (status, kernel, error), count in list(groups.items())[:limit]:
        table.add_row(str(status), _cell(kernel), str(count), _cell(error))
    return table
