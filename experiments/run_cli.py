"""The commands run, resume and record."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.markup import escape

from experiments import renewal, runner, store, tables
from experiments.console import console, note, progress_bar
from experiments.interrupts import INTERRUPTED, held, ignore
from experiments.requests import check_executor, check_machine, check_timer
from experiments.sweep import Options
from experiments.words import several

FAILED = ("incorrect", "compile_error", "cuda_error", "crash", "timeout")

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
ShardOf = Annotated[
    Optional[str], typer.Option("--shard", help="I/N: only the I-th of N parts, such as 1/4, for batch jobs.")
]
MemoryLimit = Annotated[
    Optional[str],
    typer.Option("--memory-limit", help="Play a card of that memory, such as 24GB: what needs more is oom."),
]
Reserve = Annotated[
    Optional[str],
    typer.Option("--reserve", help="What weights and the rest of a service take of the limit, such as 18GB."),
]
Devices = Annotated[
    Optional[str],
    typer.Option(
        "--devices", "--device",
        help="GPUs by number or UUID, such as 0,1, or all: one worker each. The first one if not given.",
    ),
]
Jobs = Annotated[Optional[int], typer.Option("--jobs", help="Workers on the CPU machine; 1 if not given.")]
Executor = Annotated[
    str, typer.Option("--executor", help="local, or ray: a worker a GPU, or a node, of a Ray cluster.")
]
Address = Annotated[
    Optional[str],
    typer.Option("--address", help="HOST:PORT of the Ray cluster; that of this host if not given."),
]
Again = Annotated[
    Optional[str], typer.Option("--executor", help="local or ray; as the run was begun if not given.")
]
Timer = Annotated[
    str, typer.Option("--timer", help="events, or nvbench: NVIDIA's own timer, for a second opinion.")
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Wait for a GPU or a folder that another run holds, do not refuse.")
]


def request_of(
    suite, machine, kernel, devices=None, jobs=None, executor="local", address=None, timer="events",
    **options,
) -> runner.Request:
    """The options as a request; `options` are those of `sweep.Options`.

    Raises
    ------
    UserError
    """
    check_machine(machine)
    check_executor(executor, address)
    check_timer(timer, machine)
    kernels = tuple(kernel or ())
    return runner.Request(
        suite, machine, kernels, Options(**options), devices, jobs, executor, address, timer
    )


@dataclass
class _Stopping:
    """An interrupt within the block ends as a sentence, which names the run once there is one."""

    path: Path | None = None
    command: str = "resume"

    def __enter__(self) -> _Stopping:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not KeyboardInterrupt:
            return
        ignore()
        text = "Stopped before the run began."
        if self.path is not None:
            again = shlex.join([self.command, str(self.path)])
            text = f"Stopped. What was done is kept; go on with: python -m experiments {again}"
        console.print(escape(text), highlight=False, soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None


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
    shard: ShardOf = None,
    memory_limit: MemoryLimit = None,
    reserve: Reserve = None,
    devices: Devices = None,
    jobs: Jobs = None,
    executor: Executor = "local",
    address: Address = None,
    timer: Timer = "events",
    wait: Wait = False,
) -> None:
    """Run a suite: every case ends as a row, in a folder of the run's own."""
    with _Stopping() as stopping:
        request = request_of(
            suite, machine, kernel, devices, jobs, executor, address, timer, only=only, limit=limit,
            lengths=lengths, batch=batch, shard=shard, memory_limit=memory_limit, reserve=reserve,
        )
        planned, _, _ = runner.plan(request)  # what the user mistyped is said before a worker starts
        with runner.crew_of(request, planned.repeat, note, wait) as crew:
            with held():
                opened = runner.begin(request, crew, out, note)
                stopping.path = opened.path
            with opened:
                _complete(opened, crew, opened.cases)


