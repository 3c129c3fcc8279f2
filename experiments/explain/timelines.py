"""What each warp of a block did between two barriers: as folded lines of text, and as a chart.

A step ends at a barrier or at the end of the warp. Steps say in which order things happened to a warp, never
how long they took. Imports no kernel: the dashboard draws through here.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import altair as alt

# Quantities of a step in the order in which data moves: heading, and unit.
QUANTITIES = {
    "bytes_loaded": ("loaded from global", "B"),
    "bytes_copied": ("copied, global to shared", "B"),
    "shared_bytes_stored": ("written to shared", "B"),
    "shared_bytes_loaded": ("read from shared", "B"),
    "mma": ("multiplied", "mma"),
    "shuffles": ("exchanged between lanes", "shuffles"),
    "bytes_stored": ("stored to global", "B"),
}
LONGEST = 4  # steps of a pattern that is looked for, as in a loop with so many barriers
BLUE, PALE, INK = "#0072B2", "#E8F1F8", "#1F2933"
ENDS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8A6D00", "#D55E00", "#5F6B76")
# 4096 → 4K, 4224 → 4.13K, 100 → 100, and nothing where nothing was done.
SHORT = "AMOUNT >= 1024 ? format(AMOUNT / 1024, '.3~g') + 'K' : AMOUNT > 0 ? format(AMOUNT, 'd') : ''"

Step = Mapping[str, Any]


@dataclass(frozen=True)
class Fold:
    """Steps in a row that repeat: the pattern once, the number of its first step, and how often it comes."""

    pattern: tuple[Step, ...]
    first: int
    times: int


@dataclass(frozen=True)
class Group:
    """Warps that took the same steps, in one launch or in several of one entry, and these steps folded."""

    launches: tuple[int, ...]
    entry: str
    warps: tuple[int, ...]
    folds: tuple[Fold, ...]


def _same(step: Step) -> tuple:
    """What makes two steps equal: everything but whose they are and when."""
    return tuple(step[name] for name in (*QUANTITIES, "ended_by", "file", "line"))


def groups(steps: Iterable[Step]) -> list[Group]:
    """The steps by warps that did the same, folded, in the order of launches."""
    taken: dict[tuple[int, str, int], list[Step]] = {}
    for step in steps:
        taken.setdefault((step["launch"], step["entry"], step["warp"]), []).append(step)
    warps: dict[tuple, list[int]] = {}
    for (launch, entry, warp), mine in sorted(taken.items()):
        warps.setdefault((launch, entry, tuple(map(_same, mine))), []).append(warp)
    launches: dict[tuple, list[int]] = {}
    for (launch, entry, same), which in warps.items():
        launches.setdefault((entry, tuple(which), same), []).append(launch)
    return [Group(tuple(numbers), entry, which, tuple(folded(taken[numbers[0], entry, which[0]])))
            for (entry, which, _), numbers in launches.items()]


def folded(steps: list[Step]) -> list[Fold]:
    """Steps with repeats of one to `LONGEST` steps folded, the pattern that covers most first."""
    keys, out, at = [_same(step) for step in steps], [], 0
    while at < len(steps):
        best, covered = (1, 1), 1
        for length in range(1, LONGEST + 1):
            times = 1
            while keys[at + times * length: at + (times + 1) * length] == keys[at: at + length]:
                times += 1
            if times > 1 and times * length > covered:
                best, covered = (length, times), times * length
        length, times = best
        out.append(Fold(tuple(steps[at: at + length]), at, times))
        at += covered
    return out


def described(step: Step) -> str:
    """ "copied, global to shared 16,384 B · 128 mma"; what a step did not do is left out."""
    said = [f"{f'{words} ' if unit == 'B' else ''}{step[name]:,} {unit}"
            for name, (words, unit) in QUANTITIES.items() if step[name]]
    return " · ".join(said) or "nothing of these"


def ending(step: Step) -> str:
    """ "block barrier at flash.cu:71"; a warp that is done has no place."""
    if step["ended_by"] == "exit":
        return "exit"
    return f"{step['ended_by']} at {step['file'].rsplit('/', 1)[-1]}:{step['line']}"


def numbered(fold: Fold) -> str:
    """ "step 3", or "steps 1 to 14" over all repeats."""
    last = fold.first + fold.times * len(fold.pattern) - 1
    return f"step {fold.first}" if last == fold.first else f"steps {fold.first} to {last}"


def named(thing: str, which: tuple[int, ...]) -> str:
    """ "warp 2", "warps 0 to 3", "launches 0, 3 and 6"."""
    if len(which) == 1:
        return f"{thing} {which[0]}"
    things = thing + ("es" if thing.endswith("ch") else "s")
    if len(which) > 2 and which == tuple(range(which[0], which[-1] + 1)):
        return f"{things} {which[0]} to {which[-1]}"
    return f"{things} {', '.join(map(str, which[:-1]))} and {which[-1]}"


def lines(steps: Iterable[Step]) -> list[str]:
    """The timeline as text: a heading for each launch and group of warps, then a line a step or fold."""
    made = []
    for group in groups(steps):
        each = ", each" if len(group.warps) > 1 else ""
        made.append(f"{named('launch', group.launches)}, {group.entry}, {named('warp', group.warps)}{each}")
        for fold in group.folds:
            times = f" ×{fold.times}" if fold.times > 1 else ""
            made.append(f"  {numbered(fold)}{times}" + (":" if len(fold.pattern) > 1 else
                        f": {described(fold.pattern[0])} → {ending(fold.pattern[0])}"))
            if len(fold.pattern) > 1:
                made += [f"    {described(step)} → {ending(step)}" for step in fold.pattern]
    return made


# --- the chart


def chart(steps: Iterable[Step], launch: int) -> alt.VConcatChart | None:
    """One launch: a panel a quantity, a row a warp, a column a step; darker is nearer the panel's largest.

    The last panel says what ended each step.
    """
    mine = [step for step in steps if step["launch"] == launch]
    present = [name for name in QUANTITIES if any(step[name] for step in mine)]
    if not present:
        return None
    data = alt.InlineData(values=[{"warp": step["warp"], "step": step["step"], "end": ending(step),
                                   **{name: step[name] for name in present}} for step in mine])
    wide = min(64, max(6, 900 // (1 + max(step["step"] for step in mine))))
    panels = [_panel(data, name, max(step[name] for step in mine), wide) for name in present]
    return alt.vconcat(*panels, _ends(data, mine, wide), spacing=10).resolve_scale(
        color="independent")


def _grid(chart, wide: int, words: str, last: bool = False):
    """Warps by steps; only the last panel has the steps' numbers, which hold for all."""
    flat = {"domain": False, "ticks": False, "grid": False}
    x = alt.Axis(**flat, labelAngle=0, labelOverlap=True, labels=last)
    return chart.properties(
        width=alt.Step(wide), height=alt.Step(20),
        title=alt.TitleParams(words, anchor="start", fontSize=12, offset=4),
    ).encode(
        x=alt.X("step:O", title="step" if last else None, axis=x),
        y=alt.Y("warp:O", title="warp", axis=alt.Axis(**flat)),
    )


