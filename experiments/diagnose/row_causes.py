"""Causes *inferred* from the rows of a run: each row's facts, and what most rows of a kernel have in common.

Uses of compute and bandwidth are shares of the device's ceilings: those that the suite `ceilings` measured on
it, else its datasheet's. A case whose work the device would do in less than ten times an empty launch says
nothing of its kernel and is set aside as too small.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cuattn.devices import lookup
from cuattn.kernels.base import ELEMENT_BYTES, ceil_div
from experiments import ceilings, store
from experiments.catalog import PEERS
from experiments.costs import array_bytes
from experiments.diagnose.causes import Diagnosis, Value, diagnose
from experiments.quantities import gb
from experiments.schema import TAIL_SAMPLES
from experiments.suite import SCORES
from experiments.words import UserError, nearest

FAMILIES = ("prefill", "decode")
SMALL = 10  # empty launches
NONE, TOO_SMALL, UNTIMED = "no fault found", "too small to judge", "no time to judge by"
_SHAPE = ("family", "model", "b", "h", "hkv", "m", "n", "prefix", "d", "dtype", "kv_dtype", "causal", *SCORES,
          "layout", "page_size", "page_order", "lengths_source", "tokens", "max_len", "seed", "cache_mode", "mode")


@dataclass(frozen=True)
class Ceiling:
    """What the device can do at most: read in GB/s, compute in TFLOP/s, and who says so."""

    read_gbps: float | None = None
    tflops: float | None = None
    source: str = ""

    @classmethod
    def measured(cls, found: ceilings.Ceilings) -> Ceiling:
        """From what the suite `ceilings` found."""
        return cls(found.read_gbps, found.best_tflops, "the ceiling measured on this device")


@dataclass(frozen=True)
class Case:
    """One row: its shape in words, its flop, its diagnosis, its verdict (a cause, or why there is none)."""

    label: str
    work: float
    diagnosis: Diagnosis
    verdict: str


@dataclass
class Kernel:
    """All rows of one kernel with one set of constants in one run."""

    run: str
    device: str
    name: str
    family: str
    cases: list[Case] = field(default_factory=list)

    @property
    def counts(self) -> Counter:
        """How many rows ended with each verdict."""
        return Counter(case.verdict for case in self.cases)

    @property
    def verdict(self) -> str:
        """What more than half of the rows that can be judged say."""
        judged = self.judged
        if not judged:
            return self.counts.most_common(1)[0][0]
        most, count = judged.most_common(1)[0]
        return most if 2 * count > judged.total() else NONE

    @property
    def judged(self) -> Counter:
        """The verdicts of the rows that can be judged."""
        return Counter({v: n for v, n in self.counts.items() if v not in (TOO_SMALL, UNTIMED)})

    @property
    def example(self) -> Case:
        """Of the rows with the kernel's verdict, or of all, that with the most evidence; then the largest."""

        def key(case: Case) -> tuple[float, float]:
            return max((f.strength for f in case.diagnosis.findings), default=0), case.work

        return max([case for case in self.cases if case.verdict == self.verdict] or self.cases, key=key)


def kernels(
    path: Path, only: str | None = None, told: Callable[[store.Loaded], None] = lambda loaded: None
) -> list[Kernel]:
    """Diagnose the prefill and decode kernels of a run, or of all runs below a folder.

    `told` is called with what was read, before it is judged.

    Raises
    ------
    UserError
        No run there, none of its rows is such a kernel's, or none is of the kernel asked for.
    """
    if not path.exists():
        raise UserError(f"diagnose: {path} does not exist; name a run's folder")
    loaded = store.read_runs(path)
    told(loaded)
    if loaded.frame.empty:
        raise UserError(f"diagnose: {path} holds no row; name a run that has rows")
    names = set(loaded.frame[loaded.frame["family"].isin(FAMILIES)]["kernel"])
    if not names:
        raise UserError(f"diagnose: {path} has no rows of prefill or decode kernels; name another run")
    if only is not None and only not in names:
        raise UserError(f"--kernel: '{only}' has no rows in {path}; {nearest(only, names)}")
    found: dict[tuple, Kernel] = {}
    for row, case in cases(loaded.frame, cache(partial(ceiling, path=path))):
        if only not in (None, row["kernel"]):
            continue
        name = " ".join([row["kernel"], *(f"{k}={v}" for k, v in _constants(row, "constants").items())])
        key = (row["run_path"], _device(row), name, row["family"])
        kernel = found.setdefault(key, Kernel(row["suite"] or key[0], key[1], name, row["family"]))
        kernel.cases.append(case)
    return list(found.values())


