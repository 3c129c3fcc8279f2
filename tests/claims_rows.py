"""Made-up rows for the tests of claims: one kernel each, timed or counted as asked."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from itertools import count

import pandas as pd
import pyarrow as pa

from experiments import schema, store
from experiments.claims import triage
from experiments.claims.definition import Book, load
from experiments.claims.findings import Finding
from experiments.claims.judging import judge
from experiments.parts import to_table

START = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
HASH = "0123456789ab"
DEFAULTS = {
    "chunked_unfused": {"chunk": 128, "tile_m": 32, "tile_n": 64, "accumulate": "input", "layout": "row"},
    "chunked_fused": {"chunk": 512, "tile_m": 64, "tile_n": 64, "scores": "shared", "parallel": "grid",
                      "layout": "row", "accumulate": "input"},
    "standard": {"head_group": 256, "score": "float32", "block": 128},
    "flash": {"block_m": 128, "block_n": 64, "warps": 4},
    "paged": {"splits": 1, "warps": 4, "stages": 3},
    "paged_launches": {"launch": "request", "warps": 4, "stages": 3},
}
SMALL = {"chunk": 128, "tile_m": 32, "tile_n": 64}
TUNED = {"chunk": 512, "scores": "shared", "parallel": "grid", "accumulate": "float32"}
_numbers = count()
the_book = lru_cache(load)


def row(kernel: str, us: float | None = 100.0, constants: dict | None = None, **values) -> dict:
    """A prefill row of an H200 at the articles' shape; `us` None leaves it without a time."""
    number, given = next(_numbers), constants or {}
    base = {
        "run_id": "run-1", "suite": "ladder", "case_id": f"case-{number}", "attempt": 1, "status": "ok",
        "started_at": START + timedelta(seconds=number), "finished_at": START + timedelta(seconds=number + 1),
        "machine": "gpu", "device": "H200", "arch": "sm_90a", "source_hash": HASH, "kernel": kernel,
        "family": "prefill", "b": 8, "h": 32, "hkv": 32, "m": 8192, "n": 8192, "d": 128, "dtype": "float16",
        "causal": False, "layout": "bshd", "cache_mode": "cold", "mode": "launch",
        "constants": json.dumps(given, sort_keys=True) if given else None,
        "constants_used": json.dumps(DEFAULTS.get(kernel, {}) | given),
        "measured_time_us": us, "modelled_flops": 10**12,
    } | values
    return schema.derive({name: base.get(name) for name in schema.NAMES})


def prefill(kernel: str, us: float | None, n: int, constants: dict | None = None, **values) -> dict:
    """A square prefill of N keys."""
    return row(kernel, us, constants, **{"m": n, "n": n, **values})


def decode(kernel: str, us: float | None, constants: dict | None = None, **values) -> dict:
    """A decode row of 16 sequences of 4096 keys on sorted pages of 16."""
    shape = {"family": "decode", "b": 16, "m": 1, "n": 4096, "hkv": 8, "causal": None, "layout": None,
             "page_size": 16, "page_order": "sorted", "lengths_source": "uniform", "suite": "page-size"}
    return row(kernel, us, constants, **(shape | values))


def chunks(*tflops: float, d: int = 128) -> list[dict]:
    """chunked_fused over chunks of 64, 128, …, as fast as asked."""
    return [row("chunked_fused", 10**6 / rate, {"chunk": 64 * 2**i}, d=d) for i, rate in enumerate(tflops)]


def ladder(small: float, tuned: float, standard: float = 100.0) -> list[dict]:
    """standard, the rung with small chunks and tiles, the tuned one, with these times."""
    memory = {"measured_peak_pool_bytes": 10**9}
    return [row("standard", standard, measured_peak_pool_bytes=4 * 10**9),
            row("chunked_unfused", small, SMALL, **memory), row("chunked_fused", tuned, TUNED, **memory)]


def frame(rows: list[dict]) -> pd.DataFrame:
    """The rows as the store would return them."""
    table = to_table(rows)
    return store._to_frame([table.append_column("run_path", pa.array(["run"] * len(rows), pa.string()))])


def verdicts(number: int, rows: list[dict], book: Book | None = None) -> list[str]:
    """The verdicts of a claim's parts, by these rows and no arithmetic."""
    return [part.verdict for part in finding(number, rows, book=book).parts]


def finding(number: int, rows: list[dict], hashes: dict | None = None, book: Book | None = None) -> Finding:
    """The finding of a claim, by these rows and no arithmetic."""
    book = book or the_book()
    alone = Book({number: book.claims[number]}, book.articles)
    made = frame(rows)
    return judge(alone, made, hashes or {}, {}, triage.causes(made, hashes or {}))[0]
