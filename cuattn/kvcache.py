"""A paged cache of keys and values: one pool of pages, a free list, and a table of pages for each sequence.

Token t of a sequence lies in slot t % page_size of its page number t // page_size. The pool never moves: a
sequence grows by taking a page from the free list, wherever that page lies.
"""
from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

UNUSED = -1  # in the entries of a block table behind a sequence's last page


class OutOfPages(RuntimeError):
    """The pool has too few free pages for the request; nothing has changed."""


class PagedKVCache:
    """Pages of keys and values, (num_pages, page_size, HKV, D) each, in the memory of one machine.

    Parameters
    ----------
    machine : Machine
        Where the pool lives; None keeps the bookkeeping alone, without arrays.
    num_pages, page_size, hkv, d : int
    dtype : str
        "float16", "bfloat16"; of a quantised cache "int8", or "uint8" for the bytes of e4m3 (`kv_dtype`).

    Notes
    -----
    A sequence is named by any hashable value. A page belongs to one sequence or to the free list, never to
    both, nor to two sequences (`check_invariants`). Freed pages are reused last in, first out, so that a
    small load touches few.
    """

    def __init__(self, machine, num_pages: int, page_size: int, hkv: int, d: int, dtype: str = "bfloat16"):
        for name, value in (("num_pages", num_pages), ("page_size", page_size), ("hkv", hkv), ("d", d)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}; change it")
        self.machine, self.num_pages, self.page_size = machine, int(num_pages), int(page_size)
        self.hkv, self.d, self.dtype = int(hkv), int(d), dtype
        self.k_cache = self.v_cache = None
        if machine is not None:
            shape = (self.num_pages, self.page_size, self.hkv, self.d)
            self.k_cache, self.v_cache = machine.empty(shape, dtype), machine.empty(shape, dtype)
        self._free = list(range(self.num_pages - 1, -1, -1))  # the last one is taken first
        self._tables: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}
        self._loose: set[int] = set()  # pages given out by allocate(), which belong to no sequence here

    # Pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """Names of the sequences held, in the order they came."""
        return tuple(self._tables)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens of one sequence fill or begin."""
        return -(-num_tokens // self.page_size)

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages wanted, {len(self._free)} of {self.num_pages} free; "
                "free a sequence or enlarge the pool"
            )
        return [self._free.pop() for _ in range(count)]

    def allocate(self, num_tokens: int) -> list[int]:
        """Page ids with room for `num_tokens`, for callers with tables of their own; see `release`."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens: expected 0 or more, got {num_tokens}; change it")
        blocks = self._take(self.pages_for(num_tokens))
        self._loose.update(blocks)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give back pages from `allocate`; nothing happens if one of them is not out."""
        blocks = list(blocks)
        wrong = [block for block in blocks if block not in self._loose]
        if wrong or len(set(blocks)) < len(blocks):
            what = f"page {wrong[0]}, which allocate() has not given out" if wrong else "the same page twice"
            raise ValueError(f"blocks: expected pages from allocate(), each once, got {what}; mend the list")
        self._loose.difference_update(blocks)
        self._free.extend(reversed(blocks))

    # Sequences

    def length(self, sequence: Hashable) -> int:
        """Tokens written so far."""
        self._known(sequence)
        return self._lengths[sequence]

    def pages(self, sequence: Hashable) -> tuple[int, ...]:
        """Its pages, in the order of its tokens, reserved ones included."""
        self._known(sequence)
        return tuple(self._tables[sequence])

    def _known(self, sequence) -> None:
        if sequence not in self._tables:
            raise KeyError(f"sequence: expected one the cache holds, got {sequence!r}; append to it first")

    def reserve(self, sequence: Hashable, num_tokens: int) -> None:
        """Take the pages for a total length of `num_tokens`, now rather than token by token.

        Raises
        ------
        OutOfPages
            Nothing has changed, and the sequence has not come into being.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens: expected 0 or more, got {num_tokens}; change it")
        self._grow({sequence: num_tokens})

    def _grow(self, totals: dict[Hashable, int]) -> None:
        """Room for these total lengths, for all sequences or for none."""
        held = {name: len(self._tables.get(name, ())) for name in totals}
        missing = {name: max(0, self.pages_for(total) - held[name]) for name, total in totals.items()}
        taken = self._take(sum(missing.values()))
        for name, count in missing.items():
            self._tables.setdefault(name, []).extend(taken[:count])
            self._lengths.setdefault(name, 0)
            del taken[:count]

    def _shrink(self, held: dict[Hashable, int | None]) -> None:
        """Back to so many pages each; None forgets the sequence."""
        for name, count in held.items():
            table = self._tables[name]
            self._free.extend(reversed(table[count or 0 :]))
            del table[count or 0 :]
            if count is None:
                del self._tables[name], self._lengths[name]

    def append(self, sequences: Sequence[Hashable], k, v) -> None:
        """Write T new tokens behind each of some sequences; one kernel launch for all of them.

        Parameters
        ----------
        sequences : sequence of B names
            Each once. New names start empty.
        k, v : (B, T, HKV, D)
            Arrays of the machine, in the cache's dtype.

        Raises
        ------
        OutOfPages
            Nothing has changed.
        """
        from cuattn.ops_cache import append_kv  # here: it needs a machine, and the bookkeeping does not

        names = list(sequences)
        if len(set(names)) < len(names):
            raise ValueError("sequences: expected each name once, got one twice; append its tokens together")
        for name, array in (("k", k), ("v", v)):
            wanted = (len(names), k.shape[1] if k.ndim == 4 else "T", self.hkv, self.d)
            if tuple(array.shape) != wanted:
                raise ValueError(f"{name}: expected {wanted}, got shape {tuple(array.shape)}; reshape it")
        before = np.array([self._lengths.get(name, 0) for name in names], np.int32)
        held = {name: len(self._tables[name]) if name in self._tables else None for name in names}
        self._grow({name: int(n) + k.shape[1] for name, n in zip(names, before)})
        try:
            if names and k.shape[1]:
                table = self.block_table(names)
                append_kv(k, v, self.k_cache, self.v_cache, table, self.machine.upload(before))
        except Exception:
            self._shrink(held)  # a refused or failed launch holds no pages
            raise
        for name, n in zip(names, before):
            self._lengths[name] = int(n) + k.shape[1]

    def advance(self, sequence: Hashable, num_tokens: int) -> None:
        """Count tokens that someone else wrote into reserved pages."""
        self._known(sequence)
        total = self._lengths[sequence] + num_tokens
        room = len(self._tables[sequence]) * self.page_size
        if num_tokens < 0 or total > room:
            left = room - self._lengths[sequence]
            raise ValueError(f"num_tokens: expected 0 … {left}, got {num_tokens}; reserve first")
        self._lengths[sequence] = total

    def free(self, sequence: Hashable) -> None:
        """Forget a sequence; its pages are free again."""
        self._known(sequence)
        self._free.extend(reversed(self._tables.pop(sequence)))
        del self._lengths[sequence]

    # What kernels read

    def block_table(self, sequences: Sequence[Hashable] | None = None):
        """(B, max_pages) int32 page ids of some sequences (all, by default); -1 behind each one's last page.

        On the machine, or a NumPy array where the cache has none. At least one column wide.
        """
        names = self.sequences if sequences is None else list(sequences)
        tables = [self.pages(name) for name in names]
        table = np.full((len(names), max([1, *map(len, tables)])), UNUSED, np.int32)
        for row, pages in zip(table, tables):
            row[: len(pages)] = pages
        return table if self.machine is None else self.machine.upload(table)

    def cache_seqlens(self, sequences: Sequence[Hashable] | None = None):
        """(B,) int32 lengths of the same sequences."""
        names = self.sequences if sequences is None else list(sequences)
        lengths = np.array([self.length(name) for name in names], np.int32)
        return lengths if self.machine is None else self.machine.upload(lengths)

    def check_invariants(self) -> None:
        """Raise RuntimeError if a page is lost or held twice, or a sequence is longer than its pages."""
        held = [page for table in self._tables.values() for page in table]
        everywhere = sorted([*held, *self._free, *self._loose])
        if everywhere != list(range(self.num_pages)):
            raise RuntimeError(f"pages: {self.num_pages} in the pool, but held and free are {everywhere}")
        for name, table in self._tables.items():
            if self._lengths[name] > len(table) * self.page_size:
                raise RuntimeError(f"sequence {name!r}: {self._lengths[name]} tokens in {len(table)} pages")
        if self._lengths.keys() != self._tables.keys():
            raise RuntimeError("sequences: lengths and tables do not name the same ones")


