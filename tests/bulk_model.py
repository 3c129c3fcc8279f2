"""What a bulk copy of a tile must leave behind, in NumPy; and launches of bulk.cu."""
from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from simt_launch import KERNELS, line_of

from cuattn.compile import build

SHAPES = {2: (37, 208), 3: (5, 19, 144), 4: (3, 11, 4, 96), 5: (2, 3, 9, 3, 80)}  # of the memory
BOXES = {2: (16,), 3: (3, 8), 4: (2, 5, 3), 5: (1, 2, 3, 2)}  # and the row
SMEM = 65536 + 1024  # of load_tile, store_tile and copy_bytes
SCHEDULES = [
    {"order": order, "seed": seed, "async_copies": copies}
    for (order, seed), copies in product([("forward", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)],
                                         ("late", "eager"))
] + [{"order": "shuffle", "seed": 3, "resident": 4}]
LOADED, STORED = line_of("bulk.cu", "load_at(s.byte, map, rank"), line_of("bulk.cu", "store_at(map, rank")


def line_marks(*marks: str) -> list[int]:
    """The numbers of the lines of bulk.cu that end with `// mark`."""
    lines = (KERNELS / "bulk.cu").read_text().splitlines()
    return [next(i for i, line in enumerate(lines, 1) if line.endswith(f"// {mark}")) for mark in marks]


def need_bulk_copies(machine) -> None:
    """Skips the test on a GPU that has none."""
    if machine.name == "gpu" and machine.device.arch_number < 90:
        pytest.skip(f"bulk copies need sm_90, and this GPU is {machine.device.arch}")


def run(machine, entry: str, grid, block: int, smem: int, args: dict, cluster: int = 1) -> None:
    """Launches an entry of bulk.cu. Arrays become flat tensors, ints int32; the rest stays."""
    need_bulk_copies(machine)
    built = build(str(KERNELS / "bulk.cu"), entry, {}, machine.device.arch)
    grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
    bound = [(name, np.int32(v) if type(v) is int else machine.tensor(v.reshape(-1))
              if hasattr(v, "reshape") and v.ndim else v) for name, v in args.items()]
    machine.launch(built, grid, block, smem, bound, cluster)
    machine.synchronize()


def numbers(rng, shape, dtype) -> np.ndarray:
    """Random bits, none of them a NaN that a copy through floats might change."""
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 200, (*shape[:-1], shape[-1] * size)).astype(np.uint8).view(dtype)


def tile_of_bytes(rng, box, itemsize: int) -> np.ndarray:
    """Random contents of a tile, (n, 16) uint8."""
    return rng.integers(0, 200, (int(np.prod(box)) * itemsize // 16, 16)).astype(np.uint8)


def load_tile(machine, mapped, at) -> np.ndarray:
    """The tile at `at` (in the array's order) as a load leaves it in shared memory, (n, 16) uint8."""
    out = machine.empty((mapped.tile_bytes // 16, 16), np.uint8)
    run(machine, "load_tile", 1, 128, SMEM, {**_tile(mapped, at), "g_out": out})
    return machine.download(out)


def store_tile(machine, mapped, at, shared: np.ndarray) -> None:
    """Stores the tile whose bytes lie in shared memory as `shared`, (n, 16) uint8."""
    run(machine, "store_tile", 1, 128, SMEM, {**_tile(mapped, at), "g_in": machine.upload(shared)})


def _tile(mapped, at) -> dict:
    coordinates = dict(zip(("x0", "x1", "x2", "x3", "x4"), [*at[::-1], 0, 0, 0]))
    return {"map": mapped, "rank": mapped.rank, **coordinates, "bytes": mapped.tile_bytes}


def places(bytes_: int, row: int, swizzle: int) -> np.ndarray:
    """(bytes / 16,): which 16 bytes of shared memory hold the n-th 16 of a tile, of `row` bytes a row."""
    chunk = np.arange(bytes_ // 16)
    if not swizzle:
        return chunk
    line = chunk * 16 // 128
    return chunk ^ (line % (swizzle // 16))


def window(shape, at, box) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Of a tile at `at` (in the array's order): its part of the array, and that part's place in the tile."""
    inside, place = [], []
    for size, first, extent in zip(shape, at, box):
        low = min(max(first, 0), size)
        high = max(min(first + extent, size), low)
        inside.append(slice(low, high))
        place.append(slice(low - first, high - first) if high > low else slice(0, 0))
    return tuple(inside), tuple(place)


def in_shared(array: np.ndarray, at, box, swizzle: int) -> np.ndarray:
    """The tile's bytes as they lie in shared memory, (n, 16) uint8."""
    tile = np.zeros(box, array.dtype)
    inside, place = window(array.shape, at, box)
    tile[place] = array[inside]
    flat = np.ascontiguousarray(tile).view(np.uint8).reshape(-1, 16)
    out = np.empty_like(flat)
    out[places(flat.size, box[-1] * array.itemsize, swizzle)] = flat
    return out


def stored(array: np.ndarray, shared: np.ndarray, at, box, swizzle: int) -> np.ndarray:
    """The array after a store of a tile whose bytes lie in shared memory as `shared`, (n, 16) uint8."""
    flat = shared[places(shared.size, box[-1] * array.itemsize, swizzle)]
    tile = np.ascontiguousarray(flat).view(array.dtype).reshape(box)
    inside, place = window(array.shape, at, box)
    out = array.copy()
    out[inside] = tile[place]
    return out


def requested(array: np.ndarray, at, box) -> int:
    """Bytes of the tile that lie in the array."""
    inside, _ = window(array.shape, at, box)
    return prod(s.stop - s.start for s in inside) * array.itemsize
