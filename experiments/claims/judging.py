"""Judging: each part of a claim against the rows that may judge it, or against a figure of the arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd

from experiments.claims import metrics, predicates, selecting
from experiments.claims.definition import Book, Claim, Part
from experiments.claims.findings import (
    NOT_TESTED,
    Aside,
    Case,
    Finding,
    PartFinding,
    Sample,
    of_cases,
    overall,
)
from experiments.claims.metrics import Beside
from experiments.claims.selecting import Row
from experiments.claims.words import evidence, label_of, scaled

NO_TIME = "a count of the CPU machine: it has no time"
NO_VALUE = "without the value that is asked for"


@dataclass
class Evidence:
    """What there is to judge by: rows by kernel, oldest first, what they are read against, and figures."""

    rows: Mapping[str | None, list[Row]]
    beside: Beside
    figures: Mapping[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)

    def matching(self, *filters: Mapping[str, Any]) -> list[Row]:
        """The rows that meet every filter."""
        wanted = [one["kernel"] for one in filters if "kernel" in one]
        names = list(self.rows) if not wanted else wanted[0] if isinstance(wanted[0], list) else wanted[:1]
        return selecting.matching((row for name in names for row in self.rows.get(name, ())), *filters)


def judge(
    book: Book, frame: pd.DataFrame, hashes: Mapping[str, str],
    figures: Mapping[tuple[int, int], Mapping[str, Any]], causes: Mapping[tuple[str, str], str],
) -> list[Finding]:
    """Every claim's finding.

    Parameters
    ----------
    book : Book
    frame : pandas.DataFrame
        As `store.read_runs` gives it.
    hashes : mapping
        Kernel → its hashes today; empty where they are not known.
    figures : mapping of (claim, part from 0) to `figures.values`' entry
    causes : mapping of (run, case)
        What `diagnose` names first, by `triage.causes`.

    Of the last two those that are missing leave their parts not tested.
    """
    rows = selecting.rows_of(frame, hashes)
    grouped = selecting.grouped(rows, lambda row: (row.get("kernel"),))
    by_kernel = {name: found for (name,), found in grouped.items()}
    beside = Beside.of(frame.loc[[row.index for row in rows if not row.why]], causes)
    known = Evidence(by_kernel, beside, figures)
    return [_claim(claim, known) for claim in book.claims.values()]


def _claim(claim: Claim, known: Evidence) -> Finding:
    parts = tuple(_part(part, (claim.number, i), known) for i, part in enumerate(claim.parts))
    told = Finding(claim, NOT_TESTED, parts)
    heart = next(part for part in parts if not part.part.side)
    if heart.verdict == NOT_TESTED:
        return told
    return Finding(claim, overall([part.verdict for part in told.deciding]), parts)


def _part(part: Part, place: tuple[int, int], known: Evidence) -> PartFinding:
    if part.open:
        return PartFinding(part, NOT_TESTED, sentence=f"{part.says}: {part.open}")
    if part.figure is not None:
        cases, aside = _figure(part, known.figures.get(place)), ()
    else:
        cases, aside = _rows(part, known)
    verdict = of_cases([case.holds for case in cases])
    return PartFinding(part, verdict, tuple(cases), aside, evidence(part, verdict, cases, aside))


def _figure(part: Part, figure: Mapping[str, Any] | None) -> list[Case]:
    """The case of an arithmetic figure; none where it could not be computed."""
    if figure is None:
        return []
    value = scaled(figure["value"], figure["unit"], part.unit)
    note = f"{figure['formula']} = {figure['numbers']}"
    return [Case("arithmetic", "", value, _holds(part, value, None), note=note)]


def _holds(part: Part, value: float, expected: float | None) -> bool:
    """The test of a single value; where `expected` is None, `equals` takes the part's own number."""
    if part.kind == "equals":
        return predicates.equals(value, part.expected if expected is None else expected, part.tolerance)
    return predicates.within(value, part.low, part.high)


def _rows(part: Part, known: Evidence) -> tuple[list[Case], tuple[Aside, ...]]:
    """The cases of a part that rows answer, and the matching rows that may not."""
    sides = [side for side in (part.of, part.to) if side or side is part.of]
    chosen, aside = [], {}
    ask = partial(metrics.value_of, name=part.metric, beside=known.beside)
    for side in sides:
        able = []
        for row in known.matching(side, part.where):
            why = row.why or ("" if ask(row.values) is not None else _without(part, row))
            able += [row] if not why else []
            if why:
                aside.setdefault(why, {})[row.get("run_id"), row.get("case_id")] = None
        chosen.append(selecting.newest(able))
    cases = BUILD[part.kind](part, chosen, lambda row: ask(row.values)[0], known)
    return cases, tuple(Aside(why, tuple(rows)) for why, rows in aside.items())


def _without(part: Part, row: Row) -> str:
    return NO_TIME if metrics.known()[part.metric].timed and row.get("machine") != "gpu" else NO_VALUE


