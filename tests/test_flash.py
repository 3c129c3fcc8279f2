"""What is particular to `flash`: any tile that fits, and what the plan chooses."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_prefill import run

from cuattn.devices import CARDS, for_arch, require_supported
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.shapes import AttentionShape
from cuattn.machine import MachineUnavailable

CONSTANTS = ("block_m", "block_n", "warps")


@pytest.mark.parametrize("tile", [(16, 16, 1), (32, 48, 1), (64, 32, 2), (128, 128, 8)], ids=str)
def test_tiles(machine, randn, tile):
    q, k, v = randn(1, 100, 2, 72), randn(1, 131, 1, 72), randn(1, 131, 1, 72)
    run(machine, "flash", q, k, v, causal=True, constants=dict(zip(CONSTANTS, tile)))


def supported_cards():
    for card in CARDS.values():
        try:
            yield require_supported(card)
        except MachineUnavailable:
            continue


@given(st.integers(1, 32), st.integers(1, 100_000), st.integers(1, 100_000), st.booleans())
def test_every_plan_fits_every_card(d, m, n, causal):
    """Every head dim on every card: the shared memory fits, and the grid covers every row once."""
    for card in supported_cards():
        shape = AttentionShape(2, 4, 2, m, n, 8 * d, "bfloat16", causal)
        launch, = ROWS["flash"].plan(shape, card, None).launches
        assert launch.smem_bytes <= card.smem_per_block
        block_m = launch.constants["BLOCK_M"]
        assert (launch.grid[0] - 1) * block_m < m <= launch.grid[0] * block_m
        assert block_m % (16 * launch.constants["WARPS"]) == 0


def test_a_tile_that_does_not_fit_is_refused():
    shape = AttentionShape(1, 1, 1, 512, 512, 128, "float16")
    with pytest.raises(Unsupported, match="need .* bytes of shared memory, RTX 4090 grants .*; choose"):
        ROWS["flash"].plan(shape, for_arch("sm_89"), {"block_m": 128, "block_n": 128})


def test_more_warps_than_a_block_has_threads_for_are_refused():
    shape = AttentionShape(1, 1, 1, 2048, 512, 8, "float16")
    with pytest.raises(Unsupported, match="warps must be at most 32, the threads a block may have, got 64"):
        ROWS["flash"].plan(shape, for_arch("sm_90a"), {"block_m": 1024, "block_n": 16, "warps": 64})
