"""What a row is called in charts and tables: kernel with constants, model, load, shape. Pure functions."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from experiments.suite import PACKED

OTHER = "other"
PAGED = ("decode", "mla", "cascade", "cache", "pages")  # families whose loads are batches of contexts in pages


def add(out: pd.DataFrame) -> pd.DataFrame:
    """Adds what a row is called where it is drawn: `what`, `load`, `shape`, `panel`, `variant`, `series`; and
    `features`, what it does beside plain attention of a batch, or beside one query or one new row a sequence."""
    decode = out["family"].isin(PAGED)
    length = out["max_len"].fillna(out["n"]).where(decode, out["n"])
    out["length"] = length.where(length > 0)
    out["ragged"] = decode & ~out["lengths_source"].isin(["", "uniform"])
    heads = [_heads(h, hkv, d) for h, hkv, d in zip(out["h"], out["hkv"], out["d"])]
    out["heads"] = heads
    named = [model or head for model, head in zip(out["model"], heads)]
    limits = zip(out["memory_limit_bytes"], out["memory_reserve_bytes"])
    # Rows under a limit are another subject: where they met those without one, an `oom` would be both's. So
    # are graded keys in an order of theirs, quantised caches, shared prefixes and features: they would be several
    # points at one shape.
    asked = out[["family", "m", "window", "softcap", "with_sinks", "layout", "page_size"]]
    out["features"] = [_features(row) for row in asked.itertuples(index=False)]
    subjects = zip(named, map(_limit, limits), map(keys, out["key_order"]), map(_cache, out["kv_dtype"]),
                   map(_shared, out["prefix"]), out["features"])
    out["what"] = [" · ".join(filter(None, words)) for words in subjects]
    out["load"] = [
        _load(row)
        for row in out[["b", "length", "ragged", "lengths_source", "tokens"]].itertuples(index=False)
    ]
    out["order"] = out["page_order"].where(out["page_order"].isin(["sorted", "shuffled"]), "sorted")
    out["variant"] = [_variant(kernel, text) for kernel, text in zip(out["kernel"], out["constants"])]
    # What one line of a chart joins: the same kernel, run the same way, in the same run.
    names = zip(*(out[name] for name in ("variant", "dtype", "mode", "cache_mode", "run_id")))
    out["series"] = ["|".join(parts) for parts in names]
    fields = out[["family", "what", "b", "m", "n", "mask", "load", "page_size", "bytes", "kernel"]]
    out["shape"] = [_shape(row) for row in fields.itertuples(index=False)]
    out["panel"] = [
        f"{what} · B{count(b)} · {mask}" for what, b, mask in zip(out["what"], out["b"], out["mask"])
    ]
    return out


def count(value: float) -> str:
    """4096 → 4K, 1000 → 1000, missing → ?."""
    if not np.isfinite(value):
        return "?"
    value = int(value)
    return f"{value // 1024}K" if value >= 1024 and value % 1024 == 0 else str(value)


def size(value: float) -> str:
    """Bytes in decimal units, three digits."""
    if not np.isfinite(value):
        return "?"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def _variant(kernel: str, constants: str) -> str:
    """Kernel name with the constants the case sets, if any."""
    try:
        chosen = json.loads(constants) if constants else {}
    except ValueError:
        return f"{kernel} {constants}"
    if not isinstance(chosen, dict) or not chosen:
        return kernel
    return " ".join([kernel, *(f"{name}={value}" for name, value in sorted(chosen.items()))])


def by_constants(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of one kernel that also name their constants where they name their shape, ascending by both."""
    given = frame["constants"].map(lambda text: tuple(json.loads(text or "{}").values()))
    frame = frame.assign(given=given).sort_values(["bytes", "given"]).drop(columns="given")
    return frame.assign(shape=frame["shape"] + " · " + frame["variant"].str.partition(" ")[2])


def _heads(h: float, hkv: float, d: float) -> str:
    return "" if not np.isfinite(h) else f"{count(h)}/{count(hkv)} heads · D{count(d)}"


def keys(order: str) -> str:
    """"keys rising" for a row whose keys weigh unequally; nothing for plain ones."""
    return f"keys {order}" if order else ""


def _cache(kv_dtype: str) -> str:
    """"int8 cache" for a row over a quantised one."""
    return f"{kv_dtype} cache" if kv_dtype else ""


def _shared(prefix: float) -> str:
    """"prefix 8K" for a row whose sequences share one."""
    return f"prefix {count(prefix)}" if prefix > 0 else ""


def _features(row) -> str:
    """"window 1K · sinks", "4 queries", "128 new rows", "packed · pages of 16"; nothing for a plain row."""
    prefill, several = row.family == "prefill", row.m > 1
    parts = (
        f"{count(row.m)} queries" * (row.family == "decode" and several),
        f"{count(row.m)} new rows" * (row.family == "cache" and several), "packed" * (row.layout == PACKED),
        f"pages of {count(row.page_size)}" * (prefill and row.page_size > 0),
        f"window {count(row.window)}" * (row.window >= 0), f"softcap {row.softcap:g}" * (row.softcap > 0),
        "sinks" * row.with_sinks,
    )
    return " · ".join(filter(None, parts))


def _limit(sizes: tuple[float, float]) -> str:
    """"in 24 GB − 18 GB" for a row under a memory limit."""
    most, kept = sizes
    if not np.isfinite(most):
        return ""
    return f"in {size(most)}" + (f" − {size(kept)}" if kept > 0 else "")


def _load(row) -> str:
    if row.ragged:
        tokens = f" · {row.tokens / 1e3:.0f}k tokens" if row.tokens > 0 else ""
        return f"{count(row.b)} × {log_name(row.lengths_source)}{tokens}"
    return f"{count(row.b)} × {count(row.length)}"


def _shape(row) -> str:
    parts = [row.what]
    if row.family == "prefill":
        parts += [f"B{count(row.b)}", f"N{count(row.n)}", row.mask]
        if np.isfinite(row.m) and row.m != row.n:
            parts.insert(2, f"M{count(row.m)}")
    elif row.family in PAGED:
        parts += [row.load] + ([f"page {count(row.page_size)}"] if np.isfinite(row.page_size) else [])
    elif np.isfinite(row.bytes) and row.bytes > 0:
        parts += [size(row.bytes)]
    return " · ".join(part for part in parts if part) or row.kernel or OTHER


def log_name(source: str) -> str:
    """A request log's name as one reads it: "mooncake_conversation_trace.jsonl" → "mooncake conversation"."""
    name = source.removesuffix(".gz").removesuffix(".csv").removesuffix(".jsonl").removesuffix(".json")
    return " ".join(part for part in name.split("_") if part and part != "trace") or "ragged"
