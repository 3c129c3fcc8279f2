"""Search of a kernel's constants: the suite of trials, the judgement of its rows, and what is kept of it.

A trial is a case with constants from the row's `choices`; the plan's own choice is the trial without any. So
the ordinary runner measures, checks and journals them, and what the plan refuses is a row of its own.

A class of shapes (`cuattn.tuned.shape_class`) gets constants only if they are faster beyond doubt: the
interval of the ratio of medians, trial to default, lies below the margin on one of its shapes and does not
reach above it on any other. As the best of many trials is looked for, each interval has the confidence that
makes it hold for all of them together (Bonferroni). And as constants serve the whole class, they are tried at
both ends of it as well (`spread`); a class of which one shape alone was timed gets none.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from math import ceil, floor
from pathlib import Path
from typing import Any

from cuattn import tuned
from cuattn.compile import source_hash
from cuattn.kernels.base import Row
from experiments.ab.statistics import (
    CONFIDENCE,
    FASTER,
    Interval,
    geometric_mean,
    may_be_slower,
    ratio_of_medians,
    usable,
    verdict,
)
from experiments.costs import shape_of
from experiments.disk import write_atomic
from experiments.suite import SCORES, Suite, Sweep
from experiments.words import UserError

MARGIN = 0.02
REPEAT = {"min_samples": 30, "timeout_s": 0.5}  # enough samples for an interval of that confidence
CONTEXTS, BATCHES = [1024, 4096, 16384], [1, 16, 64]
MAX_TOKENS = 1 << 19
PLACE = ("b", "h", "hkv", "m", "n", "page_size", "page_order", "key_order", "layout", "seed", "cache_mode",
         "mode", "kv_dtype", *SCORES)


def trials(row: Row) -> list[dict[str, Any]]:
    """The plan's own choice first, then every combination of the row's `choices`.

    Raises
    ------
    UserError
        There is nothing to choose, or a choice of what is no constant.
    """
    if unknown := set(row.choices) - set(row.constants):
        raise UserError(f"tune: {row.name} has choices for '{min(unknown)}', which is none of its constants; "
                        "mend its ROW")
    if not row.choices:
        names = ", ".join(row.constants) or "none"
        raise UserError(f"tune: {row.name} names no choices for its constants (it has: {names}); add "
                        "`choices` to its ROW, as in cuattn/kernels/flash.py")
    combined = itertools.product(*row.choices.values())
    return [{}, *(dict(zip(row.choices, values)) for values in combined)]


def sweeps_of(suite: Suite, row: Row) -> list[Sweep]:
    """The suite's GPU sweeps of the kernel's family, whichever kernels they name, without shared prefixes.

    Classes of shapes know none, and their ends may be shorter.

    Raises
    ------
    UserError
        It has none.
    """
    from cuattn.kernels import ROWS
    from experiments.catalog import PEERS

    families = {name: known.family for name, known in ROWS.items()} | PEERS | {row.name: row.family}
    found = [replace(sweep, axes={name: values for name, values in sweep.axes.items() if name != "prefix"})
             for sweep in suite.gpu if families.get(sweep.kernels[0]) == row.family]
    if not found:
        raise UserError(f"--suite: {suite.name} has no sweep of {row.family} kernels for a GPU; name another")
    return found


def model_sweeps(model: str, row: Row) -> list[Sweep]:
    """Shapes of one model: prefill of one sequence with either mask, or decode of a few batches."""
    if row.family == "prefill":
        axes = {"model": [model], "n": CONTEXTS, "causal": [False, True]}
    else:
        axes = {"model": [model], "b": BATCHES, "n": CONTEXTS}
    return [Sweep(row.family, (row.name,), axes, limits={"max_tokens": MAX_TOKENS, "within_context": True})]


def spread(sweep: Sweep) -> list[Sweep]:
    """The sweep, and it again with B, M and N at the lower and at the upper ends of their classes.

    Both ends together are half the tokens, or twice as many: a limit on tokens gives way as far.
    """
    found = [sweep]
    for end, limit, factor in ((_low, "min_tokens", 0.5), (_high, "max_tokens", 2)):
        axes = {name: sorted({end(x) for x in values}) if name in ("b", "m", "n") else values
                for name, values in sweep.axes.items()}
        limits = {name: int(x * factor) if name == limit else x for name, x in sweep.limits.items()}
        if axes != sweep.axes:
            found.append(replace(sweep, axes=axes, limits=limits))
    return found


def _low(x: int) -> int:
    """The least number of x's class."""
    return ceil(2 ** (tuned.power(x) - 0.5)) if x else 0


def _high(x: int) -> int:
    """The largest."""
    return floor(2 ** (tuned.power(x) + 0.5)) if x else 0


def suite_text(row: Row, sweeps: Iterable[Sweep]) -> str:
    """The suite of trials, as TOML."""
    sets = ", ".join(_table(constants) for constants in trials(row))
    lines = [f'title = "Tuning {row.name}"', f'question = "Which constants of {row.name} are fastest here?"',
             "", "[repeat]", *(f"{name} = {value}" for name, value in REPEAT.items())]
    for i, sweep in enumerate(part for sweep in sweeps for part in spread(sweep)):
        name = f"gpu.{row.family}-{i}"
        axes = {axis: values for axis, values in sweep.axes.items() if axis not in ("mode", "cache_mode")}
        lines += ["", f"[{name}]", f'kernels = ["{row.name}"]']
        lines += [f"{axis} = {json.dumps(values)}" for axis, values in axes.items()]
        if sweep.limits:
            lines += ["", f"[{name}.limits]", *(f"{k} = {json.dumps(v)}" for k, v in sweep.limits.items())]
        lines += ["", f"[{name}.constants]", f"{row.name} = [{sets}]"]
    return "\n".join(lines) + "\n"


