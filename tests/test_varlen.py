"""Packed sequences, and values of another head dim, in every kernel that offers them."""
from __future__ import annotations

import numpy as np
import pytest
from counted import run_counted
from offering import TILES, offering
from test_prefill import run

import cuattn
from cuattn import reference
from cuattn.cpu import check_schedules


def packed(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def run_packed(machine, kernel, arrays, queries, keys, around=0, **options):
    """Kernel results for packed NumPy arrays of sequences with these lengths, judged, as `run`.

    `around`: rows of NaN before and behind all sequences, which belong to none.
    """
    begin_q, begin_k = packed(queries) + around, packed(keys) + around
    sea = [np.pad(x, ((around, around), (0, 0), (0, 0)), constant_values=np.nan) for x in arrays]
    there = {name: machine.upload(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    p = cuattn.plan_attention_varlen(
        *(machine.upload(x) for x in (*sea, begin_q, begin_k)), max_seqlen_q=max([*queries, 0]),
        max_seqlen_k=max([*keys, 0]), kernel=kernel, **there)
    o, lse = run_counted(machine, p)
    judged = {name: value for name, value in options.items() if name != "constants"}
    cuattn.compare.check_attention_varlen(*sea, begin_q, begin_k, o, lse, **judged).raise_if_bad()
    for x in (o[:around], o[len(o) - around:], lse[:, :around], lse[:, len(o) - around:]):
        assert np.isnan(x).all()
    return p, o, lse


def qkv(randn, queries, keys, h=2, hkv=1, d=64):
    return randn(sum(queries), h, d), randn(sum(keys), hkv, d), randn(sum(keys), hkv, d)


# queries and keys: ragged tiles, sequences without queries, keys, either; more queries than keys
PACKED = [
    ((70, 1, 130, 33), (70, 40, 130, 200)), ((0, 5, 0, 64, 0), (9, 5, 0, 64, 3)), ((20, 0, 140), (0, 0, 90)),
    ((1, 1, 1), (17, 1, 160)), ((150, 80), (30, 10)), ((7,), (7,)),
]


@offering("varlen")
@pytest.mark.parametrize("queries, keys", PACKED)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (12, 3)}], ids=str)
def test_packed_sequences(machine, randn, kernel, queries, keys, options):
    run_packed(machine, kernel, qkv(randn, queries, keys), queries, keys, constants=TILES[kernel], **options)


@offering("varlen")
def test_packed_sequences_with_all_features(machine, randn, kernel):
    queries, keys = PACKED[0]
    run_packed(machine, kernel, qkv(randn, queries, keys, d=72), queries, keys, causal=True,
               window_size=(50, -1), softcap=15.0, sinks=np.array([0.5, 3], "float32"))


@offering("varlen")
@pytest.mark.parametrize("d", [8, 72, 128, 256])
def test_rows_of_no_sequence_are_neither_read_nor_written(machine, randn, kernel, d):
    queries, keys = (70, 0, 33), (50, 20, 90)
    run_packed(machine, kernel, qkv(randn, queries, keys, d=d), queries, keys, around=40, causal=True)


@offering("varlen")
@pytest.mark.parametrize("causal", [False, True])
def test_what_neighbours_hold_does_not_matter(machine, randn, kernel, causal):
    """Sequences in a sea of NaN: each has the bits that it has alone, and its neighbours stay NaN."""
    lengths, (q, k, v) = (45, 100, 37), qkv(randn, (45, 100, 37), (45, 100, 37))
    at = slice(45, 145)
    hidden = [x.copy() for x in (q, k, v)]
    for x in hidden:
        x[:45], x[145:] = np.nan, np.nan
    begin = machine.upload(packed(lengths))
    p = cuattn.plan_attention_varlen(*(machine.upload(x) for x in hidden), begin, begin, max_seqlen_q=100,
                                     max_seqlen_k=100, causal=causal, kernel=kernel, constants=TILES[kernel])
    o, lse = run_counted(machine, p)
    _, alone, alone_lse = run_packed(machine, kernel, [x[at] for x in (q, k, v)], (100,), (100,),
                                     causal=causal, constants=TILES[kernel])
    assert (o[at] == alone).all() and (lse[:, at] == alone_lse).all()
    assert np.isnan(o[:45]).all() and np.isnan(o[145:]).all()


@offering("varlen")
def test_one_packed_sequence_has_the_bits_of_a_dense_one(machine, randn, kernel):
    q, k, v = qkv(randn, (90,), (120,))
    _, o, lse = run_packed(machine, kernel, (q, k, v), (90,), (120,), causal=True, constants=TILES[kernel])
    _, dense, dense_lse = run(machine, kernel, q[None], k[None], v[None], causal=True,
                              constants=TILES[kernel])
    assert (o == dense[0]).all() and (lse == dense_lse[0]).all()


@offering("varlen")
def test_packed_keys_are_all_counted(machine, kernel):
    probe = cuattn.compare.uniform_probe(1, 2, 1, 100, 333, 64, causal=True)
    beside = np.full((1, 50, 1, 64), np.nan, "float16")
    k, v = (np.concatenate([beside, x, beside], 1)[0] for x in (probe.k, probe.v))
    begin_q, begin_k = np.array([0, 100], np.int32), np.array([50, 383], np.int32)
    p = cuattn.plan_attention_varlen(*(machine.upload(x) for x in (probe.q[0], k, v, begin_q, begin_k)),
                                     max_seqlen_q=100, max_seqlen_k=333, causal=True, kernel=kernel)
    o, lse = run_counted(machine, p)
    cuattn.compare.check_probe(o[None], lse[None], probe).raise_if_bad()


