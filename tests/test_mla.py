"""decode_mla, by both of its kernels: pages, heads, shares of every number of groups, counts, equal bits.

And what is refused.
"""
from __future__ import annotations

import numpy as np
import pytest
from counted import run_counted
from test_decode import Cache, make_cache

import cuattn
from cuattn import contract
from cuattn.binding import repeatable
from cuattn.cpu import check_schedules
from cuattn.devices import for_arch, lookup
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.mla import LATENT, MOST_PARTS, WIDTH
from cuattn.kernels.mla_hopper import even_groups
from cuattn.kernels.shapes import DecodeShape
from cuattn.kernels.shares import stretches

SCALE = 192**-0.5
# Short tiles, so that short sequences are cut often.
SMALL = {"mla": {"rows": 16, "keys": 16, "stages": 2},
         "mla_hopper": {"rows": 16, "keys": 32, "stages": 4, "share": 32, "bulk": 8}}
both = pytest.mark.parametrize("kernel", SMALL)


def latents(rng, lengths, page=16, dtype="float16", order="random") -> Cache:
    return make_cache(rng, lengths, page, 1, WIDTH, dtype, order)


def arrays(machine, q, cache):
    return [machine.upload(x) for x in (q, cache.k, cache.table, cache.lengths)]


def small(kernel: str, **constants) -> dict:
    """Options of a call: a kernel with short tiles."""
    return {"kernel": kernel, "constants": {**SMALL[kernel], **constants}}


def run(machine, q, cache, scale=SCALE, **options):
    """Results judged and counted; returns (planned, o, lse) with the arrays on the host."""
    p = cuattn.plan_decode_mla(*arrays(machine, q, cache), softmax_scale=scale, **options)
    o, lse = run_counted(machine, p)
    cuattn.compare.check_decode_mla(q, cache.k, cache.table, cache.lengths, o, lse,
                                    softmax_scale=scale).raise_if_bad()
    return p, o, lse


# --- shapes


@pytest.mark.parametrize("page, h", [(1, 16), (3, 20), (16, 1), (64, 128), (96, 33)])
def test_pages_and_heads(machine, rng, randn, page, h):
    """Lengths on and one beside every page and tile boundary, and lengths of 0, in a random page order."""
    edges = sorted({max(0, at + off) for at in (0, page, 16, 64) for off in (-1, 0, 1)})
    run(machine, randn(len(edges), 1, h, WIDTH), latents(rng, edges, page))


