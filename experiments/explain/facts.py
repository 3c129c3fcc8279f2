"""What an explanation says: pure questions to a document, for the terminal and for the dashboard.

Imports no kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

# Which of the machine's accesses move bytes of what, and which order threads.
LOADS, STORES = ("global load", "global copy", "bulk load"), ("global store", "bulk store")
GLOBAL = (*LOADS, *STORES, "global atomic")
SHARED = ("shared load", "shared store", "shared copy", "shared atomic", "ldmatrix", "stmatrix", "wgmma")
BARRIERS = ("warp barrier", "block barrier", "named barrier", "cluster barrier", "mbarrier arrive",
            "mbarrier wait", "fence", "proxy fence")
SUMMED = ("instructions", "lanes", "bytes", "sectors", "wavefronts", "conflicts")
FULL = "B a sector"
FULL_MEANS = ("32 where every byte of the sectors touched was asked for once, more where lanes ask for the "
              "same bytes, less where bytes go unused or a copy's sectors are split in shared memory")

Site = Mapping[str, Any]


def sentences(document: Mapping[str, Any]) -> list[str]:
    """Whether counts and closed forms agree, the arithmetic intensity, and whether the result is right.

    A kernel whose accesses to shared memory race has no document.
    """
    equal, found, said = all(row["equal"] for row in document["totals"]), document["intensity"], []
    said.append("What it requested is what its cost says, to the byte." if equal else
                "What it requested is NOT what its cost says: one of the two is wrong.")
    if found["flops"] and found["flops_per_byte"] is not None:
        said.append(f"Arithmetic intensity: {found['flops']:,} useful flop / {found['bytes']:,} B = "
                    f"{found['flops_per_byte']:.3g} flop/B.")
    if found["useful_share"] is not None:
        said.append(f"mma.sync did {found['mma_flops']:,} flop, {found['useful_share']:.0%} of them useful.")
    verdict = document["verdict"]
    said.append("The result is right." if verdict["ok"] else f"The result is WRONG: {verdict['message']}.")
    if any(launch["smem_bytes"] for launch in document["plan"]["launches"]):
        said.append(f"No race in shared memory was found ({document['schedule']}).")
    return said


def merged(sites: Iterable[Site], accesses: Iterable[str]) -> list[dict[str, Any]]:
    """Sites with one of these accesses, summed over launches of the same entry, in the source's order."""
    found: dict[tuple, dict[str, Any]] = {}
    for site in sites:
        if site["access"] not in accesses:
            continue
        key = (site["entry"], site["file"], site["line"], site["column"], site["access"])
        if key not in found:
            found[key] = dict(site)
        else:
            for name in SUMMED:
                found[key][name] += site[name]
    entries = list(dict.fromkeys(site["entry"] for site in found.values()))
    return sorted(found.values(),
                  key=lambda site: (entries.index(site["entry"]), site["file"], site["line"], site["column"]))


def source_line(document: Mapping[str, Any], site: Site) -> str:
    """The text of a site's line; empty where its file is not in the document."""
    lines = document["files"].get(site["file"], "").splitlines()
    return lines[site["line"] - 1].strip() if 0 < site["line"] <= len(lines) else ""


def place(site: Site, column: bool = False) -> str:
    """ "flash.cu:71", or with the column "flash.cu:71:5"."""
    return f"{site['file'].rsplit('/', 1)[-1]}:{site['line']}" + (f":{site['column']}" if column else "")


def places(sites: list[Any]) -> list[str]:
    """Where each site is; its column too where its line has several with that access."""
    count = Counter((place(site), site["access"]) for site in sites)
    return [place(site, count[place(site), site["access"]] > 1) for site in sites]


def cell(site: Site, name: str) -> str:
    """A count with its thousands apart; bytes a sector with one digit."""
    if name == FULL:
        return f"{site['bytes'] / site['sectors']:.1f}".removesuffix(".0") if site["sectors"] else ""
    return f"{site[name]:,}"


def notes(part: Mapping[str, Any]) -> list[str]:
    """Which members of a launch's shared memory share their bytes, and how many bytes belong to none."""
    said, covered, end = [], 0, 0
    members = part["members"]
    for i, first in enumerate(members):
        for other in members[i + 1:]:
            if other["offset"] < first["offset"] + first["size"]:
                said.append(f"{first['name']} and {other['name']} share bytes (a union): a call site that "
                            "touches them stands at both.")
    for member in members:
        covered += max(0, member["offset"] + member["size"] - max(end, member["offset"]))
        end = max(end, member["offset"] + member["size"])
    if part["bytes"] > covered:
        said.append(f"{part['bytes'] - covered:,} B belong to no member (padding).")
    return said
