"""Tensor maps: what the copy engine of sm_90 is told of an array, so that it moves tiles by coordinates.

A plan states one as data, a `TileMap` among its arguments; a machine makes a `TensorMap` of it, 128 bytes
that reach the kernel as `const __grid_constant__ TensorMap`.
"""
from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from math import prod

from cuattn.machine import Tensor

RANKS = (2, 5)
ALIGNMENT = 16  # bytes, of the array's first element and of its strides
MOST_BOX, MOST_SIZE, MOST_STRIDE = 256, 1 << 32, 1 << 40
SWIZZLES = (0, 32, 64, 128)
BYTES = 128
_HOST = struct.Struct("<Q4Q5I5H3B55x")  # TensorMap of kernels_cu/simt/bulk.h


@dataclass(frozen=True)
class TensorMap:
    """A tensor map as a kernel's argument. Holds its array alive.

    Parameters
    ----------
    tensor : Tensor
    box : tuple of int
        Elements of a tile, in the array's order of dimensions.
    swizzle : {0, 32, 64, 128}
        Bytes of the pattern in shared memory.
    encoded : bytes
        The 128 bytes.
    """

    tensor: Tensor
    box: tuple[int, ...]
    swizzle: int
    encoded: bytes = bytes(BYTES)

    @property
    def rank(self) -> int:
        return len(self.box)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each dimension, innermost first."""
        return self.tensor.shape[::-1]

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one index to the next, innermost dimension first and left out.

        A dimension of one element may have any: it gets one that the hardware takes.
        """
        strides, inner = [], self.tensor.itemsize * self.sizes[0]
        for size, stride in zip(self.sizes[1:], self.tensor.strides[-2::-1]):
            usable = stride * self.tensor.itemsize if size > 1 else -(-inner // ALIGNMENT) * ALIGNMENT
            strides.append(min(usable, MOST_STRIDE - ALIGNMENT))
            inner = usable * size
        return tuple(strides)

    @property
    def empty(self) -> bool:
        """Whether the array has no elements: then no tile may be copied, and the bytes are zero."""
        return self.tensor.empty

    @property
    def tile_bytes(self) -> int:
        """What a load of one tile brings to its mbarrier, wherever the tile lies."""
        return prod(self.box) * self.tensor.itemsize

    @property
    def extent(self) -> tuple[int, int]:
        return self.tensor.extent

    def packed(self) -> bytes:
        return self.encoded


def describe(tensor: Tensor, box, swizzle: int) -> TensorMap:
    """The map of an array, not encoded yet.

    Parameters
    ----------
    tensor : Tensor
        Two to five dimensions, the last contiguous; first element and strides on multiples of 16 bytes,
        unless it is empty.
    box : sequence of int
        Elements of a tile in each dimension, 1 to 256, in the array's order; the last one's are a multiple of
        16 bytes, and with a swizzle exactly its width.
    swizzle : {0, 32, 64, 128}

    Raises
    ------
    ValueError
        What the hardware does not take.
    """
    box = tuple(int(n) for n in box)
    made = TensorMap(tensor, box, swizzle)
    size, shape = tensor.itemsize, tensor.shape
    if not RANKS[0] <= len(shape) <= RANKS[1]:
        raise _refuse("array", "2 to 5 dimensions", f"shape {shape}", "reshape it")
    if swizzle not in SWIZZLES:
        raise _refuse("swizzle", "0, 32, 64 or 128 bytes", repr(swizzle), "choose one")
    if len(box) != len(shape) or not all(1 <= n <= MOST_BOX for n in box):
        raise _refuse("box", f"1 to {MOST_BOX} elements in each of {len(shape)} dimensions", str(box),
                      "change it")
    if box[-1] * size % ALIGNMENT or (swizzle and box[-1] * size != swizzle):
        wanted = f"the swizzle's {swizzle} bytes" if swizzle else "a multiple of 16 bytes"
        raise _refuse("box", f"{wanted} in the last dimension", f"{box[-1]} elements of {size}", "change it")
    if any(n > MOST_SIZE for n in shape):
        raise _refuse("array", "at most 2³² elements in a dimension", f"shape {shape}", "split it")
    if not made.empty:
        _check_place(tensor)
    return made


def _check_place(tensor: Tensor) -> None:
    """Refuses elements that lie where the hardware cannot step to them."""
    size = tensor.itemsize
    if tensor.address % ALIGNMENT:
        raise _refuse("array", "a first element on a multiple of 16 bytes", f"one at {tensor.address:#x}",
                      "copy it")
    for n, stride in zip(tensor.shape[:-1], tensor.strides):
        if n > 1 and (stride <= 0 or stride * size % ALIGNMENT or stride * size >= MOST_STRIDE):
            raise _refuse("array", "strides of positive multiples of 16 bytes, less than 2⁴⁰",
                          f"{stride * size} bytes", "copy it")


def for_host(made: TensorMap) -> TensorMap:
    """The map as the CPU machine reads it."""
    if made.empty:
        return made

    def five(numbers, fill=0) -> list[int]:
        return [*numbers, *[fill] * (5 - len(numbers))]

    sizes = [min(n, MOST_SIZE - 1) for n in made.sizes]
    return replace(made, encoded=_HOST.pack(
        made.tensor.address, *five(made.strides)[:4], *five(sizes), *five(made.box[::-1]), made.rank,
        made.tensor.itemsize, made.swizzle))


def _refuse(name: str, expected: str, got: str, remedy: str) -> ValueError:
    return ValueError(f"tensor map: {name}: expected {expected}, got {got}; {remedy}")
