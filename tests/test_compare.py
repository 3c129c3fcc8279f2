"""The comparison must pass what is right and fail each kind of wrong, naming the place."""
import numpy as np
import pytest

from cuattn import compare, reference
from cuattn.dense import dense_rows, eps, round_to
from cuattn.kernels.base import Chunked

DTYPES = ["float16", "bfloat16"]


def case(randn, dtype="float16", b=2, m=33, n=47, h=4, hkv=2, d=16, causal=False):
    q, k, v = (randn(b, s, heads, d, dtype=dtype) for s, heads in ((m, h), (n, hkv), (n, hkv)))
    o = compare.dense(q, k, v, causal).astype(dtype)
    lse = reference.attention(q, k, v, causal)[1].astype(np.float32)
    return q, k, v, o, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, causal", [(33, 47, False), (33, 47, True), (47, 33, True), (1, 9, False)])
@pytest.mark.parametrize("sample", [False, True])
def test_the_dense_result_passes(randn, dtype, m, n, causal, sample):
    q, k, v, o, lse = case(randn, dtype, m=m, n=n, causal=causal)
    verdict = compare.check_attention(q, k, v, o, lse, causal=causal, sample=sample).raise_if_bad()
    assert verdict.check == ("sampled" if sample else "full")
    assert 0 < verdict.max_err <= verdict.tol and verdict.lse_err <= verdict.lse_tol


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_element_is_named(randn, dtype):
    q, k, v, o, lse = case(randn, dtype)
    o[1, 7, 2, 3] += 0.1
    verdict = compare.check_attention(q, k, v, o, lse)
    assert not verdict.ok and verdict.worst_index == (1, 7, 2, 3)
    assert "b=1, m=7, h=2, d=3" in verdict.message and "expected" in verdict.message
    with pytest.raises(compare.Mismatch, match="b=1, m=7, h=2, d=3"):
        verdict.raise_if_bad()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_misplaced_nan_and_infinity_fail(randn, value):
    q, k, v, o, lse = case(randn)
    o[0, 3, 1, 2] = value
    verdict = compare.check_attention(q, k, v, o, lse)
    assert not verdict.ok and verdict.worst_index == (0, 3, 1, 2) and "NaN or infinite" in verdict.message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_wrong_infinity_in_the_lse_fails(randn, value):
    q, k, v, o, lse = case(randn)
    lse[1, 2, 5] = value
    verdict = compare.check_attention(q, k, v, o, lse)
    assert not verdict.ok and verdict.message.startswith("LSE") and "m=5, h=2" in verdict.message


def test_rows_without_keys_must_say_so(randn):
    q, k, v, o, lse = case(randn, m=47, n=33, causal=True)
    assert (lse[:, :, :14] == -np.inf).all()
    lse[0, 0, 0] = -50000.0
    assert not compare.check_attention(q, k, v, o, lse, causal=True).ok
    lse[0, 0, 0], o[0, 0, 0, 0] = -np.inf, np.nan
    assert not compare.check_attention(q, k, v, o, lse, causal=True).ok


def test_the_lse_is_held_to_its_own_tolerance(randn):
    q, k, v, o, lse = case(randn)
    lse[0, 1, 2] += 1e-4
    verdict = compare.check_attention(q, k, v, o, lse)
    assert not verdict.ok and verdict.max_err <= verdict.tol and "LSE: error" in verdict.message
    assert compare.check_attention(q, k, v, o, None).ok


def test_tolerance_is_the_stated_formula(randn):
    q, k, v, o, lse = case(randn)
    o_ref, lse_ref = reference.attention(q, k, v)
    o_dense = compare.dense(q, k, v)
    verdict = compare.check(o, lse, o_ref=o_ref, lse_ref=lse_ref, o_dense=o_dense, v_max=2.0, dtype="float16")
    assert verdict.tol == pytest.approx(2 * np.abs(o_dense - o_ref).max() + 2.0**-10 / 8 * 2.0)
    assert compare.check_attention(q, k, v, o, lse).tol == pytest.approx(
        2 * np.abs(o_dense - o_ref).max() + 2.0**-10 / 8 * np.abs(v.astype(float)).max(), rel=1e-6)


def test_nan_in_the_reference_must_appear_in_the_output():
    nan, zero = np.full((1, 1, 1, 2), np.nan), np.zeros((1, 1, 1, 2))
    common = dict(lse_ref=None, o_dense=zero, v_max=1.0, dtype="float16")
    assert compare.check(nan, None, o_ref=nan, **common).ok
    assert not compare.check(zero, None, o_ref=nan, **common).ok


