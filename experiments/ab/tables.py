"""A comparison in the terminal: ratio and verdict of each case, what was left out and why, and the sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from experiments import tables
from experiments.ab.comparison import Compared, Comparison, Counted, Excluded
from experiments.ab.statistics import FASTER, SAME, SLOWER, UNDECIDED, VERDICTS
from experiments.memory import cap_of
from experiments.words import of_scores, several

STYLES = {FASTER: "green", SLOWER: "red", SAME: "dim", UNDECIDED: "yellow"}
NAMED = 4  # cases that a line of exclusions names
SIZES = ("b", "h", "hkv", "m", "n", "prefix", "d", "page_size", "bytes", "flops")
# Parameters that go without saying where they have this value.
USUAL = {
    "page_order": "sorted",
    "lengths_source": "uniform",
    "layout": "bshd",
    "mode": "launch",
    "cache_mode": "cold",
    "constants": None,
}


def everything(comparison: Comparison, title: str, confidence: float, paired: bool) -> list[Table]:
    """All tables of a comparison: what was timed, what was counted, and what was left out."""
    left_out = excluded(comparison.excluded + comparison.older)
    made = [*timed(comparison, title, confidence, paired), *counted(comparison.counted)]
    return made + [left_out] * (left_out is not None)


def timed(comparison: Comparison, title: str, confidence: float, paired: bool) -> list[Table]:
    """The compared cases, a table a kernel family.

    Parameters
    ----------
    paired : bool
        The samples were taken in turn, so the kernels are in the title and counts are of A B B A.
    """
    made = []
    for family, cases in _families(comparison.compared).items():
        names, caption = _parameters(cases, with_kernel=not paired)
        table = tables.new_table(f"{title}: {family}", caption)
        tables.add_parameters(table, names)
        counts = "A B B A" if paired else "fewest\nsamples"
        for head in ("A\nmeasured µs", "B\nmeasured µs", "B / A", f"{percent(confidence)}\ninterval", counts):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("B is", no_wrap=True)
        for case in cases:
            table.add_row(*tables.parameter_cells(case.params, names), *_cells(case))
        made.append(table)
    return made


def _cells(case: Compared) -> list[str]:
    interval, style = case.interval, STYLES[case.verdict]
    known = interval.count >= interval.needed
    span = f"{interval.low:.3f} – {interval.high:.3f}" if known else f"needs {interval.needed}"
    return [
        f"{case.a_us:.1f}",
        f"{case.b_us:.1f}",
        f"{interval.ratio:.3f}",
        span,
        str(interval.count),
        f"[{style}]{case.verdict}[/]",
    ]


def _families(cases: Iterable) -> dict[str, list]:
    found: dict[str, list] = {}
    for case in cases:
        found.setdefault(str(case.params.get("family")), []).append(case)
    return found


def _parameters(cases: list, with_kernel: bool) -> tuple[list[str], str]:
    names, caption = tables.split_parameters([dict(case.params) for case in cases])
    return [name for name in names if with_kernel or name != "kernel"], caption


def counted(cases: list[Counted]) -> list[Table]:
    """The cases whose counted numbers differ, a line a number."""
    made = []
    for family, some in _families(case for case in cases if case.changed).items():
        names, caption = _parameters(some, with_kernel=True)
        table = tables.new_table(f"Counted numbers that differ: {family}", caption)
        tables.add_parameters(table, names)
        table.add_column("counted", no_wrap=True)
        for head in ("A", "B", "B / A"):
            table.add_column(head, justify="right", no_wrap=True)
        for case in some:
            for column, (a, b) in case.changed.items():
                ratio = f"{b / a:.3f}" if a and b is not None else ""
                label = column.removeprefix("counted_").replace("_", " ")
                numbers = ("" if x is None else f"{x:,}" for x in (a, b))
                table.add_row(*tables.parameter_cells(case.params, names), label, *numbers, ratio)
        made.append(table)
    return made


def excluded(cases: list[Excluded]) -> Table | None:
    """What was left out: each reason with the shapes it struck."""
    if not cases:
        return None
    groups: dict[tuple[str, str, str], list[str]] = {}
    for case in cases:
        key = case.reason, str(case.params.get("kernel") or ""), case.detail
        groups.setdefault(key, []).append(shape_words(case.params))
    table = tables.new_table("Not compared")
    table.add_column("reason", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    table.add_column("cases", justify="right")
    table.add_column("which", overflow="fold")
    table.add_column("detail", overflow="fold")
    for (reason, kernel, detail), shapes in groups.items():
        more = [f"{len(shapes) - NAMED} more"] if len(shapes) > NAMED else []
        which = "; ".join([*shapes[:NAMED], *more])
        table.add_row(reason, escape(kernel), str(len(shapes)), escape(which), escape(detail))
    return table


def shape_words(params: Mapping[str, Any]) -> str:
    """A case's shape in a few words, its kernel left out."""
    implied = {"m"} if params.get("m") in (1, params.get("n")) else set()
    implied |= {"h", "hkv", "d"} if params.get("model") else set()
    words = [params["model"]] if params.get("model") else []
    for name in SIZES:
        if name not in implied and params.get(name) is not None:
            words.append(f"{name} {params[name]}")
    words += ["causal"] * bool(params.get("causal"))
    words += of_scores(params)
    words += [f"keys {params['key_order']}"] if params.get("key_order") else []
    words += [f"cache {params['kv_dtype']}"] if params.get("kv_dtype") else []
    words += [f"in {cap.words}"] if (cap := cap_of(params)) else []
    words += [str(params[name]) for name, usual in USUAL.items() if params.get(name) not in (None, usual)]
    return " ".join(words)


def percent(value: float) -> str:
    """A relative number as a percentage without needless zeros: 0.02 is "2 %"."""
    return f"{100 * value:.3g} %"


def sums(comparison: Comparison, confidence: float) -> list[str]:
    """Sentences over the compared cases: the verdicts, and the geometric mean with what it covers."""
    many, of = len(comparison.compared), comparison.cases
    if not many:
        return []
    counts = comparison.verdicts()
    listed = ", ".join(f"{counts[v]} {v}" for v in VERDICTS)
    said = [
        f"B against A: {listed}. Up to {percent(comparison.margin)} counts as the same; "
        f"intervals hold the ratio {percent(confidence)} of the time.",
        f"Geometric mean of B / A: {comparison.geometric_mean:.3f} over {many} of {of} cases "
        f"({percent(many / of)}), those in the table alone.",
    ]
    if counts[UNDECIDED]:
        said.append(
            "Undecided: the interval reaches across the margin. More samples decide it, or a wider margin."
        )
    return said


def counted_sum(cases: list[Counted]) -> str:
    """A sentence over cases of the CPU machine."""
    differ = sum(bool(case.changed) for case in cases)
    return (
        f"On the CPU machine, which models no time: {several(len(cases), 'case')}; counted launches, bytes, "
        f"barriers or instructions differ in {differ} of them."
    )
