"""A run's folder: what it holds, how it begins, how it is taken up again, and who may work in it.

One runner at a time works in a folder; it holds the folder's lock.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments import ladder, store
from experiments.crew import Crew
from experiments.disk import remove_leftovers, sync_folder
from experiments.locks import Lock, take
from experiments.requests import Request, command_line, plan
from experiments.schema import RETRYABLE, SCHEMA_VERSION
from experiments.shards import parse_shard
from experiments.suite import Repeat
from experiments.sweep import Case
from experiments.words import UserError

RUNS = Path("runs")
NEEDED = ("run_id", "suite", "title", "request", "repeat", "device", "cases")  # to resume a run
LOCK = ".lock"
# In a folder that holds no run: what one left that was killed before it had a manifest.
LEFTOVER = re.compile(r"\.manifest\.json\.\d+|\.lock")
Say = Callable[[str], None]


@dataclass
class Run:
    """An open run folder, which nobody else works in until it is closed."""

    path: Path
    manifest: dict[str, Any]
    cases: list[Case]
    rows: list[dict[str, Any]]  # every attempt so far
    lock: Lock

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """Let others work in it."""
        self.lock.release()

    @cached_property
    def rungs(self) -> dict[tuple[str, str | None], str]:
        """(kernel, constants) → name of the rung."""
        return ladder.named(ladder.rungs_of(self.manifest))

    @property
    def run_id(self) -> str:
        return self.manifest["run_id"]

    def latest(self) -> dict[str, dict[str, Any]]:
        """Each attempted case's last row."""
        found: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            if row["attempt"] >= found.get(row["case_id"], row)["attempt"]:
                found[row["case_id"]] = row
        return found

    def pending(self, retry_failed: bool = False) -> list[Case]:
        """Cases without a lasting row: never attempted, interrupted, and if asked for, those that failed."""
        again = {"interrupted"} | (RETRYABLE if retry_failed else set())
        latest = self.latest()
        return [c for c in self.cases if c.case_id not in latest or latest[c.case_id]["status"] in again]


def begin(request: Request, crew: Crew, out: Path | None, say: Say = lambda sentence: None) -> Run:
    """Make the run folder and write its manifest.

    Raises
    ------
    UserError, StoreError
        Nothing to run, or a folder that cannot be made or already holds a run.
    """
    suite, machine, cases = plan(request, crew.machine)
    stamp = datetime.now(timezone.utc)
    shard = _shard(request, crew.machine)
    part = f"-{shard['index']}of{shard['of']}" if shard else ""
    run_id = f"{suite.name}{part}-{stamp:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    path = RUNS / run_id if out is None else out
    lock = _make(path, say)
    manifest = {
        "run_id": run_id,
        "suite": suite.name,
        "title": suite.title,
        "question": suite.question,
        "claims": list(suite.claims),
        "created_at": stamp.isoformat(timespec="microseconds"),
        "request": {
            "suite": request.suite,
            "machine": machine,
            "kernels": [os.path.abspath(k) for k in request.kernels],
            "devices": request.devices,
            "jobs": request.jobs,
            "executor": request.executor,
            "address": request.address,
            **{k: v for k, v in asdict(request.options).items() if k != "kernels"},
        },
        "command": "python -m experiments " + command_line(request),
        "repeat": asdict(suite.repeat),
        "rungs": [asdict(rung) for rung in suite.rungs],
        "device": crew.device,
        "environment": crew.environment(),
        "shard": shard,
        "cases": [{"case_id": c.case_id, "params": dict(c.params)} for c in cases],
        "schema_version": SCHEMA_VERSION,
    }
    try:
        store.write_manifest(path, manifest)
    except BaseException:
        lock.release()
        raise
    return Run(path, manifest, cases, [], lock)


def _shard(request: Request, machine: str) -> dict[str, int] | None:
    """Which part of how many this run is, and the cases all of them have together; None for a whole run."""
    if request.options.shard is None:
        return None
    _, _, every = plan(replace(request, options=replace(request.options, shard=None)), machine)
    shard = parse_shard(request.options.shard)
    return {"index": shard.index, "of": shard.of, "cases": len(every)}


