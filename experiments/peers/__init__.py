"""Other people's kernels as rows like any other, where their libraries are installed.

A peer gets the same inputs, check and timer. What it launches, and what it moves through memory, is unknown.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from cuattn.kernels.base import Unsupported

#: Of each peer: the module of its adapter, the Python module it needs beside PyTorch, and where that comes from.
ADAPTERS = {
    "torch_math": ("sdpa", "torch", ""),
    "torch_flash": ("sdpa", "torch", ""),
    "torch_cudnn": ("sdpa", "torch", ""),
    "fa3": ("fa3", "flash_attn_interface", "FlashAttention-3, hopper/ of flash-attention"),
    "fa3_decode": ("fa3", "flash_attn_interface", "FlashAttention-3, hopper/ of flash-attention"),
    "flashinfer": ("flashinfer", "flashinfer", "pip install flashinfer-python"),
    "flashinfer_decode": ("flashinfer", "flashinfer", "pip install flashinfer-python"),
    "flashinfer_cascade": ("flashinfer", "flashinfer", "pip install flashinfer-python"),
    "flashinfer_append": ("flashinfer", "flashinfer", "pip install flashinfer-python"),
    "torch_copy": ("torch_copy", "torch", ""),
    "vllm_decode": ("vllm", "torch", ""),  # which looks for the library itself: it need not be installed
}


def make(machine, params, arrays):
    """The subject of a peer's case: owns its output, runs on the caller's current stream."""
    return _adapter(params["kernel"]).SUBJECTS[params["kernel"]](machine, params, arrays)


def require(machine, params) -> None:
    """Refuse what this peer cannot do here, before any memory is taken.

    Raises
    ------
    Unsupported
        No GPU, no PyTorch with CUDA, no such library, or a case it does not compute as ours does.
    """
    name = params["kernel"]
    if machine.name != "gpu":
        raise Unsupported(f"{name}: a peer is compared on a GPU only; this is the CPU machine")
    if find_spec("torch") is None:
        raise Unsupported(f"{name}: PyTorch is not installed; install it with CUDA to compare with it")
    import torch

    if not torch.cuda.is_available():
        raise Unsupported(
            f"{name}: this PyTorch ({torch.__version__}) sees no GPU; install a build with CUDA"
        )
    _, module, source = ADAPTERS[name]
    if find_spec(module) is None:
        raise Unsupported(f"{name}: the module {module} is not installed; install it ({source})")
    _adapter(name).refuse(name, params)


def _adapter(name: str):
    return import_module(f"experiments.peers.{ADAPTERS[name][0]}")
