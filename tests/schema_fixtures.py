"""Result files of every schema version, kept so that what was stored once can always be read.

`python -m tests.schema_fixtures` writes those of today's version into `fixtures/`: a parquet file, a journal
and, as JSON, the rows that both hold. A fixture is never written anew: it stands for files that users have.
"""
from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from experiments import parts, schema, store

FOLDER = Path(__file__).parent / "fixtures"
KINDS = ("parquet", "jsonl", "json")
WHEN = datetime(2026, 3, 1, 12, 30, 0, 123456, timezone.utc)
ODD = (float("nan"), float("inf"), float("-inf"))


def path(version: int, kind: str) -> Path:
    return FOLDER / f"schema-{version}.{kind}"


def missing(version: int) -> list[Path]:
    """Files that versions up to this one should have and do not."""
    return [path(v, k) for v in range(1, version + 1) for k in KINDS if not path(v, k).is_file()]


def value(kind: pa.DataType, i: int) -> Any:
    """Some value of that type, another one in each column."""
    if pa.types.is_list(kind):
        return [i + 0.5, i + 0.25]
    if pa.types.is_floating(kind):
        return i / 7
    if pa.types.is_timestamp(kind):
        return WHEN + timedelta(microseconds=i)
    if pa.types.is_boolean(kind):
        return bool(i % 2)
    return 2**53 + i if pa.types.is_integer(kind) else f"Wert {i} 実験"


def rows() -> list[dict[str, Any]]:
    """A row with every column filled, three whose numbers are none, and one of nulls."""
    def identity(i: int) -> dict[str, Any]:
        return {"run_id": "fixture", "case_id": f"case {i}", "attempt": i + 1, "status": "ok"}

    full = {c.name: value(c.type, i) for i, c in enumerate(schema.COLUMNS)}
    made = [full | identity(0)]
    for i, odd in enumerate(ODD, 1):
        numbers = {c.name: odd for c in schema.COLUMNS if pa.types.is_floating(c.type)}
        lists = {c.name: [odd, 1.0] for c in schema.COLUMNS if pa.types.is_list(c.type)}
        made.append(full | numbers | lists | identity(i))
    return [*made, identity(4)]


def main() -> None:
    version = schema.SCHEMA_VERSION
    if any(path(version, kind).exists() for kind in KINDS):
        sys.exit(f"version {version} has its fixtures; remove them only if nobody ever stored such a file")
    with TemporaryDirectory() as name:
        folder = Path(name)
        journal = store.Journal(folder / "journal-0.jsonl")
        for one in rows():
            journal.append(one)
        journal.close()
        manifest = {"run_id": "fixture", "environment": {}}
        path(version, "parquet").write_bytes(parts.write_part(folder, rows(), manifest).read_bytes())
        path(version, "jsonl").write_bytes((folder / "journal-0.jsonl").read_bytes())
    text = json.dumps([schema.encode(one) for one in rows()], ensure_ascii=False, indent=1)
    path(version, "json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
