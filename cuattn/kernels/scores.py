"""What becomes of scores before they are weights, alike in every kernel that offers it: prim/sight.cuh,
prim/softcap.cuh, prim/sink.cuh."""
from __future__ import annotations

import numpy as np

from cuattn.kernels.shapes import AttentionShape

FEATURES = ("window", "softcap", "sinks")
NOTHING = np.uint64(0)  # the address of an array that the kernel does not read


def constants(shape) -> dict:
    """What is compiled into the loop over keys, and what not."""
    return {"CAUSAL": shape.causal, **{name.upper(): name in shape.features for name in FEATURES}}


def arguments(shape: AttentionShape, t) -> list:
    """The softmax's σ, the window, the cap, sinks."""
    (left, right), scale, cap = shape.reach, t["softmax_scale"], t["softcap"]
    return [("sigma", np.float32(cap if shape.softcap else scale)), ("left", np.int32(left)),
            ("right", np.int32(right)), ("squash", np.float32(scale / cap if shape.softcap else 0)),
            ("sinks", t.get("sinks", NOTHING))]