def _make(path: Path, say: Say) -> Lock:
    """Make and lock a run's folder, in which nothing may be."""
    try:
        str(path).encode()
        path.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent)
    except UnicodeEncodeError:
        raise UserError("--out: expected a folder whose name is UTF-8; name another one") from None
    except OSError as error:
        raise UserError(f"--out: {path} cannot be made ({error.strerror}); name a writable folder") from error
    lock = _lock(path, "name another folder", say, patient=False)
    if (path / store.MANIFEST).exists():
        lock.release()
        raise UserError(f"--out: {path} already holds a run; resume it, or name another folder")
    if any(not LEFTOVER.fullmatch(p.name) for p in path.iterdir()):
        lock.release()
        raise UserError(f"--out: {path} is not empty; name a new folder, which becomes the run")
    remove_leftovers(path)
    return lock


def _lock(path: Path, advice: str, say: Say, patient: bool) -> Lock:
    lock = take(path / LOCK, str(path), advice, say if patient else None)
    if lock.notice:
        say(lock.notice)
    return lock


def reopen(path: Path, say: Say = lambda sentence: None, patient: bool = False) -> Run:
    """An existing run with the rows it has.

    Parameters
    ----------
    path : Path
    say : callable
        Told what the user should know.
    patient : bool
        Whether to wait for another runner that works in it, instead of refusing.

    Raises
    ------
    UserError
        No run's folder.
    StoreError
        No readable manifest, or one that does not say enough.
    Busy
        Another runner works in it.
    """
    cases, manifest = _plan_of(path)
    lock = _lock(path, "wait for it with --wait, or stop that process", say, patient)
    try:
        remove_leftovers(path)
        return Run(path, manifest, cases, store.read_rows(path, say), lock)
    except BaseException:
        lock.release()
        raise


def _plan_of(path: Path) -> tuple[list[Case], dict[str, Any]]:
    """The cases and the manifest of a run, if that says enough to resume it."""
    where = path / store.MANIFEST
    if not os.path.isfile(where):
        raise UserError(_no_run(path))
    try:
        manifest = store.read_manifest(path)
    except store.StoreError as error:
        raise store.StoreError(f"{error}; the run cannot be resumed, but show and export read its rows: "
                               "begin a new one for the rest") from error
    if missing := [name for name in NEEDED if name not in manifest]:
        raise store.StoreError(f"{where}: does not say {', '.join(missing)}, so the run cannot be resumed")
    try:
        if int(manifest.get("schema_version", 1)) > SCHEMA_VERSION:
            raise store.StoreError(f"{where}: was begun by a newer version of the project; update it here")
        Repeat(**manifest["repeat"])
        _ = manifest["request"]["kernels"], manifest["device"]["machine"], manifest["device"]["device"]
        return [Case(c["case_id"], c["params"]) for c in manifest["cases"]], manifest
    except (TypeError, KeyError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise store.StoreError(f"{where}: is not the manifest of a run ({why})") from error


def _no_run(path: Path) -> str:
    """Why a folder cannot be resumed that has no manifest, and what to name instead."""
    if not os.path.exists(path):
        return f"resume: {path} does not exist; name a run's folder"
    below = next((p for p in store.find_runs(path) if p != path and (p / store.MANIFEST).is_file()), None)
    advice = f"name one that it holds, such as {below}" if below else "name a run's folder"
    return f"resume: {path} has no {store.MANIFEST} and so is no run; {advice}"


def finish(run: Run) -> Path:
    """Write the run's parquet from all its rows.

    Raises
    ------
    StoreError
    """
    return store.write_part(run.path, store.read_rows(run.path), run.manifest)


def newest(root: Path = RUNS) -> Path | None:
    """The run folder below `root` that began last."""
    found = [p for p in store.find_runs(root) if (p / store.MANIFEST).is_file()]
    return max(found, key=lambda p: (p / store.MANIFEST).stat().st_mtime_ns, default=None)
