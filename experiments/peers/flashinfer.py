"""FlashInfer: dense prefill as a packed batch, and paged decode on tensor cores.

Both are planned on the host for the lengths at hand. As lengths change at every step of a server, a launch
is timed with its plan; a CUDA graph cannot hold it, and `measured_plan_us` says what it leaves out. Of device
time a plan's upload was 10 to 20 µs a prefill on an H200.

It is asked for O alone, as it is by default. Its log-sum-exp, in powers of two, was 1.3e-4 off in decode on
an H200: ten times what a kernel here may be.
"""

from __future__ import annotations

import time

from cuattn.kernels.base import Unsupported
from cuattn.page_tables import to_flashinfer
from experiments.peers.torch_peer import TorchPeer, refuse_dtype

WORKSPACE_BYTES = 512 << 20  # 128 MiB is recommended, and too little for 32 query heads on one KV head
PLANS = 20  # how often the plan is timed


def refuse(name: str, params) -> None:
    """Refuse element types and layouts that are not compared."""
    refuse_dtype(name, params)
    if params.get("layout", "bshd") != "bshd":
        raise Unsupported(f"{name}: takes packed batches, in layout bshd; got {params['layout']}")


class _Planned(TorchPeer):
    """A wrapper with a plan; `self._wrapper`, and `self._plan` with the arguments of its `plan`."""

    def prepare(self) -> None:
        torch, p = self.torch, self.params
        self.graph = p["mode"] == "graph"
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        rows = p["b"] * p["m"]
        self._out = torch.empty((rows, p["h"], p["d"]), dtype=self.dtype, device="cuda")
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
        self._wrapper.run(*self._inputs, out=self._out)
        b, m, h, d = (self.params[name] for name in "bmhd")
        self.out = self._out.view(b, m, h, d)

    def columns(self):
        if not self.graph:
            return {}
        start = time.perf_counter()
        for _ in range(PLANS):
            self._wrapper.plan(**self._plan)
        self.torch.cuda.synchronize()
        return {"measured_plan_us": (time.perf_counter() - start) / PLANS * 1e6}

    def poison(self) -> None:
        self._out.fill_(float("nan"))


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
    """`BatchDecodeWithPagedKVCacheWrapper` with tensor cores."""

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
            "kv_data_type": self.dtype,
        }
        self._inputs = [
            self.tensor("q").flatten(0, 1), (self.tensor("k_cache"), self.tensor("v_cache"))
        ]


SUBJECTS = {"flashinfer": Prefill, "flashinfer_decode": Decode}
