"""Findings in words: numbers with their unit, a case's label, the evidence in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from experiments.claims.definition import Part
from experiments.claims.metrics import known
from experiments.claims.selecting import Row
from experiments.suite import SCORES
from experiments.words import of_scores, several

SIZES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
CLOSE = {"×": "×", "exponent": "", "": ""}  # written without a space before it


def scaled(value: float, native: str, unit: str) -> float:
    """A value in its metric's own unit as one in the unit a part speaks in."""
    if native == "B" and unit in SIZES:
        return value / SIZES[unit]
    return 100 * value if native == "share" and unit == "%" else value


def unit_of(part: Part) -> str:
    """The unit of one row's value: the part's where that is of the metric's kind, else the metric's."""
    native = known()[part.metric].unit if part.metric else ""
    if part.unit in SIZES and native == "B" or part.unit == "%" and native == "share":
        return part.unit
    return "" if native == "share" else native


def number(value: float) -> str:
    """Three digits, and all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"


def shown(value: float, unit: str) -> str:
    """A value with its unit."""
    return number(value) + CLOSE.get(unit, f" {unit}")


def span(values: Sequence[float], unit: str) -> str:
    """The lowest to the highest, with the unit."""
    low, high = number(min(values)), number(max(values))
    return shown(min(values), unit) if low == high else f"{low} to {high}{CLOSE.get(unit, f' {unit}')}"


def quoted(part: Part) -> str:
    """What the article says; empty where it gives no number."""
    return span(part.quoted, part.unit) if part.quoted else ""


def accepted(part: Part) -> str:
    """What the test accepts; empty where there is none."""
    if not part.kind:
        return ""
    low, high = part.low, part.high
    if part.kind == "equals":
        what = part.expected if isinstance(part.expected, str) else shown(part.expected, part.unit)
        return f"{what} within {100 * part.tolerance:g} %"
    if part.kind == "optimum":
        said = [f"among {', '.join(map(number, part.among))}"] if part.among else []
        said += [f"a multiple of {' and of '.join(map(str, part.multiple_of))}"] if part.multiple_of else []
        return " and ".join(said + ["inside the ends"] * part.inside)
    if part.kind == "monotone":
        return (f"{part.direction} by {100 * part.gain:g} % in all, steps back by {100 * part.tolerance:g} % "
                "at most")
    if low is not None and high is not None:
        return span((low, high), part.unit)
    return f"at least {shown(low, part.unit)}" if high is None else f"at most {shown(high, part.unit)}"


def label_of(row: Row, but: Iterable[str] = (), kernels: Iterable[str] = ()) -> str:
    """A row's device, kernel and shape in a few words, without the columns `but`; of several kernels none."""
    but, get = set(but), row.get
    heads = "" if get("h") is None else f"H{get('h')}" + f"/{get('hkv')}" * (get("hkv") != get("h"))
    parts = [f"B{get('b')}" * ("b" not in but and get("b") is not None), heads]
    if get("m") is not None and get("m") not in (get("n"), 1) and "m" not in but:
        parts.append(f"M{get('m')}")
    parts += [f"{letter}{get(column)}" for letter, column in (("N", "n"), ("D", "d"))
              if column not in but and get(column) is not None]
    parts += [get("dtype") or "", "causal" * bool(get("causal"))]
    if get("page_size") is not None and "page_size" not in but:
        parts.append(f"page {get('page_size')}")
    parts.append((get("page_order") or "") if "page_order" not in but else "")
    if get("key_order") and "key_order" not in but:
        parts.append(f"keys {get('key_order')}")
    parts += of_scores({name: get(name) for name in SCORES if name not in but})
    parts += [f"cache {get('kv_dtype')}"] if get("kv_dtype") and "kv_dtype" not in but else []
    if get("bytes"):
        parts.append(shown(get("bytes") / 1e6, "MB"))
    name = row.words if len(set(kernels)) < 2 else ""
    return " · ".join(filter(None, [row.device, name, " ".join(filter(None, parts))]))


def evidence(part: Part, verdict: str, cases: Sequence, aside: Sequence) -> str:
    """What the cases say, in a sentence: the part's own words for its verdict where it has them."""
    if not cases:
        rows = sum(len(one.rows) for one in aside)
        why = f"no row can be judged; {several(rows, 'row')} set aside" if rows else "no row to judge by"
        if part.figure is not None:
            why = "the arithmetic could not be done here"
        return f"{part.says}: {why}"
    values, holding = [case.value for case in cases], sum(case.holds for case in cases)
    own = {"confirmed": part.confirmed, "refuted": part.refuted}.get(verdict)
    if own:
        return own.format(value=span(values, part.unit))
    answer = {"confirmed": "", "refuted": "no, ", "depends": f"in {holding} of {len(cases)} cases, "}[verdict]
    at = " (last over first)" if part.kind == "monotone" else ""
    where = f" in {len(cases)} cases" if len(cases) > 1 and verdict != "depends" else ""
    return f"{part.says}: {answer}{span(values, part.unit)}{at}{where}"
