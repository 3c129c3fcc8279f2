"""What callers may pass, checked before anything is launched.

One sentence an error: argument, expected, got, what to do.
"""
from __future__ import annotations

import math

import numpy as np

from cuattn.kernels.base import GRID_LIMIT, QUANTISED
from cuattn.machine import Tensor
from cuattn.quantise import ARRAY_TYPES

MAX_HEADS = 256  # more heads than any model has: (B, H, N, D) read as (B, N, H, D)
WORD = 16  # bytes of one vector access
PAIR = 8  # of one access to two neighbouring float32
SMALLEST_CAP, LARGEST_CAP = 2.0**-20, 2.0**20
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-100, 2.0**100  # times log₂e still normal in float32


class ContractError(ValueError):
    """An argument that the operation cannot take."""


def refuse(argument: str, expected: str, got, remedy: str) -> ContractError:
    """The sentence every error is made of."""
    return ContractError(f"{argument}: expected {expected}, got {got}; {remedy}")


def rank(name: str, x, dims: str) -> None:
    """`dims` names the dimensions, as in "B, N, HKV, D"."""
    if not hasattr(x, "shape"):
        raise refuse(name, f"an array ({dims})", type(x).__name__,
                     "make it a NumPy, CuPy or CUDA PyTorch array")
    if len(x.shape) != dims.count(",") + 1:
        raise refuse(name, f"shape ({dims})", f"{tuple(x.shape)}", "reshape it")


def same(name: str, got, other: str, expected) -> None:
    if got != expected:
        raise refuse(name, f"{expected} as {other} has", got, "make them agree")


def dtype(name: str, t: Tensor, allowed) -> None:
    if t.dtype not in allowed:
        raise refuse(name, f"dtype {' or '.join(allowed)}", t.dtype, "convert it first")


def contiguous(name: str, t: Tensor) -> None:
    """A row's elements must lie side by side."""
    if t.shape and not t.empty and t.shape[-1] > 1 and t.strides[-1] != 1:
        raise refuse(name, "a contiguous last dimension", f"stride {t.strides[-1]}", "make a contiguous copy")


def vectors(name: str, t: Tensor, word: int = WORD) -> None:
    """Rows must be contiguous and every row aligned to a word: kernels move one at a time."""
    if t.empty:
        return
    contiguous(name, t)
    step = word // t.itemsize
    if t.address % word or any(stride % step for stride in t.strides[:-1]):
        raise refuse(name, f"rows aligned to {word} bytes (every stride a multiple of {step} elements)",
                     f"strides {t.strides} at address …{t.address % 256:#x}", "make a contiguous copy")


def words(t: Tensor) -> None:
    """A cache of which only bytes are moved: an element of a power of two of them, a row in whole words."""
    if t.itemsize not in (1, 2, 4, 8):
        raise refuse("k_cache", "elements of 1, 2, 4 or 8 bytes", t.dtype, "view it as another type")
    step = WORD // t.itemsize
    if t.shape[-1] % step:
        raise refuse("head dim", f"a multiple of {step}, rows of whole {WORD}-byte words", t.shape[-1],
                     "pad the cache")


def writable(name: str, t: Tensor) -> None:
    """Every element of an output must have a place of its own."""
    if t.empty:
        return
    covered = 1
    for stride, size in sorted((abs(stride), size) for size, stride in zip(t.shape, t.strides) if size > 1):
        if stride < covered:
            raise refuse(name, "an array whose elements do not overlap",
                         f"strides {t.strides} for shape {t.shape}", "make a contiguous copy")
        covered = stride * size


def apart(name: str, t: Tensor, others: dict[str, Tensor]) -> None:
    """An output may not lie among the inputs: blocks write it while others still read."""
    low, high = t.extent
    for other, x in others.items():
        first, last = x.extent
        if low < last and first < high:
            raise refuse(name, f"memory apart from {other}", "memory that overlaps it",
                         "give it memory of its own")


def head_dim(d: int, row) -> None:
    if d not in row.head_dims:
        last, step = row.head_dims[-1], row.head_dims.step
        raise refuse("head dim", f"a multiple of {step} up to {last} for kernel '{row.name}'", d,
                     "pad q, k and v with zeros")


