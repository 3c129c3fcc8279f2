"""What is particular to `chunked_unfused`: chunks, tiles, which pairs it launches, what sums round to."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_prefill import run

import cuattn
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported, ceil_div
from cuattn.kernels.chunked_unfused import MOST_CHUNK, query_chunks
from cuattn.kernels.shapes import AttentionShape
from cuattn.reference import visible_keys

KERNEL = "chunked_unfused"
CARD = for_arch("sm_90a")
SMALL = {"chunk": 16, "tile_m": 16, "tile_n": 16}
PASSES = ("scores", "softmax", "output", "rescale")


def plan(shape: AttentionShape, device=CARD, **constants):
    return ROWS[KERNEL].plan(shape, device, constants)


@pytest.mark.parametrize("constants", [
    SMALL, {"chunk": 96, "tile_m": 48, "tile_n": 32, "layout": "column"},
    {"chunk": 128, "tile_m": 128, "tile_n": 128}, {"chunk": MOST_CHUNK, "tile_n": 256},
], ids=str)
def test_chunks_and_tiles(machine, randn, constants):
    """Chunks that divide neither M nor N, and tiles that are a part of one or all of it."""
    q, k, v = randn(1, 150, 4, 72), randn(1, 203, 2, 72), randn(1, 203, 2, 72)
    run(machine, KERNEL, q, k, v, causal=True, constants=constants)


@pytest.mark.parametrize("dtype, accumulate", [
    ("float16", "bfloat16"), ("float16", "float32"), ("bfloat16", "input"), ("bfloat16", "float16"),
])
def test_accumulators(machine, randn, dtype, accumulate):
    q, k, v = (randn(1, n, 2, 64, dtype=dtype) for n in (40, 260, 260))
    constants = {**SMALL, "accumulate": accumulate}
    p, *_ = run(machine, KERNEL, q, k, v, constants=constants)
    sums = dtype if accumulate == "input" else accumulate
    assert p.plan.rounding.accumulate == p.plan.scratch["sum"][1] == p.plan.scratch["part"][1] == sums


def test_sums_in_16_bits_lose_with_every_chunk(machine, randn):
    """The error against float64 grows with the chunks in bfloat16, and is what one chunk's is in float32."""
    q, k, v = randn(1, 32, 2, 64), randn(1, 1024, 2, 64), randn(1, 1024, 2, 64)
    error = {}
    for accumulate, chunk in (("bfloat16", 1024), ("bfloat16", 16), ("float32", 16)):
        constants = {**SMALL, "chunk": chunk, "accumulate": accumulate}
        p, o, lse = run(machine, KERNEL, q, k, v, constants=constants)
        verdict = cuattn.compare.check_attention(q, k, v, o, lse, rounding=p.plan.rounding)
        error[accumulate, chunk] = verdict.max_err
    assert error["bfloat16", 16] > 3 * error["bfloat16", 1024] > error["float32", 16]


def test_a_float16_sum_overflows_where_a_float32_one_does_not(machine):
    """1100 keys of weight 1 and V = 60: the sum before its division is 66000."""
    q, k, v = (np.full((1, n, 1, 64), x, "float16") for n, x in ((4, 0), (1100, 0), (1100, 60)))
    with pytest.raises(cuattn.compare.Mismatch, match="O: 256 NaN or infinite .* got inf, expected 60"):
        run(machine, KERNEL, q, k, v)
    _, o, _ = run(machine, KERNEL, q, k, v, constants={**SMALL, "accumulate": "float32"})
    assert (o == 60).all()


def test_infinite_scores_are_said_to_be_wrong(machine):
    """Scores are stored in float16: one of 92416 is infinite there."""
    q, k, v = (np.full((1, n, 1, 64), x, "float16") for n, x in ((1, 38), (3, 38), (3, 1)))
    with pytest.raises(cuattn.compare.Mismatch, match="O: 64 NaN or infinite values differ"):
        run(machine, KERNEL, q, k, v, softmax_scale=1.0)


# --- the plan


@given(st.integers(0, 700), st.integers(0, 700), st.sampled_from([16, 128, 512]), st.booleans())
def test_a_pair_is_launched_where_some_row_sees_some_key(m, n, chunk, causal):
    shape = AttentionShape(2, 2, 1, m, n, 64, "float16", causal)
    launches = plan(shape, chunk=chunk, tile_m=16, tile_n=16).launches
    visible = visible_keys(m, n, causal)
    expected = []
    for m0 in range(0, max(m, 1), chunk):
        seen = max(visible[m0 : m0 + chunk], default=0)
        expected += [f"chunked_{name}" for name in PASSES] * ceil_div(int(seen), chunk) + ["chunked_finish"]
    assert [launch.entry for launch in launches] == expected
    assert sum(rows for _, rows, _ in query_chunks(shape, chunk)) == m
    assert all(all(launch.grid) for launch in launches) or m == 0


