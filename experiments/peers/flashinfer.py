"""FlashInfer: prefill of packed batches, over pages too, paged decode on tensor cores, and decode after a prefix.

All are planned on the host for the lengths at hand. As lengths change at every step of a server, a launch
is timed with its plan; a CUDA graph cannot hold it, and `measured_plan_us` says what it leaves out. Of device
time a plan's upload was 10 to 20 µs a prefill on an H200.

It is asked for O alone, as it is by default. Its log-sum-exp, in powers of two, was 1.3e-4 off in decode on
an H200: ten times what a kernel here may be.
"""

from __future__ import annotations

import time
from typing import Any

from cuattn.kernels.base import Unsupported
from cuattn.page_tables import to_flashinfer
from cuattn.reference import default_scale
from experiments.costs import offsets_of, shared_pages
from experiments.inputs import quantised
from experiments.peers.torch_peer import TorchPeer, WritingPeer, refuse_dtype, refuse_features

WORKSPACE_BYTES = 512 << 20  # 128 MiB is recommended, and too little for 32 query heads on one KV head
PLANS = 20  # how often the plan is timed
TAKEN = ("window", "softcap", "sinks", "queries", "varlen", "paged")
SINK_DIM = 128  # the name under which a kernel with sinks is kept has no head dim in it, so it is compared in one


def refuse(name: str, params) -> None:
    """Refuse element types, layouts and features that are not compared, and levels that are none."""
    refuse_dtype(name, params, ("float8_e4m3",) * (name == "flashinfer_decode"))
    refuse_features(name, params, TAKEN)
    if params.get("layout") == "bhsd":
        raise Unsupported(f"{name}: takes packed batches, in layout bshd or thd; got bhsd")
    if params.get("sinks"):
        _refuse_sinks(name, params)
    if name == "flashinfer_cascade" and not params.get("prefix"):
        raise Unsupported(f"{name}: expected a prefix, the keys of its first level, got none; choose one")


def _refuse_sinks(name: str, params) -> None:
    """Its wrapper with sinks reads pages, and knows no caps."""
    if not params.get("page_size"):
        raise Unsupported(f"{name}: takes sinks over pages alone; give prefill a page_size")
    if params.get("softcap"):
        raise Unsupported(f"{name}: takes sinks or a softcap, got both; choose another peer")
    if params.get("kv_dtype") or params["d"] != SINK_DIM:
        raise Unsupported(f"{name}: is compared with sinks at head dim {SINK_DIM} and a cache of q's dtype, got "
                          f"{params['d']} and {params.get('kv_dtype') or params['dtype']}; choose those")


class _Planned(TorchPeer):
    """A wrapper with a plan; `self._wrapper`, and with the arguments of its `plan` and `run` `self._plan`,
    `self._inputs` and `self._options`."""

    def prepare(self) -> None:
        self.graph = self.params["mode"] == "graph"
        self.workspace = self.torch.zeros(WORKSPACE_BYTES, dtype=self.torch.uint8, device="cuda")
        self.out = self.torch.empty_like(self.tensor("q"))
        self._options = {}
        self.wrap()
        self._plan |= {"q_data_type": self.dtype, "kv_data_type": self.kv_dtype, **self._scores()}
        self._wrapper.plan(**self._plan)

    def _scores(self) -> dict[str, Any]:
        """What becomes of scores, as all plans take it."""
        asked = {"window_left": self.params.get("window"), "logits_soft_cap": self.params.get("softcap")}
        return {name: x for name, x in asked.items() if x is not None}

    def wrap(self) -> None:
        """Sets `_wrapper`, `_plan` and `_inputs`."""
        raise NotImplementedError

    def ints(self, values):
        """A tensor on the host, from which the plan works."""
        return self.torch.tensor(values, dtype=self.torch.int32)

    def rows(self, name: str):
        """An input as packed rows, (B·M, H, D)."""
        tensor = self.tensor(name)
        return tensor if tensor.ndim == 3 else tensor.flatten(0, 1)

    def launch(self) -> None:
        if not self.graph:
            self._wrapper.plan(**self._plan)
        self.attend()

    def attend(self) -> None:
        """What its graph holds."""
        rows = self.out if self.out.ndim == 3 else self.out.flatten(0, 1)
        self._wrapper.run(*self._inputs, out=rows, **self._options)

    def columns(self):
        if not self.graph:
            return {}
        start = time.perf_counter()
        for _ in range(PLANS):
            self._wrapper.plan(**self._plan)
        self.torch.cuda.synchronize()
        return {"measured_plan_us": (time.perf_counter() - start) / PLANS * 1e6}


