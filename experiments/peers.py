"""Other people's kernels as rows like any other: PyTorch's scaled-dot-product attention, where installed.

A peer gets the same inputs, check and timer. What it launches, and what it moves through memory, is unknown.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from cuattn.kernels.base import Unsupported

BACKENDS = {"torch_math": "MATH", "torch_flash": "FLASH_ATTENTION", "torch_cudnn": "CUDNN_ATTENTION"}


def require(machine, params) -> None:
    """Refuse what this peer cannot do here, before any memory is taken.

    Raises
    ------
    Unsupported
        No GPU, no PyTorch with CUDA, or a shape its attention does not compute as ours does.
    """
    name = params["kernel"]
    if machine.name != "gpu":
        raise Unsupported(f"{name}: PyTorch's attention is compared on a GPU only; this is the CPU machine")
    if find_spec("torch") is None:
        raise Unsupported(f"{name}: PyTorch is not installed; install it with CUDA to compare with it")
    import torch

    if not torch.cuda.is_available():
        raise Unsupported(
            f"{name}: this PyTorch ({torch.__version__}) sees no GPU; install a build with CUDA"
        )
    if params["causal"] and params["m"] != params["n"]:
        raise Unsupported(
            f"{name}: PyTorch aligns a causal mask top-left, which differs where m ≠ n; use m = n"
        )
    if params["mode"] == "graph":
        raise Unsupported(
            f"{name}: it allocates its output at each call, so it is timed as a launch; use mode launch"
        )


class TorchSubject:
    """`scaled_dot_product_attention` held to one backend. It returns no LSE."""

    def __init__(self, machine, params, arrays):
        import torch

        self._machine, self._torch, self._params, self.arrays = machine, torch, params, arrays
        heads_first = params["layout"] == "bhsd"
        self._qkv = [
            x if heads_first else x.transpose(1, 2)
            for x in (self._to_torch(arrays[name]) for name in ("q", "k", "v"))
        ]
        self._heads_first = heads_first
        self._backend = getattr(torch.nn.attention.SDPBackend, BACKENDS[params["kernel"]])
        self._out = None
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def _to_torch(self, array):
        # 16-bit integers cross DLPack whatever either side knows of bfloat16.
        integers = array.view(self._machine.xp.int16)
        return self._torch.from_dlpack(integers).view(getattr(self._torch, self._params["dtype"]))

    def run(self) -> None:
        torch, p = self._torch, self._params
        self._out = None  # so that its memory serves again, as in a loop over layers
        handle = self._machine.xp.cuda.get_current_stream().ptr
        # NOTE: ExternalStream(0) is not the default stream but a new one, which no event of ours would see.
        stream = torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()
        with torch.cuda.stream(stream), torch.nn.attention.sdpa_kernel(self._backend):
            try:
                self._out = torch.nn.functional.scaled_dot_product_attention(
                    *self._qkv, is_causal=p["causal"], enable_gqa=p["h"] != p["hkv"]
                )
            except RuntimeError as error:
                if "No available kernel" in str(error):
                    raise Unsupported(
                        f"{p['kernel']}: PyTorch has no such kernel for this shape and dtype"
                    ) from error
                raise

    def poison(self) -> None:
        self._out = None  # each run makes its output anew

    def columns(self) -> dict[str, Any]:
        return {}

    def input_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def outside_bytes(self) -> int:
        """Most bytes PyTorch held beyond the inputs: output and workspace."""
        return self._torch.cuda.max_memory_allocated() - self._before

    def close(self) -> None:
        """Give PyTorch's cached memory back, so that the next case has the whole card."""
        self._out = self._qkv = None
        self._torch.cuda.empty_cache()

    def verdict(self):
        from experiments.subjects import check_prefill

        out = self._out if self._heads_first else self._out.transpose(1, 2)
        integers = self._machine.xp.from_dlpack(out.contiguous().view(self._torch.int16))
        o = integers.view(self.arrays["q"].dtype)
        # The math backend rounds its scores to the inputs' dtype before the softmax.
        rounding = "input" if self._params["kernel"] == "torch_math" else "float32"
        return check_prefill(self._params, self.arrays, o, None, rounding)
