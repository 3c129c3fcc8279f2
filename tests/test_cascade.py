"""decode_cascade: levels, groups, pages, heads, shares of every number, counts, equal bits, and what is refused."""
from __future__ import annotations

import numpy as np
import pytest
from counted import run_counted
from test_decode import UNUSED

import cuattn
from cuattn import contract, reference
from cuattn.cpu import check_schedules
from cuattn.devices import for_arch, lookup
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.shapes import CascadeShape

# Short tiles, so that few rows and keys are many items in many parts.
SMALL = {"rows": 16, "keys": 16, "warps": 1, "shares": 5}
EACH = None  # offsets of a level of single sequences


class Levels:
    """A cache in which all that no level uses is NaN, and tables in a random page order."""

    def __init__(self, rng, levels, page=16, hkv=2, d=64, dtype="float16"):
        counts = [[-(-n // page) for n in lengths] for _, lengths in levels]
        pages = sum(map(sum, counts)) + 2
        ids, taken, self.levels = rng.permutation(pages).astype(np.int32), 0, []
        self.k, self.v = (np.full((pages, page, hkv, d), np.nan, dtype) for _ in range(2))
        for (offsets, lengths), used in zip(levels, counts):
            table = np.full((len(used), max(used, default=0) + 1), UNUSED, np.int32)
            for g, (n, count) in enumerate(zip(lengths, used)):
                table[g, :count] = mine = ids[taken : taken + count]
                taken += count
                for cache in (self.k, self.v):
                    rows = cache[mine].reshape(count * page, hkv, d)
                    rows[:n] = rng.standard_normal((n, hkv, d)).astype(dtype)
                    cache[mine] = rows.reshape(count, page, hkv, d)
            offsets = EACH if offsets is EACH else np.array(offsets, np.int32)
            self.levels.append((offsets, table, np.array(lengths, np.int32)))

    def arrays(self, machine, q):
        levels = [tuple(x if x is EACH else machine.upload(x) for x in level) for level in self.levels]
        return *(machine.upload(x) for x in (q, self.k, self.v)), levels


def judge(q, cache, o, lse, **options):
    cuattn.compare.check_decode_cascade(q, cache.k, cache.v, cache.levels, o, lse, **options).raise_if_bad()


def run(machine, q, cache, constants=SMALL, **options):
    """Results judged and counted; returns (planned, o, lse) with the arrays on the host."""
    p = cuattn.plan_decode_cascade(*cache.arrays(machine, q), constants=constants, **options)
    o, lse = run_counted(machine, p)
    judge(q, cache, o, lse, **options)
    return p, o, lse


# --- shapes

MIXED = [([0, 7], [37]), ([0, 1, 1, 4, 7], [16, 5, 0, 33]), (EACH, [0, 1, 15, 16, 17, 40, 3])]


@pytest.mark.parametrize("levels", [
    [(EACH, [5, 0, 40])],
    [([0, 3], [70])],
    [([0, 3], [0])],
    [([0, 1, 3], [15, 33])],
    [([0, 3], [17]), (EACH, [5, 0, 40])],
    [([0, 0, 3, 3], [9, 0, 9]), (EACH, [0, 0, 1])],
    [([0, 1, 2, 3], [5, 0, 31]), (EACH, [0, 9, 31])],
    [([0, 3], [48]), ([0, 2, 3], [0, 31])],
    MIXED,
], ids=lambda levels: " + ".join(f"{offsets} {lengths}" for offsets, lengths in levels))
def test_levels_and_groups(machine, rng, randn, levels):
    """One to three levels; groups of none, one and all; lengths on and beside a tile's and a page's; a level of
    single sequences that is not the last."""
    b = levels[-1][0][-1] if levels[-1][0] else len(levels[-1][1])
    run(machine, randn(b, 1, 8, 64), Levels(rng, levels))


@pytest.mark.parametrize("page, group, hkv, d, dtype, constants", [
    (1, 1, 2, 128, "bfloat16", {"rows": 32, "keys": 32, "warps": 2, "stages": 3, "shares": 3}),
    (16, 8, 1, 256, "float16", {}),
    (3, 5, 1, 40, "bfloat16", {"rows": 128, "keys": 64, "warps": 8, "shares": 2}),
])
def test_pages_heads_and_tiles(machine, rng, randn, page, group, hkv, d, dtype, constants):
    levels = [([0, 5, 30], [130, 63]), (EACH, [int(n) for n in rng.integers(0, 20, 30)])]
    run(machine, randn(30, 1, hkv * group, d, dtype=dtype), Levels(rng, levels, page, hkv, d, dtype), constants)


@pytest.mark.parametrize("m, causal", [(3, True), (8, False)])
def test_several_queries(machine, rng, randn, m, causal):
    """Their own keys are the last level's, which may be fewer than they are."""
    levels = [([0, 2, 4], [50, 0]), (EACH, [m, 20, 1, 0])]
    run(machine, randn(4, m, 8, 64), Levels(rng, levels), causal=causal)


def test_every_number_of_shares(machine, rng, randn):
    """Shares that begin and end anywhere, more of them than tiles, items cut twice, once and not at all."""
    cache, q = Levels(rng, MIXED), randn(7, 1, 8, 64)
    for shares in range(1, 25, 2):
        run(machine, q, cache, {**SMALL, "shares": shares})


def test_more_groups_and_parts_than_a_warp_has_lanes(machine, rng, randn):
    offsets = [0, *sorted(int(x) for x in rng.integers(0, 71, 69)), 70]
    levels = [(offsets, [int(n) for n in rng.integers(0, 20, 70)]), ([0, 70], [600])]
    run(machine, randn(70, 1, 8, 64), Levels(rng, levels), {**SMALL, "shares": 700})


def test_strided_pools_queries_and_outputs(machine, rng, randn):
    """A pool with keys and values beside each other, and queries and results with gaps; nothing else is written."""
    cache, q = Levels(rng, MIXED), randn(7, 1, 8, 64)
    pages, page, hkv, d = cache.k.shape
    pool, wide = machine.empty((pages, page, 2, hkv, d), "float16"), machine.empty((7, 1, 8, 96), "float16")
    sea = machine.empty((9, 1, 8, 72), "float16")
    machine.poison(sea)
    *_, levels = cache.arrays(machine, q)
    pool[:, :, 0], pool[:, :, 1], wide[..., :64] = (machine.upload(x) for x in (cache.k, cache.v, q))
    o, lse = run_counted(machine, cuattn.plan_decode_cascade(
        wide[..., :64], pool[:, :, 0], pool[:, :, 1], levels, out=sea[1:8, ..., :64], constants=SMALL))
    judge(q, cache, o, lse)
    sea = machine.download(sea)
    assert np.isnan(sea[[0, 8]]).all() and np.isnan(sea[..., 64:]).all()


def test_nothing_to_do(machine, rng):
    for b, h, levels in ((0, 8, [([0], []), (EACH, [])]), (0, 8, [([0, 0], [5])]), (2, 0, [([0, 2], [5]), (EACH, [1, 2])])):
        cache = Levels(rng, [level for level in levels if level[1] or level[0] is EACH])
        _, o, lse = run(machine, np.ones((b, 1, h, 64), "float16"), cache)
        assert o.shape == (b, 1, h, 64) and lse.shape == (b, h, 1)


# --- numbers


def test_the_levels_are_one_sequence(machine, rng, randn):
    """With pages of one key a sequence's tables in all levels, one behind the other, are its table."""
    cache, q = Levels(rng, MIXED, page=1), randn(7, 1, 8, 64)
    tables = [np.concatenate([pages[:n] for pages, n in reference.cascade_places(cache.levels, b)]) for b in range(7)]
    lengths = np.array([len(table) for table in tables], np.int32)
    table = np.zeros((7, lengths.max()), np.int32)
    for row, mine in zip(table, tables):
        row[: len(mine)] = mine
    whole = reference.decode(q, cache.k, cache.v, table, lengths)
    for got, expected in zip(reference.decode_cascade(q, cache.k, cache.v, cache.levels), whole):
        np.testing.assert_array_equal(got, expected)
    _, o, lse = run(machine, q, cache)
    cuattn.compare.check_decode(q, cache.k, cache.v, table, lengths, o, lse).raise_if_bad()


@pytest.mark.parametrize("d", [64, 256])
def test_a_level_without_keys_leaves_the_others_bits(machine, rng, randn, d):
    """At D256 a warp merges a row in two steps, and finds after the first that there is nothing."""
    q, some = randn(3, 1, 8, d), [9, 0, 40]
    both = Levels(rng, [([0, 3], [0]), (EACH, some)], d=d)
    q_, k, v, ((*_,), (_, table, lengths)) = both.arrays(machine, q)
    alone = cuattn.decode(q_, k, v, table, lengths, kernel="paged_stream", return_lse=True)
    for got, expected in zip(run(machine, q, both)[1:], alone):
        np.testing.assert_array_equal(got, machine.download(expected))

    both = Levels(rng, [([0, 1, 3], [40, 7]), (EACH, [0, 0, 0])], d=d)
    _, *together = run(machine, q, both)
    both.levels.pop()
    for got, expected in zip(together, run(machine, q, both)[1:]):
        np.testing.assert_array_equal(got, expected)


def test_uniform_probe(machine, rng):
    """q = 0: each key of each level counts once."""
    cache = Levels(rng, MIXED)
    cache.v[...] = np.where(np.isnan(cache.v), cache.v, rng.integers(-4, 5, cache.v.shape))
    _, o, lse = run(machine, np.zeros((7, 1, 8, 64), "float16"), cache)
    for b in range(7):
        values = reference.cascade_keys(cache.v, reference.cascade_places(cache.levels, b)).astype(float)
        np.testing.assert_allclose(lse[b, :, 0], np.log(len(values)), rtol=1e-6)
        mean = np.repeat(values.mean(axis=0), 4, axis=0)
        np.testing.assert_allclose(o[b, 0].astype(float), mean, atol=3 * 2**-11 * np.abs(mean).max())


def test_equal_bits_under_every_schedule(cpu, rng, randn):
    cache, q = Levels(rng, MIXED), randn(7, 1, 8, 64)
    p = cuattn.plan_decode_cascade(*cache.arrays(cpu, q), constants=SMALL)
    o, lse = p.outputs
    parts = {name: p.tensors[name].array for name in p.plan.scratch if name != "tickets"}
    check_schedules(cpu, p.run, {"o": o, "lse": lse, **parts})


FOLLOWED = [([[0, 7], [0, 1, 1, 4, 7]], [[37], [16, 5, 0, 33], [0, 1, 15, 16, 17, 40, 3]]),
            ([[0, 7], [0, 0, 7, 7, 7]], [[3], [9, 33, 9, 9], [1, 0, 0, 0, 0, 48, 0]]),
            ([[0, 7], [0, 2, 3, 6, 7]], [[0], [16, 5, 0, 32], [0, 0, 0, 0, 0, 0, 0]])]


def follow(machine, rng, randn, prepare):
    """A plan's runs, made by `prepare(planned)`, follow offsets and lengths that change on the device."""
    cache, q = Levels(rng, MIXED), randn(7, 1, 8, 64)
    cache.k[...], cache.v[...] = (rng.standard_normal(cache.k.shape) for _ in range(2))
    pages = len(cache.k)
    cache.levels = [(offsets, rng.integers(0, pages, table.shape).astype(np.int32), lengths)
                    for offsets, table, lengths in cache.levels]
    *arrays, levels = cache.arrays(machine, q)
    p = cuattn.plan_decode_cascade(*arrays, levels, constants=SMALL)
    again = prepare(p)
    for offsets, lengths in (*FOLLOWED, FOLLOWED[0]):
        now = [(np.array(cut, np.int32), table, np.array(n, np.int32)) for cut, n, (_, table, _) in
               zip([*offsets, range(8)], lengths, cache.levels)]
        for (cut, _, n), (device_cut, _, device_n) in zip(now, levels):
            device_n[...] = machine.upload(n)
            if device_cut is not EACH:
                device_cut[...] = machine.upload(cut)
        for x in p.outputs:
            machine.poison(x)
        again()
        machine.synchronize()
        cache.levels = now
        judge(q, cache, *(machine.download(x) for x in p.outputs))


def test_runs_follow_offsets_and_lengths(machine, rng, randn):
    follow(machine, rng, randn, lambda p: lambda: run_counted(machine, p))


@pytest.mark.gpu
def test_a_captured_graph_follows_offsets_and_lengths(rng, randn):
    machine = cuattn.open_machine("gpu")
    follow(machine, rng, randn, lambda p: machine.capture(p.run))


@pytest.mark.gpu
@pytest.mark.parametrize("b, d", [(3, 64), (64, 128), (80, 256)])
def test_both_machines_agree_with_the_reference_at_length(rng, randn, b, d):
    machine = cuattn.open_machine("gpu")
    levels = [([0, b], [3000]), (EACH, [int(n) for n in rng.integers(0, 200, b)])]
    q = randn(b, 1, 8, d, dtype="bfloat16")
    run(machine, q, Levels(rng, levels, d=d, dtype="bfloat16"), {})
    run(machine, randn(b, 4, 8, d, dtype="bfloat16"), Levels(rng, levels, d=d, dtype="bfloat16"), {})


@pytest.mark.gpu
def test_calls_that_repeat_give_the_same(rng, randn):
    machine = cuattn.open_machine("gpu")
    cache, q = Levels(rng, MIXED), randn(7, 1, 8, 64)
    arrays = cache.arrays(machine, q)
    for _ in range(3):
        judge(q, cache, *(machine.download(x) for x in cuattn.decode_cascade(*arrays, return_lse=True)))


# --- the plan


def plan(device=None, b=64, h=32, hkv=8, d=128, levels=((1, 512),), own=8, m=1, **constants):
    shape = CascadeShape(b, h, hkv, d, 16, levels, own, "bfloat16", m)
    return shape, ROWS["cascade"].plan(shape, device or lookup("H200"), constants)


@pytest.mark.parametrize("arch, b, d, expected", [
    ("sm_90a", 64, 128, (128, 64, 8)), ("sm_90a", 16, 128, (64, 64, 4)), ("sm_90a", 64, 256, (128, 32, 8)),
    ("sm_80", 64, 128, (128, 64, 8)), ("sm_86", 64, 128, (128, 64, 8)), ("sm_86", 64, 256, (64, 32, 4)),
])
def test_the_tile_of_many_rows_where_groups_have_them(arch, b, d, expected):
    _, made = plan(for_arch(arch), b=b, d=d)
    assert tuple(made.constants[name] for name in ("rows", "keys", "warps")) == expected
    assert made.launch_count == 3 and made.zeroed == {"tickets"}


def test_shared_keys_are_read_once_a_group():
    """64 sequences behind 8192 keys: once for each 128 of a KV head's 256 rows; paged_stream reads them 64 times."""
    shape, made = plan()
    row = 2 * 8 * 128 * 2
    cost = ROWS["cascade"].cost(shape, made, [[0, 64], [8192], [128] * 64])
    assert (2 * 8192 + 64 * 128) * row < cost.bytes_loaded < 1.4 * (2 * 8192 + 64 * 128) * row
    assert cost.flops == 4 * 64 * 32 * 128 * (8192 + 128)
    shape, made = plan(b=16)
    cost = ROWS["cascade"].cost(shape, made, [[0, 16], [8192], [128] * 16])
    assert (8192 + 16 * 128) * row < cost.bytes_loaded < 1.4 * (8192 + 16 * 128) * row


def test_what_cannot_be_planned_is_refused_in_a_sentence():
    with pytest.raises(Unsupported, match="rows must be a multiple of 16·warps, .* got rows=16, .*; change them"):
        plan(rows=16)
    with pytest.raises(Unsupported, match="at most 32·warps, got rows=64, keys=64, warps=1; change them"):
        plan(rows=64, keys=64, warps=1)
    with pytest.raises(Unsupported, match="at least 2 stages, got warps=8, stages=1; change them"):
        plan(stages=1)
    with pytest.raises(Unsupported, match="128 rows and 9 stages of 64 keys .* do not fit .*; choose fewer"):
        plan(rows=128, keys=64, stages=9)
    with pytest.raises(Unsupported, match="at most 65535 shares, got 70000; split"):
        plan(shares=70000)
    with pytest.raises(Unsupported, match=r"at most \d+ tiles of 64 rows × 64 keys, got \d+; split the call"):
        plan(b=60000, levels=((60000, 1 << 16),))


# --- the contract


def given(**changes):
    q, cache = np.zeros((3, 1, 8, 64), "float16"), np.zeros((4, 16, 2, 64), "float16")
    shared, own = np.array([[0, 1]], np.int32), np.array([[2], [3], [0]], np.int32)
    level = {"offsets": np.array([0, 3], np.int32), "block_table": shared, "seqlens": np.array([20], np.int32)}
    level |= {name: changes.pop(name) for name in level if name in changes}
    last = (EACH, own, np.array([1, 2, 16], np.int32))
    return {"q": q, "k_cache": cache, "v_cache": cache, "levels": [tuple(level.values()), last], **changes}


@pytest.mark.parametrize("changes, said", [
    ({"levels": []}, r"levels: expected a sequence of \(offsets, block_table, seqlens\), got \[\]; give at least one"),
    ({"levels": [(EACH, 1)]}, r"levels\[0\]: expected \(offsets, block_table, seqlens\), got .*; give all three"),
    ({"offsets": EACH}, r"levels\[0\].offsets: expected an array \(G \+ 1\), got None; only the last level"),
    ({"offsets": np.array([0, 3])}, r"levels\[0\].offsets: expected dtype int32, got int64; convert"),
    ({"offsets": np.array([0, 1, 3], np.int32)}, r"levels\[0\].offsets.shape: expected \(2,\) as the rows of its"),
    ({"offsets": np.array([1, 3], np.int32)}, r"levels\[0\].offsets\[0\]: expected 0, the first, got 1; mend"),
    ({"offsets": np.array([0, 2], np.int32)}, r"levels\[0\].offsets\[1\]: expected 3, the batch, got 2; mend"),
    ({"offsets": np.array([0, 2, 1, 3], np.int32), "block_table": np.zeros((3, 2), np.int32),
      "seqlens": np.zeros(3, np.int32)}, r"levels\[0\].offsets\[2\]: expected 2 to 3, behind the one before, got 1"),
    ({"offsets": np.zeros(1, np.int32), "block_table": np.zeros((0, 1), np.int32), "seqlens": np.zeros(0, np.int32)},
     r"levels\[0\].offsets: expected at least one group, got 0; leave the level out"),
    ({"block_table": np.array([[0, 4]], np.int32)}, r"levels\[0\].block_table\[0, 1\]: expected a page number below 4"),
    ({"block_table": np.zeros(2, np.int32)}, r"levels\[0\].block_table: expected shape \(G, max_pages\), got \(2,\)"),
    ({"seqlens": np.array([33], np.int32)}, r"levels\[0\].seqlens\[0\]: expected 0 to 32, .*, got 33; widen"),
    ({"seqlens": np.array([2, 3], np.int32)}, r"levels\[0\].seqlens.shape: expected \(1,\) as levels\[0\].block_table"),
    ({"q": np.zeros((2, 1, 8, 64), "float16")}, r"levels\[0\].offsets\[1\]: expected 2, the batch, got 3; mend"),
    ({"q": np.zeros((3, 9, 8, 64), "float16")}, r"q: expected 1 to 8 queries a sequence, .*; split the call"),
    ({"q": np.zeros((3, 1, 8, 64), "float32")}, "q: expected dtype float16 or bfloat16, got float32; convert"),
    ({"q": np.zeros((3, 1, 8, 60), "float16")}, "k_cache head dim: expected 60 as q has, got 64; make them agree"),
    ({"q": np.zeros((3, 1, 7, 64), "float16")}, "q: expected a number of heads that k's 2 divide, got 7"),
    ({"k_cache": np.zeros((4, 16, 2, 64), "int8")}, "k_cache.dtype: expected float16 as q has, got int8; make them"),
    ({"v_cache": np.zeros((5, 16, 2, 64), "float16")}, "v_cache.shape: expected .* as k_cache has, got"),
    ({"kernel": "paged"}, "kernel: 'paged' is not a cascade kernel; choose one of cascade"),
    ({"softmax_scale": 0.0}, "softmax_scale: expected a number from .*, got 0.0"),
    ({"out": np.zeros((3, 1, 8, 32), "float16")}, "out: expected .* as the result has"),
])
def test_refusals_are_one_sentence(changes, said):
    with pytest.raises(ValueError, match=said) as error:
        cuattn.plan_decode_cascade(**given(**changes))
    assert "\n" not in str(error.value)


def test_several_causal_queries_need_a_level_of_their_own():
    arguments = given(q=np.zeros((3, 3, 8, 64), "float16"), constants=SMALL)
    arguments["levels"].pop()
    with pytest.raises(contract.ContractError, match="levels: expected a last one of each sequence's own keys"):
        cuattn.plan_decode_cascade(**arguments)
    cuattn.plan_decode_cascade(**arguments, causal=False)
