"""A kernel's source with what its lines did beside them, as HTML. Pure: a document in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from experiments.explain.facts import BARRIERS, GLOBAL, SHARED

# Heading, what is summed, over which accesses, and the colour of its bar.
COLUMNS = (
    ("global, B", "bytes", GLOBAL, "86,180,233"),
    ("shared, B", "bytes", SHARED, "0,158,115"),
    ("conflicts", "conflicts", SHARED, "213,94,0"),
    ("mma", "instructions", ("mma",), "204,121,167"),
    ("barriers", "instructions", BARRIERS, "230,159,0"),
)
STYLE = """<style>
.source-wrap { overflow-x: auto; }
.source { border-collapse: collapse; font: 12px/1.55 ui-monospace, SFMono-Regular, Menlo, monospace; }
.source th, .source td { padding: 0 .4rem; white-space: pre; text-align: right; border: 0; }
.source th { font-weight: 600; position: sticky; top: 0; }
.source td.code, .source th.code { text-align: left; padding-left: 1rem; }
.source td.number, .source tr.quiet td.code { opacity: .6; }
.source caption { text-align: left; font-family: inherit; opacity: .75; padding-bottom: .4rem; }
</style>"""


def counts_by_line(document: Mapping[str, Any], file: str) -> dict[int, dict[str, int]]:
    """What each line of a file did, over all launches: heading -> sum. Idle lines are left out."""
    lines: dict[int, dict[str, int]] = {}
    for site in document["sites"]:
        if site["file"] != file:
            continue
        row = lines.setdefault(site["line"], dict.fromkeys((name for name, *_ in COLUMNS), 0))
        for name, what, accesses, _ in COLUMNS:
            if site["access"] in accesses:
                row[name] += site[what]
    return lines


def view(document: Mapping[str, Any], file: str, only_counted: bool = False) -> str:
    """The file as a table: a line's number, its counts with a bar as long as their share, and its text.

    `only_counted` leaves out the lines without a call site.
    """
    counts = counts_by_line(document, file)
    shown = [column for column in COLUMNS if any(row[column[0]] for row in counts.values())]
    top = {name: max(row[name] for row in counts.values()) for name, *_ in shown}
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name, *_ in shown)
    rows = []
    for number, text in enumerate(document["files"][file].splitlines(), 1):
        row = counts.get(number)
        if row is None and only_counted:
            continue
        cells = "".join(_cell(row[name] if row else 0, top[name], colour) for name, _, _, colour in shown)
        quiet = ' class="quiet"' if row is None else ""
        rows.append(f'<tr{quiet}><td class="number">{number}</td>{cells}'
                    f'<td class="code">{escape(text)}</td></tr>')
    caption = f"{escape(file)}: counted by line, all launches together; the bars compare lines"
    return (f'{STYLE}<div class="source-wrap"><table class="source"><caption>{caption}</caption><thead><tr>'
            f'<th scope="col">line</th>{head}<th scope="col" class="code">source</th></tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>")


def _cell(value: int, top: int, colour: str) -> str:
    """A count over a bar; the text keeps the page's colour, so that it reads on light and dark alike."""
    if not value:
        return "<td></td>"
    share = 100 * value / top
    bar = f"background:linear-gradient(to left,rgba({colour},.45) {share:.1f}%,transparent {share:.1f}%)"
    return f'<td style="{bar}">{value:,}</td>'
