"""What stored rows say about a shape that may not be among them: times of one card, interpolated log-log.

A *candidate* is a kernel with its constants and, for decode, its page size. Its rows of one head layout are
cells of a grid over batch B and context N. Between cells the logarithm of the time per unit of work is drawn
as straight lines over log B and log N: first along B in the nearest contexts below and above, then along N.
The work of a shape, the same for every kernel, is its visible (query, key) pairs. Up to `REACH` times beyond
the outermost cell there is an answer, too: from the nearest cell the time moves as that of the candidate most
alike there, of those that have cells around both. Where none has, above the largest cell its time per work is
kept, as of a card that is full; below the smallest the line is continued, as overheads begin to count. Rows
of another card, another head layout or another mask never enter.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cuattn.kernels.shapes import AttentionShape
from experiments import store
from experiments.catalog import Entry, current_hashes
from experiments.suite import SCORES

REACH = 4  # a cell speaks for at most so many times its batch or context
FAMILIES = ("prefill", "decode")
EXTENDED = "extended"
COLUMNS = ("run_id", "case_id", "started_at", "device", "kernel", "family", "model", "constants", "b", "h",
           "hkv", "n", "d", "dtype", "causal", "page_size", "page_order", "measured_time_us")


@dataclass(frozen=True)
class Layout:
    """What rows must share to be compared: family, heads, head dim, dtype, mask (None for decode)."""

    family: str
    h: int
    hkv: int
    d: int
    dtype: str
    causal: bool | None = None

    def work(self, b: int, n: int) -> int:
        """(query, key) pairs of a head that B sequences of N keys see."""
        if self.family == "decode":
            return b * n
        return b * AttentionShape(1, 1, 1, n, n, self.d, self.dtype, bool(self.causal)).visible


@dataclass(frozen=True, order=True)
class Candidate:
    """A kernel, the constants a case sets as JSON (empty: its plan's own), its page (0 for prefill)."""

    kernel: str
    constants: str = ""
    page: int = 0

    def settings(self) -> dict[str, Any]:
        """The constants as a plan takes them."""
        return json.loads(self.constants) if self.constants else {}


@dataclass(frozen=True)
class Cell:
    """A measured point of one candidate: B, N, its time, and the rows (run, case id) behind it."""

    b: int
    n: int
    time_us: float
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Estimate:
    """A candidate's time at a shape.

    Attributes
    ----------
    time_us : float
    how : {"measured", "interpolated", "extended"}
        The very cell; between cells; beyond the outermost one.
    cells : tuple of Cell
        Those it rests on.
    """

    time_us: float
    how: str
    cells: tuple[Cell, ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """(run, case id) of every row it rests on, each once."""
        return list(dict.fromkeys(row for cell in self.cells for row in cell.rows))


Grid = dict[Candidate, dict[tuple[int, int], Cell]]


def trusted(frame: pd.DataFrame, known: Mapping[str, Entry]) -> pd.DataFrame:
    """The rows one may choose by.

    Timed on a GPU and found right, by a kernel known here whose source is today's; square prefill or decode
    of one query and equal lengths, with a cold cache, plain keys and plain scores, as plain launches in the default
    layout.

    Parameters
    ----------
    frame : pandas.DataFrame
        As `store.read_runs` gives it.
    known : mapping of name to Entry

    Returns
    -------
    pandas.DataFrame
        With `COLUMNS` alone.
    """
    rows = frame[(frame["status"] == "ok").fillna(False) & (frame["machine"] == "gpu").fillna(False)]
    rows = rows[rows["family"].isin(FAMILIES) & rows["kernel"].isin(list(known))]
    rows = rows[(rows["measured_time_us"] > 0).fillna(False) & rows["n"].notna() & (rows["n"] > 0)]
    rows = rows[(rows["cache_mode"] == "cold").fillna(False) & (rows["mode"] == "launch").fillna(False)]
    square = (rows["family"] == "prefill") & (rows["m"] == rows["n"]) & (rows["layout"] == "bshd")
    square &= rows["key_order"].isna()
    uniform = (rows["family"] == "decode") & (rows["lengths_source"] == "uniform")
    uniform &= rows["kv_dtype"].isna() & rows["prefix"].isna() & (rows["m"] == 1)
    rows = rows[(square.fillna(False) | uniform.fillna(False)) & rows[list(SCORES)].isna().all(axis=1)]
    peer = rows["kernel"].isin([name for name, entry in known.items() if entry.row is None])
    rows = rows[peer | rows["source_hash"].notna()]
    return rows.loc[~store.stale(rows, hashes(known)), list(COLUMNS)]


def set_aside(frame: pd.DataFrame, known: Mapping[str, Entry], device: str) -> Counter[str]:
    """How many prefill and decode rows of that card nothing is chosen by: their statuses, and "stale"."""
    rows = frame[(frame["device"] == device).fillna(False) & frame["family"].isin(FAMILIES)]
    words = rows["status"].astype(str)
    words[(words == "ok") & store.stale(rows, hashes(known))] = "stale"
    return Counter(word for word in words if word != "ok")


def hashes(known: Mapping[str, Entry]) -> dict[str, str]:
    """As `current_hashes`, with the kernels given by path."""
    from cuattn.compile import source_hash

    found = current_hashes()
    for name, entry in known.items():
        if entry.path:
            found[name] = "+".join(filter(None, (found.get(name), source_hash(entry.row.file))))
    return found


def layout_of(row: Mapping[str, Any]) -> Layout:
    """The layout of a row."""
    causal = bool(row["causal"]) if row["family"] == "prefill" else None
    return Layout(row["family"], int(row["h"]), int(row["hkv"]), int(row["d"]), row["dtype"], causal)


def grids(rows: pd.DataFrame) -> dict[Layout, Grid]:
    """The cells of every candidate, by layout.

    Of several rows of a cell the newest counts; where pages were laid out in several orders, the slowest of
    them. The rows are one card's.

    Raises
    ------
    ValueError
        Rows of several devices.
    """
    if rows["device"].nunique() > 1:
        raise ValueError("rows: expected those of one device; times of different cards do not compare")
    newest: dict[tuple, dict[str, Any]] = {}
    for row in rows.sort_values("started_at", kind="stable").to_dict("records"):
        order = row["page_order"] if row["family"] == "decode" else ""
        newest[layout_of(row), candidate_of(row), int(row["b"]), int(row["n"]), order] = row
    found: dict[Layout, Grid] = {}
    for (layout, candidate, b, n, _), row in newest.items():
        cells = found.setdefault(layout, {}).setdefault(candidate, {})
        time_us, source = float(row["measured_time_us"]), ((row["run_id"], row["case_id"]),)
        if (b, n) in cells:
            time_us, source = max(time_us, cells[b, n].time_us), cells[b, n].rows + source
        cells[b, n] = Cell(b, n, time_us, source)
    return found


def candidate_of(row: Mapping[str, Any]) -> Candidate:
    """The candidate a row is about."""
    constants = row["constants"] if isinstance(row["constants"], str) and row["constants"] != "{}" else ""
    return Candidate(row["kernel"], constants, int(row["page_size"]) if row["family"] == "decode" else 0)


def estimates(layout: Layout, grid: Grid, b: int, n: int) -> dict[Candidate, Estimate]:
    """The time of B sequences of N keys by each candidate of a layout that has cells near enough."""
    own = {one: found for one, cells in grid.items() if (found := estimate(layout, cells.values(), b, n))}
    sure = {one: found for one, found in own.items() if found.how != EXTENDED}
    return {one: sure.get(one) or _moved(layout, grid, sure, far, b, n) for one, far in own.items()}


def _moved(
    layout: Layout, grid: Grid, sure: Mapping[Candidate, Estimate], far: Estimate, b: int, n: int
) -> Estimate:
    """An extended time, moved from its nearest cell as that of the sure candidate most alike there moves."""
    near = min(far.cells, key=lambda cell: abs(math.log(cell.b / b)) + abs(math.log(cell.n / n)))
    there = {one: estimate(layout, grid[one].values(), near.b, near.n) for one in sure}
    there = {one: found for one, found in there.items() if found is not None and found.how != EXTENDED}
    if not there:
        return far
    alike = min(there, key=lambda one: (abs(math.log(there[one].time_us / near.time_us)), one))
    time_us = near.time_us * sure[alike].time_us / there[alike].time_us
    return Estimate(time_us, EXTENDED, (near, *sure[alike].cells, *there[alike].cells))


def estimate(layout: Layout, cells: Iterable[Cell], b: int, n: int) -> Estimate | None:
    """The time of B sequences of N keys, from a candidate's cells alone; None where they are too far away."""
    columns: dict[int, dict[int, Cell]] = {}
    for cell in cells:
        columns.setdefault(cell.n, {})[cell.b] = cell
    along_b = {n0: found for n0, column in columns.items() if (found := bracket(b, sorted(column)))}
    sure = sorted(n0 for n0 in along_b if within(b, columns[n0]))
    inside = within(n, sure)
    along_n = bracket(n, sure if inside else sorted(along_b))
    used = [(share * part, columns[n0][b0]) for share, n0 in along_n for part, b0 in along_b[n0]]
    if not used:
        return None
    if len(used) == 1 and (used[0][1].b, used[0][1].n) == (b, n):
        return Estimate(used[0][1].time_us, "measured", (used[0][1],))
    per_work = sum(share * math.log(cell.time_us / layout.work(cell.b, cell.n)) for share, cell in used)
    how = "interpolated" if inside else EXTENDED
    return Estimate(math.exp(per_work) * layout.work(b, n), how, tuple(cell for _, cell in used))


def within(x: int, points: Collection[int]) -> bool:
    """Whether x lies among the points, or is one."""
    return bool(points) and min(points) <= x <= max(points)


def bracket(x: int, points: list[int]) -> list[tuple[float, int]]:
    """(share, point) of the ascending points that speak for x; none where the nearest is out of reach.

    The point itself; its two neighbours, by their distances on the scale of logarithms; above the largest
    that one alone; below the smallest the line through it and the next that is at least twice as large.
    """
    at = bisect_left(points, x)
    if at < len(points) and points[at] == x:
        return [(1.0, x)]
    if not points or not points[0] <= x * REACH or not x <= points[-1] * REACH:
        return []
    if at == len(points):
        return [(1.0, points[-1])]
    low, high = points[max(at - 1, 0)], points[at]
    if at == 0:
        high = next((point for point in points if point >= 2 * low), low)
    if low == high:
        return [(1.0, low)]
    share = math.log(x / low) / math.log(high / low)
    return [(1 - share, low), (share, high)]
