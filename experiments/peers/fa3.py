"""FlashAttention-3: the Hopper kernels of flash-attention, for prefill and for paged decode.

Its log-sum-exp is not judged beside sinks: that it counts them is nowhere said.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

from cuattn.kernels.base import Unsupported
from experiments.peers.torch_peer import TorchPeer, refuse_dtype, refuse_features
from experiments.suite import PACKED

TAKEN = ("window", "softcap", "sinks", "queries", "varlen", "paged")


def refuse(name: str, params) -> None:
    """Refuse element types that are not compared, those that it multiplies in, and what this build of it lacks."""
    if held := params.get("kv_dtype"):
        raise Unsupported(f"{name}: expected a cache of q's dtype, got one of {held}: it reads float8_e4m3 for "
                          "queries of float8_e4m3 alone, whose result is another; choose another peer")
    refuse_dtype(name, params)
    refuse_features(name, params, TAKEN)
    if params.get("softcap") and _flags().get("FLASHATTENTION_DISABLE_SOFTCAP"):
        raise Unsupported(f"{name}: this FlashAttention-3 was built without softcap; install one with it")
    if params.get("sinks") and "sinks" not in _parameters():
        raise Unsupported(f"{name}: this FlashAttention-3 takes no sinks; install one that does")


def _flags() -> dict[str, bool]:
    """What it was built with, where it says so."""
    return import_module("flash_attn_config").CONFIG["build_flags"] if find_spec("flash_attn_config") else {}


def _parameters():
    """What its functions take; they have the same names for scores."""
    return signature(import_module("flash_attn_interface").flash_attn_func).parameters


class _Attention(TorchPeer):
    """A function of it with its inputs, and what becomes of scores."""

    def prepare(self) -> None:
        self._attend, self._inputs = self.choose(import_module("flash_attn_interface"))
        self._inputs |= {"causal": self.params.get("causal", True), **self._scores()}

    def choose(self, library) -> tuple:
        """The function, and its inputs by name."""
        raise NotImplementedError

    def _scores(self) -> dict[str, Any]:
        p, scores = self.params, {}
        if p.get("window") is not None:
            scores["window_size"] = (p["window"], 0)
        if p.get("softcap"):
            scores["softcap"] = p["softcap"]
        if p.get("sinks"):
            scores["sinks"] = self.tensor("sinks").to(self.torch.bfloat16)  # which it holds them to
        return scores

    def launch(self) -> None:
        self.out = self.lse = None  # so that their memory serves again
        self.out, lse, *_ = self._attend(**self._inputs)
        self.lse = None if self.params.get("sinks") else lse

    def pages(self):
        """The table of pages, which is read behind a sequence's last one too."""
        return self.tensor("block_table").clamp(min=0)


class Prefill(_Attention):
    """`flash_attn_func`; of packed sequences `flash_attn_varlen_func`, over pages `flash_attn_with_kvcache`."""

    def choose(self, library) -> tuple:
        p = self.params
        if p["layout"] != PACKED:
            dense = dict(zip("qkv", self.qkv(heads_first=False)))
            return library.flash_attn_func, {**dense, "return_attn_probs": True}
        q, k, v = (self.tensor(name) for name in "qkv")
        queries, keys = (self.tensor(f"cu_seqlens_{side}") for side in "qk")
        packed = {"q": q, "cu_seqlens_q": queries, "max_seqlen_q": p["m"]}
        if p.get("page_size"):
            return library.flash_attn_with_kvcache, {
                **packed, "k_cache": k, "v_cache": v, "page_table": self.pages(),
                "cache_seqlens": keys[1:] - keys[:-1], "return_softmax_lse": True,
            }
        return library.flash_attn_varlen_func, {
            **packed, "k": k, "v": v, "cu_seqlens_k": keys, "max_seqlen_k": p["n"], "return_attn_probs": True,
        }


class Decode(_Attention):
    """`flash_attn_with_kvcache` over pages, with the splits that its own rule chooses.

    Its scheduler reads the lengths on the GPU at each call, so a captured graph follows them.
    """

    def choose(self, library) -> tuple:
        inputs = {name: self.tensor(name) for name in ("q", "k_cache", "v_cache", "cache_seqlens")}
        return library.flash_attn_with_kvcache, {**inputs, "page_table": self.pages(), "return_softmax_lse": True}


SUBJECTS = {"fa3": Prefill, "fa3_decode": Decode}