@pytest.mark.parametrize(("rows", "keys", "stages"), [
    (rows, keys, 2 + (rows + keys) // 16 % 2) for rows in (16, 32, 64) for keys in (16, 32, 64)])
def test_every_tile(machine, rng, randn, rows, keys, stages):
    """S in as many pieces as there are warps, in fewer, and of two tiles of keys; 80 heads leave a block few."""
    chosen = {"rows": rows, "keys": keys, "stages": stages, "groups": 3}
    cache, q = latents(rng, [150, 61, 0], dtype="bfloat16"), randn(3, 1, 80, WIDTH, dtype="bfloat16")
    try:
        run(machine, q, cache, constants=chosen)
    except Unsupported as error:
        assert "do not fit" in str(error) and keys == 64 and (rows, stages) != (16, 2)


@pytest.mark.parametrize("page, h, dtype, chosen, box", [
    (1, 80, "bfloat16", {"rows": 64, "keys": 64, "stages": 2}, 0),
    (3, 20, "float16", {"rows": 32, "keys": 32, "stages": 5}, 0),
    (8, 20, "bfloat16", {"rows": 32, "keys": 32, "stages": 5}, 8),
    (64, 16, "bfloat16", {"rows": 16, "keys": 64, "stages": 2}, 64),
    (96, 33, "float16", {"rows": 64, "keys": 64, "stages": 2}, 32),
])
def test_every_tile_on_hopper(machine, rng, randn, page, h, dtype, chosen, box):
    """Teams of two warps and of one, boxes of pages, of parts of them and of tiles; rings that go round and that do
    not, rows of Q that products find elsewhere."""
    edges = sorted({max(0, at + off) for at in (0, page, 32, 64, 200) for off in (-1, 0, 1)})
    p, *_ = run(machine, randn(len(edges), 1, h, WIDTH, dtype=dtype), latents(rng, edges, page, dtype),
                kernel="mla_hopper", constants={**chosen, "share": chosen["keys"], "groups": 5, "bulk": 8})
    assert p.plan.launches[0].constants["BOX"] == box


@both
@pytest.mark.parametrize("order", ["sorted", "reverse"])
def test_page_order(machine, rng, randn, order, kernel):
    run(machine, randn(2, 1, 16, WIDTH), latents(rng, [100, 257], order=order), **small(kernel))


@pytest.mark.parametrize("page, lengths", [(1, [1, 3]), (128, [32, 64, 48])])
def test_unused_slots_hold_nan(machine, rng, randn, page, lengths):
    cache = latents(rng, lengths, page)
    assert np.isnan(cache.k).any()
    run(machine, randn(len(lengths), 1, 16, WIDTH), cache)


@pytest.mark.parametrize("bulk", [8, 128])
def test_unused_slots_hold_nan_on_hopper(machine, rng, randn, bulk):
    run(machine, randn(3, 1, 16, WIDTH), latents(rng, [1, 35, 66]), **small("mla_hopper", bulk=bulk))


def test_a_pool_without_pages_on_hopper(machine, rng, randn):
    """No copy may name it."""
    cache = latents(rng, [0, 0])
    cache.k = cache.k[:0]
    run(machine, randn(2, 1, 16, WIDTH), cache, **small("mla_hopper"))


def strided(machine, cache, step):
    """A pool of a model's layers side by side, seen backwards with a step of -1."""
    pool = machine.empty((len(cache.k), 16, 3, WIDTH + 8), "float16")[::step]
    kv = pool[:, :, 1:2, :WIDTH]
    kv[...] = machine.upload(cache.k)
    return kv


def test_the_copy_engine_takes_no_pool_backwards(cpu, rng, randn):
    cache, options = latents(rng, [50]), small("mla_hopper")
    q, _, table, lengths = arrays(cpu, randn(1, 1, 16, WIDTH), cache)
    with pytest.raises(Unsupported, match="mla_hopper: kv_cache: expected strides of positive .* another kernel"):
        cuattn.plan_decode_mla(q, strided(cpu, cache, -1), table, lengths, softmax_scale=SCALE, **options)


@pytest.mark.parametrize("step, options", [
    (-1, small("mla")), (-1, small("mla_hopper", bulk=128)), (1, small("mla_hopper")),
], ids=str)
def test_strided_pool_and_queries(machine, rng, randn, step, options):
    """Queries with gaps between heads too."""
    cache, q = latents(rng, [50, 33]), randn(2, 1, 16, WIDTH)
    kv = strided(machine, cache, step)
    wide = machine.empty((2, 1, 16, WIDTH + 64), "float16")[..., :WIDTH]
    out = machine.empty((2, 1, 16, LATENT + 8), "float16")[..., :LATENT]
    wide[...] = machine.upload(q)
    for groups in (1, 4):
        constants = {**options["constants"], "groups": groups}
        p = cuattn.plan_decode_mla(wide, kv, machine.upload(cache.table), machine.upload(cache.lengths),
                                   softmax_scale=SCALE, out=out, kernel=options["kernel"], constants=constants)
        o, lse = run_counted(machine, p)
        cuattn.compare.check_decode_mla(q, cache.k, cache.table, cache.lengths, o, lse,
                                        softmax_scale=SCALE).raise_if_bad()


@both
@pytest.mark.parametrize("groups", [1, 4])
def test_nothing_outside_the_output_is_written(machine, rng, randn, groups, kernel):
    cache, q = latents(rng, [100, 7]), randn(2, 1, 20, WIDTH)
    margin, size = 512, 2 * 20 * LATENT
    sea = machine.empty((size + 2 * margin,), "float16")
    out = sea[margin : margin + size].reshape(2, 1, 20, LATENT)
    cuattn.plan_decode_mla(*arrays(machine, q, cache), softmax_scale=SCALE, out=out,
                           **small(kernel, groups=groups)).run()
    machine.synchronize()
    sea = machine.download(sea)
    assert np.isnan(sea[:margin]).all() and np.isnan(sea[-margin:]).all()
    assert np.isfinite(sea[margin:-margin]).all()


@both
def test_empty(machine, rng, kernel):
    options = small(kernel)
    _, o, lse = run(machine, np.ones((0, 1, 16, WIDTH), "float16"), latents(rng, []), **options)
    assert o.shape == (0, 1, 16, LATENT) and lse.shape == (0, 16, 1)
    _, o, lse = run(machine, np.ones((2, 1, 16, WIDTH), "float16"), latents(rng, [0, 0]), **options)
    assert (o == 0).all() and np.isneginf(lse).all()
    _, o, lse = run(machine, np.ones((2, 1, 0, WIDTH), "float16"), latents(rng, [3, 5]), **options)
    assert o.shape == (2, 1, 0, LATENT) and lse.shape == (2, 0, 1)
    cache = latents(rng, [0])
    cache.table = cache.table[:, :0]
    _, o, lse = run(machine, np.ones((1, 1, 16, WIDTH), "float16"), cache, **options)
    assert (o == 0).all() and np.isneginf(lse).all()


# --- numbers


@both
def test_uniform_probe(machine, rng, kernel):
    """The values are the first 512 elements of the rows whose keys weigh nothing."""
    lengths = [1, 300, 77, 0]
    probe = cuattn.compare.uniform_probe(4, 20, 1, 1, 300, LATENT, lengths=lengths)
    cache = latents(rng, lengths)
    for b, n in enumerate(lengths):
        for position in range(n):
            cache.k[cache.table[b, position // 16], position % 16, :, :LATENT] = probe.v[b, position]
    _, o, lse = run(machine, np.zeros((4, 1, 20, WIDTH), "float16"), cache, **small(kernel))
    cuattn.compare.check_probe(o, lse, probe).raise_if_bad()


@both
def test_rotated_elements_are_of_the_key_alone(machine, rng, kernel):
    """One key stands out by its last 64 elements; o is its latent."""
    cache, q = latents(rng, [130, 90]), np.zeros((2, 1, 16, WIDTH), "float16")
    cache.k[..., LATENT:] *= 0
    page, slot = cache.table[0, 4], 3
    q[..., -1], cache.k[page, slot, 0, -1] = 40, 40
    _, o, _ = run(machine, q, cache, **small(kernel))
    np.testing.assert_allclose(o[0, 0].astype(float), np.tile(cache.k[page, slot, 0, :LATENT], (16, 1)), atol=1e-2)


@both
def test_very_negative_logits(machine, rng, kernel):
    cache = latents(rng, [64])
    used = cache.table[0, :4]
    cache.k[used] = 1
    cache.k[used, :, :, 520], cache.k[used[2], 5, 0, 520], cache.k[used[2], 5, :, :LATENT] = 240, 220, 3
    q = np.zeros((1, 1, 16, WIDTH), "float16")
    q[..., 520] = -220
    _, o, _ = run(machine, q, cache, 1.0, **small(kernel))
    assert (o == 3).all()


# --- shares


@both
def test_every_number_of_groups(machine, rng, randn, kernel):
    """Shares that begin and end anywhere, more groups than tiles, sequences cut twice, once and not at all."""
    cache, q = latents(rng, [133, 5, 0, 16, 100]), randn(5, 1, 16, WIDTH)
    for groups in range(1, 21, 1 if kernel == "mla" else 4):
        run(machine, q, cache, **small(kernel, groups=groups))


@both
def test_more_sequences_than_a_warp_looks_at(machine, rng, randn, kernel):
    lengths = [int(n) for n in rng.integers(0, 40, 70)]
    for groups in (1, 33)[kernel != "mla" :]:
        run(machine, randn(70, 1, 2, WIDTH), latents(rng, lengths), **small(kernel, groups=groups))


def test_a_sequence_is_not_cut_into_more_parts_than_merging_pays(machine, rng, randn):
    n, groups = 16 * 2 * MOST_PARTS, 2 * MOST_PARTS
    run(machine, randn(1, 1, 1, WIDTH), latents(rng, [n]), **small("mla", groups=groups))
    assert len(stretches([n], 16, groups, MOST_PARTS)) == MOST_PARTS


def test_a_share_has_as_many_keys_as_make_a_part_worth_its_merging(machine, rng, randn):
    p, *_ = run(machine, randn(1, 1, 16, WIDTH), latents(rng, [130]), **small("mla_hopper", share=64, groups=9))
    assert (machine.download(p.tensors["cuts"].array) == [[0, 2]]).all()  # three parts of five tiles


@pytest.mark.parametrize("chosen", [small("mla", groups=3), small("mla", groups=7),
                                    {"kernel": "mla", "constants": {"rows": 32, "keys": 32, "stages": 3, "groups": 2}},
                                    small("mla_hopper", groups=3), small("mla_hopper", groups=7, bulk=128)], ids=str)
def test_equal_bits_under_every_schedule(cpu, rng, randn, chosen):
    """Blocks side by side, in any order: parts are merged in their order, by whoever does it."""
    cache = latents(rng, [70, 100, 0, 9])
    p = cuattn.plan_decode_mla(*arrays(cpu, randn(4, 1, 20, WIDTH), cache), softmax_scale=SCALE, **chosen)
    o, lse = p.outputs
    parts = {name: p.tensors[name].array for name in ("part", "part_lse")}  # or a run would find the last one's
    check_schedules(cpu, p.run, {"o": o, "lse": lse, **parts})


@both
def test_runs_follow_lengths_and_leave_the_tickets_at_zero(machine, rng, randn, kernel):
    """With lengths that cut other sequences in each run; equal lengths give equal bits."""
    cache, q = latents(rng, [150, 110, 90]), randn(3, 1, 16, WIDTH)
    *inputs, lengths = arrays(machine, q, cache)
    p = cuattn.plan_decode_mla(*inputs, lengths, softmax_scale=SCALE, **small(kernel, groups=5))
    seen = {}
    for now in ([150, 110, 90], [1, 110, 0], [17, 16, 90], [150, 110, 90], [1, 110, 0]):
        lengths[...] = machine.upload(np.array(now, np.int32))
        o, lse = run_counted(machine, p)
        cuattn.compare.check_decode_mla(q, cache.k, cache.table, np.array(now), o, lse,
                                        softmax_scale=SCALE).raise_if_bad()
        if kernel == "mla":
            assert (machine.download(p.tensors["tickets"].array) == 0).all()
        assert (seen.setdefault(tuple(now), o) == o).all()


# --- on a GPU


def gpu(kernel: str):
    machine = cuattn.open_machine("gpu")
    if not ROWS[kernel].runs_on(machine.device.arch):
        pytest.skip(f"{kernel} is not made for {machine.device.arch}")
    return machine


@both
@pytest.mark.gpu
@pytest.mark.parametrize("h, n", [(16, 5000), (128, 3000), (20, 70)])
def test_both_machines_agree_with_the_reference_at_length(rng, randn, h, n, kernel):
    cache, q = latents(rng, [n, 1, n // 3], 64, "bfloat16"), randn(3, 1, h, WIDTH, dtype="bfloat16")
    run(gpu(kernel), q, cache, kernel=kernel)


@both
@pytest.mark.gpu
def test_a_captured_graph_follows_lengths(rng, randn, kernel):
    machine = gpu(kernel)
    cache, q = latents(rng, [1000, 60]), randn(2, 1, 16, WIDTH)
    *inputs, lengths = arrays(machine, q, cache)
    p = cuattn.plan_decode_mla(*inputs, lengths, softmax_scale=SCALE, kernel=kernel)
    replay = machine.capture(p.run)
    for now in ([999, 1], [100, 0], [1000, 60]):
        lengths[...] = machine.upload(np.array(now, np.int32))
        for x in p.outputs:
            machine.poison(x)
        replay()
        machine.synchronize()
        o, lse = (machine.download(x) for x in p.outputs)
        cuattn.compare.check_decode_mla(q, cache.k, cache.table, np.array(now), o, lse,
                                        softmax_scale=SCALE).raise_if_bad()


@both
@pytest.mark.gpu
def test_calls_that_repeat_start_from_cleared_tickets(rng, randn, kernel):
    machine = gpu(kernel)
    cache, q = latents(rng, [3000, 0, 90]), randn(3, 1, 16, WIDTH)
    given = arrays(machine, q, cache)
    for _ in range(3):
        machine.poison(machine.empty(1 << 20, "int32"))  # what the pool hands out next is not zero
        o, lse = (machine.download(x) for x in
                  cuattn.decode_mla(*given, softmax_scale=SCALE, kernel=kernel, return_lse=True))
        cuattn.compare.check_decode_mla(q, cache.k, cache.table, cache.lengths, o, lse,
                                        softmax_scale=SCALE).raise_if_bad()


# --- the plan


def plan(device=None, b=3, h=16, page_size=16, max_pages=64, kernel="mla", **constants):
    shape = DecodeShape(b, h, 1, WIDTH, page_size, max_pages, "float16")
    return ROWS[kernel].plan(shape, device or lookup("H200"), constants)


@pytest.mark.parametrize("arch, h, expected", [
    ("sm_90a", 16, (16, 64, 2)), ("sm_90a", 20, (32, 64, 2)), ("sm_90a", 128, (64, 64, 2)),
    ("sm_80", 16, (16, 32, 3)), ("sm_80", 128, (64, 32, 2)),
    ("sm_86", 16, (16, 32, 2)), ("sm_86", 128, (32, 16, 3)),
])
def test_as_many_heads_as_there_are_then_the_longest_tiles_that_fit(arch, h, expected):
    made = plan(for_arch(arch), h=h)
    assert tuple(made.constants[name] for name in ("rows", "keys", "stages")) == expected
    grid = made.launches[0].grid
    assert grid[0] == -(-h // expected[0]) and grid[0] * grid[1] <= for_arch(arch).sms


def test_what_cannot_be_planned_is_refused_in_a_sentence():
    with pytest.raises(Unsupported, match="mla: rows must be 16, 32, 64, got 48; change it"):
        plan(rows=48)
    with pytest.raises(Unsupported, match="expected one KV head and head dim 576, got 2 and 128; choose"):
        ROWS["mla"].plan(DecodeShape(1, 8, 2, 128, 16, 4, "float16"), lookup("H200"))
    with pytest.raises(Unsupported, match="mla: keys must be 16, 32, 64, got 128; change it"):
        plan(keys=128)
    with pytest.raises(Unsupported, match="at least 2 stages, got 1; change"):
        plan(stages=1)
    with pytest.raises(Unsupported, match="64 rows with 3 stages of 64 keys do not fit the .* H200; choose fewer"):
        plan(rows=64, keys=64, stages=3)
    with pytest.raises(Unsupported, match=r"at most \d+ tiles of 64 keys, got \d+; split the call"):
        plan(b=60000, page_size=1 << 16, max_pages=1 << 8)


@pytest.mark.parametrize("h, rows", [(1, 16), (16, 16), (20, 32), (128, 64)])
def test_tiles_on_hopper(h, rows):
    made = plan(h=h, kernel="mla_hopper")
    assert tuple(made.constants[name] for name in ("rows", "keys", "stages")) == (rows, 64, 2)


@pytest.mark.parametrize("page, box", [(1, 0), (12, 0), (8, 8), (24, 8), (64, 64), (96, 32), (1024, 64)])
def test_boxes_lie_in_a_page_and_begin_with_a_swizzle(page, box):
    made = plan(page_size=page, kernel="mla_hopper", bulk=8).launches[0]
    assert made.constants["BOX"] == box and [of.box for of in made.maps.values()] == [(1, box, 1, 64)] * (box > 0)
    by_itself = plan(page_size=page, kernel="mla_hopper").launches[0].constants["BOX"]
    assert by_itself == (box if box == 64 else 0)


@pytest.mark.parametrize("batch, most, groups", [
    (128, 132, 128), (128, 66, 64), (1, 132, 132), (16, 132, 128), (77, 132, 132), (3, 44, 42), (5000, 132, 125),
])
def test_equal_sequences_are_not_cut_where_that_costs_little(batch, most, groups):
    assert even_groups(batch, most) == groups


def test_what_cannot_be_planned_on_hopper_is_refused_in_a_sentence():
    with pytest.raises(Unsupported, match="mla_hopper: rows must be 16, 32, 64, got 48; change it"):
        plan(rows=48, kernel="mla_hopper")
    with pytest.raises(Unsupported, match="mla_hopper: keys must be 32, 64, got 16; change it"):
        plan(keys=16, kernel="mla_hopper")
    with pytest.raises(Unsupported, match="mla_hopper: expected at least 4 stages of 32 keys, got 2; choose more"):
        plan(keys=32, kernel="mla_hopper")
    with pytest.raises(Unsupported, match="mla_hopper: expected one KV head and head dim 576, got 2 and 128; choose"):
        ROWS["mla_hopper"].plan(DecodeShape(1, 8, 2, 128, 16, 4, "float16"), lookup("H200"))
    with pytest.raises(Unsupported, match="64 rows with 3 stages of 64 keys do not fit the .* H200; choose fewer"):
        plan(h=128, stages=3, kernel="mla_hopper")
    with pytest.raises(Unsupported, match=r"at most \d+ tiles of 64 keys, got \d+; split the call"):
        plan(b=60000, page_size=1 << 16, max_pages=1 << 8, kernel="mla_hopper")


@both
def test_a_row_is_counted_once_for_its_heads(kernel):
    """At 16 heads 128 sequences of 4096 load their latents, and little more."""
    made, lengths = plan(b=128, page_size=64, kernel=kernel), [4096] * 128
    cost = ROWS[kernel].cost(DecodeShape(128, 16, 1, WIDTH, 64, 64, "bfloat16"), made, lengths)
    latent = 128 * 4096 * WIDTH * 2
    assert latent < cost.bytes_loaded < 1.04 * latent
    assert cost.flops == 2 * 16 * 128 * 4096 * (WIDTH + LATENT)


# --- the contract


def given(**changes):
    named = {"q": np.zeros((2, 1, 16, WIDTH), "float16"), "kv_cache": np.zeros((4, 16, 1, WIDTH), "float16"),
             "block_table": np.array([[0, 1], [2, 3]], np.int32), "cache_seqlens": np.array([20, 5], np.int32),
             "softmax_scale": SCALE}
    return {**named, **changes}


@pytest.mark.parametrize("changes, said", [
    ({"q": np.zeros((2, 2, 16, WIDTH), "float16")}, r"q: expected one query a sequence, \(B, 1, H, D\), got .*; split"),
    ({"q": np.zeros((2, 1, 16, 512), "float16")}, "q: expected a head dim of 576, 512 .* got 512; absorb"),
    ({"q": np.zeros((2, 1, 16, WIDTH), "float32")}, "q: expected dtype float16 or bfloat16, got float32; convert"),
    ({"q": np.zeros((3, 1, 16, WIDTH), "float16")}, "block_table rows: expected 3 as q has, got 2; make them"),
    ({"kv_cache": np.zeros((4, 16, 2, WIDTH), "float16")}, "kv_cache: expected one latent head .* got 2; use decode"),
    ({"kv_cache": np.zeros((4, 16, 1, 512), "float16")}, "kv_cache head dim: expected 576 as q has, got 512"),
    ({"kv_cache": np.zeros((4, 16, WIDTH), "float16")}, r"kv_cache: expected shape \(num_pages, page_size, 1, D\)"),
    ({"kv_cache": np.zeros((4, 0, 1, WIDTH), "float16")}, "kv_cache: expected a page size of at least 1, got 0"),
    ({"kv_cache": np.zeros((4, 16, 1, WIDTH), "float32")}, "kv_cache.dtype: expected float16 as q has, got float32"),
    ({"cache_seqlens": np.array([33, 5], np.int32)}, r"cache_seqlens\[0\]: expected 0 to 32, .*, got 33; widen"),
    ({"cache_seqlens": np.array([20, 5, 1], np.int32)}, r"cache_seqlens.shape: expected \(2,\) as block_table has"),
    ({"block_table": np.array([[0, 4], [2, 3]], np.int32)}, r"block_table\[0, 1\]: expected a page number below 4"),
    ({"block_table": np.array([[0, 1], [2, 3]])}, "block_table: expected dtype int32, got int64; convert"),
    ({"softmax_scale": None}, "softmax_scale: expected a number from .*, got None; give the model's"),
    ({"softmax_scale": 0.0}, "softmax_scale: expected a number from .*, got 0.0; give the model's"),
    ({"out": np.zeros((2, 1, 16, WIDTH), "float16")}, "out: expected .* as the result has"),
    ({"kernel": "paged"}, "kernel: 'paged' is not a mla kernel; choose one of mla"),
])
def test_what_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        cuattn.decode_mla(**given(**changes))


def test_the_scale_has_no_default():
    with pytest.raises(TypeError, match="softmax_scale"):
        cuattn.decode_mla(*[x for name, x in given().items() if name != "softmax_scale"])


def test_rows_that_are_not_whole_words_are_refused(cpu):
    arrays = {name: cpu.upload(x) for name, x in given().items() if name != "softmax_scale"}
    arrays["kv_cache"] = cpu.empty((4, 16, 1, WIDTH + 4), "float16")[..., :WIDTH]
    with pytest.raises(contract.ContractError, match="kv_cache: expected rows aligned to 16 bytes"):
        cuattn.decode_mla(**given(**arrays))


def test_a_page_twice_and_entries_behind_the_last_page(cpu, rng, randn):
    """Two sequences may share a page; what lies behind a sequence's last page is not read."""
    cache, q = latents(rng, [32, 20]), randn(2, 1, 16, WIDTH)
    cache.table[1, 0] = cache.table[0, 0]
    run(cpu, q, cache)


def test_calls_can_be_repeated(cpu, rng, randn):
    """Every array of a launch is the operation's own."""
    p = cuattn.plan_decode_mla(*arrays(cpu, randn(1, 1, 16, WIDTH), latents(rng, [20])), softmax_scale=SCALE)
    assert repeatable(p)
