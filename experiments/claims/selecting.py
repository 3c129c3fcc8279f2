"""Which rows a test is about: those that may be judged by, chosen by filters, set in pairs and curves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from experiments import store
from experiments.catalog import PEERS
from experiments.schema import BY_NAME, NAMES
from experiments.suite import SCORES

STALE = "stale: its kernel has changed since"
PICKS = {"min": min, "max": max}
# What must be equal for two rows to have one shape; `kernel` is among them where no side names one.
SHAPE = ("machine", "device", "kernel", "b", "h", "hkv", "m", "n", "prefix", "d", "dtype", "causal", *SCORES,
         "page_size", "page_order", "key_order", "kv_dtype", "layout", "lengths_source", "cache_mode", "mode",
         "bytes")
# Taken where a filter does not name them; rows without the column pass.
USUAL = {"cache_mode": "cold", "mode": "launch", "layout": "bshd", "lengths_source": "uniform",
         "key_order": None, "kv_dtype": None, "prefix": None, **dict.fromkeys(SCORES)}
NOT_COLUMNS = ("pick", "plain")
# Names of constants that a column has as well, or that follow from one: what constant stands behind them.
CONSTANT_OF = {"layout_of_scores": "layout", "chunks": "chunk"}


@dataclass(frozen=True, eq=False)
class Row:
    """A stored row: its columns (None where null), its constants as set and as used, why it cannot judge.

    `index` is its place in the frame.
    """

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    used: Mapping[str, Any]
    why: str
    index: int

    def get(self, name: str) -> Any:
        """A column, `chunks`, or a constant as used; None where the row has none."""
        if name == "chunks":
            chunk, n = self.used.get("chunk"), self.values["n"]
            return -(-n // chunk) if chunk and n else None
        if name in CONSTANT_OF:
            return self.used.get(CONSTANT_OF[name])
        return self.values[name] if name in BY_NAME else self.used.get(name)

    @property
    def identity(self) -> tuple:
        """What two rows share of which the newer counts."""
        return tuple(self.get(name) for name in SHAPE), _frozen(self.used), _frozen(self.given)

    @property
    def device(self) -> str:
        """Its device's name as one reads it."""
        name = self.values["device"]
        return "CPU machine" if name == "cpu" else str(name or "unknown device")

    @property
    def words(self) -> str:
        """The kernel with the constants the case sets."""
        return " ".join([str(self.get("kernel")), *(f"{k}={v}" for k, v in sorted(self.given.items()))])


def rows_of(frame: pd.DataFrame, hashes: Mapping[str, str]) -> list[Row]:
    """Every row, oldest first.

    Parameters
    ----------
    frame : pandas.DataFrame
        As `store.read_runs` gives it.
    hashes : mapping
        Kernel → its hashes today, as `catalog.current_hashes` gives them; empty where they are not known, and
        then no row is stale.
    """
    frame = frame.assign(stale=store.stale(frame, hashes))
    frame = frame.sort_values("started_at", kind="stable", na_position="first")
    return [_row(record, index) for index, record in zip(frame.index, frame.to_dict("records"))]


def _row(record: dict[str, Any], index: int) -> Row:
    values = {name: _plain(record[name]) for name in NAMES}
    given = _constants(values["constants"])
    used = {**given, **_constants(values["constants_used"])}
    used = {name: values["dtype"] if value == "input" else value for name, value in used.items()}
    return Row(values, given, used, _why(values, record["stale"]), index)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, np.ndarray)):
        return value
    return None if value is None or value is pd.NaT or pd.isna(value) else value


