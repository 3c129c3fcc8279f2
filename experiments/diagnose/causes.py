"""Causes *inferred* from a user's own numbers, ranked, each with its evidence. The rules are data: see there.

Nothing is measured here: a diagnosis says which suite would prove it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.diagnose.rules import CAUSES, FACTS, LAUNCH_US, RULES, THRESHOLDS, Rule
from experiments.quantities import gb
from experiments.suite import suite_names
from experiments.words import UserError

OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
WORDS = {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}


@dataclass(frozen=True)
class Value:
    """What is known of a fact, and how: "given", or the sum it came from."""

    value: float | str
    how: str = "given"


@dataclass(frozen=True)
class Evidence:
    """A condition that holds: its fact, and it in words, short and with how and from whom it is known."""

    fact: str
    short: str
    full: str


@dataclass(frozen=True)
class Finding:
    """A cause, its rank, the evidence, and the options that would settle it."""

    cause: str
    strength: float
    evidence: tuple[Evidence, ...]
    deciders: tuple[str, ...]

    @property
    def suites(self) -> tuple[str, ...]:
        """The suites that exist and would prove it."""
        return tuple(name for name in CAUSES[self.cause].suites if name in suite_names())


@dataclass(frozen=True)
class Diagnosis:
    """What the rules say.

    Attributes
    ----------
    findings : tuple of Finding
        The likeliest first.
    facts : mapping
        What was looked at, with what follows from it.
    weighed : bool
        Whether any rule had all it needs; if not, no finding means nothing.
    suspected : mapping of cause to options
        Causes of which one condition holds and another is unknown, and what would tell.
    unseen : tuple of str
        Other options that some rule would read.
    """

    findings: tuple[Finding, ...]
    facts: Mapping[str, Value]
    weighed: bool
    suspected: Mapping[str, tuple[str, ...]]
    unseen: tuple[str, ...]


def check(numbers: Mapping[str, float | str | None]) -> dict[str, Value]:
    """The facts a user gave, without those left out.

    Raises
    ------
    UserError
        A number that cannot be: out of bounds, not finite, or at odds with another.
    """
    given = {name: value for name, value in numbers.items() if value is not None}
    for name, value in given.items():
        fact = FACTS[name]
        if fact.choices:
            if value not in fact.choices:
                raise UserError(f"{fact.option}: expected {' or '.join(fact.choices)}, got {value!r}")
            continue
        if not (math.isfinite(value) and fact.least <= value <= fact.most) or (fact.positive and not value):
            raise UserError(f"{fact.option}: expected {_bounds(fact)}, got {value:g}; it is {fact.meaning}")
        if fact.most == 100 and 0 < value < 1:
            raise UserError(f"{fact.option}: expected percent, 1 to 100, got {value:g}; write 45 for 45 %")
    for low, high, why in (
        ("mean_ms", "p99_ms", "the 99th percentile cannot be below the mean of the same latencies"),
        ("step_gap_us", "step_us", "a step holds the gap before it"),
    ):
        if low in given and high in given and given[high] < given[low]:
            raise UserError(f"{FACTS[high].option}: expected at least the {given[low]:g} of "
                            f"{FACTS[low].option}, got {given[high]:g}; {why}")
    return {name: Value(value) for name, value in given.items()}


def _bounds(fact) -> str:
    if fact.most < 1e18:
        return f"{fact.least:g} to {fact.most:g}"
    return "more than 0" if fact.positive else f"at least {fact.least:g}"


def derived(facts: Mapping[str, Value]) -> dict[str, Value]:
    """The facts with those that follow from them."""
    known = {name: fact.value for name, fact in facts.items()}
    found = dict(facts)

    def add(name: str, needed: tuple[str, ...], compute, how) -> None:
        if all(n in known for n in needed) and name not in found:
            values = [known[n] for n in needed]
            found[name] = Value(compute(*values), how(*values))

    add("slowdown", ("baseline_tokens_per_s", "tokens_per_s"), lambda b, t: b / t,
        lambda b, t: f"{b:g} / {t:g}")
    add("memory_saved", ("baseline_memory", "peak_memory"), lambda b, p: 100 * (1 - p / b),
        lambda b, p: f"1 − {gb(p)} / {gb(b)}")
    add("launch_ratio", ("launches_per_step", "baseline_launches"), lambda n, b: n / b,
        lambda n, b: f"{n:g} / {b:g}")
    add("launch_share", ("launches_per_step", "step_us"), lambda n, s: 100 * n * LAUNCH_US / s,
        lambda n, s: f"{n:g} × {LAUNCH_US:g} µs / {s:g} µs")
    add("gap_share", ("step_gap_us", "step_us"), lambda g, s: 100 * g / s, lambda g, s: f"{g:g} / {s:g}")
    add("tail", ("p99_ms", "mean_ms"), lambda p, m: p / m, lambda p, m: f"{p:g} / {m:g}")
    add("chunk_remainder", ("chunk", "head_dim"), _remainder, lambda c, d: f"{c:g} over 64 and {d:g}")
    add("well_tiled", ("chunk", "head_dim", "tile"), _well_tiled,
        lambda c, d, t: f"chunks of {c:g}, head dim {d:g}, tiles of {t:g}")
    found |= {"chunked": Value("yes")} if {"chunk", "chunks"} & set(found) else {}
    # NOTE: a share decides where it is known: many launches or a long gap are nothing in a long step.
    for name, conditions in (
        ("launch_bound", ("launch_share >= costly", "launches_per_step >= many")),
        ("gap_bound", ("gap_share >= gap", "step_gap_us >= long gap")),
    ):
        known = [held for held in (holds(condition, found) for condition in conditions) if held is not None]
        found |= {name: Value("yes" if known[0] else "no")} if known else {}
    return found


def _remainder(chunk: float, head_dim: float) -> float:
    return max(chunk % 64, chunk % head_dim)


def _well_tiled(chunk: float, head_dim: float, tile: float) -> str:
    """Whether there is nothing that the remedy of `tiles` would change."""
    least, most, fair = (THRESHOLDS[name].value for name in ("small chunk", "large chunk", "small tile"))
    return "yes" if least <= chunk <= most and not _remainder(chunk, head_dim) and tile >= fair else "no"


def holds(condition: str, facts: Mapping[str, Value]) -> bool | None:
    """Whether a rule's condition holds; None where its fact is unknown."""
    name, sign, limit = condition.split(" ", 2)
    if name not in facts:
        return None
    value = facts[name].value
    return value == limit if sign == "is" else OPERATORS[sign](value, THRESHOLDS[limit].value)