def test_without_an_lse_there_is_no_error_of_it(randn):
    q, k, v, o, lse = case(randn)
    verdict = compare.check_attention(q, k, v, o)
    assert verdict.ok and verdict.max_err > 0 and verdict.lse_err is None and verdict.lse_tol is None
    assert compare.check_attention(q, k, v, o, lse).lse_tol > 1e-5
    assert not compare.check_attention(q, k, v, 2 * o).ok


def test_a_nan_tolerance_passes_nothing():
    zero = np.zeros((1, 1, 1, 2))
    verdict = compare.check(zero, None, o_ref=zero, lse_ref=None, o_dense=zero, v_max=np.nan, dtype="float16")
    assert not verdict.ok


def test_shapes_must_agree():
    zero = np.zeros((1, 1, 1, 2))
    with pytest.raises(ValueError, match=r"o: expected shape \(1, 1, 1, 2\).*got \(1, 1, 2\)"):
        compare.check(zero[0], None, o_ref=zero, lse_ref=None, o_dense=zero, v_max=1.0, dtype="float16")


@pytest.mark.parametrize("b, m, n", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_extents(randn, b, m, n):
    q, k, v = randn(b, m, 2, 8), randn(b, n, 2, 8), randn(b, n, 2, 8)
    o, lse = np.zeros((b, m, 2, 8), np.float16), np.full((b, 2, m), -np.inf, np.float32)
    assert compare.check_attention(q, k, v, o, lse).ok


def test_scores_rounded_to_the_input_dtype_need_the_row_to_say_so(randn):
    q, k, v, _, _ = case(randn, "bfloat16", d=64)
    o, lse = np.zeros((2, 33, 4, 64), "bfloat16"), np.zeros((2, 4, 33), np.float32)
    for b in range(2):
        for h in range(4):
            head = q[b, :, h], k[b, :, h // 2], v[b, :, h // 2], np.full(33, 47), 0.125
            o[b, :, h], lse[b, h] = dense_rows(*head, "bfloat16", "input")
    assert not compare.check_attention(q, k, v, o, lse).ok
    compare.check_attention(q, k, v, o, lse, rounding="input").raise_if_bad()


def test_outside_the_sample_nan_is_still_seen(randn):
    q, k, v, o, lse = case(randn, b=3, m=300)
    rows = {tuple(row) for row in compare.sample_rows(3, 4, 300)}
    b, m, h = next((b, m, h) for b in (1,) for m in range(300) for h in range(4) if (b, m, h) not in rows)
    o[b, m, h, 0] = np.nan
    verdict = compare.check_attention(q, k, v, o, lse, sample=True)
    assert not verdict.ok and "b=1" in verdict.message


def test_large_cases_are_sampled(randn, monkeypatch):
    q, k, v, o, lse = case(randn, b=2, m=400)
    monkeypatch.setitem(compare.FULL_PAIRS, "numpy", 1000)
    assert compare.check_attention(q, k, v, o, lse).check == "sampled"


@pytest.mark.parametrize("most", [1 << 26, 1])
@pytest.mark.parametrize("sample", [False, True])
def test_heads_are_compared_together_as_far_as_memory_goes(randn, monkeypatch, sample, most):
    """On a GPU a comparison costs its array operations, whatever their size."""
    calls, real = [], compare.attention_rows
    monkeypatch.setattr(compare, "attention_rows", lambda *a: calls.append(a[0].shape) or real(*a))
    monkeypatch.setattr(compare, "MAX_KEYS", most)
    q, k, v = randn(2, 90, 8, 16), randn(2, 90, 4, 16), randn(2, 90, 4, 16)
    o, lse = reference.attention(q, k, v, causal=True)
    verdict = compare.check_attention(q, k, v, o.astype(np.float32), lse.astype(np.float32), causal=True,
                                      sample=sample)
    assert verdict.ok and sum(np.prod(shape[:2]) for shape in calls) >= (256 if sample else 2 * 90 * 8)
    if not sample:
        assert calls == ([(4, 180, 16)] * 2 if most > 1 else [(1, 180, 16)] * 8)


def test_sampled_rows_hold_both_ends_and_tile_edges():
    rows = compare.sample_rows(4, 16, 4096)
    assert len(rows) >= 256 and len({tuple(r) for r in rows}) == len(rows)
    first_head = {m for b, m, h in rows if (b, h) == (0, 0)}
    assert {0, 15, 16, 17, 63, 64, 127, 128, 129, 2047, 2048, 4094, 4095} <= first_head
    assert (3, 4095, 15) in {tuple(r) for r in rows}
    assert len({b for b, _, _ in rows}) == 4 and rows.min() >= 0 and (rows.max(axis=0) == (3, 4095, 15)).all()
    assert len(compare.sample_rows(2, 3, 5)) == 30 and len(compare.sample_rows(0, 3, 5)) == 0


def decode_case(randn, dtype, n=40):
    k, v = randn(3, n, 2, 16, dtype=dtype), randn(3, n, 2, 16, dtype=dtype)
    lengths = np.array([n, 0, 17], np.int32)
    pages = n // 8
    table = np.random.default_rng(3).permutation(3 * pages).reshape(3, pages).astype(np.int32)
    caches = []
    for x in (k, v):
        cache = np.full((3 * pages, 8, 2, 16), np.nan, dtype)
        for b, length in enumerate(lengths):
            for t in range(length):
                cache[table[b, t // 8], t % 8] = x[b, t]
        caches.append(cache)
    q = randn(3, 1, 4, 16, dtype=dtype)
    o, lse = reference.decode(q, *caches, table, lengths)
    return q, *caches, table, lengths, o.astype(dtype), lse.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", [False, True])
def test_decode(randn, dtype, sample):
    args = decode_case(randn, dtype)
    compare.check_decode(*args, sample=sample).raise_if_bad()
    o, lse = args[5:]
    o[2, 0, 3, 1] += 0.2
    verdict = compare.check_decode(*args)
    assert not verdict.ok and verdict.worst_index == (2, 0, 3, 1)


def test_append(randn):
    k_cache, v_cache = randn(4, 8, 2, 16), np.full((4, 8, 2, 16), np.nan, np.float16)
    k, v = randn(2, 3, 2, 16), randn(2, 3, 2, 16)
    table, lengths = np.array([[3, 1], [0, 2]], np.int32), np.array([6, 0], np.int32)
    k_after, v_after = reference.append_kv(k, v, k_cache, v_cache, table, lengths)
    args = k, v, k_cache, v_cache, table, lengths
    assert compare.check_append(*args, k_after, v_after).ok
    v_after[2, 5, 1, 3] = 0
    verdict = compare.check_append(*args, k_after, v_after)
    assert not verdict.ok and verdict.worst_index == (2, 5, 1, 3) and verdict.message.startswith("v_cache")


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_to(randn, dtype):
    special = np.float32([0, -0.0, np.inf, -np.inf, 1e-6, 1 + 2.0**-8])
    x = np.concatenate([randn(4096, dtype="float32"), special])
    np.testing.assert_array_equal(round_to(x, dtype), x.astype(dtype).astype(np.float32))
    assert np.isnan(round_to(np.full(1, np.nan, np.float32), dtype)[0])
    assert eps(dtype) == {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, causal", [(5, 700, False), (40, 60, True), (60, 40, True)])
def test_the_probe_is_what_the_reference_computes(dtype, m, n, causal):
    probe = compare.uniform_probe(2, 4, 2, m, n, 8, dtype, causal)
    o, lse = reference.attention(probe.q, probe.k, probe.v, causal)
    np.testing.assert_allclose(probe.o, o, atol=1e-12)
    np.testing.assert_allclose(probe.lse, lse, rtol=1e-13)
    verdict = compare.check_probe(probe.o.astype(dtype), probe.lse.astype(np.float32), probe)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["dropped", "repeated"])
def test_the_probe_sees_one_key_among_many(dtype, fault):
    n = 20000
    probe = compare.uniform_probe(1, 1, 1, 1, n, 8, dtype)
    o = probe.o.copy()
    one = probe.v[0, n // 3, 0].astype(np.float64) / n
    o[0, 0, 0] += -one if fault == "dropped" else one
    verdict = compare.check_probe(o.astype(dtype), None, probe)
    assert not verdict.ok and "one key weighs 5e-05" in verdict.message
    # The general rule cannot see the same fault.
    assert compare.check_attention(probe.q, probe.k, probe.v, o.astype(dtype)).ok
    # A key missing from the sum of weights shows in the LSE.
    verdict = compare.check_probe(probe.o.astype(dtype), np.log(np.full((1, 1, 1), n - 1, np.float32)), probe)
    assert not verdict.ok and "LSE" in verdict.message


def test_the_probe_for_decode_hides_keys_beyond_each_length():
    probe = compare.uniform_probe(3, 4, 2, 1, 50, 8, "float16", lengths=[0, 17, 50])
    assert np.isnan(probe.v[0]).all() and np.isnan(probe.k[1, 17:]).all()
    assert np.isfinite(probe.v[1, :17]).all()
    assert (probe.o[0] == 0).all() and (probe.lse[0] == -np.inf).all()
    np.testing.assert_allclose(probe.lse[1], np.log(17))
    np.testing.assert_allclose(probe.o[1, 0, 3], probe.v[1, :17, 1].astype(float).mean(axis=0))
    o, lse = probe.o.astype(np.float16), probe.lse.astype(np.float32)
    assert compare.check_probe(o, lse, probe).ok
    o[1, 0, 0, 0] = np.nan
    assert not compare.check_probe(o, lse, probe).ok


def test_the_probe_accepts_rounded_weights_where_the_row_says_so():
    n = 3000
    probe = compare.uniform_probe(1, 1, 1, 1, n, 64, "bfloat16")
    weight = np.full((1, n), 1 / n, "bfloat16").astype(np.float64)
    o = (weight @ probe.v[0, :, 0].astype(np.float64)).astype("bfloat16").reshape(1, 1, 1, 64)
    assert compare.check_probe(o, None, probe, rounding="input").ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_may_live_on_the_machine(machine, randn, dtype):
    """The same verdicts from the machine's own arrays, without a copy to the host."""

    def there(*arrays):
        return [machine.upload(x) for x in arrays]

    q, k, v, o, lse = case(randn, dtype, causal=True)
    here = compare.check_attention(q, k, v, o, lse, causal=True)
    for sample in (False, True):
        compare.check_attention(*there(q, k, v, o, lse), causal=True, sample=sample).raise_if_bad()
    got = compare.check_attention(*there(q, k, v, o, lse), causal=True)
    assert got.max_err == pytest.approx(here.max_err, rel=1e-6)
    assert got.tol == pytest.approx(here.tol, rel=0.05)
    o[1, 5, 2, 3] = np.nan
    bad = compare.check_attention(*there(q, k, v, o, lse), causal=True)
    assert not bad.ok and bad.worst_index == (1, 5, 2, 3)
    compare.check_decode(*there(*decode_case(randn, dtype))).raise_if_bad()
    probe = compare.uniform_probe(2, 4, 2, 9, 60, 8, dtype, causal=True)
    verdict = compare.check_probe(*there(probe.o.astype(dtype), probe.lse.astype(np.float32)), probe)
    assert verdict.ok, verdict.message
    k_cache, v_cache = randn(4, 8, 2, 16, dtype=dtype), randn(4, 8, 2, 16, dtype=dtype)
    table, lengths = np.array([[3, 1], [0, 2]], np.int32), np.array([6, 0], np.int32)
    args = *(randn(2, 3, 2, 16, dtype=dtype) for _ in "kv"), k_cache, v_cache, table, lengths
    after = reference.append_kv(*args)
    assert compare.check_append(*there(*args, *after)).ok


@pytest.mark.parametrize("sample", [False, True])
def test_what_is_asked_for_is_judged(randn, sample):
    """A window, a cap and sinks: the right result passes, and without any of them it does not."""
    q, k, v = randn(1, 400, 2, 16), randn(1, 500, 1, 16), randn(1, 500, 1, 16)
    asked = {"window_size": (60, 0), "softcap": 2.0, "sinks": np.array([0.5, 4], "float32")}
    o, lse = reference.attention(q, k, v, **asked)
    o, lse = o.astype("float16"), lse.astype("float32")
    compare.check_attention(q, k, v, o, lse, sample=sample, **asked).raise_if_bad()
    for name in asked:
        less = {other: value for other, value in asked.items() if other != name}
        assert not compare.check_attention(q, k, v, o, lse, sample=sample, **less).ok


def test_of_packed_sequences_the_wrong_one_is_named(randn):
    q, begin = randn(30, 2, 16), [0, 10, 10, 28]
    o, lse = reference.attention_varlen(q, q, q, begin, begin)
    o, lse = o.astype("float16"), lse.astype("float32")
    assert compare.check_attention_varlen(q, q, q, begin, begin, o, lse).raise_if_bad().max_err > 0
    o[15, 1, 3] += 1
    verdict = compare.check_attention_varlen(q, q, q, begin, begin, o, lse)
    assert not verdict.ok and "m=5, h=1, d=3" in verdict.message
    assert verdict.message.startswith("sequence 2: O: max error")
    assert compare.check_attention_varlen(q, q, q, [0], [0], o, lse).ok
    with pytest.raises(ValueError, match="lse: expected shape .2, 30., got .30, 2.; pass"):
        compare.check_attention_varlen(q, q, q, begin, begin, o, lse.T)


def test_results_of_another_shape_are_refused(randn):
    q, k = randn(1, 6, 4, 64), randn(1, 9, 2, 64)
    o, lse = reference_results(q, k)
    compare.check_attention(q, k, k, o, lse).raise_if_bad()
    for bad_o, bad_lse in ((np.concatenate([o, o], 1), lse), (o[:, :5], lse), (o, lse.swapaxes(1, 2)), (None, lse)):
        with pytest.raises(ValueError, match="(o|lse): expected shape .*; pass what the kernel returned"):
            compare.check_attention(q, k, k, bad_o, bad_lse)
    with pytest.raises(ValueError, match="v: expected shape"):
        compare.check_attention(q, k, k[:, :5], o, lse)


def reference_results(q, k):
    o, lse = reference.attention(q, k, k)
    return o.astype(q.dtype), lse.astype(np.float32)


# --- sums that are rounded at every chunk of keys


def chunked_case(randn, kind: Chunked, dtype="float16", n=512):
    """q, k, v and what a kernel that rounds in this way returns."""
    q, k, v = (randn(1, length, heads, 16, dtype=dtype) for length, heads in ((24, 4), (n, 2), (n, 2)))
    o, lse = np.zeros(q.shape, dtype), np.zeros((1, 4, 24), np.float32)
    visible = reference.visible_keys(24, n, True)
    for h in range(4):
        head = q[0, :, h], k[0, :, h // 2], v[0, :, h // 2], visible, 0.25
        o[0, :, h], lse[0, h] = dense_rows(*head, dtype, kind)
    return q, k, v, o, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [*DTYPES, "float32"])
def test_chunked_sums_pass_as_what_they_are(machine, randn, dtype, accumulate):
    kind = Chunked(16, accumulate)
    arrays = [machine.upload(x) for x in chunked_case(randn, kind, dtype)]
    for sample in (False, True):
        verdict = compare.check_attention(*arrays, causal=True, rounding=kind, sample=sample).raise_if_bad()
        assert 0 < verdict.max_err <= verdict.tol


def test_chunked_sums_are_held_to_their_own_rounding(randn):
    """bfloat16 sums do not pass as float16 or float32 ones, nor 32 chunks as one; scores must be said too."""
    *qkv, o, lse = chunked_case(randn, Chunked(16, "bfloat16"))
    kinds = Chunked(16, "float16"), Chunked(16, "float32"), Chunked(512, "bfloat16"), "input", "float32"
    for other in kinds:
        assert not compare.check_attention(*qkv, o, lse, causal=True, rounding=other).ok
    assert not compare.check_attention(*qkv, o, lse, causal=True, rounding="weights").ok


def test_one_chunk_is_the_dense_computation_with_its_scores_rounded(randn):
    """Before its division: so no further apart than a step of the dtype."""
    *qkv, o, lse = chunked_case(randn, Chunked(512, "float32"))
    dense = compare.dense(*qkv, causal=True, rounding="input")
    np.testing.assert_allclose(o.astype(float), dense, atol=2 * eps("float16") * np.abs(dense).max())


@pytest.mark.parametrize("fault", ["a chunk left out", "a chunk not rescaled"])
def test_a_chunk_that_is_wrong_is_seen(randn, fault):
    kind = Chunked(16, "float16")
    *qkv, o, lse = chunked_case(randn, kind)
    q, k, v = qkv
    part = slice(496, 512) if fault == "a chunk left out" else slice(0, 496)
    share, _ = reference.attention(q, k[:, part], v[:, part])
    wrong = (o - 0.03 * share).astype("float16")
    assert not compare.check_attention(*qkv, wrong, lse, causal=True, rounding=kind).ok


def test_the_probe_allows_chunked_sums_nothing_more():
    """An error that only a P rounded after its division explains; 1/64 of a key hides smaller ones."""
    probe = compare.uniform_probe(1, 1, 1, 1, 3000, 64, "bfloat16")
    off = (probe.o * (1 + 1.4 * eps("bfloat16"))).astype(np.float32)
    assert compare.check_probe(off, None, probe, "weights").ok
    assert not compare.check_probe(off, None, probe, Chunked(128, "bfloat16")).ok
    assert compare.check_probe(probe.o.astype("bfloat16"), None, probe, Chunked(128, "bfloat16")).ok