def test_the_scratch_is_one_pair_of_chunks():
    """However long the sequence: the chunk's scores, and three rows' worth of sums and statistics."""
    heads, chunk, d = 32, 128, 64
    for n in (128, 4096):
        made = plan(AttentionShape(1, heads, 8, n, n, d, "float16"))
        assert made.scratch_bytes == heads * chunk * (2 * chunk + 2 * 2 * d + 3 * 4)


def test_scores_in_memory_are_twice_the_articles_sum():
    """It counts 64 · 2 · 8192 · 128 · 2 bytes a head for S; P, in the same place, travels as often."""
    n, chunk, d = 8192, 128, 64
    shape = AttentionShape(1, 1, 1, n, n, d, "float16")
    made = plan(shape, tile_m=chunk, tile_n=chunk)
    cost, pairs, rows = ROWS[KERNEL].cost(shape, made), (n // chunk) ** 2, n * d * 2
    inputs = pairs * 3 * chunk * d * 2  # Q, K and V of a pair, once with tiles as large as the chunk
    sums = 4 * pairs * chunk * d * 2  # part and sum, stored and loaded
    statistics = pairs * chunk * 24
    rest = rows + n * 4 + n * 8 - 12 * n  # O, LSE, the last m and l; and no m, l and factor at first
    assert cost.bytes_loaded + cost.bytes_stored == 2 * 268_435_456 + inputs + sums + statistics + rest
    assert cost.launches == 4 * pairs + n // chunk


def test_thousands_of_launches_share_what_they_can():
    shape = AttentionShape(1, 32, 8, 8192, 8192, 128, "float16")
    made = plan(shape)
    assert len(made.launches) == 64 * (64 * 4 + 1) == made.launch_count
    assert len({id(launch) for launch in made.launches}) == 4 + 64
    assert len({id(launch.constants) for launch in made.launches}) == 1
    tensors = {name: object() for name in ("q", "k", "v", "o", "lse", *made.scratch)}
    bound = ROWS[KERNEL].arguments(shape, made, {**tensors, "softmax_scale": 0.1})
    assert len(bound) == len(made.launches)
    assert len({id(args) for args in bound}) == 64 * 64 + 64 + 64 + 2 + 2  # scores, output, finish; the rest


TILE = "must be a multiple of 16 that divides the chunk, {}, and is at most {}, got {}; change it"


@pytest.mark.parametrize("constants, match", [
    ({"chunk": 40}, f"chunk must be a multiple of 16 and at most {MOST_CHUNK}, got 40; change it"),
    ({"chunk": 4096}, f"chunk must be a multiple of 16 and at most {MOST_CHUNK}, got 4096; change it"),
    ({"tile_m": 24}, "tile_m " + TILE.format(128, 128, 24)),
    ({"tile_m": 48}, "tile_m " + TILE.format(128, 128, 48)),
    ({"chunk": 512, "tile_m": 256}, "tile_m " + TILE.format(512, 128, 256)),
    ({"chunk": 32}, "tile_n " + TILE.format(32, 256, 64)),
    ({"layout": "diagonal"}, "layout must be 'row' or 'column', got 'diagonal'; choose one"),
    ({"accumulate": "float8"}, "accumulate must be 'input', 'float16', .* got 'float8'; choose one"),
])
def test_constants_that_make_no_sense(randn, constants, match):
    q = randn(1, 4, 2, 64)
    with pytest.raises(Unsupported, match=f"{KERNEL}: {match}"):
        cuattn.attention(q, q, q, kernel=KERNEL, constants=constants)


def test_what_no_device_takes_is_refused():
    wide = AttentionShape(1, 1, 1, 512, 512, 256, "float16")
    with pytest.raises(Unsupported, match="tiles 128 × 128 at head dim 256 need .*, RTX 4090 grants .*; ch"):
        plan(wide, for_arch("sm_89"), chunk=512, tile_m=128, tile_n=128)
    with pytest.raises(Unsupported, match="at most 65535 heads in all .*, got 65536; split the call"):
        plan(AttentionShape(1024, 64, 64, 8, 8, 64, "float16"))
    with pytest.raises(Unsupported, match="at most 524288 launches, got 1049088 with chunks of 128; choose"):
        plan(AttentionShape(1, 1, 1, 65536, 65536, 64, "float16"))
