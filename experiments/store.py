"""Where results live: a run folder with a manifest, journals and one parquet, and a reader that trusts none.

A run folder holds `manifest.json` (the plan and the environment, written first), one `journal-<worker>.jsonl`
a worker (one fsynced line an attempt) and, once the run ends, `part.parquet`. Parquet cannot be read before
its writer closes it, so a run in progress is read from its journals.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from experiments.disk import Journal, StoreError, write_atomic
from experiments.parts import PART, read_part, to_table, write_part
from experiments.schema import ARROW, SCHEMA_VERSION, Newer, decode, lift

__all__ = [
    "PART",
    "Journal",
    "Loaded",
    "RunInfo",
    "StoreError",
    "find_runs",
    "read_manifest",
    "read_part",
    "read_rows",
    "read_runs",
    "stale",
    "write_atomic",
    "write_manifest",
    "write_part",
]
MANIFEST = "manifest.json"
RECORDED = Path(__file__).with_name("recorded")  # runs that ship with the project


@dataclass(frozen=True)
class RunInfo:
    """A run that was found: its folder, its manifest ({} when unreadable), whether it has its parquet."""

    path: Path
    manifest: dict[str, Any]
    complete: bool

    @property
    def run_id(self) -> str:
        return self.manifest.get("run_id", self.path.name)


@dataclass
class Loaded:
    """What `read_runs` found.

    Attributes
    ----------
    frame : pandas.DataFrame
        Every column of the schema, Arrow-typed (null and NaN stay different), plus `run_path`, the folder.
    quarantined : list of (Path, str)
        Files that could not be read, each with the reason.
    torn_lines : int
        Journal lines that are cut off or not rows.
    runs : list of RunInfo
        The runs found, oldest first by name.
    """

    frame: pd.DataFrame
    quarantined: list[tuple[Path, str]] = field(default_factory=list)
    torn_lines: int = 0
    runs: list[RunInfo] = field(default_factory=list)


def write_manifest(run: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest.json`, atomically."""
    text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False, sort_keys=True)
    write_atomic(run / MANIFEST, lambda hidden: hidden.write_text(text + "\n", encoding="utf-8"))