def resume(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Also try failed cases again.")
    ] = False,
    devices: Devices = None,
    jobs: Jobs = None,
    executor: Again = None,
    address: Address = None,
    wait: Wait = False,
) -> None:
    """Run what a run still lacks, where it began or on the GPUs named here."""
    with _Stopping(run), runner.reopen(run, note, wait) as opened:
        check_executor(executor or opened.manifest["request"].get("executor", "local"), address)
        cases = opened.pending(retry_failed)
        if not cases:
            console.print(f"Nothing is missing: {several(len(opened.cases), 'case')}, each with its row.")
            _close(opened)
            return
        with runner.crew_for(opened, devices, jobs, note, wait, executor, address) as crew:
            _complete(opened, crew, cases)


def record(
    run: Annotated[Path, typer.Argument(help="The run's folder, such as one below experiments/recorded.")],
    devices: Devices = None,
    jobs: Jobs = None,
    executor: Again = None,
    address: Address = None,
    wait: Wait = False,
) -> None:
    """Bring a run up to date: run what its suite has today and it lacks, and again what has aged or failed."""
    with _Stopping(run, "record"), renewal.renew(run, note, wait) as opened:
        check_executor(executor or opened.manifest["request"].get("executor", "local"), address)
        cases = renewal.aged(opened)
        if not cases:
            console.print(f"Nothing has aged: {several(len(opened.cases), 'case')}, each with its row of today.")
            store.write_manifest(opened.path, opened.manifest)
            renewal.finish(opened)
            return
        with runner.crew_for(opened, devices, jobs, note, wait, executor, address) as crew:
            renewal.note_renewal(opened, crew)
            _complete(opened, crew, cases, renewal.finish)


def _complete(opened: runner.Run, crew, cases, finish=runner.finish) -> None:
    """Execute the cases with a progress bar, write the parquet, print the table, exit as the rows deserve."""
    many = f"{len(crew.workers)} × " if len(crew.workers) > 1 else ""
    console.print(
        f"{title_of(opened.manifest)}: {several(len(cases), 'case')} on "
        f"{many}{escape(crew.device['device'])}, into {escape(str(opened.path))}",
        highlight=False,
    )
    with progress_bar() as bar:
        task = bar.add_task("starting", total=len(cases))

        def progress(case, row) -> None:
            if row is None:
                bar.update(task, description=escape(case.label))
                return
            if row["status"] == "interrupted":  # it begins once more, now or when the run is resumed
                return
            bar.advance(task)
            if row["status"] in FAILED:
                bar.console.print(
                    f"[red]{row['status']}[/] {escape(case.label)}: {escape(row['error'])}",
                    highlight=False,
                )

        runner.execute(opened, crew, cases, progress)
    _close(opened, finish)


def _close(opened: runner.Run, finish=runner.finish) -> None:
    """Write the parquet, say what came out; exit code 1 where a kernel failed."""
    part = finish(opened)
    loaded = store.read_runs(opened.path)
    show_rows(loaded, opened.manifest)
    console.print(f"Results: {escape(str(part))}", highlight=False, soft_wrap=True)
    counts = Counter(loaded.frame["status"])
    if any(counts[status] for status in FAILED):
        raise SystemExit(1)


def title_of(manifest: dict) -> str:
    """The run's title, and which shard it is."""
    title, shard = str(manifest.get("title", "Run")), manifest.get("shard")
    return f"{title}, shard {shard.get('index')}/{shard.get('of')}" if isinstance(shard, dict) else title


def show_rows(loaded: store.Loaded, manifest: dict) -> None:
    """Print the tables of one run, what did not end ok, and how many cases there are."""
    frame = loaded.frame
    devices = ", ".join(sorted(str(d) for d in frame["device"].dropna().unique()))
    title = title_of(manifest)
    for table in tables.results(frame, f"{title} ({devices})" if devices else title):
        console.print(table)
    if (bad := tables.problems(frame)) is not None:
        console.print(bad)
    counts = Counter(str(s) for s in frame["status"])
    planned = manifest.get("cases")
    total = len(planned) if isinstance(planned, list) and planned else len(frame)
    words = ", ".join(f"{n} {s}" for s, n in counts.most_common()) or "none has ended yet"
    console.print(f"{len(frame)} of {total} cases: {words}", highlight=False)
