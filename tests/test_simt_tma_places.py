"""Where a tile may lie in its array: what hardware does not take, or overwrites, is said with its place."""
from __future__ import annotations

import dataclasses
import re
from itertools import product

import numpy as np
import pytest
from bulk_model import (
    BOXES,
    LOADED,
    SHAPES,
    STORED,
    in_shared,
    load_tile,
    numbers,
    store_tile,
    stored,
    tile_of_bytes,
)

from cuattn.cpu import CpuMachine
from cuattn.machine import DeviceError

OF_EACH_KIND = pytest.mark.parametrize("rank, dtype", list(product((2, 4), (np.uint16, np.float32))))


def said_of(launch) -> tuple[str, int]:
    """What the machine says of the copy of a launch, and the line it names."""
    with pytest.raises(DeviceError) as caught:
        launch()
    text, line = re.fullmatch(r"\w+_tile: (.*); thread \(0,0,0\) of block \(0,0,0\) at bulk\.cu:(\d+)",
                              str(caught.value)).groups()
    return text, int(line)


@dataclasses.dataclass
class Tiles:
    """An array that is its memory but for `cut` columns, and tiles of 48 bytes a row."""

    cpu: CpuMachine
    rng: np.random.Generator
    rank: int
    dtype: type
    cut: int

    def __post_init__(self):
        self.step = 16 // np.dtype(self.dtype).itemsize
        self.memory = numbers(self.rng, SHAPES[self.rank], self.dtype)
        self.columns = slice(0, self.memory.shape[-1] - self.cut)
        self.array = self.memory[..., self.columns]
        self.box = (*BOXES[self.rank], 3 * self.step)

    def loads(self, at) -> None:
        """Loads, and compares."""
        mapped = self.cpu.tensor_map(self.cpu.upload(self.memory)[..., self.columns], self.box)
        np.testing.assert_array_equal(load_tile(self.cpu, mapped, at), in_shared(self.array, at, self.box, 0))

    def stores(self, at) -> None:
        """Stores, and compares what is in the memory then, beyond the array too."""
        whole, expected = self.cpu.upload(self.memory), self.memory.copy()
        shared = tile_of_bytes(self.rng, self.box, self.memory.itemsize)
        store_tile(self.cpu, self.cpu.tensor_map(whole[..., self.columns], self.box), at, shared)
        expected[..., self.columns] = stored(self.array, shared, at, self.box, 0)
        np.testing.assert_array_equal(self.cpu.download(whole).view(np.uint8), expected.view(np.uint8))


@OF_EACH_KIND
def test_tiles_begin_on_16_bytes(cpu, rng, rank, dtype):
    t = Tiles(cpu, rng, rank, dtype, 16)
    step, width = t.step, t.array.shape[-1]
    for copy, line in ((t.loads, LOADED), (t.stores, STORED)):
        for x in (1, step - 1, step + 1, width - 1, width + 1, 4 * width + 2, -1, 1 - step, -1 - step):
            for row in (0, 1000):  # in the array, or none of them
                assert said_of(lambda: copy((*[row] * (rank - 1), x))) == (
                    f"a bulk copy of a tile whose coordinate 0, the innermost, is {x}: expected a multiple "
                    f"of {step}, which is 16 bytes in elements of {16 // step}; hardware ends in an illegal "
                    "instruction", line)
        for x in (0, step, width - step, width, 4 * width, *((-step, -3 * step) if copy == t.loads else ())):
            copy((*[1] * (rank - 1), x))


@OF_EACH_KIND
def test_only_loads_begin_before_the_array(cpu, rng, rank, dtype):
    t = Tiles(cpu, rng, rank, dtype, 16)
    for dim, before, elsewhere in product(range(rank), (1, 9), (0, 1000 * t.step)):  # else past it
        x = -before if dim else -before * t.step
        at = tuple(x if i == rank - 1 - dim else elsewhere for i in range(rank))
        t.loads(at)
        assert said_of(lambda: t.stores(at)) == (
            f"a bulk store of a tile whose coordinate {dim}, 0 being the innermost, is {x}: expected 0 or "
            "more, since only loads may begin before the array; hardware ends in an illegal instruction",
            STORED)
    t.stores((0,) * rank)
    t.stores(t.array.shape)


@OF_EACH_KIND
@pytest.mark.parametrize("missing", [1, 2, -1])
def test_stores_of_whole_16_bytes(cpu, rng, rank, dtype, missing):
    """Of an array whose last 16 bytes lack that many elements (-1: all but one)."""
    step = 16 // np.dtype(dtype).itemsize
    t = Tiles(cpu, rng, rank, dtype, missing % step)
    rows, width, size = t.array.shape[:-1], t.array.shape[-1], t.array.itemsize
    whole = width - width % step
    for first in ((0,) * (rank - 1), tuple(n - 1 for n in rows)):
        for x in (whole, whole - step, whole - 2 * step):
            t.loads((*first, x))
            assert said_of(lambda: t.stores((*first, x))) == (
                f"a bulk store of a tile would overwrite {t.cut * size} bytes past the array's last column, "
                "since hardware writes whole 16 bytes: expected rows of a multiple of 16 bytes where a tile "
                f"crosses their end, got {width * size} bytes ({width} elements)", STORED)
        t.stores((*first, whole - 3 * step))  # ends before
        t.stores((*first, whole + step))  # begins behind
    for dim in range(rank - 1):  # crosses the edge in rows that are not there
        t.stores((*(rows[i] if i == dim else 0 for i in range(rank - 1)), whole))
