"""The command `tune`."""

from __future__ import annotations

import secrets
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape

from cuattn.kernels.base import Row
from experiments import store, tables
from experiments.ab.cli import fraction
from experiments.catalog import catalog
from experiments.choosing import tuning
from experiments.folder import RUNS
from experiments.interrupts import INTERRUPTED
from experiments.models import model as model_named
from experiments.requests import need_gpu
from experiments.suite import load_suite
from experiments.words import UserError, nearest, several

FAMILIES = ("prefill", "decode")
SUITES = "suites"  # below ./runs
NO_TIME = "there is nothing to tune by; tune where the kernel will run"

Kernel = Annotated[str, typer.Argument(help="A kernel's name, such as flash.")]
SuiteName = Annotated[Optional[str], typer.Option("--suite", help="Tune for the shapes of a suite.")]
ModelName = Annotated[Optional[str], typer.Option("--model", help="Tune for a model of models.csv.")]
Earlier = Annotated[
    Optional[Path], typer.Option("--run", help="Go on with, or judge anew, the run of an earlier `tune`.")
]
MachineName = Annotated[str, typer.Option("--machine", help="best or gpu.")]
Paths = Annotated[
    Optional[list[str]], typer.Option("--kernel", help="Add a kernel: a module that defines ROW.")
]
Margin = Annotated[str, typer.Option("--margin", help="Gains up to this are none: 2% or 0.02.")]
Out = Annotated[
    Optional[Path], typer.Option("--out", help="The run's folder; a new one below ./runs if not given.")
]


def register(app: typer.Typer, console: Console) -> None:
    """Add the command to the application."""

    @app.command("tune")
    def command(
        kernel: Kernel, suite: SuiteName = None, model: ModelName = None, run: Earlier = None,
        machine: MachineName = "best", paths: Paths = None, margin: Margin = f"{tuning.MARGIN:.0%}",
        out: Out = None,
    ) -> None:
        """Search a kernel's constants on this GPU, and keep those that beat its own choice beyond doubt."""
        limit = fraction("--margin", margin)
        row = _row(kernel, paths or ())
        if sum(x is not None for x in (suite, model, run)) != 1:
            raise UserError("tune: expected one of --suite, --model and --run; such as --model Llama-3.1-8B")
        if run is not None:
            folder, words = run, ["resume", str(run)]
        else:
            need_gpu("tune", machine, NO_TIME)
            sweeps = tuning.sweeps_of(load_suite(suite), row) if suite else _of_model(model, row)
            trials = tuning.write_suite(RUNS / SUITES, row, sweeps)
            stamp = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
            folder = out or RUNS / f"tune-{row.name}-{stamp}"
            words = ["run", str(trials), "--machine", "gpu", "--out", str(folder)]
            words += [word for path in paths or () for word in ("--kernel", path)]
        if measure(app, words) == INTERRUPTED:
            again = f"python -m experiments tune {kernel} --run {folder}"
            console.print(f"Nothing was stored yet: {escape(again)}", highlight=False, soft_wrap=True)
            raise SystemExit(INTERRUPTED)
        raise SystemExit(_conclude(console, row, folder, limit))


def measure(app: typer.Typer, words: list[str]) -> int:
    """The ordinary commands run and resume; returns their exit code, 1 where some trial failed.

    Raises
    ------
    UserError, Unavailable, StoreError
    """
    try:
        app(words, standalone_mode=False)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _row(name: str, paths) -> Row:
    known = catalog(paths)
    if name not in known:
        raise UserError(f"tune: '{name}' is not a kernel; {nearest(name, known)}")
    row = known[name].row
    if row is None:
        raise UserError(f"tune: {name} is another library's kernel, and its constants are its own; name one "
                        "of ours")
    if row.family not in FAMILIES:
        raise UserError(f"tune: {name} is a {row.family} kernel; name a prefill or decode kernel")
    tuning.trials(row)
    return row


def _of_model(name: str, row: Row):
    model_named(name)
    return tuning.model_sweeps(name, row)


def _conclude(console: Console, row: Row, folder: Path, margin: float) -> int:
    """Judge the run's rows, store the best, print both; returns the exit code."""
    latest: dict[str, dict] = {}
    for line in store.read_rows(folder):
        if line["attempt"] >= latest.get(line["case_id"], line)["attempt"]:
            latest[line["case_id"]] = line
    mine = [line for line in latest.values() if line["kernel"] == row.name and line["machine"] == "gpu"]
    if not mine:
        raise UserError(f"--run: {folder} holds no row of {row.name} on a GPU; name a run that `tune "
                        f"{row.name}` made")
    found = tuning.judge(mine, row, margin)
    if not any(one.shapes for one in found):
        console.print(f"No shape has a right and timed result of {row.name} as it is; nothing was stored.")
        return 1
    path = tuning.store_best(found, row, mine[0]["device"])
    console.print(_table(row, found, mine[0]["device"], margin))
    kept = sum(one.keep for one in found)
    classes = f"{len(found)} {'class' if len(found) == 1 else 'classes'}"
    console.print(f"{kept} of {classes} have constants faster than {row.name}'s own choice, kept in "
                  f"{escape(str(path))}; plans use them from now on (tried: {several(len(mine), 'case')}).",
                  highlight=False, soft_wrap=True)
    return 0


def _table(row: Row, found: list[tuning.Found], device: str, margin: float):
    caption = ("The gain is that of the geometric mean of medians over the class's shapes. Kept: faster "
               f"beyond doubt on one shape of it, by more than {margin:.1%}, and on none slower by as much.")
    table = tables.new_table(f"Tuned: {row.name} on {device}, measured", caption)
    table.add_column("class", overflow="fold")
    table.add_column("shapes", justify="right")
    table.add_column("best constants", overflow="fold")
    table.add_column("gain", justify="right", no_wrap=True)
    table.add_column("kept")
    for one in found:
        words = " ".join(f"{name}={value}" for name, value in one.constants.items())
        gain = f"{100 * one.margin:+.1f} %" if one.constants else ""
        table.add_row(one.name, str(one.shapes), words, gain, "yes" if one.keep else one.why)
    return table