def diagnose(facts: Mapping[str, Value]) -> Diagnosis:
    """Hold every rule to the facts, those that follow included."""
    facts, weighed = derived(facts), False
    found: dict[str, Finding] = {}
    suspected: dict[str, dict[str, None]] = {}
    unseen: dict[str, None] = {}
    for rule in RULES:
        when = {condition: holds(condition, facts) for condition in rule.when}
        weighed |= bool(rule.strength) and (False in when.values() or None not in when.values())
        if False in when.values() or any(holds(condition, facts) for condition in rule.unless):
            continue
        if None not in when.values():
            found[rule.cause] = _joined(found.get(rule.cause), _finding(rule, facts))
            continue
        wanted = [FACTS[c.split()[0]].option for c, known in when.items() if known is None]
        wanted = dict.fromkeys(option for option in wanted if option.startswith("--"))
        unseen |= wanted
        if True in when.values():
            suspected.setdefault(rule.cause, {}).update(wanted)
    findings = sorted(found.values(), key=lambda finding: -finding.strength)
    if len(findings) > 1:
        findings = [finding for finding in findings if finding.strength >= 1]
    suspected = {cause: tuple(o) for cause, o in suspected.items() if o and cause not in found}
    told = {option for options in suspected.values() for option in options}
    single = dict.fromkeys(o for option in unseen if option not in told for o in option.split(" with "))
    known = {FACTS[name].option for name in facts}
    return Diagnosis(tuple(findings), facts, weighed, suspected, tuple(o for o in single if o not in known))


def _finding(rule: Rule, facts: Mapping[str, Value]) -> Finding:
    support = [condition for condition in rule.support if holds(condition, facts)]
    evidence = [_evidence(condition, facts) for condition in (*rule.when, *support)]
    unknown = [FACTS[c.split()[0]].option for c in rule.unless if holds(c, facts) is None]
    deciders = tuple(option for option in dict.fromkeys(unknown) if " " not in option)
    return Finding(rule.cause, rule.strength + 0.1 * len(support), tuple(evidence), deciders)


def _joined(first: Finding | None, second: Finding) -> Finding:
    """Two rules' findings of one cause as one; what settles the stronger settles both."""
    if first is None:
        return second
    strong, weak = (first, second) if first.strength >= second.strength else (second, first)
    seen = {evidence.fact for evidence in strong.evidence}
    more = tuple(evidence for evidence in weak.evidence if evidence.fact not in seen)
    return Finding(strong.cause, strong.strength, (*strong.evidence, *more), strong.deciders)


def _evidence(condition: str, facts: Mapping[str, Value]) -> Evidence:
    name, sign, limit = condition.split(" ", 2)
    short, full = describe(name, facts, how=False), describe(name, facts)
    if sign == "is" or limit == "none":
        return Evidence(name, short, full)
    threshold = THRESHOLDS[limit]
    compared = f", {WORDS[sign]} {threshold.value:g}{_unit(name)}"
    return Evidence(name, short + compared, f"{full}{compared} ({threshold.source})")


def describe(name: str, facts: Mapping[str, Value], how: bool = True) -> str:
    """A fact in words: its name, value and unit, and how it is known unless it was given."""
    known = facts[name]
    if isinstance(known.value, str):
        text = known.value
    elif FACTS[name].unit == "B":
        text = gb(known.value)
    else:
        text = f"{known.value:,.0f}" if abs(known.value) >= 1000 else f"{known.value:.3g}"
        text += _unit(name)
    label = re.sub(r"_(per_s|us|ms|s)$", "", name).replace("_", " ").replace(" sm", " SM")
    return f"{label} {text}" + (f" = {known.how}" if how and known.how != "given" else "")


def _unit(name: str) -> str:
    unit = FACTS[name].unit
    return f" {unit}" if unit else ""
