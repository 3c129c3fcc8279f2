"""The two streams that commands print to."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

WIDE = 160  # columns where the output is not a terminal's, such as a log of continuous integration
console = Console() if sys.stdout.isatty() else Console(width=WIDE)
errors = Console(stderr=True)


def note(sentence: str) -> None:
    """Say what the user should know but need not act on."""
    errors.print(f"[yellow]note:[/] {escape(sentence)}", soft_wrap=True, highlight=False)
