"""What kernels must not do: each planted fault is reported in one message that says what, who and where."""
from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from simt_launch import KERNELS, kernel, line_of, values

from cuattn.compile import build
from cuattn.cpu import CpuMachine, ScheduleError, check_schedules
from cuattn.machine import DeviceError

SOURCE = KERNELS / "faults.cu"


@pytest.fixture(scope="module")
def machine():
    made = CpuMachine(workers=1, step_limit=1 << 22, races=False)  # what shows without looking for races
    yield made
    made.close()


@pytest.fixture
def arrays(machine):
    """64 ordinary numbers, and an output to poison."""
    return machine.upload(np.arange(128, dtype=np.float32)), machine.empty(64, np.float32)


def line(text: str) -> int:
    return line_of("faults.cu", text)


def launch(machine, entry, grid=1, block=32, smem=0, **args):
    machine.launch(kernel("faults.cu", entry), grid, block, smem, values(machine, **args))


def message(machine, entry, **options) -> str:
    """The error of a launch that must fail."""
    with pytest.raises(DeviceError) as caught:
        launch(machine, entry, **options)
    text = str(caught.value)
    assert text.startswith(f"{entry}: ")
    return text


# ---- missing synchronisation


def test_missing_barrier_before_a_read_shows_as_nan(machine, arrays):
    x, out = arrays
    for order in ("forward", "reverse"):
        machine.poison(out)
        with machine.schedule(order=order):
            launch(machine, "no_barrier_before_read", block=64, smem=256, g_in=x[:64], g_out=out)
        assert np.isnan(out).any()


def test_missing_wait_shows_as_nan_in_late_mode(machine, arrays):
    x, out = arrays
    launch(machine, "no_wait", block=64, smem=256, g_in=x[:64], g_out=out)
    assert np.isnan(out).all()
    with machine.schedule(async_copies="eager"):
        launch(machine, "no_wait", block=64, smem=256, g_in=x[:64], g_out=out)
    np.testing.assert_array_equal(out, x[:64])


def test_a_copy_that_nobody_waits_for_is_named(machine, arrays):
    """Without its commit a wait does not cover it: on a GPU it may land on what has taken its place."""
    x, out = arrays
    with pytest.raises(DeviceError, match=r"cp.async issued here was never waited for.*faults\.cu:\d+"):
        launch(machine, "no_commit", block=64, smem=256, g_in=x[:64], g_out=out)


def test_missing_barrier_before_an_overwrite_depends_on_the_schedule(machine, arrays):
    x, out = arrays
    with pytest.raises(ScheduleError) as caught:
        check_schedules(
            machine,
            lambda: launch(machine, "no_barrier_before_overwrite", block=64, smem=256, g_in=x, g_out=out),
            {"out": out},
        )
    text = str(caught.value)
    assert text.startswith("out depends on the schedule: forward order with late copies and reverse order ")
    assert re.search(r" differ at \(\d+,\) \(\d+ of 64 elements\)", text)
    assert "a barrier is missing before an overwrite" in text


def test_divergent_barrier_names_both_lines(machine, arrays):
    text = message(machine, "divergent", block=64, g_out=arrays[1])
    assert "divergent __syncthreads: 32 threads wait in the one at" in text
    assert f"faults.cu:{line('one of two')} " in text
    assert text.endswith(f"faults.cu:{line('two of two')}")
    text = message(machine, "divergent_on_one_line", block=64, g_out=arrays[1])
    assert "divergent __syncthreads" in text and text.count(f"faults.cu:{line('two calls')}") == 2


def test_half_warp_shuffle_with_a_full_mask(machine):
    out = machine.empty(32, np.int32)
    text = message(machine, "half_warp_leaves", g_out=out)
    assert "a thread exited while lanes 0000ffff of its warp wait for it in a shuffle (mask ffffffff)" in text
    text = message(machine, "half_warp_waits", g_out=out)
    assert "deadlock in block (0,0,0): every live thread waits" in text
    some, others = line("half of them come"), line("the other half")
    assert f"lanes 0000ffff wait at faults.cu:{some} in a shuffle for lanes ffff0000" in text
    assert f"lanes ffff0000 wait at faults.cu:{others} in __syncthreads, which has 16 of 32 threads" in text


@pytest.mark.parametrize("entry, text", [
    ("not_in_mask", "a ballot with mask 0000ffff, which does not name the calling lane 16"),
    ("different_kinds", "__syncwarp meets a shuffle of other lanes of its warp (mask ffffffff)"),
    ("shuffle_from_outside", "shuffle from lane 20, which is not in the mask 0000ffff"),
    ("barrier_counts", "named barrier 3 for 32 threads, but faults.cu:"),
])
def test_misuse_of_collectives(machine, entry, text):
    out = machine.empty(32, np.int32)
    assert text in message(machine, entry, block=64 if entry == "barrier_counts" else 32, g_out=out)


