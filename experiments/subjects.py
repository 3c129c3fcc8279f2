"""What a case runs and judges: a kernel on dense attention, paged decode, or a cache; a peer; or a probe.

A subject owns its arrays. `run` only launches, `poison` fills the outputs with NaN, `verdict` says whether
the last run was right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import cuattn
from cuattn import busy, compare
from cuattn.compare import Verdict
from cuattn.compile import CompileError
from cuattn.reference import bits
from experiments import inputs, peers
from experiments.catalog import Entry
from experiments.costs import constants_of, shared_pages
from experiments.suite import PACKED


def make(machine, params: Mapping[str, Any], entry: Entry, trim: Callable[[Mapping], Any], arrays=None):
    """Build inputs, plan and compile; `trim` is told the inputs in between, to forget their temporaries.

    `arrays`, another subject's of the same shape and seed, are taken instead of built.
    """
    if params["family"] == "probe":
        trim({})
        return Probe(machine, params)
    if entry.row is None:
        peers.require(machine, params)
    if arrays is None:
        arrays = inputs.build(machine, params)
        trim(arrays)
    if entry.row is None:
        return peers.make(machine, params, arrays)
    return SUBJECTS[params["family"]](machine, params, arrays)


class _Ours:
    """A kernel of the toolkit's format."""

    def __init__(self, machine, params, arrays):
        self.machine, self.params, self.arrays = machine, params, arrays
        self.planned = self._plan(constants_of(params))

    def run(self) -> None:
        self.planned.run()

    def poison(self) -> None:
        for array in self.planned.outputs:
            self.machine.poison(array)

    def sm_busy(self, graph: bool) -> float | None:
        """Share of a run in which a multiprocessor has a warp; None where no binary that says so is built."""
        try:
            return busy.sm_busy(self.planned, graph)
        except CompileError:
            return None

    def columns(self) -> dict[str, Any]:
        """Columns known once it is compiled."""
        info = self.planned.build_info
        return {
            "source_hash": self.planned.source_hash,
            "registers": info.get("registers"),
            "spill_bytes": info.get("spill_bytes"),
        }

    def input_bytes(self) -> int:
        """Memory of what it was given."""
        return sum(array.nbytes for array in self.arrays.values())

    def outside_bytes(self) -> int:
        """Memory it uses outside the machine's pool."""
        return 0

    def kept_bytes(self) -> int:
        """Memory of the pool that is kept for the check, and none of the kernel's."""
        return 0

    def close(self) -> None:
        """Give back what the machine's pool does not know of."""


class Prefill(_Ours):
    """Attention of dense batches, or of packed sequences."""

    def _plan(self, constants):
        p = self.params
        options = {"causal": p["causal"], **inputs.scores(p), "kernel": p["kernel"], "constants": constants}
        if p["layout"] == PACKED:
            return cuattn.plan_attention_varlen(**self.arrays, max_seqlen_q=p["m"], max_seqlen_k=p["n"], **options)
        return cuattn.plan_attention(**self.arrays, layout=p["layout"], **options)

    def verdict(self) -> Verdict:
        o, lse = self.planned.outputs
        return check_prefill(self.params, self.arrays, o, lse, self.planned.plan.rounding)


def check_prefill(params, arrays, o, lse, rounding) -> Verdict:
    """Judge prefill in the case's layout."""
    options = {"causal": params["causal"], **inputs.scores(params), "rounding": rounding}
    options["sinks"] = arrays.get("sinks")
    given = {name: arrays[name] for name in "qkv"}
    if params["layout"] == PACKED:
        if "block_table" in arrays:
            given |= {name: _in_order(arrays[name], arrays["block_table"], params["n"]) for name in "kv"}
        ends = (arrays["cu_seqlens_q"], arrays["cu_seqlens_k"])
        return compare.check_attention_varlen(*given.values(), *ends, o, lse, **options)
    given["o"] = o
    if params["layout"] == "bhsd":
        given = {name: x.transpose(0, 2, 1, 3) for name, x in given.items()}
    return compare.check_attention(**given, lse=lse, **options)


def _in_order(cache, block_table, length: int):
    """(B·N, HKV, D) of a pool of pages that sequences of one length lie in."""
    pages, row = bits(cache)[block_table], cache.shape[2:]  # (B, pages, page_size, HKV, D)
    return pages.reshape(len(pages), -1, *row)[:, :length].reshape(-1, *row).view(cache.dtype)


class Decode(_Ours):
    """A few queries a sequence over a paged cache."""

    def _plan(self, constants):
        return cuattn.plan_decode(**self.arrays, **inputs.scores(self.params), **inputs.quantised(self.params),
                                  kernel=self.params["kernel"], constants=constants)

    def verdict(self) -> Verdict:
        o, lse = self.planned.outputs
        return check_decode(self.params, self.arrays, o, lse, self.planned.plan.rounding)


