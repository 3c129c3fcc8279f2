"""A PyTorch of NumPy arrays on GPUs that are not there, and a library of vLLM's kernels for it."""
from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
from test_experiments_case import PlayedGpu

from experiments import environment

PARTITION = 512
# As the operators are registered in vLLM 0.10, csrc/torch_bindings.cpp.
NAMES = (
    "query key_cache value_cache num_kv_heads scale block_tables seq_lens block_size max_seq_len "
    "alibi_slopes kv_cache_dtype k_scale v_scale tp_rank blocksparse_local_blocks blocksparse_vert_stride "
    "blocksparse_block_size blocksparse_head_sliding_step"
).split()


class Tensor:
    """What the adapters ask of a tensor; those on the host are no other."""

    def __init__(self, array):
        self.array = array

    shape = property(lambda self: self.array.shape)
    ndim = property(lambda self: self.array.ndim)
    device = "cuda"

    def __getitem__(self, places):
        return Tensor(self.array[_array(places)])

    def __sub__(self, other):
        return Tensor(self.array - _array(other))

    def __add__(self, other):
        return Tensor(self.array + _array(other))

    def __floordiv__(self, number):
        return Tensor(self.array // number)

    def __mod__(self, number):
        return Tensor(self.array % number)

    def index_select(self, dim, index):
        assert dim == 0 and index.array.dtype == np.int64
        return Tensor(self.array[index.array])

    def index_copy_(self, dim, index, rows):
        assert dim == 0 and index.array.dtype == np.int64
        self.array[index.array] = rows.array
        return self

    def long(self):
        return self.to(np.int64)

    def clamp(self, min):
        return Tensor(self.array.clip(min))

    def detach(self):
        return self

    cpu = cuda = detach

    def to(self, what):
        return self if isinstance(what, str) else Tensor(self.array.astype(what))

    def float(self):
        return self.to(np.float32)

    def numpy(self):
        return self.array

    def clone(self):
        return Tensor(self.array.copy())

    def flatten(self, start, end):
        assert (start, end) == (0, 1)
        return Tensor(self.array.reshape(-1, *self.shape[2:]))

    def unsqueeze(self, dim):
        return Tensor(np.expand_dims(self.array, dim))

    def view(self, dtype):
        return Tensor(self.array.view(dtype))

    def squeeze(self, dim):
        return Tensor(self.array.squeeze(dim))

    def unflatten(self, dim, sizes):
        assert dim == -1
        return Tensor(self.array.reshape(*self.shape[:-1], *sizes))

    def permute(self, *order):
        return Tensor(self.array.transpose(order))

    def transpose(self, one, other):
        return Tensor(self.array.swapaxes(one, other))

    def contiguous(self):
        return self if self.array.flags.c_contiguous else _allocated(np.ascontiguousarray(self.array))

    def element_size(self):
        return self.array.itemsize

    def fill_(self, value):
        self.array[...] = value
        return self


def _array(x):
    return x.array if isinstance(x, Tensor) else x


def _allocated(array) -> Tensor:
    sys.modules["torch"].allocated += array.nbytes
    return Tensor(array)


def play(monkeypatch, gpus: int = 1) -> ModuleType:
    """A PyTorch that sees so many GPUs; `allocated` is what its tensors have taken."""
    torch = ModuleType("torch")
    torch.__spec__, torch.__version__, torch.allocated = ModuleSpec("torch", None), "2.9.0", 0
    torch.float16, torch.float32, torch.bfloat16 = np.float16, np.float32, ml_dtypes.bfloat16
    torch.uint8, torch.float8_e4m3fn = np.uint8, ml_dtypes.float8_e4m3fn
    torch.int16, torch.int32, torch.from_dlpack, torch.from_numpy = np.int16, np.int32, Tensor, Tensor
    torch.tensor = lambda values, dtype: Tensor(np.array(values, dtype))
    torch.arange = lambda end, dtype, device: Tensor(np.arange(end, dtype=dtype))
    torch.zeros = lambda shape, dtype, device: _allocated(np.zeros(shape, dtype))
    torch.empty = lambda shape, dtype, device: _allocated(np.full(shape, 7, dtype))
    torch.empty_like = lambda x: _allocated(np.full_like(x.array, 7))

    def taken() -> int:
        return torch.allocated

    torch.cuda = SimpleNamespace(
        is_available=lambda: gpus > 0, reset_peak_memory_stats=lambda: None, memory_allocated=taken,
        max_memory_allocated=taken, empty_cache=lambda: None, default_stream=lambda: None,
        stream=lambda stream: nullcontext(), synchronize=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


class _Arrays:
    """NumPy, and what CuPy has beyond it."""

    cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0))
    from_dlpack = staticmethod(lambda tensor: tensor.array)

    def __getattr__(self, name):
        return getattr(np, name)


