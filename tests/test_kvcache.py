"""The paged cache against a dict of lists: no page is lost or shared, and a refusal changes nothing."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cuattn import kvcache, reference
from cuattn.kvcache import OutOfPages, PagedKVCache, paginate


def state(cache):
    return cache.free_pages, {name: (cache.pages(name), cache.length(name)) for name in cache.sequences}


def test_a_sequence_grows_page_by_page():
    cache = PagedKVCache(None, 4, 8, 2, 16)
    cache.reserve("a", 0)
    assert cache.pages("a") == () and cache.free_pages == 4
    for tokens, pages in ((1, 1), (8, 1), (9, 2), (5, 2)):
        cache.reserve("a", tokens)
        assert len(cache.pages("a")) == pages and cache.free_pages == 4 - pages
    cache.advance("a", 9)
    assert cache.length("a") == 9
    cache.free("a")
    assert cache.free_pages == 4 and cache.sequences == ()


def test_out_of_pages_changes_nothing():
    cache = PagedKVCache(None, 3, 4, 1, 8)
    cache.reserve("a", 8)
    before = state(cache)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 3 free"):
        cache.reserve("b", 5)
    with pytest.raises(OutOfPages):
        cache.reserve("a", 17)
    with pytest.raises(OutOfPages):
        cache.allocate(9)
    assert state(cache) == before
    cache.check_invariants()


def test_allocate_and_release_as_plain_lists_of_blocks():
    cache = PagedKVCache(None, 5, 16, 1, 8)
    blocks = cache.allocate(33)
    assert len(set(blocks)) == 3 and cache.free_pages == 2 and cache.allocate(0) == []
    cache.check_invariants()
    for wrong in (blocks + blocks[:1], [99], blocks[:1] * 2):
        with pytest.raises(ValueError, match="blocks: expected pages from allocate"):
            cache.release(wrong)
    assert cache.free_pages == 2
    cache.release(blocks)
    assert cache.free_pages == 5
    with pytest.raises(ValueError, match="has not given out"):
        cache.release(blocks)


def test_pages_of_a_sequence_cannot_be_released_as_blocks():
    cache = PagedKVCache(None, 2, 4, 1, 8)
    cache.reserve("a", 3)
    with pytest.raises(ValueError, match="has not given out"):
        cache.release(cache.pages("a"))


def test_table_and_lengths():
    cache = PagedKVCache(None, 6, 4, 1, 8)
    cache.reserve("a", 9)
    cache.reserve("b", 0)
    cache.reserve("c", 4)
    cache.advance("a", 9)
    table, lengths = cache.block_table(), cache.cache_seqlens()
    assert table.dtype == lengths.dtype == np.int32 and table.shape == (3, 3)
    assert table.tolist() == [list(cache.pages("a")), [-1] * 3, [*cache.pages("c"), -1, -1]]
    assert lengths.tolist() == [9, 0, 0]
    assert cache.block_table(["c"]).tolist() == [list(cache.pages("c"))]
    assert cache.block_table([]).shape == (0, 1) and cache.block_table(["b"]).shape == (1, 1)


@pytest.mark.parametrize("call, words", [
    (lambda c: PagedKVCache(None, 0, 4, 1, 8), "num_pages: expected an integer of at least 1, got 0"),
    (lambda c: PagedKVCache(None, 4, 2.5, 1, 8), "page_size: expected an integer"),
    (lambda c: PagedKVCache(None, 4, True, 1, 8), "page_size: expected an integer"),
    (lambda c: c.reserve("a", -1), "num_tokens: expected 0 or more, got -1"),
    (lambda c: c.allocate(-1), "num_tokens: expected 0 or more, got -1"),
    (lambda c: c.advance("a", 5), "num_tokens: expected 0 … 4, got 5; reserve first"),
])
def test_arguments_that_make_no_sense_are_refused(call, words):
    cache = PagedKVCache(None, 4, 4, 1, 8)
    cache.reserve("a", 1)
    with pytest.raises(ValueError, match=words):
        call(cache)
    cache.check_invariants()


@pytest.mark.parametrize("call", [PagedKVCache.length, PagedKVCache.pages, PagedKVCache.free])
def test_an_unknown_sequence_is_named(call):
    with pytest.raises(KeyError, match="got 'x'"):
        call(PagedKVCache(None, 4, 4, 1, 8), "x")


def test_broken_books_are_found():
    cache = PagedKVCache(None, 4, 4, 1, 8)
    cache.reserve("a", 8)
    cache._free.append(cache.pages("a")[0])
    with pytest.raises(RuntimeError, match="4 in the pool"):
        cache.check_invariants()
    cache._free.pop()
    cache._lengths["a"] = 9
    with pytest.raises(RuntimeError, match="9 tokens in 2 pages"):
        cache.check_invariants()


class Books(RuleBasedStateMachine):
    """Random reserve, append, allocate and free; tokens are numbers, the model a dict of lists."""

    names = st.sampled_from("abcde")

    def __init__(self):
        super().__init__()
        self.cache = PagedKVCache(None, 12, 3, 1, 8)
        self.slots = np.full((12, 3), -1)
        self.model, self.blocks, self.next = {}, [], 0

    def room(self, name, total):
        """Whether the pages that `name` lacks for so many tokens are free."""
        held = len(self.cache.pages(name)) if name in self.cache.sequences else 0
        return self.cache.pages_for(total) - held <= self.cache.free_pages

    @rule(name=names, count=st.integers(0, 8))
    def append(self, name, count):
        tokens = self.model.get(name, [])
        before, fits = state(self.cache), self.room(name, len(tokens) + count)
        try:
            self.cache.reserve(name, len(tokens) + count)
        except OutOfPages:
            assert not fits and state(self.cache) == before
            return
        assert fits
        for t in range(len(tokens), len(tokens) + count):
            self.slots[self.cache.pages(name)[t // 3], t % 3] = self.next
            self.model.setdefault(name, []).append(self.next)
            self.next += 1
        self.model.setdefault(name, tokens)
        self.cache.advance(name, count)

    @rule(name=names, total=st.integers(0, 40))
    def reserve(self, name, total):
        before, fits = state(self.cache), self.room(name, total)
        try:
            self.cache.reserve(name, total)
            assert fits
            self.model.setdefault(name, [])
        except OutOfPages:
            assert not fits and state(self.cache) == before

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted(self.model)))
        del self.model[name]
        self.cache.free(name)

    @rule(tokens=st.integers(0, 9))
    def allocate(self, tokens):
        if self.cache.pages_for(tokens) <= self.cache.free_pages:
            self.blocks.append(self.cache.allocate(tokens))

    @precondition(lambda self: self.blocks)
    @rule()
    def release(self):
        self.cache.release(self.blocks.pop(0))

    @invariant()
    def every_token_is_where_the_table_says(self):
        self.cache.check_invariants()
        assert set(self.cache.sequences) == set(self.model)
        for name, tokens in self.model.items():
            pages = list(self.cache.pages(name))
            assert self.cache.length(name) == len(tokens)
            assert self.slots[pages].reshape(-1)[: len(tokens)].tolist() == tokens


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.integers(1, 7),
       st.sampled_from(["sorted", "reversed", "shuffled"]))
def test_paginate_keeps_every_token_and_nothing_else(lengths, page_size, order):
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((len(lengths), 20, 2, 4)).astype(np.float16) for _ in "kv")
    k_cache, v_cache, table, seqlens = paginate(k, v, lengths, page_size, order=order, unused=2147480000)
    assert seqlens.tolist() == lengths and table.dtype == np.int32
    for b, n in enumerate(lengths):
        np.testing.assert_array_equal(reference.gather(k_cache, table[b], n), k[b, :n])
        np.testing.assert_array_equal(reference.gather(v_cache, table[b], n), v[b, :n])
    tokens = sum(lengths) * 2 * 4
    assert np.isfinite(k_cache).sum() == np.isfinite(v_cache).sum() == tokens
    used = table[table != 2147480000]
    assert len(set(used.tolist())) == used.size <= len(k_cache) - 2


def test_paginate_refuses_an_unknown_order():
    x = np.zeros((1, 1, 1, 8), np.float16)
    with pytest.raises(ValueError, match="order: expected 'sorted'"):
        kvcache.paginate(x, x, [1], 1, order="random")


def test_append_writes_on_the_machine(machine, rng):
    """Prompts of different lengths, then token by token, over page edges; a list says what is right."""
    cache = PagedKVCache(machine, 10, 4, 2, 16, "float16")
    written = {name: [[], []] for name in "abc"}
    for names, t in (("a", 5), ("bc", 3), ("abc", 1), ("ca", 1), ("abc", 4)):
        new = [rng.standard_normal((len(names), t, 2, 16)).astype(np.float16) for _ in "kv"]
        cache.append(list(names), *(machine.upload(x) for x in new))
        for b, name in enumerate(names):
            for held, x in zip(written[name], new):
                held.extend(x[b])
    cache.check_invariants()
    table, lengths = machine.download(cache.block_table()), machine.download(cache.cache_seqlens())
    for b, name in enumerate(cache.sequences):
        for pool, held in zip((cache.k_cache, cache.v_cache), written[name]):
            got = reference.gather(machine.download(pool), table[b], int(lengths[b]))
            np.testing.assert_array_equal(got, np.stack(held))
    before = state(cache)
    big = machine.upload(np.zeros((1, 30, 2, 16), np.float16))
    with pytest.raises(OutOfPages):
        cache.append(["d"], big, big)
    assert state(cache) == before


def test_append_checks_names_and_shapes(machine):
    cache = PagedKVCache(machine, 4, 4, 2, 16, "float16")
    x = machine.upload(np.zeros((2, 1, 2, 16), np.float16))
    with pytest.raises(ValueError, match="sequences: expected each name once"):
        cache.append(["a", "a"], x, x)
    with pytest.raises(ValueError, match=r"k: expected \(3, 1, 2, 16\), got shape \(2, 1, 2, 16\)"):
        cache.append("abc", x, x)
    assert cache.sequences == ()


def test_a_launch_that_is_refused_holds_no_pages(machine):
    cache = PagedKVCache(machine, 4, 4, 2, 16, "float16")
    wrong = machine.upload(np.zeros((1, 5, 2, 16), np.float32))
    with pytest.raises((TypeError, ValueError)):
        cache.append(["a"], wrong, wrong)
    assert cache.sequences == () and cache.free_pages == 4
    cache.check_invariants()