def cases(frame: pd.DataFrame, top: Callable[[str], Ceiling]) -> Iterator[tuple[dict[str, Any], Case]]:
    """Every prefill and decode row, as a dictionary without what is null, and its diagnosis.

    Parameters
    ----------
    frame : pandas.DataFrame
        As `store.read_runs` gives it; a row's baseline is `standard` at its place in the same run.
    top : callable
        Device → its ceiling.
    """
    rows = [row for row in _plain(frame) if row["family"] in FAMILIES]
    baselines = {_place(row): row for row in rows if _is_baseline(row)}
    for row in rows:
        yield row, _case(row, baselines.get(_place(row)), top(_device(row)))


def ceiling(device: str, path: Path) -> Ceiling:
    """The best rates measured on the device by this run, by `ceilings` beside it, or in the recorded runs."""
    if found := ceilings.measured(device, path):
        return Ceiling.measured(found)
    card = lookup(device)
    if card is None or card.arch == "cpu":
        return Ceiling()
    return Ceiling(card.bandwidth_gbps, card.bf16_tflops, "the datasheet's rate")


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries without what is null."""
    return [
        {k: v for k, v in row.items() if isinstance(v, (list, np.ndarray)) or pd.notna(v)} | {
            name: row.get(name) if pd.notna(row.get(name)) else None for name in ("suite", "constants")
        }
        for row in frame.to_dict("records")
    ]


def _device(row: Mapping[str, Any]) -> str:
    return str(row.get("device", "an unknown device"))


def _constants(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    return json.loads(row[column]) if row.get(column) else {}


def _place(row: Mapping[str, Any]) -> tuple:
    return (row["run_path"], row.get("device"), *(row.get(name) for name in _SHAPE))


def _is_baseline(row: Mapping[str, Any]) -> bool:
    return row["kernel"] == "standard" and not _constants(row, "constants") and row["status"] == "ok"


def _case(row: Mapping[str, Any], baseline: Mapping[str, Any] | None, top: Ceiling) -> Case:
    facts = _memory(row, baseline) | _settings(row)
    ideal_us = _ideal_us(row, top)
    timed = row["status"] == "ok" and "measured_time_us" in row
    small = timed and ideal_us is not None and ideal_us < SMALL * row.get("measured_empty_us", 0)
    if timed and not small:
        facts |= _times(row, baseline, top) | _blocks(row)
    diagnosis = diagnose(facts)
    verdict = TOO_SMALL if small else NONE if timed or "scratch_ratio" in facts else UNTIMED
    if diagnosis.findings:
        verdict = diagnosis.findings[0].cause
    label = " ".join(f"{k}{row[k]}" for k in ("b", "m", "n", "d", "page_size") if k in row)
    label = " ".join([str(row.get("model", "")), label, "causal" * bool(row.get("causal", False)),
                      row["status"] if row["status"] != "ok" else ""])
    return Case(" ".join(label.split()), row.get("modelled_flops", 0), diagnosis, verdict)


def _ideal_us(row: Mapping[str, Any], top: Ceiling) -> float | None:
    """Time of the same work at the device's ceilings: the flops, or the inputs and outputs once."""
    flops = row.get("modelled_flops", 0) / top.tflops / 1e6 if top.tflops else None
    moved = _arrays(row) / top.read_gbps / 1e3 if top.read_gbps else None
    return max((x for x in (flops, moved) if x is not None), default=None)


def _arrays(row: Mapping[str, Any]) -> int:
    """Bytes of a row's inputs and outputs."""
    if "modelled_peak_bytes" in row:
        return row["modelled_peak_bytes"] - row.get("modelled_scratch_bytes", 0)
    return array_bytes(row) if "n" in row else 0


