"""paged_stream: shares of every number of groups, parts merged by whoever is last, tickets that are 0 again."""
from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import quantised_cases
from test_decode import make_cache, run

import cuattn
from cuattn.cpu import check_schedules
from cuattn.devices import lookup
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.paged_stream import MOST_PARTS, stretches
from cuattn.kernels.shapes import DecodeShape
from cuattn.paths import KERNELS

SMALL = {"keys": 16, "warps": 1, "stages": 2}  # rounds of 16 keys, so that short sequences are cut often


@pytest.mark.parametrize("constants", [SMALL, {"keys": 32, "warps": 3, "stages": 3}], ids=str)
def test_every_number_of_groups(machine, rng, randn, constants):
    """Shares that begin and end anywhere, more groups than rounds, sequences cut twice, once and not at all."""
    cache, q = make_cache(rng, [333, 5, 0, 16, 200], 16, 1, 64), randn(5, 1, 4, 64)
    for groups in range(1, 40):
        run(machine, "paged_stream", q, cache, constants={**constants, "groups": groups})


@pytest.mark.parametrize("groups", [1, 4, 33])
def test_more_sequences_than_a_warp_looks_at(machine, rng, randn, groups):
    lengths = [int(n) for n in rng.integers(0, 70, 75)]
    cache, q = make_cache(rng, lengths, 16, 1, 64), randn(75, 1, 2, 64)
    run(machine, "paged_stream", q, cache, constants={**SMALL, "groups": groups})


@pytest.mark.parametrize("group", [1, 9, 16, 20])
def test_groups_of_heads_that_are_cut(machine, rng, randn, group):
    """Fewer rows than a tile has, all of them, and a second tile that is nearly empty."""
    cache, q = make_cache(rng, [150, 61], 16, 2, 72), randn(2, 1, 2 * group, 72)
    run(machine, "paged_stream", q, cache, constants={**SMALL, "groups": 3})


TEAMED = {"keys": 16, "warps": 4, "stages": 2, "groups": 3}


@pytest.mark.parametrize("team", [1, 2, 4])
@pytest.mark.parametrize("m, group, d, options", [
    (1, 32, 128, {}), (1, 40, 64, {}), (3, 11, 72, {"window_size": (40, 0)}), (8, 12, 64, {"softcap": 3.0}),
    (4, 16, 256, {}), (1, 130, 64, {}), (1, 64, 8, {}),
], ids=str)
def test_warps_that_share_their_tiles(machine, rng, randn, team, m, group, d, options):
    """Every tile of rows is somebody's, also the last of an odd number, and 2 rows of one; a warp merges up to 4."""
    cache, q = make_cache(rng, [300, 9, 0, 64], 16, 1, d), randn(4, m, group, d)
    sinks = {"sinks": randn(group, dtype="float32")}
    run(machine, "paged_stream", q, cache, constants={**TEAMED, "team": team}, **options, **sinks)


@pytest.mark.parametrize("kv_dtype, kind, d", [
    ("int8", "pages", 64), ("float8_e4m3", "heads", 128), ("int8", "one", 256),
])
def test_warps_that_share_tiles_of_bytes(machine, rng, randn, kv_dtype, kind, d):
    cache = quantised_cases.make_quantised(rng, [300, 9, 0, 64], 16, 2, d, kv_dtype, kind)
    for team, keys in product((2, 4), (16, 32)):
        constants = {"warps": 4, "stages": 2, "groups": 3, "keys": keys, "team": team}
        quantised_cases.run(machine, randn(4, 2, 48, d), cache, constants=constants)


def test_a_sequence_is_not_cut_into_more_parts_than_merging_pays(machine, rng, randn):
    """Merging looks at the states of 32 parts at a time, and these are more."""
    n = 16 * 2 * MOST_PARTS
    cache, q = make_cache(rng, [n], 16, 1, 64), randn(1, 1, 4, 64)
    p, *_ = run(machine, "paged_stream", q, cache, constants={**SMALL, "groups": 2 * MOST_PARTS})
    assert len(stretches(p.plan, [n])) == MOST_PARTS


