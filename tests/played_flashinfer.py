"""A FlashInfer of NumPy arrays, by the signatures of 0.6.18: what `plan` says is what `run` computes, in float64."""
from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
from played_torch import Tensor

from cuattn.reference import attention


class _Paged:
    """A wrapper over a paged cache. `planned` is what each call of `plan` said, `ran` what each of `run` did."""

    made: list[_Paged] = []

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
        assert float_workspace_buffer.array.dtype == np.uint8 and kv_layout == "NHD"
        self.graph, self.planned, self.ran = use_cuda_graph, [], []
        _Paged.made.append(self)

    def _attend(self, q, caches, queries, pages, *, k_scale=1.0, v_scale=1.0, causal=False):
        """O of packed queries; `pages`: of each sequence its pages and how many keys they hold."""
        said, (k_cache, v_cache) = self.planned[-1], (x.array for x in caches)
        assert (q.array.dtype, k_cache.dtype) == (said["q_data_type"], said["kv_data_type"])
        assert q.shape[1:] == (said["num_qo_heads"], said["head_dim"])
        assert k_cache.shape[1:] == (said["page_size"], said["num_kv_heads"], said["head_dim"])
        o, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
        for i, (mine, keys) in enumerate(pages):
            rows = slice(queries[i], queries[i + 1])
            k, v = (x[mine].reshape(-1, *x.shape[2:])[:keys].astype(np.float64)[None] for x in (k_cache, v_cache))
            one, each = attention(q.array[rows].astype(np.float64)[None], k_scale * k, v_scale * v, causal=causal)
            o[rows], lse[rows] = one[0], each[0].T
        return o, lse


def _pages(indptr, indices, last, page_size: int) -> list[tuple[np.ndarray, int]]:
    ends, last = indptr.array, last.array
    assert all(x.dtype == np.int32 for x in (ends, indices.array, last))
    counts = np.diff(ends)
    return [(indices.array[start:][:n], max(n - 1, 0) * page_size + end) for start, n, end in zip(ends, counts, last)]


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
                 paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        assert use_tensor_cores and all((x is not None) == use_cuda_graph for x in buffers)

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
             q_data_type="float16", kv_data_type=None):
        self.planned.append({**locals()})

    def run(self, q, paged_kv_cache, *, k_scale=None, v_scale=None, out=None):
        said = self.planned[-1]
        self.ran.append({"k_scale": k_scale, "v_scale": v_scale})
        assert v_scale is None or isinstance(v_scale, float)
        pages = _pages(*(said[name] for name in ("indptr", "indices", "last_page_len", "page_size")))
        scales = {name: 1.0 if x is None else x for name, x in self.ran[-1].items()}
        o, _ = self._attend(q, paged_kv_cache, range(len(pages) + 1), pages, **scales)
        out.array[...] = o
        return out


class MultiLevelCascadeAttentionWrapper(_Paged):
    """Levels are merged by their log-sum-exp."""

    def __init__(self, num_levels, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False,
                 qo_indptr_buf_arr=None, paged_kv_indptr_buf_arr=None, paged_kv_indices_buf_arr=None,
                 paged_kv_last_page_len_buf_arr=None):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self.levels = num_levels
        buffers = (qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, paged_kv_last_page_len_buf_arr)
        assert all(len(x) == num_levels if use_cuda_graph else x is None for x in buffers)

    def plan(self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads,
             num_kv_heads, head_dim, page_size, causal=False, q_data_type="float16", kv_data_type=None):
        self.planned.append({**locals()})
        assert self.levels == len(qo_indptr_arr) == len(paged_kv_indptr_arr)

    def run(self, q, paged_kv_cache):
        said, o, total = self.planned[-1], 0.0, 0.0
        self.ran.append({})
        for queries, *table in zip(said["qo_indptr_arr"], said["paged_kv_indptr_arr"], said["paged_kv_indices_arr"],
                                   said["paged_kv_last_page_len"], strict=True):
            pages = _pages(*table, said["page_size"])
            part, lse = self._attend(q, paged_kv_cache, queries.array, pages)
            weight = np.exp(lse)[..., None]
            o, total = o + weight * part, total + weight
        return Tensor((o / total).astype(q.array.dtype))


def play_flashinfer(monkeypatch) -> list[_Paged]:
    """The module `flashinfer`; returns its wrappers as they are made."""
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, MultiLevelCascadeAttentionWrapper):
        setattr(module, wrapper.__name__, wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(_Paged, "made", [])
    return _Paged.made
