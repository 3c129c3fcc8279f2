"""The host's side of GPU calls, played without a GPU: arrays are addresses, launches are only noted."""
from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import binding, gpu_driver
from cuattn import compile as compiler
from cuattn import machine as machines
from cuattn.devices import CARDS
from cuattn.kernels import ROWS

gpu = pytest.importorskip("cuattn.gpu")
pytest.importorskip("cupy_backends", reason="NVRTC comes with CuPy, which is not installed here")


class Array:
    """Looks like a cupy.ndarray to the GPU machine."""

    __cuda_array_interface__: dict = {}

    def __init__(self, shape, dtype):
        self._memory = np.zeros(int(np.prod(shape)) + 16, dtype)
        self.shape, self.dtype, self.itemsize = tuple(shape), self._memory.dtype, self._memory.itemsize
        self.strides = np.empty(shape, dtype).strides if self._memory.size > 16 else (0,) * len(shape)
        self.data = SimpleNamespace(ptr=self._memory.ctypes.data // 16 * 16 + 16, device_id=0)


Array.__module__ = "cupy"  # by which a repeated call knows CuPy's arrays


class Tensor:
    """Looks like a CUDA torch.Tensor."""

    is_cuda, requires_grad, device = True, False, SimpleNamespace(index=0)

    def __init__(self, shape, dtype="float16"):
        self._array = Array(shape, dtype)
        self.shape, self.dtype = self._array.shape, f"torch.{dtype}"

    def stride(self):
        return tuple(step // self._array.itemsize for step in self._array.strides)

    def data_ptr(self):
        return self._array.data.ptr

    def element_size(self):
        return self._array.itemsize

    def new_empty(self, shape, dtype):
        return Tensor(shape, dtype)


class Launched(list):
    """The bytes of a launch's arguments, in order."""

    def __init__(self, buffers, names):
        super().__init__(map(bytes, buffers))
        self._names = names

    def of(self, *names: str) -> list[bytes]:
        """Those of these names."""
        return [self[self._names.index(name)] for name in names]


def played_driver(name: str, out, *words) -> None:
    """Encodes tensor maps; moves only those that it has encoded."""
    if name == "cuTensorMapEncodeTiled":
        out._obj[:] = b"\x07" * 128
    assert any(bytes(out._obj)), f"{name} of a map that was never encoded"


@pytest.fixture
def launches(monkeypatch):
    """The argument bytes of every launch, and what is cleared, in order; GPU arrays go to a played H200."""
    stream, noted = SimpleNamespace(ptr=7), []
    played = object.__new__(gpu.GpuMachine)
    played.xp = SimpleNamespace(
        ndarray=Array, empty=Array, asarray=lambda x: x,
        cuda=SimpleNamespace(get_current_stream=lambda: stream, Stream=SimpleNamespace(null=nullcontext())),
    )
    played.index, played.device, played._capturing = 0, CARDS["H200"], False
    function = SimpleNamespace(kernel=SimpleNamespace(ptr=1), max_dynamic_shared_size_bytes=1 << 20)
    played._kernel = lambda path, entry: function
    monkeypatch.setattr(gpu.GpuMachine, "clear", lambda self, array: noted.append(("clear", place(array))))
    begin = gpu.GpuLaunch.__init__

    def named(self, stream, function, grid, block, smem_bytes, args, cluster=1):
        begin(self, stream, function, grid, block, smem_bytes, args, cluster)
        self.names = [name for name, _ in args]

    # What is launched is compiled in test_compile.py.
    monkeypatch.setattr(compiler, "build", lambda file, entry, constants, target: compiler.Built(
        Path(file), entry, target, "", 0, 0))
    monkeypatch.setattr(gpu.GpuLaunch, "__init__", named)
    monkeypatch.setattr(gpu.GpuLaunch, "__call__",
                        lambda self: noted.append(Launched(self._buffers, self.names)))
    monkeypatch.setattr(gpu_driver, "_call", played_driver)
    monkeypatch.setitem(machines._open, "gpu", played)
    monkeypatch.setattr(binding, "repeats", {})
    monkeypatch.setattr("cuattn.dispatch.repeats", binding.repeats)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(
        float16="float16", float32="float32", int32="int32", is_grad_enabled=lambda: True,
        cuda=SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=0)),
    ))
    return noted


def place(array) -> int:
    """Where a played array lies."""
    return array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr


def address(argument: bytes) -> int:
    return int.from_bytes(argument[:8], "little")


def qkv(make=Array, dtype=ml_dtypes.bfloat16):
    return make((1, 130, 8, 64), dtype), make((1, 200, 2, 64), dtype), make((1, 200, 2, 64), dtype)


