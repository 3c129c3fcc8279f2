"""The closed forms of a case, from its parameters alone: what it would take, even where it does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cuattn import contract
from cuattn.dispatch import OFFERED
from cuattn.kernels import ROWS
from cuattn.kernels.base import (
    ELEMENT_BYTES,
    Cost,
    Plan,
    Unsupported,
    ceil_div,
)
from cuattn.kernels.mla import LATENT
from cuattn.kernels.shapes import (
    AppendShape,
    AttentionShape,
    CascadeShape,
    DecodeShape,
    PagesShape,
    ProbeShape,
)
from experiments.catalog import Entry
from experiments.suite import PACKED
from experiments.sweep import DECODES, kv_bytes, window_of, work

LSE_BYTES, INDEX_BYTES, ANGLE_BYTES, SINK_BYTES = 4, 4, 4, 4


def lengths_of(params: Mapping[str, Any]) -> list[int]:
    """Context length of each sequence of a decode or cache case."""
    return list(params.get("lengths") or [params["n"]] * params["b"])


def shared_pages(params: Mapping[str, Any]) -> int:
    """Pages at the start of every sequence of a decode case that are the same ones for all."""
    return params.get("prefix", 0) // params["page_size"]


def constants_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The tunable constants a case sets."""
    return json.loads(params["constants"]) if params.get("constants") else {}


def rotates(params: Mapping[str, Any]) -> bool:
    """Whether the case's kernel rotates the rows that it appends: whole rows here, in halves."""
    row = ROWS.get(params["kernel"])  # no library's kernel has one
    return row is not None and "rope" in row.features


def shape_of(params: Mapping[str, Any]):
    """The problem as the kernels' plans take it."""
    family, p = params["family"], params
    if family == "prefill":
        return _dense(p)
    if family in DECODES:
        pages = max([1, *(ceil_div(n, p["page_size"]) for n in lengths_of(p))])
        if family == "cascade":
            shared = shared_pages(p)
            return CascadeShape(p["b"], p["h"], p["hkv"], p["d"], p["page_size"], ((1, shared),), pages - shared,
                                p["dtype"])
        m = p.get("m", 1)
        _, window = contract.window(window_of(p), True, m, pages * p["page_size"])
        asked = {"window": window, "softcap": bool(p.get("softcap")), "sinks": bool(p.get("sinks"))}
        return DecodeShape(p["b"], p["h"], p["hkv"], p["d"], p["page_size"], pages, p["dtype"], p.get("kv_dtype"),
                           m=m, causal=m > 1, **asked)
    if family == "cache":
        rotary = p["d"] if rotates(p) else 0
        return AppendShape(p["b"], p["m"], p["hkv"], p["d"], p["page_size"], p["dtype"], rotary=rotary,
                           kv_dtype=p.get("kv_dtype"))
    if family == "pages":
        pages = sum(ceil_div(n, p["page_size"]) for n in lengths_of(p))
        return PagesShape(pages, p["page_size"], p["hkv"], p["d"], ELEMENT_BYTES[p["dtype"]])
    return ProbeShape(p.get("bytes", 0), p.get("flops", 0), p["dtype"])


def _dense(p: Mapping[str, Any]) -> AttentionShape:
    """A prefill case's, whose sequences may be packed and their keys in pages."""
    causal, window = contract.window(window_of(p), p["causal"], p["m"], p["n"])
    packed = (p["b"] * p["m"], key_rows(p)) if p.get("layout") == PACKED else None
    return AttentionShape(p["b"], p["h"], p["hkv"], p["m"], p["n"], p["d"], p["dtype"], causal, window,
                          bool(p.get("softcap")), bool(p.get("sinks")), packed, page_size=p.get("page_size"))


def key_rows(p: Mapping[str, Any]) -> int:
    """Rows of K of a prefill case, those of its pages that hold no key included."""
    page = p.get("page_size")
    return p["b"] * p["n"] if page is None else max(p["b"] * ceil_div(p["n"], page), 1) * page


