"""FlashAttention-3: the Hopper kernels of flash-attention, for dense prefill and for paged decode."""

from __future__ import annotations

from cuattn.kernels.base import Unsupported
from experiments.peers.torch_peer import TorchPeer, refuse_dtype


def refuse(name: str, params) -> None:
    """Refuse element types that are not compared, and those that it multiplies in."""
    if held := params.get("kv_dtype"):
        raise Unsupported(f"{name}: expected a cache of q's dtype, got one of {held}: it reads float8_e4m3 for queries of "
                          "float8_e4m3 alone, whose result is another; choose another peer")
    refuse_dtype(name, params)


class Prefill(TorchPeer):
    """`flash_attn_func`."""

    def prepare(self) -> None:
        from flash_attn_interface import flash_attn_func

        self._attend = flash_attn_func
        self._qkv = self.qkv(heads_first=False)

    def launch(self) -> None:
        self.out = self.lse = None  # so that their memory serves again
        self.out, self.lse, *_ = self._attend(
            *self._qkv, causal=self.params["causal"], return_attn_probs=True
        )


class Decode(TorchPeer):
    """`flash_attn_with_kvcache` over pages, with the splits that its own rule chooses.

    Its scheduler reads the lengths on the GPU at each call, so a captured graph follows them.
    """

    def prepare(self) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        self._attend = flash_attn_with_kvcache
        self._inputs = {name: self.tensor(name) for name in ("q", "k_cache", "v_cache", "cache_seqlens")}
        self._inputs["page_table"] = self.tensor("block_table").clamp(min=0)  # entries without a token

    def launch(self) -> None:
        self.out = self.lse = None
        self.out, self.lse, *_ = self._attend(**self._inputs, causal=True, return_softmax_lse=True)


SUBJECTS = {"fa3": Prefill, "fa3_decode": Decode}
