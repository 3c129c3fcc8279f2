"""Probes: what the device itself can do (probe/probes.cu).

The ceilings every other kernel is held against.
"""
from __future__ import annotations

import numpy as np

from cuattn.kernels.base import (
    MAX_THREADS,
    Cost,
    Launch,
    Plan,
    Row,
    Unsupported,
    ceil_div,
    resolve,
)
from cuattn.kernels.shapes import ProbeShape

FILE = "probe/probes.cu"
DTYPES = ("float16", "bfloat16")
WORD = 16  # bytes of one access, where no constant says otherwise
MMA_FLOPS, MMA_CHAINS = 2 * 16 * 8 * 16, 8  # flops of one mma.sync; independent accumulators a warp


def _words(shape: ProbeShape, width: int) -> int:
    """Words of `width` bytes in what a probe moves: whole words of 16 bytes, whatever the width."""
    return shape.bytes // WORD * WORD // width


def _plan(entry: str, constants: dict):
    def plan(shape: ProbeShape, device, overrides=None) -> Plan:
        chosen = resolve(constants, overrides)
        threads, width = chosen["threads"], chosen.get("width", WORD)
        if shape.dtype not in DTYPES:
            raise Unsupported(f"{entry}: expected dtype {' or '.join(DTYPES)}, got {shape.dtype}; choose one")
        if threads % 32 or threads > MAX_THREADS:
            raise Unsupported(f"{entry}: threads must be a multiple of 32 up to {MAX_THREADS}, "
                              f"got {threads}; change it")
        if width not in (2, 4, 8, 16):
            raise Unsupported(f"{entry}: width must be 2, 4, 8 or 16 bytes, got {width}; choose one")
        blocks = {"probe_empty": 1, "probe_mma": device.sms * chosen["blocks_per_sm"]}.get(
            entry, max(1, min(device.sms * chosen["blocks_per_sm"], ceil_div(_words(shape, width), threads))))
        compiled = {"THREADS": threads, "UNROLL": chosen["unroll"], "WIDTH": width, "Element": shape.dtype}
        used = {**chosen, "blocks": blocks}
        if entry == "probe_mma":
            warps = blocks * threads // 32
            used["steps"] = max(1, ceil_div(shape.flops, warps * MMA_CHAINS * MMA_FLOPS))
        return Plan((Launch(FILE, entry, (blocks, 1, 1), threads, 0, compiled),), used)

    return plan


def _sink(plan: Plan) -> int:
    return plan.constants["blocks"] * plan.constants["threads"]


def _cost_read(shape: ProbeShape, plan: Plan, lengths=None) -> Cost:
    return Cost(0, shape.bytes // WORD * WORD, 4 * _sink(plan), 1)


def _cost_copy(shape: ProbeShape, plan: Plan, lengths=None) -> Cost:
    moved = shape.bytes // WORD * WORD
    return Cost(0, moved, moved, 1)


def _cost_mma(shape: ProbeShape, plan: Plan, lengths=None) -> Cost:
    warps = _sink(plan) // 32
    return Cost(warps * plan.constants["steps"] * MMA_CHAINS * MMA_FLOPS, warps * 32 * 24, 4 * _sink(plan), 1)


def _cost_empty(shape: ProbeShape, plan: Plan, lengths=None) -> Cost:
    return Cost(0, 0, 0, 1)


def _arguments_bytes(shape: ProbeShape, plan: Plan, t) -> list:
    count = _words(shape, plan.constants.get("width", WORD))
    return [[("source", t["source"]), ("count", np.int64(count)), ("sink", t["sink"])]]


def _arguments_mma(shape: ProbeShape, plan: Plan, t) -> list:
    return [[("source", t["source"]), ("sink", t["sink"]), ("STEPS", np.int32(plan.constants["steps"]))]]


_CONSTANTS = {"threads": 256, "unroll": 8, "blocks_per_sm": 4}


def _row(name, cost, arguments, teaches, **more) -> Row:
    constants = {**_CONSTANTS, **more}
    return Row(
        name=name, family="probe", file=FILE, archs=("sm_80+",), dtypes=DTYPES,
        head_dims=range(0), features=frozenset(), constants=constants, teaches=teaches,
        plan=_plan(f"probe_{name}", constants), cost=cost, arguments=arguments,
    )


ROWS = (
    _row("read", _cost_read, _arguments_bytes,
         "The floor of decode: nothing that must read S bytes is faster than this."),
    _row("words", _cost_read, _arguments_bytes,
         "The same bytes in narrow loads take more instructions, and fewer of them are in flight.",
         width=WORD),
    _row("copy", _cost_copy, _arguments_bytes, "Device memory read and written at once."),
    _row("mma", _cost_mma, _arguments_mma, "The most mma.sync instructions a second the tensor cores take."),
    _row("empty", _cost_empty, lambda shape, plan, t: [[]],
         "What a launch costs when the kernel does nothing."),
)
