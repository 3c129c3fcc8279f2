"""Two sets of result rows side by side: which cases can be compared, what came out, and why the rest cannot.

A case is compared only where both sides have a right result of it, timed on the same kind of device. Whatever
is left out is kept with its reason, and averages are over what was compared and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from experiments.ab import statistics
from experiments.ab.statistics import Interval

COUNTED = (
    "counted_launches",
    "counted_bytes_loaded",
    "counted_bytes_stored",
    "counted_barriers",
    "counted_mma",
    "counted_atomics",
)
# How a case may end in B, having been right in A, without B being to blame.
BLAMELESS = ("throttled", "interrupted")
CLOCK_MOVED = 0.01  # relative difference of SM clocks that a reader should know of


@dataclass(frozen=True)
class Compared:
    """A case timed on both sides: its parameters, the median times in µs, the ratio B / A and the verdict."""

    case_id: str
    params: Mapping[str, Any]
    a_us: float
    b_us: float
    interval: Interval
    verdict: str


@dataclass(frozen=True)
class Counted:
    """A case of the CPU machine on both sides, and which of its counted numbers differ: name → (a, b)."""

    case_id: str
    params: Mapping[str, Any]
    changed: Mapping[str, tuple[int | None, int | None]]


@dataclass(frozen=True)
class Excluded:
    """A case that is not compared: why in a few words, and in a sentence where there is one.

    `status_a` and `status_b` are None where that side has no row of it.
    """

    case_id: str
    params: Mapping[str, Any]
    reason: str
    detail: str = ""
    status_a: str | None = None
    status_b: str | None = None

    @property
    def broken(self) -> bool:
        """Whether B lost a result that A has."""
        return self.status_a == "ok" and self.status_b not in ("ok", None, *BLAMELESS)


@dataclass
class Comparison:
    """What came out.

    Attributes
    ----------
    margin : float
        Relative difference that counts as none.
    compared, counted, excluded : list
        Every case of either side is in one of them.
    older : list of Excluded
        Rows of cases of which the same side has a newer row, which counts.
    notes : list of str
        What a reader has to know to read the ratios, a sentence each.
    """

    margin: float
    compared: list[Compared] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)
    older: list[Excluded] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """Distinct cases of both sides."""
        return len(self.compared) + len(self.counted) + len(self.excluded)

    @property
    def geometric_mean(self) -> float:
        """Of the ratios B / A of the compared cases alone; NaN where there are none."""
        return statistics.geometric_mean(case.interval.ratio for case in self.compared)

    def verdicts(self) -> Counter:
        """How many cases came out how."""
        return Counter(case.verdict for case in self.compared)


def compare(a: pd.DataFrame, b: pd.DataFrame, margin: float, confidence: float) -> Comparison:
    """Pair the rows of two frames, as `store.read_runs` gives them, by case.

    Parameters
    ----------
    a, b : pandas.DataFrame
    margin : float
        Relative difference that counts as none.
    confidence : float
        Of every interval.
    """
    made = Comparison(margin)
    rows_a, rows_b = _newest(a, "A", made), _newest(b, "B", made)
    pairs = []
    for case in {**rows_a, **rows_b}:
        row_a, row_b = rows_a.get(case), rows_b.get(case)
        params = row_a or row_b
        why = _why_not(row_a, row_b)
        if why:
            statuses = (row and str(row["status"]) for row in (row_a, row_b))
            made.excluded.append(Excluded(case, params, *why, *statuses))
        elif row_a["machine"] == "cpu":
            made.counted.append(Counted(case, params, _changed(row_a, row_b)))
        else:
            made.compared.append(_timed(case, row_a, row_b, margin, confidence))
            pairs.append((row_a, row_b))
    made.notes += _apart(a, b) + _notes(pairs)
    return made


def _apart(a: pd.DataFrame, b: pd.DataFrame) -> list[str]:
    """A sentence where the sides share no device."""
    names = [sorted(str(name) for name in side["device"].dropna().unique()) for side in (a, b)]
    if set(names[0]) & set(names[1]) or not all(names):
        return []
    where = " and B on ".join(", ".join(some) for some in names)
    return [f"A ran on {where}: times of different devices are not compared."]


def _newest(frame: pd.DataFrame, side: str, made: Comparison) -> dict[str, dict[str, Any]]:
    """Each case's newest row; the others are noted."""
    found: dict[str, dict[str, Any]] = {}
    rows = [_plain(row) for row in frame.to_dict("records")]
    for row in sorted(rows, key=_age):
        case = row["case_id"]
        if case in found:
            old = found[case]
            reason, detail = f"older row of the same case in {side}", f"run {old['run_id']}"
            made.older.append(Excluded(case, old, reason, detail))
        found[case] = row
    order = dict.fromkeys(row["case_id"] for row in rows)
    return {case: found[case] for case in order}


