"""Launches of the test kernels in `simt_kernels/`, and where in their source a report should point."""
from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from cuattn.compile import build

KERNELS = Path(__file__).parent / "simt_kernels"


@lru_cache
def kernel(file: str, entry: str, **constants):
    """A built entry of one of the files."""
    return build(str(KERNELS / file), entry, constants, "cpu")


def values(machine, **args) -> list[tuple[str, object]]:
    """Kernel arguments: arrays become flat tensors, ints int32; NumPy scalars stay."""
    return [(name, machine.tensor(v.reshape(-1)) if isinstance(v, np.ndarray)
             else np.int32(v) if type(v) is int else v) for name, v in args.items()]


def launched(machine, file: str, entry: str, constants: dict, warps: int, given, *left) -> list[np.ndarray]:
    """What blocks of one warp make of `given` arrays, on either machine: others of (elements, dtype)."""
    built = build(str(KERNELS / file), entry, constants, machine.device.arch)
    outs = [machine.empty(size, dtype) for size, dtype in left]
    arrays = [*(machine.upload(x.reshape(-1)) for x in given), *outs]
    machine.launch(built, (warps, 1, 1), 32, 0, [(str(i), machine.tensor(x)) for i, x in enumerate(arrays)])
    machine.synchronize()
    return [machine.download(x) for x in outs]


def line_of(file: str, text: str) -> int:
    """The number of the only line of a file that holds the text; a text with `//` must end it."""
    lines = (KERNELS / file).read_text().splitlines()
    found = [i for i, line in enumerate(lines, 1)
             if (line.endswith(text) if text.startswith("//") else text in line)]
    assert len(found) == 1, (text, found)
    return found[0]
