"""What `compare` does when it is given kernels: check the request, time them in turn, print the outcome."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from experiments.ab import live
from experiments.ab import tables as shown
from experiments.ab.comparison import Comparison
from experiments.ab.live import Subject
from experiments.catalog import catalog
from experiments.console import progress_bar
from experiments.interrupts import INTERRUPTED
from experiments.requests import need_gpu
from experiments.suite import load_suite
from experiments.words import UserError
from experiments.worker import Worker

SUITE, TIMEOUT_S = "quick", 5.0
NO_TIME = ("two kernels are timed in turn on a GPU only; for what it counts, compare two stored runs: compare "
           "RUN_A RUN_B")


@dataclass(frozen=True)
class Asked:
    """The options of a live comparison by their names on the command line; None where not given."""

    a: str | None = None
    b: str | None = None
    suite: str | None = None
    kernel: list[str] | None = None
    machine: str | None = None
    limit: int | None = None
    timeout: float | None = None
    out: Path | None = None

    def given(self) -> list[str]:
        return [f"--{f.name}" for f in fields(self) if getattr(self, f.name) is not None]


def compare_live(asked: Asked, margin: float, confidence: float, console: Console) -> int:
    """Time two kernels in turn over a suite's shapes; returns the exit code.

    Raises
    ------
    UserError
        Names, constants or numbers that make no sense, or no GPU.
    Unavailable, StoreError
        The worker does not open its GPU; the pairs cannot be written.
    """
    if missing := [flag for flag in ("--a", "--b") if flag not in asked.given()]:
        raise UserError(f"{missing[0]}: is missing; name two kernels, such as --a flash --b flash:block_n=32")
    timeout_s = TIMEOUT_S if asked.timeout is None else asked.timeout
    if not timeout_s > 0:
        raise UserError(f"--timeout: expected seconds above 0, got {timeout_s:g}")
    paths = [str(Path(path).resolve()) for path in asked.kernel or ()]
    known = catalog(paths)
    sides = live.subject("--a", asked.a, known), live.subject("--b", asked.b, known)
    suite = load_suite(asked.suite or SUITE)
    points = live.points_of(suite, known, *sides, asked.limit)
    need_gpu("compare", asked.machine or "best", NO_TIME)
    worker = Worker("gpu", paths, live.repeat_for(suite, margin, timeout_s))
    worker.start()
    try:
        with (nullcontext() if asked.out is None else live.open_log(asked.out)) as log:
            made, whole = _with_progress(worker, points, sides, (margin, confidence), console, log)
    finally:
        worker.stop()
    return _report(made, whole, sides, str(worker.device["device"]), (len(points), confidence), console)


def _with_progress(worker, points, sides: tuple[Subject, Subject], sureness, console: Console, log):
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=len(points))

        def progress(point, outcome) -> None:
            if outcome is None:
                bar.update(task, description=escape(shown.shape_words(point)))
            else:
                bar.advance(task)

        return live.compare(worker, points, sides, *sureness, progress, log)


def _report(made: Comparison, whole: bool, sides, device: str, expected, console: Console) -> int:
    points, confidence = expected
    a, b = (side.label for side in sides)
    console.print(f"A: {escape(a)}, B: {escape(b)}, on {escape(device)}", highlight=False)
    for table in shown.everything(made, "B against A, timed in turn", confidence, paired=True):
        console.print(table)
    if a == b:
        console.print("A and B are the same: what differs is what this measurement cannot tell apart.")
    for sentence in shown.sums(made, confidence):
        console.print(sentence, highlight=False)
    if not made.compared:
        console.print("No shape was timed; the table says why." if made.excluded else "No shape was timed.")
    if not whole:
        console.print(f"Stopped after {made.cases} of {points} shapes.")
        return INTERRUPTED
    return 0 if made.compared else 1
