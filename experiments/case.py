"""One case, in the worker: inputs, compile, poisoned run, correctness, time, correctness again, row.

No performance number leaves this module without a correctness pass on the same buffers before and after timing.
"""
from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import cuattn
from cuattn import compare, timing
from cuattn.compile import source_hash
from experiments import environment, inputs, peers
from experiments.catalog import PEERS
from experiments.schema import PERFORMANCE, derive
from experiments.suite import Repeat

CLOCK_SPREAD = 0.03  # the SM clock may move this much within a case before the case counts as throttled


def classify(error: BaseException) -> tuple[str, str]:
    """(status, sentence) of an exception, by the names of its classes: the libraries they come from may be absent."""
    names = {kind.__name__ for kind in type(error).__mro__}
    message = " ".join(str(error).split())[:500] or type(error).__name__
    if names & {"MemoryError", "OutOfMemoryError"} or "cudaErrorMemoryAllocation" in message:
        return "oom", message
    if names & {"CompileError", "CompilerMissing"}:
        return "compile_error", message
    if "Unsupported" in names:
        return "unsupported", message
    if names & {"DeviceError", "CUDARuntimeError", "CUDADriverError", "AcceleratorError"} or "CUDA error" in message:
        return "cuda_error", message
    return "crash", f"{type(error).__name__}: {message}"


def row_hash(row) -> str:
    """Today's source hash of a kernel's row."""
    return source_hash(row.file)


