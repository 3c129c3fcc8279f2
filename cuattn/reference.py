"""Attention in float64, written to be believed: one function an op, no tiling, no tricks.

Every function takes an array module `xp` (numpy or cupy) and returns float64 arrays. What a kernel computes
is judged against these by `cuattn.compare`.
"""
from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from cuattn.quantise import numbers, quantise

MAX_SCORES = 1 << 25  # scores held at once: 256 MiB in float64


def bits(x):
    """A 16-bit float array as uint16 where its module may not know the type (bfloat16); others unchanged."""
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def widen(x, dtype=np.float64):
    """`x` in a wider float type, exactly; bfloat16 by its bits, since not every array module can cast it."""
    if x.dtype.name == "bfloat16":
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(dtype, copy=False)
    return x.astype(dtype, copy=False)


def default_scale(d: int, softmax_scale: float | None) -> float:
    """1/√D unless the caller names a scale."""
    return 1.0 / math.sqrt(d) if softmax_scale is None else float(softmax_scale)


def key_range(m: int, n: int, causal: bool, window_size=(-1, -1)) -> tuple[np.ndarray, np.ndarray]:
    """First and one past the last of the N keys that each of the M query rows sees, (M,) int64 each.

    Row m sees key m + N − M, `window_size[0]` before it and `window_size[1]` behind, −1 being all; with
    `causal` none behind.
    """
    own, (left, right) = np.arange(m) + (n - m), window_size
    right = 0 if causal else right
    first = np.zeros(m, np.int64) if left < 0 else np.clip(own - left, 0, n)
    return first, np.full(m, n, np.int64) if right < 0 else np.clip(own + right + 1, 0, n)


def visible_keys(m: int, n: int, causal: bool) -> np.ndarray:
    """How many of the N keys each of the M query rows sees, (M,) int64; causal is bottom-right aligned."""
    return key_range(m, n, causal)[1]


def capped(scores, cap: float, xp=np):
    """Scaled scores, saturating at ±cap; as they are where it is 0."""
    return cap * xp.tanh(scores / cap) if cap else scores