@pytest.mark.parametrize("d, kv_dtype", [(64, None), (80, None), (128, None), (64, "int8"), (96, "float8_e4m3")])
@pytest.mark.parametrize("group", [4, 16])
def test_o_passes_the_banks_without_conflicts(cpu, rng, randn, d, kv_dtype, group):
    """Where warps leave it, and where it is read to be merged."""
    q, lengths, constants = randn(2, 1, group, d), [200, 40], {"warps": 2, "stages": 2, "groups": 3}
    if kv_dtype:
        cache = quantised_cases.make_quantised(rng, lengths, 16, 1, d, kv_dtype)
        p = quantised_cases.plan(cpu, q, cache, constants=constants)
    else:
        cache = make_cache(rng, lengths, 16, 1, d)
        arrays = (cpu.upload(x) for x in (q, cache.k, cache.v, cache.table, cache.lengths))
        p = cuattn.plan_decode(*arrays, kernel="paged_stream", constants=constants)
    with cpu.tracing() as trace:
        p.run()
    lines = (KERNELS / "decode/paged_stream.cu").read_text(encoding="utf-8").splitlines()
    calls = {"shared store": "Products::store(", "shared load": "load_shared(reinterpret_cast<const Quad*>(s_o))"}
    moved = {access: [site for site in trace.sites if call in lines[site.line - 1] and site.access == access]
             for access, call in calls.items()}
    for sites in moved.values():
        assert sum(site.wavefronts for site in sites) > 0 and sum(site.conflicts for site in sites) == 0


@pytest.mark.parametrize("heads, constants", [
    (4, {**SMALL, "groups": 2}), (4, {**SMALL, "groups": 7}), (48, {**TEAMED, "team": 2}), (48, {**TEAMED, "team": 4}),
], ids=str)
def test_equal_bits_under_every_schedule(cpu, rng, randn, heads, constants):
    """Blocks side by side, in any order: the last one to come merges all parts in their order."""
    cache = make_cache(rng, [130, 300, 0, 9], 16, 1, 64)
    arrays = [cpu.upload(x) for x in (randn(4, 1, heads, 64), cache.k, cache.v, cache.table, cache.lengths)]
    p = cuattn.plan_decode(*arrays, kernel="paged_stream", constants=constants)
    o, lse = p.outputs
    parts = {name: p.tensors[name].array for name in ("part", "part_lse")}  # or a run would find the last one's
    check_schedules(cpu, p.run, {"o": o, "lse": lse, **parts})


def test_runs_repeat_to_the_bit_and_leave_the_tickets_at_zero(machine, rng, randn):
    """With lengths that cut other sequences in each run."""
    cache, q = make_cache(rng, [300, 210, 90], 16, 2, 64), randn(3, 1, 4, 64)
    lengths = machine.upload(cache.lengths)
    p = cuattn.plan_decode(*(machine.upload(x) for x in (q, cache.k, cache.v, cache.table)), lengths,
                           kernel="paged_stream", constants={**SMALL, "groups": 5})
    seen = {}
    for now in ([300, 210, 90], [1, 210, 0], [17, 16, 90], [300, 210, 90], [1, 210, 0]):
        lengths[...] = machine.upload(np.array(now, np.int32))
        p.run()
        machine.synchronize()
        o, lse = (machine.download(x) for x in p.outputs)
        cuattn.compare.check_decode(q, cache.k, cache.v, cache.table, np.array(now), o, lse).raise_if_bad()
        assert (machine.download(p.tensors["tickets"].array) == 0).all()
        assert (seen.setdefault(tuple(now), o) == o).all()


