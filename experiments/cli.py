"""The commands: list, plan, show, doctor, and those that the other modules named `cli` or `*_cli` add."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
import typer.core
from rich.markup import escape

from experiments import build_cli, estimate, export_cli, ladder, ladder_tables, run_cli, runner, store, tables
from experiments import doctor as doctoring
from experiments.ab import cli as compare
from experiments.capacity import cli as capacity
from experiments.catalog import current_hashes
from experiments.choosing import recommend_cli, tune_cli
from experiments.claims import cli as claims
from experiments.console import console, fail, say_stale, say_unreadable
from experiments.diagnose import cli as diagnose
from experiments.explain import cli as explain
from experiments.interrupts import INTERRUPTED, ignore, raise_again
from experiments.run_cli import (
    Batch,
    KernelPaths,
    Lengths,
    Limit,
    MachineName,
    MemoryLimit,
    Only,
    Reserve,
    ShardOf,
    SuiteName,
    request_of,
    show_rows,
)
from experiments.suite import load_suite, suite_names
from experiments.words import UserError, several
from experiments.worker import Unavailable


class _Commands(typer.core.TyperGroup):
    """An interrupt that no command answers ends as a sentence too."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ignore()
            typer.echo("Stopped before it was done.", err=True)
            raise SystemExit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Sweep attention kernels over shapes, check every result, keep what was measured.",
)


def main() -> None:
    """Run a command; what the user can mend ends as one sentence and exit code 2, never as a traceback."""
    try:
        app()
    except (UserError, Unavailable) as error:
        fail(error)
        raise SystemExit(2) from None
    except store.StoreError as error:
        fail(error)
        raise SystemExit(1) from None


@app.callback()
def _begin() -> None:
    raise_again()


@app.command("list")
def list_suites() -> None:
    """Name the suites and the questions they answer."""
    table = tables.new_table("Suites")
    for head in ("suite", "question", "claims"):
        table.add_column(head)
    for name in suite_names():
        suite = load_suite(name)
        table.add_row(name, suite.question, ", ".join(str(c) for c in suite.claims))
    console.print(table)


@app.command()
def plan(
    suite: SuiteName,
    machine: MachineName = "best",
    kernel: KernelPaths = None,
    only: Only = None,
    limit: Limit = None,
    lengths: Lengths = None,
    batch: Batch = None,
    shard: ShardOf = None,
    memory_limit: MemoryLimit = None,
    reserve: Reserve = None,
) -> None:
    """List every case of a suite with its estimated time, and run nothing."""
    request = request_of(
        suite, machine, kernel, only=only, limit=limit, lengths=lengths, batch=batch, shard=shard,
        memory_limit=memory_limit, reserve=reserve,
    )
    found, chosen, cases = runner.plan(request)
    cases = estimate.with_estimates(cases, chosen, found.repeat, known=request.known())
    rungs = ladder.named(found.rungs)
    seconds = {case.case_id: case.estimate_s for case in cases}
    console.print(f"{found.title}, on the {chosen} machine", highlight=False)
    listed = [
        {**c.params, "case_id": c.case_id, "rung": rungs.get((c.params["kernel"], c.params.get("constants")))}
        for c in cases
    ]
    for family, rows in tables.families(listed).items():
        names, fixed = tables.split_parameters(rows)
        table = tables.new_table(family, fixed)
        table.add_column("case", no_wrap=True)
        tables.add_parameters(table, names)
        table.add_column("estimated\ns", justify="right", no_wrap=True)
        for row in rows:
            table.add_row(
                row["case_id"], *tables.parameter_cells(row, names), f"{seconds[row['case_id']]:.1f}"
            )
        console.print(table)
    console.print(
        f"{several(len(cases), 'case')}, estimated {_duration(sum(c.estimate_s for c in cases))} in all, "
        "from cold"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


app.command()(build_cli.build)
app.command()(run_cli.run)
app.command()(run_cli.resume)
app.command()(run_cli.record)


@app.command()
def show(
    run: Annotated[
        Optional[Path],
        typer.Argument(help="A run's folder, or one that holds some; the latest run if not given."),
    ] = None,
) -> None:
    """Print a run's rows."""
    path = runner.newest() if run is None else run
    if path is None:
        raise UserError(
            "show: there is no run below ./runs yet; make one with: python -m experiments run quick"
        )
    if not path.exists():
        raise UserError(f"show: {path} does not exist; name a run's folder")
    loaded = store.read_runs(path)
    if not loaded.runs:
        raise UserError(f"show: {path} holds no run; name a run's folder")
    hashes = current_hashes()
    for info in loaded.runs:
        where = info.path if info.path.is_dir() else info.path.parent
        rows = loaded.frame[loaded.frame["run_path"] == str(where)]
        rows = rows.reset_index(drop=True)
        show_rows(store.Loaded(rows), info.manifest)
        say_stale(rows, hashes)
        for table in ladder_tables.tables(rows, ladder.rungs_of(info.manifest), info.path):
            console.print(table)
    say_unreadable(loaded)
    if loaded.frame.empty and loaded.quarantined:
        raise UserError(f"show: {path} holds nothing that can be read; name a run that has rows")


for commands in (capacity, claims, compare, diagnose, explain, export_cli, recommend_cli, tune_cli):
    commands.register(app, console)


@app.command()
def doctor() -> None:
    """Say what works here, what does not, and what to do about it."""
    table = tables.new_table("This machine")
    for head in ("what", "", "detail", "what to do"):
        table.add_column(head, overflow="fold")
    found = doctoring.checks()
    for what, works, detail, remedy in found:
        mark = {True: "[green]ok[/]", False: "[red]missing[/]", None: "[dim]absent[/]"}[works]
        table.add_row(what, mark, escape(detail), escape(remedy))
    console.print(table)
    if any(works is False for _, works, _, _ in found):
        raise SystemExit(1)