class Prefill(_Planned):
    """`BatchPrefillWithRaggedKVCacheWrapper`, FlashAttention-3's algorithm where the GPU is a Hopper."""

    def wrap(self) -> None:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        p = self.params
        queries, keys = map(self.ints, offsets_of(p))
        buffers = {}
        if self.graph:
            buffers = {"use_cuda_graph": True, "qo_indptr_buf": queries.cuda(), "kv_indptr_buf": keys.cuda()}
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD", **buffers)
        self._plan = {
            "qo_indptr": queries, "kv_indptr": keys, "num_qo_heads": p["h"], "num_kv_heads": p["hkv"],
            "head_dim_qk": p["d"], "causal": p["causal"],
        }
        self._inputs = [self.rows(name) for name in "qkv"]


class _OverPages(_Planned):
    """`BatchPrefillWithPagedKVCacheWrapper`; with sinks `BatchAttentionWithAttentionSinkWrapper`, a kind of it."""

    backend = "auto"

    def over_pages(self, queries: list[int], lengths, caches: tuple[str, str], causal: bool) -> None:
        """Wraps packed queries, given by their offsets, over keys in pages of `caches`."""
        from flashinfer import BatchAttentionWithAttentionSinkWrapper, BatchPrefillWithPagedKVCacheWrapper

        p, page = self.params, self.params["page_size"]
        queries, tables = self.ints(queries), to_flashinfer(self.tensor("block_table"), lengths, page)
        buffers = {}
        if self.graph:
            names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
            buffers = dict(zip(names, (x.clone() for x in tables)))
            buffers |= {"use_cuda_graph": True, "qo_indptr_buf": queries.cuda()}
        sinks = ()
        if p.get("sinks"):
            self._wrapper = BatchAttentionWithAttentionSinkWrapper(
                self.workspace, "NHD", backend=self.backend, q_data_type=self.dtype, kv_data_type=self.dtype,
                head_dim_qk=p["d"], head_dim_vo=p["d"], window_left=p.get("window", -1), **buffers
            )
            sinks = self.tensor("sinks"), default_scale(p["d"], None)
        else:
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
                self.workspace, "NHD", backend=self.backend, **buffers
            )
        ends, indices, last = tables
        self._plan = {
            "qo_indptr": queries, "paged_kv_indptr": ends.cpu(), "paged_kv_indices": indices,
            "paged_kv_last_page_len": last.cpu(), "num_qo_heads": p["h"], "num_kv_heads": p["hkv"],
            "head_dim_qk": p["d"], "page_size": page, "causal": causal,
        }
        self._inputs = [self.rows("q"), tuple(map(self.tensor, caches)), *sinks]


class PagedPrefill(_OverPages):
    """Packed queries over pages, by FlashAttention-3's algorithm where the GPU is a Hopper."""

    def wrap(self) -> None:
        keys = self.tensor("cu_seqlens_k")
        self.over_pages(offsets_of(self.params)[0], keys[1:] - keys[:-1], ("k", "v"), self.params["causal"])


class SinkDecode(_OverPages):
    """Decode with sinks, by FlashAttention-2's algorithm as all its decode: heads share tiles, keys are split."""

    backend = "fa2"

    def wrap(self) -> None:
        m = self.params["m"]
        queries = [i * m for i in range(self.params["b"] + 1)]
        self.over_pages(queries, self.tensor("cache_seqlens"), ("k_cache", "v_cache"), causal=m > 1)


