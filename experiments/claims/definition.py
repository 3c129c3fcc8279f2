"""Claims as `claims.toml` states them, checked word by word when they are read; the file says how."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.claims import metrics, selecting
from experiments.claims.predicates import WORDS_UP_DOWN
from experiments.suite import suite_names
from experiments.words import UserError, nearest

CLAIMS = Path(__file__).parent.with_name("claims.toml")
LATER = "later"
OTHER = ("capacity", "diagnose", "recommend", "tests", LATER)  # what answers beside suites
RANGES = ("min", "max", "multiple", "no_multiple")

# Kind → (what it must say, what it may say) beside the words of every part.
KINDS = {
    "ratio": (("metric", "of", "to"), ("low", "high", "same")),
    "value": ((), ("metric", "of", "figure", "low", "high", "per")),
    "share": (("metric", "of"), ("low", "high")),
    "equals": (("expected", "tolerance"), ("metric", "of", "figure")),
    "exponent": (("metric", "of", "axis"), ("low", "high", "points")),
    "optimum": (("metric", "of", "axis"), ("points", "among", "multiple_of", "inside")),
    "monotone": (("metric", "of", "axis", "direction"), ("points", "gain", "tolerance")),
}
SAYS = ("says", "kind", "open", "where", "quoted", "unit", "side", "confirmed", "refuted")


@dataclass(frozen=True)
class Part:
    """One testable sentence of a claim; the keys are those of `claims.toml`.

    Attributes
    ----------
    quoted : tuple of float
        What the article says, in `unit`: nothing, a number, or the two ends of a range.
    low, high : float or None
        What is accepted, in `unit`.
    open : str
        Why nothing tests it yet; then it has no kind.
    """

    says: str
    kind: str = ""
    open: str = ""
    metric: str = ""
    figure: Mapping[str, Any] | None = None
    of: Mapping[str, Any] = field(default_factory=dict)
    to: Mapping[str, Any] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    same: tuple[str, ...] = ()
    per: tuple[str, ...] = ()
    axis: str = ""
    points: int = 3
    low: float | None = None
    high: float | None = None
    among: tuple[float, ...] = ()
    multiple_of: tuple[Any, ...] = ()
    inside: bool = False
    direction: str = ""
    gain: float = 0.0
    tolerance: float = 0.0
    expected: Any = None
    quoted: tuple[float, ...] = ()
    unit: str = ""
    side: bool = False
    confirmed: str = ""
    refuted: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim: number, sentence, place in the articles, what answers it, why its test is fair, its parts."""

    number: int
    statement: str
    place: str
    answered_by: tuple[str, ...]
    reason: str
    parts: tuple[Part, ...]
    command: str = ""

    def commands(self) -> list[str]:
        """What one runs to test it; empty where nothing does yet."""
        known = suite_names()
        found = [f"python -m experiments run {name}" for name in self.answered_by if name in known]
        return found + [self.command] * bool(self.command)

    def missing(self) -> list[str]:
        """The suites that would answer it and do not exist here."""
        known = (*OTHER, *suite_names())
        return [name for name in self.answered_by if name not in known]


@dataclass(frozen=True)
class Book:
    """Every claim by number, and the articles' titles by letter: (in English, as printed)."""

    claims: Mapping[int, Claim]
    articles: Mapping[str, tuple[str, str]]

    def claim(self, number: int) -> Claim:
        """The claim of that number.

        Raises
        ------
        UserError
        """
        if number not in self.claims:
            raise UserError(f"--claim: expected 1 to {max(self.claims)}, got {number}")
        return self.claims[number]


def load(path: Path = CLAIMS) -> Book:
    """The claims of a file.

    Raises
    ------
    UserError
        Not TOML, a number that stands twice, or a key, kind, metric or name in it that is not known.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path.name}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name}: is not valid TOML ({error})") from error
    _keys(raw, ("articles", "claim"), ("articles", "claim"), path.name)
    found: dict[int, Claim] = {}
    for body in raw["claim"]:
        claim = _claim(body, f"{path.name}: claim {body.get('number', '?')}")
        if claim.number in found:
            raise UserError(f"{path.name}: claim {claim.number} stands twice; number each once")
        found[claim.number] = claim
    articles = {letter: (one["title"], one["original"]) for letter, one in raw["articles"].items()}
    return Book(found, articles)


def _claim(body: dict[str, Any], where: str) -> Claim:
    needed = ("number", "statement", "place", "answered_by", "reason", "part")
    _keys(body, needed, (*needed, "command"), where)
    parts = [_part(part, f"{where}: part {i}") for i, part in enumerate(body["part"], 1)]
    words = {name: body[name].strip() for name in ("statement", "place", "reason")}
    return Claim(body["number"], answered_by=tuple(body["answered_by"]), parts=tuple(parts),
                 command=body.get("command", ""), **words)


def _part(body: dict[str, Any], where: str) -> Part:
    """A part with its keys checked for its kind."""
    if ("kind" in body) == ("open" in body):
        raise UserError(f"{where}: expected either a kind or the word why it is open; name one")
    if "open" in body:
        _keys(body, ("says", "open"), ("says", "open", "side"), where)
        return Part(**body)
    kind = body["kind"]
    if kind not in KINDS:
        raise UserError(f"{where}: '{kind}' is not a kind; {nearest(kind, KINDS)}")
    needed, more = KINDS[kind]
    _keys(body, ("says", *needed), (*SAYS, *needed, *more), where)
    if ("figure" in body) == ("metric" in body):
        raise UserError(f"{where}: expected either a metric or a figure; name one")
    if kind in ("ratio", "value", "share", "exponent"):
        if "low" not in body and "high" not in body:
            raise UserError(f"{where}: expected low or high; say what is accepted")
    if body.get("direction", "up") not in WORDS_UP_DOWN:
        raise UserError(f"{where}: direction expected up or down, got {body['direction']!r}")
    _names(body, where)
    return Part(**{key: _frozen(key, value) for key, value in body.items()})


def _frozen(key: str, value: Any) -> Any:
    if key == "quoted":
        return tuple(value) if isinstance(value, list) else (value,)
    return tuple(value) if isinstance(value, list) else value.strip() if isinstance(value, str) else value


def _names(body: dict[str, Any], where: str) -> None:
    """Refuses metrics and choices that no row could meet."""
    expected = body.get("expected")
    for name in (body.get("metric"), expected if isinstance(expected, str) else None):
        if name is not None and name not in metrics.known():
            raise UserError(f"{where}: '{name}' is not a metric; {nearest(name, metrics.known())}")
    for side in ("of", "to", "where"):
        for name, wanted in body.get(side, {}).items():
            if isinstance(wanted, dict):
                _keys(wanted, (), RANGES, f"{where}: {side}.{name}")
            if name == "pick" and wanted not in selecting.PICKS:
                raise UserError(f"{where}: pick expected min or max, got {wanted!r}")


def _keys(body: Mapping[str, Any], needed, known, where: str) -> None:
    for key in needed:
        if key not in body:
            raise UserError(f"{where}: has no {key}; add it")
    for key in body:
        if key not in known:
            raise UserError(f"{where}: '{key}' is not a key here; {nearest(key, known, limit=30)}")


