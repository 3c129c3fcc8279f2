"""Orders in which the CPU machine runs threads, and the check that a result does not depend on them.

A missing barrier often gives the right answer in the order that is tried first. Under other orders, and with
asynchronous copies as late or as early as is legal, it gives other bits.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product

import numpy as np

from cuattn.cpu_child import ORDERS
from cuattn.machine import DeviceError

MAX_RESIDENT = 32
RESIDENT = 4  # blocks in flight in `check_schedules`


class ScheduleError(DeviceError):
    """A kernel's result depends on the order in which its threads run."""


@dataclass(frozen=True)
class Schedule:
    """What order threads, warps and blocks run in, and when asynchronous copies happen.

    Parameters
    ----------
    order : {"forward", "reverse", "shuffle"}
    seed : int
        Of the shuffle.
    async_copies : {"late", "eager"}
        At the last legal moment (when their thread waits for them), or when they are issued.
    resident : int
        Blocks in flight, at most 32. Above 1 they take turns at atomics and fences, and other blocks see a
        global store only after a fence, or when its block has ended.
    """

    order: str = "forward"
    seed: int = 0
    async_copies: str = "late"
    resident: int = 1

    def __post_init__(self):
        if self.order not in ORDERS:
            raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.async_copies not in ("late", "eager"):
            raise ValueError(f"async_copies: expected 'late' or 'eager', got {self.async_copies!r}")
        if type(self.resident) is not int or not 1 <= self.resident <= MAX_RESIDENT:
            raise ValueError(f"resident: expected 1 to {MAX_RESIDENT} blocks, got {self.resident!r}")

    def __str__(self) -> str:
        seed = f"(seed {self.seed})" if self.order == "shuffle" else ""
        blocks = f", {self.resident} blocks in flight" if self.resident > 1 else ""
        return f"{self.order}{seed} order with {self.async_copies} copies{blocks}"


def check_schedules(machine, run, outputs: dict[str, np.ndarray], seeds=(0, 1)) -> None:
    """Runs something under every kind of schedule and demands equal bits.

    Parameters
    ----------
    machine : cuattn.cpu.CpuMachine
    run : callable ()
        Launches the kernels; it must write all of `outputs`.
    outputs : dict of name to array
        Poisoned before each run.
    seeds : sequence of int
        Of the shuffled orders.

    Raises
    ------
    ScheduleError
        Names the two schedules, the output and the first index that differs.
    """
    orders = [("forward", 0), ("reverse", 0), *(("shuffle", seed) for seed in seeds)]
    schedules = [Schedule(*order, copies) for order, copies in product(orders, ("late", "eager"))]
    schedules += [Schedule(*order, resident=RESIDENT) for order in orders]
    first, expected = None, {}
    for schedule in schedules:
        for array in outputs.values():
            machine.poison(array)
        with machine.schedule(**asdict(schedule)):
            run()
        got = {name: _bits(array) for name, array in outputs.items()}
        if first is None:
            first, expected = schedule, got
            continue
        for name, bits in got.items():
            differing = np.argwhere(bits != expected[name])
            if len(differing):
                index = tuple(int(i) for i in differing[0])
                raise ScheduleError(
                    f"{name} depends on the schedule: {first} and {schedule} differ at {index} "
                    f"({len(differing)} of {bits.size} elements); a barrier is missing before an overwrite, "
                    "a fence before an atomic, or an atomic's order shows"
                )


def _bits(array: np.ndarray) -> np.ndarray:
    """The elements' bit patterns, copied, so that NaN equals NaN and -0 differs from 0."""
    return np.ascontiguousarray(array).copy().view(f"u{array.dtype.itemsize}").reshape(array.shape)
