"""Rows for other tools: CSV, JSON or parquet, every column of the schema, with its unit.

* CSV: the head of a column with a unit is "name [unit]". An absent value is an empty cell, NaN and infinities
  are the words nan, inf and -inf, a list is a JSON array, times are ISO 8601 in UTC.
* JSON: {"columns": {name: {"unit", "kind", "meaning"}}, "rows": [{name: value}]}. An absent value is null,
  NaN and infinities are strings, so that every reader of strict JSON takes it.
* parquet: the schema's types; each field's metadata holds unit, kind and meaning.

A row keeps its status, and one that did not end with a right result has no performance number, whatever the
file it came from says.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from experiments import store
from experiments.disk import write_atomic
from experiments.schema import ARROW, COLUMNS, NAMES, PERFORMANCE, encode

RIGHT = ("ok", "throttled")


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as `store.read_runs` gives them, as plain values: every column, None where there is no value."""
    table = pa.Table.from_pandas(frame[list(NAMES)], schema=ARROW, preserve_index=False)
    rows = table.to_pylist()
    for row in rows:
        if row["status"] not in RIGHT:
            row |= dict.fromkeys(PERFORMANCE)
    return rows


def as_csv(rows: Iterable[dict[str, Any]]) -> str:
    """The text of a CSV file, with a line of heads."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([f"{c.name} [{c.unit}]" if c.unit else c.name for c in COLUMNS])
    for row in rows:
        plain = _plain(row)
        writer.writerow([_cell(plain[name]) for name in NAMES])
    return out.getvalue()


def as_json(rows: Iterable[dict[str, Any]]) -> str:
    """The text of a JSON document, a row a line."""
    columns = {c.name: {"unit": c.unit, "kind": c.kind, "meaning": c.meaning} for c in COLUMNS}
    lines = [json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) for row in rows]
    head = json.dumps(columns, ensure_ascii=False, allow_nan=False)
    return f'{{"columns": {head},\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"


def as_parquet(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """The table of a parquet file."""
    fields = [
        field.with_metadata({"unit": c.unit, "kind": c.kind, "meaning": c.meaning})
        for field, c in zip(ARROW, COLUMNS)
    ]
    return pa.Table.from_pylist(list(rows), schema=pa.schema(fields))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON values in the schema's order; samples, which are float32, with no more digits than they have."""
    encoded = encode(row)
    if (samples := row["measured_samples_us"]) is not None:
        encoded["measured_samples_us"] = [
            float(str(np.float32(x))) if math.isfinite(x) else str(x) for x in samples
        ]
    return {name: encoded.get(name) for name in NAMES}


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (bool, list)):
        return json.dumps(value)
    return str(value)


TEXT: dict[str, Callable[[Iterable[dict[str, Any]]], str]] = {"csv": as_csv, "json": as_json}
FORMATS = (*TEXT, "parquet")


def write(rows: list[dict[str, Any]], to: str, path: Path) -> None:
    """The rows in a format of `FORMATS`, into a file that appears whole or not at all.

    Raises
    ------
    StoreError
    """
    if to == "parquet":
        table = as_parquet(rows)
        write_atomic(path, lambda hidden: pq.write_table(table, hidden, compression="zstd"))
    else:
        write_atomic(path, lambda hidden: hidden.write_text(TEXT[to](rows), encoding="utf-8", newline=""))


def own_file(path: Path) -> bool:
    """Whether a file of that name would lie among a run's own."""
    return (path.parent / store.MANIFEST).exists()
