"""Which accesses to shared memory are ordered: vector clocks of the threads of one block."""
from __future__ import annotations

import numpy as np


class Clocks:
    """What each thread knows of the others, and who touched each byte last.

    Parameters
    ----------
    threads, size : int
        Threads of the block, bytes of shared memory.
    """

    def __init__(self, threads: int, size: int):
        self.known = np.eye(threads, dtype=np.int32)  # [t, u]: stretch of u that t has met, its own on [t, t]
        self.wrote = np.zeros((size, threads), np.int32)  # the stretch of u in which it last wrote the byte
        self.read = np.zeros((size, threads), np.int32)

    def races(self, part: np.ndarray, reached: np.ndarray, write: bool) -> np.ndarray:
        """(threads, threads) bool: pairs whose accesses would be unordered.

        Parameters
        ----------
        part : (threads,) bool
            Who accesses.
        reached : (threads, width) int
            The bytes of each.
        """
        pairs = np.zeros_like(self.known, bool)
        at = reached[part]
        last = np.maximum(self.wrote[at], self.read[at]) if write else self.wrote[at]
        pairs[part] = last.max(1) > self.known[part]
        return pairs

    def access(self, part: np.ndarray, reached: np.ndarray, write: bool) -> None:
        """Remembers an access that does not race."""
        last = self.wrote if write else self.read
        for thread in np.flatnonzero(part):
            last[reached[thread], thread] = self.known[thread, thread]

    def meet(self, *groups: np.ndarray) -> None:
        """Orders all that the threads of each group, (threads,) bool, did before all that they do after."""
        for group in groups:
            self.known[group] = self.known[group].max(0, initial=0)
            self.known[group, group] += 1

    def unseen(self, part: np.ndarray, live: np.ndarray) -> bool:
        """Whether some of `part` did what not all of `live` know of."""
        last = np.maximum(self.wrote, self.read).max(0)
        return bool((last > self.known[live]).any(0)[part].any())
