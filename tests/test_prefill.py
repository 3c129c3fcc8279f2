"""Every prefill kernel on every machine.

Shapes, masks, heads, strides, extreme logits, exact counts, equal bits.
"""
from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from counted import run_counted

import cuattn
from cuattn.cpu import check_schedules
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.shapes import AttentionShape

KERNELS = [name for name, row in ROWS.items() if row.family == "prefill"]
MARGIN = 512  # NaN elements around every buffer


def run(machine, kernel, q, k, v, **options):
    """Kernel results for NumPy inputs, judged; returns (planned, o, lse) with the arrays on the host."""
    there = {**options, "sinks": machine.upload(options["sinks"])} if "sinks" in options else options
    p = cuattn.plan_attention(*(machine.upload(x) for x in (q, k, v)), kernel=kernel, **there)
    o, lse = run_counted(machine, p)
    judged = {name: value for name, value in options.items() if name not in ("constants", "out")}
    cuattn.compare.check_attention(q, k, v, o, lse, rounding=p.plan.rounding, **judged).raise_if_bad()
    return p, o, lse


# (b, m, n, h, hkv): one tile, ragged ends, more queries than keys,
# a fully masked first tile, one key, many heads
SHAPES = [
    (1, 64, 64, 1, 1), (2, 130, 77, 2, 1), (1, 88, 448, 14, 2), (1, 65, 257, 4, 4), (1, 1, 300, 3, 1),
    (1, 200, 1, 5, 5), (3, 17, 33, 6, 2), (1, 129, 129, 7, 1),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape, causal", [*((s, True) for s in SHAPES), *((s, False) for s in SHAPES[:5])], ids=str)
def test_shapes(machine, randn, kernel, causal, shape):
    b, m, n, h, hkv = shape
    run(machine, kernel, randn(b, m, h, 64), randn(b, n, hkv, 64), randn(b, n, hkv, 64), causal=causal)


HEAD_DIMS = [8, 40, 72, 80, 96, 128, 136, 160, 224, 256]


@pytest.mark.parametrize("kernel, d", [
    (kernel, d) for kernel in KERNELS for d in (HEAD_DIMS if kernel.startswith("flash") else HEAD_DIMS[::3])])
def test_head_dims(machine, randn, kernel, d):
    dtype = "bfloat16" if d % 16 else "float16"
    q, k, v = (randn(1, length, 2, d, dtype=dtype) for length in (70, 65, 65))
    run(machine, kernel, q, k, v)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 16, 32, 71, 128])
