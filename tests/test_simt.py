"""The CPU machine: threads that meet, counters to the byte, schedules, and its memory."""
from __future__ import annotations

import mmap
import os
import threading

import ml_dtypes
import numpy as np
import pytest
from simt_launch import kernel, values

from cuattn import plan_attention
from cuattn.cpu import CpuMachine, Schedule, check_schedules
from cuattn.cpu_arena import Arena, OutOfMemory

ELEMENTS = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def launch(machine, entry, grid, block, smem, element="bfloat16", **args):
    """Launches a kernel of collectives.cu."""
    built = kernel("collectives.cu", entry, Element=element)
    machine.launch(built, grid, block, smem, values(machine, **args))


@pytest.fixture(scope="module", params=["forward", "reverse", "shuffle"])
def machine(request):
    """A machine in each thread order, with one process."""
    made = CpuMachine(order=request.param, seed=3, workers=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def forward():
    made = CpuMachine(workers=1)
    yield made
    made.close()


def test_shuffles_and_votes(machine, rng):
    x = rng.standard_normal(64).astype(np.float32)
    out, votes = machine.empty((5, 64), np.float32), machine.empty(64, np.int32)
    with machine.counting() as counted:
        launch(machine, "shuffles", 1, 64, 0, g_in=machine.upload(x), g_out=out, g_votes=votes)
    warps, lane = x.reshape(2, 32), np.arange(32)
    expected = [
        warps[:, (lane + 5) % 32], warps[:, lane ^ 3], warps[:, np.where(lane + 7 < 32, lane + 7, lane)],
        warps[:, np.where(lane >= 7, lane - 7, lane)], warps[:, lane ^ 1],
    ]
    np.testing.assert_array_equal(out, np.stack(expected).reshape(5, 64))
    ballots = ((warps > 0) << lane).sum(1).astype(np.uint32)
    np.testing.assert_array_equal(votes.view(np.uint32).reshape(2, 32), np.repeat(ballots[:, None], 32, 1))
    assert (counted.collectives, counted.barriers) == (2 * 6, 0)


@pytest.mark.parametrize("races, resident", [(False, 1), (True, 1), (True, 2)])
def test_quick_builds_do_what_others_do(monkeypatch, randn, races, resident):
    """Equal bits, counts and traffic of each line: attention by mma.sync, cp.async, shuffles and barriers."""
    done = []
    q, k, v = (randn(1, 40, 2, 64) for _ in range(3))
    for level in ("2", "g"):
        monkeypatch.setenv("CUATTN_CPU_OPTIMIZE", level)
        machine = CpuMachine(workers=1, races=races, resident=resident)
        plan = plan_attention(*map(machine.upload, (q, k, v)), kernel="flash")
        with machine.counting() as counted, machine.tracing() as traced:
            plan.run()
        done.append(([machine.download(out).tobytes() for out in plan.outputs], counted, traced.sites))
        machine.close()
    assert done[0] == done[1]


def test_masked_halves_and_early_exit(machine):
    out = machine.empty(64, np.int32)
    with machine.counting() as counted:
        launch(machine, "masked", 1, 64, 0, g_out=out)
    v = np.arange(32)
    for _ in range(3):
        v[:16] += v[np.arange(16) ^ 8]
    for _ in range(5):
        v[16:] += v[np.arange(16, 32) ^ 4]
    np.testing.assert_array_equal(out, np.tile(v, 2))
    assert counted.barriers == 1
    assert counted.collectives == 2 * (3 + 5 + 1 + 1)


@pytest.mark.parametrize("element", ELEMENTS)
def test_matrix_product(machine, rng, element):
    dtype = ELEMENTS[element]
    a, b = rng.standard_normal((16, 16)).astype(dtype), rng.standard_normal((16, 8)).astype(dtype)
    a[0, :4] = [6e-8, -3e-5, 0.0, -0.0]  # float16 denormals
    c = rng.standard_normal((16, 8)).astype(np.float32)
    d = machine.empty((2, 16, 8), np.float32)
    with machine.counting() as counted:
        launch(machine, "product", 1, 32, 1024, element, g_a=machine.upload(a),
               g_bt=machine.upload(b.T.copy()), g_b=machine.upload(b), g_c=machine.upload(c), g_d=d)
    expected = c.copy()
    for k in range(16):  # every product is exact in float32, so this is the machine's own sum
        expected += a[:, k, None].astype(np.float32) * b[None, k].astype(np.float32)
    np.testing.assert_array_equal(d[0], expected)
    np.testing.assert_array_equal(d[1], expected)
    assert counted.mma == 2


def test_product_of_special_numbers(forward):
    a, b = np.zeros((16, 16), np.float16), np.eye(16, 8, dtype=np.float16)
    a[:4, 0] = [np.inf, -np.inf, np.nan, 6e-8]
    d = forward.empty((2, 16, 8), np.float32)
    launch(forward, "product", 1, 32, 1024, "float16", g_a=forward.upload(a), g_bt=forward.upload(b.T.copy()),
           g_b=forward.upload(b), g_c=forward.upload(np.zeros((16, 8), np.float32)), g_d=d)
    np.testing.assert_array_equal(d[0, :4, 0], a[:4, 0].astype(np.float32))


def test_named_barriers(machine):
    x = np.arange(9 * 32, dtype=np.int32)
    out = machine.empty((9, 32), np.int32)
    with machine.counting() as counted:
        launch(machine, "pipeline", 1, 64, 256, g_in=machine.upload(x), g_out=out, steps=9)
    np.testing.assert_array_equal(out, x.reshape(9, 32)[:, ::-1])
    assert counted.barriers == 9 + 7


def test_atomics(machine, rng):
    x = rng.integers(0, 1000, 5 * 64).astype(np.int32)
    counts, top = machine.upload(np.zeros(8, np.int32)), machine.upload(np.zeros(1, np.int32))
    total, ticket = machine.upload(np.zeros(1, np.float32)), machine.upload(np.zeros(1, np.uint32))
    last = machine.empty(1, np.int32)
    with machine.counting() as counted:
        launch(machine, "atomics", 5, 64, 0, g_in=machine.upload(x), g_count=counts, g_max=top, g_sum=total,
               g_ticket=ticket, g_last=last)
    np.testing.assert_array_equal(counts, np.bincount(x % 8, minlength=8))
    assert (top[0], total[0], ticket[0], last[0]) == (x.max(), 320, 5, 7)
    assert counted.atomics == 3 * 320 + 5


@pytest.mark.parametrize("copies", ["late", "eager"])
def test_bytes_are_counted_exactly(forward, copies):
    x = np.arange(64 * 4, dtype=np.uint32).reshape(64, 4)
    out = forward.empty((64, 4), np.uint32)
    with forward.counting() as counted, forward.schedule(async_copies=copies):
        launch(forward, "staged", 1, 64, 1024, g_in=forward.upload(x), g_out=out, rows=37)
    x[37:] = 0
    np.testing.assert_array_equal(out, x[::-1])
    assert (counted.launches, counted.blocks, counted.barriers) == (1, 1, 1)
    assert (counted.bytes_loaded, counted.bytes_stored, counted.bytes_async) == (37 * 16, 64 * 16, 37 * 16)


def test_zero_filled_copy_never_reads(forward):
    empty = forward.empty((0, 4), np.uint32)
    out = forward.empty((64, 4), np.uint32)
    launch(forward, "staged", 1, 64, 1024, g_in=empty, g_out=out, rows=0)
    assert not out.any()


def test_grid_coordinates_and_offsets_past_4_gib(machine):
    far = 900_000_000  # int32 elements between blocks; only the first 128 bytes of each stretch are touched
    out = machine.empty((6, far), np.int32, poison=False)
    launch(machine, "coordinates", (3, 1, 2), 32, 0, g_out=out, far=np.int64(far))
    np.testing.assert_array_equal(out[:, :32], np.arange(6)[:, None] * 1000 + np.arange(32))
    assert out.nbytes > 20e9


def test_arithmetic_is_the_devices(forward):
    one = np.float32(1 + 2**-12)
    x = np.array([one, one, -1, 1.5e-38], np.float32)
    out = forward.empty(4, np.float32)
    launch(forward, "arithmetic", 1, 32, 0, g_in=forward.upload(x), g_out=out)
    assert out[0] == one * one - np.float32(1)  # rounded twice: not fused
    assert out[1] == 0  # a denormal result is flushed
    assert (out[2], out[3]) == (one, one)


def test_workers_share_a_launch(rng):
    x = rng.integers(0, 1000, 7 * 64).astype(np.int32)
    results = []
    for workers in (1, 3):
        m = CpuMachine(workers=workers)
        counts, last, top = (m.upload(np.zeros(n, np.int32)) for n in (8, 1, 1))
        total, ticket = m.upload(np.zeros(1, np.float32)), m.upload(np.zeros(1, np.uint32))
        with m.counting() as counted:
            launch(m, "atomics", 7, 64, 0, g_in=m.upload(x), g_count=counts, g_max=top, g_sum=total,
                   g_ticket=ticket, g_last=last)
        results.append((counts.tolist(), last[0], counted))
        m.close()
    assert results[0] == results[1]
    assert results[0][2].launches == 1 and results[0][2].blocks == 7


def test_two_machines_at_once(forward):
    other = CpuMachine(order="reverse", workers=1)
    x = np.arange(256, dtype=np.uint32).reshape(64, 4)
    outs = {}

    def work(m, scale):
        out = outs[m] = m.empty((64, 4), np.uint32)
        for _ in range(20):
            launch(m, "staged", 1, 64, 1024, g_in=m.upload(x * scale), g_out=out, rows=64)

    threads = [threading.Thread(target=work, args=(m, i + 1)) for i, m in enumerate((forward, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(outs[forward], x[::-1])
    np.testing.assert_array_equal(outs[other], 2 * x[::-1])
    with pytest.raises(ValueError, match="array: expected one of this CPU machine"):
        forward.tensor(outs[other])
    other.close()


def test_check_schedules_accepts_a_right_kernel(forward):
    x = forward.upload(np.arange(256, dtype=np.uint32).reshape(64, 4))
    out = forward.empty((64, 4), np.uint32)
    def run():
        launch(forward, "staged", 1, 64, 1024, g_in=x, g_out=out, rows=50)

    check_schedules(forward, run, {"out": out})
    assert forward.schedule_now == Schedule()


# ---- memory


def test_fresh_memory_is_nan_and_returns(forward):
    before = forward.arena.used
    first = forward.empty((1000, 3), "bfloat16")
    assert np.isnan(first.astype(np.float32)).all()
    address = first.ctypes.data
    view = first[10:, 1]
    del first
    assert forward.arena.used > before
    del view
    assert forward.arena.used == before
    again = forward.empty(3000, np.float16)
    assert again.ctypes.data == address
    assert np.isnan(again).all()


def test_freed_memory_goes_back_to_the_system():
    arena = Arena(1 << 30)
    blocks = os.fstat(arena.fd).st_blocks
    array = arena.allocate(1 << 24, np.uint8)
    assert os.fstat(arena.fd).st_blocks * 512 >= 1 << 24
    del array
    assert not hasattr(mmap, "MADV_REMOVE") or os.fstat(arena.fd).st_blocks == blocks


def test_arena_joins_what_is_freed():
    """The first page stays empty, and every array takes a page more than it fills."""
    arena = Arena(257 * mmap.PAGESIZE)
    page = mmap.PAGESIZE
    parts = [arena.allocate(page * 15, np.uint8) for _ in range(16)]
    with pytest.raises(OutOfMemory, match="no free range"):
        arena.allocate(1, np.uint8)
    for i in (3, 5, 4, 0, 15, 14):
        parts[i] = None
    assert arena.allocate(page * 47, np.uint8).nbytes == page * 47
    with pytest.raises(OutOfMemory):
        arena.allocate(page * 63, np.uint8)
    parts.clear()
    most = arena.size - 2 * page
    assert arena.allocate(most, np.uint8, poison=False).nbytes == most


def test_tensors(forward):
    x = forward.upload(np.zeros((2, 3, 4, 8), np.float16))
    t = forward.tensor(x.transpose(0, 2, 1, 3))
    assert (t.shape, t.strides, t.dtype) == ((2, 4, 3, 8), (96, 8, 32, 1), "float16")
    assert forward.tensor(x[:1]).strides == (0, 32, 8, 1)
    strange = np.lib.stride_tricks.as_strided(x, (1, 3, 4, 8), (1 << 60, 64, 16, 2))
    assert forward.tensor(strange).strides == (0, 32, 8, 1)
    assert forward.tensor(x[..., :1]).strides[-1] == 1
    low, high = forward.tensor(x[:, ::-1]).extent
    assert high - low == x.nbytes
    empty = forward.tensor(forward.empty((0, 8), np.float16))
    assert empty.extent[0] == empty.extent[1]
    with pytest.raises(ValueError, match="contiguous last dimension, got stride 8"):
        forward.tensor(x.swapaxes(2, 3))
    with pytest.raises(ValueError, match="use machine.upload"):
        forward.tensor(np.zeros(3))
    with pytest.raises(ValueError, match="got list"):
        forward.tensor([1, 2])


@pytest.mark.parametrize("grid, block, text", [((0, 1, 1), 32, "grid: expected"), (1, 0, "block: expected")])
def test_empty_grids_are_refused(forward, grid, block, text):
    with pytest.raises(ValueError, match=text):
        launch(forward, "masked", grid, block, 0, g_out=forward.empty(64, np.int32))


def test_settings_are_checked(monkeypatch):
    with pytest.raises(ValueError, match="order: expected one of forward, reverse, shuffle, got 'backward'"):
        CpuMachine(order="backward")
    with pytest.raises(ValueError, match="async_copies: expected 'late' or 'eager'"):
        CpuMachine(async_copies="never")
    monkeypatch.setenv("CUATTN_CPU_WORKERS", "many")
    with pytest.raises(ValueError, match="CUATTN_CPU_WORKERS: expected a whole number"):
        CpuMachine()
