"""What the articles say of a ladder's steps, found in the claims by the filters that judge them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pandas as pd

from dashboard.rows import NAMES
from experiments.claims import selecting
from experiments.claims.definition import Claim, Part

COLUMNS = ("step", "value", "says")
Step = tuple[str, str]  # a step, and the step it comes after


def times(made: pd.DataFrame, claims: Iterable[Claim], base: str) -> pd.DataFrame:
    """Quoted slowdowns of steps against `base`: a row each with `COLUMNS`.

    Parameters
    ----------
    made : pandas.DataFrame
        Steps of one point, as `steps.of` gives them.
    claims : iterable of Claim
    base : str
        A step, or "x_standard" or "x_flash" for the step that is that kernel with its defaults.
    """
    kernel = base.removeprefix("x_")
    plain = made[(made["kernel"] == kernel) & (made["constants"] == "")] if base.startswith("x_") else None
    yard = set(made["step"][made["step"] == base]) if plain is None else set(plain["step"])
    found = [(a[0], quoted, says) for a, b, quoted, says in _ratios(made, claims) if b[0] in yard]
    return pd.DataFrame(found, columns=list(COLUMNS)).drop_duplicates(["step", "value"])


def gains(made: pd.DataFrame, claims: Iterable[Claim]) -> dict[str, float]:
    """Step → its time over that of the step before it, as an article quotes it; the first quote counts."""
    found: dict[str, float] = {}
    for (a, after_a), (b, after_b), quoted, _ in _ratios(made, claims):
        if after_b == a:
            found.setdefault(b, 1 / quoted)
        elif after_a == b:
            found.setdefault(a, quoted)
    return found


def shares(made: pd.DataFrame, claims: Iterable[Claim], metric: str) -> dict[str, float]:
    """Step → the share in percent that an article quotes of it, for "sm_busy" or "bytes_share"."""
    rows, found = _rows(made), {}
    for _, part in _quoted(claims, "value", metric):
        for step, _ in _steps(made, selecting.matching(rows, part.where, part.of)):
            found.setdefault(step, part.quoted[0])
    return found


def _ratios(made: pd.DataFrame, claims: Iterable[Claim]) -> Iterator[tuple[Step, Step, float, str]]:
    """Two steps, the time of the first over that of the second as quoted, and where that is said."""
    rows = _rows(made)
    for claim, part in _quoted(claims, "ratio", "measured_time_us"):
        if "page_size" in (*part.of, *part.to):
            continue  # steps with one page a sequence differ in more than the size of a page
        ours = _steps(made, selecting.matching(rows, part.where, part.of))
        theirs = _steps(made, selecting.matching(rows, part.where, part.to))
        says = f"{part.says.strip()} (claim {claim.number}, {claim.place})"
        yield from ((a, b, part.quoted[0], says) for a in ours for b in theirs if a != b)


def _quoted(claims: Iterable[Claim], kind: str, metric: str) -> Iterator[tuple[Claim, Part]]:
    for claim in claims:
        for part in claim.parts:
            if part.kind == kind and part.metric == metric and len(part.quoted) == 1:
                yield claim, part


def _rows(made: pd.DataFrame) -> list[selecting.Row]:
    # Prepared rows say "" where stored ones say nothing.
    stored = {name: made[name].where(made[name] != "") for name in NAMES}
    return selecting.rows_of(made.assign(measured_samples_us=None, **stored), {})


def _steps(made: pd.DataFrame, rows: Iterable[selecting.Row]) -> list[Step]:
    known = dict(zip(made.index, zip(made["step"], made["after"])))
    return list(dict.fromkeys(known[row.index] for row in rows))
