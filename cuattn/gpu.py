"""The GPU machine: CuPy for memory, streams and events; our own binaries loaded as RawModules.

Only this module imports CuPy.
"""
from __future__ import annotations

import ctypes
import struct
import sys
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from operator import attrgetter

import numpy as np

from cuattn import gpu_driver, tensor_map
from cuattn.devices import from_driver, require_supported
from cuattn.machine import DeviceError, MachineUnavailable, Tensor, check_cluster, pack
from cuattn.tensor_map import TensorMap

POISON = 0xFF  # every byte: NaN in each float type
ADDRESS = struct.Struct("<Q")
# Two reads of the cycle counter around a fixed time on the nanosecond clock: cycles / time is the SM clock.
CLOCK_SOURCE = """extern "C" __global__ void sm_clock(long long* out, long long duration) {
  long long t0, t1, c0 = clock64();
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t1)); } while (t1 - t0 < duration);
  out[0] = clock64() - c0;
  out[1] = t1 - t0;
}"""


def _import_cupy():
    try:
        import cupy
    except ImportError as error:
        raise MachineUnavailable(f"the GPU machine needs CuPy ({error}); "
                                 "in the checkout run: pip install -e '.[cuda13]'") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MachineUnavailable(f"the GPU machine found no usable NVIDIA driver ({error}); "
                                 "install one, or use 'cpu'") from None
    if not count:
        raise MachineUnavailable("the GPU machine found no NVIDIA GPU; use the machine 'cpu'")
    return cupy


class _Foreign:
    """Speaks the CUDA stream protocol for a stream that is only a number."""

    def __init__(self, handle: int):
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class GpuLaunch:
    """A kernel, its grid and its packed arguments.

    NOTE: straight to the driver; a RawKernel call costs several times more.
    """

    def __init__(self, current_stream, function, grid, block: int, smem_bytes: int, args, cluster: int = 1):
        from cupy_backends.cuda.api.driver import launchKernel

        self._stream, self._function, self._launch = current_stream, function, launchKernel
        self._where = (function.ptr, *grid, block, 1, 1, smem_bytes)
        self._clustered = None
        if cluster > 1:
            self._clustered = gpu_driver.ClusterLaunch(function.ptr, grid, block, smem_bytes, cluster)
        packed = pack(args)
        self._maps = {i for i, (_, value) in enumerate(args) if isinstance(value, TensorMap)}
        self._empty_maps = {i for i in self._maps if args[i][1].empty}
        self._buffers = [gpu_driver.aligned_buffer(raw) if i in self._maps
                         else ctypes.create_string_buffer(raw, len(raw)) for i, (_, raw) in enumerate(packed)]
        self._pointers = (ctypes.c_void_p * max(len(packed), 1))(
            *(ctypes.addressof(b) for b in self._buffers))
        self._arguments = ctypes.addressof(self._pointers)

    def slot(self, i: int):
        """(set, buffer) such that set(buffer, 0, address) moves argument `i`.

        The driver copies arguments as it launches. The map of an empty array has none to move.
        """
        if i not in self._maps:
            return ADDRESS.pack_into, self._buffers[i]
        return _stay if i in self._empty_maps else gpu_driver.replace_address, self._buffers[i]

    def __call__(self) -> None:
        if self._clustered:
            return self._clustered(self._stream().ptr, self._arguments)
        return self._launch(*self._where, self._stream().ptr, self._arguments, 0)


