"""Other people's kernels as rows like any other: PyTorch's scaled-dot-product attention, on a GPU where it is installed.

A peer gets the same inputs, check and timer. Its plan has the surface of ours (`run`, `o`, `lse`, `cost`), but no launches
to describe, and what it moves through memory is unknown.
"""
from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

from cuattn.kernels.base import AttentionShape, Cost, Unsupported

BACKENDS = {"torch_math": "MATH", "torch_flash": "FLASH_ATTENTION", "torch_cudnn": "CUDNN_ATTENTION"}


def plan(machine, params, arrays):
    """The plan of a peer for these arrays.

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
        raise Unsupported(f"{name}: this PyTorch ({torch.__version__}) sees no GPU; install a build with CUDA")
    if params["causal"] and params["m"] != params["n"]:
        raise Unsupported(f"{name}: PyTorch aligns a causal mask top-left, which differs where m ≠ n; use m = n")
    if params["mode"] == "graph":
        raise Unsupported(f"{name}: it allocates its output at each call, so it is timed as a launch; use mode launch")
    return TorchPlan(machine, torch, params, arrays)


class TorchPlan:
    """`scaled_dot_product_attention` held to one backend."""

    plan = None
    lse = None
    row = SimpleNamespace(rounding="float32")

    def __init__(self, machine, torch, params, arrays):
        self._machine, self._torch, self._params = machine, torch, params
        heads_first = params["layout"] == "bhsd"
        self._qkv = [x if heads_first else x.transpose(1, 2)
                     for x in (self._to_torch(arrays[name]) for name in ("q", "k", "v"))]
        self._heads_first = heads_first
        self._backend = getattr(torch.nn.attention.SDPBackend, BACKENDS[params["kernel"]])
        # math rounds its scores to the inputs' dtype before the softmax.
        self.row = SimpleNamespace(rounding="input" if params["kernel"] == "torch_math" else "float32")
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
        stream = torch.cuda.ExternalStream(self._machine.xp.cuda.get_current_stream().ptr)
        with torch.cuda.stream(stream), torch.nn.attention.sdpa_kernel(self._backend):
            try:
                self._out = torch.nn.functional.scaled_dot_product_attention(
                    *self._qkv, is_causal=p["causal"], enable_gqa=p["h"] != p["hkv"])
            except RuntimeError as error:
                if "No available kernel" in str(error):
                    raise Unsupported(f"{p['kernel']}: PyTorch has no such kernel for this shape and dtype") from error
                raise

    @property
    def o(self):
        """The last output as an array of the machine, in the case's layout."""
        if self._out is None:
            return None
        out = self._out if self._heads_first else self._out.transpose(1, 2)
        integers = self._machine.xp.from_dlpack(out.contiguous().view(self._torch.int16))
        return integers.view(self._machine.empty((0,), self._params["dtype"]).dtype)

    def peak_bytes(self) -> int:
        """Most bytes PyTorch held beyond the inputs: output and workspace."""
        return self._torch.cuda.max_memory_allocated() - self._before

    def cost(self) -> Cost:
        p = self._params
        shape = AttentionShape(p["b"], p["h"], p["hkv"], p["m"], p["n"], p["d"], p["dtype"], p["causal"])
        return Cost(4 * p["b"] * p["h"] * shape.visible * p["d"], 0, 0, 0)
