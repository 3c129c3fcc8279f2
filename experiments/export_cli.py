"""The command `export`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape

from experiments import exporting, store
from experiments.console import say, say_unreadable
from experiments.words import UserError, nearest, several

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN…", help="Run folders, folders that hold some, or parquets.")
]
To = Annotated[str, typer.Option("--to", help=escape("csv (heads 'name [unit]'), json or parquet."))]
Out = Annotated[
    Optional[Path], typer.Option("--out", help="A new file; the terminal if not given, except for parquet.")
]


def register(app: typer.Typer, console: Console) -> None:
    """Add the command to the application."""

    @app.command("export")
    def command(runs: Runs, to: To = "csv", out: Out = None) -> None:
        """Write the rows of runs for other tools: every column with its unit, every row with its status."""
        _check(runs, to, out)
        loaded = store.read_runs(runs)
        say_unreadable(loaded)
        if loaded.frame.empty:
            raise UserError(f"export: {', '.join(map(str, runs))} holds no row; name a run that has rows")
        rows = exporting.rows_of(loaded.frame)
        if out is None:
            _print(exporting.TEXT[to](rows))
        else:
            exporting.write(rows, to, out)
        count = len({row["run_id"] for row in rows})
        where = f" into {escape(str(out))}" if out else ""
        say(f"{several(len(rows), 'row')} of {several(count, 'run')}{where}")




def _check(runs: list[Path], to: str, out: Path | None) -> None:
    """Refuses what cannot be read or written, before anything is."""
    for path in runs:
        if not path.exists():
            raise UserError(f"export: {path} does not exist; name a run's folder")
    if to not in exporting.FORMATS:
        raise UserError(f"--to: '{to}' is not a format; {nearest(to, exporting.FORMATS)}")
    if out is None:
        if to == "parquet":
            raise UserError("--out: expected a file for parquet, which is no text; name one")
        return
    if out.exists():
        raise UserError(f"--out: {out} exists; name a new file")
    if not out.parent.is_dir():
        raise UserError(f"--out: {out.parent} is not a folder; make it, or name another file")
    if exporting.own_file(out):
        raise UserError(f"--out: {out.parent} is a run's folder, which holds its rows alone; name another")


def _print(text: str) -> None:
    """To the standard output; a reader that stops early, such as `head`, is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # NOTE: the interpreter flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
