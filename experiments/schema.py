"""The columns of a result row: the one list that the runner writes by and every reader reads by.

A column's kind says where its number comes from, and the kinds are never mixed: *measured* was timed or read
on a GPU, *counted* comes from the CPU machine's counters, *modelled* from a kernel's closed form. What is
*derived* is a quantity over a measured time: measured where the case itself fixes the quantity (its useful
flops, its tokens), modelled where only a kernel's closed form gives it (the bytes that it requests).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = 2
TAIL_SAMPLES = 100  # fewer have no 99th percentile

STATUSES = (
    "ok",
    "incorrect",
    "unsupported",
    "compile_error",
    "oom",
    "cuda_error",
    "crash",
    "timeout",
    "throttled",
    "interrupted",
)
# What `--retry-failed` tries again; `unsupported` is an answer, which another try would only repeat.
RETRYABLE = frozenset({"compile_error", "oom", "cuda_error", "crash", "timeout", "throttled", "incorrect"})

_STRING, _INT, _FLOAT, _BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_TIME, _SAMPLES = pa.timestamp("us", tz="UTC"), pa.list_(pa.float32())


@dataclass(frozen=True)
class Column:
    """One column: its name, Arrow type, unit ("" when it has none), kind and meaning."""

    name: str
    type: pa.DataType
    unit: str
    kind: str
    meaning: str


def _columns() -> tuple[Column, ...]:
    groups = {
        "identity": _IDENTITY,
        "provenance": _PROVENANCE,
        "parameter": _PARAMETERS,
        "plan": _PLAN,
        "measured": _MEASURED,
        "counted": _COUNTED,
        "modelled": _MODELLED,
        "derived": _DERIVED,
        "outcome": _OUTCOME,
    }
    return tuple(
        Column(name, kind_type, unit, kind, meaning)
        for kind, rows in groups.items()
        for name, kind_type, unit, meaning in rows
    )


_IDENTITY = (
    ("run_id", _STRING, "", "the run that made the row"),
    ("suite", _STRING, "", "the suite the case belongs to"),
    ("case_id", _STRING, "", "hash of the case's canonical parameters"),
    ("rung", _STRING, "", "the suite's rung that the kernel with these constants is; null if it is none"),
    ("attempt", _INT, "", "1 for the first try of the case in this run, then 2, 3, …"),
    ("status", _STRING, "", "how the attempt ended: " + ", ".join(STATUSES)),
    ("error", _STRING, "", "why it did not end ok, in a sentence; empty otherwise"),
)
_PROVENANCE = (
    ("started_at", _TIME, "", "when the attempt began"),
    ("finished_at", _TIME, "", "when the attempt ended"),
    ("machine", _STRING, "", "cpu (the SIMT machine) or gpu"),
    ("device", _STRING, "", "the device's name"),
    ("arch", _STRING, "", "what the kernel was compiled for: cpu, sm_80, sm_90a, …"),
    ("device_uuid", _STRING, "", "the GPU's UUID"),
    ("host", _STRING, "", "the host's name"),
    ("source_hash", _STRING, "", "12 hex digits over each source file and its headers, joined by +"),
)
_PARAMETERS = (
    ("kernel", _STRING, "", "the kernel's name"),
    ("family", _STRING, "", "prefill, decode, mla, cascade, cache, pages or probe"),
    ("model", _STRING, "", "the model whose head counts the shape has"),
    ("b", _INT, "", "batch"),
    ("h", _INT, "", "query heads"),
    ("hkv", _INT, "", "key/value heads"),
    ("m", _INT, "", "queries a sequence"),
    ("n", _INT, "", "keys a sequence; for a ragged batch, null"),
    ("prefix", _INT, "tokens", "of n, the keys that all sequences share, in the same pages; null: none"),
    ("d", _INT, "", "head dim"),
    ("dtype", _STRING, "", "element type of Q, K, V and O"),
    ("kv_dtype", _STRING, "", "what a quantised cache of K and V holds; null: dtype"),
    ("causal", _BOOL, "", "bottom-right aligned causal mask"),
    ("window", _INT, "tokens", "keys before its own that a query sees, and none behind; null: all"),
    ("softcap", _FLOAT, "", "bound of the scaled scores; null: none"),
    ("sinks", _BOOL, "", "each head has one more logit; null: none has"),
    ("page_size", _INT, "tokens", "tokens a page of the KV cache holds; of prefill null: dense keys"),
    ("layout", _STRING, "", "order of the dense arrays' dimensions; thd: sequences are packed"),
    ("key_order", _STRING, "", "keys of unequal weight lie mixed, rising or falling by it; null: plain keys"),
    ("page_order", _STRING, "", "sorted: a sequence's pages lie in order; shuffled: at random in the pool"),
    ("lengths_source", _STRING, "", "uniform, or the request log the lengths come from"),
    ("tokens", _INT, "tokens", "sum of the batch's context lengths"),
    ("max_len", _INT, "tokens", "longest context length of the batch"),
    ("constants", _STRING, "", "tunable constants the case sets, as JSON"),
    ("seed", _INT, "", "seed of the random inputs"),
    ("cache_mode", _STRING, "", "cold: L2 flushed before every sample; warm: not"),
    ("bytes", _INT, "B", "bytes a probe moves"),
    ("flops", _INT, "flop", "floating-point operations a probe does"),
    ("mode", _STRING, "", "launch: a plain launch; graph: a CUDA graph replayed"),
    ("memory_limit_bytes", _INT, "B", "memory of the card that was played; null without a limit"),
    ("memory_reserve_bytes", _INT, "B", "the part of it that a case may not use"),
)
_PLAN = (
    ("grid", _STRING, "", "grids of the launches, as JSON; launches of one grid and block size stand once"),
    ("block", _STRING, "", "threads a thread block of each such grid, as JSON"),
    ("smem_bytes", _INT, "B", "largest shared memory a launch asks for"),
    ("registers", _INT, "", "largest register count of a thread"),
    ("spill_bytes", _INT, "B", "bytes of registers spilled, all launches"),
    ("constants_used", _STRING, "", "every constant of the plan, as JSON"),
)
_MEASURED = (
    ("measured_time_us", _FLOAT, "µs", "median time of one run"),
    ("measured_time_q1_us", _FLOAT, "µs", "first quartile"),
    ("measured_time_q3_us", _FLOAT, "µs", "third quartile"),
    ("measured_time_min_us", _FLOAT, "µs", "shortest sample"),
    ("measured_samples_us", _SAMPLES, "µs", "every sample, in order"),
    ("measured_n_samples", _INT, "", "number of samples"),
    ("measured_stop_reason", _STRING, "", "why sampling stopped"),
    ("measured_host_us", _FLOAT, "µs", "host time of one call"),
    ("measured_plan_us", _FLOAT, "µs", "host time of a peer's plan for new lengths, which its graph leaves out"),
    ("measured_empty_us", _FLOAT, "µs", "time of an empty kernel in the same mode; never subtracted"),
    ("measured_sm_clock_mhz", _FLOAT, "MHz", "median SM clock while sampling"),
    ("measured_sm_clock_min_mhz", _FLOAT, "MHz", "lowest SM clock while sampling"),
    ("measured_power_w", _FLOAT, "W", "board power after sampling"),
    ("measured_temperature_c", _FLOAT, "°C", "GPU temperature after sampling"),
    ("measured_throttle_reasons", _STRING, "", "NVML clock event reasons after sampling, comma separated"),
    ("measured_peak_pool_bytes", _INT, "B", "peak of the memory pool: inputs, outputs and scratch"),
    ("measured_sm_busy", _FLOAT, "", "share of a run in which a multiprocessor has a warp; of a run that stamps"),
    ("measured_device_used_bytes", _INT, "B", "device memory in use with the case's buffers alive"),
)
_COUNTED = (
    ("counted_launches", _INT, "", "kernel launches of one run"),
    ("counted_blocks", _INT, "", "thread blocks executed"),
    ("counted_barriers", _INT, "", "block-wide and named barriers completed"),
    ("counted_mma", _INT, "", "mma.sync instructions, one a warp"),
    ("counted_atomics", _INT, "", "global atomic operations, one a lane"),
    ("counted_bytes_loaded", _INT, "B", "global bytes the kernels requested to read"),
    ("counted_bytes_stored", _INT, "B", "global bytes the kernels requested to write"),
    ("counted_peak_bytes", _INT, "B", "peak of inputs, outputs and scratch; only under a memory limit"),
)
_MODELLED = (
    ("modelled_flops", _INT, "flop", "useful floating-point operations"),
    ("modelled_bytes_loaded", _INT, "B", "global bytes read, closed form"),
    ("modelled_bytes_stored", _INT, "B", "global bytes written, closed form"),
    ("modelled_launches", _INT, "", "kernel launches, closed form"),
    ("modelled_scratch_bytes", _INT, "B", "scratch in global memory, closed form"),
    ("modelled_peak_bytes", _INT, "B", "inputs + outputs + scratch, closed form"),
)
_DERIVED = (
    ("measured_tflops", _FLOAT, "TFLOP/s", "useful flops, the shape's own, over measured_time_us"),
    ("modelled_gbps", _FLOAT, "GB/s", "modelled bytes, read and written, over measured_time_us"),
    ("measured_tokens_per_s", _FLOAT, "tokens/s", "tokens over measured_time_us: one layer's attention only"),
    ("measured_p99_us", _FLOAT, "µs", f"99th percentile of the samples; null with fewer than {TAIL_SAMPLES}"),
)
_OUTCOME = (
    ("max_err", _FLOAT, "", "largest |O - reference|"),
    ("tolerance", _FLOAT, "", "what max_err may be"),
    ("lse_err", _FLOAT, "", "largest |LSE - reference|; null without an LSE"),
    ("lse_tolerance", _FLOAT, "", "what lse_err may be"),
    ("check", _STRING, "", "full: every row compared; sampled: chosen rows, and finiteness of the rest"),
    ("memory_known_by", _STRING, "", "under a memory limit: its use was measured, counted or modelled"),
    ("emulation_s", _FLOAT, "s", "wall time of one run on the CPU machine; says nothing about a GPU"),
)

COLUMNS = _columns()
NAMES = tuple(c.name for c in COLUMNS)
BY_NAME = {c.name: c for c in COLUMNS}
ARROW = pa.schema([pa.field(c.name, c.type) for c in COLUMNS])
# A row without a correctness pass carries none of these.
PERFORMANCE = tuple(
    c.name
    for c in COLUMNS
    if c.kind in ("measured", "derived")
    and c.name not in ("measured_peak_pool_bytes", "measured_device_used_bytes")
)


def derive(row: dict[str, Any]) -> dict[str, Any]:
    """Fill the columns of kind "derived" from the others, in place; what cannot be derived stays None."""
    time_us = row.get("measured_time_us")
    flops, tokens = row.get("modelled_flops"), row.get("tokens")
    moved = (row.get("modelled_bytes_loaded") or 0) + (row.get("modelled_bytes_stored") or 0)
    timed = time_us is not None and time_us > 0
    row["measured_tflops"] = flops / time_us / 1e6 if timed and flops else None
    row["modelled_gbps"] = moved / time_us / 1e3 if timed and moved else None
    row["measured_tokens_per_s"] = tokens / time_us * 1e6 if timed and tokens else None
    samples = row.get("measured_samples_us")
    many = samples is not None and len(samples) >= TAIL_SAMPLES
    row["measured_p99_us"] = float(np.percentile(samples, 99)) if many else None
    return row


def encode(row: dict[str, Any]) -> dict[str, Any]:
    """The row as plain JSON values: nulls left out, NaN and infinities as strings, times in ISO 8601 UTC.

    Raises
    ------
    KeyError
        A key that is no column.
    ValueError, TypeError
        A value that its column cannot hold.
    """
    return {name: encode_value(BY_NAME[name].type, v) for name, v in row.items() if v is not None}


def encode_value(kind: pa.DataType, value: Any) -> Any:
    """One value of that Arrow type, as `encode` writes it."""
    if pa.types.is_list(kind):
        return [_encode_float(float(v)) for v in value]
    if pa.types.is_floating(kind):
        return _encode_float(float(value))
    if pa.types.is_timestamp(kind):
        return value.astimezone(timezone.utc).isoformat(timespec="microseconds")
    if pa.types.is_integer(kind):
        return _within_int64(int(value))
    if pa.types.is_boolean(kind):
        return bool(value)
    return str(value).encode(errors="replace").decode()  # a message may quote bytes that are no UTF-8


def _encode_float(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _within_int64(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"expected an integer of 64 bits, got {value}")
    return value


def _from_1(row: dict[str, Any]) -> dict[str, Any]:
    """Version 1 called the rate of modelled bytes measured, and an LSE that is not there exact.

    The tolerance tells: without an LSE a probe's was 0 and a peer's 1e-5; that of an LSE grows with the LSE.
    Only where a query may see no key, whose LSE is -inf, it does not: such a row stays as it was.
    """
    row = {"modelled_gbps" if name == "measured_gbps" else name: value for name, value in row.items()}
    sees = row.get("n") is not None and not (row.get("causal") and (row.get("m") or 0) > row["n"])
    tolerances = (0, 1e-5) if sees else (0,)
    if row.get("lse_err") == 0 and row.get("lse_tolerance") in tolerances:
        del row["lse_err"], row["lse_tolerance"]
    return row


# Schema version -> what makes a row of the next version from one of that version, as `encode` writes rows.
# Journals and parquet files are lifted alike.
LIFTS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}


class Newer(ValueError):
    """A row of a schema version that is not known here yet."""


def lift(row: dict[str, Any], version: int) -> dict[str, Any]:
    """An encoded row of an older schema version as one of today's.

    Raises
    ------
    Newer, ValueError
        A version that is not known here, yet or at all.
    """
    if version > SCHEMA_VERSION:
        raise Newer(f"schema version {version} is newer than the {SCHEMA_VERSION} known here")
    for step in range(version, SCHEMA_VERSION):
        if step not in LIFTS:
            raise ValueError(f"schema version {version} is not known here")
        row = LIFTS[step](row)
    return row


def decode(raw: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `encode`: every column present, typed, None where absent; unknown keys are dropped.

    Raises
    ------
    ValueError, TypeError, OverflowError
        A value that its column cannot hold.
    """
    return {c.name: None if raw.get(c.name) is None else _decode_value(c, raw[c.name]) for c in COLUMNS}


def _decode_value(column: Column, value: Any) -> Any:
    if pa.types.is_list(column.type):
        return [float(v) for v in value]
    if pa.types.is_floating(column.type):
        return float(value)
    if pa.types.is_timestamp(column.type):
        when = datetime.fromisoformat(value)
        return when.replace(tzinfo=timezone.utc) if when.tzinfo is None else when.astimezone(timezone.utc)
    if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        wanted = int if pa.types.is_integer(column.type) else bool
        if type(value) is not wanted:
            raise TypeError(f"{column.name}: expected {wanted.__name__}, got {value!r}")
        return value if wanted is bool else _within_int64(value)
    if not isinstance(value, str):
        raise TypeError(f"{column.name}: expected a string, got {value!r}")
    value.encode()  # half a surrogate pair is JSON, and no text
    return value