def read_manifest(run: Path) -> dict[str, Any]:
    """The run's manifest.

    Raises
    ------
    StoreError
        It is missing or not a JSON object.
    """
    try:
        manifest = json.loads((run / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"{run / MANIFEST}: cannot be read ({error.strerror}); is this a run?") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{run / MANIFEST}: is not JSON ({error})") from error
    if not isinstance(manifest, dict):
        raise StoreError(f"{run / MANIFEST}: expected a JSON object")
    return manifest


def read_journals(run: Path) -> tuple[list[dict[str, Any]], int, list[tuple[Path, str]]]:
    """Rows of every journal of a run, the number of torn lines, and what could not be read, with its reason."""
    rows, torn, bad = [], 0, []
    for path in sorted(run.glob("journal-*.jsonl")):
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            continue  # gone since it was listed
        except OSError as error:
            bad.append((path, f"{path}: cannot be read ({error.strerror})"))
            continue
        newer = 0
        for line in filter(None, lines):
            try:
                row = _parse_line(line)
            except Newer:
                newer += 1
                continue
            torn += row is None
            if row is not None:
                rows.append(row)
        if newer:
            bad.append((path, f"{path}: {newer} lines have a newer schema version than the {SCHEMA_VERSION} "
                              "known here; update the project"))
    return rows, torn, bad


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        raw = json.loads(line)
        row = decode(lift(raw, int(raw.get("schema_version", 1))))
    except Newer:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return row if row["case_id"] and row["attempt"] is not None and row["status"] else None


def find_runs(paths: Iterable[Path | str] | Path | str) -> list[Path]:
    """Every run below the paths: folders with a manifest, a part or a journal, and files named singly."""
    found: dict[Path, None] = {}
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        path = Path(path)
        if path.is_file():
            found[path] = None
        elif path.is_dir():
            for folder, below, files in os.walk(path):
                below[:] = sorted(name for name in below if not name.startswith("."))
                if MANIFEST in files or any(_is_data(name) for name in files):
                    found[Path(folder)] = None
    return sorted(found)


def _is_data(name: str) -> bool:
    return not name.startswith(".") and (
        name.endswith(".parquet") or (name.startswith("journal-") and name.endswith(".jsonl"))
    )


def read_runs(paths: Iterable[Path | str] | Path | str, *, attempts: str = "latest") -> Loaded:
    """Read every run below `paths`, one file at a time; whatever cannot be read is set aside with its reason.

    Parameters
    ----------
    paths : path or paths
        Run folders, folders that hold some, or single parquet files. Missing ones hold nothing.
    attempts : {"latest", "all"}
        "latest" keeps one row a case and run.

    Returns
    -------
    Loaded
    """
    if attempts not in ("latest", "all"):
        raise ValueError(f"attempts: expected 'latest' or 'all', got {attempts!r}")
    loaded = Loaded(_to_frame([]))
    tables = []
    for path in find_runs(paths):
        where = path if path.is_dir() else path.parent
        if (readable := os.fsencode(path).decode(errors="replace")) != str(path):
            loaded.quarantined.append((Path(readable), f"{readable}: its name is not UTF-8; rename it"))
            continue
        table = _distinct(_read_one(path, loaded), latest=attempts == "latest")
        tables.append(table.append_column("run_path", pa.array([str(where)] * table.num_rows, pa.string())))
    loaded.frame = _to_frame(tables)
    return loaded


def read_rows(run: Path, say: Callable[[str], None] = lambda sentence: None) -> list[dict[str, Any]]:
    """Every attempt of one run as the runner keeps them, from its journals and its parquet.

    `say` is told, in a sentence each, which files could not be read.
    """
    loaded = Loaded(_to_frame([]))
    rows = _distinct(_read_one(run, loaded), latest=False).to_pylist()
    for _, reason in loaded.quarantined:
        say(f"{reason}; cases without another row are run again")
    return rows


def _read_one(path: Path, loaded: Loaded) -> pa.Table:
    """The attempts of one run, journals before parquet, with what is wrong noted in `loaded`."""
    tables = [ARROW.empty_table()]
    manifest: dict[str, Any] = {}
    parts = [path]
    if path.is_dir():
        rows, torn, bad = read_journals(path)
        loaded.torn_lines += torn
        loaded.quarantined += bad
        tables.append(to_table(rows))
        parts = sorted(p for p in path.glob("*.parquet") if not p.name.startswith("."))
        if (path / MANIFEST).exists():
            try:
                manifest = read_manifest(path)
            except StoreError as error:
                loaded.quarantined.append((path / MANIFEST, str(error)))
    for part in parts:
        try:
            tables.append(read_part(part))
        except StoreError as error:
            if os.path.lexists(part):
                loaded.quarantined.append((part, str(error)))
    loaded.runs.append(RunInfo(path, manifest, complete=bool(parts)))
    return pa.concat_tables(tables)


def _distinct(table: pa.Table, *, latest: bool) -> pa.Table:
    """One row an attempt (a journal and its parquet hold the same ones), or only each case's last attempt."""
    ids = zip(table["run_id"].to_pylist(), table["case_id"].to_pylist(), table["attempt"].to_pylist())
    chosen: dict[tuple, tuple[int, int]] = {}
    for index, (run, case, attempt) in enumerate(ids):
        key = (run, case) if latest else (run, case, attempt)
        if key not in chosen or (attempt or 0) > chosen[key][0]:
            chosen[key] = (attempt or 0, index)
    return table.take(pa.array(sorted(index for _, index in chosen.values()), pa.int64()))


def _to_frame(tables: list[pa.Table]) -> pd.DataFrame:
    empty = ARROW.append(pa.field("run_path", pa.string())).empty_table()
    return pa.concat_tables([empty, *tables]).to_pandas(types_mapper=pd.ArrowDtype).reset_index(drop=True)


def stale(frame: pd.DataFrame, hashes: Mapping[str, str]) -> pd.Series:
    """Whether each row was made by a source that its kernel no longer has.

    Parameters
    ----------
    frame : pandas.DataFrame
        Rows as `read_runs` gives them; a kernel that launches several files has their hashes joined by "+".
    hashes : mapping
        Kernel → the hashes it may have today, joined by "+". Rows of other kernels, or without a hash, are
        not stale.

    Returns
    -------
    pandas.Series of bool
    """
    today = {kernel: set(joined.split("+")) for kernel, joined in hashes.items()}
    pairs = zip(frame["kernel"], frame["source_hash"])
    old = [
        kernel in today and pd.notna(was) and not set(was.split("+")) <= today[kernel]
        for kernel, was in pairs
    ]
    return pd.Series(old, index=frame.index, dtype=bool)