def _table(constants: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in constants.items()) + " }"


def write_suite(folder: Path, row: Row, sweeps: Iterable[Sweep]) -> Path:
    """That suite as a file, which `run` takes as well; its name holds a hash of what it says.

    Raises
    ------
    StoreError
    """
    text = suite_text(row, sweeps)
    path = folder / f"tune-{row.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"tune: {folder} cannot be made ({error.strerror}); go to another place") from error
    write_atomic(path, lambda hidden: hidden.write_text(text, encoding="utf-8"))
    return path


@dataclass(frozen=True)
class Found:
    """What the rows say of one class.

    Attributes
    ----------
    name : str
    shapes : int
        Shapes of the class with a right and timed default.
    constants : dict
        The best trial's, whether it may be kept or not; {} where no trial compares.
    ratio : float
        Its time over the default's: the geometric mean over the shapes; 1 where there is none.
    keep : bool
        Whether it is faster beyond doubt.
    rows : tuple of (run, case id)
        Of the default and the best trial.
    """

    name: str
    shapes: int
    constants: dict[str, Any]
    ratio: float
    keep: bool
    rows: tuple[tuple[str, str], ...] = ()

    @property
    def why(self) -> str:
        """Why nothing is kept, in a few words."""
        if not self.shapes:
            return "no result of its own choice"
        if not self.constants:
            return "no other result"
        return "one shape alone" if self.shapes == 1 else "no gain beyond doubt"

    @property
    def margin(self) -> float:
        """How much longer the default takes, relative to the tuned constants."""
        return 1 / self.ratio - 1


def judge(rows: Iterable[Mapping[str, Any]], row: Row, margin: float = MARGIN) -> list[Found]:
    """The best constants of every class, from one device's latest rows.

    Parameters
    ----------
    rows : iterable of mapping
        As `store.read_rows` gives them; only those that are ok, and of the kernel's present source, count.
    row : Row
    margin : float
        Differences up to it are none.
    """
    classes: dict[str, dict[tuple, dict[str, Mapping]]] = {}
    sets: set[str] = set()
    today = source_hash(row.file)
    for line in rows:
        constants = line["constants"] or "{}"
        sets.add(constants)
        timed = line["status"] == "ok" and usable(line["measured_samples_us"] or ())
        if timed and line["n"] is not None and today in (line["source_hash"] or "").split("+"):
            name, place = tuned.shape_class(shape_of(line)), tuple(line[key] for key in PLACE)
            classes.setdefault(name, {}).setdefault(place, {})[constants] = line
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(sets) - 1)
    return [_best(name, places, margin, confidence) for name, places in sorted(classes.items())]


def _best(name: str, places: Mapping[tuple, Mapping[str, Mapping]], margin: float, confidence: float):
    """The trial with the least mean ratio among those that may be kept, else among all."""
    shapes = [trials for trials in places.values() if "{}" in trials]
    if not shapes:
        return Found(name, 0, {}, 1.0, False)
    everywhere = set.intersection(*(set(trials) for trials in shapes)) - {"{}"}
    ranked = []
    for constants in everywhere:
        intervals = [_ratio(trials["{}"], trials[constants], confidence) for trials in shapes]
        keep = len(shapes) > 1 and _beyond_doubt(intervals, margin)
        ranked.append((not keep, geometric_mean(i.ratio for i in intervals), constants))
    if not ranked:
        return Found(name, len(shapes), {}, 1.0, False)
    refused, ratio, constants = min(ranked)
    both = [trials[key] for trials in shapes for key in ("{}", constants)]
    rows = tuple((row["run_id"], row["case_id"]) for row in both)
    return Found(name, len(shapes), json.loads(constants), ratio, not refused, rows)


def _ratio(default: Mapping, trial: Mapping, confidence: float) -> Interval:
    return ratio_of_medians(default["measured_samples_us"], trial["measured_samples_us"], confidence)


def _beyond_doubt(intervals: list[Interval], margin: float) -> bool:
    some = any(verdict(interval, margin) == FASTER for interval in intervals)
    return some and not any(may_be_slower(interval, margin) for interval in intervals)


def store_best(found: Iterable[Found], row: Row, device: str) -> Path:
    """Put what may be kept into the device's file, beside what it says of other classes and kernels.

    A class whose trials have nothing to keep loses its entry. Entries for another source are dropped.

    Raises
    ------
    UserError
        A file of a newer schema, which must not be overwritten, or a folder that cannot be made.
    StoreError
    """
    path, today = tuned.path_of(device), source_hash(row.file)
    old = tuned.read(path, device)
    if "newer" in old.problem:
        raise UserError(f"tune: {old.problem}, or name another folder in $CUATTN_TUNED")
    kernels = {name: dict(kernel) for name, kernel in old.kernels.items()}
    before = kernels.get(row.name, {})
    classes = dict(before["classes"]) if before.get("source_hash") == today else {}
    for one in found:
        if one.constants:
            classes.pop(one.name, None)
        if one.keep:
            classes[one.name] = {"constants": one.constants, "margin": round(one.margin, 4),
                                 "rows": [list(pair) for pair in one.rows]}
    stamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
    kernels[row.name] = {"source_hash": today, "date": stamp, "classes": classes}
    document = {"schema": tuned.SCHEMA, "device": device, "kernels": kernels}
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False, sort_keys=True) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"tune: {path.parent} cannot be made ({error.strerror}); set $CUATTN_TUNED to a "
                        "writable folder") from error
    write_atomic(path, lambda hidden: hidden.write_text(text, encoding="utf-8"))
    return path