def _panel(data: alt.InlineData, name: str, top: int, wide: int) -> alt.LayerChart:
    """A quantity's steps; numbers are written where there is room."""
    words, base = ", ".join(QUANTITIES[name]), alt.Chart()
    tell = [alt.Tooltip("warp:O"), alt.Tooltip("step:O"), alt.Tooltip(f"{name}:Q", title=words, format=","),
            alt.Tooltip("end:N", title="ended by")]
    # NOTE: from pale to dark on any page, light or dark, so that the numbers can be read in every cell.
    shade = alt.Color(f"{name}:Q", scale=alt.Scale(domain=[0, top], range=[PALE, BLUE]), legend=None)
    layers = [base.mark_rect().encode(color=shade, tooltip=tell)]
    if wide >= 44:
        ink = alt.condition(f"datum.{name} > {0.6 * top}", alt.value("white"), alt.value(INK))
        layers.append(base.transform_calculate(short=SHORT.replace("AMOUNT", f"datum.{name}"))
                      .mark_text(fontSize=11).encode(text="short:N", color=ink))
    return _grid(alt.layer(*layers, data=data), wide, words)


def _ends(data: alt.InlineData, mine: list[Step], wide: int) -> alt.Chart:
    """What ended each step, a colour a place."""
    places = list(dict.fromkeys(ending(step) for step in mine))
    scale = alt.Scale(domain=places, range=[ENDS[i % len(ENDS)] for i in range(len(places))])
    legend = alt.Legend(title="ended by", orient="bottom", direction="vertical", symbolType="square",
                        symbolLimit=0, labelLimit=0)
    return _grid(alt.Chart(data).mark_rect(opacity=0.8), wide, "what ended the step", last=True).encode(
        color=alt.Color("end:N", scale=scale, legend=legend),
        tooltip=[alt.Tooltip("warp:O"), alt.Tooltip("step:O"), alt.Tooltip("end:N", title="ended by")])


def alike(steps: Iterable[Step]) -> dict[int, tuple[int, ...]]:
    """The first of the launches in which all warps did the same -> all of them."""
    seen: dict[tuple, list[int]] = {}
    taken: dict[int, list[tuple]] = {}
    for step in steps:
        taken.setdefault(step["launch"], []).append((step["entry"], step["warp"], step["step"], *_same(step)))
    for launch, mine in taken.items():
        seen.setdefault(tuple(mine), []).append(launch)
    return {launches[0]: tuple(launches) for launches in seen.values()}


def whole(steps: Iterable[Step], title: str) -> alt.VConcatChart:
    """Every launch of the timeline, one below the other; of those that did the same, the first."""
    steps, parts = list(steps), []
    for launch, launches in alike(steps).items():
        drawn = chart(steps, launch)
        if drawn is not None:
            entry = next(step["entry"] for step in steps if step["launch"] == launch)
            words = f"{named('launch', launches)}, {entry}"
            parts.append(drawn.properties(title=alt.TitleParams(words, anchor="start", fontSize=15)))
    words = alt.TitleParams(title, anchor="start", fontSize=17)
    return alt.vconcat(*parts, spacing=30).properties(title=words)


def page(drawn: alt.VConcatChart, title: str, text: list[str]) -> str:
    """The chart as an HTML page; its scripts come from the network, and the text below needs none."""
    name, lines_of_text = html.escape(title), html.escape("\n".join(text))
    head = f"<head>\n<title>{name}</title>\n<style>body {{ font-family: sans-serif; margin: 2em; }} "
    head += "pre { white-space: pre-wrap; }</style>"
    below = (f"<h2>As text: {name}</h2><pre>{lines_of_text}</pre>"
             "<p>The chart loads Vega-Lite from the network; without it there is only the text.</p>\n</body>")
    return drawn.to_html().replace("<head>", head, 1).replace("</body>", below, 1)