def test_each_call_passes_its_own_addresses(launches):
    """The second call of a signature plans nothing and sets addresses."""
    for _ in range(3):
        q, k, v = qkv()
        o, lse = cuattn.attention(q, k, v, kernel="flash", return_lse=True)
        assert [address(a) for a in launches[-1][:5]] == [x.data.ptr for x in (q, k, v, o, lse)]
        assert (o.shape, o.dtype.name) == ((1, 130, 8, 64), "bfloat16")
        assert (lse.shape, lse.dtype.name) == ((1, 8, 130), "float32")
    assert len(binding.repeats) == 1 and len(launches) == 3


@pytest.mark.parametrize("kernel", [name for name, row in ROWS.items() if row.family == "prefill"])
@pytest.mark.parametrize("b, m, n, h", [(0, 5, 5, 1), (1, 0, 5, 1), (1, 5, 0, 1), (1, 5, 5, 0)])
def test_arrays_without_elements(launches, kernel, b, m, n, h):
    """All their strides are zero."""
    for _ in range(2):  # the second call only moves addresses
        q, k, v = (Array((b, length, h, 64), "float16") for length in (m, n, n))
        o, lse = cuattn.attention(q, k, v, kernel=kernel, return_lse=True)
        assert (o.shape, lse.shape) == ((b, m, h, 64), (b, h, m))
    assert len(binding.repeats) == 1


@pytest.mark.parametrize(("card", "options", "kernel"), [
    ("H200", {}, "mla_hopper"), ("H200", {"constants": {"rows": 16}}, "mla"), ("H200", {"kernel": "mla"}, "mla"),
    ("A100-80", {}, "mla"),
])
def test_auto_of_latents_is_the_one_that_is_made_for_the_card(launches, card, options, kernel):
    machines._open["gpu"].device = CARDS[card]
    q, kv = Array((2, 1, 16, 576), "float16"), Array((4, 16, 1, 576), "float16")
    table, lengths = Array((2, 2), "int32"), Array((2,), "int32")
    assert cuattn.plan_decode_mla(q, kv, table, lengths, softmax_scale=0.1, **options).row.name == kernel


def test_decode_of_no_sequence(launches):
    k, table, lengths = Array((80, 16, 2, 64), "float16"), Array((0, 40), "int32"), Array((0,), "int32")
    assert cuattn.decode(Array((0, 1, 8, 64), "float16"), k, k, table, lengths).shape == (0, 1, 8, 64)


def test_the_scratch_between_two_launches_is_each_calls_own(launches):
    k, v = (Array((80, 16, 2, 64), "float16") for _ in range(2))
    table, lengths = Array((2, 40), "int32"), Array((2,), "int32")
    for call in range(3):
        q = Array((2, 1, 8, 64), "float16")
        o, lse = cuattn.decode(q, k, v, table, lengths, kernel="paged", return_lse=True)
        first, merge = launches[2 * call :]
        assert address(first[0]) == q.data.ptr
        assert (address(first[5]), address(first[6])) == (address(merge[0]), address(merge[1]))
        assert (address(merge[2]), address(merge[3])) == (o.data.ptr, lse.data.ptr)


@pytest.mark.parametrize("make", [Array, Tensor])
def test_counters_are_each_calls_own_and_cleared_before_it(launches, make):
    k, v = (make((80, 16, 2, 64), "float16") for _ in range(2))
    table, lengths = make((2, 40), "int32"), make((2,), "int32")
    for call in range(3):
        o, lse = cuattn.decode(make((2, 1, 8, 64), "float16"), k, v, table, lengths, return_lse=True)
        (what, cleared), launch = launches[2 * call :]
        assert (what, cleared) == ("clear", address(launch[9]))
        assert (address(launch[5]), address(launch[6])) == (place(o), place(lse))
    assert len(binding.repeats) == 1 and len(launches) == 6


def test_pages_are_copied_within_each_calls_own_pool(launches):
    """And where there is another one, every call is asked whether it lies apart."""
    lists = Array((3,), "int32"), Array((3,), "int32")
    for _ in range(3):
        k, v = (Array((80, 16, 2, 64), "float16") for _ in range(2))
        cuattn.copy_pages(k, v, *lists)
        assert [address(a) for a in launches[-1][:6]] == [x.data.ptr for x in (k, v, *lists, k, v)]
    out = [Array((80, 16, 2, 64), "float16") for _ in range(2)]
    cuattn.copy_pages(k, v, *lists, k_out=out[0], v_out=out[1])
    assert [address(a) for a in launches[-1][4:6]] == [x.data.ptr for x in out]
    with pytest.raises(cuattn.ContractError, match="k_out: expected memory apart from k_cache"):
        cuattn.copy_pages(k, v, *lists, k_out=k, v_out=v)
    assert len(binding.repeats) == 1 and len(launches) == 4


