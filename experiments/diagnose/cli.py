"""The command `diagnose`: from numbers of one's own, or from a stored run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape

from experiments import store, tables
from experiments.catalog import current_hashes
from experiments.console import say_stale, say_unreadable
from experiments.diagnose import row_causes
from experiments.diagnose.causes import Diagnosis, Finding, check, describe, diagnose
from experiments.diagnose.rules import CAUSES, FACTS, YES_NO
from experiments.quantities import parse_bytes
from experiments.words import UserError

LEGEND = (
    "Inferred, not measured: run the suite to prove it. A and B: the articles on chunked attention and on "
    "paged caches, by section. Claims: those of `python -m experiments claims`."
)
SIZES = ("peak_memory", "baseline_memory")
# Of a run's facts, those that a rule could have found fault with.
SHOWN = ("gpu_use", "sm_busy", "bandwidth_use", "scratch_ratio", "slowdown", "launch_share", "host_share",
         "tail")


def _option(name: str, kind: type = float):
    fact = FACTS[name]
    text = f"{fact.meaning}{f' ({fact.unit})' if fact.unit not in ('', 'B') else ''}"
    choices = f": {', '.join(fact.choices)}" if fact.choices else ""
    return Annotated[Optional[kind], typer.Option(fact.option, help=f"{text[0].upper()}{text[1:]}{choices}.")]


RunPath = Annotated[Optional[Path], typer.Argument(help="A run's folder; or give numbers instead.")]
KernelName = Annotated[Optional[str], typer.Option("--kernel", help="This kernel's rows, one by one.")]


def register(app: typer.Typer, console: Console) -> None:
    """Add the command to the application."""

    @app.command("diagnose")
    def command(
        run: RunPath = None,
        kernel: KernelName = None,
        tokens_per_s: _option("tokens_per_s") = None,
        baseline_tokens_per_s: _option("baseline_tokens_per_s") = None,
        peak_memory: _option("peak_memory", str) = None,
        baseline_memory: _option("baseline_memory", str) = None,
        gpu_use: _option("gpu_use") = None,
        sm_busy: _option("sm_busy") = None,
        bandwidth_use: _option("bandwidth_use") = None,
        memory_share: _option("memory_share") = None,
        launches_per_step: _option("launches_per_step") = None,
        baseline_launches: _option("baseline_launches") = None,
        step_gap_us: _option("step_gap_us") = None,
        step_us: _option("step_us") = None,
        mean_ms: _option("mean_ms") = None,
        p99_ms: _option("p99_ms") = None,
        period_s: _option("period_s") = None,
        chunk: _option("chunk", int) = None,
        tile: _option("tile", int) = None,
        chunks: _option("chunks", int) = None,
        chunks_cost: _option("chunks_cost") = None,
        head_dim: _option("head_dim", int) = None,
        page: _option("page", int) = None,
        accumulator: _option("accumulator", str) = None,
        phase: _option("phase", str) = None,
    ) -> None:
        """Infer what is wrong, from a run's rows or from your own numbers: any subset of them."""
        numbers = {name: value for name, value in locals().items() if name in FACTS and value is not None}
        if run is not None:
            if numbers:
                raise UserError(f"diagnose: expected a run or numbers, got both; leave {run} or "
                                f"{FACTS[next(iter(numbers))].option} out")
            told = partial(_say_read, kernel=kernel)
            _print_rows(console, row_causes.kernels(run, kernel, told), kernel is not None)
            return
        if kernel is not None:
            raise UserError("--kernel: only means something with a run; name its folder")
        if not numbers:
            raise UserError("diagnose: expected a run's folder or some numbers, got neither; such as "
                            "--gpu-use 8 --launches-per-step 120, see --help")
        for name in SIZES:
            if name in numbers:
                numbers[name] = parse_bytes(numbers[name], FACTS[name].option)
        _print(console, diagnose(check(numbers)))


def _say_read(loaded: store.Loaded, kernel: str | None) -> None:
    """What could not be read, and which of the rows to be judged are of a source that is no longer."""
    say_unreadable(loaded)
    rows = loaded.frame[loaded.frame["family"].isin(row_causes.FAMILIES)]
    rows = rows if kernel is None else rows[rows["kernel"] == kernel]
    say_stale(rows, current_hashes(), ", so that what is inferred holds for what it was")