def run_case(machine, params: Mapping[str, Any], repeat: Repeat, kernels: Mapping[str, Any],
             phase: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
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
    before = _memory(machine, fresh=True)
    arrays = inputs.build(machine, params)
    plan = make_plan(machine, params, arrays, kernels)
    row |= _describe(plan, arrays, params)
    _poison(machine, plan)
    if machine.name == "gpu":
        plan.run()  # loads the module, and makes a peer's workspace, before the deadline starts
        machine.synchronize()
    phase("run")
    _counted_run(machine, plan, row)
    row |= _peak(machine, plan, before)
    if not _correct(machine, params, arrays, plan, row):
        return
    if machine.name == "gpu":
        _time(machine, params, plan, repeat, row)
        _poison(machine, plan)
        plan.run()
        machine.synchronize()
        _correct(machine, params, arrays, plan, row)


def make_plan(machine, params: Mapping[str, Any], arrays: Mapping[str, Any], kernels: Mapping[str, Any]):
    """The kernel's plan for these arrays: compiled, outputs and scratch allocated, ready to run."""
    if params["kernel"] in PEERS:
        return peers.plan(machine, params, arrays)
    kernel = kernels[params["kernel"]].row
    constants = json.loads(params["constants"]) if params.get("constants") else None
    if params["family"] == "prefill":
        return cuattn.plan_attention(**arrays, causal=params["causal"], layout=params["layout"], kernel=kernel,
                                     constants=constants)
    if params["family"] == "decode":
        return cuattn.plan_decode(**arrays, kernel=kernel, constants=constants)
    return cuattn.plan_append(**arrays, kernel=kernel)


def _describe(plan, arrays, params) -> dict[str, Any]:
    """Plan and closed-form columns."""
    cost = plan.cost()
    if plan.plan is None:  # a peer: its flops are the shape's, and what it moves is not known
        return {"modelled_flops": cost.flops}
    launches, info = plan.plan.launches, plan.build_info
    outputs = sum(int(x.nbytes) for x in _outputs(plan))
    return {
        "source_hash": plan.source_hash,
        "grid": json.dumps([list(x.grid) for x in launches]), "block": json.dumps([x.block for x in launches]),
        "smem_bytes": max((x.smem_bytes for x in launches), default=0),
        "registers": info.get("registers"), "spill_bytes": info.get("spill_bytes"),
        "constants_used": json.dumps(dict(plan.plan.constants), sort_keys=True, default=str),
        "modelled_flops": cost.flops, "modelled_bytes_loaded": cost.bytes_loaded,
        "modelled_bytes_stored": cost.bytes_stored, "modelled_launches": cost.launches,
        "modelled_scratch_bytes": cost.scratch_bytes,
        "modelled_peak_bytes": inputs.nbytes(arrays) + outputs + cost.scratch_bytes,
    }


def _outputs(plan) -> list:
    return [x for x in (getattr(plan, "o", None), getattr(plan, "lse", None)) if x is not None]


def _poison(machine, plan) -> None:
    for array in _outputs(plan):
        machine.poison(array)


def _counted_run(machine, plan, row) -> None:
    """One run; on the CPU machine what it did is counted, and how long the emulation took is noted."""
    start = time.perf_counter()
    with machine.counting() as counters:
        plan.run()
        machine.synchronize()
    if counters is None:
        return
    row["emulation_s"] = time.perf_counter() - start
    for name in ("launches", "blocks", "barriers", "mma", "atomics", "bytes_loaded", "bytes_stored"):
        row[f"counted_{name}"] = getattr(counters, name)


def _correct(machine, params, arrays, plan, row) -> bool:
    """Compare the outputs with the reference; a row that fails is `incorrect`."""
    verdict = _verdict(params, arrays, plan)
    if verdict is None:
        return True
    row |= {"max_err": verdict.max_err, "tolerance": verdict.tol, "lse_err": verdict.lse_err,
            "lse_tolerance": verdict.lse_tol, "check": verdict.check}
    if not verdict.ok:
        row |= {"status": "incorrect", "error": verdict.message}
    return verdict.ok


def _verdict(params, arrays, plan):
    rounding = getattr(plan.row, "rounding", "float32")
    if params["family"] == "prefill":
        dense = {name: _bshd(x, params["layout"]) for name, x in {**arrays, "o": plan.o}.items()}
        return compare.check_attention(**dense, lse=plan.lse, causal=params["causal"], rounding=rounding)
    if params["family"] == "decode":
        return compare.check_decode(**arrays, o=plan.o, lse=plan.lse, rounding=rounding)
    return None


def _bshd(x, layout: str):
    return x.transpose(0, 2, 1, 3) if layout == "bhsd" else x


def _time(machine, params, plan, repeat: Repeat, row) -> None:
    graph = params["mode"] == "graph"
    taken = timing.measure(plan.run, machine, min_samples=repeat.min_samples, max_samples=repeat.max_samples,
                           timeout_s=repeat.timeout_s, rel_noise=repeat.rel_noise, cache=params["cache_mode"],
                           graph=graph)
    row |= {
        "measured_time_us": taken.median_us, "measured_time_q1_us": taken.q1_us, "measured_time_q3_us": taken.q3_us,
        "measured_time_min_us": taken.min_us, "measured_samples_us": list(taken.samples_us),
        "measured_n_samples": taken.n_samples, "measured_stop_reason": taken.stop_reason,
        "measured_host_us": taken.host_us, "measured_empty_us": taken.empty_us,
        "measured_sm_clock_mhz": taken.sm_clock_mhz, "measured_sm_clock_min_mhz": taken.sm_clock_min_mhz,
        **environment.sensors(),
    }
    clock, low = taken.sm_clock_mhz, taken.sm_clock_min_mhz
    if environment.slowed(row.get("measured_throttle_reasons")):
        reasons = row["measured_throttle_reasons"]
        row |= {"status": "throttled", "error": f"the GPU slowed its clock while timing ({reasons})"}
    elif clock and low is not None and low < (1 - CLOCK_SPREAD) * clock:
        row |= {"status": "throttled", "error": f"the SM clock moved between {low:.0f} and {clock:.0f} MHz"}


def _memory(machine, fresh: bool = False) -> int | None:
    """Bytes in use in the GPU's memory pool; `fresh` first gives back what earlier cases left in it."""
    if machine.name != "gpu":
        return None
    pool = machine.xp.get_default_memory_pool()
    if fresh:
        gc.collect()
        pool.free_all_blocks()
    return int(pool.used_bytes())


def _peak(machine, plan, before: int | None) -> dict[str, int]:
    """Memory columns. Outputs and scratch live as long as the plan, so what is in use now is the peak."""
    if before is None:
        return {}
    free, total = machine.xp.cuda.runtime.memGetInfo()
    if hasattr(plan, "peak_bytes"):
        peak = plan.peak_bytes()
        pool = None if peak is None else _memory(machine) - before + peak
    else:
        pool = _memory(machine) - before
    return {"measured_peak_pool_bytes": pool, "measured_device_used_bytes": int(total - free)}
