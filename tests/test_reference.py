"""The float64 reference against definitions simple enough to see through."""
import numpy as np
import pytest

from cuattn import reference


def by_hand(q, k, v, visible, scale):
    """One row, term by term."""
    if visible == 0:
        return np.zeros(v.shape[1]), -np.inf
    scores = [scale * sum(float(a) * float(b) for a, b in zip(q, k[j])) for j in range(visible)]
    weights = [np.exp(s - max(scores)) for s in scores]
    o = sum(w * v[j].astype(np.float64) for j, w in enumerate(weights)) / sum(weights)
    return o, max(scores) + np.log(sum(weights))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("m, n, causal", [(3, 5, False), (3, 5, True), (5, 3, True), (4, 4, True)])
def test_attention_is_the_definition(randn, dtype, m, n, causal):
    q, k, v = randn(2, m, 4, 8, dtype=dtype), randn(2, n, 2, 8, dtype=dtype), randn(2, n, 2, 8, dtype=dtype)
    o, lse = reference.attention(q, k, v, causal)
    assert o.dtype == lse.dtype == np.float64
    for b in range(2):
        for h in range(4):
            for i in range(m):
                visible = max(0, min(n, i + n - m + 1)) if causal else n
                want = by_hand(q[b, i, h], k[b, :, h // 2], v[b, :, h // 2], visible, 8**-0.5)
                np.testing.assert_allclose(o[b, i, h], want[0], rtol=1e-12, atol=1e-14)
                np.testing.assert_allclose(lse[b, h, i], want[1], rtol=1e-12)


@pytest.mark.parametrize("window", [(-1, -1), (2, -1), (-1, 1), (1, 1), (0, 0)])
@pytest.mark.parametrize("cap", [0.0, 0.5])
@pytest.mark.parametrize("m, n, causal", [(3, 5, False), (5, 3, True), (6, 6, True)])
def test_windows_caps_and_sinks_are_their_definitions(randn, m, n, causal, window, cap):
    """The sink as one more key, of score `sinks[h]` and value 0."""
    q, k, v, sinks = randn(1, m, 2, 8), randn(1, n, 1, 8), randn(1, n, 1, 8), np.array([-0.5, 2.0])
    o, lse = reference.attention(q, k, v, causal, window_size=window, softcap=cap, sinks=sinks)
    for h in range(2):
        for i in range(m):
            seen = [j for j in range(n) if (not causal or j <= i + n - m)
                    and (window[0] < 0 or j >= i + n - m - window[0])
                    and (window[1] < 0 or j <= i + n - m + window[1])]
            scores = [q[0, i, h].astype(float) @ k[0, j, 0].astype(float) / 8**0.5 for j in seen]
            scores = [cap * np.tanh(s / cap) for s in scores] if cap else scores
            total = sum(np.exp(s) for s in [*scores, sinks[h]])
            terms = [np.exp(s) * v[0, j, 0].astype(float) for s, j in zip(scores, seen)]
            want = sum(terms, np.zeros(8)) / total
            np.testing.assert_allclose(o[0, i, h], want, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(lse[0, h, i], np.log(total), rtol=1e-12, atol=1e-14)


def test_packed_sequences_are_each_their_own(randn):
    """Rows of no sequence are NaN."""
    q, k, v = randn(9, 2, 8), randn(7, 1, 8), randn(7, 1, 8)
    o, lse = reference.attention_varlen(q, k, v, [1, 4, 4, 8], [0, 2, 5, 5], causal=True)
    want, want_lse = reference.attention(q[None, 1:4], k[None, :2], v[None, :2], causal=True)
    assert (o[1:4] == want[0]).all() and (lse[:, 1:4] == want_lse[0]).all()
    assert (o[4:8] == 0).all() and (lse[:, 4:8] == -np.inf).all()
    assert np.isnan(o[[0, 8]]).all() and np.isnan(lse[:, [0, 8]]).all()


@pytest.mark.parametrize("b, m, n", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_extents(randn, b, m, n):
    o, lse = reference.attention(randn(b, m, 2, 8), randn(b, n, 2, 8), randn(b, n, 2, 8))
    assert o.shape == (b, m, 2, 8) and lse.shape == (b, 2, m)
    assert (o == 0).all() and (lse == -np.inf).all()


def test_rows_without_keys_are_zero_and_minus_infinity(randn):
    o, lse = reference.attention(randn(1, 5, 1, 8), randn(1, 2, 1, 8), randn(1, 2, 1, 8), causal=True)
    assert (o[0, :3] == 0).all() and (lse[0, 0, :3] == -np.inf).all()
    assert np.isfinite(lse[0, 0, 3:]).all() and (o[0, 3:] != 0).all()


def test_one_live_key_far_below_zero_wins():
    q = np.array([-20000.0]).reshape(1, 1, 1, 1)
    k, v = np.array([1.0, 0.0]).reshape(1, 2, 1, 1), np.array([1.0, 100.0]).reshape(1, 2, 1, 1)
    o, lse = reference.attention_rows(q[0, :, 0], k[0, :, 0], v[0, :, 0], [1], 1.0)
    assert o[0, 0] == 1.0 and lse[0] == -20000.0


def test_heads_may_come_together(randn, monkeypatch):
    """Each with its own visible keys; also where not all rows fit at once."""
    q, k, v = randn(3, 37, 8), randn(3, 50, 8), randn(3, 50, 8)
    visible = np.arange(3 * 37).reshape(3, 37) % 51
    apart = [reference.attention_rows(q[i], k[i], v[i], visible[i], 0.3) for i in range(3)]
    for most in (reference.MAX_SCORES, 400):
        monkeypatch.setattr(reference, "MAX_SCORES", most)
        o, lse = reference.attention_rows(q, k, v, visible, 0.3)
        np.testing.assert_allclose(o, np.stack([one[0] for one in apart]), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse, np.stack([one[1] for one in apart]), rtol=1e-12)


def test_row_blocks_do_not_change_the_result(randn, monkeypatch):
    q, k, v = randn(1, 37, 1, 8), randn(1, 50, 1, 8), randn(1, 50, 1, 8)
    whole = reference.attention(q, k, v, causal=True)
    monkeypatch.setattr(reference, "MAX_SCORES", 150)
    for got, want in zip(reference.attention(q, k, v, causal=True), whole):
        np.testing.assert_allclose(got, want, rtol=1e-13)


def paged(randn, dtype="float16"):
    k, v = randn(2, 11, 2, 8, dtype=dtype), randn(2, 11, 2, 8, dtype=dtype)
    lengths, table = np.array([11, 5], np.int32), np.array([[4, 0, 2], [5, 1, 2147480000]], np.int32)
    caches = [np.full((6, 4, 2, 8), np.nan, dtype) for _ in "kv"]
    for b, n in enumerate(lengths):
        for t in range(n):
            for cache, x in zip(caches, (k, v)):
                cache[table[b, t // 4], t % 4] = x[b, t]
    return k, v, *caches, table, lengths


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode_equals_attention_on_the_truncated_sequence(randn, dtype):
    k, v, k_cache, v_cache, table, lengths = paged(randn, dtype)
    q = randn(2, 1, 4, 8, dtype=dtype)
    o, lse = reference.decode(q, k_cache, v_cache, table, lengths)
    for b, n in enumerate(lengths):
        want = reference.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])
        np.testing.assert_array_equal(o[b], want[0][0])
        np.testing.assert_array_equal(lse[b], want[1][0])


def test_decode_of_an_empty_sequence_reads_nothing(randn):
    _, _, k_cache, v_cache, table, lengths = paged(randn)
    lengths[0], table[0] = 0, -1
    o, lse = reference.decode(randn(2, 1, 4, 8), k_cache, v_cache, table, lengths)
    assert (o[0] == 0).all() and (lse[0] == -np.inf).all() and np.isfinite(lse[1]).all()


def test_append_writes_behind_the_lengths_and_nowhere_else(randn):
    k, v, k_cache, v_cache, table, lengths = paged(randn)
    table[1, 2] = 3
    new_k, new_v = randn(2, 1, 2, 8), randn(2, 1, 2, 8)
    k_after, v_after = reference.append_kv(new_k, new_v, k_cache, v_cache, table, lengths)
    for after, before, new in ((k_after, k_cache, new_k), (v_after, v_cache, new_v)):
        changed = np.argwhere((after.view(np.uint16) != before.view(np.uint16)).any(axis=(2, 3)))
        assert changed.tolist() == [[1, 1], [2, 3]]
        assert (after[2, 3] == new[0, 0]).all() and (after[1, 1] == new[1, 0]).all()


def test_merge_gives_attention_over_the_union(randn):
    q, k, v = randn(2, 3, 2, 8), randn(2, 9, 2, 8), randn(2, 9, 2, 8)
    a, b = reference.attention(q, k[:, :4], v[:, :4]), reference.attention(q, k[:, 4:], v[:, 4:])
    o, lse = reference.merge_states(*a, *b)
    want = reference.attention(q, k, v)
    np.testing.assert_allclose(o, want[0], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(lse, want[1], rtol=1e-13)


def test_merge_with_empty_states(randn):
    o, lse = randn(1, 2, 1, 8, dtype="float32"), randn(1, 1, 2, dtype="float32")
    nothing, never = np.full_like(o, np.nan), np.full_like(lse, -np.inf)
    full, empty = (o, lse), (nothing, never)
    for got in (reference.merge_states(*full, *empty), reference.merge_states(*empty, *full)):
        assert (got[0] == o).all() and (got[1] == lse).all()
    got = reference.merge_states(nothing, never, nothing, never)
    assert (got[0] == 0).all() and (got[1] == -np.inf).all()


def test_widen_is_exact(randn):
    for dtype in ("float16", "bfloat16", "float32"):
        x = randn(7, 5, dtype=dtype)
        assert (reference.widen(x) == x.astype(np.float64)).all()
        assert (reference.widen(x.T, np.float32) == x.T.astype(np.float32)).all()
