"""Rows and run folders for the store's tests."""
from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from experiments import store

WHEN = datetime(2026, 3, 1, 12, 30, 0, 123456, timezone.utc)
ODD = "läufe und ähnliches 実験"


def row(case: int | str, attempt: int = 1, **columns):
    return {
        "run_id": "run",
        "suite": "s",
        "case_id": str(case),
        "attempt": attempt,
        "status": "ok",
        "kernel": "flash",
        "started_at": WHEN,
        **columns,
    }


def make_run(folder: Path, rows, part: bool = True, run_id: str = "run") -> Path:
    folder.mkdir(parents=True)
    manifest = {"run_id": run_id, "environment": {"host": "größer"}}
    store.write_manifest(folder, manifest)
    journal = store.Journal(folder / "journal-0.jsonl")
    for one in rows:
        journal.append(one)
    journal.close()
    if part:
        store.write_part(folder, rows, manifest)
        (folder / "journal-0.jsonl").unlink()
    return folder