class Gpu(PlayedGpu):
    """A machine whose arrays PyTorch takes and gives."""

    xp = _Arrays()


def play_gpu(cpu, monkeypatch) -> Gpu:
    """That machine, on which PyTorch is played and nothing slows its clock."""
    monkeypatch.setattr(environment, "sensors", lambda: {"measured_throttle_reasons": ""})
    play(monkeypatch)
    return Gpu(cpu)


class Operator:
    """One of the two kernels: attention from caches in its own layout, by the names of its arguments."""

    def __init__(self, name: str, scales: str = "Tensor"):
        self.default = self
        self.calls: list[dict] = []
        outputs = ["out"] if name.endswith("v1") else ["out", "exp_sums", "max_logits", "tmp_out"]
        types = dict.fromkeys(("k_scale", "v_scale"), scales)  # others are not asked for
        self._schema = SimpleNamespace(
            arguments=[SimpleNamespace(name=x, type=types.get(x)) for x in outputs + NAMES]
        )

    def __call__(self, *values):
        values = [x.array if isinstance(x, Tensor) else x for x in values]
        given = SimpleNamespace(**dict(zip((x.name for x in self._schema.arguments), values, strict=True)))
        self.calls.append(vars(given))
        given.out[...] = 0
        for b, keys in enumerate(given.seq_lens):
            assert keys <= given.max_seq_len
            for h in range(given.query.shape[1]) if keys else ():
                self._row(given, b, h, keys)

    def _row(self, given, b: int, h: int, keys: int) -> None:
        page, dim = given.block_size, given.query.shape[-1]
        kv = h // (given.query.shape[1] // given.num_kv_heads)
        pages = given.block_tables[b, : math.ceil(keys / page)]
        assert given.key_cache.shape[1:] == (given.num_kv_heads, dim // 8, page, 8)
        assert given.value_cache.shape[1:] == (given.num_kv_heads, dim, page)
        k = given.key_cache[pages, kv].swapaxes(1, 2).reshape(-1, dim)[:keys].astype(np.float64)
        v = given.value_cache[pages, kv].swapaxes(1, 2).reshape(-1, dim)[:keys].astype(np.float64)
        scores = given.scale * (k @ given.query[b, h].astype(np.float64))
        if not hasattr(given, "tmp_out"):
            weights = np.exp(scores - scores.max())
            given.out[b, h] = weights @ v / weights.sum()
            return
        for i in range(0, keys, PARTITION):
            part, at = slice(i, i + PARTITION), (b, h, i // PARTITION)
            weights = np.exp(scores[part] - scores[part].max())
            given.max_logits[at], given.exp_sums[at] = scores[part].max(), weights.sum()
            given.tmp_out[at] = weights @ v[part] / weights.sum()
        row = (b, h, slice(math.ceil(keys / PARTITION)))
        shares = given.exp_sums[row] * np.exp(given.max_logits[row] - given.max_logits[row].max())
        given.out[b, h] = shares @ given.tmp_out[row].astype(np.float64) / shares.sum()


def play_vllm(monkeypatch, folder, **scales) -> SimpleNamespace:
    """A library that CUATTN_VLLM_LIBRARY names and `play`'s PyTorch loads; returns its operators."""
    path = folder / "_C.abi3.so"
    path.touch()
    monkeypatch.setenv("CUATTN_VLLM_LIBRARY", str(path))
    names = ("paged_attention_v1", "paged_attention_v2")
    kernels = SimpleNamespace(**{name: Operator(name, **scales) for name in names})
    torch = sys.modules["torch"]
    torch.ops = SimpleNamespace(_C=SimpleNamespace())

    def load_library(name):
        if name != str(path):
            raise OSError(f"Could not load this library: {name}")
        vars(torch.ops._C).update(vars(kernels))

    torch.ops.load_library = load_library
    return kernels
