"""vLLM's PagedAttention: the CUDA kernels for paged decode, from its compiled library.

Nothing of vLLM's Python runs: PyTorch loads the library, which registers `_C::paged_attention_v1` and `…_v2`.
They are called as vLLM 0.7 and later call them; its newest versions have dropped them on CUDA.

They want a cache in a layout of their own. A server keeps it so, and here it is converted once, before the
first run. There is no plan: lengths and tables are read on the GPU, and a captured graph follows them.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from cuattn.kernels.base import Unsupported, ceil_div
from cuattn.reference import default_scale
from experiments.peers.torch_peer import TorchPeer, refuse_dtype, refuse_features

LIBRARY = "CUATTN_VLLM_LIBRARY"
FILES = ("_C.abi3.so", "_C_stable_libtorch.abi3.so")  # the kernels moved from the first to the second
REMEDY = f"install vLLM, or name its {FILES[0]} in {LIBRARY}"
OUTPUTS = {
    "paged_attention_v1": ("out",), "paged_attention_v2": ("out", "exp_sums", "max_logits", "tmp_out"),
}
ARGUMENTS = (  # those that follow in both
    "query", "key_cache", "value_cache", "num_kv_heads", "scale", "block_tables", "seq_lens", "block_size",
    "max_seq_len", "alibi_slopes", "kv_cache_dtype", "k_scale", "v_scale", "tp_rank",
    "blocksparse_local_blocks", "blocksparse_vert_stride", "blocksparse_block_size",
    "blocksparse_head_sliding_step",
)
PAGE_SIZES = (8, 16, 32)
HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
PARTITION = 512  # keys that a block of v2 takes
V1_KEYS = 8192  # v1 keeps a row's scores in shared memory
V1_ROWS = 512  # more rows than these fill the GPU without partitions


def libraries() -> list[Path]:
    """The files that may hold the kernels: what CUATTN_VLLM_LIBRARY names, else those of installed vLLM."""
    if named := os.environ.get(LIBRARY):
        return [Path(named)]
    vllm = find_spec("vllm")
    folders = (vllm.submodule_search_locations or []) if vllm else []
    return [path for folder in folders for name in FILES if (path := Path(folder, name)).is_file()]


def operators(name: str) -> tuple:
    """`paged_attention_v1` and `paged_attention_v2`, their library loaded.

    Raises
    ------
    Unsupported
        No library, one that this PyTorch cannot load, or one without these kernels as they are called here.
    """
    import torch

    found = libraries()
    if not found:
        raise Unsupported(f"{name}: vLLM's library is not there; {REMEDY}")
    for path in found:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise Unsupported(
                f"{name}: PyTorch {torch.__version__} does not load {path} ({error.__cause__ or error}); "
                f"name in {LIBRARY} the library of a vLLM that was built for it"
            ) from error
    return tuple(
        _operator(name, torch.ops._C, kernel, (*outputs, *ARGUMENTS), found[-1])
        for kernel, outputs in OUTPUTS.items()
    )


def _operator(name: str, registered, kernel: str, arguments: tuple, path: Path):
    """One of them, if it takes these arguments."""
    operator = getattr(registered, kernel, None)
    if operator is None:
        raise Unsupported(
            f"{name}: {path} has no {kernel}, which newer versions of vLLM have dropped; name in "
            f"{LIBRARY} the library of an older one"
        )
    takes = {x.name: str(x.type) for x in operator.default._schema.arguments}
    # NOTE: a version with scales on the host would fetch ours from the GPU, and wait for them at each call.
    if tuple(takes) != arguments or takes["k_scale"] != "Tensor":
        raise Unsupported(
            f"{name}: {kernel} of {path} takes other arguments than that of vLLM 0.7 and later; name in "
            f"{LIBRARY} the library of such a one"
        )
    return operator.default


def refuse(name: str, params) -> None:
    """Refuse what the kernels are not compiled for, and where they are not."""
    refuse_dtype(name, params)
    refuse_features(name, params)
    for what, of, compiled in (("pages", "page_size", PAGE_SIZES), ("head dims", "d", HEAD_DIMS)):
        if params[of] not in compiled:
            raise Unsupported(f"{name}: is compiled for {what} of {', '.join(map(str, compiled))}, got "
                              f"{params[of]}; choose one of these")
    operators(name)


def takes_v1(keys: int, rows: int) -> bool:
    """vLLM's own choice for B·H = `rows` over at most `keys` each; else v2 takes them in partitions."""
    return keys <= V1_KEYS and (keys <= PARTITION or rows > V1_ROWS)


def own_layout(k, v) -> list:
    """Caches (num_pages, page_size, HKV, D) as the kernels take them, contiguous.

    K is (num_pages, HKV, D/x, page_size, x), with x elements in 16 bytes, V (num_pages, HKV, D, page_size).
    """
    pieces = k.unflatten(-1, (-1, 16 // k.element_size()))
    return [pieces.permute(0, 2, 3, 1, 4).contiguous(), v.permute(0, 2, 3, 1).contiguous()]


class Decode(TorchPeer):
    """`paged_attention_v1` or `paged_attention_v2`, whichever vLLM would take. They return no LSE."""

    def prepare(self) -> None:
        p, q, table = self.params, self.tensor("q"), self.tensor("block_table")
        keys = table.shape[1] * p["page_size"]  # the table's room, so that a graph follows all lengths
        whole = takes_v1(keys, p["b"] * p["h"])
        self._attend = operators(p["kernel"])[0 if whole else 1]
        self.out = self.torch.empty_like(q)
        partials = [] if whole else self._partials(ceil_div(keys, PARTITION))
        unit = self._floats(1).fill_(1)
        self._arguments = [
            self.out.squeeze(1), *partials, q.squeeze(1),
            *own_layout(self.tensor("k_cache"), self.tensor("v_cache")), p["hkv"],
            default_scale(p["d"], None), table, self.tensor("cache_seqlens"), p["page_size"], keys,
            None, "auto", unit, unit,  # no ALiBi; a cache in the queries' dtype, which is not scaled
            0, 0, 0, 64, 0,  # as vLLM fills them in where attention is not block-sparse
        ]

    def _partials(self, partitions: int) -> list:
        """Of each partition its sum of exponentials and its largest score, float32, and its O."""
        p = self.params
        shape = (p["b"], p["h"], partitions)
        o = self.torch.empty((*shape, p["d"]), dtype=self.dtype, device="cuda")
        return [self._floats(shape), self._floats(shape), o]

    def _floats(self, shape):
        return self.torch.empty(shape, dtype=self.torch.float32, device="cuda")

    def launch(self) -> None:
        self._attend(*self._arguments)

    def kept_bytes(self) -> int:
        """The caches in our layout, which only the check reads from here on."""
        return sum(self.arrays[name].nbytes for name in ("k_cache", "v_cache"))


SUBJECTS = {"vllm_decode": Decode}
