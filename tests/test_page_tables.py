"""FlashInfer's tables of pages and block tables: each gives the other back; what is no table is refused."""
from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn import from_flashinfer, reference, to_flashinfer
from cuattn.kvcache import paginate

LENGTHS = st.lists(st.integers(0, 40), max_size=6)
PAGES = st.integers(1, 17)


def ints(*lists) -> list[np.ndarray]:
    return [np.array(x, np.int32) for x in lists]


def sequences(rng, lengths, page):
    """Pages of each sequence, none of which two share, and the tokens in its last page."""
    counts = [-(-n // page) for n in lengths]
    order = rng.permutation(sum(counts) + 3).astype(np.int32)
    ends = np.cumsum([0, *counts])
    return [order[ends[b] : ends[b + 1]] for b in range(len(lengths))], ends


@given(LENGTHS, PAGES, st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_flashinfers_tables_become_rows(lengths, page, more, seed):
    """What lies behind the last page of all is not read, nor the last page of a sequence without any."""
    rng = np.random.default_rng(seed)
    pages, ends = sequences(rng, lengths, page)
    last = [n - (len(p) - 1) * page if n else int(rng.integers(-5, 99)) for n, p in zip(lengths, pages)]
    indices = np.concatenate([*pages, np.full(more, -7)]).astype(np.int32)
    table, seqlens = from_flashinfer(*ints(ends), indices, *ints(last), page, unused=-3)
    assert (table.dtype, seqlens.dtype) == (np.int32, np.int32) and seqlens.tolist() == lengths
    assert table.shape == (len(lengths), max([1, *map(len, pages)]))
    for row, mine in zip(table, pages):
        assert row[: len(mine)].tolist() == mine.tolist() and (row[len(mine) :] == -3).all()


@given(LENGTHS, PAGES, st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_rows_become_flashinfers_tables_and_come_back(lengths, page, spare, seed):
    """The table may be wider than the longest sequence and hold anything there."""
    rng = np.random.default_rng(seed)
    pages, ends = sequences(rng, lengths, page)
    width = max(map(len, pages), default=0) + spare
    table = rng.integers(-9, 2**31 - 1, (len(lengths), width)).astype(np.int32)
    for row, mine in zip(table, pages):
        row[: len(mine)] = mine
    indptr, indices, last = to_flashinfer(table, *ints(lengths), page)
    assert {x.dtype for x in (indptr, indices, last)} == {np.dtype(np.int32)}
    assert indptr.tolist() == ends.tolist() and indices.tolist() == [p for mine in pages for p in mine]
    # As flashinfer.get_seq_lens has it.
    assert (np.maximum(np.diff(indptr) - 1, 0) * page + last).tolist() == lengths
    assert ((last >= 1) == (np.array(lengths) > 0)).all() and (last <= page).all()
    again, seqlens = from_flashinfer(indptr, indices, last, page)
    assert seqlens.tolist() == lengths and len(again) == len(pages)
    for row, mine in zip(again, pages):
        assert row[: len(mine)].tolist() == mine.tolist() and (row[len(mine) :] == -1).all()


def test_a_cache_is_read_the_same_by_either(rng):
    lengths = [5, 0, 16, 33]
    k, v = (rng.standard_normal((4, 33, 2, 8)).astype("float16") for _ in "kv")
    k_cache, _, table, seqlens = paginate(k, v, lengths, 16, unused=2147480000)
    again, same = from_flashinfer(*to_flashinfer(table, seqlens, 16), 16)
    for b, n in enumerate(lengths):
        np.testing.assert_array_equal(reference.gather(k_cache, again[b], int(same[b])), k[b, :n])


def test_on_the_machines_own_arrays(machine):
    arrays = [machine.upload(x) for x in ints([0, 2, 2, 3], [9, 4, 7], [3, 0, 16])]
    table, seqlens = from_flashinfer(*arrays, 16)
    assert type(table) is type(seqlens) is type(arrays[0])
    assert machine.download(table).tolist() == [[9, 4], [-1, -1], [7, -1]]
    assert machine.download(seqlens).tolist() == [19, 0, 16]
    back = to_flashinfer(table, seqlens, 16)
    assert all(type(x) is type(arrays[0]) for x in back)
    assert [machine.download(x).tolist() for x in back] == [machine.download(x).tolist() for x in arrays]


class PlayedTensor:
    """What is asked of a PyTorch tensor: its values come by way of the host, new ones go to its device."""

    def __init__(self, values, device="cpu", attached=True):
        self.values, self.device, self.attached, self.shape = values, device, attached, values.shape

    def detach(self):
        return PlayedTensor(self.values, self.device, attached=False)

    def cpu(self):
        return PlayedTensor(self.values, "cpu", self.attached)

    def to(self, device):
        return PlayedTensor(self.values, device)

    def numpy(self):
        assert self.device == "cpu" and not self.attached
        return self.values


def test_pytorch_tensors_stay_on_their_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=PlayedTensor))
    given = [PlayedTensor(x, "cuda:1") for x in ints([0, 2, 3], [9, 4, 7], [3, 16])]
    table, seqlens = from_flashinfer(*given, 16)
    assert table.device == seqlens.device == "cuda:1" and table.values.tolist() == [[9, 4], [7, -1]]
    back = to_flashinfer(table, seqlens, 16)
    assert [(x.device, x.values.tolist()) for x in back] == [(x.device, x.values.tolist()) for x in given]


def test_pytorchs_own_tensors():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    given = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [9, 4, 7], [3, 16])]
    back = to_flashinfer(*from_flashinfer(*given, 16), 16)
    assert all(torch.equal(x, y) for x, y in zip(given, back))


