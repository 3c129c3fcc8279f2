"""The commands: list, plan, run, resume, show, explain, doctor, and those of the modules `*_cli`."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cuattn.machine import DeviceError
from experiments import (
    capacity_cli,
    compare_cli,
    diagnose_cli,
    estimate,
    explain_shape,
    export_cli,
    recommend_cli,
    runner,
    store,
    tables,
    tune_cli,
)
from experiments import doctor as doctoring
from experiments.suite import load_suite, suite_names
from experiments.sweep import Options
from experiments.words import UserError, nearest
from experiments.worker import Unavailable, Worker

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Sweep attention kernels over shapes, check every result, keep what was measured.",
)
WIDE = 160  # columns where the output is not a terminal's, such as a log of continuous integration
console = Console() if sys.stdout.isatty() else Console(width=WIDE)
errors = Console(stderr=True)
FAILED = ("incorrect", "compile_error", "cuda_error", "crash", "timeout")
INTERRUPTED = 130

SuiteName = Annotated[str, typer.Argument(help="A suite's name (see `list`) or the path of a TOML file.")]
MachineName = Annotated[str, typer.Option("--machine", help="best, cpu or gpu.")]
KernelPaths = Annotated[
    Optional[list[str]], typer.Option("--kernel", help="Add a kernel: a module that defines ROW.")
]
Only = Annotated[Optional[str], typer.Option("--only", help="Only this kernel's cases.")]
Limit = Annotated[Optional[int], typer.Option("--limit", help="Only the first N cases.")]
Lengths = Annotated[
    Optional[str],
    typer.Option(
        "--lengths",
        help="Ragged batches with the lengths of a request log: "
        "Azure CSV, Mooncake JSONL, or one integer a line.",
    ),
]
Batch = Annotated[
    Optional[int], typer.Option("--batch", help="Requests a ragged batch; 64 on a GPU, 4 without.")
]


def main() -> None:
    """Run a command; what the user can mend ends as one sentence and exit code 2, never as a traceback."""
    try:
        app()
    except (UserError, Unavailable) as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise SystemExit(2) from None
    except store.StoreError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise SystemExit(1) from None


def _request(suite, machine, kernel, only, limit, lengths, batch) -> runner.Request:
    if machine not in ("best", "cpu", "gpu"):
        raise UserError(
            f"--machine: '{machine}' is not a machine; {nearest(machine, ('best', 'cpu', 'gpu'))}"
        )
    return runner.Request(suite, machine, tuple(kernel or ()), Options((), only, limit, lengths, batch))


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
) -> None:
    """List every case of a suite with its estimated time, and run nothing."""
    request = _request(suite, machine, kernel, only, limit, lengths, batch)
    found, chosen, cases = runner.plan(request)
    cases = estimate.with_estimates(cases, chosen, found.repeat)
    seconds = {case.case_id: case.estimate_s for case in cases}
    console.print(f"{found.title}, on the {chosen} machine", highlight=False)
    for family, rows in tables.families([{**c.params, "case_id": c.case_id} for c in cases]).items():
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
        f"{len(cases)} cases, estimated {_duration(sum(c.estimate_s for c in cases))} in all, from cold"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@app.command()
def run(
    suite: SuiteName,
    machine: MachineName = "best",
    kernel: KernelPaths = None,
    only: Only = None,
    limit: Limit = None,
    lengths: Lengths = None,
    batch: Batch = None,
    out: Annotated[
        Optional[Path], typer.Option("--out", help="The run's folder; a new one below ./runs if not given.")
    ] = None,
) -> None:
    """Run a suite: every case ends as a row, in a folder of the run's own."""
    request = _request(suite, machine, kernel, only, limit, lengths, batch)
    runner.plan(request)  # what the user mistyped is said before a worker starts
    worker = Worker(
        machine, [str(Path(path).resolve()) for path in request.kernels], load_suite(suite).repeat
    )
    worker.start()
    try:
        opened = runner.begin(request, worker, out)
        _complete(opened, worker, opened.cases)
    finally:
        worker.stop()


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Also try failed cases again.")
    ] = False,
) -> None:
    """Run what a run still lacks."""
    opened = runner.reopen(run)
    cases = opened.pending(retry_failed)
    if not cases:
        console.print(f"Nothing is missing: {len(opened.cases)} cases have their rows.")
        _close(opened)
        return
    worker = runner.worker_for(opened)
    try:
        _complete(opened, worker, cases)
    finally:
        worker.stop()


