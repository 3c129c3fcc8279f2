"""The command `claims`: its options, its table, and all that is known of one claim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape

from experiments import store, tables
from experiments.catalog import current_hashes
from experiments.claims import figures, triage
from experiments.claims.definition import Book, load
from experiments.claims.findings import NOT_TESTED, Finding, PartFinding, counts, plain
from experiments.claims.judging import judge
from experiments.claims.words import accepted, quoted, shown
from experiments.console import say_unreadable
from experiments.folder import RUNS
from experiments.words import UserError, several

STYLES = {"confirmed": "green", "refuted": "red", "depends": "yellow", NOT_TESTED: "dim"}
SHOWN = 20  # cases that a table lists

RunPaths = Annotated[
    Optional[list[Path]],
    typer.Argument(metavar="[RUN]...", help="Runs, or folders of them; if none, ./runs and those recorded."),
]
Number = Annotated[Optional[int], typer.Option("--claim", help="Everything about this one: 1 to 44.")]
AsJson = Annotated[bool, typer.Option("--json", help="Everything as JSON.")]


def register(app: typer.Typer, console: Console) -> None:
    """Add the command to the application."""

    @app.command("claims")
    def command(runs: RunPaths = None, claim: Number = None, as_json: AsJson = False) -> None:
        """Say what stored rows and arithmetic make of each claim of the articles: confirmed, refuted, …"""
        book = load()
        only = book.claim(claim) if claim is not None else None
        loaded = store.read_runs(_paths(runs))
        say_unreadable(loaded)
        hashes = current_hashes()
        causes = triage.causes(loaded.frame, hashes)
        found = judge(book, loaded.frame, hashes, figures.values(book), causes)
        found = [one for one in found if only in (None, one.claim)]
        if as_json:
            text = json.dumps({"claims": [plain(one) for one in found]}, ensure_ascii=False, allow_nan=False)
            typer.echo(text)
        elif only is not None:
            _detail(console, book, found[0])
        else:
            _overview(console, found, loaded)


def _paths(runs: list[Path] | None) -> list[Path]:
    """The folders to read.

    Raises
    ------
    UserError
    """
    for path in runs or ():
        if not path.exists():
            below = RUNS / path
            hint = f"did you mean {below}?" if below.exists() else "name a run, or a folder of runs"
            raise UserError(f"claims: {path} does not exist; {hint}")
    return runs or [RUNS, store.RECORDED]


def _overview(console: Console, found: list[Finding], loaded: store.Loaded) -> None:
    stale = len({row for one in found for row in one.stale})
    caption = f"From {several(len(loaded.runs), 'run')}. More on one: python -m experiments claims --claim 2."
    if stale:
        caption += f" {several(stale, 'row')} stale: their kernels have changed since; they judge nothing."
    table = tables.new_table("Claims of the articles", caption)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("claim", overflow="fold", ratio=5)
    table.add_column("verdict", no_wrap=True)
    table.add_column("how known", overflow="fold")
    table.add_column("evidence", overflow="fold", ratio=5)
    for one in found:
        how = "\n".join([*one.how, *one.devices]) if one.verdict != NOT_TESTED else ""
        said = one.sentence + f" ({one.tally})" * bool(one.tally)
        table.add_row(str(one.claim.number), escape(one.claim.statement), _verdict(one.verdict), escape(how),
                      escape(said if one.verdict != NOT_TESTED else one.advice))
        table.add_section()
    console.print(table)
    told = counts(found)
    console.print(", ".join(f"{told[verdict]} {verdict}" for verdict in STYLES), highlight=False)


def _verdict(word: str) -> str:
    return f"[{STYLES[word]}]{word}[/]"


def _detail(console: Console, book: Book, one: Finding) -> None:
    claim = one.claim

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=False)

    say(f"[bold]Claim {claim.number}[/]: {escape(claim.statement)}")
    for letter, (title, original) in book.articles.items():
        if any(place.strip().startswith(letter) for place in claim.place.split(";")):
            say(f"{letter}: {escape(title)} ({escape(original)})")
    say(f"Where: {escape(claim.place)}")
    say(f"The test: {escape(claim.reason)}")
    how = f", {', '.join((*one.how, *one.devices))}" if one.verdict != NOT_TESTED else ""
    tally = f" ({one.tally})" if one.tally else ""
    say(f"[bold]Verdict[/]: {_verdict(one.verdict)}{escape(how + tally)}. {escape(one.sentence)}")
    for part in one.parts:
        console.print()
        _part(console, part)
    console.print()
    say(f"To test it: {escape(one.advice)}")


def _part(console: Console, found: PartFinding) -> None:
    part = found.part
    said = [f"quoted {quoted(part)}"] * bool(part.quoted) + [f"accepted {accepted(part)}"] * bool(part.kind)
    said += ["decides nothing"] * part.side
    title = f"{escape(part.says)}: {_verdict(found.verdict)}"
    console.print(title + (f" ({escape('; '.join(said))})" if said else ""), highlight=False)
    if not found.cases:
        console.print(escape(found.sentence.removeprefix(f"{part.says}: ")), highlight=False)
    else:
        console.print(_cases(found))
    for one in found.aside:
        rows = ", ".join(f"{run}/{case}" for run, case in one.rows[:3])
        more = f" and {len(one.rows) - 3} more" if len(one.rows) > 3 else ""
        console.print(f"Set aside, {escape(one.why)}: {escape(rows)}{more}", highlight=False)


def _cases(found: PartFinding):
    """The cases of a part, each with the rows behind it."""
    left = len(found.cases) - SHOWN
    caption = f"{several(left, 'case')} more: --json has all" if left > 0 else ""
    table = tables.new_table("", caption)
    table.add_column("case", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("holds", no_wrap=True)
    table.add_column("known", no_wrap=True)
    table.add_column("rows: run, case, value", overflow="fold")
    for case in found.cases[:SHOWN]:
        rows = [f"{s.role}: {s.kernel}: {s.run} {s.case}: {shown(s.value, found.value_unit)}"
                for s in case.samples]
        label = " · ".join(filter(None, [case.label, case.note]))
        table.add_row(escape(label), escape(shown(case.value, found.part.unit)),
                      "[green]yes[/]" if case.holds else "[red]no[/]", "\n".join(sorted(case.how)),
                      escape("\n".join(rows)))
    return table
