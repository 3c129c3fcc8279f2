"""Counting by call site: sectors, passes through the banks, and which lanes make one instruction."""
from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from simt_launch import kernel, values

from cuattn.cpu import CpuMachine
from cuattn.cpu_trace import ACCESSES, COLUMNS, SiteCount


@pytest.fixture(scope="module", params=["forward", "reverse", "shuffle"])
def machine(request):
    made = CpuMachine(order=request.param, seed=5, workers=1, races=False)
    yield made
    made.close()


def trace(machine, entry, grid=1, block=32, smem=32768, **args):
    """The call sites of a launch, by access."""
    with machine.tracing() as traced:
        machine.launch(kernel("traffic.cu", entry), grid, block, smem, values(machine, **args))
    return {site.access: site for site in traced.sites}, traced


@pytest.fixture
def numbers(machine):
    """4096 floats on a 32-byte boundary."""
    array = machine.upload(np.zeros(4096, np.float32))
    assert machine.tensor(array).address % 128 == 0
    return array


@pytest.mark.parametrize("first, stride, lanes, sectors", [
    (0, 1, 32, 4),     # neighbours
    (1, 1, 32, 5),     # off by one element
    (0, 2, 32, 8),
    (0, 8, 32, 32),    # a sector each
    (0, 100, 32, 32),
    (5, 0, 32, 1),     # all the same
    (0, 1, 16, 2),     # half of the warp
    (0, 1, 1, 1),
])
def test_sectors_of_a_load(machine, numbers, first, stride, lanes, sectors):
    site = trace(machine, "load4", g_in=numbers, first=first, stride=stride, lanes=lanes)[0]["global load"]
    assert (site.instructions, site.lanes, site.bytes, site.sectors) == (1, lanes, 4 * lanes, sectors)
    assert (site.wavefronts, site.conflicts, site.first, site.end) == (0, 0, 0, 0)
    assert site.file.endswith("traffic.cu") and site.entry == "load4"


def test_sectors_of_wide_loads_and_of_several_warps_and_blocks(machine, numbers):
    vectors = numbers.view(np.uint8)
    for lanes, instructions, sectors in ((64, 2, 32), (33, 2, 17), (32, 1, 16)):
        sites, _ = trace(machine, "load16", block=64, grid=3, g_in=vectors, first=0, stride=1, lanes=lanes)
        site = sites["global load"]
        assert (site.instructions, site.sectors) == (3 * instructions, 3 * sectors)
        assert site.bytes == 3 * 16 * lanes


@pytest.mark.parametrize("entry, first, stride, passes, fewest", [
    ("share4", 0, 1, 1, 1), ("share4", 3, 1, 1, 1), ("share4", 0, 2, 2, 1), ("share4", 0, 3, 1, 1),
    ("share4", 0, 32, 32, 1), ("share4", 0, 33, 1, 1), ("share4", 0, 4, 4, 1),
    ("share2", 0, 1, 1, 1), ("share2", 0, 2, 1, 1), ("share2", 0, 64, 32, 1),
    ("share8", 0, 1, 2, 2), ("share8", 0, 2, 4, 2), ("share8", 0, 16, 32, 2),
    ("share16", 0, 1, 4, 4), ("share16", 0, 2, 8, 4), ("share16", 0, 3, 4, 4), ("share16", 0, 8, 32, 4),
])
def test_passes_through_the_banks(machine, entry, first, stride, passes, fewest):
    sites, _ = trace(machine, entry, block=64, first=first, stride=stride)
    for access in ("shared store", "shared load"):
        site = sites[access]
        assert (site.instructions, site.wavefronts, site.conflicts) == (2, 2 * passes, 2 * (passes - fewest))
        size = int(entry.removeprefix("share"))
        assert (site.first, site.end) == (first * size, (first + 63 * stride + 1) * size)
        assert site.sectors == 0
    assert sites["block barrier"].instructions == 2 and sites["block barrier"].lanes == 64


def test_words_that_lanes_share_are_read_once(machine):
    site = trace(machine, "share4", first=7, stride=0)[0]["shared load"]
    assert (site.wavefronts, site.conflicts) == (1, 0)


@pytest.mark.parametrize("stride, passes", [(16, 4), (144, 4), (32, 8), (128, 32), (256, 32), (272, 4)])
def test_rows_of_a_matrix(machine, stride, passes):
    site = trace(machine, "matrix", stride=stride)[0]["ldmatrix"]
    assert (site.instructions, site.lanes, site.bytes) == (1, 32, 512)
    assert (site.wavefronts, site.conflicts) == (passes, passes - 4)