def test_groups(machine, randn, kernel, group):
    run(machine, kernel, randn(1, 3, 2 * group, 64), randn(1, 20, 2, 64), randn(1, 20, 2, 64), causal=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [1, 255, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_uniform_probe(machine, kernel, n, causal):
    """q = 0 and integer V: the exact mean.

    Finds one key dropped or counted twice, which a maximum norm does not.
    """
    probe = cuattn.compare.uniform_probe(1, 2, 1, 100, n, 64, causal=causal)
    p, o, lse = run(machine, kernel, probe.q, probe.k, probe.v, causal=causal)
    cuattn.compare.check_probe(o, lse, probe, p.plan.rounding).raise_if_bad()


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_queries_than_keys(machine, randn, kernel):
    """Leading rows see no key: O = 0 and LSE = −∞; the others are exact."""
    _, o, lse = run(machine, kernel, randn(1, 100, 2, 64), randn(1, 30, 2, 64), randn(1, 30, 2, 64),
                    causal=True)
    assert (o[:, :70] == 0).all() and np.isneginf(lse[:, :, :70]).all()
    assert np.isfinite(lse[:, :, 70:]).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("b, m, n, h", [(0, 5, 5, 1), (1, 0, 5, 1), (1, 5, 0, 1), (1, 5, 5, 0), (0, 0, 0, 0)])
def test_empty(machine, kernel, b, m, n, h):
    q, k, v = (np.ones((b, length, h, 64), "float16") for length in (m, n, n))
    for causal in (False, True):
        _, o, lse = run(machine, kernel, q, k, v, causal=causal)
        assert o.shape == (b, m, h, 64) and lse.shape == (b, h, m)
        assert (o == 0).all() if n == 0 else o.size == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_live_key_among_very_negative_logits(machine, kernel):
    """Logits below −5e4 and one at −5e4 + 5000: the answer is that key's V."""
    q = np.zeros((1, 1, 2, 64), "float16")
    k, v = np.zeros((1, 40, 1, 64), "float16"), np.ones((1, 40, 1, 64), "float16")
    q[..., 0], k[..., 0], k[0, 7, 0, 0], v[0, 7] = -220, 240, 220, 3
    _, o, _ = run(machine, kernel, q, k, v, softmax_scale=1.0)
    assert (o == 3).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_keys_far_apart(machine, kernel):
    """q·k = −20000 and 0: the second key takes all."""
    q, k, v = (np.zeros((1, n, 1, 64), "float16") for n in (1, 2, 2))
    q[..., 0], k[0, 0, 0, 0], v[0, 0], v[0, 1] = -20000, 1, 1, 100
    _, o, _ = run(machine, kernel, q, k, v, softmax_scale=1.0)
    assert (o == 100).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [3e4, -3e4, 1e-4])
def test_rows_of_equal_logits(machine, kernel, size):
    """Weights sum to 1: large logits stay finite in float16, tiny ones do not vanish."""
    q, k = np.zeros((1, 2, 1, 64), "float16"), np.zeros((1, 100, 1, 64), "float16")
    v = np.ones((1, 100, 1, 64), "float16")
    q[..., 0], k[..., 0] = np.sqrt(abs(size)), np.copysign(np.sqrt(abs(size)), size)
    _, o, _ = run(machine, kernel, q, k, v, softmax_scale=1.0)
    np.testing.assert_allclose(o.astype(float), 1, atol=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_outliers(machine, rng, kernel):
    """N(0, 1) with rare N(0, 100): no worse than the dense same-dtype computation."""
    shape = (1, 128, 2, 64)
    q, k, v = (
        (rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * (rng.random(shape) < 1e-3))
        .astype("float16") for _ in range(3)
    )
    run(machine, kernel, q, k, v)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_outside_is_read_or_written(machine, randn, kernel):
    """Inputs and output lie in seas of NaN: the result is finite, the seas stay as they were."""
    shapes = {"q": (1, 70, 2, 40), "k": (1, 67, 2, 40), "v": (1, 67, 2, 40), "o": (1, 70, 2, 40)}
    seas, views = {}, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        seas[name] = machine.empty((size + 2 * MARGIN,), "float16")
        views[name] = seas[name][MARGIN : MARGIN + size].reshape(shape)
        if name != "o":
            views[name][...] = machine.upload(randn(*shape))
    p = cuattn.plan_attention(views["q"], views["k"], views["v"], kernel=kernel, causal=True, out=views["o"])
    p.run()
    machine.synchronize()
    host = {name: machine.download(x) for name, x in views.items()}
    cuattn.compare.check_attention(host["q"], host["k"], host["v"], host["o"], causal=True,
                                   rounding=p.plan.rounding).raise_if_bad()
    for sea in seas.values():
        sea = machine.download(sea)
        assert np.isnan(sea[:MARGIN]).all() and np.isnan(sea[-MARGIN:]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_strides(machine, randn, kernel):
    """Transposed views, K and V with different strides, and views of a fused projection."""
    heads_first = machine.upload(randn(1, 2, 65, 64))
    fused = machine.upload(randn(1, 65, 3, 2, 64))
    turned = heads_first.transpose(0, 2, 1, 3)
    for q, k, v in [(turned, turned, fused[:, :, 1]), (fused[:, :, 0], fused[:, :, 1], fused[:, :, 2])]:
        _check_in_place(machine, cuattn.plan_attention(q, k, v, kernel=kernel), q, k, v)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_row_for_all_keys(machine, randn, kernel):
    """A stride of 0 is right, or refused where tensor maps take none."""
    q, one_row = machine.upload(randn(1, 65, 2, 64)), machine.upload(randn(1, 1, 2, 64))
    repeated = machine.xp.broadcast_to(one_row, (1, 65, 2, 64))
    plan = ROWS[kernel].plan(AttentionShape(1, 2, 2, 65, 65, 64, "float16"), machine.device)
    if any(launch.maps for launch in plan.launches):
        with pytest.raises(Unsupported, match=f"^{kernel}: k: expected strides .* got 0 bytes; copy it, or choose"):
            cuattn.plan_attention(q, repeated, q, kernel=kernel)
        return
    _check_in_place(machine, cuattn.plan_attention(q, repeated, q, kernel=kernel), q, repeated, q)


def _check_in_place(machine, p, q, k, v) -> None:
    """Runs it and compares, whatever the inputs' strides."""
    p.run()
    machine.synchronize()
    host = [machine.download(x) for x in (q, k, v, *p.outputs)]
    cuattn.compare.check_attention(*host, rounding=p.plan.rounding).raise_if_bad()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_dimension_of_one_has_no_stride(machine, randn, kernel):
    """What is stored as the stride of a dimension of one element may be anything."""
    q, k, v = (machine.upload(randn(1, n, 1, 64)) for n in (1, 33, 33))
    odd = [_as_strided(machine, x, x.shape, (3331334, 128, 99990002, 2)) for x in (q, k, v)]
    odd[0] = _as_strided(machine, q, q.shape, (3331334, 77777778, 99990002, 2))
    _check_in_place(machine, cuattn.plan_attention(*odd, kernel=kernel), q, k, v)


@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_first_layout_needs_no_copy(machine, randn, kernel):
    q, k, v = (randn(1, 2, length, 64) for length in (66, 90, 90))
    bshd = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    p = cuattn.plan_attention(*(machine.upload(x) for x in (q, k, v)), layout="bhsd", kernel=kernel)
    p.run()
    machine.synchronize()
    o, lse = (machine.download(x) for x in p.outputs)
    assert o.shape == q.shape
    cuattn.compare.check_attention(*bshd, o.transpose(0, 2, 1, 3), lse,
                                   rounding=p.plan.rounding).raise_if_bad()


@pytest.mark.parametrize("kernel", KERNELS)
def test_offsets_past_2_to_the_31(machine, kernel):
    """Rows 2³¹ elements apart: offsets are widened before they are multiplied."""
    far = 1 << 31
    if machine.name == "cpu":
        sea = machine.empty((2 * far + 64,), "float16", poison=False)
    else:
        sea = machine.xp.empty((2 * far + 64,), "float16")
    strides = (2 * far * 2, far * 2, 128, 2)
    x = _as_strided(machine, sea, (1, 3, 1, 64), strides)
    rows = np.random.default_rng(0).standard_normal((1, 3, 1, 64)).astype("float16")
    x[...] = machine.upload(rows)
    p = cuattn.plan_attention(x, x, x, kernel=kernel)
    p.run()
    machine.synchronize()
    o, lse = (machine.download(y) for y in p.outputs)
    cuattn.compare.check_attention(rows, rows, rows, o, lse, rounding=p.plan.rounding).raise_if_bad()


def _as_strided(machine, x, shape, strides):
    if machine.name == "cpu":
        return np.lib.stride_tricks.as_strided(x, shape, strides)
    from cupy.lib.stride_tricks import as_strided

    return as_strided(x, shape, strides)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_equal_bits_under_every_schedule(cpu, randn, kernel, causal):
    if not ROWS[kernel].deterministic:
        pytest.skip("its row says that the order of atomics shows in the last bits")
    q, k, v = (cpu.upload(randn(1, length, 4, 64)) for length in (150, 140, 140))
    p = cuattn.plan_attention(q, k[:, :, :2], v[:, :, :2], causal=causal, kernel=kernel)
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("d, dtype", [(64, "float16"), (128, "bfloat16"), (80, "bfloat16")])
def test_both_machines_agree(cpu, randn, kernel, d, dtype):
    """The same inputs on both: no further apart than either may be from float64."""
    q, k, v = (randn(1, n, 4, d, dtype=dtype) for n in (130, 200, 200))
    results = [run(machine, kernel, q, k, v, causal=True) for machine in (cpu, cuattn.open_machine("gpu"))]
    (p, o, lse), (_, o_gpu, lse_gpu) = results
    verdict = cuattn.compare.check_attention(q, k, v, o, lse, causal=True, rounding=p.plan.rounding)
    assert np.abs(o.astype(float) - o_gpu.astype(float)).max() <= verdict.tol
    np.testing.assert_allclose(lse, lse_gpu, atol=1e-5, rtol=2**-21)


@pytest.mark.gpu
def test_a_thousand_runs_give_equal_bits(randn):
    """Under memory pressure: most of the device is taken while the kernel runs."""
    machine = cuattn.open_machine("gpu")
    q, k, v = (machine.upload(randn(2, 300, 4, 128, dtype="bfloat16")) for _ in range(3))
    p = cuattn.plan_attention(q, k, v, causal=True)
    first = [x.view("uint8").copy() for x in p.run()]
    taken = machine.xp.empty(int(0.8 * machine.device.memory_bytes) - machine.used_bytes(), "uint8")
    for _ in range(1000):
        for x in p.outputs:
            machine.poison(x)
        p.run()
        for x, y in zip(p.outputs, first):
            assert bool((x.view("uint8") == y).all())
    del taken


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_does_not_depend_on_its_batch(machine, randn, kernel):
    """Equal bits alone and in company."""
    if not ROWS[kernel].deterministic:
        pytest.skip("its row says that the order of atomics shows in the last bits")
    q, k, v = (randn(3, 70, 2, 64) for _ in range(3))
    _, together, _ = run(machine, kernel, q, k, v)
    for i, j in product(range(3), range(2)):
        _, alone, _ = run(machine, kernel, *(x[i : i + 1, :, j : j + 1] for x in (q, k, v)))
        assert (alone[0, :, 0] == together[i, :, j]).all()
