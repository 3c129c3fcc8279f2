"""What products of a warpgroup must give, in NumPy; launches of their test kernels, on either machine."""
from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from simt_launch import KERNELS

from cuattn.compile import build

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16),
          "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}
SCHEDULES = [{"order": order, "seed": seed, "async_copies": copies} for (order, seed), copies in product(
    [("forward", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)], ("late", "eager"))]


def launch(machine, file, entry, block, smem, constants, **args):
    """One block, on either machine. Arrays become flat tensors, ints int32; the rest stays."""
    if machine.name == "gpu" and machine.device.arch != "sm_90a":
        pytest.skip(f"wgmma needs sm_90a, and this GPU is {machine.device.arch}")
    built = build(str(KERNELS / file), entry, constants, machine.device.arch)
    bound = [(name, np.int32(v) if type(v) is int else machine.tensor(v.reshape(-1))
              if hasattr(v, "reshape") and v.ndim else v) for name, v in args.items()]
    machine.launch(built, (1, 1, 1), block, smem, bound)
    machine.synchronize()


# --- one product


def layout(start, leading, stride, first_line=0):
    """A `Layout` of wgmma.cu."""
    fields = np.dtype([(name, np.int32) for name in ("start", "leading", "stride", "first_line")])
    return np.array((start, leading, stride, first_line), fields)[()]


def lay_out(image, lines, at, width, mn_major):
    """Writes a matrix of bytes into the image: lines of 32 bytes along k, or 16 lines of k."""
    line, byte = np.indices(lines.shape)
    if mn_major and width:
        to = byte // width * at["leading"] + line // 8 * at["stride"] + line % 8 * width + byte % width
    elif mn_major:
        to = byte // 16 * at["stride"] + line // 8 * at["leading"] + line % 8 * 16 + byte % 16
    elif width:
        to = line // 8 * at["stride"] + line % 8 * width + byte
    else:
        to = line // 8 * at["stride"] + byte // 16 * at["leading"] + line % 8 * 16 + byte % 16
    to = to + at["start"]
    if width:
        to ^= ((to >> 7) - at["first_line"] & width // 16 - 1) << 4
    assert len(np.unique(to)) == to.size
    image[to] = lines


def layout_of(width, mn_major, lines, base, step=0, first_line=0):
    """One as kernels use: an operand of 8·`lines` rows or columns, as part of a tile with more of both."""
    if mn_major:
        return layout(base, 32 * width, 8 * width, first_line) if width else layout(base, 128 * lines, 128)
    return layout(base + step, 16, 16 * width, first_line) if width else layout(base, 128 * lines, 128)


def fragments(a):
    """A (64 × 32 bytes) as each thread of the warpgroup holds it: 4 words."""
    thread, i = np.indices((128, 4))
    row, k = thread // 32 * 16 + thread % 32 // 4 + i % 2 * 8, thread % 4 * 4 + i // 2 * 16
    words = a.view(np.uint8).reshape(64, 32)
    return np.stack([words[row, k + byte] for byte in range(4)], -1).copy().view(np.uint32)[..., 0]


def summed(a, b, start):
    """a b + start in float32, along k: the CPU machine's own sum, since each product is exact."""
    d = start.copy()
    for k in range(a.shape[1]):
        d += a[:, k, None].astype(np.float32) * b[None, k].astype(np.float32)
    return d


# --- e4m3 on tensor cores: prim/wgmma.cuh says what they add

KEPT = 13  # bits below the largest exponent, and behind the leading bit of the sum
PRODUCT_BITS = 3 + 3  # of mantissa in an exact product of two numbers of e4m3
LEAST = -6  # exponent of e4m3 numbers without a leading bit, and of 0


def exponents(a, b, start):
    """Of the products, (64, 32, N), and the largest of an element's addends, (64, N), as the hardware sees them.

    A product's is the sum of its factors', whatever the leading bit of the product.
    """
    def of(x):
        return np.frexp(x.astype(np.float64))[1] - 1

    each = np.maximum(of(a), LEAST)[:, :, None] + np.maximum(of(b), LEAST)[None]
    product = a.astype(np.float64)[:, :, None] * b.astype(np.float64)[None]
    return each, np.maximum(np.where(product, each, -99).max(1), np.where(start, of(start), -99))


def on_tensor_cores(a, b, start):
    """a b + start of one wgmma of e4m3."""
    _, largest = exponents(a, b, start)
    unit = np.ldexp(1.0, largest - KEPT)
    product = a.astype(np.float64)[:, :, None] * b.astype(np.float64)[None]
    whole = (np.trunc(product / unit[:, None]).sum(1) + np.trunc(start / unit)) * unit
    mantissa, exponent = np.frexp(whole)
    return np.ldexp(np.trunc(np.ldexp(mantissa, 1 + KEPT)), exponent - 1 - KEPT)


def e4m3_bound(a, b, start):
    """The most by which one wgmma of e4m3 may miss the exact a b + start, for each element.

    With 2^e the largest exponent, what is cut off an addend is less than u = 2^(e − KEPT), and nothing off a
    product that is at most 2^(KEPT − PRODUCT_BITS) below 2^e. The sum, by then off by so much, is cut by less
    than 2^−KEPT of itself.
    """
    each, largest = exponents(a, b, start)
    cut = 1 + (each < (largest - (KEPT - PRODUCT_BITS))[:, None]).sum(1)  # the accumulator, and small products
    aligned = cut * np.ldexp(1.0, largest - KEPT)
    exact = a.astype(np.float64) @ b.astype(np.float64) + start
    return aligned + 2.0**-KEPT * (np.abs(exact) + aligned)


# --- whole tiles


def tile_constants(element, rows, cols, depth, width):
    return {"Element": element, "ROWS": rows, "COLS": cols, "DEPTH": depth, "WIDTH": width}


def sum_of_times(a, b, times):
    d = np.zeros((len(a), len(b)), np.float32)
    for _ in range(times):
        d = summed(a, b.T, d)
    return d


def attended(q, k, v, sigma):
    s = q.astype(np.float64) @ k.T.astype(np.float64) * sigma
    p = np.exp(s - s.max(1, keepdims=True))
    return p @ v.astype(np.float64) / p.sum(1, keepdims=True)


def attention_inputs(machine, rng):
    """Three tiles of 64 keys or two of 96, and what each kernel is launched with."""
    q, k, v = (rng.standard_normal((n, 128)).astype(DTYPES["bfloat16"]) for n in (128, 192, 192))
    args = {"g_q": machine.upload(q), "g_k": machine.upload(k), "g_v": machine.upload(v),
            "g_o": machine.empty((128, 128), "bfloat16")}
    return args, attended(q, k, v, 128 ** -0.5), np.float32(128 ** -0.5 * np.log2(np.e))


def specialised(machine, args, sigma2, fault=0):
    """Launches the warp-specialised kernel on what `attention_inputs` gives."""
    constants = {"Element": "bfloat16", "DEPTH": 128, "COLS": 64, "FAULT": fault}
    maps = {name[2:]: machine.tensor_map(args[name], (rows, 64), 128)
            for name, rows in (("g_q", 128), ("g_k", 64), ("g_v", 64))}
    launch(machine, "specialised.cu", "attention", 384, (128 + 4 * 64) * 256 + 1024, constants, **maps,
           g_o=args["g_o"], tiles=3, sigma2=sigma2)
