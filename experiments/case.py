"""One case, in the worker: inputs, compile, poisoned run, correctness, time, correctness again, row.

No performance number leaves this module without a correctness pass on the same buffers, before and after
timing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import cuattn
from cuattn import timing, timing_nvbench, tuned
from experiments import costs, environment, subjects
from experiments.memory import Room
from experiments.schema import PERFORMANCE, derive
from experiments.suite import Repeat

CLOCK_SPREAD = 0.03  # the SM clock may move this much within a case before the case counts as throttled


def classify(error: BaseException) -> tuple[str, str]:
    """(status, sentence) of an exception, by its classes' names: their libraries may be absent."""
    names = {kind.__name__ for kind in type(error).__mro__}
    words = [*str(error).split()] or [type(error).__name__]
    message = " ".join([*words, *getattr(error, "__notes__", ())])[:600]
    if names & {"MemoryError", "OutOfMemoryError"} or "cudaErrorMemoryAllocation" in message:
        return "oom", message
    if names & {"CompileError", "CompilerMissing"}:
        return "compile_error", message
    if names & {"Unsupported", "ContractError"}:  # of this device, or of any
        return "unsupported", message
    if (
        names & {"DeviceError", "CUDARuntimeError", "CUDADriverError", "AcceleratorError"}
        or "CUDA error" in message
    ):
        return "cuda_error", message
    return "crash", f"{type(error).__name__}: {message}"


def run_case(
    machine,
    params: Mapping[str, Any],
    repeat: Repeat,
    kernels: Mapping[str, Any],
    phase: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Run one case and return the columns it fills; every failure inside is a status, never an exception.

    Parameters
    ----------
    machine : Machine
    params : mapping
        The case's parameters.
    repeat : Repeat
    kernels : mapping of str to Entry
    phase : callable
        Told "build" and "run", so that compiling does not count against the case's deadline.
    """
    row: dict[str, Any] = {"status": "ok"}
    try:
        phase("build")
        with tuned.ignored():
            _attempt(machine, params, repeat, kernels, phase, row)
    except Exception as error:  # whatever a kernel or its compiler does is the row's outcome
        row["status"], row["error"] = classify(error)
        # Frames of the traceback hold the case's arrays, and they would outlive it in the memory pool.
        error.__traceback__ = None
    if row["status"] not in ("ok", "throttled"):
        for name in PERFORMANCE:
            row.pop(name, None)
    gc.collect()
    return derive({**params, **row})


def _attempt(machine, params, repeat, kernels, phase, row) -> None:
    entry = kernels[params["kernel"]]
    row |= costs.describe(params, entry, machine.device)  # first, so that a case without room still has them
    with Room(machine, params, row) as room:
        room.foresee()
        subject = subjects.make(machine, params, entry, room.open)
        try:
            row |= subject.columns()
            _judge(machine, params, subject, room, repeat, phase, row)
        finally:
            subject.close()


def _judge(machine, params, subject, room, repeat, phase, row) -> None:
    """Run, check, and on a GPU time and check again."""
    gpu = machine.name == "gpu"
    subject.poison()
    if gpu:
        subject.run()  # loads the module, and makes a peer's workspace, before the deadline starts
        machine.synchronize()
    phase("run")
    _counted_run(machine, subject, row)
    room.judge(subject)
    if not _correct(subject, row) or not gpu:
        return
    _time(machine, params, subject, repeat, row)
    subject.poison()
    if repeat.sm_busy and hasattr(subject, "sm_busy"):  # no peer has it
        row["measured_sm_busy"] = subject.sm_busy(params["mode"] == "graph")
        subject.poison()
    subject.run()
    machine.synchronize()
    _correct(subject, row)


def _counted_run(machine, subject, row) -> None:
    """One run; on the CPU machine what it did is counted, and how long the emulation took is noted."""
    start = time.perf_counter()
    with machine.counting() as counters:
        subject.run()
        machine.synchronize()
    if counters is None:
        return
    row["emulation_s"] = time.perf_counter() - start
    for name in ("launches", "blocks", "barriers", "mma", "atomics", "bytes_loaded", "bytes_stored"):
        row[f"counted_{name}"] = getattr(counters, name)


def _correct(subject, row) -> bool:
    """Compare the outputs with the reference; a row that fails is `incorrect`."""
    try:
        verdict = subject.verdict()
    except Exception as error:
        error.add_note("(while checking the result, not in the kernel)")
        raise
    row |= {
        "max_err": verdict.max_err,
        "tolerance": verdict.tol,
        "lse_err": verdict.lse_err,
        "lse_tolerance": verdict.lse_tol,
        "check": verdict.check,
    }
    if not verdict.ok:
        row |= {"status": "incorrect", "error": verdict.message}
    return verdict.ok


def _time(machine, params, subject, repeat: Repeat, row) -> None:
    graph = params["mode"] == "graph"
    taken = {"events": timing, "nvbench": timing_nvbench}[repeat.timer].measure(
        subject.run,
        machine,
        min_samples=repeat.min_samples,
        max_samples=repeat.max_samples,
        timeout_s=repeat.timeout_s,
        rel_noise=repeat.rel_noise,
        cache=params["cache_mode"],
        graph=graph,
        empty=cuattn.plan_probe(machine, "empty").run,
        rest_us=repeat.rest_us,
    )
    row |= {
        "measured_time_us": taken.median_us,
        "measured_time_q1_us": taken.q1_us,
        "measured_time_q3_us": taken.q3_us,
        "measured_time_min_us": taken.min_us,
        "measured_samples_us": list(taken.samples_us),
        "measured_n_samples": taken.n_samples,
        "measured_stop_reason": taken.stop_reason,
        "measured_host_us": taken.host_us,
        "measured_empty_us": taken.empty_us,
        "measured_sm_clock_mhz": taken.sm_clock_mhz,
        "measured_sm_clock_min_mhz": taken.sm_clock_min_mhz,
        **environment.sensors(),
    }
    clock, low, reasons = (
        taken.sm_clock_mhz,
        taken.sm_clock_min_mhz,
        row.get("measured_throttle_reasons") or "",
    )
    if environment.slowed(reasons):
        row |= {"status": "throttled", "error": f"the GPU slowed its clock while timing ({reasons})"}
    elif clock and low < (1 - CLOCK_SPREAD) * clock and "power_cap" not in reasons:
        # At its power cap a card trades clock for work all the time: that is its normal speed.
        row |= {"status": "throttled", "error": f"the SM clock moved between {low:.0f} and {clock:.0f} MHz"}
