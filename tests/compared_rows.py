"""Made-up rows of two runs of one suite, for the tests that compare them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import numpy as np

from experiments import schema

START = datetime(2026, 11, 29, 12, 0, tzinfo=timezone.utc)
NOISE = np.exp(0.005 * np.random.default_rng(5).standard_normal((2, 40)))


def row(case: str, us: float | None = 100.0, side: int = 0, **values) -> dict:
    """A row of a GPU, timed in 40 samples around `us`; None leaves the samples out."""
    base = dict.fromkeys(schema.NAMES) | {
        "run_id": f"run-{side}", "suite": "quick", "case_id": case, "attempt": 1, "status": "ok",
        "started_at": START + timedelta(hours=side), "machine": "gpu", "device": "H200", "arch": "sm_90a",
        "device_uuid": "GPU-1", "source_hash": "0123456789ab", "kernel": "flash", "family": "prefill", "b": 1,
        "m": 1024, "n": 1024, "d": 64, "mode": "launch", "measured_sm_clock_mhz": 1980.0,
    }  # fmt: skip
    if us is not None:
        base |= {"measured_time_us": us, "measured_samples_us": (us * NOISE[side]).tolist()}
    return base | values


def cpu_row(case: str, loaded: int, side: int = 0, **values) -> dict:
    """A row of the CPU machine."""
    counted = {"counted_launches": 1, "counted_bytes_loaded": loaded, "counted_bytes_stored": 512}
    return row(case, None, side, machine="cpu", device="cpu", arch="cpu", device_uuid=None,
               measured_sm_clock_mhz=None, **counted, **values)
