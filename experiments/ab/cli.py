"""The commands compare and gate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import pandas as pd
import typer
from rich.console import Console
from rich.markup import escape

from experiments import store
from experiments.ab import comparison as comparing
from experiments.ab import tables as shown
from experiments.ab.comparison import Comparison
from experiments.ab.gate import judge
from experiments.ab.live_cli import Asked, compare_live
from experiments.ab.statistics import CONFIDENCE
from experiments.catalog import catalog
from experiments.console import say_unreadable
from experiments.folder import RUNS
from experiments.words import UserError, several

MARGIN, CONFIDENT = "2%", f"{CONFIDENCE:.0%}"

RunA = Annotated[
    Optional[Path],
    typer.Argument(metavar="RUN_A", help="A run's folder, one that holds some, or a parquet: the base."),
]
RunB = Annotated[
    Optional[Path], typer.Argument(metavar="RUN_B", help="The same, for what is compared with the base.")
]
Base = Annotated[
    Path, typer.Argument(metavar="BASE", help="The run, or folder of runs, that sets the standard.")
]
Candidate = Annotated[
    Path, typer.Argument(metavar="CANDIDATE", help="The run, or folder of runs, that may replace it.")
]
KernelA = Annotated[
    Optional[str], typer.Option("--a", help="Live: a kernel, with constants as in flash:block_n=32.")
]
KernelB = Annotated[Optional[str], typer.Option("--b", help="Live: the kernel compared with it.")]
SuiteName = Annotated[
    Optional[str], typer.Option("--suite", help="Live: the suite whose shapes are taken; quick if not given.")
]
KernelPaths = Annotated[
    Optional[list[str]], typer.Option("--kernel", help="Live: add a kernel, a module that defines ROW.")
]
MachineName = Annotated[Optional[str], typer.Option("--machine", help="Live: best or gpu.")]
Limit = Annotated[Optional[int], typer.Option("--limit", help="Live: only the first N shapes.")]
Timeout = Annotated[
    Optional[float], typer.Option("--timeout", help="Live: seconds a shape may take to time; 5 if not given.")
]
Out = Annotated[
    Optional[Path], typer.Option("--out", help="Live: keep every pair in this file, one JSON line a shape.")
]
Margin = Annotated[str, typer.Option("--margin", help="Differences up to this count as none: 2% or 0.02.")]
Slowdown = Annotated[str, typer.Option("--max-slowdown", help="The slowdown that is allowed: 2% or 0.02.")]
Strict = Annotated[bool, typer.Option("--strict", help="What is undecided or missing fails, too.")]
Confidence = Annotated[str, typer.Option("--confidence", help="Of every interval: 95% or 0.95.")]


@dataclass(frozen=True)
class Side:
    """Stored rows to compare, and what the user called them."""

    path: Path
    frame: pd.DataFrame

    @property
    def run_ids(self) -> set[str]:
        return {str(run) for run in self.frame["run_id"].dropna()}

    @property
    def title(self) -> str:
        """Path, number of runs, devices."""
        devices = sorted(str(name) for name in self.frame["device"].dropna().unique())
        return f"{self.path} ({several(len(self.run_ids), 'run')} on {', '.join(devices) or 'no device'})"


def fraction(flag: str, text: str, low: float = 0.0) -> float:
    """A relative number above `low` and below 1, from words such as "2%" or "0.02".

    Raises
    ------
    UserError
    """
    digits = text.strip().removesuffix("%").strip()
    try:
        value = float(digits) / (100 if "%" in text else 1)
    except ValueError:
        value = float("nan")
    if low < value < 1:
        return value
    meant = f"; did you mean {digits}%?" if "%" not in text and 1 <= value < 100 else ""
    example = "95% or 0.95" if low else "2% or 0.02"
    above = f"{100 * low:g}%" if low else "0"
    raise UserError(f"{flag}: expected {example}, above {above} and below 100%, got '{text}'{meant}")


def _side(flag: str, path: Path) -> Side:
    """The rows below a path.

    Raises
    ------
    UserError
        Nothing there, nothing readable, or no row.
    """
    if not path.exists():
        if str(path).partition(":")[0] in catalog():
            raise UserError(f"{flag}: {path} is a kernel and no run; compare two kernels with --a and --b")
        below = RUNS / path
        hint = f"did you mean {below}?" if below.exists() else "name a run's folder, or one that holds runs"
        raise UserError(f"{flag}: {path} does not exist; {hint}")
    loaded = store.read_runs(path)
    say_unreadable(loaded, f" below {path}")
    if loaded.frame.empty:
        what = "holds nothing that can be read" if loaded.quarantined else "holds no row"
        raise UserError(f"{flag}: {path} {what}; name a run that has rows")
    return Side(path, loaded.frame)


def _stored(flags: tuple[str, str], paths: tuple[Path, Path], sureness, console: Console) -> Comparison:
    """Read both sides, compare them at a margin and a confidence, and print what came out.

    Raises
    ------
    UserError
        A side without rows, or both the same.
    """
    a, b = (_side(flag, path) for flag, path in zip(flags, paths))
    both = f"{flags[0]}, {flags[1]}"
    if a.path.resolve() == b.path.resolve():
        raise UserError(f"{both}: are the same, {a.path}; name two runs")
    if same := a.run_ids & b.run_ids:
        raise UserError(f"{both}: both hold run {min(same)}, which would be compared with itself; name two")
    made = comparing.compare(a.frame, b.frame, *sureness)
    for letter, side in (("A", a), ("B", b)):
        console.print(f"{letter}: {escape(side.title)}", soft_wrap=True, highlight=False)
    for table in shown.everything(made, "B against A", sureness[1], paired=False):
        console.print(table)
    for sentence in made.notes + shown.sums(made, sureness[1]):
        console.print(escape(sentence), highlight=False)
    return made


def _why_empty(made: Comparison) -> str:
    """Why no time was compared, in a sentence."""
    if made.counted:
        return shown.counted_sum(made.counted)
    reasons = {case.reason for case in made.excluded}
    if reasons <= {"only in A", "only in B"}:
        return (
            "A and B have no case in common: a case is a kernel, its shape and its constants; run the same "
            "suite for both, or compare two kernels live with --a and --b."
        )
    return "No case has a right and timed result on both sides; the table says why."


def register(app: typer.Typer, console: Console) -> None:
    """Add the commands to the program; `console` prints their tables."""

    @app.command()
    def compare(
        run_a: RunA = None,
        run_b: RunB = None,
        a: KernelA = None,
        b: KernelB = None,
        suite: SuiteName = None,
        kernel: KernelPaths = None,
        machine: MachineName = None,
        limit: Limit = None,
        timeout: Timeout = None,
        out: Out = None,
        margin: Margin = MARGIN,
        confidence: Confidence = CONFIDENT,
    ) -> None:
        """Compare two stored runs, or two kernels: compare RUN_A RUN_B, or compare --a flash --b standard.

        Kernels are compared live: timed in turn (A B B A) on the same inputs, on a GPU.
        """
        sureness = fraction("--margin", margin), fraction("--confidence", confidence, 0.5)
        asked = Asked(a, b, suite, kernel, machine, limit, timeout, out)
        raise SystemExit(_compare((run_a, run_b), asked, sureness, console))

    @app.command()
    def gate(
        base: Base,
        candidate: Candidate,
        max_slowdown: Slowdown = MARGIN,
        strict: Strict = False,
        confidence: Confidence = CONFIDENT,
    ) -> None:
        """Exit with 1 where CANDIDATE is beyond doubt slower than BASE, or wrong, or nothing compares."""
        sureness = fraction("--max-slowdown", max_slowdown), fraction("--confidence", confidence, 0.5)
        raise SystemExit(_gate((base, candidate), strict, sureness, console))


def _compare(runs: tuple[Path | None, Path | None], asked: Asked, sureness, console: Console) -> int:
    """Two stored runs, or two kernels; returns the exit code."""
    if asked.given() and runs[0] is not None:
        raise UserError(
            f"compare: got stored runs and {asked.given()[0]}, which compares kernels live; leave out either"
        )
    if asked.given():
        return compare_live(asked, *sureness, console)
    if None in runs:
        raise UserError(
            "compare: expected two runs, as in compare RUN_A RUN_B, or two kernels, as in "
            "compare --suite quick --a flash --b flash:block_n=32"
        )
    made = _stored(("RUN_A", "RUN_B"), runs, sureness, console)
    if made.counted:
        console.print(shown.counted_sum(made.counted), highlight=False)
    if not made.compared and not made.counted:
        console.print(_why_empty(made), highlight=False)
        return 1
    return 0


def _gate(runs: tuple[Path, Path], strict: bool, sureness, console: Console) -> int:
    """The candidate judged; returns the exit code."""
    limit = shown.percent(sureness[0])
    made = _stored(("BASE", "CANDIDATE"), runs, sureness, console)
    if not made.compared:
        console.print(_why_empty(made), highlight=False)
    found = judge(made, limit)
    if not found.passed(strict):
        words = found.failures + (found.doubts if strict else ())
        console.print(f"[red]gate failed:[/] {'; '.join(words)}.", highlight=False)
        return 1
    compared = several(len(made.compared), "case")
    words = f"no slowdown beyond {limit} found in {compared}", *found.doubts
    console.print(f"[green]gate passed:[/] {'; '.join(words)}.", highlight=False)
    return 0
