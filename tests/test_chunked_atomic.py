"""What is particular to `chunked_atomic`: any order of its blocks is right, and how many atomics it takes."""
from __future__ import annotations

import numpy as np
import pytest
from test_prefill import run

import cuattn
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.shapes import AttentionShape
from cuattn.reference import visible_keys

KERNEL = "chunked_atomic"
SMALL = {"chunk": 64, "tile_m": 32, "tile_n": 32}


@pytest.mark.parametrize("changes", [
    {"order": "reverse"}, {"order": "shuffle", "seed": 3}, {"resident": 3},
], ids=str)
def test_blocks_may_run_in_any_order(cpu, randn, changes):
    """Not to the bit, but within the tolerance; the chunk that comes first may hold the smaller scores."""
    q, k, v = randn(1, 150, 4, 64), randn(1, 203, 2, 64), randn(1, 203, 2, 64)
    with cpu.schedule(**changes):
        run(cpu, KERNEL, q, k, v, causal=True, constants=SMALL)


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_maximum_over_chunks_may_be_negative_or_mixed(machine, randn, sign):
    """Maxima of one sign and of both, and zeros of both signs, in whichever chunk the largest is."""
    q, k, v = (np.zeros((1, n, 1, 64), "float16") for n in (4, 200, 200))
    q[0, :, 0, 0] = 1, -1, 0, -0.0
    k[0, :, 0, 0] = sign * np.abs(randn(200)) - 3 * (np.arange(200) == 150)
    v[...] = randn(1, 200, 1, 64)
    run(machine, KERNEL, q, k, v, constants=SMALL, softmax_scale=1.0)


def test_atomics(cpu, randn):
    """For each chunk that a slice sees a maximum, a sum of weights and D numbers a row."""
    m, n, d = 150, 203, 64
    q, k, v = (cpu.upload(randn(1, length, 1, d)) for length in (m, n, n))
    planned = cuattn.plan_attention(q, k, v, causal=True, kernel=KERNEL, constants=SMALL)
    with cpu.counting() as counted:
        planned.run()
    visible, rows = visible_keys(m, n, True), 0
    for m0 in range(0, m, SMALL["tile_m"]):
        seen = visible[m0 : m0 + SMALL["tile_m"]]
        rows += len(seen) * -(-int(seen.max()) // SMALL["chunk"])
    assert counted.atomics == rows * (d + 2)


def test_plans():
    shape = AttentionShape(2, 8, 2, 64, 8192, 128, "bfloat16", True)
    plan = ROWS[KERNEL].plan(shape, for_arch("sm_90a"))
    assert [launch.entry for launch in plan.launches] == [
        "chunked_clear", "chunked_max", "chunked_add", "chunked_finish"]
    assert plan.launches[1].grid == plan.launches[2].grid == (1, 16, 16)  # few queries, and many blocks
    assert plan.scratch_bytes == 16 * 64 * (4 * 128 + 8)
    with pytest.raises(Unsupported, match="chunked_atomic: expected at most 65535 heads .*, got 65536"):
        ROWS[KERNEL].plan(AttentionShape(1024, 64, 64, 8, 8, 64, "float16"), for_arch("sm_90a"))
    with pytest.raises(Unsupported, match="chunked_atomic: tile_n must be a multiple of 16 that divides"):
        ROWS[KERNEL].plan(shape, for_arch("sm_90a"), {"chunk": 64, "tile_n": 48})
    with pytest.raises(Unsupported, match="chunked_atomic: 128 rows of 2048 scores at head dim 128 need"):
        ROWS[KERNEL].plan(shape, for_arch("sm_90a"), {"chunk": 2048, "tile_m": 128})