def test_copies_have_two_sides(machine, numbers):
    sites, _ = trace(machine, "copy16", g_in=numbers.view(np.uint8), lanes=20, first=0, stride=128, swap=0)
    source, target = sites["global copy"], sites["shared copy"]
    assert (source.instructions, source.lanes, source.bytes, source.sectors) == (1, 32, 320, 10)
    assert (target.bytes, target.wavefronts, target.conflicts, target.end) == (512, 4, 0, 512)
    assert sites["copy commit"].instructions == sites["copy wait"].instructions == 1


#: As Nsight Compute 2025.3 counted such copies on an H200: the sectors read from L2 for LDGSTS.BYPASS.
@pytest.mark.parametrize("lanes, first, stride, swap, sectors", [
    (32, 0, 128, 0, 16), (32, 0, 128, 1, 16), (32, 0, 128, 4, 16),  # rows as in global memory, or swizzled
    (32, 16, 128, 0, 32), (32, 32, 128, 0, 16), (32, 64, 128, 0, 16),  # half a sector off, or whole ones
    (32, 0, 144, 0, 24), (32, 144, 144, 0, 24), (32, 576, 144, 0, 24),  # padded by half a sector
    (32, 0, 160, 0, 16), (32, 0, 192, 0, 16), (32, 0, 256, 0, 16),
    (8, 0, 128, 0, 4), (8, 16, 128, 0, 8), (8, 32, 128, 0, 4), (8, 112, 128, 0, 8),
])
def test_a_copy_reads_a_sector_for_each_that_it_fills(machine, numbers, lanes, first, stride, swap, sectors):
    source = trace(machine, "copy16", g_in=numbers.view(np.uint8), lanes=lanes, first=first, stride=stride,
                   swap=swap)[0]["global copy"]
    assert (source.instructions, source.bytes, source.sectors) == (1, 16 * lanes, sectors)


def test_lanes_join_by_visit_and_start_anew_when_all_meet(machine, numbers):
    site = trace(machine, "uneven", g_in=numbers)[0]["global load"]
    assert (site.instructions, site.lanes) == (4, 8 * (1 + 2 + 3) + 32)


def test_atomics_and_launches(machine):
    counts = machine.upload(np.zeros(1, np.int32))
    with machine.tracing() as traced:
        for _ in range(2):
            machine.launch(kernel("traffic.cu", "count"), 3, 64, 0, values(machine, g_count=counts))
    assert counts[0] == 2 * 3 * 64
    assert [(s.launch, s.access, s.instructions, s.lanes) for s in traced.sites] == [
        (0, "global atomic", 6, 192), (1, "global atomic", 6, 192)]
    assert traced.total("lanes", "global atomic") == 384 and traced.total("bytes") == 4 * 384


def test_steps_of_one_block(machine):
    with machine.tracing(block=2) as traced:
        machine.launch(kernel("traffic.cu", "share4"), 3, 64, 1024, values(machine, first=0, stride=1))
    assert sorted((s.warp, s.step, s.ended_by) for s in traced.steps) == [
        (0, 0, "block barrier"), (0, 1, "exit"), (1, 0, "block barrier"), (1, 1, "exit")]
    for step in traced.steps:
        stored, loaded = (128, 0) if step.step == 0 else (0, 128)
        assert (step.shared_bytes_stored, step.shared_bytes_loaded) == (stored, loaded)
        assert bool(step.file) == (step.ended_by != "exit")


def test_processes_that_share_the_blocks_count_as_one():
    machine = CpuMachine(workers=3, races=False)
    array = machine.upload(np.zeros(4096, np.float32))
    site = trace(machine, "load4", grid=7, g_in=array, first=0, stride=1, lanes=32)[0]["global load"]
    machine.close()
    assert (site.instructions, site.sectors) == (7, 28)


def test_nothing_is_traced_outside(machine, numbers):
    _, traced = trace(machine, "load4", g_in=numbers, first=0, stride=1, lanes=32)
    before = Counter(traced.sites)
    args = values(machine, g_in=numbers, first=1, stride=1, lanes=1)
    machine.launch(kernel("traffic.cu", "load4"), 1, 32, 0, args)
    assert Counter(traced.sites) == before and machine.trace is None


def test_every_counter_is_defined():
    assert set(COLUMNS) <= set(SiteCount.__dataclass_fields__)
    assert len(ACCESSES) == 33 and all(ACCESSES.values())
