"""Tables of pages as FlashInfer has them, `(indptr, indices, last_page_len)`, and as the operations here do.

FlashInfer lists the pages of all sequences one behind another, in compressed rows (CSR); a block table gives
each sequence a row of equal width. Its layout: https://docs.flashinfer.ai/tutorials/kv_layout.html; the
lengths that follow from it: `flashinfer.get_seq_lens`.
"""
from __future__ import annotations

import sys

import numpy as np

from cuattn import contract
from cuattn.kvcache import UNUSED

PAGE_NUMBERS = 1 << 31  # what int32 tells apart


def from_flashinfer(indptr, indices, last_page_len, page_size: int, *, unused: int = UNUSED):
    """FlashInfer's tables as a block table and lengths.

    Parameters
    ----------
    indptr : int32 array, [B + 1]
        The pages of sequence b are indices[indptr[b] : indptr[b + 1]].
    indices : int32 array, [at least indptr[B]]
        What lies behind the last page is not read: a buffer for CUDA graphs may be longer.
    last_page_len : int32 array, [B]
        Tokens in each sequence's last page, 1 … page_size; of a sequence without pages it means nothing.
    page_size : int
        Tokens a page holds.
    unused : int
        Fills the table behind each sequence's last page.

    Returns
    -------
    block_table : int32 array, [B, max_pages]
        At least one column wide.
    cache_seqlens : int32 array, [B]
        Both of the kind of `indptr` (NumPy, CuPy, PyTorch) and on its device. How wide the table is depends
        on values, so a GPU is waited for.

    Raises
    ------
    ContractError
        One sentence: another shape or dtype, or values that are no such table.
    """
    _check_page_size(page_size)
    ends, pages = _on_host("indptr", indptr, "B + 1"), _on_host("indices", indices, "n")
    last = _on_host("last_page_len", last_page_len, "B")
    counts = _counts(ends, len(pages))
    contract.same("last_page_len.shape", last.shape, "indptr, less one,", counts.shape)
    bad = np.flatnonzero((counts > 0) & ((last < 1) | (last > page_size)))
    if bad.size:
        raise contract.refuse(f"last_page_len[{bad[0]}]", f"1 to {page_size}, what a page holds",
                              int(last[bad[0]]), "mend the table, or give its page size")
    lengths = np.where(counts > 0, (counts - 1) * page_size + last, 0)
    table = np.full((len(counts), max([1, *counts.tolist()])), unused, np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = pages[: ends[-1]]
    return _like(indptr, table), _like(indptr, _int32("last_page_len", lengths))


def to_flashinfer(block_table, cache_seqlens, page_size: int):
    """A block table and lengths as FlashInfer's tables, by which `from_flashinfer` gives them back.

    Parameters
    ----------
    block_table : int32 array, [B, max_pages]
        As in `cuattn.plan_decode`; entries behind a sequence's last page may hold anything.
    cache_seqlens : int32 array, [B]
        Tokens of each sequence.
    page_size : int
        Tokens a page holds.

    Returns
    -------
    indptr : int32 array, [B + 1]
    indices : int32 array, [indptr[B]]
        The pages that hold tokens; a sequence's reserved ones are left out.
    last_page_len : int32 array, [B]
        0 for a sequence without tokens, as `get_seq_lens` needs it; FlashInfer's documentation knows none.
        All of the kind of `block_table` and on its device. How many pages there are depends on values, so a
        GPU is waited for.

    Raises
    ------
    ContractError
        One sentence: another shape or dtype, a length that the table has no room for, or a negative page.
    """
    _check_page_size(page_size)
    table = _on_host("block_table", block_table, "B, max_pages")
    lengths = _on_host("cache_seqlens", cache_seqlens, "B")
    contract.same("cache_seqlens.shape", lengths.shape, "block_table", table.shape[:1])
    contract.page_table(PAGE_NUMBERS, page_size, table, lengths)
    counts = -(-lengths.astype(np.int64) // page_size)
    ends = _int32("block_table", np.concatenate([[0], np.cumsum(counts)]))
    last = lengths - np.maximum(counts - 1, 0) * page_size
    pages = table[np.arange(table.shape[1]) < counts[:, None]]
    return tuple(_like(block_table, x.astype(np.int32)) for x in (ends, pages, last))


def _counts(ends: np.ndarray, pages: int) -> np.ndarray:
    """Pages of each sequence, (B,) int64, where `ends` is an indptr over so many."""
    if not len(ends):
        raise contract.refuse("indptr", "B + 1 entries, the first of them 0", "none",
                              "give [0] for no sequence")
    counts = np.diff(ends.astype(np.int64))
    if ends[0] != 0 or (counts < 0).any():
        b = int((counts < 0).argmax()) + 1 if ends[0] == 0 else 0
        least = f"at least {int(ends[b - 1])}, where the pages of the sequence begin" if b else "0"
        raise contract.refuse(f"indptr[{b}]", least, int(ends[b]), "mend the table")
    if ends[-1] > pages:
        raise contract.refuse("indices", f"the {int(ends[-1])} pages that indptr counts", pages,
                              "give all of them")
    return counts


def _check_page_size(page_size) -> None:
    whole = isinstance(page_size, (int, np.integer)) and not isinstance(page_size, bool)
    if not whole or page_size < 1:
        raise contract.refuse("page_size", "an integer of at least 1", repr(page_size), "give the cache's")


def _on_host(name: str, x, dims: str) -> np.ndarray:
    """A NumPy array of a NumPy or CuPy array's values, or of a PyTorch tensor's."""
    contract.rank(name, x, dims)
    if hasattr(x, "detach"):
        x = x.detach().cpu().numpy()
    elif hasattr(x, "get"):
        x = x.get()
    x = np.asarray(x)
    if x.dtype != np.int32:
        raise contract.refuse(name, "dtype int32", x.dtype.name, "convert it first")
    return x


def _like(array, x: np.ndarray):
    """The values of `x` as an array of the caller's kind, on its device."""
    if hasattr(array, "detach"):
        return sys.modules["torch"].from_numpy(x).to(array.device)
    if hasattr(array, "get"):
        with array.device:
            return sys.modules["cupy"].asarray(x)
    return x


def _int32(name: str, x: np.ndarray) -> np.ndarray:
    """As int32, which must hold every value."""
    if x.size and x.max() > np.iinfo(np.int32).max:
        raise contract.refuse(name, "sums that int32 holds", int(x.max()), "split the batch")
    return x.astype(np.int32)