# ---- memory


def test_out_of_bounds_names_buffer_offset_thread_and_line(machine):
    x, out = machine.empty(160, np.float32), machine.empty(128, np.float32)
    at = line("load_global(g_in + at + threadIdx.x)")
    launch(machine, "read_past_end", g_in=x, g_out=out, at=8)
    text = message(machine, "read_past_end", g_in=x, g_out=out, at=35)
    assert text == (
        "read_past_end: read of 16 bytes at byte 640 of g_in, which has 640; "
        f"thread (5,0,0) of block (0,0,0) at faults.cu:{at}"
    )
    text = message(machine, "write_past_end", g_out=x, at=10)
    assert "write of 4 bytes at byte -4 of g_out, which has 640; thread (11,0,0) of block (0,0,0) at " in text
    text = message(machine, "copy_past_end", smem=512, g_in=x, g_out=out, at=40)
    assert "read of 16 bytes at byte 640 of g_in, which has 640; thread (0,0,0)" in text


def test_the_view_that_was_passed_is_the_bound(machine):
    x, out = machine.empty(160, np.float32), machine.empty(128, np.float32)
    text = message(machine, "read_past_end", g_in=x[:128], g_out=out, at=1)
    assert "at byte 512 of g_in, which has 512" in text


def test_misaligned_vector_access(machine, arrays):
    text = message(machine, "misaligned", g_in=arrays[0], g_out=arrays[1])
    assert "misaligned read of 16 bytes at byte 4 of g_in" in text and "at faults.cu:" in text
    assert "misaligned write of 16 bytes at byte 4 of shared memory" in message(
        machine, "shared_misaligned", smem=512, g_out=arrays[1]
    )


def test_shared_memory_has_bounds(machine, arrays):
    text = message(machine, "shared_past_end", smem=100, g_out=arrays[1])
    assert "read of 4 bytes at byte 104 of shared memory, which has 100; thread (13,0,0)" in text
    text = message(machine, "raw_past_shared", smem=100, g_out=arrays[1])
    assert "raw dereference of shared memory, byte 0 of 100; use the functions of prim/smem.cuh; thread (0," in text


def test_raw_dereference_is_a_report_and_nothing_is_lost(machine, arrays):
    x, out = arrays
    launch(machine, "no_wait", block=64, smem=256, g_in=x[:64], g_out=out)
    process = machine._processes[0].process.pid
    text = message(machine, "raw_read", g_in=x, g_out=out)
    assert "raw dereference of device memory, byte 20 of g_in, which has 512; " in text
    assert "use the functions of prim/gmem.cuh" in text
    assert text.endswith("; thread (0,0,0) of block (0,0,0)")
    text = message(machine, "raw_write", g_out=out)
    assert "byte 28 of g_out" in text
    np.testing.assert_array_equal(x, np.arange(128))
    launch(machine, "no_wait", block=64, smem=256, g_in=x[:64], g_out=out)
    assert machine._processes[0].process.pid != process


WILD = 0x123456789000


@pytest.mark.parametrize("entry", ["raw_read", "misaligned"])
def test_several_processes_fail_as_one(entry):
    machine = CpuMachine(workers=3, races=False)
    x, out = machine.upload(np.arange(128, dtype=np.float32)), machine.empty(64, np.float32)
    for _ in range(2):
        assert "of g_in" in message(machine, entry, grid=7, g_in=x, g_out=out)
        launch(machine, "no_wait", grid=7, block=64, smem=256, g_in=x[:64], g_out=out)
    machine.close()


@pytest.mark.parametrize("entry, args, text", [
    ("null_pointer", {"g_null": np.uint64(0)}, "dereference of a null pointer (address 0x0)"),
    ("null_pointer", {"g_null": np.uint64(WILD)}, "dereference of a wild pointer (address 0x123456789000)"),
    ("null_argument", {"g_null": np.uint64(0)}, "write of 4 bytes of global memory at 0, which is not a "),
    ("stack_overflow", {"depth": 100000}, "stack overflow: the thread's local arrays and calls need "),
    ("wide_stack_overflow", {"depth": 400}, "stack overflow: the thread's local arrays and calls need "),
    ("illegal", {}, "an illegal instruction (an unreachable statement reached"),
])
def test_faults(machine, entry, args, text):
    assert text in message(machine, entry, g_out=machine.empty(32, np.int32), **args)


def test_deep_stacks_fit(machine):
    out = machine.empty(32, np.int32)
    launch(machine, "stack_overflow", g_out=out, depth=500)