def _print(console: Console, found: Diagnosis) -> None:
    if found.findings:
        table = tables.new_table("Inferred causes, the likeliest first", LEGEND)
        for head in ("", "inferred", "evidence", "remedy", "proved by"):
            table.add_column(head, overflow="fold")
        for rank, finding in enumerate(found.findings, 1):
            table.add_row(str(rank), _cause(finding), _evidence(finding), CAUSES[finding.cause].remedy,
                          _proof(finding))
        console.print(table)
    else:
        nothing = "No fault found. Inferred, not measured," if found.weighed else "Nothing can be inferred"
        console.print(f"{nothing} from what was looked at:", highlight=False)
        for name in (name for name in FACTS if name in found.facts and FACTS[name].choices != YES_NO):
            console.print(f"  {escape(describe(name, found.facts))}", highlight=False, soft_wrap=True)
    if found.suspected:
        console.print("More numbers would tell:", highlight=False)
    for cause, options in found.suspected.items():
        console.print(f"  {cause}: {', '.join(options)}", highlight=False, soft_wrap=True)
    if found.unseen:
        console.print(f"Not looked at: {', '.join(found.unseen)}", highlight=False, soft_wrap=True)


def _cause(finding: Finding) -> str:
    claims = ", ".join(str(claim) for claim in CAUSES[finding.cause].claims)
    return f"[bold]{finding.cause}[/]: {CAUSES[finding.cause].what} (claims {claims})"


def _evidence(finding: Finding, deciders: bool = True) -> str:
    lines = [escape(evidence.full) for evidence in finding.evidence]
    if deciders and finding.deciders:
        lines.append(f"[dim]would settle it: {escape(', '.join(finding.deciders))}[/]")
    return "\n".join(lines)


def _proof(finding: Finding) -> str:
    if finding.suites:
        return ", ".join(finding.suites)
    return f"no suite yet ({', '.join(CAUSES[finding.cause].suites)})"


def _print_rows(console: Console, kernels: list[row_causes.Kernel], each: bool) -> None:
    for run, device in dict.fromkeys((k.run, k.device) for k in kernels):
        table = tables.new_table(f"Inferred from the run {run} on {device}", LEGEND)
        table.add_column("kernel", no_wrap=True)
        table.add_column("family", no_wrap=True)
        table.add_column("rows", justify="right", no_wrap=True)
        for head in ("inferred", "evidence, in one such row", "remedy", "proved by"):
            table.add_column(head, overflow="fold")
        shown = [k for k in kernels if (k.run, k.device) == (run, device)]
        for kernel in shown:
            table.add_row(kernel.name, kernel.family, _rows(kernel), *_verdict(kernel))
        console.print(table)
        if each:
            for kernel in shown:
                console.print(_cases(kernel))


def _rows(kernel: row_causes.Kernel) -> str:
    if not kernel.judged:
        return f"{len(kernel.cases)}"
    return f"{kernel.judged[kernel.verdict]} of {kernel.judged.total()}"


def _verdict(kernel: row_causes.Kernel) -> list[str]:
    case = kernel.example
    where = f"[dim]{escape(case.label)}[/]\n"
    first = next((f for f in case.diagnosis.findings if f.cause == kernel.verdict), None)
    if first is not None:
        return [_cause(first), where + _evidence(first, False), CAUSES[first.cause].remedy, _proof(first)]
    aside = len(kernel.cases) - kernel.judged.total()
    more = f"; {aside} rows set aside: too small, or without a time" if aside and kernel.judged else ""
    facts = case.diagnosis.facts
    looked = ", ".join(describe(name, facts, how=False) for name in SHOWN if name in facts)
    return [f"{kernel.verdict}{more}", where + escape(looked), "", ""]


def _cases(kernel: row_causes.Kernel):
    table = tables.new_table(f"{kernel.name}, row by row: inferred")
    for head in ("row", "inferred", "evidence"):
        table.add_column(head, overflow="fold")
    for case in kernel.cases:
        findings = case.diagnosis.findings or (None,)
        for finding in findings:
            label = escape(case.label) if finding is findings[0] else ""
            if finding is None:
                table.add_row(label, case.verdict, "")
            else:
                table.add_row(label, finding.cause, escape("; ".join(e.short for e in finding.evidence)))
    return table
