"""Numbers of eight bits: every code to float16, floats to the nearest code, in NumPy and on every machine."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from simt_launch import launched

from cuattn.quantise import numbers, quantise

TYPES = pytest.mark.parametrize("kv_dtype", ["float8_e4m3", "int8"])


def words(machine, entry, kv_dtype, blocks, x, *sizes):
    """The uint32 outputs of an entry of bytes.cu."""
    return launched(machine, "bytes.cu", entry, {"Stored": kv_dtype}, blocks, [x],
                    *((size, "uint32") for size in sizes))


def floats(rng) -> np.ndarray:
    """Of every size, all numbers of either type, those half-way between two neighbours and beside them."""
    grid = np.unique(np.concatenate([numbers(np.arange(256, dtype=np.uint8), t) for t in ("float8_e4m3", "int8")]))
    grid = grid[np.isfinite(grid)]
    ties = (grid[1:] + grid[:-1]) / 2
    sides = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 464.1, 480, -1e30, 127.5, -128.5, 1e-30, -1e-40]
    drawn = rng.standard_normal(2000) * 10.0 ** rng.uniform(-4, 4, 2000)
    every = np.concatenate([grid, ties, *sides, special, drawn]).astype(np.float32)
    return np.resize(every, -(-len(every) // 128) * 128)


def rounded(x, kv_dtype):
    """By other means: ml_dtypes' own rounding, and Python's."""
    if kv_dtype == "float8_e4m3":
        return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    whole = [0 if np.isnan(v) else round(float(np.clip(v, -128, 127))) for v in x]
    return np.array(whole, np.int8).view(np.uint8)


@TYPES
def test_every_code_becomes_the_float16_that_it_stands_for(machine, kv_dtype):
    """Also as the low and the high ones of a word, and NaN as NaN."""
    codes = np.arange(256, dtype=np.uint8)[(np.arange(256)[:, None] + np.array([0, 37, 101, 215])) % 256]
    straight, across = words(machine, "widened", kv_dtype, 8, codes.view(np.uint32).reshape(-1), 512, 512)
    want = numbers(codes, kv_dtype).astype(np.float16)
    np.testing.assert_array_equal(straight.view(np.float16).reshape(256, 4), want)
    np.testing.assert_array_equal(across.view(np.float16).reshape(256, 4), want[:, [0, 2, 1, 3]])
    assert np.isnan(want).any() == (kv_dtype == "float8_e4m3")
    zero = want == 0
    assert (np.signbit(straight.view(np.float16).reshape(256, 4)) == np.signbit(want))[zero].all()


@TYPES
def test_floats_go_to_the_nearest_code(machine, rng, kv_dtype):
    """Ties to even, and all that is too large to the largest."""
    x = floats(rng)
    got, = words(machine, "narrowed", kv_dtype, len(x) // 128, x, len(x) // 4)
    got, nan = got.view(np.uint8), np.isnan(x)
    np.testing.assert_array_equal(got[~nan], rounded(x, kv_dtype)[~nan])
    assert (got[nan] & 0x7F == (0x7F if kv_dtype == "float8_e4m3" else 0)).all()


@TYPES
def test_numpy_says_the_same(rng, kv_dtype):
    x = floats(rng)
    nan = np.isnan(x)
    with np.errstate(invalid="ignore", over="ignore"):
        np.testing.assert_array_equal(quantise(x, kv_dtype)[~nan], rounded(x, kv_dtype)[~nan])
        np.testing.assert_array_equal(quantise(x, kv_dtype, 0.3)[~nan], rounded(x / np.float32(0.3), kv_dtype)[~nan])
    assert (quantise(x, kv_dtype)[nan] & 0x7F == (0x7F if kv_dtype == "float8_e4m3" else 0)).all()
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[~np.isnan(numbers(codes, kv_dtype))]
    np.testing.assert_array_equal(quantise(numbers(codes, kv_dtype), kv_dtype), codes)
