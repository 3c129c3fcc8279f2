"""A run: its folder, its plan, and the loop that turns every case into a journalled row.

The parent process never opens a machine; a worker does, and may be killed at any moment. What is done is on
the disk before the next case begins, so a run that stops for whatever reason is continued by `resume`.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from experiments import environment, store
from experiments.catalog import catalog
from experiments.disk import remove_leftovers, sync_folder
from experiments.schema import BY_NAME, RETRYABLE, SCHEMA_VERSION
from experiments.suite import Repeat, Suite, load_suite
from experiments.sweep import Case, Options, cases_of
from experiments.words import UserError
from experiments.worker import Unavailable, Worker

RUNS = Path("runs")
NEEDED = (
    "run_id",
    "suite",
    "title",
    "request",
    "repeat",
    "device",
    "cases",
)  # of a manifest, to resume its run
LEFTOVER = re.compile(r"\.manifest\.json\.\d+")  # of a run that was killed before it had a manifest
JOURNAL = "journal-0.jsonl"  # one worker, one journal; more workers will each have their own


@dataclass(frozen=True)
class Request:
    """What `run` was asked to do; kept in the manifest so that `resume` asks for the same."""

    suite: str
    machine: str = "best"
    kernels: tuple[str, ...] = ()
    options: Options = Options()

    def known(self) -> dict[str, Any]:
        return catalog(self.kernels)


@dataclass
class Run:
    """An open run folder."""

    path: Path
    manifest: dict[str, Any]
    cases: list[Case]
    rows: list[dict[str, Any]]  # every attempt so far

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


def with_external(request: Request, known) -> Options:
    """The request's options, with the names of the kernels given by path."""
    names = tuple(entry.name for entry in known.values() if entry.path)
    return Options(
        names, request.options.only, request.options.limit, request.options.lengths, request.options.batch
    )


def plan(request: Request, machine: str | None = None) -> tuple[Suite, str, list[Case]]:
    """The suite, the machine and the cases of a request, without starting anything.

    Raises
    ------
    UserError
    """
    suite, known = load_suite(request.suite), request.known()
    if machine is None:
        machine = request.machine
        if machine == "best":
            machine = "gpu" if environment.gpu_expected() else "cpu"
    return suite, machine, cases_of(suite, machine, known, with_external(request, known))


def begin(request: Request, worker: Worker, out: Path | None) -> Run:
    """Make the run folder and write its manifest.

    Raises
    ------
    UserError, StoreError
        Nothing to run, or a folder that cannot be made or already holds a run.
    """
    suite, machine, cases = plan(request, worker.machine)
    stamp = datetime.now(timezone.utc)
    run_id = f"{suite.name}-{stamp:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    path = RUNS / run_id if out is None else out
    if not _is_text(path):
        raise UserError("--out: expected a folder whose name is UTF-8; name another one")
    if (path / store.MANIFEST).exists():
        raise UserError(f"--out: {path} already holds a run; resume it, or name another folder")
    if path.is_dir() and any(not LEFTOVER.match(p.name) for p in path.iterdir()):
        raise UserError(f"--out: {path} is not empty; name a new folder, which becomes the run")
    try:
        path.mkdir(parents=True, exist_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"--out: {path} cannot be made ({error.strerror}); name a writable folder") from error
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
            **{k: v for k, v in asdict(request.options).items() if k != "kernels"},
        },
        "command": "python -m experiments " + command_line(request),
        "repeat": asdict(suite.repeat),
        "device": worker.device,
        "environment": environment.capture(),
        "cases": [{"case_id": c.case_id, "params": dict(c.params)} for c in cases],
        "schema_version": SCHEMA_VERSION,
    }
    store.write_manifest(path, manifest)
    return Run(path, manifest, cases, [])


def _is_text(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def command_line(request: Request) -> str:
    """The arguments that ask for the same run again."""
    words = ["run", request.suite, "--machine", request.machine]
    for path in request.kernels:
        words += ["--kernel", path]
    for name in ("only", "limit", "lengths", "batch"):
        if (value := getattr(request.options, name)) is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def reopen(path: Path) -> Run:
    """An existing run with the rows it has.

    Raises
    ------
    StoreError
        No readable manifest, or one that does not say enough.
    """
    manifest = store.read_manifest(path)
    missing, where = [name for name in NEEDED if name not in manifest], path / store.MANIFEST
    if missing:
        raise store.StoreError(f"{where}: does not say {', '.join(missing)}, so the run cannot be resumed")
    if manifest.get("schema_version", 1) > SCHEMA_VERSION:
        raise store.StoreError(f"{where}: was begun by a newer version of the project; update it to resume")
    cases = [Case(c["case_id"], c["params"]) for c in manifest["cases"]]
    remove_leftovers(path)
    return Run(path, manifest, cases, store.read_rows(path))


def worker_for(run: Run) -> Worker:
    """A started worker that opens the machine and device the run began on.

    Raises
    ------
    UserError
        Another device is here now: a run holds rows of one device.
    Unavailable
    """
    began = run.manifest["device"]
    worker = Worker(began["machine"], run.manifest["request"]["kernels"], Repeat(**run.manifest["repeat"]))
    worker.start()
    if worker.device["device"] != began["device"]:
        now = worker.device["device"]
        worker.stop()
        raise UserError(f"resume: the run began on {began['device']} and this is {now}; start a new run here")
    return worker


def execute(
    run: Run, worker: Worker, cases: list[Case], progress: Callable[[Case, dict | None], None]
) -> None:
    """Run the cases one by one; each ends as one fsynced row.

    `progress` is called with (case, None) when a case begins and (case, row) when it ends.

    Raises
    ------
    KeyboardInterrupt
        After the running case was recorded as interrupted.
    StoreError
        The journal cannot be written; what was measured before stays.
    Unavailable
        The worker cannot be replaced.
    """
    journal = store.Journal(run.path / JOURNAL)
    try:
        for case in cases:
            progress(case, None)
            row = _one(run, worker, case, journal)
            progress(case, row)
    finally:
        journal.close()


def _one(run: Run, worker: Worker, case: Case, journal: store.Journal) -> dict[str, Any]:
    attempt = 1 + max((r["attempt"] for r in run.rows if r["case_id"] == case.case_id), default=0)
    row = {
        "run_id": run.run_id,
        "suite": run.manifest["suite"],
        "case_id": case.case_id,
        "attempt": attempt,
        "host": socket.gethostname(),
        **worker.device,
        "started_at": datetime.now(timezone.utc),
        **{name: value for name, value in case.params.items() if name in BY_NAME},
    }
    interrupt = None
    try:
        row |= {name: value for name, value in worker.run(case.params).items() if name in BY_NAME}
    except KeyboardInterrupt as error:
        worker.stop()
        interrupt = error
        row |= {"status": "interrupted", "error": "stopped by the user while it ran"}
    row["finished_at"] = datetime.now(timezone.utc)
    journal.append(row)
    run.rows.append(row)
    if interrupt is not None:
        raise interrupt
    return row


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


__all__ = [
    "Request",
    "Run",
    "Unavailable",
    "begin",
    "execute",
    "finish",
    "newest",
    "plan",
    "reopen",
    "worker_for",
]
