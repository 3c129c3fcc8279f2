"""The CPU machine: runs kernels' `.cu` files, built by a C++ compiler, and counts what they do.

It models no time. The kernels run in child processes (`cpu_child.py`), so a fault in one is an exception here
and nothing is lost: arrays live in an arena that parent and children share. Several children share the blocks
of a launch.
"""
from __future__ import annotations

import json
import os
import struct
import threading
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from math import prod

import numpy as np

from cuattn import cpu_child, tensor_map
from cuattn.compile import host_compiler
from cuattn.cpu_arena import POISON, Arena
from cuattn.cpu_process import Process, stop_all
from cuattn.cpu_schedules import Schedule, ScheduleError, check_schedules
from cuattn.cpu_trace import Trace
from cuattn.devices import CPU
from cuattn.machine import (
    Counters,
    DeviceError,
    MachineUnavailable,
    RaceError,
    Tensor,
    check_cluster,
    pack,
)
from cuattn.sanitize import child_environment, sanitizer
from cuattn.tensor_map import TensorMap

__all__ = ["CpuMachine", "Schedule", "ScheduleError", "check_schedules"]

WINDOWS = (0x2000_0000_0000, 0x0600_0000_0000, 0x20_0000_0000)  # where device addresses may lie, far from all
MAX_WORKERS = 8
STEP_LIMIT = 1 << 30


