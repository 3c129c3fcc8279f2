"""The protocol both machines speak: memory, launches, counters.

Nothing above this module knows which one runs. `gpu` is CuPy on an NVIDIA card; `cpu` is the SIMT machine,
which executes the same `.cu` files, counts every byte they request and reports faults, but models no time.
"""
from __future__ import annotations

import struct
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np


class DeviceError(RuntimeError):
    """A kernel did something it must not: out of bounds, deadlock, fault.

    The message says what, where and who.
    """


class RaceError(DeviceError):
    """Two threads touched the same shared memory, one of them to write, and nothing orders them.

    The message names both call sites and what is missing between them.
    """


class MachineUnavailable(RuntimeError):
    """The machine asked for cannot run here; the message says what is missing."""


def _counter(meaning: str):
    return field(default=0, metadata={"meaning": meaning})


@dataclass
class Counters:
    """What launches did on the CPU machine; each field's metadata says what it counts.

    Plain sums; bytes are those the kernel requested of global memory.
    """

    launches: int = _counter("kernel launches")
    blocks: int = _counter("thread blocks run")
    barriers: int = _counter("block-wide and named barriers completed")
    collectives: int = _counter("warp shuffles, votes and __syncwarp completed")
    atomics: int = _counter("global atomic operations, one a lane")
    mma: int = _counter("mma.sync instructions, one a warp")
    bytes_loaded: int = _counter("global bytes read: loads, cp.async, bulk copies; zero-filled ones excluded")
    bytes_stored: int = _counter("global bytes written by stores")
    bytes_async: int = _counter("the part of bytes_loaded that came through cp.async or bulk copies")
    wgmma: int = _counter("wgmma instructions, one a warpgroup")

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Tensor:
    """An array as a kernel sees it: a device address and element strides. Holds its array alive.

    A rank ≥ 2 tensor reaches the kernel as `View<T, RANK>` (address, then every stride but the last, which is
    1); rank 0 and 1 reach it as a plain pointer.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    array: Any

    @property
    def empty(self) -> bool:
        """Whether it has no elements: then its address and strides mean nothing, and libraries set any."""
        return 0 in self.shape

    @property
    def extent(self) -> tuple[int, int]:
        """First and one-past-last byte address any element occupies; equal when the tensor is empty."""
        if self.empty:
            return self.address, self.address
        low = high = 0
        for size, stride in zip(self.shape, self.strides):
            step = (size - 1) * stride
            low, high = low + min(step, 0), high + max(step, 0)
        return self.address + low * self.itemsize, self.address + (high + 1) * self.itemsize

    def only(self, dim: int, index: int) -> Tensor:
        """The part with that one index along a dimension, which keeps its place."""
        shape = (*self.shape[:dim], 1, *self.shape[dim + 1 :])
        return replace(self, address=self.address + index * self.strides[dim] * self.itemsize, shape=shape)

    def packed(self) -> bytes:
        """The kernel argument's bytes."""
        if len(self.shape) < 2:
            return struct.pack("<Q", self.address)
        return struct.pack(f"<Q{len(self.shape) - 1}q", self.address, *self.strides[:-1])


class Machine(Protocol):
    """See the module's docstring. Arrays are NumPy on the CPU machine, CuPy on a GPU."""

    name: str
    device: Any  # cuattn.devices.Device
    xp: Any  # numpy or cupy

    def empty(self, shape, dtype) -> Any: ...
    def upload(self, array: np.ndarray) -> Any: ...
    def download(self, array) -> np.ndarray: ...
    def poison(self, array) -> None: ...
    def clear(self, array) -> None: ...
    def tensor(self, array) -> Tensor: ...
    def tensor_map(self, array, box, swizzle: int = 0) -> Any: ...  # cuattn.tensor_map.TensorMap
    def launch(self, built, grid, block: int, smem_bytes: int, args: list[tuple[str, Any]],
               cluster: int = 1) -> None: ...
    def lanes(self, count: int) -> AbstractContextManager[None]: ...
    def synchronize(self) -> None: ...
    def counting(self) -> AbstractContextManager[Counters | None]: ...


def pack(args: list[tuple[str, Any]]) -> list[tuple[str, bytes]]:
    """Each argument's bytes, in order; scalars must be NumPy scalars so that their width is said."""
    return [(name, v.packed() if hasattr(v, "packed") else v.tobytes()) for name, v in args]


MAX_CLUSTER = 8  # blocks that every device with clusters takes


def check_cluster(cluster: int, grid) -> None:
    """Refuses a cluster that no device launches over this grid."""
    if type(cluster) is not int or not 1 <= cluster <= MAX_CLUSTER:
        raise ValueError(f"cluster: expected 1 to {MAX_CLUSTER} blocks, got {cluster!r}; choose fewer")
    if grid[0] % cluster:
        raise ValueError(f"cluster: expected a divisor of the grid's {grid[0]} blocks along x, "
                         f"got {cluster}; round the grid up")


_open: dict[str, Machine] = {}
_opening = threading.RLock()


def open_machine(name: str = "best") -> Machine:
    """The machine of that name, started once a process.

    Parameters
    ----------
    name : {"best", "cpu", "gpu"}
        "best" is the GPU where one works, else the CPU machine.

    Raises
    ------
    MachineUnavailable
        One sentence: no GPU or driver, no C++ compiler.
    """
    if name not in ("best", "cpu", "gpu"):
        raise ValueError(f"machine: expected 'cpu', 'gpu' or 'best', got {name!r}")
    if name == "best":
        try:
            return open_machine("gpu")
        except MachineUnavailable:
            return open_machine("cpu")
    with _opening:
        if name not in _open:
            if name == "gpu":
                from cuattn.gpu import GpuMachine

                _open[name] = GpuMachine()
            else:
                from cuattn.cpu import CpuMachine

                _open[name] = CpuMachine()
    return _open[name]
