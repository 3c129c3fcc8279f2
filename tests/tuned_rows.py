"""Rows of tuning runs with simulated times, for the tests of `tune`: no GPU, and no kernel is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from cuattn.compile import source_hash
from cuattn.devices import CARDS
from cuattn.kernels.base import Row, Unsupported
from experiments import schema, store
from experiments.catalog import catalog
from experiments.costs import constants_of, shape_of
from experiments.suite import load_suite
from experiments.sweep import cases_of

H200 = CARDS["H200"]


def rows(row: Row, suite: Path, time: Callable, noise: float = 0.005, seed: int = 3) -> list[dict]:
    """What running that suite would leave: `time(shape, constants of the plan)` in µs with some noise."""
    random, found = np.random.default_rng(seed), []
    for case in cases_of(load_suite(str(suite)), "gpu", catalog()):
        made = dict.fromkeys(schema.NAMES) | {
            "run_id": "tuning", "suite": suite.stem, "case_id": case.case_id, "attempt": 1, "status": "ok",
            "machine": "gpu", "device": "H200", "arch": "sm_90a", "source_hash": source_hash(row.file),
            "started_at": datetime(2026, 11, 29, tzinfo=timezone.utc),
        }  # fmt: skip
        made |= {name: value for name, value in case.params.items() if name in schema.BY_NAME}
        shape = shape_of(case.params)
        try:
            plan = row.plan(shape, H200, constants_of(case.params))
        except Unsupported as error:
            found.append(made | {"status": "unsupported", "error": str(error)})
            continue
        samples = time(shape, dict(plan.constants)) * np.exp(noise * random.standard_normal(40))
        made |= {"constants_used": json.dumps(dict(plan.constants)), "measured_samples_us": samples.tolist(),
                 "measured_time_us": float(np.median(samples))}
        found.append(made)
    return found


def write(folder: Path, lines: list[dict]) -> Path:
    """They as a run."""
    folder.mkdir(parents=True)
    manifest = {"run_id": "tuning", "title": "Tuning"}
    store.write_manifest(folder, manifest)
    store.write_part(folder, lines, manifest)
    return folder
