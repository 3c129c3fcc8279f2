"""How long a plan may take. Rough by nature, and always labelled *estimated*: no number here is a result."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from cuattn.devices import Device, for_arch, lookup
from experiments import environment
from experiments.suite import Repeat
from experiments.sweep import Case, work

COMPILE_S = {"cpu": 4.0, "gpu": 3.0}  # one kernel with one set of constants, cold
CASE_S = {"cpu": 0.1, "gpu": 0.5}  # inputs, allocation, bookkeeping
EMULATED_FLOPS, EMULATED_BYTES = 1.5e9, 1e9  # a second, what the CPU machine executes on two cores
REFERENCE_FLOPS = {"cpu": 1e10, "gpu": 5e11}  # a second in float64
SHARE = 0.4  # of its datasheet rates that a kernel is expected to reach
STANDARD_FLOPS = 2e13


def device_here(machine: str) -> Device | None:
    """The card to estimate for: the visible one, or a typical one where it is not in the table."""
    if machine == "cpu":
        return None
    cards = environment.gpus()
    return (lookup(cards[0]["name"] or "") if cards else None) or for_arch("sm_80")


def with_estimates(cases: Iterable[Case], machine: str, repeat: Repeat) -> list[Case]:
    """The cases with `estimate_s` filled; a kernel's first case with new constants pays for compiling it."""
    device, built, out = device_here(machine), set(), []
    for case in cases:
        p = case.params
        key = json.dumps(
            [p.get(k) for k in ("kernel", "d", "dtype", "causal", "page_size", "constants")]
            + [p.get("h", 0) // max(p.get("hkv", 1), 1) if p["family"] == "decode" else None]
        )
        seconds = CASE_S[machine] + (0 if key in built else COMPILE_S[machine])
        built.add(key)
        out.append(replace(case, estimate_s=seconds + _run_s(case, machine, device, repeat)))
    return out


def _run_s(case: Case, machine: str, device: Device | None, repeat: Repeat) -> float:
    flops, moved = work(case.params)
    reference = min(flops, 1e12) / REFERENCE_FLOPS[machine]
    if device is None:
        return flops / EMULATED_FLOPS + moved / EMULATED_BYTES + reference
    rate = (device.bf16_tflops or 100.0) * 1e12 * SHARE
    if case.params["kernel"] in ("standard", "torch_math"):
        rate = min(rate, STANDARD_FLOPS)
    once = max(flops / rate, moved / ((device.bandwidth_gbps or 1000.0) * 1e9 * SHARE), 5e-6)
    sampling = min(repeat.timeout_s, 0.15 + 100 * (once + 1e-4))
    return sampling + 2 * reference
