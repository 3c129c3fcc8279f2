"""Races: each planted one is reported with both call sites and what is missing, and nothing else is."""
from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest
from simt_launch import kernel, line_of, values

from cuattn.cpu import CpuMachine, ScheduleError, check_schedules
from cuattn.machine import DeviceError, RaceError

SCHEDULES = [
    {"order": order, "seed": seed, "async_copies": copies}
    for (order, seed), copies in product(
        [("forward", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)], ("late", "eager")
    )
]


@pytest.fixture(scope="module")
def machine():
    made = CpuMachine(workers=1, races=True)
    yield made
    made.close()


@pytest.fixture
def x(machine):
    return machine.upload(np.arange(256, dtype=np.float32))


@pytest.fixture
def out(machine):
    return machine.empty(256, np.float32)


def launch(machine, entry, grid=1, block=64, smem=1024, **args):
    machine.launch(kernel("races.cu", entry), grid, block, smem, values(machine, **args))


def clean(machine, entry, **args):
    """No schedule may report anything."""
    for schedule in SCHEDULES:
        with machine.schedule(**schedule):
            launch(machine, entry, **args)


def race(machine, entry, *marks, missing, **args):
    """Every schedule must report the race, between the two marked lines."""
    for schedule in SCHEDULES:
        with machine.schedule(**schedule), pytest.raises(RaceError) as caught:
            launch(machine, entry, **args)
        text = str(caught.value)
        assert text.startswith(f"{entry}: race in shared memory, bytes ")
        assert sorted(map(int, re.findall(r"races\.cu:(\d+)", text))) == sorted(line_of("races.cu", mark) for mark in marks), text
        assert len(re.findall(r"by thread \(\d+,0,0\) at ", text)) == 2 and "of block (0,0,0)" in text
        assert f"missing: {missing}" in text, text


BARRIER, IN_WARP = "a barrier that both reach, in between", "a __syncwarp or a barrier, in between"
WAIT = "the wait of that thread for its copy (cp_async_wait)"


def test_the_whole_sentence(machine, x, out):
    with pytest.raises(RaceError) as caught:
        launch(machine, "read_early", g_in=x, g_out=out, by=32)
    assert str(caught.value) == (
        "read_early: race in shared memory, bytes 128 to 131: write by thread (32,0,0) at races.cu:"
        f"{line_of('races.cu', '// written')} and read by thread (0,0,0) at races.cu:{line_of('races.cu', '// read')}"
        " of block (0,0,0); missing: a barrier that both reach, in between"
    )


@pytest.mark.parametrize("entry, block, races, fine", [
    ("read_early", 64, [(1, IN_WARP), (32, BARRIER)], [0]),
    ("read_after_block_sync", 64, [], [0, 1, 32]),
    ("read_after_warp_sync", 64, [(32, BARRIER)], [0]),
    ("read_after_warp_sync", 32, [], [0, 1, 16]),
    ("read_after_half_warp_sync", 32, [(16, IN_WARP)], [0]),
    ("read_after_shuffle", 32, [(1, IN_WARP)], [0]),
    ("read_after_named_sync", 128, [(64, BARRIER)], [0]),
    ("read_after_a_chain", 96, [(64, BARRIER)], [0, 32]),  # 32: warp 2 knows of warp 0 by way of warp 1
])
def test_reads(machine, x, out, entry, block, races, fine):
    for by, missing in races:
        race(machine, entry, "// written", "// read", missing=missing, block=block, g_in=x, g_out=out, by=by)
    for by in fine:
        clean(machine, entry, block=block, g_in=x, g_out=out, by=by)


def test_overwrites(machine, out):
    race(machine, "overwrite_early", "// readers", "// overwritten", missing="a ", g_out=out)
    clean(machine, "overwrite_after_block_sync", g_out=out)


def test_two_writers(machine, out):
    race(machine, "two_writers", "// writers", "// writers", missing=IN_WARP, g_out=out, by=1)
    clean(machine, "two_writers", g_out=out, by=2)
    clean(machine, "neighbours", g_out=out)


def test_copies(machine, x, out):
    marks = ("// copied", "// used")
    for by in (0, 1, 32):
        race(machine, "copy_used_early", *marks, missing="" if by else WAIT, g_in=x, g_out=out, by=by)
        race(machine, "copy_used_after_barrier", *marks, missing=WAIT, g_in=x, g_out=out, by=by)
        clean(machine, "copy_used_after_both", g_in=x, g_out=out, by=by)
    clean(machine, "copy_used_after_wait", g_in=x, g_out=out, by=0)
    race(machine, "copy_used_after_wait", *marks, missing=IN_WARP, block=32, g_in=x, g_out=out, by=1)
    race(machine, "copy_used_after_wait", *marks, missing=BARRIER, g_in=x, g_out=out, by=32)
    marks = ("// refilled", "// still read")
    race(machine, "copy_over_readers", *marks, missing=BARRIER, g_in=x, g_out=out, sync=0)
    clean(machine, "copy_over_readers", g_in=x, g_out=out, sync=1)