class Decode(_Planned):
    """`BatchDecodeWithPagedKVCacheWrapper` with tensor cores.

    A cache of float8_e4m3 it reads for queries of 16 bits by FlashAttention-2's algorithm. The scale of V is a
    kernel of its own, over O.
    """

    def wrap(self) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        p, page = self.params, self.params["page_size"]
        ends, indices, last = to_flashinfer(self.tensor("block_table"), self.tensor("cache_seqlens"), page)
        buffers = {}
        if self.graph:
            buffers = {
                "use_cuda_graph": True, "paged_kv_indptr_buffer": ends.clone(),
                "paged_kv_indices_buffer": indices.clone(), "paged_kv_last_page_len_buffer": last.clone(),
            }
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "NHD", use_tensor_cores=True, **buffers
        )
        self._plan = {
            "indptr": ends.cpu(), "indices": indices, "last_page_len": last.cpu(), "num_qo_heads": p["h"],
            "num_kv_heads": p["hkv"], "head_dim": p["d"], "page_size": page,
        }
        if p["m"] > 1:
            self._plan["q_len_per_req"] = p["m"]  # which are causal
        self._inputs = [self.rows("q"), (self.tensor("k_cache"), self.tensor("v_cache"))]
        self._options = {name: x for name, x in quantised(p).items() if name != "kv_dtype"}


class Cascade(_Planned):
    """`MultiLevelCascadeAttentionWrapper` of two levels: the prefix, once for all, and each sequence's own keys.

    It allocates what it returns.
    """

    def wrap(self) -> None:
        from flashinfer import MultiLevelCascadeAttentionWrapper

        p = self.params
        queries = [self.ints([0, p["b"]]), self.ints(range(p["b"] + 1))]
        ends, indices, last = zip(*self._levels())
        buffers = {}
        if self.graph:
            buffers = {
                "use_cuda_graph": True, "qo_indptr_buf_arr": [x.cuda() for x in queries],
                "paged_kv_indptr_buf_arr": [x.clone() for x in ends],
                "paged_kv_indices_buf_arr": [x.clone() for x in indices],
                "paged_kv_last_page_len_buf_arr": [x.clone() for x in last],
            }
        self._wrapper = MultiLevelCascadeAttentionWrapper(len(queries), self.workspace, "NHD", **buffers)
        self._plan = {
            "qo_indptr_arr": queries, "paged_kv_indptr_arr": [x.cpu() for x in ends],
            "paged_kv_indices_arr": list(indices), "paged_kv_last_page_len": [x.cpu() for x in last],
            "num_qo_heads": p["h"], "num_kv_heads": p["hkv"], "head_dim": p["d"], "page_size": p["page_size"],
        }
        self._inputs = [self.rows("q"), (self.tensor("k_cache"), self.tensor("v_cache"))]

    def attend(self) -> None:
        self.out = None  # so that its memory serves again
        self.out = self._wrapper.run(*self._inputs).unsqueeze(1)

    def _levels(self) -> list[tuple]:
        """FlashInfer's tables of the prefix's pages and of those behind it."""
        p, pages = self.params, shared_pages(self.params)
        table, lengths = self.tensor("block_table"), self.tensor("cache_seqlens")
        levels = [(table[:1, :pages], self.ints([p["prefix"]])), (table[:, pages:], lengths - p["prefix"])]
        return [to_flashinfer(*level, p["page_size"]) for level in levels]


class Append(WritingPeer):
    """`append_paged_kv_cache`, with the positions of new rows, which serve all layers of a step, at hand."""

    def prepare(self) -> None:
        from flashinfer import append_paged_kv_cache

        p, lengths = self.params, self.tensor("cache_seqlens")
        new = self.torch.arange(p["b"] * p["m"], dtype=self.torch.int32, device="cuda")
        sequence = new // p["m"]
        tables = to_flashinfer(self.tensor("block_table"), lengths + p["m"], p["page_size"])
        self._append = append_paged_kv_cache
        self._inputs = {
            "append_key": self.tensor("k").flatten(0, 1), "append_value": self.tensor("v").flatten(0, 1),
            "batch_indices": sequence, "positions": lengths[sequence.long()] + new % p["m"],
            "paged_kv_cache": (self.tensor("k_cache"), self.tensor("v_cache")),
            **dict(zip(("kv_indptr", "kv_indices", "kv_last_page_len"), tables)), "kv_layout": "NHD",
        }

    def launch(self) -> None:
        self._append(**self._inputs)


def prefill(machine, params, arrays) -> _Planned:
    """The wrapper for where the keys lie."""
    return (PagedPrefill if params.get("page_size") else Prefill)(machine, params, arrays)


def decode(machine, params, arrays) -> _Planned:
    """The wrapper that takes what the case asks for."""
    return (SinkDecode if params.get("sinks") else Decode)(machine, params, arrays)


SUBJECTS = {
    "flashinfer": prefill, "flashinfer_decode": decode, "flashinfer_cascade": Cascade, "flashinfer_append": Append,
}