def paginate(
    k, v, lengths, page_size: int, *, order: str = "shuffled", spare: int = 2, unused: int = UNUSED,
    seed: int = 0,
):
    """Lay dense keys and values out in pages, as NumPy arrays; slots and pages that hold no token are NaN.

    Parameters
    ----------
    k, v : (B, N, HKV, D) NumPy arrays
    lengths : (B,) int
        Tokens of each sequence, at most N.
    page_size : int
    order : {"sorted", "reversed", "shuffled"}
        Order of the pages in the pool.
    spare : int
        Pages that no sequence uses.
    unused : int
        Fills the table behind each sequence's last page; no kernel may follow it.

    Returns
    -------
    k_cache, v_cache : (num_pages, page_size, HKV, D)
    block_table : (B, max_pages) int32
    cache_seqlens : (B,) int32
    """
    if order not in ("sorted", "reversed", "shuffled"):
        raise ValueError(f"order: expected 'sorted', 'reversed' or 'shuffled', got {order!r}; choose one")
    lengths = np.asarray(lengths, np.int32)
    counts = [-(-int(n) // page_size) for n in lengths]
    num_pages = max(1, sum(counts) + spare)
    ids = np.arange(num_pages)
    if order != "sorted":
        ids = ids[::-1] if order == "reversed" else np.random.default_rng(seed).permutation(num_pages)
    table = np.full((len(lengths), max([1, *counts])), unused, np.int32)
    caches = [np.full((num_pages, page_size, *k.shape[2:]), np.nan, k.dtype) for _ in range(2)]
    first = 0
    for b, (n, count) in enumerate(zip(lengths, counts)):
        mine = ids[first : first + count]
        table[b, :count] = mine
        for cache, x in zip(caches, (k, v)):
            padded = np.full((count * page_size, *x.shape[2:]), np.nan, x.dtype)
            padded[:n] = x[b, :n]
            cache[mine] = padded.reshape(count, page_size, *x.shape[2:])
        first += count
    return *caches, table, lengths
