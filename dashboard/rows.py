"""From stored rows to rows a chart can draw: safe types, latest attempts, rates and floors.

Pure functions of a DataFrame. Nothing here reads a file or knows Streamlit.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dashboard import labels

NUMBERS = (
    "b",
    "h",
    "hkv",
    "m",
    "n",
    "d",
    "prefix",
    "window",
    "softcap",
    "page_size",
    "tokens",
    "max_len",
    "bytes",
    "attempt",
    "measured_time_us",
    "measured_time_q1_us",
    "measured_time_q3_us",
    "measured_time_min_us",
    "measured_p99_us",
    "measured_n_samples",
    "measured_host_us",
    "measured_empty_us",
    "measured_peak_pool_bytes",
    "measured_device_used_bytes",
    "measured_sm_busy",
    "measured_tflops",
    "modelled_gbps",
    "measured_tokens_per_s",
    "counted_launches",
    "counted_blocks",
    "counted_bytes_loaded",
    "counted_bytes_stored",
    "counted_peak_bytes",
    "modelled_flops",
    "modelled_launches",
    "modelled_bytes_loaded",
    "modelled_bytes_stored",
    "modelled_scratch_bytes",
    "modelled_peak_bytes",
    "device_bytes",
    "memory_limit_bytes",
    "memory_reserve_bytes",
    "max_err",
    "tolerance",
    "lse_err",
)
NAMES = (
    "run_id",
    "suite",
    "case_id",
    "rung",
    "status",
    "error",
    "machine",
    "device",
    "arch",
    "kernel",
    "family",
    "model",
    "dtype",
    "kv_dtype",
    "key_order",
    "layout",
    "page_order",
    "lengths_source",
    "mode",
    "cache_mode",
    "constants",
    "constants_used",
    "source_hash",
)
TIMES = ("started_at", "finished_at")


def prepare(frame: pd.DataFrame) -> pd.DataFrame:
    """Give every row the columns the pages use, in safe types.

    Infinities become missing; a missing name becomes ""; times are UTC. Adds `mask`, `heads`, `shape`,
    `load`, `ragged`, `panel` (what a small multiple holds fixed),
    TFLOP/s and GB/s quartiles, and sums of bytes.
    """
    out = frame.copy().reset_index(drop=True)
    for name in NUMBERS:
        values = pd.to_numeric(out[name], errors="coerce") if name in out else pd.Series(np.nan, out.index)
        out[name] = values.astype("float64").replace([np.inf, -np.inf], np.nan)
    for name in NAMES:
        values = out[name] if name in out else pd.Series("", out.index, dtype=object)
        out[name] = values.astype(object).where(values.notna(), "").astype(str)
    for name in TIMES:
        values = out[name] if name in out else pd.Series(pd.NaT, out.index)
        out[name] = pd.to_datetime(values, utc=True, errors="coerce")
    out["device"] = out["device"].replace("cpu", "CPU machine")
    out["mask"] = ["causal" if causal else "full" for causal in _flags(out, "causal")]
    out["with_sinks"], out["stale"] = _flags(out, "sinks"), _flags(out, "stale")
    if "measured_samples_us" not in out:
        out["measured_samples_us"] = None
    return labels.add(_quartiles(out))


def _flags(out: pd.DataFrame, name: str) -> list[bool]:
    """The column as booleans, whatever it holds; what is missing is False."""
    values = out[name].astype(object).fillna(False) if name in out else [False] * len(out)
    return [bool(value) for value in values]


def _quartiles(out: pd.DataFrame) -> pd.DataFrame:
    """Rates at the quartiles of time: the slow quartile is the low rate. Zero work has no rate."""
    moved = out["modelled_bytes_loaded"].fillna(0) + out["modelled_bytes_stored"].fillna(0)
    flops = out["modelled_flops"].where(out["modelled_flops"] > 0)
    time, low, high = (
        out[name].where(out[name] > 0)
        for name in ("measured_time_us", "measured_time_q3_us", "measured_time_q1_us")
    )
    low, high = low.fillna(time), high.fillna(time)
    out["tflops"] = out["measured_tflops"].where(out["measured_tflops"] > 0).fillna(flops / time / 1e6)
    out["gbps"] = (
        out["modelled_gbps"].where(out["modelled_gbps"] > 0).fillna(moved.where(moved > 0) / time / 1e3)
    )
    for rate in ("tflops", "gbps"):
        out[f"{rate}_low"], out[f"{rate}_high"] = out[rate] * time / low, out[rate] * time / high
    out["time_low"], out["time_high"] = high, low
    out["modelled_bytes"] = moved.where(moved > 0)
    counted = out["counted_bytes_loaded"].fillna(0) + out["counted_bytes_stored"].fillna(0)
    out["counted_bytes"] = counted.where(counted > 0)
    peak = out["measured_peak_pool_bytes"]
    out["peak_gb"] = peak.where(peak > 0) / 1e9
    out["formula_gb"] = out["modelled_peak_bytes"].where(out["modelled_peak_bytes"] > 0) / 1e9
    return out.drop(columns="measured_samples_us")  # no page shows single samples


def latest(frame: pd.DataFrame) -> pd.DataFrame:
    """The last attempt of every case of every run; earlier ones stay visible on the health page."""
    if frame.empty:
        return frame
    named = frame[frame["case_id"] != ""]
    last = named.sort_values(["attempt", "finished_at"]).groupby(["run_id", "case_id"], sort=False).tail(1)
    return pd.concat([last, frame[frame["case_id"] == ""]]).sort_index()


def ok(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows that passed the comparison."""
    return frame[frame["status"] == "ok"]


