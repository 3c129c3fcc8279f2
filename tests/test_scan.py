"""Sums and maxima over the lanes of a warp, on each machine by its own means."""
from __future__ import annotations

import numpy as np
from simt_launch import launched

WARPS = 64


def test_lanes_sum_and_compare(machine, rng):
    """Whole numbers of any sign; floats of every size, infinities, zeros of either sign, and warps that have
    nothing but −∞, as a merge without keys does."""
    n = rng.integers(-(2**20), 2**20, (WARPS, 32), dtype=np.int32)
    x = (rng.standard_normal((WARPS, 32)) * 10.0 ** rng.uniform(-44, 38, (WARPS, 32))).astype(np.float32)
    x[:8] = -np.abs(x[:8])
    x[8:16][rng.random((8, 32)) < 0.8] = -np.inf
    x[16:18], x[18, 3] = -np.inf, np.inf
    x[19], x[20] = -0.0, np.where(np.arange(32) % 2, 0.0, -1e-45)
    total, below, top, largest = (out.reshape(WARPS, 32) for out in launched(
        machine, "scan.cu", "scanned", {}, WARPS, [n, x], *((n.size, dtype) for dtype in ["int32"] * 3 + ["float32"])))
    np.testing.assert_array_equal(total, np.repeat(n.sum(1, keepdims=True), 32, 1))
    np.testing.assert_array_equal(below, n.cumsum(1))
    np.testing.assert_array_equal(top, np.repeat(n.max(1, keepdims=True), 32, 1))
    np.testing.assert_array_equal(largest, np.repeat(x.max(1, keepdims=True), 32, 1))
