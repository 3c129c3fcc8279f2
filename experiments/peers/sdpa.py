"""PyTorch's scaled-dot-product attention, held to one backend: math, FlashAttention-2 or cuDNN."""

from __future__ import annotations

from cuattn.kernels.base import Unsupported
from experiments.peers.torch_peer import TorchPeer, refuse_features

BACKENDS = {"torch_math": "MATH", "torch_flash": "FLASH_ATTENTION", "torch_cudnn": "CUDNN_ATTENTION"}


def refuse(name: str, params) -> None:
    """Refuse cases that it computes otherwise, or cannot be timed at."""
    refuse_features(name, params)
    if params["causal"] and params["m"] != params["n"]:
        raise Unsupported(
            f"{name}: PyTorch aligns a causal mask top-left, which differs where m ≠ n; use m = n"
        )
    if params["mode"] == "graph":
        raise Unsupported(
            f"{name}: it allocates its output at each call, so it is timed as a launch; use mode launch"
        )


class Sdpa(TorchPeer):
    """`scaled_dot_product_attention`. It returns no LSE."""

    def prepare(self) -> None:
        self._qkv = self.qkv(heads_first=True)
        self._backend = getattr(self.torch.nn.attention.SDPBackend, BACKENDS[self.params["kernel"]])
        if self.params["kernel"] == "torch_math":  # it rounds its scores to the inputs' dtype before the softmax
            self.rounding = "input"

    def launch(self) -> None:
        torch, p = self.torch, self.params
        self.out = None  # so that its memory serves again, as in a loop over layers
        with torch.nn.attention.sdpa_kernel(self._backend):
            try:
                out = torch.nn.functional.scaled_dot_product_attention(
                    *self._qkv, is_causal=p["causal"], enable_gqa=p["h"] != p["hkv"]
                )
            except RuntimeError as error:
                if "No available kernel" in str(error):
                    raise Unsupported(
                        f"{p['kernel']}: PyTorch has no such kernel for this shape and dtype"
                    ) from error
                raise
        self.out = out.transpose(1, 2)


SUBJECTS = dict.fromkeys(BACKENDS, Sdpa)
