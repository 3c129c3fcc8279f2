"""What is particular to `chunked_fused`: where its scores are, how they lie, and what runs side by side."""
from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_prefill import run

import cuattn
from cuattn.cpu import check_schedules
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.base import Cost, Unsupported, ceil_div
from cuattn.kernels.shapes import AttentionShape
from cuattn.reference import visible_keys

KERNEL = "chunked_fused"
CARD = for_arch("sm_90a")
SMALL = {"chunk": 128, "tile_m": 32, "tile_n": 64}
WHERE = [{"scores": scores, "parallel": parallel}
         for scores, parallel in product(("shared", "global"), ("serial", "grid"))]


def plan(shape: AttentionShape, device=CARD, **constants):
    return ROWS[KERNEL].plan(shape, device, constants)


@pytest.mark.parametrize("where", WHERE, ids=str)
def test_every_place_of_the_scores(machine, randn, where):
    """Chunks that divide neither M nor N, the same bits wherever the scores are and however they lie."""
    q, k, v = randn(1, 150, 4, 64), randn(1, 203, 2, 64), randn(1, 203, 2, 64)
    (_, o, lse), (_, turned, lse_turned) = (
        run(machine, KERNEL, q, k, v, causal=True, constants={**SMALL, **where, "layout": layout})
        for layout in ("row", "column"))
    assert (o.view("u2") == turned.view("u2")).all() and (lse == lse_turned).all()


def test_serial_and_grid_give_equal_bits(machine, randn):
    q, k, v = randn(1, 150, 2, 64), randn(1, 203, 2, 64), randn(1, 203, 2, 64)
    results = [run(machine, KERNEL, q, k, v, causal=True, constants={**SMALL, **where})[1:]
               for where in WHERE[:2]]
    assert all((one == other).all() for one, other in zip(*results))


@pytest.mark.parametrize("where", WHERE, ids=str)
def test_empties(machine, randn, where):
    """No keys, no queries, and rows that see none."""
    for m, n in ((5, 0), (0, 5), (100, 30)):
        q, k, v = (randn(1, length, 2, 64) for length in (m, n, n))
        _, o, lse = run(machine, KERNEL, q, k, v, causal=True, constants={**SMALL, **where})
        blind = max(m - n, 0)
        assert (o[:, :blind] == 0).all() and np.isneginf(lse[:, :, :blind]).all()


@pytest.mark.parametrize("constants", [
    {"chunk": 16}, {"chunk": 208, "tile_m": 112, "accumulate": "bfloat16"},
    {"accumulate": "float32", "tile_n": 128},
], ids=str)
def test_chunks_tiles_and_accumulators(machine, randn, constants):
    q, k, v = randn(1, 150, 2, 40), randn(1, 230, 1, 40), randn(1, 230, 1, 40)
    run(machine, KERNEL, q, k, v, causal=True, constants=constants)


def test_equal_bits_under_every_schedule_with_scores_in_memory(cpu, randn):
    q, k, v = (cpu.upload(randn(1, length, 2, 64)) for length in (150, 140, 140))
    p = cuattn.plan_attention(q, k, v, causal=True, kernel=KERNEL, constants={**SMALL, "scores": "global"})
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


def test_scores_by_columns_cost_bank_conflicts_or_sectors(cpu, randn):
    """What a warp reads of a row lies in a few banks only, or in a sector of its own."""

    def traced(kernel, constants):
        q, k, v = (cpu.upload(randn(1, 128, 1, 64)) for _ in range(3))
        planned = cuattn.plan_attention(q, k, v, causal=True, kernel=kernel, constants=constants)
        with cpu.tracing() as trace:
            planned.run()
        return trace.sites

    conflicts, sectors = {}, {}
    for layout in ("row", "column"):
        sites = traced(KERNEL, {**SMALL, "layout": layout})
        conflicts[layout] = sum(site.conflicts for site in sites if site.access.startswith("shared"))
        sites = traced("chunked_unfused", {"tile_m": 128, "tile_n": 128, "layout": layout})
        sectors[layout] = sum(site.sectors for site in sites if site.access == "global load"
                              and site.entry == "chunked_softmax")
    assert conflicts["row"] == 0 and conflicts["column"] > 1000
    assert sectors["row"] == 128 * 8  # 256 bytes of scores a row
    assert sectors["column"] == 128 * 128  # one a score


