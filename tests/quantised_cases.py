"""Paged caches of bytes with their scales, and decode over them judged and counted."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from counted import run_counted
from test_decode import Cache, make_cache

import cuattn
from cuattn.quantise import LARGEST, quantise

NO_NUMBER = 0x7F  # NaN as e4m3, and as int8 larger than any that is used


@dataclass
class Quantised(Cache):
    """Bytes in place of numbers; pages that no sequence uses have NaN for scales."""

    kv_dtype: str
    k_scale: float | np.ndarray
    v_scale: float | np.ndarray

    @property
    def options(self) -> dict:
        return {"kv_dtype": self.kv_dtype, "k_scale": self.k_scale, "v_scale": self.v_scale}


def spread(scale):
    """A scale against (num_pages, page_size, HKV, D)."""
    return scale if isinstance(scale, float) else scale[..., None, :, None] if scale.ndim == 2 else scale[:, None]


def make_scales(rng, kind: str, pages: int, hkv: int, octaves: float, unit: float):
    """Evenly drawn over so many octaves below `unit`."""
    shape = {"one": (), "heads": (hkv,), "pages": (pages, hkv)}[kind]
    scale = (unit * 2.0 ** rng.uniform(-octaves, 0, shape)).astype(np.float32)
    return float(scale) if kind == "one" else scale


def make_quantised(rng, lengths, page, hkv, d, kv_dtype, kind="one", octaves=2.0) -> Quantised:
    """Normal numbers whose scales map about three standard deviations on the largest code."""
    plain = make_cache(rng, lengths, page, hkv, d, "float32")
    unit = 3 / LARGEST[kv_dtype]
    scales = [make_scales(rng, kind, len(plain.k), hkv, octaves, unit) for _ in "kv"]
    unused = [np.isnan(x) for x in (plain.k, plain.v)]
    codes = [quantise(x / unit, kv_dtype) for x in (plain.k, plain.v)]
    for x, nothing, scale in zip(codes, unused, scales):
        x[nothing] = NO_NUMBER
        if kind == "pages":
            scale[nothing.all(axis=(1, 2, 3))] = np.nan
    return Quantised(*codes, plain.table, plain.lengths, kv_dtype, *scales)


def upload_options(machine, cache: Quantised) -> dict:
    return {name: machine.upload(x) if isinstance(x, np.ndarray) else x for name, x in cache.options.items()}


def plan(machine, q, cache: Quantised, kernel="auto", **options):
    arrays = (machine.upload(x) for x in (q, cache.k, cache.v, cache.table, cache.lengths))
    return cuattn.plan_decode(*arrays, kernel=kernel, **upload_options(machine, cache), **options)


def run(machine, q, cache: Quantised, **options):
    """(planned, o, lse), judged and counted."""
    p = plan(machine, q, cache, **options)
    o, lse = run_counted(machine, p)
    judge(q, cache, o, lse, softmax_scale=options.get("softmax_scale"))
    return p, o, lse


def judge(q, cache: Quantised, o, lse, **options) -> None:
    cuattn.compare.check_decode(q, cache.k, cache.v, cache.table, cache.lengths, o, lse, **cache.options,
                                **options).raise_if_bad()
