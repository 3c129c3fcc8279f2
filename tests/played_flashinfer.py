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

    def _attend(self, q, caches, queries, pages, *, k_scale=1.0, v_scale=1.0, causal=False, sinks=None):
        """O and LSE of packed queries; `pages`: of each sequence its pages and how many keys they hold."""
        said, (k_cache, v_cache) = self.planned[-1], (x.array for x in caches)
        assert k_cache.shape[1] == said["page_size"]
        keys = [tuple(x[mine].reshape(-1, *x.shape[2:])[:n] for x in (k_cache, v_cache)) for mine, n in pages]
        return self._over(q, keys, queries, k_scale, v_scale, causal, sinks)

    def _over(self, q, keys, queries, k_scale=1.0, v_scale=1.0, causal=False, sinks=None):
        """The same by the K and V of each sequence."""
        said = self.planned[-1]
        d = said.get("head_dim") or said["head_dim_qk"]
        window, cap = said.get("window_left", -1), said.get("logits_soft_cap") or 0.0
        assert q.array.dtype == said["q_data_type"] and q.shape[1:] == (said["num_qo_heads"], d)
        o, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
        for i, (k, v) in enumerate(keys):
            assert k.dtype == v.dtype == said["kv_data_type"] and k.shape[1:] == (said["num_kv_heads"], d)
            rows = slice(queries[i], queries[i + 1])
            wide = (x.astype(np.float64)[None] for x in (q.array[rows], k, v))
            one, each = attention(*(s * x for s, x in zip((1.0, k_scale, v_scale), wide)), causal=causal or window >= 0,
                                  window_size=(window, -1), softcap=cap, sinks=sinks)
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
             window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, q_len_per_req=1):
        self.planned.append({**locals()})

    def run(self, q, paged_kv_cache, *, k_scale=None, v_scale=None, out=None):
        said = self.planned[-1]
        self.ran.append({"k_scale": k_scale, "v_scale": v_scale})
        assert v_scale is None or isinstance(v_scale, float)
        pages = _pages(*(said[name] for name in ("indptr", "indices", "last_page_len", "page_size")))
        scales = {name: 1.0 if x is None else x for name, x in self.ran[-1].items()}
        m = said["q_len_per_req"]
        queries = range(0, (len(pages) + 1) * m, m)
        o, _ = self._attend(q, paged_kv_cache, queries, pages, causal=m > 1, **scales)
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
             num_kv_heads, head_dim, page_size, causal=False, window_left=-1, logits_soft_cap=None,
             q_data_type="float16", kv_data_type=None):
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


class BatchPrefillWithRaggedKVCacheWrapper(_Paged):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 kv_indptr_buf=None):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)

    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, causal=False, window_left=-1,
             logits_soft_cap=None, q_data_type="float16", kv_data_type=None):
        self.planned.append({**locals()})

    def run(self, q, k, v, *, out=None):
        said = self.planned[-1]
        self.ran.append({})
        ends = said["kv_indptr"].array
        keys = [tuple(x.array[first:end] for x in (k, v)) for first, end in zip(ends, ends[1:])]
        out.array[...], _ = self._over(q, keys, said["qo_indptr"].array, causal=said["causal"])
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, backend="auto"):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        buffers = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        assert all((x is not None) == use_cuda_graph for x in buffers)
        self.backend, self.window = backend, None

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, causal=False, window_left=-1, logits_soft_cap=None, q_data_type="float16",
             kv_data_type=None):
        assert self.window in (None, window_left)
        self.planned.append({**locals()})

    def run(self, q, paged_kv_cache, *args, out=None):
        said, (sinks, scale) = self.planned[-1], args or (None, None)
        assert (sinks is None) == (self.window is None)
        assert scale is None or abs(scale - said["head_dim_qk"] ** -0.5) < 1e-9
        self.ran.append({"sinks": sinks})
        tables = (said[f"paged_kv_{name}"] for name in ("indptr", "indices", "last_page_len"))
        out.array[...], _ = self._attend(
            q, paged_kv_cache, said["qo_indptr"].array, _pages(*tables, said["page_size"]), causal=said["causal"],
            sinks=None if sinks is None else sinks.array.astype(np.float64))
        return out


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Compiled for what it is made with, under a name without the head dim."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, backend="auto",
                 q_data_type=None, kv_data_type=None, head_dim_qk=128, head_dim_vo=128, window_left=-1):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
                         paged_kv_indices_buf, paged_kv_last_page_len_buf, backend)
        assert head_dim_qk == head_dim_vo == 128 and q_data_type == kv_data_type
        self.window = window_left


def append_paged_kv_cache(append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr,
                          kv_last_page_len, kv_layout="NHD"):
    assert kv_layout == "NHD" and batch_indices.array.dtype == positions.array.dtype == np.int32
    page_size = paged_kv_cache[0].shape[1]
    pages = _pages(kv_indptr, kv_indices, kv_last_page_len, page_size)
    for row, (b, at) in enumerate(zip(batch_indices.array, positions.array)):
        mine, keys = pages[b]
        assert at < keys
        for cache, rows in zip(paged_kv_cache, (append_key, append_value)):
            assert cache.array.dtype == rows.array.dtype
            cache.array[mine[at // page_size], at % page_size] = rows.array[row]


def play_flashinfer(monkeypatch) -> list[_Paged]:
    """The module `flashinfer`; returns its wrappers as they are made."""
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    for wrapper in (BatchAttentionWithAttentionSinkWrapper, BatchDecodeWithPagedKVCacheWrapper,
                    BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper,
                    MultiLevelCascadeAttentionWrapper):
        setattr(module, wrapper.__name__, wrapper)
    module.append_paged_kv_cache = append_paged_kv_cache
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(_Paged, "made", [])
    return _Paged.made