def offsets_of(p: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Where packed sequences begin, and the last one ends: rows of queries and of keys."""
    queries, keys = ([i * p[rows] for i in range(p["b"] + 1)] for rows in "mn")
    return queries, keys


def array_bytes(params: Mapping[str, Any]) -> int:
    """Bytes of a case's inputs and outputs."""
    p, family = params, params["family"]
    if family == "probe":
        return p.get("bytes", 0) * (2 if p["kernel"] == "copy" else 1)
    size, row = ELEMENT_BYTES[p["dtype"]], p["d"] * ELEMENT_BYTES[p["dtype"]]
    rows = p["b"] * p.get("m", 1) * p["h"]
    sinks = p["h"] * SINK_BYTES if p.get("sinks") else 0
    if family == "prefill":
        offsets = 2 * (p["b"] + 1) * INDEX_BYTES if p.get("layout") == PACKED else 0
        table = p["b"] * max(ceil_div(p["n"], p["page_size"]), 1) * INDEX_BYTES if p.get("page_size") else 0
        return 2 * rows * row + 2 * key_rows(p) * p["hkv"] * row + rows * LSE_BYTES + sinks + offsets + table
    if family == "pages":
        shape = shape_of(p)
        return 2 * 2 * max(shape.n, 1) * shape.page_bytes + 2 * shape.n * INDEX_BYTES
    new = p["m"] if family == "cache" else 0
    counts = [ceil_div(n + new, p["page_size"]) for n in lengths_of(p)]
    held = sum(counts) - (shared_pages(p) * (p["b"] - 1) if p["b"] else 0)
    pool = 2 * max(held, 1) * p["page_size"] * p["hkv"] * p["d"] * kv_bytes(p)
    table = p["b"] * (max([1, *counts]) + 1) * INDEX_BYTES
    if family == "mla":
        return pool // 2 + table + rows * (row + LATENT * size + LSE_BYTES)
    fresh = 2 * p["b"] * new * p["hkv"] * row if new else 2 * rows * row + rows * LSE_BYTES
    angles = p["d"] * (max(lengths_of(p), default=0) + new) * ANGLE_BYTES if new and rotates(p) else 0
    return pool + table + fresh + angles + sinks


def plan_of(params: Mapping[str, Any], entry: Entry, device) -> Plan:
    """The kernel's own plan.

    Raises
    ------
    Unsupported
        The kernel does not take this dtype or cache, lacks a feature, or cannot run this shape on this device.
    """
    if params["dtype"] not in entry.row.dtypes:
        raise Unsupported(f"dtype: expected {' or '.join(entry.row.dtypes)} for kernel '{entry.name}', got "
                          f"{params['dtype']}; choose another dtype, or kernel")
    if params.get("kv_dtype") and "quantised" not in entry.row.features:
        raise Unsupported(f"kv_dtype: expected none for kernel '{entry.name}', got {params['kv_dtype']}; choose "
                          "another kernel")
    shape = shape_of(params)
    if lacking := sorted(getattr(shape, "features", frozenset()) - entry.row.features):
        raise Unsupported(f"{lacking[0]}: kernel '{entry.name}' does not offer {OFFERED[lacking[0]]}; choose "
                          "another kernel")
    return entry.row.plan(shape, device, constants_of(params))


def planned(params: Mapping[str, Any], entry: Entry, device) -> tuple[Plan, Cost]:
    """The kernel's own plan and closed forms.

    Raises
    ------
    Unsupported
        As `plan_of`.
    """
    plan = plan_of(params, entry, device)
    lengths = lengths_of(params) if params["family"] in DECODES else None
    if params.get("layout") == PACKED:
        lengths = offsets_of(params)
    if params["family"] == "cascade":
        prefix = params.get("prefix", 0)
        lengths = [0, params["b"]], [prefix], [n - prefix for n in lengths]
    return plan, entry.row.cost(shape_of(params), plan, lengths)


def describe(params: Mapping[str, Any], entry: Entry, device) -> dict[str, Any]:
    """Plan and modelled columns. Of a peer only the flops are known: they are the shape's.

    Raises
    ------
    Unsupported
        As `plan_of`.
    """
    if entry.row is None:
        return {"modelled_flops": work(params)[0]}
    plan, cost = planned(params, entry, device)
    extents = dict.fromkeys((x.grid, x.block) for x in plan.launches)  # of thousands of launches a few differ
    return {
        "grid": json.dumps([list(grid) for grid, _ in extents]),
        "block": json.dumps([block for _, block in extents]),
        "smem_bytes": max((x.smem_bytes for x in plan.launches), default=0),
        "constants_used": json.dumps(dict(plan.constants), sort_keys=True, default=str),
        "modelled_flops": cost.flops,
        "modelled_bytes_loaded": cost.bytes_loaded,
        "modelled_bytes_stored": cost.bytes_stored,
        "modelled_launches": cost.launches,
        "modelled_scratch_bytes": cost.scratch_bytes,
        "modelled_peak_bytes": array_bytes(params) + cost.scratch_bytes,
    }