class GpuMachine:
    """An NVIDIA GPU through CuPy; see `cuattn.machine.Machine`. Work goes to the caller's current stream."""

    name = "gpu"

    def __init__(self):
        self.xp = _import_cupy()
        self._modules: dict[str, object] = {}
        self._pool = None
        self._capturing = False
        runtime = self.xp.cuda.runtime
        self.index = runtime.getDevice()
        p = runtime.getDeviceProperties(self.index)
        self.uuid = p["uuid"].hex() if isinstance(p.get("uuid"), bytes) else None
        self.device = require_supported(from_driver(
            p["name"].decode(), (p["major"], p["minor"]), sms=p["multiProcessorCount"],
            smem_per_block=p["sharedMemPerBlockOptin"], smem_per_sm=p["sharedMemPerMultiprocessor"],
            l2_bytes=p["l2CacheSize"], memory_bytes=p["totalGlobalMem"],
            registers_per_sm=p["regsPerMultiprocessor"],
        ))

    # --- memory

    def empty(self, shape, dtype):
        """A CuPy array, every byte 0xFF."""
        array = self.xp.empty(shape, dtype=_numpy_dtype(dtype))
        self.poison(array)
        return array

    def upload(self, array):
        return self.xp.asarray(np.ascontiguousarray(array))

    def download(self, array) -> np.ndarray:
        if not hasattr(array, "data_ptr"):
            return self.xp.asnumpy(array)
        array = array.detach().cpu()
        if str(array.dtype) != "torch.bfloat16":
            return array.numpy()
        return array.view(sys.modules["torch"].int16).numpy().view(_numpy_dtype("bfloat16"))

    def poison(self, array) -> None:
        if array.nbytes:
            array.data.memset_async(POISON, array.nbytes, self.xp.cuda.get_current_stream())

    def clear(self, array) -> None:
        """Every element 0."""
        if hasattr(array, "data_ptr"):
            array.zero_()
        elif array.nbytes:
            array.data.memset_async(0, array.nbytes, self.xp.cuda.get_current_stream())

    def tensor(self, array) -> Tensor:
        """CuPy arrays, PyTorch tensors and anything with `__cuda_array_interface__`, without a copy."""
        if hasattr(array, "data_ptr"):
            shape, strides = tuple(array.shape), tuple(array.stride())
            address, itemsize = array.data_ptr(), array.element_size()
            dtype = str(array.dtype).rpartition(".")[2]
        else:
            array = array if isinstance(array, self.xp.ndarray) else self.xp.asarray(array)
            shape, itemsize = array.shape, array.itemsize
            if any(stride % itemsize for stride in array.strides):
                raise ValueError(f"array: expected strides in whole elements of {itemsize} bytes, got "
                                 f"{array.strides} bytes; copy it")
            strides = tuple(stride // itemsize for stride in array.strides)
            address, dtype = array.data.ptr, array.dtype.name
        # A dimension of one element has no stride; what is stored there may be anything.
        strides = tuple(0 if n == 1 else s for n, s in zip(shape, strides))
        return Tensor(address, shape, strides, dtype, itemsize, array)

    def tensor_map(self, array, box, swizzle: int = 0) -> TensorMap:
        """A kernel's argument by which bulk copies move tiles of an array, or of a Tensor.

        Raises
        ------
        ValueError
            See `cuattn.tensor_map.describe`, which also says what the parameters are.
        """
        tensor = array if isinstance(array, Tensor) else self.tensor(array)
        return gpu_driver.encode(tensor_map.describe(tensor, box, swizzle))

    def index_of(self, array) -> int:
        """The number of the GPU that holds it."""
        if hasattr(array, "data_ptr"):
            return array.device.index
        return (array if isinstance(array, self.xp.ndarray) else self.xp.asarray(array)).data.device_id

    def maker(self, array):
        """(make(shape, dtype), address(array)) for new arrays of the caller's kind, not initialised."""
        if hasattr(array, "new_empty"):
            torch = sys.modules["torch"]
            return (lambda shape, dtype: array.new_empty(shape, dtype=getattr(torch, dtype))), _torch_address
        empty = self.xp.empty
        return (lambda shape, dtype: empty(shape, _numpy_dtype(dtype))), attrgetter("data.ptr")

    def like(self, array, shape, dtype: str):
        """A new array of the caller's kind, not initialised."""
        return self.maker(array)[0](shape, dtype)

    # --- work

    def stream(self, array=None):
        """The caller's current stream: PyTorch's if `array` is a PyTorch tensor, else CuPy's.

        While CuPy's current stream is being captured it is that one, whatever the array.
        """
        if array is not None and hasattr(array, "data_ptr") and not self._capturing:
            return self.foreign(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream)
        return nullcontext()

    @cache
    def foreign(self, handle: int):
        """CuPy's stream for a stream that someone else made."""
        if not handle:
            return self.xp.cuda.Stream.null
        return self.xp.cuda.Stream.from_external(_Foreign(handle))

    def lanes(self, count: int):
        """Lanes 1 … count − 1 become streams beside the current one, which is lane 0.

        What is launched on them inside starts after what the current stream holds by now; what the current
        stream gets afterwards starts when they have ended. In a captured stream they are captured too.
        """
        return nullcontext() if count == 1 else self._forked([self._side(lane) for lane in range(1, count)])

    @contextmanager
    def _forked(self, sides):
        current, event = self.xp.cuda.get_current_stream(), self.xp.cuda.Event
        fork = event(disable_timing=True)
        fork.record(current)
        for side in sides:
            side.wait_event(fork)
        try:
            yield
        finally:
            for side in sides:
                join = event(disable_timing=True)
                join.record(side)
                current.wait_event(join)

    @cache
    def _side(self, lane: int):
        """The stream of a lane beside the first."""
        return self.xp.cuda.Stream(non_blocking=True)

    def prepare(self, built, grid, block: int, smem_bytes: int, args, lane: int = 0,
                cluster: int = 1) -> GpuLaunch:
        """A launch with these arguments; everything that can be done once is done here."""
        check_cluster(cluster, grid)
        kernel = self._kernel(built.path, built.entry)
        if smem_bytes > 48 * 1024 and kernel.max_dynamic_shared_size_bytes < smem_bytes:
            kernel.max_dynamic_shared_size_bytes = smem_bytes
        stream = partial(self._side, lane) if lane else self.xp.cuda.get_current_stream
        return GpuLaunch(stream, kernel.kernel, grid, block, smem_bytes, args, cluster)

    def launch(self, built, grid, block: int, smem_bytes: int, args, cluster: int = 1) -> None:
        self.prepare(built, grid, block, smem_bytes, args, cluster=cluster)()

    def _module(self, path):
        key = str(path)
        if key not in self._modules:
            self._modules[key] = self.xp.RawModule(path=key)
        return self._modules[key]

    def _kernel(self, path, entry: str):
        return self._module(path).get_function(entry)

    def module_array(self, path, name: str, shape: tuple[int, ...], dtype: str):
        """The binary's variable of that name, where it lies on the device."""
        return self.xp.ndarray(shape, _numpy_dtype(dtype), self._module(path).get_global(name))

    def synchronize(self) -> None:
        """Waits for the device.

        Raises
        ------
        DeviceError
            A kernel faulted; the process's CUDA context is lost with it.
        """
        try:
            self.xp.cuda.get_current_stream().synchronize()
            self.xp.cuda.runtime.deviceSynchronize()
        except self.xp.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(f"a kernel failed on {self.device.name}: {error}") from None

    @contextmanager
    def counting(self):
        """Nothing is counted on a GPU."""
        yield None

    # --- timing

    def event(self):
        return self.xp.cuda.Event()

    def elapsed_us(self, start, stop) -> float:
        return self.xp.cuda.get_elapsed_time(start, stop) * 1e3

    def flush_l2(self) -> None:
        """Overwrites twice the L2 cache."""
        self._flush_buffer.data.memset_async(0, self._flush_buffer.nbytes, self.xp.cuda.get_current_stream())

    @cached_property
    def _flush_buffer(self):
        return self.xp.empty(2 * self.device.l2_bytes, dtype=np.uint8)

    def capture(self, fn):
        """A callable that replays what `fn` launches as one CUDA graph.

        `fn` must not allocate; a plan's `run` does not. It runs once before it is captured, after whatever the
        device has been given by then.
        """
        self.synchronize()  # a stream of its own waits for no other, and `fn` reads what those write
        with self.xp.cuda.Stream(non_blocking=True) as stream:
            fn()  # modules load outside the capture
            stream.synchronize()
            self._capturing = True
            try:
                stream.begin_capture()
                fn()
                graph = stream.end_capture()
            finally:
                self._capturing = False
        return lambda: graph.launch(self.xp.cuda.get_current_stream())

    def sm_clock_mhz(self) -> float:
        """The SM clock now, by a kernel that counts its cycles over 20 µs."""
        self.hold(20)
        cycles, nanoseconds = (int(x) for x in self.xp.asnumpy(self._clock[1]))
        return cycles / nanoseconds * 1e3

    def hold(self, us: float) -> None:
        """Keeps the stream busy for so long, so that the host can queue work behind it."""
        kernel, out = self._clock
        kernel((1,), (1,), (out, np.int64(us * 1e3)))

    @cached_property
    def _clock(self):
        return self.xp.RawModule(code=CLOCK_SOURCE).get_function("sm_clock"), self.xp.empty(2, dtype=np.int64)

    # --- footprint

    def reset_peak(self, limit: int | None = None) -> None:
        """Starts a fresh memory pool, so that `peak_pool_bytes` counts what is allocated from now on.

        A pool that has served before hands out pieces of what it already holds, and its size says nothing.

        Parameters
        ----------
        limit : int, optional
            Bytes that the pool may hold; an allocation beyond them is CuPy's OutOfMemoryError.
        """
        self.xp.get_default_memory_pool().free_all_blocks()
        if self._pool is not None:
            self._pool.free_all_blocks()
        self._pool = self.xp.cuda.MemoryPool()
        if limit is not None:
            self._pool.set_limit(size=max(limit, 1))  # CuPy takes 0 for no limit
        self.xp.cuda.set_allocator(self._pool.malloc)

    def lift_limit(self) -> None:
        """The pool may hold what the device has, again."""
        if self._pool is not None:
            self._pool.set_limit(size=0)

    def peak_pool_bytes(self) -> int:
        """High-water mark of CuPy's pool, in bytes, since `reset_peak`."""
        pool = self.xp.get_default_memory_pool() if self._pool is None else self._pool
        return pool.total_bytes()

    def used_bytes(self) -> int:
        """Bytes of the device in use by everyone."""
        free, total = self.xp.cuda.runtime.memGetInfo()
        return total - free


def _stay(buffer, offset: int, address: int) -> None:
    """Leaves the argument as it is."""


def _torch_address(array) -> int:
    return array.data_ptr()


@cache
def _numpy_dtype(dtype):
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)
