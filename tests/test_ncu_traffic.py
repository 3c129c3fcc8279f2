"""The CPU machine's counts are those of Nsight Compute on an H200: within 1 %, or as explained here.

A recorded row is worth something for the source it ran on. A row whose source has changed since, or a case
that was never recorded, gives no verdict: it is skipped as stale, because a machine without a GPU cannot
record it again. But if fewer than five kernels are fresh, too little is compared, and that is a failure.
"""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_kernel_traffic import PINNED
from traffic_cases import SUMS

from cuattn.sources import source_hash
from tests.ncu_traffic import ARBITRATION, COMMAND, METRICS, RECORD

FRESH, TOLERANCE = 5, 0.01
ROWS = {(row["case"], row["entry"]): row
        for row in json.loads((Path(__file__).parents[1] / RECORD).read_text(encoding="utf-8"))["rows"]}
ENTRIES = [(case, entry) for case, entries in PINNED.items() for entry in entries]

BOXES = ("A bulk copy fills the rows of its box that lie outside the tensor with zeros. ncu counts them as "
         "sectors that arrived, the CPU machine what was read: of Q 300 rows of 384, of the last tile of "
         "K and V 13 of 64.")
MERGED = ("The compiler merges the loads of four warps' m or l into one of 16 bytes, which takes two passes; "
          "the CPU machine counts loads as the source has them, one pass each.")
SUNK = ("The compiler loads length and page only where there is work, in one warp of the four; in the source "
        "all four load them: 40 sectors a block instead of 34.")
LINES = ("What a cp.async brings is written line by line of global memory, and where a row's padding puts it "
         "half a sector off, each half by itself; the CPU machine counts what the banks alone would need.")

#: Of a case, an entry and a quantity: how often ncu counts what the CPU machine counts once, and why.
EXPLAINED = {
    ("flash_hopper", "flash_hopper", "copy sectors"): (34816 / 31840, BOXES),
    ("standard", "standard_softmax", "shared load passes"): (1 / 2, MERGED),
    ("append", "append", "load sectors"): (34 / 40, SUNK),
    **{(case, entry, "shared copy passes"): (times, LINES) for case, entry, times in (
        ("flash", "flash", 2.456), ("flash causal", "flash", 2.522), ("standard", "standard_scores", 2.382),
        ("standard", "standard_output", 2.738), ("chunked_unfused", "chunked_scores", 2.483),
        ("chunked_unfused", "chunked_output", 2.440), ("chunked_fused", "chunked_slice", 2.480),
        ("chunked_fused, scores in memory", "chunked_scores", 2.406),
        ("chunked_fused, scores in memory", "chunked_pair", 2.498),
        ("chunked_fused, by columns", "chunked_slice", 2.480), ("chunked_atomic", "chunked_max", 2.482),
        ("chunked_atomic", "chunked_add", 2.486), ("paged", "paged", 2.296),
        ("paged, 3 splits", "paged", 1.945), ("paged_gather", "paged", 2.296),
        ("paged_launches", "paged", 2.296), ("paged_launches, by page", "paged", 1.101))},
}


def stale(row: dict | None) -> bool:
    return row is None or row["source"] != source_hash(row["file"])


def near(measured: float, expected: float, whole: float | None = None) -> bool:
    """Within 1 % of `whole`, else of what is expected; nothing is near 0 but 0."""
    return abs(measured - expected) <= TOLERANCE * (expected if whole is None else whole)


def by_ncu(row: dict, quantity: str) -> int:
    return sum(sign * row["ncu"][name] for name, sign in METRICS[quantity].items())


def test_at_least_five_kernels_are_compared():
    fresh = {row["file"] for row in ROWS.values() if not stale(row)}
    assert len(fresh) >= FRESH, f"only {len(fresh)} kernels are as recorded; on a GPU run: {COMMAND}"


@pytest.mark.parametrize("case, entry", ENTRIES)
def test_counts_are_those_of_ncu(case, entry):
    if stale(row := ROWS.get((case, entry))):
        pytest.skip(f"not recorded since the kernel changed; on a GPU run: {COMMAND}")
    counted = dict(zip((name for name, *_ in SUMS), PINNED[case][entry]))
    assert counted.keys() == METRICS.keys()
    for quantity, here in counted.items():
        there = by_ncu(row, quantity)
        both = f"{quantity}: {here} here, {there} by ncu"
        if quantity.endswith("conflicts"):  # NOTE: some passes are lost to arbitration, others in every run
            passes, lost = counted[quantity.replace("conflicts", "passes")], row["ncu"][ARBITRATION]
            assert near(there, here, passes) or here <= there <= here + lost, f"{both}, {lost} lost"
        elif explained := EXPLAINED.get((case, entry, quantity)):
            times, why = explained
            assert near(there, times * here), f"{both}, not {times:.3f} times as many: {why}"
            assert not near(there, here), f"{both}: that needs no explanation any more"
        else:
            assert near(there, here), f"{both}, and nothing explains it"


def test_every_explanation_is_of_something_compared():
    assert {key[:2] for key in EXPLAINED} <= set(ENTRIES)
    assert {key[2] for key in EXPLAINED} <= METRICS.keys()