def test_trap_and_division(machine):
    out = machine.empty(32, np.int32)
    at = line("the table names page 9 of 4")
    text = message(machine, "trapped", g_out=out)
    where = f"thread (5,0,0) of block (0,0,0) at faults.cu:{at}"
    assert text == f"trapped: the table names page 9 of 4; {where}"
    launch(machine, "divide", g_out=out, by=2)
    if sys.platform == "linux" and platform.machine() == "x86_64":
        assert "integer division by zero" in message(machine, "divide", g_out=out, by=0)


# ---- time and processes


def test_waiting_for_another_block_is_caught(machine):
    flag = machine.upload(np.zeros(1, np.int32))
    text = message(machine, "spin", grid=2, g_flag=flag)
    assert "block (0,0,0) took more than 4194304 steps" in text and "blocks run one after another" in text
    with machine.schedule(order="reverse"):
        launch(machine, "spin", grid=2, g_flag=flag)
    assert flag[0] == 1


def test_waiting_for_another_thread_of_the_block_works(machine):
    flag, out = machine.upload(np.zeros(1, np.int32)), machine.upload(np.zeros(1, np.int32))
    launch(machine, "spin_in_block", block=64, g_flag=flag, g_out=out)
    assert out[0] == 1


def test_a_killed_process_is_an_error_and_the_next_launch_works(arrays):
    machine = CpuMachine(workers=1, step_limit=1 << 40)
    flag = machine.upload(np.zeros(1, np.int32))
    threading.Timer(0.3, os.kill, (machine._processes[0].process.pid, signal.SIGKILL)).start()
    with pytest.raises(DeviceError, match=r"process was killed \(signal 9\), likely out of memory"):
        launch(machine, "spin", grid=2, g_flag=flag)
    flag[0] = 1
    launch(machine, "spin", grid=2, g_flag=flag)
    machine.close()


SPINNER = """
    import numpy as np
    from cuattn.compile import build
    from cuattn.cpu import CpuMachine
    machine = CpuMachine(workers=1, step_limit=1 << 40)
    flag = machine.upload(np.zeros(1, np.int32))
    print(machine._processes[0].process.pid, flush=True)
    try:
        machine.launch(build({source!r}, "spin", {{}}, "cpu"), 2, 32, 0, [("g_flag", machine.tensor(flag))])
    except KeyboardInterrupt:
        flag[0] = 1
        machine.launch(build({source!r}, "spin", {{}}, "cpu"), 2, 32, 0, [("g_flag", machine.tensor(flag))])
        print("interrupted", flush=True)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def seconds_of(pid: int) -> float:
    """Processor time a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_children_end_with_an_interrupt_and_with_their_parent(machine, sent):
    build(str(SOURCE), "spin", {}, "cpu")
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SPINNER).format(source=str(SOURCE))],
        cwd=SOURCE.parents[2], stdout=subprocess.PIPE, text=True,
    )
    try:
        child = int(parent.stdout.readline())
        begun = seconds_of(child)
        while seconds_of(child) < begun + 0.5:  # it spins
            time.sleep(0.02)
        parent.send_signal(sent)
        rest = parent.communicate(timeout=60)[0]
    finally:
        parent.kill()
    if sent == signal.SIGINT:
        assert rest == "interrupted\n" and parent.returncode == 0
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_arrays_of_round_sizes_do_not_touch(machine):
    """An access just past the end of one array is not taken for one of the next."""
    first, second = (machine.upload(np.zeros(1 << 14, np.float32)) for _ in range(2))
    ends = sorted(machine.tensor(x).extent for x in (first, second))
    assert ends[0][1] < ends[1][0]
    message = "read of 16 bytes at byte 65536 of g_in, which has 65536"
    with pytest.raises(DeviceError, match=message):
        launch(machine, "read_past_end", g_in=first, g_out=second, at=(1 << 12) - 31)


def test_an_access_before_the_first_array_names_it():
    machine = CpuMachine(workers=1)
    first = machine.empty(160, np.float32)
    text = message(machine, "write_past_end", g_out=first, at=10)
    machine.close()
    assert "write of 4 bytes at byte -4 of g_out, which has 640; thread (11,0,0) of block (0,0,0) at " in text


def test_arguments_that_do_not_fit_the_kernel(machine, arrays):
    x, out = arrays
    with pytest.raises(DeviceError, match="read_past_end takes 3 arguments, got 2"):
        launch(machine, "read_past_end", g_in=x, g_out=out)
    with pytest.raises(DeviceError, match="read_past_end: argument 3 has 8 bytes, expected 4"):
        launch(machine, "read_past_end", g_in=x, g_out=out, at=np.int64(0))
