"""Words for messages: the nearest known name to a mistyped one, and refusals of what a user asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class UserError(ValueError):
    """What the user asked for cannot be done; the message is one sentence that says why and what to do."""


def nearest(word: str, known: Iterable[str], limit: int = 12) -> str:
    """ "did you mean 'x'?", or the known names where none is near."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    listed = ", ".join(known[:limit]) + (", …" if len(known) > limit else "")
    return f"known are: {listed or 'none'}"


def of_scores(params: Mapping[str, Any]) -> list[str]:
    """What a case makes of its scores, a phrase each: "window 1024", "softcap 30", "sinks"."""
    sizes = [f"{name} {params[name]:g}" for name in ("window", "softcap") if params.get(name) is not None]
    return sizes + ["sinks"] * bool(params.get("sinks"))


def several(count: int, noun: str) -> str:
    """ "1 case", "2 cases"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