@offering("varlen")
def test_packed_sequences_give_equal_bits_under_every_schedule(cpu, randn, kernel):
    queries, keys = (70, 0, 130), (90, 7, 150)
    arrays = [cpu.upload(x) for x in (*qkv(randn, queries, keys), packed(queries), packed(keys))]
    p = cuattn.plan_attention_varlen(*arrays, max_seqlen_q=130, max_seqlen_k=150, causal=True, kernel=kernel,
                                     constants=TILES[kernel])
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


@offering("varlen")
@pytest.mark.parametrize("queries, keys", [((), ()), ((0, 0), (0, 0)), ((0,), (5,)), ((5,), (0,))])
def test_nothing_packed(machine, randn, kernel, queries, keys):
    _, o, lse = run_packed(machine, kernel, qkv(randn, queries, keys), queries, keys)
    assert o.shape == (sum(queries), 2, 64) and (o == 0).all() and np.isneginf(lse).all()


def test_offsets_that_lead_astray_are_refused(randn):
    x, good = randn(10, 1, 64), np.array([0, 4, 10], np.int32)

    def refused(said, q=good, k=good, m=6, n=6):
        with pytest.raises(cuattn.ContractError, match=said):
            cuattn.attention_varlen(x, x, x, np.asarray(q), np.asarray(k), m, n)

    refused(r"q\[1\]: expected 0 to 10, what the arrays hold, got -1; mend", q=np.int32([0, -1, 10]))
    refused(r"k\[2\]: expected 0 to 10, what the arrays hold, got 11; mend", k=np.int32([0, 4, 11]))
    refused(r"cu_seqlens_k\[2\]: expected at least 6, the one before, got 5; put", k=np.int32([0, 6, 5]))
    refused("max_seqlen_k: expected at least 6, the length of sequence 1, got 5; give", n=5)
    refused("max_seqlen_q: expected an int of at least 0, got 6.0; give", m=6.0)
    refused("cu_seqlens_q: expected dtype int32, got int64; convert", q=good.astype(np.int64))
    refused(r"cu_seqlens_k.shape: expected \(3,\) as cu_seqlens_q has, got \(2,\)", k=np.int32([0, 6]))
    refused("cu_seqlens_q: expected B . 1 offsets, 0 where there is no sequence, got none", q=np.int32([]))
    refused(r"cu_seqlens_q: expected shape \(B . 1\), got \(1, 3\)", q=good[None])


def test_packed_arrays_of_another_rank_are_refused(randn):
    x, begin = randn(1, 10, 1, 64), np.array([0, 10], np.int32)
    with pytest.raises(cuattn.ContractError, match=r"q: expected shape \(total_q, H, D\), got \(1, 10, 1"):
        cuattn.attention_varlen(x, x, x, begin, begin, 10, 10)


def test_packed_sequences_are_refused_by_kernels_without(randn):
    x, begin = randn(10, 1, 64), np.array([0, 10], np.int32)
    said = r"one that offers cu_seqlens_q \(flash or flash_hopper\), got 'standard'"
    with pytest.raises(cuattn.ContractError, match=said):
        cuattn.attention_varlen(x, x, x, begin, begin, 10, 10, kernel="standard")


def test_packed_results_go_where_they_are_wanted(randn):
    x, begin = randn(10, 2, 64), np.array([0, 3, 10], np.int32)
    out = np.empty_like(x)
    o, lse = cuattn.attention_varlen(x, x, x, begin, begin, 7, 7, out=out, return_lse=True)
    assert o is out and lse.shape == (2, 10)
    want, want_lse = reference.attention_varlen(x, x, x, begin, begin)
    np.testing.assert_allclose(o.astype(float), want, atol=2e-3)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


# --- values of another head dim


@offering("dv")
@pytest.mark.parametrize("d, dv", [(192, 128), (72, 8), (64, 40), (256, 136)])
def test_values_of_another_head_dim(machine, randn, kernel, d, dv):
    run(machine, kernel, randn(1, 130, 2, d), randn(1, 150, 1, d), randn(1, 150, 1, dv), causal=True)
    queries, keys = (70, 3), (50, 90)
    q, k, _ = qkv(randn, queries, keys, d=d)
    run_packed(machine, kernel, (q, k, randn(140, 1, dv)), queries, keys, window_size=(20, 0))


@offering("dv")
def test_values_of_another_head_dim_give_equal_bits_under_every_schedule(cpu, randn, kernel):
    q, k, v = (cpu.upload(randn(1, 150, 2, d)) for d in (136, 136, 64))
    p = cuattn.plan_attention(q, k, v, causal=True, kernel=kernel, constants=TILES[kernel])
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


@pytest.mark.parametrize("dv", [72, 12])
def test_value_dims_that_are_refused(randn, dv):
    q, v = randn(1, 5, 2, 64), randn(1, 5, 2, dv)
    said = f"v: expected a head dim that is a multiple of 8 up to k's 64, got {dv}"
    with pytest.raises(cuattn.ContractError, match=said):
        cuattn.attention(q, q, v)


def test_kernels_that_want_one_head_dim_say_who_does_not(randn):
    q, v = randn(1, 5, 2, 64), randn(1, 5, 2, 32)
    with pytest.raises(cuattn.ContractError, match="offers a head dim of v that is not k's .flash or"):
        cuattn.attention(q, q, v, kernel="standard")