class CpuMachine:
    """The machine protocol of `cuattn.machine` on a CPU.

    Parameters
    ----------
    order, seed, async_copies, resident
        See `Schedule`.
    workers : int, optional
        Processes that share the blocks of a launch. Default: $CUATTN_CPU_WORKERS, else the CPUs there are, at
        most 8.
    step_limit : int, optional
        Steps (loads, atomics and waits) after which a block is taken to wait forever. Default:
        $CUATTN_CPU_STEP_LIMIT, else 2³⁰.
    races : bool, optional
        Whether to look for races in shared memory, which takes 1.1 to 2.6 times as long; `machine.races` may be
        changed at any time. Default: $CUATTN_CPU_RACES (0 or 1), else not.

    Raises
    ------
    MachineUnavailable
        If this system cannot give it the memory it maps.
    """

    name = "cpu"
    xp = np

    def __init__(self, order="forward", seed=0, async_copies="late", resident=1, workers=None,
                 step_limit=None, races=None):
        self.schedule_now = Schedule(order, seed, async_copies, resident)
        self.races = _flag("CUATTN_CPU_RACES") if races is None else bool(races)
        self.trace: Trace | None = None  # what `tracing` fills
        self.workers = _positive("workers", "CUATTN_CPU_WORKERS", workers, min(_cpus(), MAX_WORKERS))
        self.step_limit = _positive("step_limit", "CUATTN_CPU_STEP_LIMIT", step_limit, STEP_LIMIT)
        self.device = CPU
        self.counters = Counters()  # of all launches so far
        try:
            self.arena = Arena.largest()
        except OSError as error:
            raise MachineUnavailable(f"the CPU machine cannot map its memory: {error}") from error
        self._window = None
        self._processes: list[Process] = []
        self._lock = threading.RLock()
        self._pid = os.getpid()
        weakref.finalize(self, stop_all, self._processes)
        self._start(1)  # also settles where device addresses lie

    # ---- memory

    def empty(self, shape, dtype, poison: bool = True) -> np.ndarray:
        """An array kernels can use, every byte 0xFF (NaN).

        With `poison=False` it is zero, and takes memory only where it is touched.
        """
        return self.arena.allocate(shape, _dtype(dtype), poison)

    def upload(self, array: np.ndarray) -> np.ndarray:
        """A C-contiguous copy of `array` that kernels can use."""
        array = np.asarray(array)
        out = self.arena.allocate(array.shape, array.dtype, poison=False)
        out[...] = array
        return out

    def download(self, array: np.ndarray) -> np.ndarray:
        """A copy in ordinary memory."""
        return np.array(array)

    def poison(self, array: np.ndarray) -> None:
        """Refills every element with 0xFF bytes."""
        array.view(f"u{array.itemsize}")[...] = int.from_bytes(bytes([POISON]) * array.itemsize, "little")

    def clear(self, array: np.ndarray) -> None:
        """Every element 0."""
        array[...] = 0

    def owns(self, array) -> bool:
        """Whether kernels of this machine can use the array."""
        return isinstance(array, np.ndarray) and self.arena.owns(array)

    def synchronize(self) -> None:
        """Nothing to wait for: launches return when they are done."""

    def tensor(self, array: np.ndarray) -> Tensor:
        """The array as a kernel sees it.

        Raises
        ------
        ValueError
            If it is not this machine's, or its elements do not lie as kernels expect.
        """
        if not self.owns(array):
            what = f"one at {array.ctypes.data:#x}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(
                f"array: expected one of this CPU machine, got {what}; use machine.upload or machine.empty"
            )
        if any(stride % array.itemsize for stride in array.strides):
            raise ValueError(
                f"array: expected strides in whole elements of {array.itemsize} bytes, "
                f"got {array.strides} bytes; copy it"
            )
        pairs = zip(array.shape, array.strides)
        strides = [0 if size == 1 else stride // array.itemsize for size, stride in pairs]
        if array.size and strides and array.shape[-1] > 1 and strides[-1] != 1:
            raise ValueError(
                f"array: expected a contiguous last dimension, got stride {strides[-1]}; copy it"
            )
        if strides:
            strides[-1] = 1
        address = self._window + array.ctypes.data - self.arena.base
        return Tensor(address, array.shape, tuple(strides), str(array.dtype), array.itemsize, array)

    def tensor_map(self, array, box, swizzle: int = 0) -> TensorMap:
        """A kernel's argument by which bulk copies move tiles of an array, or of a Tensor.

        Raises
        ------
        ValueError
            See `cuattn.tensor_map.describe`, which also says what the parameters are.
        """
        tensor = array if isinstance(array, Tensor) else self.tensor(array)
        return tensor_map.for_host(tensor_map.describe(tensor, box, swizzle))

    def like(self, array, shape, dtype: str) -> np.ndarray:
        """A new array of the caller's kind: here always one of this machine."""
        return self.empty(shape, dtype)

    def reset_peak(self, limit: int | None = None) -> None:
        """From now on `peak_pool_bytes` counts what is allocated, and more than `limit` bytes are refused."""
        self.arena.reset_peak(limit)

    def lift_limit(self) -> None:
        """Nothing is refused any more but what does not fit."""
        self.arena.limit = None

    def peak_pool_bytes(self) -> int:
        """Most bytes in arrays at any one time since `reset_peak`, beside those there were then."""
        return self.arena.peak_bytes

    # ---- launches

    def stream(self, array=None):
        """No streams here: a context that does nothing."""
        return nullcontext()

    def lanes(self, count: int):
        """One launch after another here, whatever their lanes: a context that does nothing."""
        return nullcontext()

    def prepare(self, built, grid, block, smem_bytes: int, args, lane: int = 0, cluster: int = 1):
        """A callable that launches with these arguments."""
        return lambda: self.launch(built, grid, block, smem_bytes, args, cluster)

    @contextmanager
    def counting(self):
        """Yields Counters that hold, at exit, what the launches inside did."""
        result, before = Counters(), self.counters
        try:
            yield result
        finally:
            done = self.counters - before
            for field in fields(Counters):
                setattr(result, field.name, getattr(done, field.name))

    @contextmanager
    def schedule(self, **changes):
        """Runs the launches inside under another `Schedule`: order=, seed=, async_copies=, resident=."""
        before = self.schedule_now
        self.schedule_now = replace(before, **changes)
        try:
            yield self
        finally:
            self.schedule_now = before

    @contextmanager
    def tracing(self, block: int = 0):
        """Yields a `Trace` of the launches inside: counts by call site, and the steps of one block.

        Parameters
        ----------
        block : int
            Linear index of the block, x first.
        """
        before, self.trace = self.trace, Trace(block)
        try:
            yield self.trace
        finally:
            self.trace = before

    def launch(self, built, grid, block, smem_bytes: int, args: list[tuple[str, object]],
               cluster: int = 1) -> None:
        """Runs a kernel and returns when it is done.

        Parameters
        ----------
        built : object with `path` (shared object) and `entry` (kernel name)
        grid, block : int or tuple of up to three int
        smem_bytes : int
        args : list of (name, Tensor, TensorMap or NumPy scalar)
        cluster : int
            Neighbouring blocks along x that run together; divides the grid's x.

        Raises
        ------
        ValueError
            For an empty grid or block, or a cluster that does not fit the grid.
        RaceError
            If `races` is on and two accesses to shared memory are not ordered.
        DeviceError
            If the kernel does something it must not, or its process dies.
        """
        grid, block = _three("grid", grid), _three("block", block)
        check_cluster(cluster, grid)
        resident = max(self.schedule_now.resident // cluster, 1) * cluster
        request = {
            "path": os.path.abspath(built.path), "entry": built.entry,
            "grid": grid, "block": block, "smem_bytes": int(smem_bytes),
            "args": [data.hex() for _, data in pack(args)],
            "extents": [(name, *v.extent) for name, v in args
                        if isinstance(v, (Tensor, TensorMap)) and v.extent[0] < v.extent[1]],
            "order": self.schedule_now.order, "seed": self.schedule_now.seed,
            "copies_late": int(self.schedule_now.async_copies == "late"), "step_limit": self.step_limit,
            "resident": min(resident, prod(grid)), "cluster": cluster, "races": int(self.races),
            "trace": self.trace.block if self.trace else None,
            # NOTE: processes that share the blocks would be a second, unrepeatable, order of them.
            "workers": min(self.workers, prod(grid) // cluster) if self.schedule_now.resident == 1 else 1,
        }
        with self._lock:
            self._run(request)

    def close(self) -> None:
        """Ends the child processes; the next launch starts fresh ones."""
        stop_all(self._processes)

    def _run(self, request: dict) -> None:
        if os.getpid() != self._pid:
            raise DeviceError("this CPU machine was opened in another process; open one in this process")
        workers = request["workers"]
        try:
            self._start(workers)
            for i in range(workers):
                self._processes[i].send({**request, "worker": i})
            replies = [self._processes[i].receive() for i in range(workers)]
        except BaseException:  # an interrupt: a child in the middle of a launch is of no use
            self.close()
            raise
        dead = [i for i, (kind, _) in enumerate(replies) if kind == cpu_child.FAULT]
        for i in reversed(dead):
            self._processes.pop(i).stop()
        for kind, payload in replies:
            if kind != cpu_child.OK:
                error = RaceError if kind == cpu_child.RACE else DeviceError
                raise error(payload.decode(errors="replace"))
        for _, payload in replies:
            self.counters += Counters(*struct.unpack_from(f"<{cpu_child.COUNTERS}Q", payload))
        if self.trace:
            parts = [json.loads(payload[8 * cpu_child.COUNTERS:]) for _, payload in replies]
            self.trace.add(request["entry"], parts)

    def _start(self, count: int) -> None:
        """Makes sure that `count` children run."""
        reasons, environment = [], child_environment(host_compiler()) if sanitizer() else None
        for window in WINDOWS if self._window is None else (self._window,):
            fresh = [Process(self.arena, window, environment) for _ in range(count - len(self._processes))]
            replies = [worker.receive() for worker in fresh]
            if all(kind == cpu_child.OK for kind, _ in replies):
                self._processes += fresh
                self._window = window
                return
            bad = [payload for kind, payload in replies if kind != cpu_child.OK]
            reasons.append(bad[0].decode(errors="replace"))
            stop_all(fresh)
        raise MachineUnavailable(f"the CPU machine's process does not start: {'; '.join(reasons)}")


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _flag(variable: str) -> bool:
    """Whether an environment variable says 1."""
    value = os.environ.get(variable) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{variable}: expected 0 or 1, got {value!r}")
    return value == "1"


def _positive(name: str, variable: str, given, default: int) -> int:
    """The argument, else the environment variable, else the default."""
    text = given if given is not None else os.environ.get(variable, default)
    source = name if given is not None else variable
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"{source}: expected a whole number of at least 1, got {text!r}")
    return value


def _dtype(dtype) -> np.dtype:
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def _three(name: str, extents) -> tuple[int, int, int]:
    given = (extents,) if isinstance(extents, (int, np.integer)) else tuple(extents)
    sizes = tuple(int(n) for n in given) + (1,) * (3 - len(given))
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(
            f"{name}: expected up to three sizes of at least 1, got {extents}; "
            "launch nothing for an empty problem"
        )
    return sizes
