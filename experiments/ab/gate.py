"""Whether a candidate may replace a base: what speaks against it, and what nobody knows."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.ab.comparison import Comparison
from experiments.ab.statistics import SLOWER, may_be_slower
from experiments.words import several


@dataclass(frozen=True)
class Judgement:
    """Each a few words for a sentence: what fails the gate, and what is not known."""

    failures: tuple[str, ...]
    doubts: tuple[str, ...]

    def passed(self, strict: bool) -> bool:
        """With `strict`, what is not known fails as well."""
        return not self.failures and not (strict and self.doubts)


def judge(made: Comparison, limit: str) -> Judgement:
    """Judge a comparison of BASE (its A) with CANDIDATE (its B).

    Parameters
    ----------
    made : Comparison
        At the margin that a slowdown may have.
    limit : str
        That margin in words, such as "2 %".

    Notes
    -----
    Fails: no case compared; a slowdown whose whole interval lies beyond the limit; an incorrect result of the
    candidate, whatever the base has; a case that was ok and now ends otherwise. In doubt: an interval that
    does not rule a slowdown out, and an ok case of the base without a counterpart or with one that was
    throttled, interrupted, not timed, or on another device.
    """
    compared, excluded = made.compared, made.excluded
    slower = sum(case.verdict == SLOWER for case in compared)
    unsure = sum(may_be_slower(case.interval, made.margin) for case in compared) - slower
    wrong = sum(case.status_b == "incorrect" for case in excluded)
    broken = sum(case.broken and case.status_b != "incorrect" for case in excluded)
    unseen = sum(case.status_a == "ok" and not case.broken for case in excluded)
    failures = (
        (not compared, "no case could be compared"),
        (slower, f"slower by more than {limit}: {slower} of {several(len(compared), 'case')}"),
        (wrong, f"incorrect in CANDIDATE: {several(wrong, 'case')}"),
        (broken, f"ok in BASE and failed in CANDIDATE: {several(broken, 'case')}"),
    )
    doubts = (
        (unsure, f"a slowdown beyond {limit} not ruled out: {unsure} of {several(len(compared), 'case')}"),
        (unseen, f"ok in BASE and not compared: {several(unseen, 'case')}"),
    )
    return Judgement(*(tuple(words for holds, words in kind if holds) for kind in (failures, doubts)))
