"""Made-up result rows for the dashboard's tests: plausible shapes and numbers, every status, no GPU."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pandas as pd

from experiments import schema, store

START = datetime(2026, 11, 29, 12, 0, tzinfo=timezone.utc)
HEADS = {"Llama-3-8B": (32, 8, 128), "Qwen2.5-0.5B": (14, 2, 64)}
PEAK_TFLOPS = {"flash": 300.0, "standard": 30.0, "torch_fa2": 340.0, "cudnn": 600.0}


class Maker:
    """Numbers rows one after another, so that ids and times are the same in every run."""

    def __init__(self, run_id: str, suite: str, machine: str = "gpu"):
        self.run_id, self.suite, self.machine, self.count = run_id, suite, machine, 0
        self.random = np.random.default_rng(7)

    def row(self, **values) -> dict:
        """One row; a time given as `time_us` becomes samples, quartiles and rates."""
        self.count += 1
        start = START + timedelta(seconds=11 * self.count)
        device = "NVIDIA H200" if self.machine == "gpu" else "CPU machine"
        row = {
            "run_id": self.run_id,
            "suite": self.suite,
            "case_id": f"{self.suite}-{self.count:04d}",
            "attempt": 1,
            "status": "ok",
            "started_at": start,
            "finished_at": start + timedelta(seconds=9),
            "machine": self.machine,
            "device": device,
            "arch": "sm_90a" if self.machine == "gpu" else "cpu",
            "host": "bench",
            "source_hash": "0123456789ab",
            "dtype": "bfloat16",
            "seed": 0,
            "mode": "launch",
            "constants": "{}",
        }
        time_us = values.pop("time_us", None)
        row.update(values)
        if time_us is not None and row["status"] == "ok":
            samples = time_us * (1 + 0.02 * self.random.standard_normal(40))
            q1, q2, q3 = np.quantile(samples, [0.25, 0.5, 0.75])
            row.update(
                measured_time_us=q2,
                measured_time_q1_us=q1,
                measured_time_q3_us=q3,
                cache_mode="cold",
                measured_time_min_us=samples.min(),
                measured_samples_us=samples.tolist(),
                measured_n_samples=40,
            )
        return schema.derive({name: row.get(name) for name in schema.NAMES})


def prefill(maker: Maker, kernels, model: str, n: int, causal: bool, b: int = 1, **more) -> list[dict]:
    h, hkv, d = HEADS[model]
    flops = 4 * b * h * n * n * d // (2 if causal else 1)
    io = 2 * b * n * d * (2 * h + 2 * hkv)
    out = []
    for kernel in kernels:
        scratch = 4 * b * h * n * n if kernel == "standard" else 0
        peak = io + scratch
        status = "oom" if peak > 120e9 else "ok"
        rate = PEAK_TFLOPS[kernel] * n / (n + 1500)
        out.append(
            maker.row(
                family="prefill",
                kernel=kernel,
                model=model,
                b=b,
                h=h,
                hkv=hkv,
                m=n,
                n=n,
                d=d,
                causal=causal,
                status=status,
                error="out of memory: the scratch needs more than the device has"
                if status == "oom"
                else None,
                time_us=flops / rate / 1e6,
                modelled_flops=flops,
                modelled_bytes_loaded=io,
                modelled_bytes_stored=io // 4,
                modelled_peak_bytes=peak,
                modelled_scratch_bytes=scratch,
                measured_peak_pool_bytes=int(peak * 1.01)
                if status == "ok" and kernel in ("flash", "standard")
                else None,
                **more,
            )
        )
    return out


def decode(maker: Maker, b: int, length: int, page: int, order: str, source: str = "uniform", **more) -> dict:
    h, hkv, d = HEADS["Llama-3-8B"]
    tokens = b * length if source == "uniform" else b * length // 4
    moved = 4 * hkv * d * tokens
    slow = 1 + 0.5 / page + (0.04 if order == "shuffled" else 0)
    return maker.row(
        family="decode",
        kernel="paged",
        model="Llama-3-8B",
        b=b,
        h=h,
        hkv=hkv,
        m=1,
        d=d,
        page_size=page,
        n=length if source == "uniform" else None,
        max_len=length,
        tokens=tokens,
        page_order=order,
        lengths_source=source,
        causal=False,
        time_us=6 + slow * moved / 2.6e6,
        modelled_flops=h * tokens * d * 4,
        modelled_bytes_loaded=moved,
        modelled_bytes_stored=b * h * d * 2,
        **more,
    )


def h200_rows() -> dict[str, list[dict]]:
    """Suite → rows of a made-up H200 run."""
    memory = Maker("memory-1", "memory")
    rows = {"memory": []}
    for model in HEADS:
        for causal in (False, True):
            for n in (1024, 2048, 4096, 8192, 16384, 32768):
                rows["memory"] += prefill(
                    memory, ("standard", "flash", "torch_fa2", "cudnn"), model, n, causal
                )
    rows["memory"] += prefill(memory, ("standard",), "Llama-3-8B", 8192, False, constants='{"head_group": 4}')
    rows["memory"][-1]["measured_peak_pool_bytes"] //= 6
    pages = Maker("page-size-1", "page-size")
    rows["page-size"] = [
        decode(pages, b, length, page, order)
        for b, length in ((1, 8192), (16, 4096), (64, 4096))
        for page in (1, 8, 16, 32, 64, 128)
        for order in ("sorted", "shuffled")
    ]
    rows["page-size"] += [decode(pages, 64, 4135, page, "shuffled", "azure conv") for page in (16, 64)]
    rows["page-size"] += [
        decode(pages, 64, 131072, page, "sorted", status="timeout", error="no answer within 60 s")
        for page in (16, 64)
    ]
    probe = Maker("ceilings-1", "ceilings")
    rows["ceilings"] = [
        *(
            probe.row(
                family="probe",
                kernel="read",
                bytes=size,
                mode=mode,
                modelled_bytes_loaded=size,
                time_us=start + size / 4.3e6,
            )
            for size in (2**21, 2**25, 2**28, 2**30, 2**32)
            for mode, start in (("launch", 4.5), ("graph", 3.6))
        ),
        probe.row(
            family="probe",
            kernel="copy",
            bytes=2**30,
            modelled_bytes_loaded=2**30,
            modelled_bytes_stored=2**30,
            time_us=2**31 / 4.2e6,
        ),
        probe.row(family="probe", kernel="mma", modelled_flops=10**13, time_us=10**13 / 660e6),
        probe.row(family="probe", kernel="empty", time_us=3.6),
    ]
    return rows


def cpu_rows() -> dict[str, list[dict]]:
    """Suite → rows of a made-up run of the CPU machine: counted, no time."""
    quick = Maker("quick-cpu", "quick", "cpu")
    out = []
    for n in (128, 256):
        for row in prefill(quick, ("standard", "flash"), "Qwen2.5-0.5B", n, True):
            row.update(
                counted_bytes_loaded=row["modelled_bytes_loaded"],
                counted_launches=1,
                counted_bytes_stored=row["modelled_bytes_stored"],
                emulation_s=0.4,
            )
            out.append(_untimed(row))
    for page in (1, 16):
        row = decode(quick, 4, 256, page, "shuffled")
        row.update(
            counted_bytes_loaded=row["modelled_bytes_loaded"] + 64,
            counted_launches=2,
            counted_bytes_stored=row["modelled_bytes_stored"],
        )
        out.append(_untimed(row))
    out.append(
        _untimed(
            quick.row(
                family="prefill",
                kernel="flash",
                h=2,
                hkv=2,
                m=64,
                n=64,
                d=7,
                b=1,
                status="incorrect",
                error="O differs at (0, 1, 5, 3): error 0.4, tolerance 0.002",
            )
        )
    )
    return {"quick": out}


def _untimed(row: dict) -> dict:
    return {
        name: None if schema.BY_NAME[name].kind in ("measured", "derived") or name == "cache_mode" else value
        for name, value in row.items()
    }


def frame(rows: dict[str, list[dict]] | list[dict]) -> pd.DataFrame:
    """The rows as the store would return them."""
    flat = rows if isinstance(rows, list) else [row for suite in rows.values() for row in suite]
    table = store._to_frame([])
    made = pd.DataFrame(flat, columns=list(schema.NAMES))
    return pd.concat([table, made.astype({n: table[n].dtype for n in schema.NAMES})], ignore_index=True)


def write(root: Path, rows: dict[str, list[dict]]) -> Path:
    """A folder with one finished run a suite."""
    for suite, lines in rows.items():
        run = root / suite
        run.mkdir(parents=True)
        manifest = {"run_id": lines[0]["run_id"], "schema_version": schema.SCHEMA_VERSION, "environment": {}}
        store.write_manifest(run, manifest)
        store.write_part(run, lines, manifest)
    return root