class Cascade(Decode):
    """The same where all sequences begin with one prefix, which is a level of its own."""

    def _plan(self, constants):
        host = {name: self.machine.download(self.arrays[name]) for name in ("block_table", "cache_seqlens")}
        prefix, pages, table = self.params.get("prefix", 0), shared_pages(self.params), host["block_table"]
        shared = (np.array([0, len(table)]), table[:1, :pages], np.array([prefix]))
        own = (table[:, pages:], host["cache_seqlens"] - prefix)
        shared, own = ([self.machine.upload(np.ascontiguousarray(x, np.int32)) for x in level]
                       for level in (shared, own))
        given = {name: self.arrays[name] for name in ("q", "k_cache", "v_cache")}
        return cuattn.plan_decode_cascade(**given, levels=[shared, (None, *own)], kernel=self.params["kernel"],
                                          constants=constants)


def check_decode(params, arrays, o, lse, rounding) -> Verdict:
    """Judge paged decode."""
    return compare.check_decode(**arrays, o=o, lse=lse, rounding=rounding, **inputs.scores(params),
                                **inputs.quantised(params))


class DecodeMla(_Ours):
    """One query a sequence over a paged cache of latents."""

    SCALE = 192**-0.5  # DeepSeek-V3's, without the factor of a longer context

    def _plan(self, constants):
        return cuattn.plan_decode_mla(**self.arrays, softmax_scale=self.SCALE, kernel=self.params["kernel"],
                                      constants=constants)

    def verdict(self) -> Verdict:
        o, lse = self.planned.outputs
        return compare.check_decode_mla(**self.arrays, o=o, lse=lse, softmax_scale=self.SCALE,
                                        rounding=self.planned.plan.rounding)


class _InPlace(_Ours):
    """What writes into its paged cache, the same each time; `operation` plans it."""

    operation: Callable[..., Any]

    def _plan(self, constants):
        self.before = held(self.arrays)
        return self.operation(**self.arrays, **inputs.quantised(self.params), kernel=self.params["kernel"],
                              constants=constants)

    def kept_bytes(self) -> int:
        return sum(array.nbytes for array in self.before.values()) if self.machine.name == "gpu" else 0

    def poison(self) -> None:
        restore(self.arrays, self.before)

    def verdict(self) -> Verdict:
        return check_written(self.params, self.arrays, self.before)


class Append(_InPlace):
    """New rows into a paged cache."""

    operation = staticmethod(cuattn.plan_append)


class CopyPages(_InPlace):
    """Pages of a cache copied to others."""

    operation = staticmethod(cuattn.plan_copy_pages)


def held(arrays) -> dict[str, Any]:
    """What both caches hold, before anything is written."""
    return {name: arrays[name].copy() for name in ("k_cache", "v_cache")}


def restore(arrays, before) -> None:
    """Both caches as they were."""
    for name, array in before.items():
        arrays[name][...] = array


def check_written(params, arrays, before) -> Verdict:
    """Judge what was written into both caches by what they held."""
    a, after = arrays, {"k_after": arrays["k_cache"], "v_after": arrays["v_cache"]}
    if params["family"] == "pages":
        return compare.check_copy_pages(**before, src=a["src"], dst=a["dst"], **after)
    given = {name: a[name] for name in ("k", "v", "block_table", "cache_seqlens")}
    tables = {name: a.get(name) for name in ("cos", "sin")}
    return compare.check_append(k_before=before["k_cache"], v_before=before["v_cache"], **given, **after, **tables,
                                **inputs.quantised(params))


SUBJECTS = {"prefill": Prefill, "decode": Decode, "mla": DecodeMla, "cascade": Cascade, "cache": Append, "pages": CopyPages}


class Probe(_Ours):
    """A kernel that measures the device; its answer is checked, so that no time stands for work undone."""

    def __init__(self, machine, params):
        super().__init__(machine, params, {})

    def _plan(self, constants):
        p = self.params
        return cuattn.plan_probe(
            self.machine,
            p["kernel"],
            bytes=p.get("bytes", 0),
            flops=p.get("flops", 0),
            dtype=p["dtype"],
            constants=constants,
        )

    def poison(self) -> None:
        self.machine.poison(self.planned.outputs[1])

    def verdict(self) -> Verdict:
        source, sink = self.planned.outputs
        words = self.params.get("bytes", 0) // 16 * 4
        name = self.params["kernel"]
        if name == "copy":
            wrong = int((source[:words] != sink[:words]).sum())
        elif name in ("read", "words"):
            wrong = int(_fold(source[:words]) != _fold(sink))
        elif name == "mma":
            warps = sink.view(np.float32).reshape(-1, 32)  # every warp multiplies the same numbers
            wrong = int((~(warps == warps[0])).sum())
        else:
            wrong = 0
        message = (
            f"{name}: {wrong} values differ from what the probe must leave behind" if wrong else "as expected"
        )
        return Verdict(wrong == 0, float(wrong), 0.0, None, None, (), message)


def _fold(words) -> int:
    """Exclusive or of all words."""
    words = words.reshape(-1)
    while words.size > 1:
        half = words.size // 2
        rest = words[2 * half :]
        words = words[:half] ^ words[half : 2 * half]
        if rest.size:
            words[:1] ^= rest
    return int(words[0]) if words.size else 0
