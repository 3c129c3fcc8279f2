"""The one comparison: whether a kernel's output is right, and by how much it is off.

Builds float64 and dense same-dtype results for all rows, or for a sample where there are too many, and judges
by the tolerance in `cuattn.verdict`. Arrays may be NumPy or CuPy; everything is computed where they live.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from cuattn.dense import dense, dense_rows, eps, rounds_scores, smallest
from cuattn.quantise import numbers, quantise
from cuattn.reference import (
    LATENT,
    append_kv,
    attention_rows,
    bits,
    cascade_ends,
    cascade_keys,
    cascade_places,
    copy_pages,
    default_scale,
    dequantised,
    gather,
    key_range,
    rotary_pairs,
    rotate,
    spans,
    widen,
)
from cuattn.uniform import Probe, check_probe, uniform_probe
from cuattn.verdict import Mismatch, Verdict, array_module, check, distance, index_of

__all__ = [
    "Mismatch", "Probe", "Verdict", "check", "check_append", "check_attention", "check_attention_varlen",
    "check_copy_pages", "check_decode", "check_decode_cascade", "check_decode_mla", "check_probe",
    "check_rotated", "dense", "sample_rows", "uniform_probe",
]

# (query, key) pairs up to which every row is checked; beyond, the reference would take more than seconds.
FULL_PAIRS = {"numpy": 1 << 24, "cupy": 1 << 30}
MAX_KEYS = 1 << 26  # elements of keys and values widened at once: 512 MiB in float64
SAMPLES = 256


def sample_rows(b: int, h: int, m: int, count: int = SAMPLES, seed: int = 0) -> np.ndarray:
    """(b, m, h) of at least `count` rows (all, if there are fewer), sorted.

    The first and the last head hold every row where tiles begin and end: both ends of the array and the
    neighbours of multiples of 16, 64 and 128 near its start, middle and end. The rest is drawn at random.
    """
    if b * h * m <= count:
        return _every_row(b, h, m)
    near = {0, m // 2, m - 1}
    multiples = {t * (at // t + step) for at in near for t in (16, 64, 128) for step in (0, 1)}
    edges = near | {1, m - 2} | {at + off for at in multiples for off in (-1, 0, 1)}
    chosen = {(i, r, j) for i, j in ((0, 0), (b - 1, h - 1)) for r in edges if 0 <= r < m}
    rng = np.random.default_rng(seed)
    while len(chosen) < count:
        chosen.add((int(rng.integers(b)), int(rng.integers(m)), int(rng.integers(h))))
    return np.array(sorted(chosen), np.int64)


def _every_row(b, h, m) -> np.ndarray:
    return np.stack(np.meshgrid(np.arange(b), np.arange(m), np.arange(h), indexing="ij"), -1).reshape(-1, 3)


def _take(x, rows, order):
    """x[rows] where `order` says which of (b, m, h) each leading axis is."""
    xp = array_module(x)
    return bits(x)[tuple(xp.asarray(rows[:, axis]) for axis in order)].view(x.dtype)


def _by_head(rows, i: int, h: int, hkv: int, elements: int):
    """The rows of sequence i as (KV heads, (heads, rows of each) indices), as many at once as memory allows.

    Heads with equally many rows go together: on a GPU one array operation costs as much for a head as for all.
    """
    mine = np.flatnonzero(rows[:, 0] == i)
    head = rows[mine, 2] * hkv // h
    mine = mine[np.argsort(head, kind="stable")]
    heads, counts = np.unique(head, return_counts=True)
    first = np.cumsum(counts) - counts
    most = max(1, MAX_KEYS // max(elements, 1))
    for count in np.unique(counts):
        same = np.flatnonzero(counts == count)
        for part in np.split(same, range(most, len(same), most)):
            yield heads[part], mine[first[part, None] + np.arange(count)]


def _heads(x, heads):
    """(heads, N, D) of (N, HKV, D)."""
    return bits(x)[:, array_module(x).asarray(heads)].swapaxes(0, 1).view(x.dtype)


def _check_finite(o, lse, visible) -> str:
    """Empty, or what is wrong: values must be finite exactly where a row sees keys; `visible` is (B, M)."""
    xp = array_module(o)
    for i in range(o.shape[0]):
        if not bool(xp.isfinite(widen(o[i], np.float32)).all()):
            return f"O: NaN or infinite values in b={i}, outside the sampled rows"
        sees = xp.asarray(visible[i] > 0)
        if lse is not None and not bool((xp.isfinite(lse[i]) == sees).all()):
            return f"LSE: in b={i} it is not finite where rows see keys, or finite where they see none"
    return ""


def _judge(q, keys, seen, o, lse, scale, rounding, sample, seed, softcap=0.0, sinks=None) -> Verdict:
    """Compare all rows or some; `keys(b)` is one sequence's (k, v), (N, HKV, D) each.

    `seen`: the first key of each row and one past its last, (B, M) each.
    """
    xp, dtype = array_module(q), q.dtype.name
    b, m, h, _ = q.shape
    visible = seen[1] - seen[0]
    if sample is None:
        sample = int(visible.sum()) * h > FULL_PAIRS["numpy" if xp is np else "cupy"]
    rows = sample_rows(b, h, m, seed=seed) if sample else _every_row(b, h, m)
    size, dv = len(rows), o.shape[-1]
    o_ref, lse_ref = xp.zeros((size, dv)), xp.full(size, -xp.inf)
    o_dense, lse_dense = xp.zeros((size, dv), np.float32), xp.full(size, -xp.inf, np.float32)
    v_max = 0.0
    for i in np.unique(rows[:, 0]):
        k, v = keys(int(i))
        if v.size:
            v_max = max(v_max, float(distance(widen(v, np.float32), xp.zeros(1, np.float32), xp).max()))
        for heads, mine in _by_head(rows, int(i), h, k.shape[1], k.shape[0] * (k.shape[2] + dv)):
            some = rows[mine.reshape(-1)]
            q_rows = _take(q, some, (0, 1, 2)).reshape(*mine.shape, -1)
            first, end = (edge[i][rows[mine, 1]] for edge in seen)
            batch = (q_rows, *(_heads(x, heads) for x in (k, v)), end, scale)
            at = xp.asarray(mine)
            sink = -np.inf if sinks is None else sinks[xp.asarray(rows[mine, 2])]
            o_ref[at], lse_ref[at] = attention_rows(*batch, xp, first, softcap, sink)
            o_dense[at], lse_dense[at] = dense_rows(*batch, dtype, rounding, xp, first, softcap, sink)
    verdict = check(
        _take(o, rows, (0, 1, 2)), None if lse is None else _take(lse, rows, (0, 2, 1)),
        o_ref=o_ref, lse_ref=lse_ref, o_dense=o_dense, v_max=v_max, dtype=dtype,
        lse_dense=lse_dense if rounds_scores(rounding) else None, rows=rows,
    )
    if not sample:
        return replace(verdict, check="full")
    counted = visible if sinks is None else visible + 1  # a sink is one more
    wrong = _check_finite(o, lse, counted) if verdict.ok else ""
    return replace(verdict, ok=False, message=wrong) if wrong else verdict


def _demand(name: str, x, shape, optional: bool = False) -> None:
    """Refuses a result of another shape: parts of it would be compared, or none."""
    if x is None and optional:
        return
    got = tuple(getattr(x, "shape", ())) if x is not None else None
    if got is None or got[: len(shape)] != tuple(shape) or (name != "v" and len(got) != len(shape)):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {got}; pass what the kernel returned")


def check_attention(
    q, k, v, o, lse=None, *, causal=False, softmax_scale=None, window_size=(-1, -1), softcap=0.0,
    sinks=None, rounding="float32", sample=None, seed=0,
) -> Verdict:
    """Judge the output of dense attention; what is not said here is as in `reference.attention`.

    Parameters
    ----------
    q : (B, M, H, D), k, v : (B, N, HKV, D), o : (B, M, H, D), lse : (B, H, M) or None
        All NumPy or all CuPy.
    rounding : str or Chunked
        The plan's `rounding`.
    sample : bool, optional
        True compares at least 256 rows and looks at the rest only for NaN and infinities; None decides by
        size.
    """
    b, m, h, _ = q.shape
    _demand("v", v, k.shape[:3])
    _demand("o", o, (b, m, h, v.shape[3]))
    _demand("lse", lse, (b, h, m), optional=True)
    seen = [np.broadcast_to(edge, (b, m)) for edge in key_range(m, k.shape[1], causal, window_size)]
    scale = default_scale(q.shape[3], softmax_scale)
    return _judge(q, lambda i: (k[i], v[i]), seen, o, lse, scale, rounding, sample, seed, softcap, sinks)


def check_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, o, lse=None, **options) -> Verdict:
    """Judge the output for packed sequences, each by itself: of the worst one, or the first that is wrong.

    Shapes as in `reference.attention_varlen`, the rest as in `check_attention`. Rows of no sequence are not
    looked at.
    """
    _demand("o", o, (*q.shape[:2], v.shape[2]))
    _demand("lse", lse, (q.shape[1], q.shape[0]), optional=True)
    worst = Verdict(True, 0.0, 0.0, 0.0, 0.0, (), "there is no sequence")
    for i, (mine, keys) in enumerate(spans(cu_seqlens_q, cu_seqlens_k)):
        one = q[None, mine], k[None, keys], v[None, keys], o[None, mine]
        verdict = check_attention(*one, None if lse is None else lse[None, :, mine], **options)
        if not verdict.ok:
            return replace(verdict, message=f"sequence {i}: {verdict.message}")
        worst = max(worst, verdict, key=lambda found: found.max_err)
    return worst


def check_decode(
    q, k_cache, v_cache, block_table, cache_seqlens, o, lse=None, *,
    causal=True, softmax_scale=None, window_size=(-1, -1), softcap=0.0, sinks=None, rounding="float32",
    sample=None, seed=0, kv_dtype=None, k_scale=1.0, v_scale=1.0,
) -> Verdict:
    """Judge the output of paged decode; shapes as in `reference.decode`, the rest as in `check_attention`.

    Of a quantised cache by what is computed, in q's dtype, from the numbers that it stands for.
    """
    lengths = [int(n) for n in cache_seqlens]
    b, m, h, _ = q.shape
    _demand("o", o, (b, m, h, v_cache.shape[3]))
    _demand("lse", lse, (b, h, m), optional=True)

    def keys(i):
        place = block_table[i], lengths[i]
        if kv_dtype is None:
            return gather(k_cache, *place), gather(v_cache, *place)
        xp = array_module(q)
        return (dequantised(k_cache, *place, kv_dtype, k_scale, xp),
                dequantised(v_cache, *place, kv_dtype, v_scale, xp))

    edges = [key_range(m, n, causal, window_size) for n in lengths]
    seen = np.array(edges, np.int64).reshape(b, 2, m).swapaxes(0, 1)
    scale = default_scale(q.shape[3], softmax_scale)
    return _judge(q, keys, seen, o, lse, scale, rounding, sample, seed, softcap, sinks)


def check_decode_mla(
    q, kv_cache, block_table, cache_seqlens, o, lse=None, *, softmax_scale, **options
) -> Verdict:
    """Judge latent decode; shapes as in `reference.decode_mla`, the rest as in `check_decode`."""
    return check_decode(q, kv_cache, kv_cache[..., :LATENT], block_table, cache_seqlens, o, lse,
                        softmax_scale=softmax_scale, **options)


def check_decode_cascade(
    q, k_cache, v_cache, levels, o, lse=None, *, causal=True, softmax_scale=None, rounding="float32", sample=None,
    seed=0,
) -> Verdict:
    """Judge decode over levels; shapes as in `reference.decode_cascade`, the rest as in `check_attention`."""
    b, m, h, _ = q.shape
    _demand("o", o, q.shape)
    _demand("lse", lse, (b, h, m), optional=True)
    places = [cascade_places(levels, i) for i in range(b)]
    ends = np.array([cascade_ends(place, m, causal) for place in places], np.int64).reshape(b, m)
    scale, xp = default_scale(q.shape[3], softmax_scale), array_module(q)

    def keys(i):
        return tuple(cascade_keys(cache, places[i], xp) for cache in (k_cache, v_cache))

    return _judge(q, keys, (np.zeros_like(ends), ends), o, lse, scale, rounding, sample, seed)


def check_append(
    k, v, k_before, v_before, block_table, cache_seqlens, k_after, v_after, *,
    cos=None, sin=None, interleaved=False, kv_dtype=None, k_scale=1.0, v_scale=1.0,
) -> Verdict:
    """Whether an append wrote the new rows bit for bit and nothing else; shapes: `reference.append_kv`.

    With tables, the new rows of K are judged by `check_rotated`.
    """
    scales = {"kv_dtype": kv_dtype, "k_scale": k_scale, "v_scale": v_scale}
    expected = append_kv(k, v, k_before, v_before, block_table, cache_seqlens, array_module(k), **scales)
    if cos is None:
        return _same_bits(expected, k_cache=k_after, v_cache=v_after)
    page, slot = _places(k, block_table, cache_seqlens, k_after.shape[1])
    rotated, rest = bits(k_after)[page, slot], k_after.copy()  # (B, T, HKV, D), the whole cache
    bits(rest)[page, slot] = bits(expected[0])[page, slot]
    verdict = _same_bits(expected, k_cache=rest, v_cache=v_after)
    if not verdict.ok:
        return verdict
    if kv_dtype is None:
        return check_rotated(k, rotated.view(k.dtype), cos, sin, cache_seqlens, interleaved=interleaved)
    scale = k_scale[page] if getattr(k_scale, "ndim", 0) == 2 else k_scale  # (B, T, HKV), (HKV,) or a number
    return _check_rotated_codes(k, rotated, cos, sin, cache_seqlens, interleaved, kv_dtype, scale)


def _places(k, block_table, cache_seqlens, page_size: int):
    """(page, slot) of each new row, (B, T) each."""
    positions = _positions(k, cache_seqlens)
    rows = array_module(k).arange(len(k))[:, None]
    return block_table[rows, positions // page_size], positions % page_size


def _positions(x, cache_seqlens):
    """Of T new rows behind each length, (B, T)."""
    return cache_seqlens[:, None] + array_module(x).arange(x.shape[1])


def _rotated(x, cos, sin, cache_seqlens, interleaved):
    """Rows rotated, and the size of what was added up for each number; 0 of those that stay as they are."""
    xp, positions = array_module(x), _positions(x, cache_seqlens)
    (first, second), wide, size = rotary_pairs(2 * cos.shape[1], interleaved), xp.abs(widen(x)), xp.zeros(x.shape)
    size[..., first] = size[..., second] = ((wide[..., first] + wide[..., second])
                                            * xp.maximum(xp.abs(cos), xp.abs(sin))[positions][:, :, None])
    return rotate(x, cos, sin, positions, interleaved), size


def check_rotated(x, got, cos, sin, cache_seqlens, *, interleaved=False) -> Verdict:
    """Whether rows were rotated in float32 and rounded once; what is not rotated must have the same bits.

    Parameters
    ----------
    x, got : (B, T, H, D)
        Rows at the positions behind `cache_seqlens`, before and after.
    cos, sin, interleaved
        As in `reference.rotate`.
    """
    xp, dtype, rotary = array_module(x), x.dtype.name, 2 * cos.shape[1]
    _demand("got", got, x.shape)
    if not x.size:
        return Verdict(True, 0.0, 0.0, None, None, (), "nothing to rotate")
    exact, size = _rotated(x, cos, sin, cache_seqlens, interleaved)
    err = xp.abs(widen(got) - exact)
    # Half a step of the dtype, near zero its smallest one; and the rounding of two products and of their sum.
    tol = eps(dtype) / 2 * xp.abs(exact) + smallest(dtype) / 2 + 2.0**-22 * size
    tol[..., rotary:], same = 0, bits(got)[..., rotary:] == bits(x)[..., rotary:]
    err[..., rotary:] = xp.where(same, 0.0, xp.inf)
    wrong = ~(err <= tol)
    flat = int(wrong.argmax()) if bool(wrong.any()) else int(err.argmax())
    worst, allowed, index = float(err.ravel()[flat]), float(tol.ravel()[flat]), index_of(flat, x.shape, None)
    message = (f"rotated: error {worst:.3g} exceeds {allowed:.3g} at (b, t, h, d) = {index}: got "
               f"{float(widen(got).ravel()[flat]):.8g}, expected {float(exact.ravel()[flat]):.8g}")
    ok = worst <= allowed
    return Verdict(ok, worst, allowed, None, None, index, "rows are rotated as expected" if ok else message)


def _check_rotated_codes(x, got, cos, sin, cache_seqlens, interleaved, kv_dtype, scale) -> Verdict:
    """The same of rows that were quantised: no code beyond those of what float32 makes too small and too large."""
    if not x.size:
        return Verdict(True, 0.0, 0.0, None, None, (), "nothing to rotate")
    xp, (exact, size) = array_module(x), _rotated(x, cos, sin, cache_seqlens, interleaved)
    scale = widen(scale, np.float32)[..., None] if getattr(scale, "ndim", 0) else float(scale)
    low, high = (numbers(quantise((exact + side * size).astype(np.float32), kv_dtype, scale, xp), kv_dtype, xp)
                 for side in (-(2.0**-22), 2.0**-22))
    values = numbers(got, kv_dtype, xp)
    err = xp.where(xp.isnan(values), xp.inf, xp.maximum(low - values, values - high))
    flat = int(err.argmax())
    index, ok = index_of(flat, x.shape, None), float(err.ravel()[flat]) <= 0
    message = (f"rotated: the number stored at (b, t, h, d) = {index} is {float(values.ravel()[flat]):g}, expected "
               f"{float(low.ravel()[flat]):g} to {float(high.ravel()[flat]):g}")
    return Verdict(ok, max(float(err.ravel()[flat]), 0.0), 0.0, None, None, index,
                   "rows are rotated as expected" if ok else message)


def check_copy_pages(k_cache, v_cache, src, dst, k_after, v_after, *, k_out=None, v_out=None) -> Verdict:
    """Whether the caches written are bit for bit what `reference.copy_pages` makes of those before."""
    expected = copy_pages(k_cache, v_cache, src, dst, k_out, v_out)
    return _same_bits(expected, **({"k_cache": k_after, "v_cache": v_after} if k_out is None else
                                   {"k_out": k_after, "v_out": v_after}))


def _same_bits(expected, **caches) -> Verdict:
    """Whether caches hold the expected bits, NaN included."""
    for (name, got), want in zip(caches.items(), expected):
        integer = np.dtype(f"uint{8 * want.dtype.itemsize}")
        differ = got.view(integer) != want.view(integer)
        count = int(differ.sum())
        if count:
            index = index_of(int(differ.argmax()), want.shape, None)
            message = f"{name}: {count} elements have other bits, the first at (page, slot, h, d) = {index}"
            return Verdict(False, float("inf"), 0.0, None, None, index, message)
    return Verdict(True, 0.0, 0.0, None, None, (), "both caches hold the expected bits")
