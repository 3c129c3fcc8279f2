"""The two streams that commands print to, and what several of them say there."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.store import Loaded, stale
from experiments.words import several

WIDE = 160  # columns where the output is not a terminal's, such as a log of continuous integration
console = Console() if sys.stdout.isatty() else Console(width=WIDE)
errors = Console(stderr=True)


def progress_bar(on: Console = console) -> Progress:
    """A bar with what is being done, how many are done, and since when; it leaves no trace."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=on, transient=True)


def say(text: str) -> None:
    """A line of markup beside the results, wrapped by the terminal alone."""
    errors.print(text, soft_wrap=True, highlight=False)


def note(sentence: str) -> None:
    """Say what the user should know but need not act on."""
    say(f"[yellow]note:[/] {escape(sentence)}")


def fail(error: Exception) -> None:
    """Say what ended the command."""
    say(f"[red]error:[/] {escape(str(error))}")


def say_stale(rows: pd.DataFrame, hashes: Mapping[str, str], so: str = "") -> None:
    """Say, among the results, which rows are not of today's sources (`hashes`), and what follows."""
    old = rows["kernel"][stale(rows, hashes)]
    if len(old):
        kernels = ", ".join(sorted(old.unique()))
        console.print(f"[yellow]stale[/]: {several(len(old), 'row')} of {escape(kernels)}, whose source has "
                      f"changed since{so}; run the suite anew for today's", highlight=False)


def say_unreadable(loaded: Loaded, where: str = "") -> None:
    """Name the files that could not be read, each with its reason; how many journal lines, and `where`."""
    for _, reason in loaded.quarantined:  # the reason begins with the file
        say(f"[yellow]set aside[/] {escape(reason)}")
    if loaded.torn_lines:
        say(f"[yellow]skipped[/] {several(loaded.torn_lines, 'torn journal line')}{escape(where)}")