def attention_rows(q, k, v, visible, softmax_scale, xp=np, first=0, softcap=0.0, sink=-math.inf):
    """Rows of a head, or of several at once: row r attends to keys `first[r]` to `visible[r]` − 1.

    Parameters
    ----------
    q : (…, R, D), k : (…, N, D), v : (…, N, DV)
        Any float dtype; the same leading axes, or none.
    visible : (R,) or (…, R) int
        One past the last key each row sees.
    softmax_scale : float
    first : int, (R,) or (…, R) int
        The first one. A row that sees none has o = 0 and lse = -inf.
    softcap : float
        See `capped`.
    sink : float, (R,) or (…, R)
        A logit beside each row's scaled scores, without a value; a row that sees no key then has lse = sink.

    Returns
    -------
    o : (…, R, DV) float64
    lse : (…, R) float64, natural logarithm
    """
    rows, n = q.shape[-2], k.shape[-2]
    o = xp.zeros((*q.shape[:-1], v.shape[-1]))
    lse = xp.empty(q.shape[:-1])
    lse[...] = sink
    if n == 0:
        return o, lse
    k, v = widen(k), widen(v)  # (…, N, D), (…, N, DV)
    end, key = xp.asarray(visible), xp.arange(n)  # (…, R), (N,)
    first, sink = (xp.broadcast_to(xp.asarray(x), lse.shape) for x in (first, sink))  # (…, R) each
    end = xp.broadcast_to(end, lse.shape)  # (…, R)
    step = max(1, MAX_SCORES // (n * math.prod(q.shape[:-2])))
    for r in range(0, rows, step):
        part = slice(r, r + step)
        s = softmax_scale * (widen(q[..., part, :]) @ k.swapaxes(-1, -2))  # (…, R, N)
        s = capped(s, softcap, xp)  # (…, R, N)
        seen = (key >= first[..., part, None]) & (key < end[..., part, None])  # (…, R, N)
        s = xp.where(seen, s, -xp.inf)  # (…, R, N)
        top = xp.maximum(s.max(axis=-1), sink[..., part])  # (…, R)
        shift = xp.where(top == -xp.inf, 0.0, top)  # (…, R), so that a row without keys subtracts no infinity
        p = xp.exp(s - shift[..., None])  # (…, R, N)
        total = p.sum(axis=-1) + xp.exp(sink[..., part] - shift)  # (…, R)
        empty = total == 0  # (…, R)
        total = xp.where(empty, 1.0, total)  # (…, R)
        o[..., part, :] = (p @ v) / total[..., None]  # (…, R, DV)
        lse[..., part] = xp.where(empty, -xp.inf, shift + xp.log(total))  # (…, R)
    return o, lse


def attention(
    q, k, v, causal=False, softmax_scale=None, xp=np, window_size=(-1, -1), softcap=0.0, sinks=None
):
    """Dense attention, O = softmax(scale · Q Kᵀ) V, one head at a time.

    Parameters
    ----------
    q : (B, M, H, D), k : (B, N, HKV, D), v : (B, N, HKV, DV)
        Query head h reads KV head h // (H / HKV).
    causal : bool
        Bottom-right aligned: row i sees keys 0 … i + N − M.
    softmax_scale : float, optional
        1/√D by default.
    window_size : (int, int)
        See `key_range`.
    softcap : float
        See `capped`.
    sinks : (H,), optional
        One logit a head beside the scaled scores of every row, without a value.

    Returns
    -------
    o : (B, M, H, DV) float64
    lse : (B, H, M) float64
        Natural logarithm of the sum of exponentials of the scaled scores. A row that sees no key has o = 0
        and lse = -inf, or its head's sink.
    """
    (b, m, h, d), (n, hkv) = q.shape, k.shape[1:3]
    scale, (first, end) = default_scale(d, softmax_scale), key_range(m, n, causal, window_size)
    o = xp.zeros((b, m, h, v.shape[3]))  # (B, M, H, DV)
    lse = xp.full((b, h, m), -xp.inf)  # (B, H, M)
    for i in range(b):
        for j in range(h):
            g = j * hkv // h
            head = q[i, :, j], k[i, :, g], v[i, :, g]  # (M, D), (N, D), (N, DV)
            o[i, :, j], lse[i, j] = attention_rows(*head, end, scale, xp, first, softcap,
                                                  -math.inf if sinks is None else float(sinks[j]))
    return o, lse


def spans(*offsets):
    """(query slice, key slice) of each packed sequence, from both lists of offsets."""
    sides = ([slice(int(a), int(b)) for a, b in pairwise(side)] for side in offsets)
    return list(zip(*sides))


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=False, softmax_scale=None, xp=np, **scores):
    """Attention of packed sequences, each by itself.

    Parameters
    ----------
    q : (total_q, H, D), k : (total_k, HKV, D), v : (total_k, HKV, DV)
    cu_seqlens_q, cu_seqlens_k : (B + 1,) int
        Sequence b has rows cu_seqlens[b] to cu_seqlens[b + 1] − 1.
    causal, softmax_scale, **scores
        As in `attention`.

    Returns
    -------
    o : (total_q, H, DV) float64
    lse : (H, total_q) float64
        NaN, as o, in rows of no sequence.
    """
    (total, h, _), dv = q.shape, v.shape[2]
    o, lse = xp.full((total, h, dv), xp.nan), xp.full((h, total), xp.nan)  # (total_q, H, DV), (H, total_q)
    for mine, keys in spans(cu_seqlens_q, cu_seqlens_k):
        one = q[None, mine], k[None, keys], v[None, keys]  # (1, M, H, D), (1, N, HKV, D), (1, N, HKV, DV)
        some, some_lse = attention(*one, causal, softmax_scale, xp, **scores)
        o[mine], lse[:, mine] = some[0], some_lse[0]
    return o, lse


