"""What all peers share: our arrays as PyTorch's tensors, our stream as theirs, and their memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn.dispatch import OFFERED
from cuattn.kernels.base import Unsupported
from experiments.costs import shape_of

KV_TYPES = {"float8_e4m3": "float8_e4m3fn"}  # PyTorch's names of what a quantised cache holds


def refuse_dtype(name: str, params, kv_dtypes: tuple[str, ...] = ()) -> None:
    """Refuse element types that the libraries are not compared in; `kv_dtypes`: those of its quantised caches."""
    if params["dtype"] not in ("float16", "bfloat16"):
        raise Unsupported(f"{name}: is compared in float16 and bfloat16, got {params['dtype']}")
    if (held := params.get("kv_dtype")) and held not in kv_dtypes:
        taken = " or ".join(["q's dtype", *kv_dtypes])
        raise Unsupported(f"{name}: is compared over caches of {taken}, got one of {held}")


def refuse_features(name: str, params, taken=()) -> None:
    """Refuse what a case asks for beyond plain attention, but for what is `taken`, as `Row.features` has it."""
    if asked := sorted(shape_of(params).features - {"quantised", *taken}):
        raise Unsupported(f"{name}: is not compared with {OFFERED[asked[0]]}; choose another peer")


class TorchPeer:
    """A library's kernel on PyTorch tensors. `launch` runs it and leaves `out`, and `lse` where it has one.

    `out` is (B, M, H, D) in the inputs' dtype and `lse` (B, H, M) float32, natural logarithm; of packed sequences
    (B·M, H, D) and (H, B·M).
    """

    rounding = "float32"

    def __init__(self, machine, params, arrays):
        import torch

        self.machine, self.torch, self.params, self.arrays = machine, torch, params, arrays
        self.dtype = getattr(torch, params["dtype"])
        self.kv_dtype = getattr(torch, KV_TYPES[params["kv_dtype"]]) if params.get("kv_dtype") else self.dtype
        self.out = self.lse = None
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        with self._stream():
            self.prepare()

    def prepare(self) -> None:
        """What is done once, before the first run."""

    def launch(self) -> None:
        """What is timed."""
        raise NotImplementedError

    def tensor(self, name: str):
        """An input as PyTorch's tensor of the same memory."""
        array = self.arrays[name]
        if array.dtype in (np.int32, np.float32):
            return self.torch.from_dlpack(array)
        if array.dtype == np.uint8:
            return self.torch.from_dlpack(array).view(self.kv_dtype)
        # 16-bit integers cross DLPack whatever either side knows of bfloat16.
        return self.torch.from_dlpack(array.view(self.machine.xp.int16)).view(self.dtype)

    def qkv(self, heads_first: bool) -> list:
        """Q, K and V of dense attention as (B, H, N, D) or (B, N, H, D), whatever the case's layout; no copy."""
        turned = heads_first != (self.params["layout"] == "bhsd")
        tensors = [self.tensor(name) for name in ("q", "k", "v")]
        return [x.transpose(1, 2) for x in tensors] if turned else tensors

    def run(self) -> None:
        with self._stream():
            self.launch()

    def _stream(self):
        handle = self.machine.xp.cuda.get_current_stream().ptr
        # NOTE: ExternalStream(0) is not the default stream but a new one, which no event of ours would see.
        cuda = self.torch.cuda
        return cuda.stream(cuda.ExternalStream(handle) if handle else cuda.default_stream())

    def poison(self) -> None:
        for tensor in (self.out, self.lse):
            if tensor is not None:
                tensor.fill_(float("nan"))

    def columns(self) -> dict[str, Any]:
        return {}

    def input_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def outside_bytes(self) -> int:
        """Most bytes PyTorch held beyond the inputs: output and workspace."""
        return self.torch.cuda.max_memory_allocated() - self._before

    def kept_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Give PyTorch's cached memory back, so that the next case has the whole card."""
        self.__dict__ = {"torch": self.torch}
        self.torch.cuda.empty_cache()

    def verdict(self):
        from experiments.subjects import check_decode, check_prefill

        xp = self.machine.xp
        o = xp.from_dlpack(self.out.contiguous().view(self.torch.int16)).view(self.arrays["q"].dtype)
        lse = None if self.lse is None else xp.from_dlpack(self.lse.float().contiguous())
        if self.params["family"] in ("decode", "cascade"):
            return check_decode(self.params, self.arrays, o, lse, self.rounding)
        if self.params["layout"] == "bhsd":
            o = o.transpose(0, 2, 1, 3)
        return check_prefill(self.params, self.arrays, o, lse, self.rounding)


class WritingPeer(TorchPeer):
    """One that writes into its caches, the same each time, and leaves no `out`."""

    def __init__(self, machine, params, arrays):
        from experiments.subjects import held

        self.before = held(arrays)
        super().__init__(machine, params, arrays)

    def kept_bytes(self) -> int:
        return sum(array.nbytes for array in self.before.values())

    def poison(self) -> None:
        from experiments.subjects import restore

        restore(self.arrays, self.before)

    def verdict(self):
        from experiments.subjects import check_written

        return check_written(self.params, self.arrays, self.before)
