"""The CPU machine's memory: one sparse shared file from which arrays are cut.

Parent and children map the same file, so nothing is copied at a launch, and the data survives a child that
faults. Memory is given out in pages; what is freed returns to the system at once.
"""
from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from bisect import bisect_left
from collections import deque

import numpy as np

ARENA_BYTES = (1 << 36, 1 << 34, 1 << 32)  # the first that can be mapped; what is never touched costs nothing
POISON = 0xFF  # every byte of fresh memory; NaN in float16, bfloat16 and float32


class OutOfMemory(MemoryError):
    """The arena has no free range of that size."""


def _sparse_file(size: int) -> int:
    """A descriptor of an anonymous sparse file."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("cuattn", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="cuattn-")
        os.unlink(path)
    os.ftruncate(fd, size)
    return fd


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


class Arena:
    """A first-fit allocator over the shared file.

    Parameters
    ----------
    size : int
        Bytes of address space, a multiple of the page size.
    """

    def __init__(self, size: int):
        self.size = size
        self.fd = _sparse_file(size)
        weakref.finalize(self, os.close, self.fd)
        self._map = mmap.mmap(self.fd, size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.base = self._bytes.ctypes.data
        # Nothing lies in the first page: an access before the first array must not leave the arena.
        self._free = [(mmap.PAGESIZE, size - mmap.PAGESIZE)]  # (offset, size), by offset, no two adjacent
        self._lock = threading.Lock()
        # NOTE: a finalizer may run in the middle of anything, `_take` included, so it only leaves a note.
        self._returned: deque[tuple[int, int, int]] = deque()
        self.limit: int | None = None  # bytes that arrays may hold beside those of the last `reset_peak`
        self._held = 0  # bytes in arrays, without what rounds them up; since the last `reset_peak`
        self.peak_bytes = 0

    @classmethod
    def largest(cls) -> Arena:
        """The largest arena this system can map.

        Raises
        ------
        OSError
            If it cannot map the smallest.
        """
        for size in ARENA_BYTES:
            try:
                arena = cls(size)
                mmap.mmap(arena.fd, size).close()  # a child needs the room twice: memory, and its addresses
                return arena
            except OSError as error:
                reason = error
        raise reason

    @property
    def used(self) -> int:
        """Bytes handed out, in whole pages."""
        with self._lock:
            self._merge_returned()
            return self._in_use()

    def allocate(self, shape, dtype, poison: bool = True) -> np.ndarray:
        """An array in the arena; its memory returns when the last view of it is gone.

        Parameters
        ----------
        shape : tuple of int
        dtype : numpy.dtype
        poison : bool
            Fill with 0xFF bytes. Otherwise the array is zero and takes memory only where it is touched.

        Raises
        ------
        OutOfMemory
            If no free range is large enough.
        """
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
        if any(n < 0 for n in shape):
            raise ValueError(f"shape: expected sizes of at least 0, got {shape}")
        nbytes = dtype.itemsize
        for n in shape:
            nbytes *= n
        if nbytes:
            raw = self._cut(nbytes)
        else:
            raw = self._bytes[:0]  # an empty array needs no place
        if poison:
            raw[...] = POISON
        return raw.view(dtype).reshape(shape)

    def _cut(self, nbytes: int) -> np.ndarray:
        # A page of nothing behind every array: an access past its end must not meet the next one.
        size = _up(nbytes, mmap.PAGESIZE) + mmap.PAGESIZE
        with self._lock:
            self._merge_returned()
            if self.limit is not None and self._held + nbytes > self.limit:
                raise OutOfMemory(f"an array of {nbytes} bytes does not fit: {self._held} of the "
                                  f"{self.limit} bytes that are allowed are in use")
            offset = self._take(size)
            self._held += nbytes
            self.peak_bytes = max(self.peak_bytes, self._held)
        raw = np.frombuffer(self._map, np.uint8, nbytes, offset)
        weakref.finalize(raw, self._give, offset, size, nbytes).atexit = False
        return raw

    def reset_peak(self, limit: int | None = None) -> None:
        """Count `peak_bytes` from here, where it is 0, and refuse what would take it above `limit`."""
        with self._lock:
            self._merge_returned()
            self._held, self.peak_bytes, self.limit = 0, 0, limit

    def owns(self, array: np.ndarray) -> bool:
        """Whether all of the array's memory lies in the arena."""
        low, high = np.lib.array_utils.byte_bounds(array)
        return self.base <= low and high <= self.base + self.size

    def _take(self, size: int) -> int:
        for i, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        raise OutOfMemory(
            f"the CPU machine has no free range of {size} bytes ({self._in_use()} of {self.size} are in use); "
            "free some arrays"
        )

    def _in_use(self) -> int:
        return self.size - mmap.PAGESIZE - sum(room for _, room in self._free)

    def _give(self, offset: int, size: int, nbytes: int) -> None:
        if hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, offset, size)  # a hole: the pages go, and read as zero
        else:
            self._bytes[offset : offset + size] = 0
        self._returned.append((offset, size, nbytes))

    def _merge_returned(self) -> None:
        while self._returned:
            offset, size, nbytes = self._returned.popleft()
            self._held -= nbytes
            i = bisect_left(self._free, (offset, 0))
            if i < len(self._free) and self._free[i][0] == offset + size:
                size += self._free.pop(i)[1]
            if i and sum(self._free[i - 1]) == offset:
                i -= 1
                offset, size = self._free[i][0], self._free.pop(i)[1] + size
            self._free.insert(i, (offset, size))
