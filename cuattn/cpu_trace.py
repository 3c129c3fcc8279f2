"""What a launch did on the CPU machine, by call site, and one block's steps from barrier to barrier.

The machine counts in `kernels_cu/simt/trace.h`. Every number here is counted: it depends on the kernel, its
plan and its inputs alone, never on time.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cuattn.paths import KERNELS

#: What a call site does, in the machine's order (simt::Access), and what is counted of it.
ACCESSES = {
    "global load": "loads from global memory by registers",
    "global store": "stores to global memory",
    "global copy": "the global side of cp.async: what it reads",
    "global atomic": "atomic operations on global memory",
    "shared load": "loads from shared memory",
    "shared store": "stores to shared memory",
    "shared copy": "the shared side of cp.async: what it writes, zero-filled bytes included",
    "shared atomic": "atomic operations on shared memory",
    "ldmatrix": "matrix loads from shared memory, 16 bytes a row",
    "stmatrix": "matrix stores to shared memory, 16 bytes a row",
    "mma": "tensor-core products (mma.sync)",
    "shuffle": "values passed between lanes of a warp",
    "vote": "ballots of a warp",
    "warp barrier": "__syncwarp",
    "block barrier": "__syncthreads",
    "named barrier": "bar.sync and bar.arrive on barriers 1 to 15",
    "fence": "__threadfence and __threadfence_block",
    "copy commit": "cp.async.commit_group",
    "copy wait": "cp.async.wait_group",
    "wgmma": "tensor-core products of a warpgroup, and what its tensor cores read of shared memory: A and B "
             "once each; a GPU's counters of loads and stores leave these out",
    "wgmma fence": "wgmma.fence",
    "wgmma commit": "wgmma.commit_group",
    "wgmma wait": "wgmma.wait_group",
    "proxy fence": "fence.proxy.async",
    "setmaxnreg": "registers given back or asked for",
    "mbarrier init": "mbarriers set up",
    "mbarrier arrive": "arrivals at mbarriers, and bytes announced to them",
    "mbarrier wait": "waits for a phase of an mbarrier",
    "bulk load": "bulk copies to shared memory: what they read of global and fill of shared memory",
    "bulk store": "bulk copies to global memory: what they write of global and read of shared memory",
    "bulk commit": "cp.async.bulk.commit_group",
    "bulk wait": "cp.async.bulk.wait_group",
    "cluster barrier": "arrivals and waits at the barrier of a cluster",
}

#: The columns of `SiteCount`, with units.
COLUMNS = {
    "instructions": "instructions a warp issued: lanes that make the same visit to a call site since their "
                    "warp last met as a whole are one",
    "lanes": "instructions times the lanes that took part",
    "bytes": "bytes requested by all lanes; what a cp.async fills with zero is not requested",
    "sectors": "32-byte sectors of global memory touched, summed over instructions; a cp.async touches one "
               "again for each 32-byte sector of shared memory that takes a part of it, as a GPU does",
    "wavefronts": "passes through the 32 banks of shared memory; one serves at most 128 bytes",
    "conflicts": "wavefronts beyond one for each 32 lanes of 4 bytes, 16 of 8 or 8 of 16",
}

#: The counts of `Step`, with units.
STEP_COLUMNS = {
    "bytes_loaded": "global bytes loaded into registers",
    "bytes_copied": "global bytes that cp.async and bulk copies were asked for",
    "bytes_stored": "global bytes stored",
    "shared_bytes_loaded": "bytes read from shared memory, ldmatrix included",
    "shared_bytes_stored": "bytes written to shared memory, cp.async included",
    "mma": "mma.sync and wgmma instructions",
    "shuffles": "shuffles and votes",
}


@dataclass(frozen=True)
class SiteCount:
    """One call site in one launch. `ACCESSES` and `COLUMNS` say what is counted and in which unit.

    `launch` numbers the launches of the trace; `file` is relative to `kernels_cu`, or a path outside it;
    `first` and `end` are the range of shared memory touched, in bytes (0, 0 for global memory).
    """

    launch: int
    entry: str
    file: str
    line: int
    column: int
    access: str
    instructions: int
    lanes: int
    bytes: int
    sectors: int
    wavefronts: int
    conflicts: int
    first: int
    end: int


@dataclass(frozen=True)
class Step:
    """What one warp of one block did up to a barrier, or to its exit. `STEP_COLUMNS` gives the units."""

    launch: int
    entry: str
    warp: int
    step: int
    ended_by: str
    file: str
    line: int
    bytes_loaded: int
    bytes_copied: int
    bytes_stored: int
    shared_bytes_loaded: int
    shared_bytes_stored: int
    mma: int
    shuffles: int


@dataclass
class Trace:
    """What the launches of `CpuMachine.tracing` did; filled as they end.

    Parameters
    ----------
    block : int
        Linear index of the block whose steps are kept, in each launch.
    """

    block: int = 0
    sites: list[SiteCount] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    launches: int = 0

    def add(self, entry: str, parts: list[dict]) -> None:
        """Takes in a launch from the processes that shared its blocks."""
        merged: dict[tuple, list[int]] = {}
        for part in parts:
            for file, line, column, access, *counts, first, end in part["sites"]:
                key = (relative(file), line, column, tuple(ACCESSES)[access])
                before = merged.get(key, [0] * len(counts) + [first, end])
                sums = [a + b for a, b in zip(before, counts)]
                merged[key] = [*sums, min(before[-2], first), max(before[-1], end)]
        for key, (*counts, first, end) in sorted(merged.items()):
            shared = (first, end) if end else (0, 0)
            self.sites.append(SiteCount(self.launches, entry, *key, *counts, *shared))
        for warp, step, ended_by, line, file, *counts in (row for part in parts for row in part["steps"]):
            by = (*ACCESSES, "exit")[ended_by]
            self.steps.append(Step(self.launches, entry, warp, step, by, relative(file), line, *counts))
        self.launches += 1

    def total(self, column: str, *accesses: str) -> int:
        """A column's sum over the call sites that do one of `accesses`, or over all."""
        return sum(getattr(s, column) for s in self.sites if not accesses or s.access in accesses)


@lru_cache  # every row of a trace names one of a few files
def relative(file: str) -> str:
    """A source file as the project names it: relative to `kernels_cu` where it lies there."""
    if not file:
        return ""
    path, root = Path(file).resolve(), KERNELS.resolve()
    return str(path.relative_to(root) if path.is_relative_to(root) else Path(file))
