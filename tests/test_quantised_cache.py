"""Decode over a cache of e4m3 or int8, on every machine: as right as over the numbers that it stands for."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from quantised_cases import NO_NUMBER, Quantised, judge, make_quantised, plan, run, upload_options
from test_decode import make_cache

import cuattn
from cuattn import reference
from cuattn.cpu import check_schedules
from cuattn.devices import lookup
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.shapes import DecodeShape

TYPES = pytest.mark.parametrize("kv_dtype", ["float8_e4m3", "int8"])
EACH = pytest.mark.parametrize("kv_dtype, kind", [("int8", "one"), ("float8_e4m3", "heads"), ("float8_e4m3", "pages")])
SMALL = {"keys": 16, "warps": 1, "stages": 2}  # rounds of 16 keys, so that short sequences are cut often


@pytest.mark.parametrize("kv_dtype, kind, page, group, hkv, d, dtype", [
    ("float8_e4m3", "one", 1, 1, 2, 64, "float16"), ("float8_e4m3", "heads", 64, 8, 2, 64, "bfloat16"),
    ("float8_e4m3", "pages", 16, 4, 2, 128, "bfloat16"), ("float8_e4m3", "pages", 5, 20, 1, 256, "bfloat16"),
    ("int8", "one", 16, 3, 2, 128, "float16"), ("int8", "heads", 1, 16, 1, 32, "bfloat16"),
    ("int8", "pages", 64, 5, 2, 96, "bfloat16"), ("int8", "one", 16, 4, 1, 256, "float16"),
])
def test_shapes(machine, rng, randn, kv_dtype, kind, page, group, hkv, d, dtype):
    """Lengths of 0 and 1, on and one beside every page and tile boundary; what is not used is no number."""
    edges = sorted({max(0, at + off) for at in (0, page, 16, 32, 130) for off in (-1, 0, 1)})
    cache = make_quantised(rng, edges, page, hkv, d, kv_dtype, kind)
    assert (cache.k == NO_NUMBER).any() and (kind != "pages" or np.isnan(cache.k_scale).any())
    run(machine, randn(len(edges), 1, hkv * group, d, dtype=dtype), cache)


@EACH
def test_every_number_of_groups(machine, rng, randn, kv_dtype, kind):
    """Shares that begin and end anywhere; each stretch takes Q, and each warp its own largest scale, anew."""
    cache, q = make_quantised(rng, [150, 5, 0, 100], 16, 2, 64, kv_dtype, kind), randn(4, 1, 8, 64)
    for groups in (1, 2, 3, 9, 30):
        run(machine, q, cache, constants={**SMALL, "groups": groups})


@EACH
@pytest.mark.parametrize("m, options", [
    (3, {}), (1, {"window_size": (25, 0), "sinks": np.array([-3, 0, 2, 5], "float32")}),
    (3, {"window_size": (25, 0), "softcap": 20.0, "sinks": np.array([-3, 0, 2, 5], "float32")})], ids=str)
def test_several_queries_windows_caps_and_sinks(machine, rng, randn, kv_dtype, kind, m, options):
    """Scores have their scale before they are capped, and beside a sink."""
    cache = make_quantised(rng, [0, 1, 2, 3, 17, 40, 200], 16, 1, 64, kv_dtype, kind)
    run(machine, randn(7, m, 4, 64, dtype="bfloat16"), cache, constants={**SMALL, "groups": 5}, **options)


@pytest.mark.parametrize("constants", [{"warps": 3, "stages": 4}, {"keys": 16, "warps": 2, "stages": 3}], ids=str)
def test_tunables(machine, rng, randn, constants):
    cache = make_quantised(rng, [333, 40], 16, 1, 128, "float8_e4m3", "pages")
    run(machine, randn(2, 1, 7, 128, dtype="bfloat16"), cache, constants={**constants, "groups": 3})


@pytest.mark.parametrize("group", [4, 12])
def test_queries_of_every_size(machine, rng, group):
    """bfloat16 reaches far beyond float16, which Q becomes; heads of a tile, and numbers of a head, may differ."""
    cache = make_quantised(rng, [100, 7], 16, 1, 64, "float8_e4m3")
    q = rng.standard_normal((2, 1, group, 64)) * 10.0 ** rng.uniform(-30, 2, (2, 1, group, 64))
    heads = 10.0 ** np.linspace(-12, 0, group)[:, None]
    for scale in (1e-20, 1e20):
        q_now = (q * heads * scale).astype("bfloat16")
        run(machine, q_now, cache, softmax_scale=0.1 / scale)
    run(machine, np.zeros_like(q_now), cache)


@TYPES
def test_small_weights_are_not_flushed(machine, rng, kv_dtype):
    """8192 keys of e⁻¹⁸ each, less than half of what float16 keeps beside a weight of 1, are most of this O."""
    n, page, d = 8192, 64, 32
    codes = np.zeros((n // page + 1, page, 1, d), np.uint8)
    k, v = codes.copy(), codes.copy()
    one = np.array(1, ml_dtypes.float8_e4m3fn).view(np.uint8) if kv_dtype == "float8_e4m3" else np.uint8(1)
    v[...] = one
    table = rng.permutation(len(k)).astype(np.int32)[None, : n // page]
    k[table[0, 100], 5, 0, 0], v[table[0, 100], 5] = one, 0  # the needle, whose value is 0
    cache = Quantised(k, v, table, np.array([n], np.int32), kv_dtype, 1.0, 1.0)
    q = np.zeros((1, 1, 4, d), np.float16)
    q[..., 0] = 18
    p, o, lse = run(machine, q, cache, softmax_scale=1.0)
    want = (n - 1) * np.exp(-18.0) / (1 + (n - 1) * np.exp(-18.0))
    np.testing.assert_allclose(o.astype(float), want, rtol=2e-3)


@TYPES
@pytest.mark.parametrize("depth", (0, 4, 9))
def test_needle(machine, rng, kv_dtype, depth):
    """One key with a large logit among flat ones."""
    n = 2000 if machine.name == "cpu" else 131072
    cache = make_quantised(rng, [n], 16, 1, 64, kv_dtype, "pages")
    page, slot = cache.table[0, depth * n // 10 // 16], depth * n // 10 % 16
    q = np.zeros((1, 1, 4, 64), "float16")
    q[..., 0] = 40 / cache.k_scale[page, 0]
    cache.k[..., 0] = 0
    cache.k[page, slot, 0, 0] = 0x38 if kv_dtype == "float8_e4m3" else 1
    _, o, _ = run(machine, q, cache, softmax_scale=1.0)
    want = reference.dequantised(cache.v, cache.table[0], n, kv_dtype, cache.v_scale)[depth * n // 10, 0]
    np.testing.assert_allclose(o[0, 0, 0].astype(float), want, rtol=2**-8, atol=1e-6)


@TYPES
@pytest.mark.parametrize("order", ["as drawn", "rising", "falling"])
def test_scales_of_pages_that_differ_much(machine, rng, randn, kv_dtype, order):
    """By 24 octaves; the largest of V at either end, so that what was summed before must become smaller."""
    cache = make_quantised(rng, [200, 90], 16, 2, 64, kv_dtype, "pages", octaves=24)
    if order != "as drawn":
        for b, pages in enumerate((13, 6)):
            mine = cache.table[b, :pages]
            cache.v_scale[mine] = np.sort(cache.v_scale[mine], axis=0)[:: 1 if order == "rising" else -1]
    run(machine, randn(2, 1, 8, 64), cache)
    run(machine, randn(2, 1, 8, 64), cache, constants={**SMALL, "groups": 3})


@TYPES
def test_a_page_of_large_values_and_no_weight(machine, rng, kv_dtype):
    """Its scale must not cost the others what they are worth: their error is their own."""
    cache = make_quantised(rng, [64], 16, 1, 64, kv_dtype, "pages", octaves=0)
    large = cache.table[0, 1]
    cache.v_scale[large] *= 2**20
    cache.k[..., 0] = 0
    cache.k[large, :, :, 0] = 0xB8 if kv_dtype == "float8_e4m3" else 0xFF  # −1
    q = np.zeros((1, 1, 4, 64), "float16")
    q[..., 0] = 100 / cache.k_scale[large, 0]
    _, o, _ = run(machine, q, cache, softmax_scale=1.0)
    want, _ = reference.decode(q, cache.k, cache.v, cache.table, cache.lengths, 1.0, **cache.options)
    assert np.abs(o - want).max() < 2**-10 * np.abs(want).max()


@TYPES
def test_a_mean_is_exact(machine, rng, kv_dtype):
    """q = 0 and V of small integers: the sum is exact, so O is the mean rounded once."""
    cache = make_quantised(rng, [1, 300, 77, 0], 16, 2, 64, kv_dtype)
    cache.k_scale = cache.v_scale = 1.0
    integers = rng.integers(-8, 9, cache.v.shape)
    codes = integers.astype(ml_dtypes.float8_e4m3fn if kv_dtype == "float8_e4m3" else np.int8).view(np.uint8)
    cache.v = np.where(cache.v == NO_NUMBER, cache.v, codes)
    _, o, lse = run(machine, np.zeros((4, 1, 8, 64), "float16"), cache)
    for b, n in enumerate(cache.lengths):
        rows = reference.dequantised(cache.v, cache.table[b], int(n), kv_dtype)
        want = rows.mean(axis=0).astype(np.float16) if n else np.zeros((2, 64), np.float16)
        assert (o[b, 0].reshape(2, 4, 64) == want[:, None]).all()
        np.testing.assert_allclose(lse[b], np.log(n) if n else -np.inf, rtol=1e-6, atol=1e-6)


@TYPES
@pytest.mark.parametrize("d", [64, 256])
def test_one_key_of_a_page_is_rounded_once(machine, rng, randn, kv_dtype, d):
    """Each query sees its own key, of weight 1: with float16 queries O is that row of V to the nearest float16."""
    lengths, m = [3, 40, 64, 200], 3
    cache = make_quantised(rng, lengths, 1, 2, d, kv_dtype, "pages")
    _, o, _ = run(machine, randn(len(lengths), m, 8, d, dtype="float16"), cache, window_size=(0, 0))
    for b, n in enumerate(lengths):
        rows = reference.dequantised(cache.v, cache.table[b], n, kv_dtype, cache.v_scale)[-m:]
        off = np.abs(o[b].reshape(m, 2, 4, d) - rows[:, :, None])
        assert (off <= np.spacing(np.abs(rows).astype("float16"))[:, :, None] * (0.5 + 2**-10)).all()


@EACH
def test_equal_bits_under_every_schedule(cpu, rng, randn, kv_dtype, kind):
    cache = make_quantised(rng, [130, 300, 0, 9], 16, 1, 64, kv_dtype, kind)
    p = plan(cpu, randn(4, 1, 4, 64), cache, constants={**SMALL, "groups": 3})
    parts = {name: p.tensors[name].array for name in ("part", "part_lse")}
    check_schedules(cpu, p.run, {**dict(zip(("o", "lse"), p.outputs)), **parts})


@TYPES
def test_arrays_of_the_type_itself(rng, randn, kv_dtype):
    """As ml_dtypes and NumPy have them, and as bytes: equal bits, and "auto" finds the kernel."""
    cache, q = make_quantised(rng, [40, 3], 16, 2, 64, kv_dtype, "heads"), randn(2, 1, 8, 64)
    kind = ml_dtypes.float8_e4m3fn if kv_dtype == "float8_e4m3" else np.int8
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    o, lse = cuattn.decode(q, cache.k.view(kind), cache.v.view(kind), cache.table, cache.lengths, **scales,
                           return_lse=True)
    judge(q, cache, o, lse)
    again = cuattn.decode(q, cache.k, cache.v, cache.table, cache.lengths, kv_dtype=kv_dtype, **scales)
    assert o.tobytes() == again.tobytes()


def test_a_planned_call_follows_lengths_and_scales(machine, rng, randn):
    cache, q = make_quantised(rng, [100, 60], 16, 2, 64, "float8_e4m3", "pages"), randn(2, 1, 8, 64)
    options = upload_options(machine, cache)
    lengths = machine.upload(cache.lengths)
    p = cuattn.plan_decode(*(machine.upload(x) for x in (q, cache.k, cache.v, cache.table)), lengths, **options)
    for now, factor in (([7, 60], 1), ([99, 0], 2)):
        lengths[...] = machine.upload(np.array(now, np.int32))
        cache.lengths, cache.v_scale = np.array(now, np.int32), cache.v_scale * factor
        options["v_scale"][...] = machine.upload(cache.v_scale)
        p.run()
        machine.synchronize()
        judge(q, cache, *(machine.download(x) for x in p.outputs))


@pytest.mark.gpu
def test_pytorch_has_both_types(rng, randn):
    """float8_e4m3fn and int8 tensors, a number and an array of scales; the second call repeats the first."""
    torch = pytest.importorskip("torch")
    for kv_dtype, kind in (("float8_e4m3", "pages"), ("int8", "one")):
        cache, q = make_quantised(rng, [100, 60], 16, 2, 64, kv_dtype, kind), randn(2, 1, 4, 64)
        on = [torch.from_numpy(x).cuda() for x in (q, cache.k, cache.v, cache.table, cache.lengths)]
        on[1:3] = (x.view(getattr(torch, {"int8": "int8"}.get(kv_dtype, "float8_e4m3fn"))) for x in on[1:3])
        scales = {name: torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x
                  for name, x in cache.options.items() if name != "kv_dtype"}
        for _ in range(2):
            o, lse = cuattn.decode(*on, **scales, return_lse=True)
            judge(q, cache, o.cpu().numpy(), lse.cpu().numpy())


def given(rng, kv_dtype="int8", kind="pages"):
    cache = make_quantised(rng, [20, 3], 16, 2, 64, kv_dtype, kind)
    return dict(q=rng.standard_normal((2, 1, 4, 64)).astype(np.float16), k_cache=cache.k, v_cache=cache.v,
                block_table=cache.table, cache_seqlens=cache.lengths, **cache.options)


@pytest.mark.parametrize("change, words", [
    (dict(kv_dtype=None), "k_cache.dtype: expected float16 as q has, or float8_e4m3fn or int8, got uint8; give kv"),
    (dict(kv_dtype="fp8"), "kv_dtype: expected None or 'float8_e4m3' or 'int8', got 'fp8'; choose one"),
    (dict(kv_dtype="int8", k_cache=lambda x: x.view(ml_dtypes.float8_e4m3fn)),
     "k_cache.dtype: expected uint8, the bytes of int8, got float8_e4m3fn; view it as uint8"),
    (dict(kv_dtype=None, k_cache=lambda x: x.view(ml_dtypes.float8_e4m3)), "k_cache.dtype: .*got float8_e4m3; "),
    (dict(v_cache=lambda x: x.view(np.int8)), "v_cache.dtype: expected uint8 as k_cache has, got int8; make them"),
    (dict(k_scale=0.0, v_scale=None), r"k_scale: expected a number from 7.9e-31 to 1.3e\+30, or an array .*got 0.0; give"),
    (dict(k_scale="1", v_scale=None), "k_scale: expected a number .*got str; give"),
    (dict(k_scale=1.0), "k_scale: expected an array as v_scale is, got 1.0; give both as arrays"),
    (dict(v_scale=None), "v_scale: expected an array as k_scale is, got None; give both"),
    (dict(k_scale=lambda x: x[:, :1]), r"k_scale: expected shape \(2,\) or \(5, 2\), .*got \(5, 1\); reshape"),
    (dict(k_scale=lambda x: x[0]), r"v_scale.shape: expected \(2,\) as k_scale has, got \(5, 2\); make them"),
    (dict(v_scale=lambda x: x.astype("float64")), "v_scale: expected dtype float32, got float64; convert it"),
    (dict(k_cache=lambda x: x[..., :48].copy(), v_cache=lambda x: x[..., :48].copy(), q=lambda x: x[..., :48]),
     "paged_stream: expected a head dim that is a multiple of 32 for a int8 cache, got 48; pad q, k and v"),
    (dict(q=lambda x: x.astype("float32")), "q: expected dtype float16 or bfloat16, got float32; convert it"),
    (dict(kv_dtype=None, k_cache=lambda x: x.astype("float16"), v_cache=lambda x: x.astype("float16")),
     "k_scale: expected None for a cache of float16, got a scale; leave it out"),
])
def test_what_is_refused(rng, change, words):
    arguments = given(rng)
    for name, new in change.items():
        arguments[name] = new(arguments[name]) if callable(new) else new
    with pytest.raises((cuattn.ContractError, Unsupported), match=words) as error:
        cuattn.plan_decode(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kernel", [name for name, row in ROWS.items()
                                    if row.family == "decode" and "quantised" not in row.features])
def test_kernels_without_it_say_who_has_it(rng, kernel):
    with pytest.raises(cuattn.ContractError, match="kernel: expected one that offers a quantised cache "
                                                   rf"\(paged_stream\), got '{kernel}'; choose one, or 'auto'"):
        cuattn.plan_decode(**given(rng), kernel=kernel)


def test_auto_takes_the_same_kernels_as_before_for_other_caches(cpu, rng, randn):
    cache = make_cache(rng, [20], 16, 2, 64)
    arrays = [cpu.upload(x) for x in (randn(1, 1, 4, 64), cache.k, cache.v, cache.table, cache.lengths)]
    assert cuattn.plan_decode(*arrays).row.name == "paged"
    assert cuattn.plan_decode(**{name: cpu.upload(x) if isinstance(x, np.ndarray) else x
                                 for name, x in given(rng).items()}).row.name == "paged_stream"


def test_bytes_are_half():
    card = lookup("H200")
    costs = {}
    for kv_dtype in (None, "float8_e4m3", "int8"):
        shape = DecodeShape(64, 32, 8, 128, 16, 256, "bfloat16", kv_dtype)
        costs[kv_dtype] = ROWS["paged_stream"].cost(shape, ROWS["paged_stream"].plan(shape, card), [4096] * 64)
    assert costs["int8"].bytes_loaded == costs["float8_e4m3"].bytes_loaded
    assert costs["int8"].bytes_loaded / costs[None].bytes_loaded == pytest.approx(0.5, abs=0.02)
