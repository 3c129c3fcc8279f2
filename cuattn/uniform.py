"""The uniform probe: inputs whose exact answer is known, to find the one key a maximum norm cannot see.

With q = 0 every visible key weighs the same, so LSE = ln(visible keys) and O is a plain mean. V holds small
integers that never are 0 and whose running sum stays within a few units: the mean is then so small that,
even in 16 bits, one key dropped or counted twice among 100,000 moves it by a large part of itself.
"""
from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from cuattn.kernels.base import Chunked
from cuattn.reference import key_range, widen
from cuattn.verdict import Verdict, array_module, check_lse, index_of, letters_of

LARGEST = 3  # bounds |V| and the running sum


@dataclass(frozen=True)
class Probe:
    """Inputs q (B, M, H, D), k, v (B, N, HKV, D) in `dtype`; expected o (B, M, H, D), lse (B, H, M), float64.

    `visible` (B, M) counts the keys each row sees.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray
    lse: np.ndarray
    visible: np.ndarray
    dtype: str


def _balanced(rng, shape) -> tuple[np.ndarray, np.ndarray]:
    """Integers of size 1 … 3, each signed against the sum before it; and the sums, from 0 keys on."""
    values = rng.integers(1, LARGEST + 1, shape)
    sums = np.zeros((shape[0] + 1, *shape[1:]), np.int64)
    for j in range(shape[0]):
        sign = np.where(sums[j] == 0, rng.choice((-1, 1), shape[1:]), -np.sign(sums[j]))
        values[j] *= sign
        sums[j + 1] = sums[j] + values[j]
    return values, sums


def uniform_probe(
    b, h, hkv, m, n, d, dtype="float16", causal=False, lengths=None, seed=0, window_size=(-1, -1)
) -> Probe:
    """Build the probe for dense attention, or for decode.

    Parameters
    ----------
    b, h, hkv, m, n, d : int
    dtype : str
    causal : bool
    lengths : (B,) int, optional
        Keys each sequence really has (decode); N bounds them. Keys beyond are NaN.
    window_size : (int, int)
        As in `reference.key_range`.
    """
    rng = np.random.default_rng(seed)
    values, sums = _balanced(rng, (n, b, hkv, d))
    each = [n] * b if lengths is None else [int(length) for length in lengths]
    edges = np.array([key_range(m, length, causal, window_size) for length in each]).reshape(b, 2, m)
    first, end = edges[:, 0], edges[:, 1]  # (B, M) each
    k = rng.standard_normal((b, n, hkv, d)).astype(np.float32)
    v = np.moveaxis(values, 0, 1).astype(np.float32)
    if lengths is not None:
        unused = np.arange(n) >= np.asarray(lengths)[:, None]
        k[unused], v[unused] = np.nan, np.nan
    kv_head, i, visible = np.arange(h) * hkv // h, np.arange(b)[:, None], end - first
    total = (sums[end, i] - sums[first, i])[:, :, kv_head]  # (B, M, H, D)
    seen = np.maximum(visible, 1)
    lse = np.where(visible > 0, np.log(seen), -np.inf)
    return Probe(
        np.zeros((b, m, h, d), dtype), k.astype(dtype), v.astype(dtype), total / seen[:, :, None, None],
        np.broadcast_to(lse[:, None, :], (b, h, m)).copy(), visible, dtype,
    )


def check_probe(o, lse, probe: Probe, rounding: str | Chunked = "float32") -> Verdict:
    """Judge the output for a uniform probe: the exact mean rounded once, and lse = ln(visible keys).

    The allowance is half a step of the dtype at the exact mean (twice that where `rounding` says that P is
    rounded after its division), and 1/64 of what one key weighs for float32 sums and merges. A dropped or
    repeated key is at least one weight off. Weights of 1 and sums of a few units are exact in every dtype, so
    `Chunked` sums are allowed nothing more.
    """
    xp, info = array_module(o), ml_dtypes.finfo(np.dtype(probe.dtype))
    want, got = xp.asarray(probe.o), widen(o)
    weight = xp.asarray(1.0 / np.maximum(probe.visible, 1))[:, :, None, None]  # of one key
    half_step = xp.maximum(float(info.eps) * xp.abs(want), float(info.smallest_subnormal)) / 2
    tol = half_step + weight / 64
    if rounding in ("weights", "input"):  # P is one rounded weight; below normal numbers its step is absolute
        tol = tol + half_step + xp.abs(want) / weight * float(info.smallest_subnormal) / 2
    lse_ok, lse_err, lse_tol, lse_message = check_lse(lse, xp.asarray(probe.lse), None, None)
    if got.size == 0:
        return Verdict(lse_ok, 0.0, 0.0, lse_err, lse_tol, (), lse_message)
    err = xp.where(xp.isnan(got), xp.inf, xp.abs(got - want))
    index = index_of(int((err - tol).argmax()), got.shape, None)
    worst, allowed = float(err[index]), float(tol[index])
    one_key, ok = float(weight[index[:2]][0, 0]), worst <= allowed
    message = (
        f"uniform probe: O at {letters_of(index, 'bmhd')} is {float(got[index]):.8g}, the exact mean is "
        f"{float(want[index]):.8g} (allowed error {allowed:.3g}, one key weighs {one_key:.3g})"
    )
    if not lse_ok:
        message = lse_message if ok else f"{message}; {lse_message}"
    return Verdict(ok and lse_ok, worst, allowed, lse_err, lse_tol, index, message)
