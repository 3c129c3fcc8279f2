"""Made-up GPU rows of a suite: its cases with the costs of their plans, and times no device ever took."""

from __future__ import annotations

import json
import math
from pathlib import Path

import dashboard_rows as made

from cuattn.devices import CARDS
from cuattn.kernels.base import Unsupported
from experiments import schema, store
from experiments.catalog import catalog
from experiments.costs import describe
from experiments.ladder import named
from experiments.suite import load_suite
from experiments.sweep import cases_of

DEVICE = "NVIDIA H200"
RATES = {
    "flash": 300.0,
    "chunked_fused": 150.0,
    "chunked_atomic": 90.0,
    "chunked_unfused": 60.0,
    "standard": 40.0,
}


def rows_of(suite: str, sweeps: str = "cpu", device: str = DEVICE) -> list[dict]:
    """One row a case of that suite's sweeps for `sweeps`, as if a GPU had timed it.

    What a plan refuses ends `unsupported`, and what needs more than 140 GB ends `oom`.
    """
    spec, known = load_suite(suite), catalog()
    rungs, maker = named(spec.rungs), made.Maker(f"{suite}-made", suite)
    return [_row(maker, case.params, known, rungs, device) for case in cases_of(spec, sweeps, known)]


def best_chunk(d: int) -> int:
    """The chunk that the made-up times favour at head dim `d`."""
    return 1024 if d <= 64 else 512 if d <= 96 else 256


def _row(maker, params, known, rungs, device: str) -> dict:
    values = {name: value for name, value in params.items() if name in schema.NAMES}
    values |= {"device": device, "constants": params.get("constants")}
    values["rung"] = rungs.get((params["kernel"], params.get("constants")))
    try:
        values |= describe(params, known[params["kernel"]], CARDS["H200"])
    except Unsupported as error:
        return maker.row(**values, status="unsupported", error=str(error))
    if values["modelled_peak_bytes"] > 140e9:
        return maker.row(**values, status="oom", error="out of memory: the scratch needs more than there is")
    used = json.loads(values["constants_used"])
    chunk, n = used.get("chunk"), params.get("n") or 1
    small = 1 + 0.3 * abs(math.log2(chunk / best_chunk(params["d"]))) if chunk else 1
    moving = (values["modelled_bytes_loaded"] + values["modelled_bytes_stored"]) / 4e6
    rate = RATES.get(params["kernel"], 200.0) / small / (1 + 8 / params["d"])
    computing = values["modelled_flops"] / rate / 1e6
    launching = values["modelled_launches"] * (1.3 if params["mode"] == "graph" else 4.0)
    coarse = used.get("accumulate") in ("float16", "bfloat16")
    error = 2e-4 * (1 + 0.3 * coarse * (n / (chunk or n)) ** 0.5)
    return maker.row(
        **values,
        time_us=max(moving, computing, launching, 3.0),
        measured_peak_pool_bytes=int(values["modelled_peak_bytes"] * 1.02),
        measured_empty_us=2.9,
        measured_sm_busy=0.4,
        max_err=error,
        tolerance=4 * error,
    )


def failed(row: dict, status: str, error: str) -> dict:
    """The row as it would be had it ended so: without a result."""
    kept = {name: None if name in schema.PERFORMANCE else value for name, value in row.items()}
    return {**kept, "status": status, "error": error}


def write(root: Path, suite: str, lines: list[dict], name: str = "") -> Path:
    """A finished run of that suite below `root`, whose manifest names its rungs; returns `root`."""
    run = root / (name or suite)
    run.mkdir(parents=True)
    rungs = [vars(rung) for rung in load_suite(suite).rungs]
    manifest = {"run_id": lines[0]["run_id"], "suite": suite, "schema_version": schema.SCHEMA_VERSION,
                "environment": {}, "rungs": rungs, "device": {"device": lines[0]["device"]}}
    store.write_manifest(run, manifest)
    store.write_part(run, lines, manifest)
    return root