def _age(row: dict[str, Any]) -> tuple:
    return row["started_at"] is not None, row["started_at"] or 0, row["attempt"] or 0


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """The row with None for what is missing."""
    return {name: value if _is_list(value) or pd.notna(value) else None for name, value in row.items()}


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str)


def _why_not(a: dict | None, b: dict | None) -> tuple[str, str] | None:
    """(reason, detail) why two rows of a case cannot be compared."""
    if a is None or b is None:
        return f"only in {'B' if a is None else 'A'}", ""
    sides = {"A": a, "B": b}
    if bad := {side: row for side, row in sides.items() if row["status"] != "ok"}:
        words = ", ".join(f"{row['status']} in {side}" for side, row in bad.items())
        details = dict.fromkeys(str(row["error"]) for row in bad.values() if row["error"])
        return words, " · ".join(details)
    if any(a[name] != b[name] for name in ("machine", "device")):
        return "other device", ", ".join(f"{row['device']} in {side}" for side, row in sides.items())
    if a["machine"] == "cpu":
        return None
    for words, wrong in (
        ("no samples", lambda samples: samples is None or len(samples) == 0),
        ("a sample that is no time", lambda samples: not statistics.usable(samples)),
    ):
        if bad := [side for side, row in sides.items() if wrong(row["measured_samples_us"])]:
            return f"{words} in {' and '.join(bad)}", ""
    return None


def _timed(case: str, a: dict, b: dict, margin: float, confidence: float) -> Compared:
    samples = a["measured_samples_us"], b["measured_samples_us"]
    interval = statistics.ratio_of_medians(*samples, confidence)
    mid_a, mid_b = (statistics.median_interval(side)[0] for side in samples)
    return Compared(case, a, mid_a, mid_b, interval, statistics.verdict(interval, margin))


def _changed(a: dict, b: dict) -> dict[str, tuple[int | None, int | None]]:
    return {name: (a[name], b[name]) for name in COUNTED if a[name] != b[name]}


def _notes(pairs: list[tuple[dict, dict]]) -> list[str]:
    """What else differs between the sides of the compared cases."""
    notes, many = [], len(pairs)
    hashes = [(a["source_hash"], b["source_hash"]) for a, b in pairs if a["source_hash"] or b["source_hash"]]
    if moved := sum(x != y for x, y in hashes):
        notes.append(f"The kernel's source differs in {moved} of {many} cases.")
    elif hashes:
        notes.append("The kernels' sources are the same on both sides.")
    if cards := sum(a["device_uuid"] != b["device_uuid"] for a, b in pairs):
        notes.append(
            f"{cards} of {many} cases ran on two cards of one kind; how the cards differ is in the ratio."
        )
    clocks = [(a["measured_sm_clock_mhz"], b["measured_sm_clock_mhz"]) for a, b in pairs]
    shifts = [y / x - 1 for x, y in clocks if x and y]
    if far := [shift for shift in shifts if abs(shift) > CLOCK_MOVED]:
        most = max(far, key=abs)
        notes.append(
            f"The SM clock differs by more than {CLOCK_MOVED:.0%} in {len(far)} of {many} cases, by "
            f"{most:+.1%} at most; that much of their ratio may be the clock's."
        )
    return notes
