"""Windows, caps on scores, sinks and packed sequences, in every kernel that offers them."""
from __future__ import annotations

import numpy as np
import pytest
from counted import run_counted
from hypothesis import given
from hypothesis import strategies as st
from test_prefill import run

import cuattn
from cuattn import reference
from cuattn.cpu import check_schedules
from cuattn.kernels import ROWS
from cuattn.kernels.base import AttentionShape

TILES = {"flash": {"block_m": 32, "block_n": 16, "warps": 2}, "flash_hopper": {"block_m": 128, "block_n": 16}}


def offering(feature: str):
    return pytest.mark.parametrize("kernel", [name for name, row in ROWS.items() if feature in row.features])


# --- windows

# (m, n, causal, window): within a tile, over several, one side alone, more queries than keys, a single query
WINDOWS = [
    (70, 70, True, (5, -1)), (150, 150, True, (40, 0)), (130, 200, False, (33, 7)), (200, 130, False, (16, 40)),
    (150, 150, False, (-1, 20)), (150, 170, False, (20, -1)), (1, 300, True, (64, 0)), (140, 60, True, (9, -1)),
    (90, 90, False, (0, 0)),
]


@offering("window")
@pytest.mark.parametrize("m, n, causal, window", WINDOWS)
def test_windows(machine, randn, kernel, m, n, causal, window):
    run(machine, kernel, randn(1, m, 2, 64), randn(1, n, 1, 64), randn(1, n, 1, 64), causal=causal,
        window_size=window, constants=TILES[kernel])


@offering("window")
@pytest.mark.parametrize("window", [(0, 0), (17, 5), (-1, 3), (250, 0)])
def test_a_window_sees_exactly_its_keys(machine, kernel, window):
    """(W, 0) sees W + 1 keys: the uniform probe counts them."""
    probe = cuattn.compare.uniform_probe(1, 2, 1, 140, 300, 64, window_size=window)
    p, o, lse = run(machine, kernel, probe.q, probe.k, probe.v, window_size=window)
    assert p.shape.features == {"window"}
    cuattn.compare.check_probe(o, lse, probe).raise_if_bad()


@offering("window")
def test_a_window_as_long_as_the_keys_is_the_causal_mask(machine, randn, kernel):
    """(N − 1, 0), to the bit; and one key less hides one key of the last query."""
    q, k, v = randn(1, 70, 2, 64), randn(1, 100, 2, 64), randn(1, 100, 2, 64)
    _, o, lse = run(machine, kernel, q, k, v, causal=True)
    p, o_window, lse_window = run(machine, kernel, q, k, v, window_size=(99, 0))
    assert p.shape == AttentionShape(1, 2, 2, 70, 100, 64, "float16", True)
    assert (o == o_window).all() and (lse == lse_window).all()
    _, _, lse_window = run(machine, kernel, q, k, v, window_size=(98, 0))
    assert (lse_window != lse).any(axis=(0, 1)).tolist() == [False] * 69 + [True]


@offering("window")
def test_a_row_whose_window_lies_before_the_keys_sees_none(machine, randn, kernel):
    _, o, lse = run(machine, kernel, randn(1, 200, 2, 64), randn(1, 30, 2, 64), randn(1, 30, 2, 64),
                    window_size=(20, 10))
    assert (o[:, :160] == 0).all() and np.isneginf(lse[:, :, :160]).all()
    assert np.isfinite(lse[:, :, 160:]).all()


@offering("window")
def test_tiles_outside_every_window_are_not_read(machine, randn, kernel):
    """They may hold NaN. The first query sees keys 506 to 536, the last 569 to 599."""
    q, k, v = (machine.upload(randn(1, length, 1, 64)) for length in (64, 600, 600))
    k[:, :496], v[:, :496] = np.nan, np.nan
    p = cuattn.plan_attention(q, k, v, kernel=kernel, window_size=(30, 0), constants=TILES[kernel])
    assert np.isfinite(run_counted(machine, p)[0]).all()
    keys = {"flash": (576 - 496) + (600 - 528), "flash_hopper": 600 - 496}  # of two tiles of queries, and of one
    assert p.cost().bytes_loaded == 128 * (64 + 2 * keys[kernel])


@offering("window")
@pytest.mark.parametrize("window", [(37, 0), (20, 20)])
def test_windows_give_equal_bits_under_every_schedule(cpu, randn, kernel, window):
    q, k, v = (cpu.upload(randn(1, length, 3, 64)) for length in (150, 190, 190))
    p = cuattn.plan_attention(q, k, v, kernel=kernel, window_size=window, constants=TILES[kernel])
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