@pytest.mark.parametrize("indptr, indices, last, page, words", [
    ([1, 2], [3, 4], [1], 16, r"indptr\[0\]: expected 0, got 1; mend the table"),
    ([0, 3, 2], [3, 4, 5], [1, 1], 16, r"indptr\[2\]: expected at least 3, where .* begin, got 2; mend"),
    ([0, 3], [3, 4], [1], 16, "indices: expected the 3 pages that indptr counts, got 2; give all of them"),
    ([0, 1], [3], [0], 16, r"last_page_len\[0\]: expected 1 to 16, what a page holds, got 0; mend the table"),
    ([0, 0, 1], [3], [0, 17], 16, r"last_page_len\[1\]: expected 1 to 16, what a page holds, got 17"),
    ([0, 1], [3], [1, 1], 16, r"last_page_len.shape: expected \(1,\) as indptr, less one, has, got \(2,\)"),
    ([], [], [], 16, r"indptr: expected B \+ 1 entries, the first of them 0, got none; give \[0\]"),
    ([[0, 1]], [3], [1], 16, r"indptr: expected shape \(B \+ 1\), got \(1, 2\); reshape it"),
    ([0, 1], [3], [1], 0, "page_size: expected an integer of at least 1, got 0; give the cache's"),
    ([0, 1], [3], [1], True, "page_size: expected an integer of at least 1, got True"),
    ([0, 1], [3], [1], 16.0, "page_size: expected an integer of at least 1, got 16.0"),
    ([0, 3], [1, 2, 3], [1 << 30], 1 << 30, "last_page_len: expected sums that int32 holds, got 3221225472"),
])
def test_what_is_no_table_of_flashinfers(indptr, indices, last, page, words):
    with pytest.raises(cuattn.ContractError, match=words):
        from_flashinfer(*ints(indptr, indices, last), page)


@pytest.mark.parametrize("table, lengths, page, words", [
    ([[1, 2]], [33], 16, r"cache_seqlens\[0\]: expected 0 to 32, what 2 pages of 16 hold, got 33; widen"),
    ([[1, 2]], [-1], 16, r"cache_seqlens\[0\]: expected 0 to 32, .* got -1"),
    ([[1, -1]], [17], 16, r"block_table\[0, 1\]: expected a page number below 2147483648, got -1; mend"),
    ([[1, 2]], [3, 4], 16, r"cache_seqlens.shape: expected \(1,\) as block_table has, got \(2,\)"),
    ([1, 2], [3], 16, r"block_table: expected shape \(B, max_pages\), got \(2,\); reshape it"),
    ([[1, 2]], [3], -16, "page_size: expected an integer of at least 1, got -16"),
])
def test_what_is_no_block_table(table, lengths, page, words):
    with pytest.raises(cuattn.ContractError, match=words):
        to_flashinfer(*ints(table, lengths), page)


def test_types_that_are_refused():
    good = ints([0, 1], [3], [1])
    for i, name in enumerate(("indptr", "indices", "last_page_len")):
        wrong = [x.astype("int64") if i == j else x for j, x in enumerate(good)]
        with pytest.raises(cuattn.ContractError, match=f"{name}: expected dtype int32, got int64; convert"):
            from_flashinfer(*wrong, 16)
        with pytest.raises(cuattn.ContractError, match=rf"{name}: expected an array \(.*\), got list"):
            from_flashinfer(*(x.tolist() if i == j else x for j, x in enumerate(good)), 16)