@pytest.mark.parametrize("make", [Array, Tensor])
def test_rotated_queries_are_each_calls_own(launches, make):
    """Appends with and without angles, with and without queries, and of both pairings share nothing. Scales, here
    none, are the last four arguments."""
    table, lengths = make((2, 4), "int32"), make((2,), "int32")
    for _ in range(2):
        cos, sin = (make((64, 32), "float32") for _ in range(2))
        rows, cache = make((2, 3, 2, 64), "float16"), make((8, 16, 2, 64), "float16")
        q = make((2, 3, 8, 64), "float16")
        args = rows, rows, cache, cache, table, lengths
        for interleaved in (False, True):
            turned = cuattn.append_kv(*args, cos=cos, sin=sin, q=q, interleaved=interleaved)
            assert type(turned) is make and turned.shape == q.shape
            assert [address(a) for a in launches[-1][:-4]] == [place(x) for x in (*args, cos, sin, q, turned)]
        assert cuattn.append_kv(*args, cos=cos, sin=sin) is None and len(launches[-1]) == 8 + 4
        assert cuattn.append_kv(*args) is None and len(launches[-1]) == 6 + 4
    assert len(binding.repeats) == 4 and len(launches) == 8


@pytest.mark.parametrize("make, held", [(Array, "uint8"), (Tensor, "float8_e4m3fn")])
def test_scales_are_each_calls_own(launches, make, held):
    """Arrays by their places; numbers are part of what repeats, and which of the two is which as well."""
    table, lengths, q = make((2, 4), "int32"), make((2,), "int32"), make((2, 1, 8, 64), "float16")
    numbers = [{"k_scale": 0.5}, {"v_scale": 0.5}, {"k_scale": 0.5, "v_scale": 2.0}, {}]
    for _ in range(2):
        cache, rows = make((8, 16, 2, 64), held), make((2, 3, 2, 64), "float16")
        given = {"kv_dtype": "float8_e4m3"}
        for shape in ((8, 2), (2,)):
            scales = {name: make(shape, "float32") for name in ("k_scale", "v_scale")}
            for call, first in ((cuattn.decode, (q,)), (cuattn.append_kv, (rows, rows))):
                call(*first, cache, cache, table, lengths, **scales, **given)
                assert [address(a) for a in launches[-1].of(*scales)] == [place(x) for x in scales.values()]
        for scales in numbers:
            cuattn.decode(q, cache, cache, table, lengths, **scales, **given)
            assert [address(a) for a in launches[-1].of("k_scale", "v_scale")] == [0, 0]
            numbered = launches[-1].of("k_scale_number", "v_scale_number")
            assert [np.frombuffer(a, np.float32)[0] for a in numbered] == [
                scales.get(name, 1.0) for name in ("k_scale", "v_scale")]
    assert len(binding.repeats) == 4 + len(numbers)


@pytest.mark.parametrize("make", [Array, Tensor])
@pytest.mark.parametrize("kernel, stored", [("flash", "o"), ("flash_hopper", "g_o")])
def test_offsets_and_sinks_are_each_calls_own(launches, make, kernel, stored):
    for _ in range(3):
        q, k = make((130, 8, 64), "float16"), make((200, 2, 64), "float16")
        begin_q, begin_k, sinks = make((4,), "int32"), make((4,), "int32"), make((8,), "float32")
        o, lse = cuattn.attention_varlen(q, k, k, begin_q, begin_k, 70, 90, causal=True, sinks=sinks,
                                         kernel=kernel, return_lse=True)
        assert (o.shape, lse.shape) == ((130, 8, 64), (8, 130))
        passed = launches[-1].of(stored, "lse", "sinks", "cu_seqlens_q", "cu_seqlens_k")
        assert [address(a) for a in passed] == [place(x) for x in (o, lse, sinks, begin_q, begin_k)]
    assert len(binding.repeats) == 1 and sum(launch[0] != "clear" for launch in launches) == 3