@given(st.integers(0, 40), st.integers(0, 40), st.booleans(), st.integers(-1, 45), st.integers(-1, 45))
def test_pairs_and_keys_are_those_of_the_reference(m, n, causal, left, right):
    causal, window = cuattn.contract.window((left, right), causal, m, n)
    shape = AttentionShape(1, 1, 1, m, n, 64, "float16", causal, window)
    first, end = reference.key_range(m, n, causal, (left, right))
    assert shape.visible == (end - first).sum()
    for start, stop in ((0, m // 2), (m // 3, m)):
        seen = [(a, b) for a, b in zip(first[start:stop], end[start:stop]) if a < b]
        a, b = shape.keys(start, stop - 1)
        if seen:
            assert (a, b) == (seen[0][0], seen[-1][1])
        elif start < stop:
            assert a >= b


def test_a_window_that_hides_nothing_is_none():
    window = cuattn.contract.window
    assert window((9, 3), False, 4, 10) == (False, (-1, -1)) == window((-1, -1), False, 4, 10)
    assert window((8, 2), False, 4, 10) == (False, (8, 2))
    assert window((8, 2), True, 4, 10) == (True, (8, -1)) == window((8, 0), False, 4, 10)


@pytest.mark.parametrize("size", [(3,), 3, (-2, 0), (1.0, 0), (True, 0), "ab", None])
def test_windows_that_are_none_are_refused(randn, size):
    x = randn(1, 4, 1, 64)
    with pytest.raises(cuattn.ContractError, match="window_size: expected two integers of at least -1, .* got"):
        cuattn.attention(x, x, x, window_size=size)


# --- softcap


@offering("softcap")
@pytest.mark.parametrize("cap", [1.0, 50.0, 1e4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 9)}], ids=str)
def test_softcaps(machine, randn, kernel, cap, options):
    q, k, v = randn(1, 130, 2, 64), randn(1, 170, 1, 64), randn(1, 170, 1, 64)
    run(machine, kernel, 8 * q, k, v, softcap=cap, constants=TILES[kernel], **options)


@offering("softcap")
@pytest.mark.parametrize("scores", [np.linspace(-400, 400, 256), np.logspace(-4, 1, 256), [0, 6e4, -6e4]])
def test_each_capped_score_is_right(machine, kernel, scores):
    """A query with one key, whose LSE is the score; on both sides of where tanh is 1 in float32."""
    q, k = np.zeros((len(scores), 1, 1, 64), "float16"), np.ones((len(scores), 1, 1, 64), "float16")
    q[..., 0, 0] = np.asarray(scores).reshape(-1, 1)
    run(machine, kernel, q, k, k, softcap=50.0, softmax_scale=1.0)


@offering("softcap")
def test_a_cap_does_not_hide_what_is_no_number(machine, randn, kernel):
    q, k, v = (machine.upload(randn(1, 40, 1, 64)) for _ in range(3))
    q[0, 3, 0, 0] = np.nan
    o, _ = run_counted(machine, cuattn.plan_attention(q, k, v, kernel=kernel, softcap=30.0))
    assert np.isnan(o[0, 3]).all() and np.isfinite(np.delete(o, 3, 1)).all()


@offering("softcap")
def test_caps_give_equal_bits_under_every_schedule(cpu, randn, kernel):
    q, k, v = (cpu.upload(randn(1, length, 3, 64)) for length in (150, 140, 140))
    p = cuattn.plan_attention(q, k, v, causal=True, kernel=kernel, softcap=20.0, constants=TILES[kernel])
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


@pytest.mark.parametrize("cap", [-1.0, 1e-9, 1e9, float("nan"), "large", True, None])
def test_caps_that_are_none_are_refused(randn, cap):
    x = randn(1, 4, 1, 64)
    with pytest.raises(cuattn.ContractError, match="softcap: expected 0 for none, or a number from .*, got"):
        cuattn.attention(x, x, x, softcap=cap)


# --- sinks


@offering("sinks")
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window_size": (30, 4)}, {"causal": True, "softcap": 20.0}, {"softmax_scale": 1e-6},
], ids=str)
def test_sinks(machine, randn, kernel, options):
    """Below the scores, among them and above; a window that leaves rows without a key."""
    sinks = np.array([-1e4, -3, 0, 2.5, 40], "float32")
    q, k, v = randn(1, 150, 5, 64), randn(1, 100, 1, 64), randn(1, 100, 1, 64)
    run(machine, kernel, q, k, v, sinks=sinks, constants=TILES[kernel], **options)


