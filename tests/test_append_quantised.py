"""append_kv into a cache of e4m3 or int8, with and without RoPE, on every machine; and decode from it."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from quantised_cases import Quantised, judge, make_scales, plan, upload_options
from test_append_rope import INTERLEAVED, make

import cuattn
from cuattn import reference
from cuattn.cpu import check_schedules
from cuattn.quantise import LARGEST, numbers

TYPES = pytest.mark.parametrize("kv_dtype", ["float8_e4m3", "int8"])


def quantised(rng, kv_dtype, kind, page, hkv, h, d, rotary, dtype, lengths, count):
    """Arguments of append_kv on the host, and the scales' options; without tables where `rotary` is 0."""
    given = make(rng, page, hkv, h, d, rotary or 4, dtype, lengths, count)
    if not rotary:
        del given["cos"], given["sin"]
    shape = given["k_cache"].shape
    given["k_cache"], given["v_cache"] = (rng.integers(0, 256, shape).astype(np.uint8) for _ in "kv")
    scales = (make_scales(rng, kind, shape[0], hkv, 3.0, 3 / LARGEST[kv_dtype]) for _ in "kv")
    return given, {"kv_dtype": kv_dtype, **dict(zip(("k_scale", "v_scale"), scales))}


def on(machine, arguments: dict) -> dict:
    return {name: machine.upload(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


def check(given, options, interleaved, k_after, v_after) -> None:
    plain = {name: x for name, x in given.items() if name not in ("q", "k_cache", "v_cache")}
    cuattn.compare.check_append(**plain, **options, k_before=given["k_cache"], v_before=given["v_cache"],
                                k_after=k_after, v_after=v_after, interleaved=interleaved).raise_if_bad()


def run(machine, given, options, interleaved=False):
    """(k_cache, v_cache, …) on the host, judged and counted."""
    p = cuattn.plan_append(**on(machine, given), **on(machine, options), interleaved=interleaved)
    with machine.counting() as counted:
        outputs = p.run()
    machine.synchronize()
    outputs = [machine.download(x) for x in outputs]
    check(given, options, interleaved, *outputs[:2])
    if counted is not None:
        cost = p.cost()
        assert (counted.bytes_loaded, counted.bytes_stored) == (cost.bytes_loaded, cost.bytes_stored)
    return outputs


@pytest.mark.parametrize("kv_dtype, kind, page, hkv, h, d, rotary, dtype, lengths, count", [
    ("float8_e4m3", "one", 16, 2, None, 64, 0, "bfloat16", [0, 15, 16, 30], 1),
    ("float8_e4m3", "pages", 3, 5, None, 128, 0, "float16", [2, 3, 4], 7),
    ("int8", "heads", 1, 3, None, 16, 0, "float16", [0, 3], 3),
    ("int8", "pages", 16, 8, None, 256, 0, "bfloat16", [1000], 1),
    ("float8_e4m3", "heads", 16, 2, 4, 64, 48, "bfloat16", [4, 9], 3),
    ("float8_e4m3", "pages", 5, 3, 3, 128, 128, "float16", [7, 0], 2),
    ("int8", "one", 16, 8, None, 64, 64, "float16", [40], 2), ("int8", "pages", 4, 1, 2, 96, 20, "bfloat16", [3], 5),
])
def test_append(machine, rng, kv_dtype, kind, page, hkv, h, d, rotary, dtype, lengths, count):
    given, options = quantised(rng, kv_dtype, kind, page, hkv, h, d, rotary, dtype, lengths, count)
    for interleaved in (False, True) if rotary else (False,):
        outputs = run(machine, given, options, interleaved)
        if h:
            cuattn.compare.check_rotated(given["q"], outputs[2], given["cos"], given["sin"],
                                         given["cache_seqlens"], interleaved=interleaved).raise_if_bad()


@TYPES
def test_what_is_too_large_is_the_largest(machine, rng, kv_dtype):
    """±448, or −128 and 127; infinities too, and NaN is NaN or 0."""
    given, _ = quantised(rng, kv_dtype, "one", 16, 1, None, 16, 0, "float16", [0], 1)
    given["k"][0, 0, 0] = [448, 449, 464, 465, 480, 65504, np.inf, -449, -480, -np.inf, 127.5, 128.5, -128.5, -129,
                           np.nan, -0.0]
    k, v = run(machine, given, {"kv_dtype": kv_dtype})
    got = numbers(k[given["block_table"][0, 0], 0, 0], kv_dtype)
    high, low = (448, -448) if kv_dtype == "float8_e4m3" else (127, -128)
    assert (got[:7] == high).all() and (got[7:10] == low).all()
    assert np.isnan(got[14]) if kv_dtype == "float8_e4m3" else got[14] == 0


@pytest.mark.parametrize("rotary", [0, 32])
def test_each_place_has_its_own_scale(rng, rotary):
    """The comparison notices a row that was divided by its neighbour's, by K's for V, or rounded twice."""
    given, options = quantised(rng, "float8_e4m3", "pages", 4, 2, None, 32, rotary, "bfloat16", [2, 9], 3)
    places = {name: x for name, x in given.items() if name not in ("cos", "sin")}
    k, v = reference.append_kv(**places, **options)
    if rotary:
        positions = given["cache_seqlens"][:, None] + np.arange(3)
        turned = reference.rotate(given["k"], given["cos"], given["sin"], positions).astype(np.float32)
        k, _ = reference.append_kv(**{**places, "k": turned}, **options)
        twice, _ = reference.append_kv(**{**places, "k": turned.astype(given["k"].dtype)}, **options)
        with pytest.raises(cuattn.compare.Mismatch, match="rotated: the number stored at"):
            check(given, options, False, twice, v)
    check(given, options, False, k, v)
    for name, wrong in (("k_scale", options["k_scale"][::-1]), ("v_scale", options["k_scale"])):
        with pytest.raises(cuattn.compare.Mismatch):
            check(given, {**options, name: wrong}, False, k, v)


@INTERLEAVED
@TYPES
def test_decode_reads_what_append_wrote(machine, rng, kv_dtype, interleaved):
    """Token after token, rotated, then attended to: as over the numbers that the reference stored."""
    given, options = quantised(rng, kv_dtype, "heads", 16, 2, 4, 64, 64, "bfloat16", [0, 3], 20)
    here, scales = on(machine, given), on(machine, options)
    cuattn.append_kv(**here, **scales, interleaved=interleaved)
    lengths = given["cache_seqlens"] + 20
    machine.synchronize()
    k, v = (machine.download(here[name]) for name in ("k_cache", "v_cache"))
    cache = Quantised(k, v, given["block_table"], lengths.astype(np.int32), kv_dtype, options["k_scale"],
                      options["v_scale"])
    q = given["q"][:, -1:]
    p = plan(machine, q, cache)
    p.run()
    machine.synchronize()
    judge(q, cache, *(machine.download(x) for x in p.outputs))
    assert upload_options(machine, cache).keys() == options.keys()


@TYPES
def test_plain_arrays_of_the_type_itself(rng, kv_dtype):
    given, options = quantised(rng, kv_dtype, "one", 16, 2, None, 64, 0, "float16", [5], 2)
    before = {name: x.copy() for name, x in given.items()}
    kind = ml_dtypes.float8_e4m3fn if kv_dtype == "float8_e4m3" else np.int8
    caches = {name: given[name].view(kind) for name in ("k_cache", "v_cache")}
    scales = {name: x for name, x in options.items() if name != "kv_dtype"}
    cuattn.append_kv(**{**given, **caches}, **scales)
    check(before, options, False, given["k_cache"], given["v_cache"])


@pytest.mark.parametrize("rotary", [0, 24])
def test_equal_bits_under_every_schedule(cpu, rng, rotary):
    given, options = quantised(rng, "float8_e4m3", "pages", 4, 5, None, 32, rotary, "float16", [3, 8], 6)
    p = cuattn.plan_append(**on(cpu, given), **on(cpu, options))
    check_schedules(cpu, p.run, dict(zip(("k_cache", "v_cache"), p.outputs)))


@pytest.mark.parametrize("change, words", [
    (dict(kv_dtype=None), "k_cache.dtype: expected float16 as k has, or float8_e4m3fn or int8, got uint8; give kv"),
    (dict(k_scale=-1.0), "k_scale: expected a number from .*got -1.0; give the cache's"),
    (dict(k_scale=np.ones(3, np.float32), v_scale=np.ones(3, np.float32)),
     r"k_scale: expected shape \(2,\) or \(2, 2\), of k_cache's heads or pages and heads, got \(3,\); reshape"),
])
def test_what_is_refused(rng, change, words):
    given, options = quantised(rng, "int8", "one", 16, 2, None, 64, 0, "float16", [5], 2)
    given = {name: np.resize(x, (2, *x.shape[1:])) if "cache" in name and x.ndim == 4 else x for name, x in given.items()}
    with pytest.raises(cuattn.ContractError, match=words):
        cuattn.plan_append(**given, **{**options, **change})
