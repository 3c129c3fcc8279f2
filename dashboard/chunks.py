"""Rows of kernels that walk keys chunk by chunk: their constants, scans, the best, the nearest. Pure."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dashboard.labels import count, keys
from dashboard.steps import set_constants

# What a shape of one's own is compared by, each on a logarithmic scale.
NEAR = {"d": "head dim", "n": "N", "b": "batch", "h": "heads"}
_ALIKE = ("hkv", "m", "mask", "dtype", "mode", "cache_mode", "key_order", "device")


def of(frame: pd.DataFrame) -> pd.DataFrame:
    """The prefill rows whose constants name a chunk.

    Adds `chunk`; `chunks`, how many of them the keys are; `accumulate`, the dtype of the sums; `rest`, what
    the case sets beside the chunk; `dim`, the head dim as it is drawn; `setting`, all that a curve holds
    fixed but N and head dim; `held`, all that curves over the number of chunks or over the order of keys do
    but N, dtype and sums.
    """
    used = [set_constants(text) for text in frame["constants_used"]]
    given = [set_constants(text) for text in frame["constants"]]
    chunk = [used_.get("chunk", given_.get("chunk")) for used_, given_ in zip(used, given)]
    chunk = pd.to_numeric(pd.Series(chunk, frame.index, dtype=object), errors="coerce").astype("float64")
    known = (chunk > 0) & (frame["n"] > 0) & (frame["family"] == "prefill")
    out = frame[known].assign(chunk=chunk[known])
    pairs = [(u, g) for u, g, yes in zip(used, given, known) if yes]
    out["chunks"] = np.ceil(out["n"] / out["chunk"])
    sums = [u.get("accumulate", g.get("accumulate", "float32")) for u, g in pairs]
    out["accumulate"] = [dtype if name == "input" else name for name, dtype in zip(sums, out["dtype"])]
    rests = [{name: value for name, value in g.items() if name != "chunk"} for _, g in pairs]
    out["rest"] = [_words(rest) for rest in rests]
    out["tile"] = [f"{u['tile_m']} × {u['tile_n']}" if u.get("tile_m") else "" for u, _ in pairs]
    out["dim"] = [f"D{count(d)}" for d in out["d"]]
    out["setting"] = [_setting(row) for row in out[list(_SETTING)].itertuples(index=False)]
    bare = [_words({name: value for name, value in rest.items() if name != "accumulate"}) for rest in rests]
    held = out[list(_SETTING)].assign(rest=bare, dtype=out["dim"], key_order="").itertuples(index=False)
    out["held"] = [_setting(row) for row in held]
    return out


_SETTING = ("h", "hkv", "b", "m", "n", "mask", "dtype", "mode", "cache_mode", "key_order", "rest")


def _words(constants: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(constants.items()))


def _setting(row) -> str:
    queries = "" if row.m == row.n or not np.isfinite(row.m) else f"M{count(row.m)}"
    mode = {"graph": "graph replay"}.get(row.mode, row.mode)
    warm = "warm L2" if row.cache_mode == "warm" else ""
    heads = f"{count(row.h)}/{count(row.hkv)} heads"
    parts = (
        heads, f"B{count(row.b)}", queries, row.mask, row.dtype, mode, warm, keys(row.key_order), row.rest
    )
    return " · ".join(part for part in parts if part)


def scanned(made: pd.DataFrame) -> pd.DataFrame:
    """The rows of `of` that are part of a scan: at their shape and setting there are several chunks."""
    key = ["run_id", "device", "kernel", "setting", "d", "n"]
    return made[made.groupby(key)["chunk"].transform("nunique") > 1] if len(made) else made


def tiled(made: pd.DataFrame) -> pd.DataFrame:
    """The rows of `of` that set tiles and nothing else beside the chunk, where a shape has three or more."""
    own = made[made["rest"].str.fullmatch(r"tile_m=\d+( tile_n=\d+)?")] if len(made) else made
    if own.empty:
        return own
    key = ["run_id", "device", "kernel", "shape", "dtype", "mode", "chunk"]
    return own[own.groupby(key)["tile"].transform("nunique") > 2]


def settings(made: pd.DataFrame) -> list[str]:
    """The settings, those with most cases that ended ok first, then those that set nothing but the chunk."""
    table = made.assign(good=made["status"] == "ok", plain=made["rest"] == "").groupby("setting")
    table = table.agg(good=("good", "sum"), plain=("plain", "max"))
    return list(table.sort_values(["good", "plain"], ascending=False, kind="stable").index)


def best(made: pd.DataFrame, rate: str = "tflops") -> pd.DataFrame:
    """The row with the highest `rate` of every kernel, head dim and length, of those that ended ok."""
    good = made[(made["status"] == "ok") & (made[rate] > 0)]
    return good.loc[good.groupby(["kernel", "setting", "d", "n"])[rate].idxmax()] if len(good) else good


def gains(made: pd.DataFrame, default: float) -> pd.DataFrame:
    """The best chunks, with `gain`: the time of the default chunk over theirs; NaN where it has none.

    Parameters
    ----------
    made : pandas.DataFrame
        Rows of one kernel, from `of`.
    default : float
        The kernel's own chunk; NaN where it is not known.
    """
    top, key = best(made), ["kernel", "setting", "d", "n"]
    good = made[(made["status"] == "ok") & (made["measured_time_us"] > 0) & (made["chunk"] == default)]
    usual = good.drop_duplicates(key, keep="last").set_index(key)["measured_time_us"].to_dict()
    usual = [usual.get(names, np.nan) for names in top[key].itertuples(index=False, name=None)]
    return top.assign(gain=np.asarray(usual, "float64") / top["measured_time_us"].to_numpy())


def nearest(made: pd.DataFrame, mine: dict[str, float]) -> tuple[pd.DataFrame, list[str]]:
    """The rows at the measured shape nearest to one's own, and in what that differs, in words.

    Rows that set nothing but the chunk stand for the shape where there are such. Distances are those of
    logarithms, added up over `NEAR`: twice as long is as far as half as long. Of shapes equally near, those
    with as many queries as keys come first.

    Parameters
    ----------
    made : pandas.DataFrame
        From `of`; at least one row.
    mine : dict
        A positive number for each key of `NEAR`.
    """
    logs = {name: np.log2(made[name].to_numpy(dtype="float64")) - np.log2(mine[name]) for name in NEAR}
    far = sum(np.abs(values) for values in logs.values()) + 1e-6 * (made["m"] != made["n"]).to_numpy()
    shape = made.iloc[int(np.nanargmin(far))]
    same = np.logical_and.reduce([made[name] == shape[name] for name in (*NEAR, *_ALIKE)])
    differs = [
        f"{words} {shape[name]:.0f} where yours is {mine[name]:.0f}"
        for name, words in NEAR.items()
        if shape[name] != mine[name]
    ]
    near = made[same]
    return near[near["rest"] == ""] if (near["rest"] == "").any() else near, differs


def beside(made: pd.DataFrame, d: float) -> float:
    """The head dim `d` would be padded to: the next measured one, else the one before; NaN if alone."""
    dims = sorted(made["d"].dropna().unique())
    wider, narrower = [x for x in dims if x > d], [x for x in dims if x < d]
    return wider[0] if wider else narrower[-1] if narrower else np.nan


def odd_dims(made: pd.DataFrame) -> list[float]:
    """The head dims that are no power of two, which one might pad."""
    return [d for d in sorted(made["d"].dropna().unique()) if int(d) & (int(d) - 1)]


def ratios(made: pd.DataFrame, d: float, other: float) -> pd.DataFrame:
    """Head dim `d` over head dim `other`, all else equal: time (with quartiles) or counted bytes.

    Returns
    -------
    pandas.DataFrame
        Rows at `d` with `ratio`, `ratio_low`, `ratio_high` and `what` (the column divided).
    """
    key = ["kernel", "setting", "n", "chunk", "run_id"]
    times = ["measured_time_us", "time_low", "time_high"]
    carried = [*key, "d", *times, "counted_bytes", "variant", "device", "stale"]
    good = made[made["status"] == "ok"].drop_duplicates([*key, "d"], keep="last")[carried]
    pair = good[good["d"] == d].merge(good[good["d"] == other], on=key, suffixes=("", "_other"))
    timed = pair["measured_time_us"] / pair["measured_time_us_other"]
    counted = pair["counted_bytes"] / pair["counted_bytes_other"]
    pair = pair.assign(
        ratio=timed.fillna(counted),
        ratio_low=pair["time_low"] / pair["time_high_other"],
        ratio_high=pair["time_high"] / pair["time_low_other"],
        what=np.where(timed.notna(), "time", "counted bytes"),
    )
    return pair[pair["ratio"] > 0]