@offering("sinks")
@pytest.mark.parametrize("n", [1, 200])
def test_a_sink_is_counted_once(machine, kernel, n):
    """Scores of 0 and values of 1: LSE = ln(n + e^sink), O = n / (n + e^sink)."""
    sinks = np.array([0.0, 3.0], "float32")
    q, k, v = np.zeros((1, 3, 2, 64), "float16"), np.ones((1, n, 2, 64), "float16"), np.ones((1, n, 2, 64), "float16")
    _, o, lse = run(machine, kernel, q, k, v, sinks=sinks)
    total = n + np.exp(sinks.astype(float))
    np.testing.assert_allclose(lse[0], np.log(total)[:, None].repeat(3, 1), rtol=3e-7)
    np.testing.assert_allclose(o[0, 0, :, 0].astype(float), n / total, rtol=6e-4)


@offering("sinks")
def test_a_row_that_sees_no_key_has_its_sink(machine, randn, kernel):
    """With fewer keys than queries, with none, and a sink of −∞, which is none."""
    sinks = np.array([1.25, -7.5, -np.inf], "float32")
    _, o, lse = run(machine, kernel, randn(1, 70, 3, 64), *(randn(1, 20, 3, 64),) * 2, causal=True, sinks=sinks)
    assert (o[0, :50] == 0).all() and (lse[0, :, :50] == sinks[:, None]).all()
    _, o, lse = run(machine, kernel, randn(1, 70, 3, 64), *(randn(1, 0, 3, 64),) * 2, sinks=sinks)
    assert (o == 0).all() and (lse[0] == sinks[:, None]).all()


@offering("sinks")
def test_sinks_give_equal_bits_under_every_schedule(cpu, randn, kernel):
    q, k, v = (cpu.upload(randn(1, length, 3, 64)) for length in (150, 140, 140))
    p = cuattn.plan_attention(q, k, v, causal=True, kernel=kernel, constants=TILES[kernel],
                              sinks=cpu.upload(np.array([1, 2, 3], "float32")))
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


def test_sinks_that_are_none_are_refused(cpu, randn):
    x = cpu.upload(randn(1, 4, 2, 64))
    for sinks, said in [(np.zeros(3, "float32"), r"sinks.shape: expected \(2,\) as q's heads has, got \(3,\)"),
                        (np.zeros(2), "sinks: expected dtype float32, got float64; convert"),
                        (np.zeros((1, 2), "float32"), r"sinks: expected shape \(H\), got \(1, 2\)"),
                        (1.0, r"sinks: expected an array \(H\), got float"),
                        (cpu.upload(np.zeros((2, 2), "float32"))[:, 0], "expected a contiguous last dimension")]:
        with pytest.raises(ValueError, match=said):
            cuattn.attention(x, x, x, sinks=sinks)


# --- packed sequences