def value_dim(dv: int, d: int, row) -> None:
    """Rows of V may be shorter than those of K."""
    if dv not in row.head_dims or dv > d:
        raise refuse("v", f"a head dim that is a multiple of {row.head_dims.step} up to k's {d}", dv,
                     "pad v, or q and k, with zeros")


def heads(h: int, hkv: int) -> None:
    if hkv == 0 and h == 0:
        return
    if hkv == 0 or h % hkv:
        raise refuse("q", f"a number of heads that k's {hkv} divide", h,
                     "check the head dimension of q and k")


def scale(value: float | None, d: int | None) -> float:
    """The softmax scale, 1/√D by default; without a D it must be given.

    It must be positive, because the running maximum is taken before scaling, and an ordinary number in float32,
    the type in which kernels use it.
    """
    if value is None and d is not None:
        return 1.0 / math.sqrt(d) if d else 1.0
    number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    if not (number and SMALLEST_SCALE <= value <= LARGEST_SCALE):
        raise refuse("softmax_scale", f"a number from {SMALLEST_SCALE:.2g} to {LARGEST_SCALE:.2g}", value,
                     "give the model's" if d is None else "leave it out for 1/sqrt(D)")
    return float(value)


def kv_dtype(name: str | None, cache: Tensor, other: str, dtype: str) -> str | None:
    """What a cache holds of `QUANTISED`, None if it is of `other`'s dtype.

    `name` says it of a uint8 array, the form in which CuPy has e4m3.
    """
    if name is None:
        if cache.dtype not in ARRAY_TYPES and cache.dtype != dtype:
            raise refuse("k_cache.dtype", f"{dtype} as {other} has, or {' or '.join(ARRAY_TYPES)}", cache.dtype,
                         "give kv_dtype with a uint8 cache, else convert it")
        return ARRAY_TYPES.get(cache.dtype)
    if name not in QUANTISED:
        raise refuse("kv_dtype", f"None or {' or '.join(map(repr, QUANTISED))}", repr(name), "choose one")
    if cache.dtype != "uint8" and ARRAY_TYPES.get(cache.dtype) != name:
        raise refuse("k_cache.dtype", f"uint8, the bytes of {name}", cache.dtype, "view it as uint8")
    return name


def _scale(name: str, x) -> float:
    """A number that a scale may be."""
    number = isinstance(x, (int, float, np.floating, np.integer)) and not isinstance(x, bool)
    if not (number and SMALLEST_SCALE <= x <= LARGEST_SCALE):
        raise refuse(name, f"a number from {SMALLEST_SCALE:.2g} to {LARGEST_SCALE:.2g}, or an array (HKV) or "
                     "(num_pages, HKV)", repr(x) if number else type(x).__name__, "give the cache's")
    return float(x)


def kv_scales(k_scale, v_scale) -> tuple[dict, dict]:
    """(numbers, arrays) by name, one of them empty; a number that is left out stays None."""
    given = {"k_scale": k_scale, "v_scale": v_scale}
    arrays = {name: x for name, x in given.items() if getattr(x, "shape", ())}
    if len(arrays) == 1:
        (name,), (other,) = arrays, given.keys() - arrays.keys()
        raise refuse(other, f"an array as {name} is", repr(given[other]), "give both as arrays")
    return {} if arrays else {name: x if x is None else _scale(name, x) for name, x in given.items()}, arrays


def scale_kind(kv_dtype: str | None, numbers: dict, t: dict[str, Tensor]) -> str:
    """Of `kernels.quantised.SCALES`, after a look at their shapes; `t` holds the caches too."""
    given = [name for name in ("k_scale", "v_scale") if name in t or numbers.get(name) is not None]
    if kv_dtype is None and given:
        raise refuse(given[0], f"None for a cache of {t['k_cache'].dtype}", "a scale", "leave it out")
    if "k_scale" not in t:
        return "one"
    pages, _, hkv, _ = t["k_cache"].shape
    for name in ("k_scale", "v_scale"):
        dtype(name, t[name], ("float32",))
        contiguous(name, t[name])
        if t[name].shape not in ((hkv,), (pages, hkv)):
            raise refuse(name, f"shape ({hkv},) or ({pages}, {hkv}), of k_cache's heads or pages and heads",
                         t[name].shape, "reshape it")
        if len(t[name].shape) == 2 and pages > 1 and t[name].strides[0] != hkv and not t[name].empty:
            raise refuse(name, "rows one behind the other", f"strides {t[name].strides}", "make a contiguous copy")
    same("v_scale.shape", t["v_scale"].shape, "k_scale", t["k_scale"].shape)
    return "heads" if len(t["k_scale"].shape) == 1 else "pages"


