"""mbarriers: a ring of stages is right under every schedule; each planted fault is said with its place."""
from __future__ import annotations

import re

import numpy as np
import pytest
from bulk_model import SCHEDULES, in_shared, line_marks, run

from cuattn.cpu import CpuMachine, check_schedules
from cuattn.machine import DeviceError, RaceError

TILES, ROWS, COLS, SMEM = 8, 8, 64, 3 * 1024 + 64
FAULTS = ("NONE", "TOO_FEW", "TOO_MANY", "NO_EXPECT", "NO_FULL_WAIT", "NO_EMPTY_WAIT", "NO_ARRIVAL",
          "TWO_ARRIVALS", "WRONG_PARITY", "UNFENCED", "UNORDERED_INIT", "EXTRA_TILE")
WHOLE = 65536 + 64  # shared memory of the other kernels
BEFORE_FIRST = "missed phase: this wait means the phase before the first of the mbarrier"


@pytest.fixture(scope="module")
def own():
    """A CPU machine that looks for races."""
    made = CpuMachine(workers=1, races=True, step_limit=1 << 24)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain():
    """One that does not: what shows without."""
    made = CpuMachine(workers=1, races=False, step_limit=1 << 24)
    yield made
    made.close()


@pytest.fixture
def x(rng):
    """Tiles, and one more than the consumers take."""
    return rng.integers(0, 60000, ((TILES + 1) * ROWS, COLS)).astype(np.uint16)


def column_sums(x: np.ndarray) -> np.ndarray:
    out = np.zeros(COLS, np.uint32)
    for row in x[:TILES * ROWS].astype(np.uint32):
        out = out * np.uint32(31) + row
    return out


def ring(machine, x, fault: str = "NONE"):
    """(launch, out) of the ring on a machine."""
    out, mapped = machine.empty(COLS, np.uint32), machine.tensor_map(machine.upload(x), (ROWS, COLS), 128)
    return lambda: run(machine, "ring", 1, 96, SMEM, {"map": mapped, "g_out": out, "tiles": TILES,
                                                      "fault": FAULTS.index(fault)}), out


def failures(machine, launch) -> list[DeviceError]:
    """The error under every schedule."""
    found = []
    for schedule in SCHEDULES:
        with machine.schedule(**schedule), pytest.raises(DeviceError) as caught:
            launch()
        found.append(caught.value)
    return found


def test_prim_ring(machine, x):
    launch, out = ring(machine, x)
    with machine.counting() as counted:
        launch()
    np.testing.assert_array_equal(machine.download(out), column_sums(x))
    if counted:
        assert (counted.bytes_loaded, counted.bytes_async) == (TILES * ROWS * COLS * 2,) * 2


def test_prim_hand_over(machine):
    numbers, out = np.arange(32, dtype=np.uint32), machine.empty(32, np.uint32)
    run(machine, "hand_over", 1, 64, WHOLE,
        {"g_in": machine.upload(numbers), "g_out": out, "arrive_early": 0})
    np.testing.assert_array_equal(machine.download(out), numbers[::-1])


@pytest.mark.parametrize("which", ["own", "plain"])
def test_equal_bits_under_every_schedule(request, x, which):
    launch, out = ring(request.getfixturevalue(which), x)
    check_schedules(request.getfixturevalue(which), launch, {"out": out})
    np.testing.assert_array_equal(out, column_sums(x))


# What a fault may be called, by who comes first; each with the marks of the lines that it names.
CALLED = {
    "TOO_FEW": [("512 bytes more than were announced have come to", ["produced"])],
    "TOO_MANY": [("lacks 0 of 1 arrivals and 512 of the bytes announced", ["full"])],
    "NO_EXPECT": [("missing: a wait for phase 1 of the mbarrier at byte 3072", ["produced", "consumed"])],
    "NO_FULL_WAIT": [("missing: a wait for phase 0 of the mbarrier at byte 3072", ["produced", "consumed"]),
                     ("is over although nobody has waited for phase 0: a wait is missing", ["given back"]),
                     (BEFORE_FIRST, ["empty begins"])],
    "NO_EMPTY_WAIT": [("more arrivals at the mbarrier at byte 3072", []),
                      ("missing: a wait for phase 0 of the mbarrier at byte 3072", ["produced"])],
    "NO_ARRIVAL": [("which lacks 1 of 64 arrivals", ["full", "empty begins"])],
    "TWO_ARRIVALS": [("missing: a barrier that both reach, in between", ["produced", "consumed"])],
    "WRONG_PARITY": [("missing: a barrier that both reach, in between", ["produced", "consumed"]),
                     ("missing: a wait for phase 0 of the mbarrier", ["produced", "consumed"]),
                     (BEFORE_FIRST, [])],
    "UNFENCED": [("missing: fence_mbarrier_init() after its initialisation", ["produced"])],
    "UNORDERED_INIT": [("is not initialised (yet)", []),
                       ("missing: a barrier that both reach, in between", ["full"])],
    "EXTRA_TILE": [("nobody waited for the bulk copy issued here, which completes phase 2 of", ["produced"])],
}


@pytest.mark.parametrize("fault", CALLED)
def test_faults_are_named_with_their_place(own, x, fault):
    for error in failures(own, ring(own, x, fault)[0]):
        text = str(error)
        assert text.startswith("ring: ")
        marks = [marks for said, marks in CALLED[fault] if said in text]
        assert marks, text
        assert {str(line) for line in line_marks(*marks[0])} <= set(re.findall(r"bulk\.cu:(\d+)", text)), text
        assert isinstance(error, RaceError) == ("race in shared memory" in text)


@pytest.mark.parametrize("fault", [name for name in CALLED if name not in ("TWO_ARRIVALS", "UNORDERED_INIT")])
def test_most_show_without_looking_for_races(plain, x, fault):
    failures(plain, ring(plain, x, fault)[0])


