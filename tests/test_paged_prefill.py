"""Packed sequences of queries over keys and values in pages, in every prefill kernel that offers them."""
from __future__ import annotations

import numpy as np
import pytest
from counted import run_counted
from offering import TILES, offering
from test_varlen import packed, qkv

import cuattn
from cuattn.cpu import check_schedules

NOWHERE = 2147480000  # what a table may hold behind a sequence's last page


def into_pages(rng, k, v, keys, page, wide=1):
    """(k_cache, v_cache, block_table): the packed rows in pages of random order, NaN wherever no row is."""
    counts = [-(-n // page) for n in keys]
    order = rng.permutation(sum(counts) + 3)
    caches = [np.full((len(order), page, *x.shape[1:]), np.nan, x.dtype) for x in (k, v)]
    table = np.full((len(keys), max([*counts, 0]) + wide), NOWHERE, np.int32)
    begin, taken = packed(keys), 0
    for b, count in enumerate(counts):
        table[b, :count] = order[taken:taken + count]
        taken += count
        for cache, x in zip(caches, (k, v)):
            for i, page_number in enumerate(table[b, :count]):
                rows = x[begin[b] + i * page:begin[b + 1]][:page]
                cache[page_number, :len(rows)] = rows
    return (*caches, table)


def run_paged(machine, kernel, arrays, queries, keys, page, **options):
    """Kernel results for packed NumPy arrays whose keys and values are put into pages; judged, as `run`."""
    q, k, v = arrays
    begin_q, begin_k = packed(queries), packed(keys)
    caches = into_pages(np.random.default_rng(page), k, v, keys, page)
    there = {name: machine.upload(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    p = cuattn.plan_attention_varlen(
        *(machine.upload(x) for x in (q, *caches[:2], begin_q, begin_k)), max_seqlen_q=max([*queries, 0]),
        max_seqlen_k=max([*keys, 0]), block_table=machine.upload(caches[2]), kernel=kernel, **there)
    o, lse = run_counted(machine, p)
    judged = {name: value for name, value in options.items() if name != "constants"}
    cuattn.compare.check_attention_varlen(q, k, v, begin_q, begin_k, o, lse, **judged).raise_if_bad()
    return p, o, lse


# chunks of prompts, of which some have keys before them; sequences without queries, keys, either
CHUNKS = [((70, 1, 0, 130), (100, 257, 9, 130)), ((20, 0, 5), (0, 0, 33))]


@pytest.mark.parametrize("kernel, page, causal", [
    (kernel, page, causal) for kernel in ("flash", "flash_hopper")
    for page, causal in ((1, True), (3, False), (8, True), (16, False), (48, True), (64, False), (96, True),
                         (256, False), (256, True))
    if kernel == "flash" or page % 8 == 0])  # whole patterns of flash_hopper's swizzle
def test_pages(machine, randn, kernel, page, causal):
    queries, keys = CHUNKS[0]
    run_paged(machine, kernel, qkv(randn, queries, keys), queries, keys, page, causal=causal)


@offering("paged")
@pytest.mark.parametrize("d, dv", [(8, 8), (72, 40), (128, 128), (192, 128), (256, 256)])
def test_pages_of_other_head_dims(machine, randn, kernel, d, dv):
    queries, keys = CHUNKS[0]
    q, k, _ = qkv(randn, queries, keys, d=d)
    run_paged(machine, kernel, (q, k, randn(sum(keys), 1, dv)), queries, keys, 16, causal=True)


@offering("paged")
@pytest.mark.parametrize("queries, keys", CHUNKS)
def test_pages_with_all_features(machine, randn, kernel, queries, keys):
    run_paged(machine, kernel, qkv(randn, queries, keys, h=6, hkv=2, d=72), queries, keys, 24, causal=True,
              window_size=(50, -1), softcap=15.0, sinks=np.arange(6, dtype="float32"),
              constants={"flash": TILES["flash"], "flash_hopper": {"block_m": 128, "block_n": 48}}[kernel])


@offering("paged")
def test_pages_and_packed_rows_give_the_same_bits(machine, randn, kernel):
    queries, keys = CHUNKS[0]
    arrays = qkv(randn, queries, keys)
    _, o, lse = run_paged(machine, kernel, arrays, queries, keys, 16, causal=True, constants=TILES[kernel])
    p = cuattn.plan_attention_varlen(*(machine.upload(x) for x in (*arrays, packed(queries), packed(keys))),
                                     max_seqlen_q=130, max_seqlen_k=257, causal=True, kernel=kernel,
                                     constants=TILES[kernel])
    other, other_lse = run_counted(machine, p)
    assert (o == other).all() and (lse == other_lse).all()


@offering("paged")
def test_paged_keys_are_all_counted(machine, kernel):
    probe = cuattn.compare.uniform_probe(1, 2, 1, 100, 333, 64, causal=True)
    k_cache, v_cache, table = into_pages(np.random.default_rng(1), probe.k[0], probe.v[0], (333,), 8)
    begin_q, begin_k = packed((100,)), packed((333,))
    p = cuattn.plan_attention_varlen(
        *(machine.upload(x) for x in (probe.q[0], k_cache, v_cache, begin_q, begin_k)), max_seqlen_q=100,
        max_seqlen_k=333, block_table=machine.upload(table), causal=True, kernel=kernel)
    o, lse = run_counted(machine, p)
    cuattn.compare.check_probe(o[None], lse[None], probe).raise_if_bad()


@offering("paged")
def test_pages_give_equal_bits_under_every_schedule(cpu, randn, kernel):
    queries, keys = (70, 0, 130), (90, 7, 150)
    q, k, v = qkv(randn, queries, keys)
    k_cache, v_cache, table = into_pages(np.random.default_rng(1), k, v, keys, 8)
    arrays = [cpu.upload(x) for x in (q, k_cache, v_cache, packed(queries), packed(keys))]
    p = cuattn.plan_attention_varlen(*arrays, max_seqlen_q=130, max_seqlen_k=150, causal=True,
                                     block_table=cpu.upload(table), kernel=kernel, constants=TILES[kernel])
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


@offering("paged")
def test_views_of_a_pool_and_of_a_table(machine, randn, kernel):
    """K and V interleaved in one pool, heads before rows, and a table that is part of a wider one."""
    queries, keys = CHUNKS[0]
    q, k, v = qkv(randn, queries, keys, hkv=2)
    k_cache, v_cache, table = into_pages(np.random.default_rng(2), k, v, keys, 16, wide=5)
    pool = machine.upload(np.ascontiguousarray(np.stack([k_cache, v_cache], 1).transpose(0, 1, 3, 2, 4)))
    caches = [pool[:, i].transpose(0, 2, 1, 3) for i in (0, 1)]
    begin_q, begin_k = packed(queries), packed(keys)
    p = cuattn.plan_attention_varlen(machine.upload(q), *caches, machine.upload(begin_q), machine.upload(begin_k),
                                     max_seqlen_q=130, max_seqlen_k=257, kernel=kernel,
                                     block_table=machine.upload(table)[:, :-3])
    o, lse = run_counted(machine, p)
    cuattn.compare.check_attention_varlen(q, k, v, begin_q, begin_k, o, lse).raise_if_bad()


def test_what_pages_refuse(randn):
    q, cache, begin = randn(10, 1, 64), randn(4, 8, 1, 64), np.array([0, 10], np.int32)

    def refused(said, error=cuattn.ContractError, table=((1, 2),), cache=cache, begin_k=begin, **options):
        with pytest.raises(error, match=said):
            cuattn.attention_varlen(q, cache, cache, begin, begin_k, 10, int(begin_k[-1]),
                                    block_table=np.asarray(table, np.int32), **options)

    refused(r"block_table\[0, 1\]: expected a page number below 4, got 7; mend", table=((1, 7),))
    refused(r"cu_seqlens_k\[0\]: expected 0 to 16, what 2 pages of 8 hold, got 17; widen",
            begin_k=np.array([0, 17], np.int32))
    refused(r"block_table rows: expected 1 as cu_seqlens_k, less one, has, got 2", table=((1, 2), (3, 0)))
    refused(r"block_table: expected shape \(B, max_pages\), got \(2,\)", table=(1, 2))
    refused(r"k: expected shape \(num_pages, page_size, HKV, D\), got \(32, 1, 64\)", cache=randn(32, 1, 64))
    refused("k: expected a page size of at least 1, got 0", cache=randn(4, 0, 1, 64))
    refused(r"kernel: expected one that offers .*block_table.* \(flash or flash_hopper\), got 'standard'",
            kernel="standard")
    refused("flash_hopper: expected a page size that is a multiple of 8, got 4; choose flash",
            cuattn.Unsupported, cache=randn(8, 4, 1, 64), table=((1, 2, 3),), kernel="flash_hopper")