def _memory(row: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> dict[str, Value]:
    arrays, scratch = _arrays(row), row.get("modelled_scratch_bytes")
    found = {}
    if row["family"] == "prefill":
        if scratch is None and "measured_peak_pool_bytes" in row:
            scratch = max(0, row["measured_peak_pool_bytes"] - arrays)
            scores = row["b"] * row["h"] * row["m"] * row["n"] * ELEMENT_BYTES.get(row["dtype"], 1)
            scratch = scratch if scratch >= scores else None  # a workspace of some other kind
        if scratch is not None and arrays:
            found["scratch_ratio"] = Value(scratch / arrays, f"{gb(scratch)} / {gb(arrays)}")
            sums = row["b"] * row["h"] * row["m"] * (row["d"] + 2) * ELEMENT_BYTES["float32"]
            found["sums_in_scratch"] = Value("yes" if scratch <= sums else "no")
    mine, other = _peak(row), _peak(baseline or {})
    if mine and other and not _is_baseline(row):
        found["memory_saved"] = Value(100 * (1 - mine / other), f"1 − {gb(mine)} / {gb(other)}")
    return found


def _peak(row: Mapping[str, Any]) -> int | None:
    return row.get("measured_peak_pool_bytes", row.get("modelled_peak_bytes"))


def _settings(row: Mapping[str, Any]) -> dict[str, Value]:
    """What the case and its plan fix: phase, page, chunk."""
    used = _constants(row, "constants_used")
    chunk = used.get("chunk")
    found = {"phase": Value(row["family"]), "chunked": Value("yes" if chunk else "no")}
    if row["family"] == "decode" and "page_size" in row:
        found["page"] = Value(row["page_size"])
    if chunk:
        found |= {"chunk": Value(chunk), "head_dim": Value(row["d"])}
        if tiles := [used[name] for name in ("tile_m", "tile_n") if used.get(name)]:
            found["tile"] = Value(min(tiles))
        found["chunks"] = Value(ceil_div(row.get("max_len", row.get("n", 0)), chunk), "keys / chunk")
    if used.get("accumulate") in ("float16", "bfloat16", "float32"):
        found["accumulator"] = Value(used["accumulate"])
    return found


def _blocks(row: Mapping[str, Any]) -> dict[str, Value]:
    """How many blocks each multiprocessor gets, where there is one launch and the card is known."""
    grids, card = json.loads(row.get("grid", "[]")), lookup(row.get("device", ""))
    if row.get("modelled_launches") != 1 or not grids or card is None or row["family"] != "prefill":
        return {}
    blocks = math.prod(grids[0])
    return {"blocks_per_sm": Value(blocks / card.sms, f"{blocks} / {card.sms}")}


def _times(row: Mapping[str, Any], baseline: Mapping[str, Any] | None, top: Ceiling) -> dict[str, Value]:
    """What the timing of a large enough case tells."""
    time_us, found = row["measured_time_us"], {"step_gap_us": Value(0.0, "timed back to back")}

    def share(name: str, column: str, limit: float | None, what: str) -> None:
        if limit and column in row:
            found[name] = Value(100 * row[column] / limit,
                                f"{row[column]:,.0f} {what} of {limit:,.0f}, {top.source}")

    if row["family"] == "prefill":  # decode computes little by nature
        share("gpu_use", "measured_tflops", top.tflops, "TFLOP/s")
    if "measured_sm_busy" in row:
        found["sm_busy"] = Value(100 * row["measured_sm_busy"], "stamped in a build of its own")
    share("bandwidth_use", "modelled_gbps", top.read_gbps, "GB/s requested, modelled (L2 may serve a part)")
    other = (baseline or {}).get("measured_time_us")
    if other and not _is_baseline(row):
        found["slowdown"] = Value(time_us / other, f"{time_us:,.0f} µs / {other:,.0f} µs of standard")
    if "modelled_launches" in row and "measured_empty_us" in row:
        launches, empty = row["modelled_launches"], row["measured_empty_us"]
        found["launch_share"] = Value(100 * launches * empty / time_us,
                                      f"{launches} × {empty:.1f} µs / {time_us:,.0f} µs")
    if row["kernel"] not in PEERS and row.get("mode") != "graph" and "measured_host_us" in row:
        host = row["measured_host_us"]  # a peer's holds our adapter's time as well
        found["host_share"] = Value(100 * host / time_us, f"{host:.0f} µs / {time_us:,.0f} µs")
    samples = row.get("measured_samples_us")
    if samples is not None and len(samples) >= TAIL_SAMPLES:
        found["tail"] = Value(float(np.percentile(samples, 99) / np.mean(samples)), f"{len(samples)} samples")
    return found