@pytest.mark.gpu
def test_calls_that_repeat_start_from_cleared_tickets(rng, randn):
    machine = cuattn.open_machine("gpu")
    cache, q = make_cache(rng, [300, 0, 90], 16, 2, 64), randn(3, 1, 4, 64)
    arrays = [machine.upload(x) for x in (q, cache.k, cache.v, cache.table, cache.lengths)]
    for _ in range(3):
        machine.poison(machine.empty(1 << 20, "int32"))  # what the pool hands out next is not zero
        o, lse = (machine.download(x) for x in cuattn.decode(*arrays, kernel="paged_stream", return_lse=True))
        cuattn.compare.check_decode(q, cache.k, cache.v, cache.table, cache.lengths, o, lse).raise_if_bad()


def plan(b=3, h=8, hkv=2, d=64, page_size=16, max_pages=64, card="H200", **constants):
    shape = DecodeShape(b, h, hkv, d, page_size, max_pages, "float16")
    return ROWS["paged_stream"].plan(shape, lookup(card), constants)


@pytest.mark.parametrize("card, pitch, warps", [("H200", 136, 8), ("RTX 4090", 128, 4)])
def test_rows_of_o_are_padded_where_no_tile_has_to_go_for_it(card, pitch, warps):
    """16 rows of O are as long as a tile of 16 keys; fewer leave room."""
    for rows, longer in ((16, pitch), (4, 136)):
        launch, = plan(h=rows, hkv=1, d=128, card=card).launches
        assert launch.constants["O_PITCH"] == longer
        assert rows == 4 or launch.constants["WARPS"] == warps


@pytest.mark.parametrize("b, h, d, team", [(64, 8, 128, 1), (64, 16, 128, 1), (1, 64, 128, 1), (8, 64, 128, 2),
                                            (64, 64, 128, 4), (64, 60, 128, 4), (64, 128, 128, 8), (1, 128, 256, 1)])
def test_teams_are_as_large_as_rows_fill_and_merging_allows(b, h, d, team):
    """K and V are read once for a team's rows; one block merges these of all parts of a sequence."""
    p = plan(b=b, h=h, hkv=1, d=d)
    assert p.constants["team"] == p.launches[0].constants["TEAM"] == team
    assert p.launches[0].grid[0] == -(-h // (16 * team))


@pytest.mark.parametrize("lengths", [[0], [1, 0, 0], [1000, 3, 16, 17, 0, 900], [5] * 40], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 5, 64, 1000])
def test_the_shares_are_equal_and_leave_nothing_out(lengths, groups):
    shares = stretches(plan(b=len(lengths), groups=groups, **SMALL), lengths)
    rounds = [max(-(-n // 16), 1) for n in lengths]
    taken = [(b, first + i) for share in shares for b, first, count, _ in share for i in range(count)]
    assert taken == [(b, i) for b, n in enumerate(rounds) for i in range(n)]
    sizes = [sum(count for *_, count, _ in share) for share in shares]
    assert set(sizes[:-1]) <= {max(sizes)} and max(sizes) == -(-sum(rounds) // min(groups, MOST_PARTS * len(lengths)))
    assert all(whole == (count == rounds[b]) for share in shares for b, _, count, whole in share)


def test_what_cannot_be_planned_is_refused_in_a_sentence():
    with pytest.raises(Unsupported, match="keys must be 16 or 32, got 48"):
        plan(keys=48)
    with pytest.raises(Unsupported, match="at least 2 stages"):
        plan(stages=1)
    for warps, team in ((8, 3), (32, 2)):
        with pytest.raises(Unsupported, match=f"team must divide the {warps} warps into at most 15 teams, got {team}"):
            plan(d=16, warps=warps, stages=2, team=team)
    with pytest.raises(Unsupported, match="do not fit"):
        plan(d=256, warps=8, stages=4)
    with pytest.raises(Unsupported, match=r"rounds of 256 keys, got \d+; choose paged"):
        plan(b=60000, page_size=1 << 16, max_pages=1 << 12)