def failed(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows that ended in anything but ok."""
    return frame[frame["status"] != "ok"]


def gpu(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of a GPU: the only ones with measured times."""
    return frame[frame["machine"] == "gpu"]


def cpu(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the CPU machine: counted, never timed."""
    return frame[frame["machine"] == "cpu"]


def pareto(frame: pd.DataFrame, cost: str, gain: str) -> pd.Series:
    """True where no other row has less `cost` and more `gain`; never for a row where one is missing."""
    known = frame[[cost, gain]].dropna()
    order = known.sort_values([cost, gain], ascending=[True, False])
    best = order[gain].astype("float64").cummax().shift(fill_value=-np.inf)
    front = pd.Series(False, frame.index)
    front.loc[order.index[order[gain] > best]] = True
    return front


def ceiling(frame: pd.DataFrame, kernel: str, rate: str, device: str) -> float:
    """The best rate a probe reached on `device`, or NaN: another card's ceiling is never borrowed."""
    rows = ok(frame)
    rows = rows[(rows["family"] == "probe") & (rows["kernel"] == kernel) & (rows["device"] == device)]
    return float(rows[rate].max()) if len(rows) else np.nan


def floor_us(frame: pd.DataFrame, everything: pd.DataFrame) -> np.ndarray:
    """The least time each row's bytes need: what the read probe took for as many bytes on the same device.

    Between measured sizes both are interpolated on logarithmic scales; beyond them the rate of the nearest
    stays, which keeps it a bound. The probe's launches are those of the row (plain or graph) where it has
    such.

    Returns
    -------
    ndarray, float64
        Microseconds; NaN where the device has no read probe.
    """
    probe = ok(everything)
    probe = probe[(probe["kernel"] == "read") & (probe["bytes"] > 0) & (probe["measured_time_us"] > 0)]
    out = np.full(len(frame), np.nan)
    for (device, mode), places in frame.reset_index(drop=True).groupby(["device", "mode"]).indices.items():
        same = probe[(probe["device"] == device) & (probe["cache_mode"] != "warm")]
        same = same[same["mode"] == mode] if (same["mode"] == mode).any() else same
        if same.empty:
            continue
        curve = same.groupby(same["bytes"].astype("float64"))[
            "measured_time_us"
        ].min()  # of several ways to read
        wanted = frame["modelled_bytes"].to_numpy()[places]
        time = np.exp(np.interp(np.log(wanted), np.log(curve.index), np.log(curve.to_numpy())))
        out[places] = time * wanted / np.clip(wanted, curve.index[0], curve.index[-1])
    return out


def as_served(good: pd.DataFrame) -> pd.DataFrame:
    """Kernels with their own constants, and graph replays alone where there are any: how a server decodes."""
    good = good[good["constants"].isin(["", "{}"])]
    replayed = good["mode"] == "graph"
    return good[replayed] if replayed.any() else good


def with_floor(frame: pd.DataFrame, everything: pd.DataFrame) -> pd.DataFrame:
    """Adds `floor_us` and the rate it stands for, `floor_gbps`; `everything` holds the probe's rows."""
    floor = floor_us(frame, everything)
    return frame.assign(floor_us=floor, floor_gbps=frame["modelled_bytes"].to_numpy() / floor / 1e3)


def lost(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """What a chart writes where a mark is missing: one row a group of `by`, kernel and status.

    `slot` numbers the rows of a group, so that a chart can stack them.
    """
    bad = failed(frame)
    if bad.empty:
        return pd.DataFrame(columns=[*by, "kernel", "variant", "status", "text", "error", "slot"])
    bad = bad.groupby([*by, "kernel", "status"], sort=True, as_index=False).agg(
        variant=("variant", lambda names: ", ".join(dict.fromkeys(names))),
        size=("variant", "size"),
        error=("error", lambda errors: " · ".join(dict.fromkeys(filter(None, errors)))[:300]),
    )
    times = [f" ×{size}" if size > 1 else "" for size in bad["size"]]
    bad["text"] = "✕ " + bad["status"].str.replace("_", " ") + times
    bad["slot"] = bad.groupby(by).cumcount()
    return bad


def said_once(lost: pd.DataFrame) -> pd.DataFrame:
    """Of `lost` by panel and place: a kernel's status in words at its last place in a panel, and a cross elsewhere."""
    again = lost.duplicated(["panel", "kernel", "text"], keep="last")
    return lost.assign(text=lost["text"].mask(again, "✕"))


def provenance(frame: pd.DataFrame) -> str:
    """Where the rows come from, for a chart's subtitle: devices, state of the L2 cache, launches."""
    devices = [name for name in dict.fromkeys(frame["device"]) if name] or ["unknown device"]
    caches = [f"{mode} L2" for mode in dict.fromkeys(frame["cache_mode"]) if mode]
    modes = [f"{mode} replay" if mode == "graph" else mode for mode in dict.fromkeys(frame["mode"]) if mode]
    return " · ".join([", ".join(devices), " and ".join(caches), " and ".join(modes)]).strip(" ·")