def _constants(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _why(values: Mapping[str, Any], stale: bool) -> str:
    """Why nothing may be judged by a row; empty where it may."""
    if values["status"] != "ok":
        return f"ended {values['status']}"
    if stale:
        return STALE
    if values["source_hash"] is None and values["kernel"] not in PEERS:
        return "no source hash: whether its kernel has changed since is unknown"
    return ""


def _frozen(constants: Mapping[str, Any]) -> str:
    return json.dumps(constants, sort_keys=True, default=str)


def matching(rows: Iterable[Row], *filters: Mapping[str, Any]) -> list[Row]:
    """The rows that meet every filter, and what is usual where no filter names it."""
    named = {name for one in filters for name in one}
    usual = {name: (None, value) for name, value in USUAL.items() if name not in named}
    tests = [test for one in (*filters, usual) for test in one.items() if test[0] != "pick"]
    return [row for row in rows if all(_meets(row, name, wanted) for name, wanted in tests)]


def _meets(row: Row, name: str, wanted: Any) -> bool:
    if name == "plain":
        return wanted is not bool(row.given)
    value = row.get(name)
    if isinstance(wanted, Mapping):
        return value is not None and _in_range(value, wanted)
    return value in wanted if isinstance(wanted, (list, tuple)) else value == wanted


def _in_range(value: Any, wanted: Mapping[str, Any]) -> bool:
    tests = {"min": lambda limit: value >= limit, "max": lambda limit: value <= limit,
             "multiple": lambda of: value % of == 0, "no_multiple": lambda of: value % of != 0}
    return all(tests[name](limit) for name, limit in wanted.items())


def newest(rows: Iterable[Row]) -> list[Row]:
    """Of rows of one shape, kernel and constants the last; the rows come oldest first."""
    return list({row.identity: row for row in rows}.values())


def picked(rows: list[Row], pick: str | None, metric: Callable[[Row], float]) -> list[Row]:
    """The row with the lowest or highest metric alone; all where nothing picks."""
    return [PICKS[pick](rows, key=metric)] if pick and rows else rows


def grouped(rows: Iterable[Row], key: Callable[[Row], tuple]) -> dict[tuple, list[Row]]:
    """The rows by key, in their order."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def pairs(
    of_rows: Iterable[Row], to_rows: Iterable[Row], of: Mapping[str, Any], to: Mapping[str, Any],
    same: tuple[str, ...], metric: Callable[[Row], float],
) -> list[tuple[Row, Row]]:
    """Rows of either side at equal shape; see `claims.toml` for what must be equal beside.

    Parameters
    ----------
    of_rows, to_rows : rows that match, the newest of each
    of, to : mapping
        The sides' filters, with `pick`.
    same : tuple of str
        Constants that must be equal, too.
    metric : callable
        What `pick` compares.
    """
    named = {*of, *to} - set(NOT_COLUMNS)
    but = {CONSTANT_OF.get(name, name) for name in named}

    def key(row: Row) -> tuple:
        return tuple(row.get(name) for name in (*SHAPE, *same) if name not in named)

    def variant(row: Row) -> str:
        # Where the sides name kernels, each picks among all constants; else among those a variant may have.
        return "" if "kernel" in named else _frozen({k: row.used[k] for k in {*row.given} - but})

    others, found = grouped(to_rows, key), []
    for place, mine in grouped(of_rows, key).items():
        for group in grouped(mine, lambda row: (variant(row),)).values() if "pick" in of else [mine]:
            for a in picked(group, of.get("pick"), metric):
                pool = [b for b in others.get(place, []) if _alike(a, b, but)]
                if set(pool) <= set(mine):
                    continue  # the best of nothing but a side's own rows is no comparison
                best = picked(pool, to.get("pick"), metric)
                found += [(a, b) for b in best if "pick" in to or a is not b]
    return found


def _alike(a: Row, b: Row, but: set[str]) -> bool:
    """Whether two kernels differ, or one's constants that either case sets are used equal, but for some.

    What both plans chose themselves may differ: it follows from the constants that do.
    """
    if a.get("kernel") != b.get("kernel"):
        return True
    return all(a.used.get(name) == b.used.get(name) for name in {*a.given, *b.given} - but)


def curves(
    rows: Iterable[Row], axis: str, pick: str | None, metric: Callable[[Row], float]
) -> list[list[Row]]:
    """Rows along an axis, ascending, all else of their shape and (unless something picks) constants equal."""

    def key(row: Row) -> tuple:
        dropped = {axis} | ({"m"} if axis == "n" and row.get("m") == row.get("n") else set())
        given = {k: v for k, v in row.given.items() if k != CONSTANT_OF.get(axis, axis)}
        shape = tuple(row.get(name) for name in SHAPE if name not in dropped)
        return shape, "m" in dropped, "" if pick else _frozen(given)

    found = []
    for mine in grouped(rows, key).values():
        at = grouped((row for row in mine if row.get(axis) is not None), lambda row: (row.get(axis),))
        found.append([picked(at[place], pick, metric)[-1] for place in sorted(at)])
    return found
