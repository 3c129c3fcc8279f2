"""What the operations of a paged cache check of it alike."""
from __future__ import annotations

import math
from dataclasses import replace

from cuattn import contract, dispatch
from cuattn.binding import Binding
from cuattn.machine import Tensor


def check_ranks(k_cache, v_cache, block_table) -> None:
    check_ranks_of_pool(k_cache=k_cache, v_cache=v_cache)
    contract.rank("block_table", block_table, "B, max_pages")


def check_ranks_of_pool(**caches) -> None:
    for name, x in caches.items():
        contract.rank(name, x, "num_pages, page_size, HKV, D")


def check_pool(t: dict[str, Tensor]) -> None:
    contract.page_size("k_cache", t["k_cache"])
    contract.same("v_cache.shape", t["v_cache"].shape, "k_cache", t["k_cache"].shape)
    contract.same("v_cache.dtype", t["v_cache"].dtype, "k_cache", t["k_cache"].dtype)
    for name in ("k_cache", "v_cache"):
        contract.vectors(name, t[name])


def check_cache(binding: Binding, more: int = 0) -> None:
    """Shapes of a cache, its table and lengths; `more` rows are about to be written behind each length.

    Their values too where that costs no synchronisation, or with CUATTN_CHECK=1.
    """
    check_pool(binding.tensors)
    check_table(binding, "k_cache", more)


def check_table(binding: Binding, cache: str, more: int = 0, table: str = "block_table",
                lengths: str = "cache_seqlens") -> None:
    """A table of the pages of the cache of that name, and lengths; as `check_cache` has it."""
    t = binding.tensors
    b, (pages, page_size) = t[table].shape[0], t[cache].shape[:2]
    contract.same(f"{lengths}.shape", t[lengths].shape, table, (b,))
    for name in (table, lengths):
        contract.dtype(name, t[name], ("int32",))
        contract.contiguous(name, t[name])
    if dispatch.checks_values(binding):
        contract.page_table(pages, page_size, binding.values(table), binding.values(lengths), more, lengths, table)


def quantised(t: dict[str, Tensor], other: str, kv_dtype: str | None, numbers: dict) -> tuple[str | None, str]:
    """What the caches hold beside `other`, and the kind of their scales, which kernels find in one line."""
    stored = contract.kv_dtype(kv_dtype, t["k_cache"], other, t[other].dtype)
    kind = contract.scale_kind(stored, numbers, t)
    for name in ("k_scale", "v_scale") if kind != "one" else ():
        t[name] = replace(t[name], shape=(math.prod(t[name].shape),), strides=(1,))
    return stored, kind