# --- the plan


@given(st.integers(0, 700), st.integers(0, 700), st.sampled_from([16, 128, 512]), st.booleans())
def test_launches(m, n, chunk, causal):
    """One in all, one a chunk of queries, or two a chunk pair and one at the end."""
    shape, step = AttentionShape(2, 2, 1, m, n, 64, "float16", causal), max(m, 1)
    visible, made = visible_keys(m, n, causal), {}
    for where in WHERE:
        made[tuple(where.values())] = [launch.entry for launch in plan(shape, chunk=chunk, **where).launches]
    assert made["shared", "grid"] == ["chunked_slice"]
    assert made["shared", "serial"] == ["chunked_slice"] * ceil_div(step, chunk)
    for parallel, rows in (("serial", chunk), ("grid", step)):
        expected = []
        for m0 in range(0, step, rows):
            pairs = ceil_div(int(max(visible[m0 : m0 + rows], default=0)), chunk)
            expected += ["chunked_scores", "chunked_pair"] * pairs + ["chunked_finish"]
        assert made["global", parallel] == expected


@given(st.integers(1, 32), st.integers(1, 5000), st.sampled_from([16, 128, 512, 2048]), st.booleans())
def test_slices_are_cut_to_fit(d, m, chunk, causal):
    """As many rows of scores as shared memory takes, on the smallest card too; every query once."""
    shape = AttentionShape(1, 2, 1, m, 4096, 8 * d, "bfloat16", causal)
    for arch in ("sm_80", "sm_89", "sm_90a"):
        try:
            made = plan(shape, for_arch(arch), chunk=chunk, parallel="serial")
        except Unsupported as error:
            assert (arch, chunk) == ("sm_89", 2048) and "choose a smaller chunk" in str(error)
            continue
        tile = made.constants["tile_m"]
        for i, launch in enumerate(made.launches):
            rows = min(chunk, m - i * chunk)
            assert launch.smem_bytes <= for_arch(arch).smem_per_block
            assert (launch.grid[0] - 1) * tile < rows <= launch.grid[0] * tile


def test_each_change_moves_less():
    """The article's order at N = 8192: softmax and P V in one kernel, then no scores in memory at all."""
    shape = AttentionShape(1, 32, 8, 8192, 8192, 128, "float16")

    def cost(kernel, **constants) -> Cost:
        row = ROWS[kernel]
        return row.cost(shape, row.plan(shape, CARD, {"chunk": 512, **constants}))

    unfused = cost("chunked_unfused", tile_m=128, tile_n=128)
    steps = [unfused, *(cost(KERNEL, **where) for where in (WHERE[2], WHERE[0], WHERE[1]))]
    moved = [step.bytes_loaded + step.bytes_stored for step in steps]
    assert 0.3 < 1 - moved[1] / moved[0] < 0.5  # "30 to 50 % of the traffic"
    assert moved[2] == moved[3] < moved[1] / 2
    assert [step.launches for step in steps] == [1040, 528, 16, 1]
    assert steps[2].scratch_bytes == steps[3].scratch_bytes == 0


@pytest.mark.parametrize("constants, match", [
    ({"scores": "registers"}, "scores must be 'shared' or 'global', got 'registers'; choose one"),
    ({"parallel": "streams"}, "parallel must be 'grid' or 'serial', got 'streams'; choose one"),
    ({"layout": "diagonal"}, "layout must be 'row' or 'column', got 'diagonal'; choose one"),
    ({"chunk": 100}, "chunk must be a multiple of 16 and at most 2048, got 100; change it"),
    ({"tile_m": 144}, "tile_m must be a multiple of 16 and at most 128, got 144; change it"),
    ({"tile_n": 48}, "tile_n must be a multiple of 16 that divides the chunk, 512, .* got 48; change it"),
    ({"chunk": 2048, "tile_m": 128}, "128 rows of 2048 scores at head dim 64 need .* bytes of shared memory"),
])
def test_constants_that_make_no_sense(randn, constants, match):
    q = randn(1, 4, 2, 64)
    with pytest.raises(Unsupported, match=f"{KERNEL}: {match}"):
        cuattn.attention(q, q, q, kernel=KERNEL, constants=constants)
