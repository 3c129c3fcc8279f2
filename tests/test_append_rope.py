"""append_kv with RoPE on every machine: pairings, parts of heads, queries, counts, equal bits, refusals."""
from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn import reference
from cuattn.binding import repeatable
from cuattn.cpu import check_schedules
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.shapes import AppendShape

INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def make(rng, page, hkv, h, d, rotary, dtype, lengths, count):
    """Arguments of append_kv on the host: caches full of NaN, a table in a random page order, all angles."""
    b, width = len(lengths), max([1, *(-(-(n + count) // page) for n in lengths)])
    normal = {name: rng.standard_normal((b, count, heads, d)).astype(dtype)
              for name, heads in (("k", hkv), ("v", hkv), ("q", h)) if heads is not None}
    caches = {name: np.full((b * width, page, hkv, d), np.nan, dtype) for name in ("k_cache", "v_cache")}
    table = rng.permutation(b * width).astype(np.int32).reshape(b, width)
    cos, sin = reference.rotary_tables(max(lengths, default=0) + count, rotary)
    return {**normal, **caches, "block_table": table, "cache_seqlens": np.array(lengths, np.int32),
            "cos": cos, "sin": sin}


def judge(given, interleaved, k_after, v_after, q_rotated=None):
    plain = {name: x for name, x in given.items() if name not in ("q", "k_cache", "v_cache")}
    cuattn.compare.check_append(**plain, k_before=given["k_cache"], v_before=given["v_cache"],
                                k_after=k_after, v_after=v_after, interleaved=interleaved).raise_if_bad()
    if q_rotated is not None:
        angles = [given[name] for name in ("cos", "sin", "cache_seqlens")]
        cuattn.compare.check_rotated(given["q"], q_rotated, *angles, interleaved=interleaved).raise_if_bad()


def run(machine, given, interleaved=False):
    """(k_cache, v_cache, q) on the host, judged and counted."""
    p = cuattn.plan_append(**{name: machine.upload(x) for name, x in given.items()}, interleaved=interleaved)
    with machine.counting() as counted:
        outputs = p.run()
    machine.synchronize()
    outputs = [machine.download(x) for x in outputs]
    judge(given, interleaved, *outputs)
    if counted is not None:
        cost = p.cost()
        assert (counted.bytes_loaded, counted.bytes_stored) == (cost.bytes_loaded, cost.bytes_stored)
        assert counted.launches == cost.launches
    return outputs


@INTERLEAVED
@pytest.mark.parametrize("page, hkv, h, d, rotary, dtype, lengths, count", [
    (16, 2, None, 64, 64, "float16", [0, 15, 16, 30], 1), (1, 1, 1, 8, 4, "bfloat16", [0, 3], 3),
    (3, 5, 20, 128, 128, "float16", [2, 3, 4], 7), (16, 8, 32, 128, 96, "bfloat16", [1000], 1),
    (5, 3, 3, 80, 20, "float16", [7, 0], 2), (16, 1, 71, 64, 16, "bfloat16", [40], 2),
    (7, 2, 4, 256, 256, "bfloat16", [9, 1], 3), (16, 2, 0, 40, 24, "float16", [3], 2),
    (16, 0, 3, 64, 64, "float16", [3], 2), (2, 18, None, 8, 8, "float16", [3], 2),
])
def test_append(machine, rng, interleaved, page, hkv, h, d, rotary, dtype, lengths, count):
    run(machine, make(rng, page, hkv, h, d, rotary, dtype, lengths, count), interleaved)


@pytest.mark.parametrize("lengths, count", [([5, 0], 0), ([], 1)])
def test_nothing_to_append(machine, rng, lengths, count):
    k, v, q = run(machine, make(rng, 16, 2, 4, 64, 32, "float16", lengths, count))
    assert np.isnan(k).all() and np.isnan(v).all() and q.shape == (len(lengths), count, 4, 64)


@INTERLEAVED
def test_quarter_turns_are_exact(machine, rng, interleaved):
    """By 0, 90, 180 and 270 degrees elements change places and signs alone: a wrong partner shows."""
    given = make(rng, 4, 3, 2, 64, 48, "float16", [0, 3], 5)
    turns = rng.integers(0, 4, given["cos"].shape)
    given["cos"], given["sin"] = (np.array(x, np.float32)[turns] for x in ((1, 0, -1, 0), (0, 1, 0, -1)))
    k, v, q = run(machine, given, interleaved)
    first, second = reference.rotary_pairs(48, interleaved)
    for b, length in enumerate(given["cache_seqlens"]):
        for t in range(5):
            place = given["block_table"][b, (length + t) // 4], (length + t) % 4
            for got, new in ((k[place], given["k"][b, t]), (q[b, t], given["q"][b, t])):
                x, y, want = new[:, first], new[:, second], new.copy()
                turn = turns[length + t]
                want[:, first] = np.choose(turn, [x, -y, -x, y])
                want[:, second] = np.choose(turn, [y, x, -y, -x])
                np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(v[place], given["v"][b, t])


@INTERLEAVED
def test_scores_depend_on_distance_alone(machine, rng, interleaved):
    """What RoPE is for: query and key moved by as many positions have the same product."""
    products = []
    for shift in (0, 7, 100):
        given = make(np.random.default_rng(3), 16, 1, 1, 64, 64, "float16", [shift, shift + 20], 1)
        given["k"], given["q"] = (np.broadcast_to(x[:1], x.shape).copy() for x in (given["k"], given["q"]))
        k, _, q = run(machine, given, interleaved)
        key = k[given["block_table"][0, shift // 16], shift % 16, 0].astype(float)
        products.append(key @ q[1, 0, 0].astype(float))
    np.testing.assert_allclose(products, products[0], atol=2e-2)
    assert abs(products[0]) > 0.1


def test_the_two_pairings_are_one_but_for_the_order(machine, rng):
    """A row whose halves are laid out as neighbours is rotated to the same numbers."""
    given = make(rng, 16, 2, 2, 64, 64, "bfloat16", [5], 2)
    k, _, q = run(machine, given)
    order = np.arange(64).reshape(2, 32).T.reshape(-1)
    woven = {**given, "k": given["k"][..., order], "q": given["q"][..., order]}
    k_woven, _, q_woven = run(machine, woven, interleaved=True)
    assert q_woven.tobytes() == q[..., order].tobytes() and k_woven.tobytes() == k[..., order].tobytes()


def test_as_complex_numbers(rng):
    """The reference against the other way to write it: (x + iy) e^(i angle)."""
    x = rng.standard_normal((2, 3, 4, 10))
    positions = np.array([[0, 1, 2], [5, 6, 7]])
    angles = positions[..., None, None] * 10000.0 ** (-np.arange(4) / 4)
    cos, sin = reference.rotary_tables(8, 8)
    for interleaved in (False, True):
        first, second = reference.rotary_pairs(8, interleaved)
        z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
        got = reference.rotate(x, cos, sin, positions, interleaved)
        np.testing.assert_allclose(got[..., first] + 1j * got[..., second], z, atol=1e-6)
        np.testing.assert_array_equal(got[..., 8:], x[..., 8:])


@pytest.mark.parametrize("change", ["one more rounding", "another position", "tail", "element"])
def test_the_comparison_notices(rng, change):
    given = make(rng, 16, 2, 3, 64, 32, "bfloat16", [4, 9], 3)
    q, cos, sin, lengths = (given[name] for name in ("q", "cos", "sin", "cache_seqlens"))
    positions = lengths[:, None] + np.arange(3)
    got = reference.rotate(q, cos, sin, positions).astype(np.float32).astype(q.dtype)
    cuattn.compare.check_rotated(q, got, cos, sin, lengths).raise_if_bad()
    if change == "one more rounding":  # of both products
        first, second = reference.rotary_pairs(32, False)
        c, s = (x[positions][:, :, None].astype(q.dtype) for x in (cos, sin))
        got[..., first] = (q[..., first] * c) - (q[..., second] * s)
    elif change == "another position":
        got[0, 0] = got[0, 1]
    else:
        at = (1, 2, 0, 40 if change == "tail" else 3)
        got.view(np.uint16)[at] ^= 4
    assert not cuattn.compare.check_rotated(q, got, cos, sin, lengths).ok


@pytest.mark.parametrize("h", [None, 3])
def test_equal_bits_under_every_schedule(cpu, rng, h):
    given = make(rng, 4, 5, h, 40, 24, "float16", [3, 8], 6)
    p = cuattn.plan_append(**{name: cpu.upload(x) for name, x in given.items()})
    check_schedules(cpu, p.run, dict(zip(("k_cache", "v_cache", "q"), p.outputs)))


def test_nothing_outside_the_rows_is_written(machine, rng):
    """512 elements of NaN before and behind each cache, and what no new row takes in between."""
    given, margin = make(rng, 4, 2, 2, 40, 24, "float16", [3, 6], 2), 512
    on = {name: machine.upload(x) for name, x in given.items()}
    size = given["k_cache"].size
    seas = [machine.empty((size + 2 * margin,), "float16") for _ in "kv"]
    for name, sea in zip(("k_cache", "v_cache"), seas):
        on[name] = sea[margin : margin + size].reshape(given[name].shape)
    cuattn.append_kv(**on)
    machine.synchronize()
    for sea in seas:
        sea = machine.download(sea)
        assert np.isnan(sea[:margin]).all() and np.isnan(sea[-margin:]).all()
        assert np.isfinite(sea).sum() == given["k"].size


@INTERLEAVED
def test_strided_arrays(machine, rng, interleaved):
    """K and V interleaved in one pool; q, k and v parts of one projection; tables that are halves of one."""
    given = make(rng, 16, 2, 4, 64, 64, "float16", [5, 20], 3)
    on = {name: machine.upload(x) for name, x in given.items()}
    whole = machine.empty((2, 3, 8, 64), "float16")
    for name, part in (("q", whole[:, :, :4]), ("k", whole[:, :, 4:6]), ("v", whole[:, :, 6:])):
        part[...], on[name] = on[name], part
    pool = machine.empty((len(given["k_cache"]), 2, 2, 16, 64), "float16")
    pool[...] = np.nan
    on["k_cache"], on["v_cache"] = (pool[:, i].transpose(0, 2, 1, 3) for i in range(2))
    tables = machine.empty((len(given["cos"]), 66), "float32")  # rows that are not 16-byte aligned
    tables[:, 2:34], tables[:, 34:] = on["cos"], on["sin"]
    on["cos"], on["sin"] = tables[:, 2:34], tables[:, 34:]
    q = cuattn.append_kv(**on, interleaved=interleaved)
    machine.synchronize()
    judge(given, interleaved, *(machine.download(x) for x in (on["k_cache"], on["v_cache"], q)))


def test_plain_arrays_are_written_in_place(rng):
    given = make(rng, 16, 2, 4, 64, 64, "float16", [5], 2)
    before = {name: x.copy() for name, x in given.items()}
    q = cuattn.append_kv(**given)
    judge(before, False, given["k_cache"], given["v_cache"], q)
    del given["q"]
    assert cuattn.append_kv(**given) is None


def test_a_rotated_append_can_be_repeated(cpu, rng):
    given = make(rng, 16, 2, 4, 64, 64, "float16", [5], 2)
    p = cuattn.plan_append(**{name: cpu.upload(x) for name, x in given.items()})
    assert repeatable(p) and list(p.made) == ["q_rotated"]


def test_what_fusing_saves():
    """A pass of its own over K would read and write it once more."""
    shape, card = AppendShape(8, 64, 8, 128, 16, "bfloat16", rotary=128), for_arch("sm_90a")
    plain, fused = (row.cost(shape, row.plan(shape, card)) for row in (ROWS["append"], ROWS["append_rope"]))
    rows = 8 * 64 * 8 * 128 * 2
    assert fused.bytes_stored == plain.bytes_stored == 2 * rows
    assert (fused.launches, fused.flops) == (1, 3 * 8 * 64 * 8 * 128)


def test_plans():
    card = for_arch("sm_90a")
    plan = ROWS["append_rope"].plan
    for h, hkv, warps in ((0, 8, 8), (32, 8, 16), (0, 0, 1), (3, 1, 3)):
        launch, = plan(AppendShape(2, 5, hkv, 64, 16, "float16", h, 64), card).launches
        assert (launch.entry, launch.block) == ("append_rope_q" if h else "append_rope", 32 * warps)
        assert launch.grid == (5, 2, 1)
    with pytest.raises(Unsupported, match="append_rope: expected at most 65535 sequences, got 65536; split"):
        plan(AppendShape(65536, 1, 1, 64, 16, "float16", 0, 64), card)


def test_tables_whose_pairs_are_not_aligned_are_refused(cpu, rng):
    given = {name: cpu.upload(x) for name, x in make(rng, 16, 2, 4, 64, 32, "float16", [4], 3).items()}
    wide = cpu.upload(np.zeros((7, 17), "float32"))
    for sin in (wide[:, 1:], wide[:, :16], cpu.upload(np.zeros(7 * 16 + 1, "float32"))[1:].reshape(7, 16)):
        with pytest.raises(cuattn.ContractError, match="sin: expected rows aligned to 8 bytes .* of 2 e"):
            cuattn.append_kv(**{**given, "sin": sin})


@pytest.mark.parametrize("change, words", [
    (dict(sin=None), "sin: expected a table beside cos, got None; give cos and sin"),
    (dict(cos=None, sin=None), "cos: expected a table beside q, got None; give cos and sin"),
    (dict(cos=None, sin=None, q=None, interleaved=True),
     "interleaved: expected False without tables to rotate by, got True; give cos and sin"),
    (dict(interleaved=1), "interleaved: expected True or False, got int; name one"),
    (dict(kernel="append"), "cos: expected None for kernel 'append', got a table; choose another kernel"),
    (dict(cos=None, sin=None, q=None, kernel="append_rope"),
     "cos: expected a table for kernel 'append_rope', got None; choose another kernel"),
    (dict(cos=lambda x: x[0]), r"cos: expected shape \(max_position, rotary_dim / 2\), got \(16,\); reshape"),
    (dict(cos=lambda x: x.astype("float64")), "cos: expected dtype float32, got float64; convert it first"),
    (dict(sin=lambda x: x[:, :8]), r"sin.shape: expected \(12, 16\) as cos has, got \(12, 8\)"),
    (dict(cos=lambda x: x[:, :15], sin=lambda x: x[:, :15]),
     "cos: expected an even number of columns up to 32, half the elements to rotate, got 15; check its"),
    (dict(cos=lambda x: np.tile(x, 3), sin=lambda x: np.tile(x, 3)), "cos: expected .* up to 32, .*got 48"),
    (dict(cos=lambda x: x[:, :0], sin=lambda x: x[:, :0]), "cos: expected an even .* up to 32, .*got 0"),
    (dict(cos=lambda x: x[:11], sin=lambda x: x[:11]),
     r"cache_seqlens\[1\]: expected at most 8, so that cos has a row a new position, got 9; give longer"),
    (dict(q=lambda x: x[0]), r"q: expected shape \(B, T, H, D\), got \(3, 4, 64\)"),
    (dict(q=lambda x: x[:, :2]), r"q.shape without its heads: expected \(2, 3, 64\) as k has, got \(2, 2,"),
    (dict(q=lambda x: x.astype("float32")), "q.dtype: expected float16 as k has, got float32"),
])
def test_what_is_refused(rng, change, words):
    given = make(rng, 16, 2, 4, 64, 32, "float16", [4, 9], 3)
    for name, new in change.items():
        given[name] = new(given[name]) if callable(new) else new
    with pytest.raises(cuattn.ContractError, match=words) as error:
        cuattn.plan_append(**given)
    assert "\n" not in str(error.value)