def test_with_checks_only_dense_attention_is_repeated(launches, monkeypatch):
    """It has no values to look at; every other call looks at its own."""
    read = []
    monkeypatch.setattr(gpu.GpuMachine, "download", lambda self, x: read.append(x) or np.zeros(x.shape, x.dtype))
    monkeypatch.setenv("CUATTN_CHECK", "1")
    pool, none = [Array((80, 16, 2, 64), "float16") for _ in range(2)], Array((0,), "int32")
    for calls in (1, 2):
        rows, table = Array((1, 1, 2, 64), "float16"), (Array((1, 4), "int32"), Array((1,), "int32"))
        cuattn.attention(rows, rows, rows)
        packed = [Array((5, 2, 64), "float16") for _ in range(3)]
        cuattn.attention_varlen(*packed, *(Array((3,), "int32") for _ in range(2)), 0, 0)
        cuattn.decode(rows, *pool, *table)
        cuattn.append_kv(rows, rows, *pool, *table)
        cuattn.copy_pages(*pool, none, none)
        assert len(read) == 8 * calls
    assert len(binding.repeats) == 1


def test_options_are_part_of_the_signature(launches):
    q, k, v = qkv()
    for options in ({}, {"causal": True}, {"softmax_scale": 0.5}, {"kernel": "standard"},
                    {"window_size": (5, 0)}, {"window_size": (6, 0)}, {"softcap": 30.0}, {"softcap": 50.0}, {}):
        cuattn.attention(q, k, v, **options)
    assert len(binding.repeats) == 8


def test_a_launch_with_an_array_of_its_own_making_is_not_repeated(launches, monkeypatch):
    """A kernel's argument list may hold a tensor derived from an input; its address would go stale."""
    row = cuattn.kernels.ROWS["flash"]
    arguments = row.arguments

    def derived(shape, plan, t):
        q = machines.Tensor(t["q"].address, t["q"].shape, t["q"].strides, t["q"].dtype, 2, t["q"].array)
        return arguments(shape, plan, {**t, "q": q})

    monkeypatch.setitem(row.__dict__, "arguments", derived)
    cuattn.attention(*qkv(), kernel="flash")
    assert not binding.repeats


@pytest.mark.parametrize(("card", "change", "options", "kernel"), [
    ("H200", None, {}, "flash_hopper"),
    ("H200", "repeated", {}, "flash"),
    ("H200", None, {"constants": {"warps": 8}}, "flash"),
    ("H200", None, {"kernel": "flash"}, "flash"),
    ("A100-80", None, {}, "flash"),
])
def test_auto_is_the_fastest_that_takes_the_arrays(launches, card, change, options, kernel):
    """The copies of flash_hopper step by positive strides; its first argument is a map of 128 bytes."""
    machines._open["gpu"].device = CARDS[card]
    q, k, v = qkv()
    if change == "repeated":  # one row of keys, seen 200 times
        k.strides = (0, 0, *k.strides[2:])
    assert cuattn.plan_attention(q, k, v, **options).row.name == kernel
    for _ in range(2):
        cuattn.attention(q, k, v, **options)
        assert len(launches[-1][0]) == (128 if kernel == "flash_hopper" else len(launches[-1][1]))


def test_auto_on_the_cpu_machine_is_flash():
    assert cuattn.plan_attention(*(np.ones((1, 16, 1, 64), "float16") for _ in range(3))).row.name == "flash"


def test_results_come_in_the_callers_kind(launches):
    for _ in range(2):
        o, lse = cuattn.attention(*qkv(Tensor, "float16"), return_lse=True)
        assert type(o) is Tensor and type(lse) is Tensor and lse.dtype == "torch.float32"


def test_what_a_gpu_call_refuses(launches):
    q, k, v = qkv()
    with pytest.raises(cuattn.ContractError, match="out: expected an array of q's kind, Array, got ndarray"):
        cuattn.attention(q, k, v, out=np.zeros((1, 130, 8, 64), "float16"))
    cuattn.attention(q, k, v)
    k.data.device_id = 1
    with pytest.raises(cuattn.ContractError, match="k: expected an array on GPU 0, .*got one on GPU 1; move"):
        cuattn.attention(q, k, v)
    tensors = qkv(Tensor, "float16")
    cuattn.attention(*tensors)
    tensors[1].requires_grad = True
    with pytest.raises(cuattn.ContractError, match="k: expected a tensor without gradient, .*detach it"):
        cuattn.attention(*tensors)


def test_odd_options_get_their_sentence(launches):
    """They cannot be looked up among earlier calls; the plan says what is wrong with them."""
    for options, match in (({"constants": [1]}, "constants: expected a dict"),
                           ({"kernel": ["flash"]}, "kernel: expected a kernel's name"),
                           ({"causal": np.ones((2, 2))}, "causal: expected True or False"),
                           ({"softmax_scale": [1]}, "softmax_scale: expected a number")):
        with pytest.raises(cuattn.ContractError, match=match):
            cuattn.attention(*qkv(), **options)
