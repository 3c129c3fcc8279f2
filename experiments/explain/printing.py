"""An explanation in the terminal: tables of a document, in the order in which one reads a kernel."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.explain import timelines
from experiments.explain.facts import (
    FULL,
    FULL_MEANS,
    GLOBAL,
    SHARED,
    cell,
    merged,
    notes,
    place,
    places,
    sentences,
    source_line,
)
from experiments.tables import new_table

SOURCE = 84  # columns of a source line that are shown


def show(console: Console, document: Mapping[str, Any]) -> None:
    """Prints a whole document."""
    console.print(f"[bold]{escape(document['kernel'])}[/]  {escape(document['title'])}", highlight=False)
    console.print(f"{escape(document['teaches'])}\n", highlight=False)
    said = escape("\n".join(sentences(document))) + "\n"
    for part in (*plan(document), totals(document), said, *call_sites(document), *shared_memory(document)):
        console.print(part, highlight=False)
    console.print(f"[bold]Timeline of block {document['timeline']['block']}[/], steps between barriers",
                  highlight=False)
    console.print("what happened in which order; no time is modelled", style="dim")
    for line in timelines.lines(document["timeline"]["steps"]) or ["no launch has such a block"]:
        console.print(escape(line), highlight=False, soft_wrap=True)


def plan(document: Mapping[str, Any]) -> Iterable[Table | str]:
    """One row a launch, and what was chosen for all of them."""
    decided = document["plan"]
    table = new_table("Plan")
    for head in ("launch", "entry", "file", "grid", "threads", "shared\nB", "compiled with"):
        table.add_column(head, justify="right" if head in ("launch", "threads", "shared\nB") else "left",
                         overflow="fold")
    for launch in decided["launches"]:
        compiled = " ".join(f"{name}={value}" for name, value in launch["constants"].items())
        table.add_row(str(launch["launch"]), escape(launch["entry"]), escape(launch["file"]),
                      " × ".join(map(str, launch["grid"])), str(launch["block"]),
                      f"{launch['smem_bytes']:,}", escape(compiled))
    yield table if decided["launches"] else "No launch: there is nothing to do.\n"
    said = [f"{name}={value}" for name, value in decided["constants"].items()]
    said += [f"scratch {decided['scratch_bytes']:,} B"] if decided["scratch_bytes"] else []
    if said:
        yield f"Chosen: {escape(', '.join(said))}\n"


def totals(document: Mapping[str, Any]) -> Table:
    """Counted beside closed forms; the closed forms know no barriers."""
    table = new_table("Totals: counted beside closed form")
    for head in ("what", "counted", "closed form", ""):
        table.add_column(head, justify="right" if head in ("counted", "closed form") else "left")
    for row in document["totals"]:
        mark = "[green]equal[/]" if row["equal"] else "[red]different[/]"
        table.add_row(row["what"].replace("_", " "), f"{row['counted']:,}", f"{row['closed_form']:,}", mark)
    for name in ("barriers", "collectives", "atomics", "mma", "wgmma"):
        if document["counters"].get(name):
            table.add_row(name, f"{document['counters'][name]:,}", "", "")
    return table


def call_sites(document: Mapping[str, Any]) -> Iterable[Table | str]:
    """Tables of what each call site did to global memory, to shared memory, and else."""
    others = [name for name in dict.fromkeys(site["access"] for site in document["sites"])
              if name not in (*GLOBAL, *SHARED)]
    kinds = (
        ("Global memory by call site", GLOBAL, ("instructions", "bytes", "sectors", FULL)),
        ("Shared memory by call site", SHARED, ("instructions", "bytes", "wavefronts", "conflicts")),
        ("Barriers, and what else warps did, by call site", others, ("instructions", "lanes")),
    )
    for title, accesses, columns in kinds:
        if sites := merged(document["sites"], accesses):
            yield _site_table(document, title, sites, columns)
    if merged(document["sites"], GLOBAL):
        yield f"{FULL}: {FULL_MEANS}.\n"


def _site_table(document: Mapping[str, Any], title: str, sites: list[dict[str, Any]], columns) -> Table:
    """One row a call site."""
    table = new_table(title)
    for head in ("where", "access"):
        table.add_column(head, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for where, site in zip(places(sites), sites):
        table.add_row(escape(where), site["access"], *(cell(site, name) for name in columns),
                      escape(textwrap.shorten(source_line(document, site), SOURCE, placeholder=" …")))
    return table


def shared_memory(document: Mapping[str, Any]) -> Iterable[Table | str]:
    """One map a launch; equal maps of launches of one entry once."""
    shown = set()
    for part in document["shared"]:
        rows = [(m["name"], m["type"], m["offset"], m["size"], m["count"],
                 *(", ".join(dict.fromkeys(place(document["sites"][i]) for i in m[name]))
                   for name in ("written_by", "read_by"))) for m in part["members"]]
        key = (part["entry"], part["bytes"], part["why"], tuple(rows))
        if key in shown:
            continue
        shown.add(key)
        if not rows:
            yield f"Shared memory of {escape(part['entry'])}: {escape(part['why'])}.\n"
            continue
        table = new_table(f"Shared memory of {part['entry']}: struct {part['struct']}, {part['bytes']:,} B")
        for head in ("member", "type", "offset\nB", "size\nB", "elements", "written at", "read at"):
            number = head in ("offset\nB", "size\nB", "elements")
            table.add_column(head, justify="right" if number else "left", no_wrap=number, overflow="fold")
        for name, kind, offset, size, count, written, read in rows:
            table.add_row(escape(name), escape(kind), f"{offset:,}", f"{size:,}", str(count), escape(written),
                          escape(read))
        yield table
        if said := notes(part):
            yield escape("\n".join(said)) + "\n"
