"""How long a plan may take. Rough by nature, and always labelled *estimated*: no number here is a result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cuattn.compare import FULL_PAIRS, SAMPLES
from cuattn.devices import CPU, Device, for_arch, lookup
from cuattn.kernels.base import Chunked, Unsupported, ceil_div
from experiments import environment
from experiments.catalog import Entry, catalog
from experiments.costs import array_bytes, planned
from experiments.suite import SCORES, Repeat
from experiments.sweep import Case, work

COMPILE_S = {"cpu": 2.0, "gpu": 2.0}  # one file with one set of constants, cold
CASE_S = {"cpu": 0.1, "gpu": 0.3}  # inputs, allocation, bookkeeping
EMULATED_FLOPS, EMULATED_BYTES = 1.5e9, 1e9  # a second, what the CPU machine executes on two cores
REFERENCE_FLOPS = {"cpu": 1e10, "gpu": 3e12}  # a second in float64
# On a GPU, in the comparison: a KV head of a sequence, a chunk of it; some fifty and twenty array operations.
HEAD_S, CHUNK_S = 2e-3, 5e-4
SHARE = 0.4  # of its datasheet rates that a kernel is expected to reach
STANDARD_FLOPS = 2e13
PREPARE_S = 3e-5  # a launch's arguments
LAUNCH_S = {"launch": 5e-6, "graph": 1.5e-6}  # the host's part of one; that of one replayed
RUNS = 6  # of the kernel outside the sampling: to load, to check, to warm up, to check again, two with stamps


@dataclass(frozen=True)
class Needs:
    """What a case asks of the device: flops, bytes and launches of one run, memory; how its result rounds.

    `units`: the files that are compiled, each with its constants.
    """

    flops: float
    moved: float
    units: frozenset[str]
    launches: int = 1
    memory: float = 0.0
    rounding: object = "float32"


def device_here(machine: str) -> Device | None:
    """The card to estimate for: the visible one, or a typical one where it is not in the table."""
    if machine == "cpu":
        return None
    cards = environment.gpus()
    return (lookup(cards[0]["name"] or "") if cards else None) or for_arch("sm_80")


def with_estimates(
    cases: Iterable[Case],
    machine: str,
    repeat: Repeat,
    device: Device | None = None,
    known: Mapping[str, Entry] | None = None,
) -> list[Case]:
    """The cases with `estimate_s` filled; the first that needs a file with new constants pays for compiling.

    Parameters
    ----------
    cases, machine, repeat
    device : Device, optional
        The card to estimate for, if it is another than the one here.
    known : mapping, optional
        The kernels, if there are others than the project's.
    """
    device, known = device or device_here(machine), known or catalog()
    built: set[str] = set()
    out = []
    for case in cases:
        p = case.params
        needs = _needs(case, known, device or CPU)
        if needs is None or device is not None and needs.memory > device.memory_bytes:
            out.append(replace(case, estimate_s=CASE_S[machine]))  # it ends as a row that says so
            continue
        twice = 2 if repeat.sm_busy and device is not None else 1  # as it is, and with stamps
        seconds = CASE_S[machine] + twice * len(needs.units - built) * COMPILE_S[machine]
        built |= needs.units
        seconds += needs.launches * PREPARE_S + (
            _emulated_s(p, needs) if device is None else _gpu_s(p, needs, device, repeat)
        )
        out.append(replace(case, estimate_s=seconds))
    return out


def _needs(case: Case, known: Mapping[str, Entry], device: Device) -> Needs | None:
    """By the kernel's own plan and closed forms; None where it refuses the shape on this device."""
    p, entry = case.params, known.get(case.params["kernel"])
    flops, moved = work(p)
    if entry is None or entry.row is None or p["family"] == "probe":
        key = [p.get(name) for name in ("kernel", "d", "dtype", "kv_dtype", "causal", *SCORES, "constants")]
        return Needs(flops, moved, frozenset([json.dumps(key)]))
    try:
        plan, cost = planned(p, entry, device)
    except Unsupported:
        return None
    distinct = {id(launch.constants): launch for launch in plan.launches}.values()
    units = frozenset(f"{launch.file} {sorted(launch.constants.items())}" for launch in distinct)
    moved = max(moved, cost.bytes_loaded + cost.bytes_stored)
    return Needs(flops, moved, units, cost.launches, array_bytes(p) + cost.scratch_bytes, plan.rounding)


def _emulated_s(p: Mapping, needs: Needs) -> float:
    reference = min(needs.flops, 1e12) / REFERENCE_FLOPS["cpu"]
    return needs.flops / EMULATED_FLOPS + needs.moved / EMULATED_BYTES + reference


def _gpu_s(p: Mapping, needs: Needs, device: Device, repeat: Repeat) -> float:
    rate = (device.bf16_tflops or 100.0) * 1e12 * SHARE
    if p["kernel"] in ("standard", "torch_math"):
        rate = min(rate, STANDARD_FLOPS)
    bandwidth = (device.bandwidth_gbps or 1000.0) * 1e9 * SHARE
    once = max(needs.flops / rate, needs.moved / bandwidth, needs.launches * LAUNCH_S[p["mode"]], 5e-6)
    sampling = min(repeat.timeout_s + once, 0.15 + max(repeat.min_samples, 30) * (once + 1e-4))
    return sampling + RUNS * once + 2 * _check_s(p, needs)


def _check_s(p: Mapping, needs: Needs) -> float:
    """Comparing one result with its reference: all rows of it, or a sample."""
    pairs, heads = needs.flops / (4 * max(p.get("d", 1), 1)), p.get("b", 1) * p.get("hkv", 1)
    if pairs > FULL_PAIRS["cupy"]:
        seconds, heads = 0.1, min(heads, SAMPLES)
    else:
        seconds = needs.flops / REFERENCE_FLOPS["gpu"]
    chunked = isinstance(needs.rounding, Chunked)
    return seconds + heads * (HEAD_S + (ceil_div(p["n"], needs.rounding.chunk) * CHUNK_S if chunked else 0))
