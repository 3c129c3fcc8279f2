"""What comes of judging: verdicts with the cases behind them, and the same as plain values for JSON.

A part is *confirmed* where its test holds in every case, *refuted* where it holds in none, *depends* where it
holds in some, and *not tested* where no row can be judged. A claim has the verdict of its parts that decide
and are tested; where these differ it depends. While the first part that decides, the heart of the claim, is
not tested, the claim is not either, whatever its other parts say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from experiments.claims.definition import Claim, Part
from experiments.claims.metrics import HOW, MODELLED
from experiments.claims.selecting import STALE
from experiments.claims.words import accepted, quoted, unit_of

CONFIRMED, REFUTED, DEPENDS, NOT_TESTED = VERDICTS = ("confirmed", "refuted", "depends", "not tested")


@dataclass(frozen=True)
class Sample:
    """One row's share in a case: its role, run, case, kernel with constants, value, and how that is known."""

    role: str
    run: str
    case: str
    kernel: str
    value: float
    how: str


@dataclass(frozen=True)
class Case:
    """One application of a test: where, the value it was asked of (in the part's unit), whether it holds."""

    label: str
    device: str
    value: float
    holds: bool
    samples: tuple[Sample, ...] = ()
    note: str = ""

    @property
    def how(self) -> set[str]:
        """How its values are known."""
        return {sample.how for sample in self.samples} or {MODELLED}


@dataclass(frozen=True)
class Aside:
    """Rows that match a part and judge nothing: why, how many, and which (run, case)."""

    why: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PartFinding:
    """A part's verdict, the cases behind it, the rows set aside, and the evidence in a sentence."""

    part: Part
    verdict: str
    cases: tuple[Case, ...] = ()
    aside: tuple[Aside, ...] = ()
    sentence: str = ""

    @property
    def how(self) -> tuple[str, ...]:
        """Those words of `HOW` that stand behind it."""
        return tuple(word for word in HOW if any(word in case.how for case in self.cases))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of its cases."""
        return tuple(sorted({case.device for case in self.cases if case.device}))

    @property
    def value_unit(self) -> str:
        """The unit of a single row's value: that of the part, but of its metric where the part is a ratio."""
        return unit_of(self.part)

    @property
    def middle(self) -> float | None:
        """The median over its cases, in the part's unit."""
        return median(case.value for case in self.cases) if self.cases else None


@dataclass(frozen=True)
class Finding:
    """A claim with its verdict and its parts'."""

    claim: Claim
    verdict: str
    parts: tuple[PartFinding, ...]

    @property
    def deciding(self) -> tuple[PartFinding, ...]:
        """The tested parts that decide."""
        return tuple(p for p in self.parts if not p.part.side and p.verdict != NOT_TESTED)

    @property
    def tally(self) -> str:
        """How many of the parts that decide hold, and how many are not tested; empty for a single part."""
        every = [p for p in self.parts if not p.part.side]
        if len(every) < 2 or self.verdict == NOT_TESTED:
            return ""
        held = sum(p.verdict == CONFIRMED for p in self.deciding)
        some = sum(p.verdict == DEPENDS for p in self.deciding)
        left = len(every) - len(self.deciding)
        said = [f"{held} of {len(every)} parts hold"] + [f"{some} in some cases"] * bool(some)
        return ", ".join(said + [f"{left} not tested"] * bool(left))

    @property
    def how(self) -> tuple[str, ...]:
        """How the deciding parts are known."""
        return tuple(word for word in HOW if any(word in part.how for part in self.deciding))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the deciding parts."""
        return tuple(sorted({device for part in self.deciding for device in part.devices}))

    @property
    def sentence(self) -> str:
        """The evidence in a few words: of the first part that speaks against the claim, else of the first."""
        if self.verdict == NOT_TESTED:
            return next(p.sentence for p in self.parts if not p.part.side)
        parts = sorted(self.deciding, key=lambda p: (REFUTED, DEPENDS, CONFIRMED).index(p.verdict))
        return parts[0].sentence

    @property
    def advice(self) -> str:
        """What one runs to test it, or why nothing does."""
        heart = next(part.part for part in self.parts if not part.part.side)
        missing = self.claim.missing()
        found = [f"there is no suite {' or '.join(missing)} here yet"] if missing else []
        return "; ".join(found + self.claim.commands()) or heart.open

    @property
    def stale(self) -> set[tuple[str, str]]:
        """The (run, case) of the rows set aside because their kernel has changed since."""
        return {row for part in self.parts for aside in part.aside for row in aside.rows
                if aside.why == STALE}


def overall(verdicts: Iterable[str]) -> str:
    """What several verdicts say together."""
    found = set(verdicts) - {NOT_TESTED}
    return DEPENDS if len(found) > 1 else found.pop() if found else NOT_TESTED


def of_cases(holds: Sequence[bool]) -> str:
    """The verdict of a part whose test held, or not, in these cases."""
    return NOT_TESTED if not holds else CONFIRMED if all(holds) else DEPENDS if any(holds) else REFUTED


def counts(findings: Iterable[Finding]) -> Counter[str]:
    """How many claims have each verdict."""
    return Counter(finding.verdict for finding in findings)


def plain(finding: Finding) -> dict[str, Any]:
    """A finding as JSON holds it: every part with its test, cases, rows behind them and rows set aside."""
    claim = finding.claim
    return {
        "number": claim.number, "statement": claim.statement, "place": claim.place, "reason": claim.reason,
        "verdict": finding.verdict, "how": list(finding.how), "devices": list(finding.devices),
        "evidence": finding.sentence, "tally": finding.tally, "answered_by": list(claim.answered_by),
        "commands": claim.commands(),
        "parts": [_plain(part) for part in finding.parts],
    }


def _plain(found: PartFinding) -> dict[str, Any]:
    part = found.part
    return {
        "says": part.says, "kind": part.kind, "open": part.open, "decides": not part.side,
        "metric": part.metric or (part.figure or {}).get("name", ""), "unit": part.unit,
        "accepted": accepted(part), "quoted": quoted(part), "verdict": found.verdict, "how": list(found.how),
        "devices": list(found.devices), "evidence": found.sentence,
        "cases": [
            {"label": case.label, "device": case.device, "value": case.value, "holds": case.holds,
             "note": case.note, "rows": [vars(sample) for sample in case.samples]}
            for case in found.cases
        ],
        "set_aside": [{"why": one.why, "rows": [list(row) for row in one.rows]} for one in found.aside],
    }