def _complete(opened: runner.Run, worker: Worker, cases) -> None:
    """Execute the cases with a progress bar, write the parquet, print the table, exit as the rows deserve."""
    device = opened.manifest["device"]
    console.print(
        f"{opened.manifest['title']}: {len(cases)} cases on {escape(device['device'])}, "
        f"into {escape(str(opened.path))}",
        highlight=False,
    )
    columns = (
        TextColumn("{task.description}", table_column=None),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=len(cases))

            def progress(case, row) -> None:
                if row is None:
                    bar.update(task, description=escape(case.label))
                    return
                bar.advance(task)
                if row["status"] in FAILED:
                    bar.console.print(
                        f"[red]{row['status']}[/] {escape(case.label)}: {escape(row['error'])}",
                        highlight=False,
                    )

            runner.execute(opened, worker, cases, progress)
    except KeyboardInterrupt:
        again = shlex.join(["resume", str(opened.path)])
        console.print(
            f"Stopped. What was done is kept; go on with: python -m experiments {escape(again)}",
            highlight=False,
            soft_wrap=True,
        )
        raise SystemExit(INTERRUPTED) from None
    _close(opened)


def _close(opened: runner.Run) -> None:
    """Write the parquet, say what came out; exit code 1 where a kernel failed."""
    part = runner.finish(opened)
    loaded = store.read_runs(opened.path)
    _show(loaded, opened.manifest)
    console.print(f"Results: {escape(str(part))}", highlight=False, soft_wrap=True)
    counts = Counter(loaded.frame["status"])
    if any(counts[status] for status in FAILED):
        raise SystemExit(1)


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
    for info in loaded.runs:
        where = info.path if info.path.is_dir() else info.path.parent
        rows = loaded.frame[loaded.frame["run_path"] == str(where)]
        _show(store.Loaded(rows.reset_index(drop=True)), info.manifest)
    for bad, reason in loaded.quarantined:
        errors.print(
            f"[yellow]set aside[/] {escape(str(bad))}: {escape(reason)}", soft_wrap=True, highlight=False
        )
    if loaded.torn_lines:
        errors.print(f"[yellow]{loaded.torn_lines} torn journal lines[/] were skipped")


def _show(loaded: store.Loaded, manifest: dict) -> None:
    frame = loaded.frame
    devices = ", ".join(sorted(str(d) for d in frame["device"].dropna().unique()))
    title = manifest.get("title", "Run")
    for table in tables.results(frame, f"{title} ({devices})" if devices else title):
        console.print(table)
    if (bad := tables.problems(frame)) is not None:
        console.print(bad)
    counts = Counter(str(s) for s in frame["status"])
    total = len(manifest.get("cases", ())) or len(frame)
    console.print(
        f"{len(frame)} of {total} cases: " + ", ".join(f"{n} {s}" for s, n in counts.most_common()),
        highlight=False,
    )


capacity_cli.register(app, console)
compare_cli.register(app, console)
diagnose_cli.register(app, console)
export_cli.register(app, console)
recommend_cli.register(app, console)
tune_cli.register(app, console)


@app.command()
def explain(
    kernel: Annotated[str, typer.Argument(help="A kernel's name, such as flash.")],
    shape: Annotated[
        str, typer.Option("--shape", help=f"Pairs such as M=128,N=256. Defaults: {explain_shape.USAGE}.")
    ] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="Element type.")] = explain_shape.DTYPE,
    causal: Annotated[
        Optional[bool],
        typer.Option("--causal/--full", help="The mask of a prefill kernel; full if not given."),
    ] = None,
    constant: Annotated[
        Optional[list[str]], typer.Option("--constant", help="NAME=VALUE: set a tunable, as suites do.")
    ] = None,
    paths: KernelPaths = None,
    block: Annotated[int, typer.Option("--block", help="The block whose timeline is shown.")] = 0,
    wait: Annotated[
        float, typer.Option("--wait", help="Estimated seconds it may take.")
    ] = explain_shape.WAIT_S,
    out: Annotated[
        Optional[Path], typer.Option("--out", help="Also save explain.json and timeline.html in this folder.")
    ] = None,
) -> None:
    """Run a kernel once on the CPU machine and say, line by line, what it did."""
    from experiments import explain as explaining  # here, because it imports Altair, which takes its time
    from experiments import explain_text

    request = explaining.Request(
        kernel, shape, dtype, causal, tuple(constant or ()), tuple(paths or ()), block, wait
    )
    try:
        document = explaining.explain(request)
    except DeviceError as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise SystemExit(1) from None
    explain_text.show(console, document)
    if out is None:
        again = explaining.out_of(document, f"runs/explain-{document['kernel']}")
        console.print(f"\nTo keep it for the dashboard: {escape(again)}", highlight=False, soft_wrap=True)
    else:
        for path in explaining.save(document, out):
            console.print(f"Saved: {escape(str(path))}", highlight=False, soft_wrap=True)
    if not explaining.holds(document):
        raise SystemExit(1)


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
