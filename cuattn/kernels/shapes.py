"""The problems that kernels are planned for, in pure integers: no arrays, no lengths, no device."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class AttentionShape:
    """Dense attention: q (B, M, H, D) against k, v (B, N, HKV, D).

    `window` is how many keys before and behind its own a query sees, bottom-right aligned; −1 is all of them.
    With `causal` none behind is seen, whatever it says. `softcap`: whether scores are capped; `sinks`:
    whether each head has an extra logit. `packed`: B sequences lie in these many rows of queries and of keys,
    and M and N are the longest, for a plan sees no lengths. `page_size`: of these, the rows of a page where k
    and v are a paged cache. `dv`: the head dim of V and O, where it is not D.
    """

    b: int
    h: int
    hkv: int
    m: int
    n: int
    d: int
    dtype: str
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: bool = False
    sinks: bool = False
    packed: tuple[int, int] | None = None
    dv: int | None = None
    page_size: int | None = None

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.h // max(self.hkv, 1)

    @property
    def value_dim(self) -> int:
        """Elements of a row of V and of O."""
        return self.d if self.dv is None else self.dv

    @property
    def features(self) -> frozenset[str]:
        """What the shape asks for that a kernel may lack: of `Row.features` those that plans see here."""
        asked = {"window": self.window != (-1, -1), "softcap": self.softcap, "sinks": self.sinks,
                 "varlen": self.packed is not None, "paged": self.page_size is not None,
                 "dv": self.value_dim != self.d}
        return frozenset(name for name, wanted in asked.items() if wanted)

    def sequences(self, offsets=None) -> Counter[AttentionShape]:
        """Shapes of single sequences and how many have each.

        All have the same, or lie between `offsets`, those of queries and those of keys.
        """
        if self.packed is None:
            return Counter({replace(self, b=1): self.b})
        lengths = ([b - a for a, b in pairwise(side)] for side in offsets)
        return Counter(replace(self, b=1, m=m, n=n, packed=None) for m, n in zip(*lengths))

    @property
    def reach(self) -> tuple[int, int]:
        """`window` without −1: as many keys as there can be."""
        left, right = self.window
        return self.n if left < 0 else left, 0 if self.causal else self.m if right < 0 else right

    def keys(self, first: int, last: int) -> tuple[int, int]:
        """First and one past the last key that any of the queries from `first` to `last` sees."""
        left, right = self.reach
        own = self.n - self.m
        return max(first + own - left, 0), max(min(last + own + right + 1, self.n), 0)

    @property
    def visible(self) -> int:
        """Number of (query, key) pairs a head computes."""
        left, right = self.reach
        first = self.n - self.m  # the first query's own key

        def clipped(x: int) -> int:  # Σ of 0 … N nearest to x, x + 1, …, for each query one
            below = [max(end, 0) * (max(end, 0) + 1) // 2 for end in
                     (x + self.m - 1, x - 1, x + self.m - 1 - self.n, x - 1 - self.n)]
            return below[0] - below[1] - below[2] + below[3]

        return clipped(first + right + 1) - clipped(first - left)


@dataclass(frozen=True)
class DecodeShape:
    """M query tokens a sequence, (B, M, H, D), against a paged cache (num_pages, page_size, HKV, D).

    `max_pages` is the width of the block table. A plan sees no lengths: they live on the device and change
    every step. `causal`, `window`, `softcap` and `sinks` as in `AttentionShape`; the last query is a
    sequence's last token, so that of a single one `causal` is not said. `kv_dtype`: of `QUANTISED`, the cache's
    type where it is not `dtype`; `scales`: see `quantised.SCALES`.
    """

    b: int
    h: int
    hkv: int
    d: int
    page_size: int
    max_pages: int
    dtype: str
    kv_dtype: str | None = None
    scales: str = "one"
    m: int = 1
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: bool = False
    sinks: bool = False

    @property
    def stored(self) -> str:
        """The cache's type."""
        return self.kv_dtype or self.dtype

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.h // max(self.hkv, 1)

    @property
    def rows(self) -> int:
        """Queries and heads that share a KV head: the rows of a unit of work."""
        return self.m * self.group

    @property
    def features(self) -> frozenset[str]:
        """As `AttentionShape.features` has it."""
        asked = {"queries": self.m > 1, "quantised": self.kv_dtype is not None}
        return self.sequence(0).features | {name for name, wanted in asked.items() if wanted}

    @property
    def room(self) -> int:
        """Keys that a row of the block table can name."""
        return self.max_pages * self.page_size

    def sequence(self, length: int) -> AttentionShape:
        """Dense attention of one sequence of so many keys."""
        return AttentionShape(1, self.h, self.hkv, self.m, length, self.d, self.dtype, self.causal, self.window,
                              self.softcap, self.sinks)

    def seen(self, length: int) -> int:
        """How many keys of a sequence some query sees: its last ones."""
        first, end = self.sequence(length).keys(0, self.m - 1)
        return end - first

    def pairs(self, lengths) -> int:
        """(query, key) pairs that a head computes over sequences of these lengths."""
        return sum(self.sequence(length).visible for length in lengths)