def test_a_deadlock_names_barriers_and_what_they_lack(own, x):
    launch, _ = ring(own, x, "TOO_MANY")
    with pytest.raises(DeviceError) as caught:
        launch()
    text, (wait, begins) = str(caught.value), line_marks("full", "empty begins")
    assert text.startswith("ring: deadlock in block (0,0,0): every live thread waits\n")
    barrier = ("for phase 0 of the mbarrier at byte {} of shared memory (initialised at bulk.cu:{}), "
               "which lacks ")
    assert (f"\n  warp 2, lanes ffffffff wait at bulk.cu:{wait} {barrier.format(3072, begins - 1)}"
            "0 of 1 arrivals and 512 of the bytes announced") in text
    assert re.search(r"warp 0, lanes 00000001 wait at bulk\.cu:\d+ "
                     + re.escape(f"{barrier.format(3096, begins)}64 of 64 arrivals"), text)


MISUSES = (
    ("the mbarrier at byte 65536 of shared memory is not initialised (yet)", "arrived"),
    ("is initialised a second time", "again"),
    ("an mbarrier for 0 arrivals: expected 1 to 1048575", "for none"),
    ("more arrivals at the mbarrier at byte 65536 of shared memory (initialised at bulk.cu:", "twice"),
    ("1048576 bytes announced to the mbarrier at byte 65536", "too much"),
    ("parity 2: expected 0 or 1", "of two"),
    ("misaligned write of 1024 bytes at byte 64 of shared memory", "copied"),
    ("write of 1024 bytes at byte 65152 of shared memory, which has 65600", "copied"),
    ("nobody waited for the bulk copy issued here, which completes phase 0 of", "copied"),
    ("the block ends while the mbarrier at byte 65536 of shared memory", None),
    ("something has been written over the mbarrier at byte 65536", None),
)


@pytest.mark.parametrize("kind", range(len(MISUSES)), ids=lambda kind: MISUSES[kind][0][:30])
def test_misuse(own, x, kind):
    said, mark = MISUSES[kind]
    mapped = own.tensor_map(own.upload(x), (ROWS, COLS), 128)
    for copies in ("late", "eager"):
        with own.schedule(async_copies=copies), pytest.raises(DeviceError) as caught:
            run(own, "misuse", 1, 32, WHOLE, {"map": mapped, "kind": kind})
        assert said in str(caught.value), str(caught.value)
        assert mark is None or f"bulk.cu:{line_marks(mark)[0]}" in str(caught.value), str(caught.value)


def test_a_missed_phase_is_an_error_and_no_hang(own):
    (line,) = line_marks("missed")
    for error in failures(own, lambda: run(own, "miss_a_phase", 1, 64, WHOLE, {"sync": 0})):
        said = str(error)
        assert re.search(r"missed phase: this wait means phase 0 of the mbarrier at byte 65536 of shared "
                         r"memory \(initialised at .*\), but phase 2 is already under way", said), said
        assert said.endswith(f"thread (32,0,0) of block (0,0,0) at bulk.cu:{line}")


def test_whoever_knows_of_two_phases_means_the_third(own):
    """A barrier has told thread 32 that two phases are over: its parity means the next, which never ends."""
    for error in failures(own, lambda: run(own, "miss_a_phase", 1, 64, WHOLE, {"sync": 1})):
        assert "wait at bulk.cu" in str(error) and "for phase 2 of the mbarrier" in str(error)


def sums_in_turn(x: np.ndarray, tiles: int) -> np.ndarray:
    """What the two warps of `turns` add up."""
    out = np.zeros((2, 32), np.uint32)
    for n in range(tiles):
        tile = in_shared(x, (n * ROWS, 0), (ROWS, COLS), 128).view(np.uint16).reshape(-1, 32)
        for part in tile.astype(np.uint32):
            out[n % 2] = out[n % 2] * np.uint32(31) + part
    return out.reshape(-1)


def test_prim_turns(machine, x):
    out = machine.empty(64, np.uint32)
    mapped = machine.tensor_map(machine.upload(x), (ROWS, COLS), 128)
    run(machine, "turns", 1, 96, SMEM, {"map": mapped, "g_out": out, "tiles": TILES + 1, "ordered": 1})
    np.testing.assert_array_equal(machine.download(out), sums_in_turn(x, TILES + 1))


def test_whoever_skips_a_phase_must_know_that_it_is_over(own, x):
    """Named barriers tell it; without them its parity may be taken for the phase before."""
    out, mapped = own.empty(64, np.uint32), own.tensor_map(own.upload(x), (ROWS, COLS), 128)

    def launch(ordered):
        run(own, "turns", 1, 96, SMEM, {"map": mapped, "g_out": out, "tiles": TILES + 1, "ordered": ordered})

    check_schedules(own, lambda: launch(1), {"out": out}, seeds=range(4))
    for error in failures(own, lambda: launch(0)):
        assert "missed phase: " in str(error) or "missing: a wait for phase " in str(error), str(error)


def test_arrivals_release_and_waits_acquire(own):
    source, out = own.upload(np.arange(32, dtype=np.uint32)), own.empty(32, np.uint32)
    def launch(early):
        run(own, "hand_over", 1, 64, WHOLE, {"g_in": source, "g_out": out, "arrive_early": early})

    check_schedules(own, lambda: launch(0), {"out": out})
    for error in failures(own, lambda: launch(1)):
        assert isinstance(error, RaceError) and "missing: a barrier that both reach, in between" in str(error)
        lines = re.findall(r"bulk\.cu:(\d+)", str(error))
        assert sorted(map(int, lines)) == line_marks("handed", "taken over")
