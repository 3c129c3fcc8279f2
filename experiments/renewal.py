"""A run brought up to today's suite and sources: what it lacks is run, what has aged is run again.

A case is taken anew if the run has no row of it, if its kernel's source has changed since, if it failed
otherwise than for want of memory, or if it has fewer samples than the suite asks for now. Its earlier row stays until the new one is on the disk; so a
renewal that stops is continued by beginning it again.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd

from experiments import store
from experiments.catalog import current_hashes
from experiments.crew import Crew
from experiments.folder import Run, Say, reopen
from experiments.requests import Request, plan
from experiments.schema import RETRYABLE, SCHEMA_VERSION
from experiments.suite import Suite
from experiments.sweep import Case, Options
from experiments.words import UserError

AGAIN = {"interrupted", *RETRYABLE} - {"oom"}
ASKED = ("only", "limit", "lengths", "batch", "shard", "memory_limit", "reserve")


def renew(path: Path, say: Say = lambda sentence: None, patient: bool = False) -> Run:
    """An existing run with the cases its suite has today; the manifest on the disk is still as it was.

    Raises
    ------
    UserError, StoreError, Busy
        As `folder.reopen`; or a suite or a request log that is not there any more.
    """
    run = reopen(path, say, patient)
    try:
        asked = run.manifest["request"]
        if asked.get("lengths") is not None and not Path(asked["lengths"]).is_file():
            raise UserError(f"record: {path} was made with the request log '{asked['lengths']}', which is not "
                            "here; put it there, or begin a new run with --lengths")
        request = Request(
            asked["suite"], asked["machine"], tuple(asked["kernels"]), timer=run.manifest["repeat"]["timer"],
            options=Options(**{name: asked.get(name) for name in ASKED}),
        )
        suite, _, cases = plan(request, run.manifest["device"]["machine"])
    except BaseException:
        run.close()
        raise
    planned = [{"case_id": c.case_id, "params": dict(c.params)} for c in cases]
    manifest = {**run.manifest, **_said_by(suite), "cases": planned, "schema_version": SCHEMA_VERSION}
    return Run(run.path, manifest, cases, run.rows, run.lock)


def _said_by(suite: Suite) -> dict[str, Any]:
    return {
        "title": suite.title, "question": suite.question, "claims": list(suite.claims),
        "repeat": asdict(suite.repeat), "rungs": [asdict(rung) for rung in suite.rungs],
    }


def aged(run: Run) -> list[Case]:
    """The cases to take anew."""
    latest, least = run.latest(), run.manifest["repeat"]["min_samples"]
    old = _stale(latest)
    return [case for case in run.cases if _is_aged(latest.get(case.case_id), old, least)]


def _stale(latest: dict[str, dict[str, Any]]) -> set[str]:
    frame = pd.DataFrame(list(latest.values()), columns=["case_id", "kernel", "source_hash"])
    return set(frame["case_id"][store.stale(frame, current_hashes())])


def _is_aged(row: dict[str, Any] | None, old: set[str], least: int) -> bool:
    if row is None or row["case_id"] in old or row["status"] in AGAIN:
        return True
    return row["measured_n_samples"] is not None and row["measured_n_samples"] < least


def note_renewal(run: Run, crew: Crew) -> None:
    """Say in the manifest when it was renewed and on what."""
    made = {"at": datetime.now(timezone.utc).isoformat(timespec="microseconds"), "device": crew.device,
            "environment": crew.environment()}
    run.manifest["renewals"] = [*run.manifest.get("renewals", []), made]
    store.write_manifest(run.path, run.manifest)


def finish(run: Run) -> Path:
    """Write the run's parquet, one row a case, and drop the journals and rows that it replaces.

    Raises
    ------
    StoreError
    """
    order = {case.case_id: place for place, case in enumerate(run.cases)}
    rows = [row for row in run.latest().values() if row["case_id"] in order]
    part = store.write_part(run.path, sorted(rows, key=lambda row: order[row["case_id"]]), run.manifest)
    for journal in run.path.glob("journal-*.jsonl"):
        journal.unlink()
    return part