def gather(cache, block_table, length: int):
    """The first `length` tokens of one sequence, (length, HKV, D), out of (num_pages, page_size, HKV, D).

    Only table entries that hold tokens are read, so the others may contain anything.
    """
    page_size = cache.shape[1]
    pages = block_table[: -(-length // page_size)]  # (pages,)
    tokens = bits(cache)[pages].reshape(-1, *cache.shape[2:])[:length]  # (length, HKV, D)
    return tokens.view(cache.dtype)


def dequantised(cache, block_table, length: int, kv_dtype: str, scale=1.0, xp=np):
    """`gather` from a cache of bytes, each number times its scale: (length, HKV, D) float64.

    `scale`: a number, (HKV,) or (num_pages, HKV).
    """
    tokens = widen(numbers(gather(cache, block_table, length), kv_dtype, xp))  # (length, HKV, D)
    if getattr(scale, "ndim", 0) == 2:
        page_size = cache.shape[1]
        scale = scale[block_table[: -(-length // page_size)]].repeat(page_size, axis=0)[:length]  # (length, HKV)
    return tokens * (widen(scale)[..., None] if getattr(scale, "ndim", 0) else float(scale))


def decode(q, k_cache, v_cache, block_table, cache_seqlens, softmax_scale=None, xp=np, causal=True, *, kv_dtype=None,
           k_scale=1.0, v_scale=1.0, **scores):
    """The last M tokens of each sequence, as queries, against its paged keys and values.

    Parameters
    ----------
    q : (B, M, H, D)
    k_cache, v_cache : (num_pages, page_size, HKV, D)
    block_table : (B, max_pages) int32
    cache_seqlens : (B,) int32
        Tokens of each sequence; what the cache holds beyond them has no influence, be it NaN.
    softmax_scale, causal, **scores
        As in `attention`.
    kv_dtype : {"float8_e4m3", "int8"}, optional
        What quantised caches hold, which `k_scale` and `v_scale` belong to: see `dequantised`.

    Returns
    -------
    o : (B, M, H, D) float64
    lse : (B, H, M) float64
    """
    b, m, h, _ = q.shape
    o = xp.zeros((b, m, h, v_cache.shape[3]))  # (B, M, H, DV)
    lse = xp.full((b, h, m), -xp.inf)  # (B, H, M)
    for i in range(b):
        length = int(cache_seqlens[i])
        k, v = (gather(cache, block_table[i], length) if kv_dtype is None  # (N, HKV, D), (N, HKV, DV)
                else dequantised(cache, block_table[i], length, kv_dtype, scale, xp)
                for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)))
        k, v = k[None], v[None]  # (1, N, HKV, D), (1, N, HKV, DV)
        o[i : i + 1], lse[i : i + 1] = attention(q[i : i + 1], k, v, causal, softmax_scale, xp, **scores)
    return o, lse


def cascade_places(levels, i: int) -> list[tuple]:
    """(pages, number of keys) of sequence i in each level.

    `levels`: (offsets, block_table, seqlens) of each; offsets None where every sequence is a group of its own.
    """
    places = []
    for offsets, block_table, seqlens in levels:
        groups = range(len(seqlens))
        g = i if offsets is None else next(g for g in groups if int(offsets[g]) <= i < int(offsets[g + 1]))
        places.append((block_table[g], int(seqlens[g])))
    return places


def cascade_keys(cache, places, xp=np):
    """`gather` from several places, one behind the other."""
    return xp.concatenate([bits(gather(cache, *place)) for place in places]).view(cache.dtype)


def cascade_ends(places, m: int, causal: bool) -> np.ndarray:
    """One past the last key that each of M queries sees, (M,) int64: causal hides keys of the last place alone."""
    *_, own = lengths = [length for _, length in places]
    return sum(lengths) - own + key_range(m, own, causal)[1]


def decode_cascade(q, k_cache, v_cache, levels, softmax_scale=None, xp=np, causal=True):
    """The last M tokens of each sequence, as queries, against the keys of its groups in all levels.

    Parameters
    ----------
    q, k_cache, v_cache
        As in `decode`.
    levels : sequence of (offsets, block_table, seqlens)
        As in `cascade_places`.
    causal : bool
        Bottom-right aligned in the last level; those before are seen whole.

    Returns
    -------
    o : (B, M, H, D) float64
    lse : (B, H, M) float64
    """
    b, m, h, d = q.shape
    o, lse = xp.zeros((b, m, h, d)), xp.full((b, h, m), -xp.inf)  # (B, M, H, D), (B, H, M)
    for i in range(b):
        places = cascade_places(levels, i)
        k, v = (cascade_keys(cache, places, xp) for cache in (k_cache, v_cache))  # (N, HKV, D)
        for j, end in enumerate(cascade_ends(places, m, causal)):
            row = slice(j, j + 1)
            o[i : i + 1, row], lse[i : i + 1, :, row] = attention(
                q[i : i + 1, row], k[None, :end], v[None, :end], False, softmax_scale, xp)
    return o, lse


LATENT = 512  # elements of a row of a latent cache that are the value too


def decode_mla(q, kv_cache, block_table, cache_seqlens, softmax_scale, xp=np):
    """One query token a sequence against a paged cache of latents, which are keys and, in part, values.

    Parameters
    ----------
    q : (B, 1, H, D)
    kv_cache : (num_pages, page_size, 1, D)
    block_table, cache_seqlens
        As in `decode`.
    softmax_scale : float

    Returns
    -------
    o : (B, 1, H, LATENT) float64
    lse : (B, H, 1) float64
    """
    return decode(q, kv_cache, kv_cache[..., :LATENT], block_table, cache_seqlens, softmax_scale, xp)


def append_kv(k, v, k_cache, v_cache, block_table, cache_seqlens, xp=np, *, kv_dtype=None, k_scale=1.0,
              v_scale=1.0):
    """Copies of the caches with T new tokens a sequence behind its first `cache_seqlens[b]` ones.

    Parameters
    ----------
    k, v : (B, T, HKV, D)
    k_cache, v_cache : (num_pages, page_size, HKV, D)
    block_table : (B, max_pages) int32
    cache_seqlens : (B,) int32
        Lengths before the append.
    kv_dtype, k_scale, v_scale
        As in `decode`: quantised caches get each token divided by its page's and heads' scales, rounded.
    """
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    page_size = k_cache.shape[1]

    def stored(token, cache, scale, page):  # (HKV, D)
        if kv_dtype is None:
            return token
        dims = getattr(scale, "ndim", 0)
        scale = (scale[page] if dims == 2 else scale)[:, None] if dims else float(scale)
        return quantise(widen(token, np.float32), kv_dtype, scale, xp).view(cache.dtype)

    for i in range(k.shape[0]):
        for t in range(k.shape[1]):
            position = int(cache_seqlens[i]) + t
            page, slot = int(block_table[i, position // page_size]), position % page_size
            k_cache[page, slot] = stored(k[i, t], k_cache, k_scale, page)  # (HKV, D)
            v_cache[page, slot] = stored(v[i, t], v_cache, v_scale, page)  # (HKV, D)
    return k_cache, v_cache


def rotary_tables(max_position: int, rotary_dim: int, base: float = 10000.0, xp=np):
    """Cosines and sines of RoPE's angles p · base^(−2i / rotary_dim), (max_position, rotary_dim / 2) float32.

    RoFormer (arXiv:2104.09864), section 3.2.2.
    """
    angles = xp.arange(max_position)[:, None] * base ** (-2 * xp.arange(rotary_dim // 2) / rotary_dim)
    return xp.cos(angles).astype(np.float32), xp.sin(angles).astype(np.float32)


def rotary_pairs(rotary_dim: int, interleaved: bool) -> tuple[slice, slice]:
    """Where the x and the y of the pairs lie in a row: neighbours (GPT-J), or halves (GPT-NeoX)."""
    if interleaved:
        return slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    return slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)


def rotate(x, cos, sin, positions, interleaved: bool = False):
    """RoPE (RoFormer, arXiv:2104.09864): each pair (x, y) becomes (x cos − y sin, y cos + x sin).

    Parameters
    ----------
    x : (B, T, H, D)
    cos, sin : (max_position, rotary_dim / 2) float32
    positions : (B, T) int
        The row of the tables for each token.
    interleaved : bool
        See `rotary_pairs`.

    Returns
    -------
    (B, T, H, D) float64, elements from rotary_dim on as they were.
    """
    rotated, (first, second) = widen(x).copy(), rotary_pairs(2 * cos.shape[1], interleaved)
    a, b = rotated[..., first].copy(), rotated[..., second].copy()  # (B, T, H, rotary_dim / 2)
    c, s = (widen(table)[positions][:, :, None] for table in (cos, sin))  # (B, T, 1, rotary_dim / 2)
    rotated[..., first], rotated[..., second] = a * c - b * s, b * c + a * s
    return rotated


def copy_pages(k_cache, v_cache, src, dst, k_out=None, v_out=None):
    """Copies of the caches that are written, with page dst[i] as page src[i] was.

    Parameters
    ----------
    k_cache, v_cache : (num_pages, page_size, HKV, D)
    src, dst : (n,) int32
    k_out, v_out : (num_pages_out, page_size, HKV, D), optional
        Where pages go; by default the same caches.
    """
    written = []
    for source, to in ((k_cache, k_out), (v_cache, v_out)):
        copy = (source if to is None else to).copy()
        for page, onto in zip(src.tolist(), dst.tolist()):
            copy[onto] = source[page]  # (page_size, HKV, D)
        written.append(copy)
    return tuple(written)


def merge_states(o_a, lse_a, o_b, lse_b, xp=np):
    """Attention over the union of two disjoint sets of keys, from the result over each.

    Parameters
    ----------
    o_a, o_b : (B, M, H, D)
    lse_a, lse_b : (B, H, M)

    Returns
    -------
    o : (B, M, H, D) float64
    lse : (B, H, M) float64
        Where one state is empty (lse = -inf) the other comes back as it is; where both are, (0, -inf).
    """
    a, b = widen(lse_a), widen(lse_b)  # (B, H, M)
    top = xp.maximum(a, b)  # (B, H, M)
    shift = xp.where(top == -xp.inf, 0.0, top)  # (B, H, M)
    weight_a, weight_b = xp.exp(a - shift), xp.exp(b - shift)  # (B, H, M)
    total = weight_a + weight_b  # (B, H, M)
    empty = total == 0  # (B, H, M)
    safe = xp.where(empty, 1.0, total)  # (B, H, M)

    def part(weight, o):
        share = xp.swapaxes(weight / safe, 1, 2)[..., None]  # (B, M, H, 1)
        # An empty state's O has no meaning: it must not reach the sum even as 0 · NaN.
        return xp.where(share == 0, 0.0, share * widen(o))  # (B, M, H, D)

    lse = xp.where(empty, -xp.inf, shift + xp.log(safe))  # (B, H, M)
    return part(weight_a, o_a) + part(weight_b, o_b), lse
