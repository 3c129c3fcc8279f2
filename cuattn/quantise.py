"""Numbers of eight bits that a cache may hold, each of which stands for itself times a scale.

int8, and e4m3 of the OCP 8-bit floating point specification (2023): four exponent bits, three of mantissa, up to
±448, no infinity. Arrays may be NumPy or CuPy; e4m3 is `ml_dtypes.float8_e4m3fn` to NumPy, and bytes to CuPy.
"""
from __future__ import annotations

import ml_dtypes
import numpy as np

ARRAY_TYPES = {"float8_e4m3fn": "float8_e4m3", "int8": "int8"}  # an array's dtype → what a cache of it holds
LARGEST = {"float8_e4m3": 448.0, "int8": 127.0}
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def numbers(x, kv_dtype: str, xp=np):
    """The numbers that are stored, without their scales, as float32."""
    return x.view(np.int8).astype(np.float32) if kv_dtype == "int8" else xp.asarray(_E4M3)[x.view(np.uint8)]


def quantise(x, kv_dtype: str, scale=1.0, xp=np):
    """x / scale in float32, rounded to the nearest number of that type, of two as near to the even one.

    Parameters
    ----------
    x : float32 array
    kv_dtype : {"float8_e4m3", "int8"}
        Beyond ±448, or −128 and 127, the last one takes all. NaN is kept by e4m3, and 0 as int8.
    scale : float or float32 array
        As broadcast against `x`.

    Returns
    -------
    uint8 array, the bytes.
    """
    x = x / (np.float32(scale) if isinstance(scale, float) else scale)
    if kv_dtype == "int8":
        return xp.where(xp.isnan(x), 0, xp.clip(xp.rint(x), -128, 127)).astype(np.int8).view(np.uint8)
    size = xp.clip(xp.abs(xp.where(xp.isnan(x), 0, x)), 0, np.float32(448)).astype(np.float32)
    exponent = xp.maximum((size.view(np.int32) >> 23) - 127, -6)  # below 2⁻⁶ the step stays 2⁻⁹
    code = 8 * (exponent + 6) + xp.rint(xp.ldexp(size, 3 - exponent)).astype(np.int32)
    code = xp.where(xp.isnan(x), 127, code) + 128 * xp.signbit(x)
    return code.astype(np.uint8)