def window(size, causal: bool, m: int, n: int) -> tuple[bool, tuple[int, int]]:
    """`causal` and `window_size` without what hides nothing from M queries of N keys.

    A right side of 0 is the causal mask; −1 says that nothing is hidden on a side.
    """
    pair = isinstance(size, (tuple, list)) and len(size) == 2
    if not pair or any(not isinstance(x, (int, np.integer)) or isinstance(x, bool) or x < -1 for x in size):
        raise refuse("window_size", "two integers of at least -1, the keys before and behind a query's own",
                     repr(size), "use -1 for all of them")
    left, right = (int(x) for x in size)
    causal = causal or right == 0
    return causal, (-1 if left >= n - 1 else left, -1 if causal or right >= m - 1 else right)


def softcap(value) -> float:
    """The bound of the scaled scores, 0 for none; in float32 it must leave room for scale / cap."""
    number = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    if not (number and (value == 0 or SMALLEST_CAP <= value <= LARGEST_CAP)):
        raise refuse("softcap", f"0 for none, or a number from {SMALLEST_CAP:.2g} to {LARGEST_CAP:.2g}",
                     value, "leave it out for none")
    return float(value)


def sinks(t: Tensor, h: int) -> None:
    """One number a head."""
    dtype("sinks", t, ("float32",))
    same("sinks.shape", t.shape, "q's heads", (h,))
    contiguous("sinks", t)


def offsets(side: str, values: np.ndarray, total: int, longest: int) -> None:
    """Values of cu_seqlens_q or cu_seqlens_k, before anything is read through them."""
    name, values = f"cu_seqlens_{side}", values.astype(np.int64)
    inside = (values >= 0) & (values <= total)
    if not inside.all():
        at = int(np.argmin(inside))
        raise refuse(f"{name}[{at}]", f"0 to {total}, what the arrays hold", int(values[at]),
                     "mend the offsets")
    lengths = np.diff(values)
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0)) + 1
        raise refuse(f"{name}[{at}]", f"at least {values[at - 1]}, the one before", int(values[at]),
                     "put them in order")
    if (lengths > longest).any():
        at = int(lengths.argmax())
        raise refuse(f"max_seqlen_{side}", f"at least {lengths[at]}, the length of sequence {at}", longest,
                     "give the longest sequence's length")


def cuts(name: str, values: np.ndarray, batch: int) -> None:
    """Values of offsets that cut a batch into groups."""
    expected = np.clip(np.maximum.accumulate(values.astype(np.int64)), 0, batch)
    expected[0], expected[-1] = 0, batch
    if (bad := np.flatnonzero(values != expected)).size:
        i = int(bad[0])
        rule = "0, the first" if i == 0 else f"{batch}, the batch" if i == len(values) - 1 else (
            f"{int(expected[i - 1])} to {batch}, behind the one before")
        raise refuse(f"{name}[{i}]", rule, int(values[i]), "mend the offsets")


def layout(name: str | None, q_shape, k_shape) -> str:
    """"bshd" by default; refused where that reading would mean more heads than any model has."""
    if name is None:
        if len(q_shape) == 4 and len(k_shape) == 4 and max(q_shape[2], k_shape[2]) > MAX_HEADS:
            b, s, h, d = q_shape
            raise ContractError(
                f"layout: q of shape {tuple(q_shape)} reads as (B={b}, M={s}, H={h}, D={d}), or as "
                f"(B={b}, H={s}, M={h}, D={d}); say layout='bshd' or layout='bhsd'")
        return "bshd"
    if name not in ("bshd", "bhsd"):
        raise refuse("layout", "'bshd' or 'bhsd'", repr(name), "choose one")
    return name


