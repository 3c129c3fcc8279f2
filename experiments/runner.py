"""The loop that turns every case of a run into a journalled row.

The parent process never opens a machine; workers do, and may be killed at any moment. What is done is on the
disk before a worker's next case begins, so a run that stops for whatever reason is continued by `resume`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any

from experiments import store
from experiments.crew import Crew
from experiments.folder import Run, Say, begin, finish, newest, reopen
from experiments.places import places
from experiments.requests import Request, plan
from experiments.schema import BY_NAME, encode
from experiments.suite import Repeat
from experiments.sweep import Case
from experiments.worker import Worker

__all__ = [
    "Request",
    "Run",
    "begin",
    "crew_for",
    "crew_of",
    "execute",
    "finish",
    "journal_name",
    "newest",
    "plan",
    "reopen",
]


def journal_name(worker: int) -> str:
    """One worker, one journal, so that no two ever write to the same file."""
    return f"journal-{worker}.jsonl"


def crew_of(request: Request, repeat: Repeat, say: Say = lambda sentence: None, patient: bool = False) -> Crew:
    """The workers of a new run, not started.

    Raises
    ------
    UserError
        Devices or workers that are not to be had.
    """
    kind, machine, where = _where(
        request.executor, request.address, request.machine, request.devices, request.jobs)
    return kind(machine, where, [os.path.abspath(path) for path in request.kernels], repeat, say, patient)


def _where(executor: str, address: str | None, *asked) -> tuple[type[Crew], str, list]:
    """The kind of crew, its machine and its places."""
    if executor == "local":
        return Crew, *places(*asked)
    from experiments.ray_crew import RayCrew
    from experiments.ray_places import connect, ray_places

    connect(address)
    return RayCrew, *ray_places(*asked)


def crew_for(
    run: Run,
    devices: str | None = None,
    jobs: int | None = None,
    say: Say = lambda sentence: None,
    patient: bool = False,
    executor: str | None = None,
    address: str | None = None,
) -> Crew:
    """The workers that take up a run, not started; where they work is as the run was asked, or as said here.

    Raises
    ------
    UserError
    """
    asked, began = run.manifest["request"], run.manifest["device"]
    before = asked.get("executor", "local")
    if devices is None and jobs is None and executor in (None, before):
        devices, jobs = asked.get("devices"), asked.get("jobs")
    if executor in (None, before) and address is None:
        address = asked.get("address")
    kind, machine, where = _where(executor or before, address, began["machine"], devices, jobs)
    repeat = Repeat(**run.manifest["repeat"])
    return kind(machine, where, asked["kernels"], repeat, say, patient, began_on=began["device"])


def execute(run: Run, crew: Crew, cases: list[Case], progress: Callable[[Case, dict | None], None]) -> None:
    """Run the cases; each ends as one fsynced row in its worker's journal.

    `progress` is called with (case, None) when a case begins and (case, row) when it ends.

    Raises
    ------
    KeyboardInterrupt
        After the running cases were recorded as interrupted.
    StoreError
        A journal cannot be written; what was measured before stays.
    Unavailable
        No worker is left, and none can be started.
    """
    started: dict[Worker, datetime] = {}

    def begun(worker: Worker, case: Case) -> None:
        started[worker] = datetime.now(timezone.utc)
        progress(case, None)

    def ended(worker: Worker, case: Case, columns: Mapping[str, Any]) -> None:
        row = _row(run, worker, case, started.get(worker), columns)
        journals[worker].append(row)
        run.rows.append(row)
        progress(case, row)

    with ExitStack() as stack:
        journals = {}
        for number, worker in enumerate(crew.workers):
            journals[worker] = store.Journal(run.path / journal_name(number))
            stack.callback(journals[worker].close)
        try:
            crew.work(cases, begun, ended)
        except KeyboardInterrupt:
            for worker, case in crew.busy.items():
                worker.stop()
                ended(worker, case, {"status": "interrupted", "error": "stopped by the user while it ran"})
            raise


def _row(run: Run, worker: Worker, case: Case, started: datetime | None, columns: Mapping[str, Any]) -> dict:
    now = datetime.now(timezone.utc)
    row = {
        "run_id": run.run_id,
        "suite": run.manifest["suite"],
        "case_id": case.case_id,
        "rung": run.rungs.get((case.params.get("kernel"), case.params.get("constants"))),
        "attempt": 1 + max((r["attempt"] for r in run.rows if r["case_id"] == case.case_id), default=0),
        "host": socket.gethostname(),
        **worker.device,
        "started_at": started or now,
        "finished_at": now,
        **{name: value for name, value in case.params.items() if name in BY_NAME},
    }
    full = row | {name: value for name, value in columns.items() if name in BY_NAME}
    try:
        encode(full)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:  # a kernel's plan may say anything
        return row | {"status": "crash", "error": f"the row cannot be stored: {error}"}
    return full
