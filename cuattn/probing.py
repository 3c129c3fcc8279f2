"""Probes: kernels that measure the device itself, with buffers of their own."""
from __future__ import annotations

import numpy as np

from cuattn import kernels
from cuattn.binding import Planned, resolve
from cuattn.kernels.shapes import ProbeShape
from cuattn.machine import Machine


def plan_probe(machine: Machine, kernel: str, *, bytes: int = 0, flops: int = 0, dtype: str = "bfloat16",
               constants: dict | None = None) -> Planned:
    """A probe of the device itself, with its own buffers.

    Parameters
    ----------
    machine : Machine
    kernel : {"read", "words", "copy", "mma", "empty"}
    bytes : int
        For read, words and copy: bytes read, rounded down to whole 16-byte words.
    flops : int
        For mma: at least so many.
    """
    row = kernels.find(kernel, "probe")
    shape = ProbeShape(bytes, flops, dtype)
    plan, builds = resolve(row, shape, machine.device, constants)
    sink = plan.constants["blocks"] * plan.constants["threads"]
    buffers = {
        "source": machine.empty((max(bytes, 32 * 24) // 4,), "uint32"),
        "sink": machine.empty((bytes // 4 if kernel == "copy" else sink,), "uint32"),
    }
    _fill(machine, buffers["source"])
    tensors = {name: machine.tensor(x) for name, x in buffers.items()}
    bound = row.arguments(shape, plan, tensors)
    launches = [machine.prepare(built, launch.grid, launch.block, launch.smem_bytes, args)
                for launch, built, args in zip(plan.launches, builds, bound)]
    return Planned(row, shape, plan, machine, tuple(buffers.values()), builds, tensors, launches, bound)


def _fill(machine: Machine, array) -> None:
    """Pairs of bfloat16 numbers between 1 and 2 in a fixed pattern: rates are never taken on zeros or NaN."""
    words = machine.xp.arange(array.size, dtype=machine.xp.uint32) * np.uint32(2654435761)
    array[...] = (words & np.uint32(0x007F007F)) | np.uint32(0x3F803F80)
