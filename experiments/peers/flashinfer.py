"""FlashInfer: dense prefill as a packed batch, paged decode on tensor cores, and decode after a shared prefix.

All are planned on the host for the lengths at hand. As lengths change at every step of a server, a launch
is timed with its plan; a CUDA graph cannot hold it, and `measured_plan_us` says what it leaves out. Of device
time a plan's upload was 10 to 20 µs a prefill on an H200.

It is asked for O alone, as it is by default. Its log-sum-exp, in powers of two, was 1.3e-4 off in decode on
an H200: ten times what a kernel here may be.
"""

from __future__ import annotations

import time

from cuattn.kernels.base import Unsupported
from cuattn.page_tables import to_flashinfer
from experiments.costs import shared_pages
from experiments.inputs import quantised
from experiments.peers.torch_peer import TorchPeer, refuse_dtype

WORKSPACE_BYTES = 512 << 20  # 128 MiB is recommended, and too little for 32 query heads on one KV head
PLANS = 20  # how often the plan is timed


def refuse(name: str, params) -> None:
    """Refuse element types and layouts that are not compared, and levels that are none."""
    refuse_dtype(name, params, ("float8_e4m3",))
    if params.get("layout", "bshd") != "bshd":
        raise Unsupported(f"{name}: takes packed batches, in layout bshd; got {params['layout']}")
    if name == "flashinfer_cascade" and not params.get("prefix"):
        raise Unsupported(f"{name}: expected a prefix, the keys of its first level, got none; choose one")


class _Planned(TorchPeer):
    """A wrapper with a plan; `self._wrapper`, and with the arguments of its `plan` and `run` `self._plan`,
    `self._inputs` and `self._options`."""

    def prepare(self) -> None:
        self.graph = self.params["mode"] == "graph"
        self.workspace = self.torch.zeros(WORKSPACE_BYTES, dtype=self.torch.uint8, device="cuda")
        self.out = self.torch.empty_like(self.tensor("q"))
        self._options = {}
        self.wrap()
        self._wrapper.plan(**self._plan)

    def wrap(self) -> None:
        """Sets `_wrapper`, `_plan` and `_inputs`."""
        raise NotImplementedError

    def ints(self, values):
        """A tensor on the host, from which the plan works."""
        return self.torch.tensor(values, dtype=self.torch.int32)

    def launch(self) -> None:
        if not self.graph:
            self._wrapper.plan(**self._plan)
        self.attend()

    def attend(self) -> None:
        """What its graph holds."""
        self._wrapper.run(*self._inputs, out=self.out.flatten(0, 1), **self._options)

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
        queries, keys = (self.ints(range(0, (p["b"] + 1) * p[rows], p[rows])) for rows in "mn")
        buffers = {}
        if self.graph:
            buffers = {"use_cuda_graph": True, "qo_indptr_buf": queries.cuda(), "kv_indptr_buf": keys.cuda()}
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD", **buffers)
        self._plan = {
            "qo_indptr": queries, "kv_indptr": keys, "num_qo_heads": p["h"], "num_kv_heads": p["hkv"],
            "head_dim_qk": p["d"], "causal": p["causal"], "q_data_type": self.dtype,
        }
        self._inputs = [x.flatten(0, 1) for x in self.qkv(heads_first=False)]


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
            "num_kv_heads": p["hkv"], "head_dim": p["d"], "page_size": page, "q_data_type": self.dtype,
            "kv_data_type": self.kv_dtype,
        }
        self._inputs = [
            self.tensor("q").flatten(0, 1), (self.tensor("k_cache"), self.tensor("v_cache"))
        ]
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
            "q_data_type": self.dtype, "kv_data_type": self.dtype,
        }
        self._inputs = [
            self.tensor("q").flatten(0, 1), (self.tensor("k_cache"), self.tensor("v_cache"))
        ]

    def attend(self) -> None:
        self.out = None  # so that its memory serves again
        self.out = self._wrapper.run(*self._inputs).unsqueeze(1)

    def _levels(self) -> list[tuple]:
        """FlashInfer's tables of the prefix's pages and of those behind it."""
        p, pages = self.params, shared_pages(self.params)
        table, lengths = self.tensor("block_table"), self.tensor("cache_seqlens")
        levels = [(table[:1, :pages], self.ints([p["prefix"]])), (table[:, pages:], lengths - p["prefix"])]
        return [to_flashinfer(*level, p["page_size"]) for level in levels]


SUBJECTS = {"flashinfer": Prefill, "flashinfer_decode": Decode, "flashinfer_cascade": Cascade}
