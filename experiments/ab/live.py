"""Two kernels against each other on this GPU, timed in turn on the same inputs over the shapes of a suite.

Both run at the clock that the two together bring about: a kernel that alone would hold the card at its power
cap is slowed by that cap less here, and the other more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from experiments.ab import statistics
from experiments.ab.comparison import Compared, Comparison, Excluded
from experiments.catalog import Entry
from experiments.suite import Repeat, Suite
from experiments.sweep import Case, Options, case_id, cases_of
from experiments.words import UserError, nearest

MAX_PAIRS = 2000
# The half width to reach is this share of the margin, so that only a difference close to it stays undecided.
SHARE = 0.2
SPARE_S = 60.0  # beyond the sampling, for the checks before and after


@dataclass(frozen=True)
class Subject:
    """A kernel with the constants it is to have."""

    kernel: str
    constants: Mapping[str, Any]

    @property
    def label(self) -> str:
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in self.constants.items())])

    def params(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of its case at that point."""
        constants = {"constants": json.dumps(dict(self.constants), sort_keys=True)} if self.constants else {}
        return {**point, "kernel": self.kernel, **constants}


def subject(flag: str, text: str, known: Mapping[str, Entry]) -> Subject:
    """A subject from words such as `flash` or `flash:block_n=32,warps=4`.

    Raises
    ------
    UserError
        An unknown kernel or constant, or words that are no `name=value`.
    """
    kernel, *words = text.replace(":", " ").replace(",", " ").split() or [""]
    if kernel not in known:
        path = kernel.endswith(".py")
        hint = "give its module with --kernel, and here its name" if path else nearest(kernel, known)
        raise UserError(f"{flag}: '{kernel}' is not a kernel; {hint}")
    row, constants = known[kernel].row, {}
    tunables = row.constants if row else {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise UserError(f"{flag}: expected {kernel}:name=value or the like, got '{text}'; mend '{word}'")
        if name not in tunables:
            known_here = nearest(name, tunables) if tunables else "it has none"
            raise UserError(f"{flag}: '{name}' is not a constant of {kernel}; {known_here}")
        if name in constants:
            raise UserError(f"{flag}: {name} is given twice; keep one")
        constants[name] = _value(value)
    return Subject(kernel, constants)


def _value(text: str) -> Any:
    plain = {"true": True, "false": False}.get(text.lower(), text)
    return int(text) if text.isascii() and text.isdigit() else plain


def points_of(
    suite: Suite, known: Mapping[str, Entry], a: Subject, b: Subject, limit: int | None
) -> list[dict[str, Any]]:
    """The suite's shapes for GPUs of the family both kernels belong to, whatever kernels it sweeps there.

    Raises
    ------
    UserError
        Kernels of two families, or a suite without a shape for theirs.
    """
    families = {known[side.kernel].family for side in (a, b)}
    if len(families) > 1:
        named = ", ".join(f"{s.kernel} is a {known[s.kernel].family} kernel" for s in (a, b))
        raise UserError(f"--a, --b: {named}; compare two of one family, on the same inputs")
    if limit is not None and limit < 1:
        raise UserError(f"--limit: expected at least 1, got {limit}")
    family, found = families.pop(), {}
    for case in cases_of(suite, "gpu", known, Options()):
        if case.params["family"] == family and _serves(case, a, b):
            point = {name: v for name, v in case.params.items() if name not in ("kernel", "constants")}
            found.setdefault(case_id(point), point)
    if not found:
        raise UserError(f"--suite: {suite.name} has no shape for {family} kernels on a GPU; name another")
    return list(found.values())[:limit]


def _serves(case: Case, a: Subject, b: Subject) -> bool:
    """Whether the shape is one for these kernels: the sizes of one probe mean nothing to another."""
    return case.params["family"] != "probe" or case.params["kernel"] in (a.kernel, b.kernel)


def repeat_for(suite: Suite, margin: float, timeout_s: float) -> Repeat:
    """How long to sample a pair: to a width that decides at this margin, or as long as is allowed."""
    limits = suite.repeat
    return replace(
        limits,
        max_samples=MAX_PAIRS,
        rel_noise=SHARE * margin,
        timeout_s=timeout_s,
        deadline_s=max(limits.deadline_s, timeout_s + SPARE_S),
    )


def compare(
    worker,
    points: list[dict[str, Any]],
    sides: tuple[Subject, Subject],
    margin: float,
    confidence: float,
    progress: Callable[[dict[str, Any], str | None], None],
    log: TextIO | None = None,
) -> tuple[Comparison, bool]:
    """Time both subjects in turn at every point.

    Parameters
    ----------
    worker : Worker
        Started, with `repeat_for`'s limits.
    points : list of dict
    sides : (Subject, Subject)
    margin, confidence : float
    progress : callable
        Called with (point, None) when one begins and (point, what came out) when it ends.
    log : text file, optional
        Gets one JSON line a point, with every pair.

    Returns
    -------
    (Comparison, bool)
        And whether all points were reached; an interrupt ends the comparison early and keeps what is done.
    """
    made = Comparison(margin)
    for point in points:
        progress(point, None)
        pair = {"a": sides[0].params(point), "b": sides[1].params(point), "confidence": confidence}
        try:
            outcome = worker.run({"pair": pair})
        except KeyboardInterrupt:
            worker.stop()
            return made, False
        words = _take(made, point, outcome, confidence)
        if log is not None:
            line = {**pair, "margin": margin, **worker.device, **outcome, "came_out": words}
            log.write(json.dumps(line, ensure_ascii=False) + "\n")
            log.flush()
        progress(point, words)
    return made, True


def _take(made: Comparison, point: dict, outcome: dict, confidence: float) -> str:
    """Add a point's outcome to the comparison; returns it in a word or two."""
    case, status = case_id(point), outcome["status"]
    if status != "ok":
        reason = f"{status} in {outcome.get('side', 'A or B')}"
        made.excluded.append(Excluded(case, point, reason, outcome.get("error") or ""))
        return reason
    pairs = np.asarray(outcome["pairs_us"], np.float64)
    if not statistics.usable(pairs):
        reason = "a sample that is no time"
        made.excluded.append(Excluded(case, point, reason, "below the resolution of events"))
        return reason
    interval = statistics.paired_ratio(pairs, confidence)
    verdict = statistics.verdict(interval, made.margin)
    mid_a, mid_b = (float(mid) for mid in np.median(pairs, axis=0))
    made.compared.append(Compared(case, point, mid_a, mid_b, interval, verdict))
    return verdict


def open_log(path: Path) -> TextIO:
    """A new file for the pairs.

    Raises
    ------
    UserError
        It exists already, or cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "x", encoding="utf-8")
    except FileExistsError as error:
        raise UserError(f"--out: {path} exists already; name a new file") from error
    except OSError as error:
        raise UserError(f"--out: {path} cannot be made ({error.strerror}); name a writable place") from error
