"""One run's parquet: written whole, with a digest of its rows, and read only when they still match it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from experiments.disk import StoreError, write_atomic
from experiments.schema import ARROW, SCHEMA_VERSION, decode, encode, encode_value, lift

PART = "part.parquet"


def write_part(run: Path, rows: Iterable[dict[str, Any]], manifest: dict[str, Any]) -> Path:
    """Write the run's `part.parquet` from all its rows and return its path.

    Explicit schema, zstd, page checksums. The footer carries the schema version, the run's id, environment
    and a digest of the rows, because page checksums do not cover the footer itself.

    Raises
    ------
    StoreError
        The disk is full or the folder cannot be written.
    """
    footer = {
        "schema_version": str(SCHEMA_VERSION),
        "run_id": str(manifest.get("run_id", run.name)),
        "environment": json.dumps(manifest.get("environment", {}), ensure_ascii=False),
    }
    table = to_table(decode(encode(row)) for row in rows)
    table = table.replace_schema_metadata({**footer, "rows_sha256": digest(table)})
    write_atomic(
        run / PART, lambda hidden: pq.write_table(table, hidden, compression="zstd", write_page_checksum=True)
    )
    return run / PART


def to_table(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """Decoded rows as a table of today's schema."""
    rows = list(rows)
    arrays = [pa.array([row[f.name] for row in rows], f.type) for f in ARROW]
    return pa.Table.from_arrays(arrays, schema=ARROW)


def digest(table: pa.Table) -> str:
    """Hash of the values themselves, the same before writing and after reading."""
    plain = [pa.field(f.name, pa.int64() if pa.types.is_timestamp(f.type) else f.type) for f in table.schema]
    rows = table.cast(pa.schema(plain)).to_pylist()
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def read_part(path: Path) -> pa.Table:
    """One parquet file in today's schema.

    Raises
    ------
    StoreError
        Truncated, empty, damaged, not one of ours, or written by a newer version.
    """
    try:
        return _read(path)
    except StoreError:
        raise
    except Exception as error:  # what a damaged file makes of its reader has no end of names
        size = path.stat().st_size if path.exists() else 0
        reason = "is empty" if size == 0 else f"cannot be read ({_first_line(error)})"
        raise StoreError(f"{path}: {reason}") from error


def _read(path: Path) -> pa.Table:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        table = file.read()
    footer = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    if "schema_version" not in footer:
        raise StoreError(f"{path}: has no schema_version in its footer, so it is not a result file")
    version = int(footer["schema_version"])
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: has schema version {version}, newer than the {SCHEMA_VERSION} known "
            "here; update the project"
        )
    if footer.get("rows_sha256") != digest(table):
        raise StoreError(f"{path}: is damaged (its rows do not match their digest)")
    if version == SCHEMA_VERSION:
        return conform(table)
    types = {field.name: field.type for field in table.schema}
    plain = [{k: encode_value(types[k], v) for k, v in r.items() if v is not None} for r in table.to_pylist()]
    return to_table(decode(lift(row, version)) for row in plain)


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def conform(table: pa.Table) -> pa.Table:
    """Today's columns, in order and typed: missing ones null, unknown ones dropped."""
    arrays = []
    for wanted in ARROW:
        if wanted.name in table.column_names:
            arrays.append(table.column(wanted.name).cast(wanted.type))
        else:
            arrays.append(pa.chunked_array([pa.nulls(table.num_rows, wanted.type)]))
    return pa.Table.from_arrays(arrays, schema=ARROW)
