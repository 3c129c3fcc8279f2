"""Of `flash_hopper` alone: rings that go round, tiles that differ, arrays that no tensor map takes."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_prefill import run

import cuattn
from cuattn.cpu import check_schedules
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.flash_hopper import _section
from cuattn.kernels.shapes import AttentionShape

H200 = for_arch("sm_90a")


@pytest.mark.parametrize("constants", [
    {"block_m": 128, "block_n": 16, "stages": 1}, {"block_m": 128, "block_n": 48, "stages": 3},
    {"block_m": 192, "block_n": 64, "stages": 2, "turns": True},
], ids=str)
def test_tiles_and_rings(machine, randn, constants):
    """A ring of one stage, one that goes round several times and one that is never full."""
    q, k, v = randn(1, 200, 2, 72), randn(1, 260, 1, 72), randn(1, 260, 1, 72)
    run(machine, "flash_hopper", q, k, v, causal=True, constants=constants)


@pytest.mark.parametrize(("d", "turns", "heads"), [
    (64, False, 1), (64, True, 1), (256, True, 1), (64, True, 5),
])
def test_equal_bits_where_rings_go_round(cpu, randn, d, turns, heads):
    """With five heads there are more tiles than multiprocessors: a block takes several, in any schedule others."""
    q, k, v = (cpu.upload(randn(1, length, heads, d)) for length in (140, 300, 300))
    p = cuattn.plan_attention(q, k, v, causal=True, kernel="flash_hopper",
                              constants={"block_m": 128, "block_n": 32, "turns": turns})
    assert p.plan.launches[0].grid[0] == min(2 * heads, cpu.device.sms)
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


@pytest.mark.parametrize("b", [1, 13])
def test_every_tile_is_taken_once_in_sections_of_heads(machine, randn, b):
    """Sections that are not full, blocks that take many tiles, and runs one after the other: numbers begin anew."""
    q, k, v = randn(b, 140, 3, 8), randn(b, 150, 3, 8), randn(b, 150, 3, 8)
    p, *_ = run(machine, "flash_hopper", q, k, v, causal=True, constants={"block_m": 128, "block_n": 32})
    first = [machine.download(x).copy() for x in p.outputs]
    for x in p.outputs:
        machine.poison(x)
    p.run()
    machine.synchronize()
    assert all((machine.download(x).view(np.uint8) == y.view(np.uint8)).all() for x, y in zip(p.outputs, first))


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 300), st.sampled_from((1, 4, 8)))
def test_sections_have_whole_groups_and_enough_to_do(b, hkv, tiles, group):
    """Long tiles come first in a section, so it must have short ones enough that blocks can end together."""
    shape = AttentionShape(b, group * hkv, hkv, 128 * tiles, 128 * tiles, 128, "bfloat16", True)
    section, heads = _section(shape, 132, 128), b * group * hkv
    assert section % group == 0
    assert section * tiles * (tiles + 1) // 2 >= 132 * tiles
    last = (heads - 1) % section + 1
    assert section >= heads or 3 * last > section or heads > 8 * section  # then the last one matters little
    assert _section(replace(shape, causal=False), 132, 128) == 1


@pytest.mark.parametrize(("m", "window"), [(300, (-1, -1)), (200, (16, 0))])
def test_tiles_of_queries_that_see_no_key(cpu, randn, m, window):
    """They are written by the warp that gives orders; all others never hear of them."""
    q, k, v = (cpu.upload(randn(1, length, 2, 72)) for length in (m, 40, 40))
    p = cuattn.plan_attention(q, k, v, causal=window[0] < 0, window_size=window, kernel="flash_hopper",
                              constants={"block_m": 128, "block_n": 32})
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})
    unseen = m - 40
    assert not o[:, :unseen].any()
    assert np.isneginf(lse[:, :, :unseen]).all()
    cuattn.compare.check_attention(*(cpu.download(x) for x in (q, k, v, o, lse)), causal=window[0] < 0,
                                   window_size=window).raise_if_bad()


def test_every_stage_is_given_back_as_often_as_it_is_filled(cpu, randn):
    """Nothing is copied twice, nothing for a tile that no row sees, and each product is issued once."""
    q, k, v = (cpu.upload(randn(1, n, 1, 64)) for n in (192, 640, 640))
    p = cuattn.plan_attention(q, k, v, kernel="flash_hopper", constants={"block_m": 192, "block_n": 64})
    with cpu.counting() as counted:
        p.run()
    assert counted.bytes_loaded == (192 + 2 * 640) * 128
    assert counted.wgmma == 3 * 10 * (4 + 4)  # warpgroups, tiles, steps of 16 along D and along the keys


@given(st.integers(1, 32), st.integers(1, 100_000), st.integers(0, 100_000), st.booleans())
def test_every_plan_fits(d, m, n, causal):
    shape = AttentionShape(2, 4, 2, m, n, 8 * d, "bfloat16", causal)
    launch, = ROWS["flash_hopper"].plan(shape, H200).launches
    assert launch.smem_bytes <= H200.smem_per_block
    block_m = launch.constants["BLOCK_M"]
    assert launch.grid[0] == min(H200.sms, -(-m // block_m) * 8)
    assert launch.block == 2 * block_m + 128


@pytest.mark.parametrize(("b", "m", "causal", "rows"), [
    (1, 64, False, 128), (32, 384, False, 192), (32, 512, True, 128), (16, 8192, True, 192),
    (1, 192, True, 128),
])
def test_tiles_fit_the_queries(b, m, causal, rows):
    """192 rows are faster a row; 128 where fewer go past the end or the diagonal, or each gets a block."""
    launch, = ROWS["flash_hopper"].plan(AttentionShape(b, 8, 8, m, m, 64, "bfloat16", causal), H200).launches
    assert launch.constants["BLOCK_M"] == rows


@pytest.mark.parametrize(("constants", "said"), [
    ({"block_m": 64}, "block_m must be 128 or 192, block_n a multiple of 16 up to 256 .* got block_m=64"),
    ({"block_n": 40}, "got block_m=128, block_n=40"),
    ({"stages": 4}, "4 stages of 128 keys and 128 queries at head dim 128 need 295936 bytes .* choose sm"),
])
def test_constants_that_make_no_sense_are_refused(constants, said):
    with pytest.raises(Unsupported, match=said):
        ROWS["flash_hopper"].plan(AttentionShape(1, 1, 1, 512, 512, 128, "float16"), H200, constants)


def test_an_array_that_no_tensor_map_takes_is_refused_in_a_sentence(machine, randn):
    one = machine.upload(randn(1, 1, 2, 64))
    repeated, q = machine.xp.broadcast_to(one, (1, 65, 2, 64)), machine.upload(randn(1, 65, 2, 64))
    with pytest.raises(Unsupported, match="hopper: k: expected strides of positive multiples of 16 bytes"):
        cuattn.plan_attention(q, repeated, q, kernel="flash_hopper")


def test_heads_of_a_fused_projection_need_no_copy(machine, randn):
    """Views with strides of their own, as long as these are multiples of 16 bytes."""
    fused = machine.upload(randn(1, 150, 3, 2, 72))
    p = cuattn.plan_attention(*(fused[:, :, i] for i in range(3)), causal=True, kernel="flash_hopper")
    p.run()
    machine.synchronize()
    host = [machine.download(x) for x in (*(fused[:, :, i] for i in range(3)), *p.outputs)]
    cuattn.compare.check_attention(*(np.ascontiguousarray(x) for x in host[:3]), *host[3:],
                                   causal=True).raise_if_bad()
