"""Attention in the inputs' own dtype, rounded where a plain library or a chunked kernel rounds.

The tolerance's yardstick.
"""
from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from cuattn.kernels.base import Chunked
from cuattn.reference import MAX_SCORES, capped, default_scale, visible_keys, widen


def eps(dtype: str) -> float:
    """Distance from 1 to the next number of that dtype."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps)


def smallest(dtype: str) -> float:
    """The least number of that dtype above 0: its step near 0."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).smallest_subnormal)


def round_to(x, dtype: str, xp=np):
    """float32 values rounded to the nearest of `dtype`, still float32."""
    if dtype != "bfloat16":
        return x.astype(dtype).astype(np.float32)
    raw = x.view(np.uint32)
    half_to_even = np.uint32(0x7FFF) + ((raw >> 16) & np.uint32(1))
    nearest = (raw + half_to_even) & np.uint32(0xFFFF0000)
    return xp.where(xp.isnan(x), x, nearest.view(np.float32))


def dense_rows(q, k, v, visible, softmax_scale, dtype, rounding="float32", xp=np, first=0, softcap=0.0,
               sink=-math.inf):
    """`reference.attention_rows` computed as a dense implementation in `dtype` would: (o, lse), both float32.

    Scores and softmax in float32 (scores rounded to `dtype` first where `rounding` is "input"), P rounded to
    `dtype`, P V summed in float32, O rounded to `dtype`. Where `rounding` is `Chunked`, see `chunked_rows`.
    """
    if isinstance(rounding, Chunked):  # none of its kernels offers more than a mask
        return chunked_rows(q, k, v, visible, softmax_scale, dtype, rounding, xp)
    rows, n = q.shape[-2], k.shape[-2]
    o, lse = xp.zeros((*q.shape[:-1], v.shape[-1]), np.float32), xp.empty(q.shape[:-1], np.float32)
    lse[...] = sink
    if n == 0:
        return o, lse
    k, v = widen(k, np.float32), widen(v, np.float32)
    end, key = xp.asarray(visible), xp.arange(n)
    end, first, sink = (xp.broadcast_to(xp.asarray(x), lse.shape) for x in (end, first, sink))
    sink = sink.astype(np.float32)
    step = max(1, MAX_SCORES // (n * math.prod(q.shape[:-2])))
    for r in range(0, rows, step):
        part = slice(r, r + step)
        s = np.float32(softmax_scale) * (widen(q[..., part, :], np.float32) @ k.swapaxes(-1, -2))
        s = capped(round_to(s, dtype, xp) if rounding == "input" else s, np.float32(softcap), xp)
        seen = (key >= first[..., part, None]) & (key < end[..., part, None])
        s = xp.where(seen, s, np.float32(-np.inf))
        top = xp.maximum(s.max(axis=-1), sink[..., part])
        shift = xp.where(top == -xp.inf, np.float32(0), top)
        p = xp.exp(s - shift[..., None])
        total = p.sum(axis=-1) + xp.exp(sink[..., part] - shift)
        empty = total == 0
        total = xp.where(empty, np.float32(1), total)
        o[..., part, :] = round_to(round_to(p / total[..., None], dtype, xp) @ v, dtype, xp)
        lse[..., part] = xp.where(empty, np.float32(-np.inf), shift + xp.log(total))
    return o, lse


def rounds_scores(rounding) -> bool:
    """Whether scores are rounded to the input dtype, and with them the LSE."""
    return rounding == "input" or isinstance(rounding, Chunked)


def chunked_rows(q, k, v, visible, softmax_scale, dtype, rounding: Chunked, xp=np):
    """The same over chunks of keys, rounded where their kernels round.

    For each chunk: S in float32 and e^(S − m), rounded to `dtype`; P V in float32, rounded to
    `rounding.accumulate` unless `rounding.fused`; e^(m_old − m) times what was summed before, plus that, in
    float32, rounded to it. O is the sum over the sum of weights, which stays in float32.
    """
    rows, n = q.shape[:-1], k.shape[-2]
    summed, weights = xp.zeros((*rows, v.shape[-1]), np.float32), xp.zeros(rows, np.float32)
    m = xp.full(rows, -xp.inf, np.float32)
    (q, k, v), visible = (widen(x, np.float32) for x in (q, k, v)), xp.asarray(visible)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is for the comparison to find
        for key0 in range(0, n, rounding.chunk):
            part = slice(key0, min(key0 + rounding.chunk, n))
            s = round_to(np.float32(softmax_scale) * (q @ k[..., part, :].swapaxes(-1, -2)), dtype, xp)
            s = xp.where(xp.arange(part.start, part.stop) < visible[..., None], s, np.float32(-np.inf))
            before, m = m, xp.maximum(m, s.max(axis=-1))
            shift = xp.where(m == -xp.inf, np.float32(0), m)
            factor, p = xp.exp(before - shift), xp.exp(s - shift[..., None])
            weights = factor * weights + p.sum(axis=-1)
            new = round_to(p, dtype, xp) @ v[..., part, :]
            new = new if rounding.fused else round_to(new, rounding.accumulate, xp)
            summed = round_to(factor[..., None] * summed + new, rounding.accumulate, xp)
        empty = weights == 0
        weights = xp.where(empty, np.float32(1), weights)
        o = round_to(summed / weights[..., None], dtype, xp)
    return o, xp.where(empty, np.float32(-np.inf), m + xp.log(weights))


def dense(q, k, v, causal=False, softmax_scale=None, xp=np, rounding="float32"):
    """Dense attention over whole arrays; see `dense_rows` for where it rounds.

    Parameters
    ----------
    q : (B, M, H, D), k, v : (B, N, HKV, D)
    rounding : {"float32", "weights", "input"} or Chunked
        "input": scores are rounded to the dtype before the softmax. P is rounded to it in any case.

    Returns
    -------
    o : (B, M, H, D) float32, holding values of the inputs' dtype
    """
    (b, m, h, d), (n, hkv) = q.shape, k.shape[1:3]
    scale, visible = default_scale(d, softmax_scale), visible_keys(m, n, causal)
    o = xp.zeros((b, m, h, v.shape[3]), np.float32)
    for i in range(b):
        for j in range(h):
            head = q[i, :, j], k[i, :, j * hkv // h], v[i, :, j * hkv // h]
            o[i, :, j] = dense_rows(*head, visible, scale, q.dtype.name, rounding, xp)[0]
    return o
