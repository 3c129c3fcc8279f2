"""What kernels that take a quantised cache share: numbers of eight bits, which stand for so many times a scale."""
from __future__ import annotations

import numpy as np

from cuattn.kernels.flash import NOTHING

SCALES = ("one", "heads", "pages")  # of K, and as many of V: a number, [HKV] or [num_pages, HKV] of them
STEP = 32  # of head dims that kernels multiply: rows are whole mma steps of 16 pairs of numbers


def constants(shape) -> dict:
    """What a kernel is compiled with."""
    return {"Stored": shape.stored, "SCALES": SCALES.index(shape.scales)}


def arguments(t) -> list:
    """Two arrays and two numbers, of which a kernel reads either."""
    given = {name: t.get(name) for name in ("k_scale", "v_scale")}
    numbers = {name: 1.0 if x is None else x for name, x in given.items() if x is None or isinstance(x, float)}
    return [*((name, NOTHING if name in numbers else x) for name, x in given.items()),
            *((f"{name}_number", np.float32(numbers.get(name, 1))) for name in given)]
