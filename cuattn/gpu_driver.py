"""What CuPy does not offer of the CUDA driver: tensor maps, and launches in clusters. Plain ctypes."""
from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache

from cuattn.machine import DeviceError
from cuattn.tensor_map import BYTES, TensorMap

ALIGNMENT = 64  # of a CUtensorMap
# By the width alone: a copy moves bits, and fills with zeros.
_TYPES = {1: 0, 2: 1, 4: 2, 8: 4}  # CU_TENSOR_MAP_DATA_TYPE_UINT8, 16, 32, 64
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTION = 2  # 128 bytes
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
                ("smem_bytes", ctypes.c_uint32), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.POINTER(_Attribute)), ("attribute_count", ctypes.c_uint32)]


@cache
def _driver() -> ctypes.CDLL:
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DeviceError("the CUDA driver's library (libcuda.so.1) does not load; install the driver")


def _call(name: str, *arguments) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise DeviceError(f"{name}: {(text.value or b'unknown error').decode()} (CUDA error {code})")


def aligned_buffer(data: bytes, alignment: int = ALIGNMENT) -> ctypes.Array:
    """A buffer that begins with these bytes on a multiple of the alignment."""
    whole = ctypes.create_string_buffer(len(data) + alignment)
    offset = -ctypes.addressof(whole) % alignment
    part = (ctypes.c_char * len(data)).from_buffer(whole, offset)
    part[:] = data
    return part


def encode(made: TensorMap) -> TensorMap:
    """The map as cuTensorMapEncodeTiled writes it.

    Raises
    ------
    DeviceError
        The driver refuses it.
    """
    if made.empty:
        return made
    out = aligned_buffer(bytes(BYTES))
    rank = made.rank
    sizes = (ctypes.c_uint64 * rank)(*made.sizes)
    strides = (ctypes.c_uint64 * (rank - 1))(*made.strides)
    box, steps = (ctypes.c_uint32 * rank)(*made.box[::-1]), (ctypes.c_uint32 * rank)(*[1] * rank)
    _call("cuTensorMapEncodeTiled", ctypes.byref(out), _TYPES[made.tensor.itemsize], ctypes.c_uint32(rank),
          ctypes.c_void_p(made.tensor.address), sizes, strides, box, steps, 0, _SWIZZLES[made.swizzle],
          _L2_PROMOTION, 0)
    return replace(made, encoded=bytes(out))


def replace_address(buffer: ctypes.Array, offset: int, address: int) -> None:
    """Moves the array of the map in this buffer; `offset` is 0."""
    _call("cuTensorMapReplaceAddress", ctypes.byref(buffer, offset), ctypes.c_void_p(address))


class ClusterLaunch:
    """cuLaunchKernelEx with neighbouring blocks in clusters.

    Parameters
    ----------
    function : int
        CUfunction.
    grid : (x, y, z)
    block, smem_bytes, cluster : int
    """

    def __init__(self, function: int, grid, block: int, smem_bytes: int, cluster: int):
        self._function = ctypes.c_void_p(function)
        value = (ctypes.c_uint32 * 16)(cluster, 1, 1)
        self._attribute = _Attribute(_CLUSTER_DIMENSION, b"", value)
        three = ctypes.c_uint32 * 3
        self._config = _Config(three(*grid), three(block, 1, 1), smem_bytes, None,
                               ctypes.pointer(self._attribute), 1)

    def __call__(self, stream: int, arguments: int) -> None:
        self._config.stream = stream
        _call("cuLaunchKernelEx", ctypes.byref(self._config), self._function, ctypes.c_void_p(arguments),
              None)
