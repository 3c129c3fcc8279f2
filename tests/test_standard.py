"""What is particular to `standard`: its scratch by groups of heads, and scores in the input dtype."""
from __future__ import annotations

import pytest
from test_prefill import run

import cuattn
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.shapes import AttentionShape


@pytest.mark.parametrize("constants", [
    {"head_group": 1}, {"head_group": 5}, {"score": "input"}, {"head_group": 3, "score": "input"},
])
def test_constants(machine, randn, constants):
    """Groups that do not divide the heads; the last one is smaller."""
    q, k, v = randn(2, 50, 6, 64), randn(2, 70, 2, 64), randn(2, 70, 2, 64)
    p, *_ = run(machine, "standard", q, k, v, constants=constants)
    assert len(p.plan.launches) == 3 * -(-12 // constants.get("head_group", 12))


def test_scratch_is_the_score_matrix():
    """The sum every article does: N² scores a head, 128 MiB at N = 8192 in 16 bits; P takes as much again."""
    shape = AttentionShape(1, 32, 8, 8192, 8192, 128, "float16")
    plan = ROWS["standard"].plan(shape, for_arch("sm_90a"), {"head_group": 1, "score": "input"})
    assert plan.scratch_bytes == 2 * 128 * 2**20
    whole = ROWS["standard"].plan(shape, for_arch("sm_90a"), None)
    assert whole.scratch_bytes == 32 * 8192 * 8192 * (4 + 2)


@pytest.mark.parametrize("constants, match", [
    ({"score": "bfloat16"}, "score must be 'float32' or 'input', got 'bfloat16'; choose one"),
    ({"head_group": -1}, "head_group: expected an int of at least 1 or None, got -1; change it"),
])
def test_constants_that_make_no_sense(randn, constants, match):
    q = randn(1, 4, 2, 64)
    with pytest.raises(cuattn.Unsupported, match=match):
        cuattn.attention(q, q, q, kernel="standard", constants=constants)