def grid(b: int, h: int) -> None:
    for argument, extent in (("batch", b), ("heads", h)):
        if extent > GRID_LIMIT:
            raise refuse(argument, f"at most {GRID_LIMIT}", extent, "split the call")


def page_size(name: str, t: Tensor) -> None:
    """The second dimension of a cache."""
    if t.shape[1] == 0:
        raise refuse(name, "a page size of at least 1", 0, "check its shape (num_pages, page_size, HKV, D)")


def page_table(num_pages: int, page_size: int, table: np.ndarray, lengths: np.ndarray, more: int = 0,
               name: str = "cache_seqlens", table_name: str = "block_table") -> None:
    """Values of a block table and of lengths, before anything is read through them.

    `more` is the number of rows about to be written behind each length; `name` and `table_name` are the
    arguments'. Entries behind a sequence's last page may hold anything.
    """
    lengths = lengths.astype(np.int64)
    capacity = table.shape[1] * page_size
    if lengths.size and (lengths.min() < 0 or lengths.max() + more > capacity):
        b = int(lengths.argmin() if lengths.min() < 0 else lengths.argmax())
        raise refuse(f"{name}[{b}]",
                     f"0 to {capacity - more}, what {table.shape[1]} pages of {page_size} hold",
                     int(lengths[b]), f"widen {table_name} or shorten the sequence")
    used = np.arange(table.shape[1])[None, :] * page_size < (lengths + more)[:, None]
    bad = used & ((table < 0) | (table >= num_pages))
    if bad.any():
        b, i = (int(x) for x in np.argwhere(bad)[0])
        raise refuse(f"{table_name}[{b}, {i}]", f"a page number below {num_pages}", int(table[b, i]),
                     "mend the table")
    if more:
        _written_once(table, lengths // page_size, (lengths + more - 1) // page_size)


def positions(lengths: np.ndarray, more: int, most: int) -> None:
    """Values of lengths behind which `more` rows come, of which each needs one of `most` rows of angles."""
    if more and lengths.size and int(lengths.max()) + more > most:
        b = int(lengths.argmax())
        raise refuse(f"cache_seqlens[{b}]", f"at most {most - more}, so that cos has a row a new position",
                     int(lengths[b]), "give longer tables")


def page_pairs(num_pages: int, num_pages_out: int, src: np.ndarray, dst: np.ndarray, within: bool) -> None:
    """Values of two lists of pages before those of the first are copied to those of the second.

    Pairs are copied in any order, so none may write what another writes or, `within` one pool, reads.
    """
    for name, pages, count in (("src", src, num_pages), ("dst", dst, num_pages_out)):
        if (bad := np.flatnonzero((pages < 0) | (pages >= count))).size:
            i = int(bad[0])
            raise refuse(f"{name}[{i}]", f"a page number from 0 to {count - 1}", int(pages[i]),
                         "mend the list")
    order = np.argsort(dst, kind="stable")
    pages = dst[order]
    if (twice := np.flatnonzero(pages[1:] == pages[:-1])).size:
        first, second = (int(order[twice[0] + step]) for step in (0, 1))
        raise refuse(f"dst[{second}]", "a page that is no other pair's destination",
                     f"{int(dst[second])}, which is dst[{first}] as well", "keep one of the pairs")
    if within and len(dst):
        writer = order[np.minimum(np.searchsorted(pages, src), len(pages) - 1)]
        if (bad := np.flatnonzero((dst[writer] == src) & (writer != np.arange(len(src))))).size:
            i = int(bad[0])
            raise refuse(f"src[{i}]", "a page that is no other pair's destination",
                         f"{int(src[i])}, which is dst[{int(writer[i])}]", "copy in two calls")


def _written_once(table: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
    """Two sequences may read one page; where both append to it, the result would depend on who comes last."""
    owner: dict[int, int] = {}
    for b in range(len(table)):
        for i in range(int(first[b]), int(last[b]) + 1):
            page = int(table[b, i])
            if owner.setdefault(page, b) != b:
                raise refuse(f"block_table[{b}, {i}]", "a page that no other sequence appends to",
                             f"{page}, which sequence {owner[page]} appends to as well",
                             "copy the page first")
