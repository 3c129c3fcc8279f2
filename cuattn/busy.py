"""How busy a GPU's multiprocessors are: the share of a run in which one of them has a warp.

Measured in a run of its own, with binaries whose warps stamp `%smid` and `%globaltimer` as they begin and end
(prim/busy.cuh). The stamps make a run slower, short launches most; the share is of that run.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from cuattn import compile as compiler

MOST_SMS = 256  # as in prim/busy.cuh


def share(times: list[np.ndarray], sms: int) -> float:
    """Busy time over elapsed time, of `sms` multiprocessors.

    Parameters
    ----------
    times : list of (MOST_SMS + 1, 4) uint64
        `busy_sms` of each binary that took part, after the run.
    sms : int
        Multiprocessors of the device.

    Returns
    -------
    float
        Between 0 and 1; NaN where nothing ran. Binaries that run at the same time count each for itself, and
        together at most 1.
    """
    busy = sum(int(one[:-1, 1].sum()) for one in times)
    ran = [one[-1] for one in times if one[-1, 1] > 0]
    if not ran:
        return float("nan")
    elapsed = max(int(last[1]) for last in ran) - min(int(first[0]) for first in ran)
    return min(1.0, busy / (sms * elapsed)) if elapsed > 0 else float("nan")


def sm_busy(planned, graph: bool = False) -> float:
    """The share for one run of a planned operation, on a GPU.

    Parameters
    ----------
    planned : Planned
        Its outputs are written as by its own run.
    graph : bool
        Replayed from a graph instead of launched one by one.

    Raises
    ------
    ValueError
        On the CPU machine, which has no multiprocessors.
    CompileError
        A stamped binary cannot be built.
    """
    machine = planned.machine
    if machine.name == "cpu":
        raise ValueError("planned: expected one for a GPU, got one for the CPU machine, which has no SMs")
    work = [launch for launch in planned.plan.launches if all(launch.grid)]
    built: dict[tuple, compiler.Built] = {}
    launches = []
    for launch, args in zip(work, planned.arguments):
        key = (launch.file, launch.entry, id(launch.constants))
        if key not in built:
            built[key] = compiler.build(*key[:2], launch.constants, machine.device.arch, stamped=True)
        launches.append(machine.prepare(
            built[key], launch.grid, launch.block, launch.smem_bytes, args, launch.lane, launch.cluster))
    run = replace(planned, launches=launches).run
    call = machine.capture(run) if graph else run
    paths = dict.fromkeys(str(one.path) for one in built.values())
    times = [machine.module_array(path, "busy_sms", (MOST_SMS + 1, 4), "uint64") for path in paths]
    call()  # loads what is not loaded yet
    machine.synchronize()
    fresh = np.zeros((MOST_SMS + 1, 4), np.uint64)
    fresh[-1, 0] = np.iinfo(np.uint64).max  # the first time is the least
    for array in times:
        array.set(fresh)
    call()
    machine.synchronize()
    return share([machine.download(array) for array in times], machine.device.sms)