@dataclass(frozen=True)
class CascadeShape:
    """M query tokens a sequence against keys that lie in levels, those of groups of neighbouring sequences.

    `levels`: of each whose keys are shared (groups, pages in a row of its table). `own`: the pages in a row of the
    last level's table, where that holds each sequence's own keys, which alone `causal` may hide; else None.
    """

    b: int
    h: int
    hkv: int
    d: int
    page_size: int
    levels: tuple[tuple[int, int], ...]
    own: int | None
    dtype: str
    m: int = 1
    causal: bool = False

    @property
    def decode(self) -> DecodeShape:
        """The sequences' own keys."""
        return DecodeShape(self.b, self.h, self.hkv, self.d, self.page_size, self.own or 0, self.dtype, m=self.m,
                           causal=self.causal)

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.decode.group

    @property
    def rows(self) -> int:
        """Of a sequence: queries and heads that share a KV head."""
        return self.decode.rows

    @property
    def features(self) -> frozenset[str]:
        """As `AttentionShape.features` has it."""
        return self.decode.features


def level_name(level: int, array: str) -> str:
    """What an array of a level of a cascade is called among tensors, and in what is said of it."""
    return f"levels[{level}].{array}"


@dataclass(frozen=True)
class AppendShape:
    """T new rows a sequence, (B, T, HKV, D), written into a paged cache.

    `rotary` elements of each K row are rotated by its position, and `h` heads of queries with it, 0 for none;
    `interleaved`: in neighbouring pairs, else element i with i + rotary / 2. `kv_dtype`, `scales`: as in
    `DecodeShape`.
    """

    b: int
    t: int
    hkv: int
    d: int
    page_size: int
    dtype: str
    h: int = 0
    rotary: int = 0
    interleaved: bool = False
    kv_dtype: str | None = None
    scales: str = "one"

    @property
    def stored(self) -> str:
        """The cache's type."""
        return self.kv_dtype or self.dtype

    @property
    def features(self) -> frozenset[str]:
        """What the shape asks for that a kernel may lack."""
        return frozenset({"quantised"} if self.kv_dtype else ())


@dataclass(frozen=True)
class PagesShape:
    """n pages of (page_size, HKV, D) elements of `width` bytes in a cache of keys, and as many of values."""

    n: int
    page_size: int
    hkv: int
    d: int
    width: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of K, and of one of V."""
        return self.page_size * self.hkv * self.d * self.width


@dataclass(frozen=True)
class ProbeShape:
    """A kernel that measures the device itself: `bytes` to move or `flops` to do."""

    bytes: int = 0
    flops: int = 0
    dtype: str = "bfloat16"