def test_a_ring_of_named_barriers(machine, x, out):
    clean(machine, "ring", g_in=x, g_out=out, full=1, empty=1)
    for full, empty in ((0, 0), (1, 0), (0, 1)):
        race(machine, "ring", "// filled", "// drained", missing=BARRIER, g_in=x, g_out=out, full=full,
             empty=empty)


def test_atomics(machine):
    out = machine.empty(64, np.int32)
    clean(machine, "count_together", g_out=out, sync=1)
    assert (out == 64).all()
    race(machine, "count_together", "// counted", "// read plainly", missing="a ", g_out=out, sync=0)
    clean(machine, "flag", g_out=out, fences=1)
    assert out[0] == 7
    race(machine, "flag", "// posted", "// fetched", missing=BARRIER, g_out=out, fences=0)


def test_blocks_start_afresh(machine, x, out):
    clean(machine, "copy_used_after_both", grid=5, g_in=x, g_out=out, by=32)
    clean(machine, "early_exit", grid=5, g_out=out)
    for resident in (2, 4):
        with machine.schedule(resident=resident):
            clean(machine, "copy_used_after_both", grid=5, g_in=x, g_out=out, by=32)


def test_off_by_default_and_by_environment(monkeypatch):
    monkeypatch.delenv("CUATTN_CPU_RACES", raising=False)
    machine = CpuMachine(workers=1)
    x, out = machine.upload(np.arange(64, dtype=np.float32)), machine.empty(64, np.float32)
    launch(machine, "read_early", g_in=x, g_out=out, by=1)
    machine.races = True
    with pytest.raises(RaceError):
        launch(machine, "read_early", g_in=x, g_out=out, by=1)
    machine.close()
    monkeypatch.setenv("CUATTN_CPU_RACES", "1")
    machine = CpuMachine(workers=1)
    assert machine.races
    machine.close()
    monkeypatch.setenv("CUATTN_CPU_RACES", "yes")
    with pytest.raises(ValueError, match="CUATTN_CPU_RACES: expected 0 or 1, got 'yes'"):
        CpuMachine(workers=1)


# ---- between blocks


@pytest.fixture
def arrive(machine, rng):
    """Runs last_arriver over 6 blocks; returns what `check_schedules` needs, and the right sum."""
    x = machine.upload(rng.standard_normal(6 * 64, dtype=np.float32))
    parts, out = machine.empty(6 * 64, np.float32), machine.empty(64, np.float32)
    count = machine.empty(1, np.int32)

    def run(**how):
        machine.poison(parts)
        count[0] = 0
        launch(machine, "last_arriver", grid=6, g_in=x, g_parts=parts, g_count=count, g_out=out, **how)

    expected = np.zeros(64, np.float32)
    for part in np.asarray(x).reshape(6, 64):
        expected += part
    return run, out, expected


@pytest.mark.parametrize("fence", [1, 2])
def test_a_last_arriver_with_fences_has_equal_bits(machine, arrive, fence):
    run, out, expected = arrive
    check_schedules(machine, lambda: run(fence=fence, reread=1), {"out": out}, seeds=range(8))
    np.testing.assert_array_equal(out, expected)


def test_a_last_arriver_without_a_fence_reads_what_was_there_before(machine, arrive):
    run, out, _ = arrive
    with pytest.raises(ScheduleError, match="out depends on .* 4 blocks in flight .*a fence before"):
        check_schedules(machine, lambda: run(fence=0, reread=1), {"out": out})
    for order in ("forward", "reverse"):
        with machine.schedule(order=order, resident=6):
            run(fence=0, reread=1)
        assert np.isnan(out).all()


def test_a_last_arriver_that_does_not_reread_its_own_part(machine, arrive):
    run, out, _ = arrive
    with pytest.raises(ScheduleError, match="out depends on the schedule"):
        check_schedules(machine, lambda: run(fence=1, reread=0), {"out": out})


def test_blocks_in_flight_may_wait_for_each_other(machine):
    flag, out = machine.upload(np.zeros(1, np.int32)), machine.empty(2, np.int32)
    for order, seed in (("forward", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)):
        flag[0] = 0
        with machine.schedule(order=order, seed=seed, resident=4):
            launch(machine, "wait_for_other_block", grid=4, block=32, g_flag=flag, g_out=out)
        np.testing.assert_array_equal(out, [5, 6])


def test_resident_is_checked():
    with pytest.raises(ValueError, match="resident: expected 1 to 32 blocks, got 33"):
        CpuMachine(resident=33)


def test_errors_in_flight_are_errors(machine, x, out):
    with machine.schedule(resident=3), pytest.raises(RaceError):
        launch(machine, "read_early", grid=4, g_in=x, g_out=out, by=1)
    with machine.schedule(resident=3), pytest.raises(DeviceError, match="of g_in, which has 1024"):
        launch(machine, "last_arriver", grid=6, g_in=x, g_parts=x, g_count=x.view(np.int32), g_out=out,
               fence=1, reread=1)