def packed(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def run_packed(machine, kernel, arrays, queries, keys, around=0, **options):
    """Kernel results for packed NumPy arrays of sequences with these lengths, judged, as `run`.

    `around`: rows of NaN before and behind all sequences, which belong to none.
    """
    begin_q, begin_k = packed(queries) + around, packed(keys) + around
    sea = [np.pad(x, ((around, around), (0, 0), (0, 0)), constant_values=np.nan) for x in arrays]
    p = cuattn.plan_attention_varlen(
        *(machine.upload(x) for x in (*sea, begin_q, begin_k)), max_seqlen_q=max([*queries, 0]),
        max_seqlen_k=max([*keys, 0]), kernel=kernel, **options)
    o, lse = run_counted(machine, p)
    judged = {name: value for name, value in options.items() if name != "constants"}
    cuattn.compare.check_attention_varlen(*sea, begin_q, begin_k, o, lse, **judged).raise_if_bad()
    for x in (o[:around], o[len(o) - around:], lse[:, :around], lse[:, len(o) - around:]):
        assert np.isnan(x).all()
    return p, o, lse


def qkv(randn, queries, keys, h=2, hkv=1, d=64):
    return randn(sum(queries), h, d), randn(sum(keys), hkv, d), randn(sum(keys), hkv, d)


# queries and keys: ragged tiles, sequences without queries, without keys, without either, more queries than keys
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
    run_packed(machine, kernel, qkv(randn, queries, keys, d=72), queries, keys, causal=True, window_size=(50, -1),
               softcap=15.0, sinks=np.array([0.5, 3], "float32"))


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
    _, alone, alone_lse = run_packed(machine, kernel, [x[at] for x in (q, k, v)], (100,), (100,), causal=causal,
                                     constants=TILES[kernel])
    assert (o[at] == alone).all() and (lse[:, at] == alone_lse).all()
    assert np.isnan(o[:45]).all() and np.isnan(o[145:]).all()


@offering("varlen")
def test_one_packed_sequence_has_the_bits_of_a_dense_one(machine, randn, kernel):
    q, k, v = qkv(randn, (90,), (120,))
    _, o, lse = run_packed(machine, kernel, (q, k, v), (90,), (120,), causal=True, constants=TILES[kernel])
    _, dense, dense_lse = run(machine, kernel, q[None], k[None], v[None], causal=True, constants=TILES[kernel])
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

    refused(r"cu_seqlens_q\[1\]: expected 0 to 10, what the arrays hold, got -1; mend", q=np.int32([0, -1, 10]))
    refused(r"cu_seqlens_k\[2\]: expected 0 to 10, what the arrays hold, got 11; mend", k=np.int32([0, 4, 11]))
    refused(r"cu_seqlens_k\[2\]: expected at least 6, the one before, got 5; put", k=np.int32([0, 6, 5]))
    refused("max_seqlen_k: expected at least 6, the length of sequence 1, got 5; give", n=5)
    refused("max_seqlen_q: expected an int of at least 0, got 6.0; give", m=6.0)
    refused("cu_seqlens_q: expected dtype int32, got int64; convert", q=good.astype(np.int64))
    refused(r"cu_seqlens_k.shape: expected \(3,\) as cu_seqlens_q has, got \(2,\)", k=np.int32([0, 6]))
    refused("cu_seqlens_q: expected B . 1 offsets, 0 where there is no sequence, got none", q=np.int32([]))
    refused(r"cu_seqlens_q: expected shape \(B . 1\), got \(1, 3\)", q=good[None])


def test_packed_arrays_of_another_rank_are_refused(randn):
    x, begin = randn(1, 10, 1, 64), np.array([0, 10], np.int32)
    with pytest.raises(cuattn.ContractError, match=r"q: expected shape \(total_q, H, D\), got \(1, 10, 1, 64\)"):
        cuattn.attention_varlen(x, x, x, begin, begin, 10, 10)


def test_packed_sequences_are_refused_by_kernels_without(randn):
    x, begin = randn(10, 1, 64), np.array([0, 10], np.int32)
    offering = " or ".join(name for name, row in sorted(ROWS.items()) if "varlen" in row.features)
    with pytest.raises(cuattn.ContractError, match=rf"one that offers cu_seqlens_q \({offering}\), got 'standard'"):
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
    with pytest.raises(cuattn.ContractError, match=f"v: expected a head dim that is a multiple of 8 up to k's 64, got {dv}"):
        cuattn.attention(q, q, v)


def test_kernels_that_want_one_head_dim_say_who_does_not(randn):
    q, v = randn(1, 5, 2, 64), randn(1, 5, 2, 32)
    with pytest.raises(cuattn.ContractError, match="one that offers a head dim of v that is not k's .flash or"):
        cuattn.attention(q, q, v, kernel="standard")


# --- who offers what

ASKED = {"window": {"window_size": (2, 2)}, "softcap": {"softcap": 30.0},
         "sinks": {"sinks": np.zeros(1, "float32")}}


@pytest.mark.parametrize("feature", ASKED)
def test_kernels_that_lack_a_feature_say_who_has_it(randn, feature):
    x = randn(1, 9, 1, 64)
    (argument,) = ASKED[feature]
    for name, row in ROWS.items():
        if row.family == "prefill" and feature not in row.features:
            with pytest.raises(cuattn.ContractError, match=rf"kernel: expected one that offers {argument} \(flash or "
                                                           rf"flash_hopper\), got '{name}'; choose one, or"):
                cuattn.attention(x, x, x, kernel=name, **ASKED[feature])


def test_auto_takes_a_kernel_that_offers_all(randn):
    x = randn(1, 9, 1, 64)
    for asked in ASKED.values():
        assert cuattn.plan_attention(x, x, x, **asked).row.name == "flash"