def _case(part: Part, value: float, holds: bool, rows: Sequence[tuple[str, Row]], known: Evidence,
          varied: Iterable[str] = (), note: str = "") -> Case:
    """A case of these rows, each with its role; `varied` are the columns its label leaves out."""
    samples = []
    for role, row in rows:
        number, how = metrics.value_of(row.values, part.metric, known.beside)
        shown = scaled(number, metrics.known()[part.metric].unit, part.unit)
        samples.append(Sample(role, row.get("run_id"), row.get("case_id"), row.words, shown, how))
    label = label_of(rows[0][1], varied, {row.words for _, row in rows})
    return Case(label, rows[0][1].device, value, holds, tuple(samples), note)


def _ratios(part: Part, chosen, metric, known: Evidence) -> list[Case]:
    found = []
    for a, b in selecting.pairs(*chosen, part.of, part.to, part.same, metric):
        if metric(b) == 0:
            continue
        value = metric(a) / metric(b)
        found.append(_case(part, value, predicates.within(value, part.low, part.high),
                           [("of", a), ("over", b)], known, {*part.of, *part.to}))
    return found


def _values(part: Part, chosen, metric, known: Evidence) -> list[Case]:
    """A case a row, or one a shape (or a group of `per`) where something picks; also of `equals`."""
    key = part.per or selecting.SHAPE
    unit, pick = metrics.known()[part.metric].unit, part.of.get("pick")
    rows = chosen[0]
    if pick:
        groups = selecting.grouped(rows, lambda row: tuple(row.get(name) for name in key))
        rows = [selecting.picked(group, pick, metric)[0] for group in groups.values()]
    found = []
    for row in rows:
        value, expected = scaled(metric(row), unit, part.unit), None
        if isinstance(part.expected, str):
            other = metrics.value_of(row.values, part.expected, known.beside)
            if other is None:
                continue
            expected = scaled(other[0], metrics.known()[part.expected].unit, part.unit)
        found.append(_case(part, value, _holds(part, value, expected), [("of", row)], known))
    return found


def _shares(part: Part, chosen, metric, known: Evidence) -> list[Case]:
    """A case a shape: the mean over its rows, whatever their kernels and constants."""
    native = metrics.known()[part.metric].unit
    place = [name for name in selecting.SHAPE if name != "kernel"]
    found = []
    for rows in selecting.grouped(chosen[0], lambda row: tuple(row.get(name) for name in place)).values():
        value = scaled(sum(map(metric, rows)) / len(rows), native, part.unit)
        found.append(_case(part, value, _holds(part, value, None), [("of", row) for row in rows], known))
    return found


def _along(part: Part, chosen, metric) -> list[tuple[list[Row], list[float], list[float]]]:
    """(rows, places, values) of every curve that has enough points above zero."""
    curves = selecting.curves(chosen[0], part.axis, part.of.get("pick"), metric)
    found = []
    for curve in curves:
        curve = [row for row in curve if metric(row) > 0 and row.get(part.axis) > 0]
        if len(curve) >= part.points:
            xs, ys = [float(row.get(part.axis)) for row in curve], [metric(row) for row in curve]
            found.append((curve, xs, ys))
    return found


def _curve_case(part: Part, curve, value: float, holds: bool, known: Evidence) -> Case:
    span = f"{part.axis} {curve[0].get(part.axis):,} to {curve[-1].get(part.axis):,}, {len(curve)} points"
    rows = [(f"{part.axis} {row.get(part.axis):,}", row) for row in curve]
    return _case(part, value, holds, rows, known, {part.axis, "m", "n"} if part.axis == "n" else {part.axis},
                 note=span)


def _exponents(part: Part, chosen, metric, known: Evidence) -> list[Case]:
    found = []
    for curve, xs, ys in _along(part, chosen, metric):
        value = predicates.exponent(xs, ys)
        found.append(_curve_case(part, curve, value, predicates.within(value, part.low, part.high), known))
    return found


def _optima(part: Part, chosen, metric, known: Evidence) -> list[Case]:
    found = []
    for curve, xs, ys in _along(part, chosen, metric):
        best = predicates.best_at(xs, ys)
        of = [curve[0].get(one) if isinstance(one, str) else one for one in part.multiple_of]
        # NOTE: where every place is a multiple, or none is, the best one's being one says nothing.
        if of and len({predicates.multiple(x, of) for x in xs}) == 1:
            continue
        holds = (not part.among or best in part.among) and (not part.inside or predicates.inside(best, xs))
        holds = holds and predicates.multiple(best, of)
        found.append(_curve_case(part, curve, best, holds, known))
    return found


def _monotone(part: Part, chosen, metric, known: Evidence) -> list[Case]:
    """The value of such a case is last over first."""
    return [
        _curve_case(part, curve, ys[-1] / ys[0],
                    predicates.monotone(ys, part.direction, part.gain, part.tolerance), known)
        for curve, _, ys in _along(part, chosen, metric)
    ]


BUILD = {"ratio": _ratios, "value": _values, "share": _shares, "equals": _values, "exponent": _exponents,
         "optimum": _optima, "monotone": _monotone}
