"""Decode over a paged cache, compiled for shapes and features drawn at random, at lengths drawn at random.

A few of both by default; CUATTN_RANDOM=60x100 tries 60 variants with 100 cases each, on either machine. Each
result is judged against float64, and counted where the machine counts.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, fields

import numpy as np
import pytest
import quantised_cases
import test_decode

from cuattn.quantise import LARGEST

VARIANTS, CASES = (int(x) for x in os.environ.get("CUATTN_RANDOM", "10x4").split("x"))
EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65)


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for. `scales` of a quantised cache: see `cuattn.kernels.quantised.SCALES`."""

    kernel: str
    dtype: str
    d: int
    group: int
    page: int
    m: int = 1
    causal: bool = True
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    kv_dtype: str | None = None
    scales: str = "one"
    warps: int = 1
    stages: int = 2

    def __str__(self) -> str:
        said = [str(value) if value is not True else name for name, value in
                ((field.name, getattr(self, field.name)) for field in fields(self)) if value not in (None, False)]
        return " ".join(said)


def draw_variant(rng) -> Variant:
    quantised = rng.random() < 0.3
    kernel = "paged_stream" if quantised else str(rng.choice(["paged_stream", "paged_stream", "paged"]))
    dims = (32, 64, 96, 128, 256) if quantised else (8, 16, 40, 64, 72, 80, 96, 128, 136, 192, 224, 256)
    cache = {"kv_dtype": str(rng.choice(list(LARGEST))), "scales": str(rng.choice(["one", "heads", "pages"]))}
    return Variant(
        kernel, str(rng.choice(["float16", "bfloat16"])), int(rng.choice(dims)),
        int(rng.choice([1, 1, 2, 4, 4, 5, 8, 16, 20])), int(rng.choice([1, 3, 8, 16, 16, 32, 64, 96])),
        int(rng.choice([1, 1, 1, 2, 4, 5, 8])), bool(rng.random() < 0.8), *(bool(rng.random() < 0.3) for _ in range(3)),
        **(cache if quantised else {}), warps=int(rng.choice([1, 2, 3, 4])), stages=int(rng.choice([2, 3])),
    )


def draw_variants(count: int) -> list[Variant]:
    rng, found = np.random.default_rng(11), {}
    while len(found) < count:
        found[draw_variant(rng)] = None
    return list(found)


def draw_lengths(rng, most: int) -> list[int]:
    """Of up to six sequences: even, beside the edges of tiles, or one much longer than others; some empty."""
    b = int(rng.integers(1, 7))
    lengths = rng.choice([rng.integers(0, most, b), rng.choice(EDGES, b), rng.integers(0, 40, b)])
    lengths[rng.random(b) < 0.15] = 0
    if rng.random() < 0.3:
        lengths[rng.integers(b)] = most
    return [int(n) for n in lengths]


def run_case(machine, variant: Variant, seed: int) -> None:
    """Raises what is wrong."""
    rng = np.random.default_rng(seed)
    v, hkv = variant, int(rng.choice([1, 2]))
    most = 200 if machine.name == "cpu" else int(rng.choice([200, 2000]))
    lengths, order = draw_lengths(rng, most), str(rng.choice(["random", "reverse", "sorted"]))
    divided = {"groups": int(rng.integers(1, 9))} if v.kernel == "paged_stream" else {"splits": int(rng.integers(1, 6))}
    options = {"constants": {"warps": v.warps, "stages": v.stages, **divided}, "causal": v.causal}
    if v.window:
        options["window_size"] = (int(rng.choice([0, 1, 15, 16, 40, 150])), 0 if v.causal else int(rng.choice([0, 3])))
    if v.softcap:
        options["softcap"] = float(rng.choice([1.5, 30.0]))
    if v.sinks:
        options["sinks"] = rng.standard_normal(hkv * v.group).astype(np.float32)
    q = rng.standard_normal((len(lengths), v.m, hkv * v.group, v.d), dtype=np.float32).astype(v.dtype)
    if v.kv_dtype:
        cache = quantised_cases.make_quantised(rng, lengths, v.page, hkv, v.d, v.kv_dtype, v.scales)
        quantised_cases.run(machine, q, cache, kernel=v.kernel, **options)
    else:
        cache = test_decode.make_cache(rng, lengths, v.page, hkv, v.d, v.dtype, order)
        test_decode.run(machine, v.kernel, q, cache, **options)


@pytest.mark.parametrize("variant", draw_variants(VARIANTS), ids=str)
def test_at_random(machine, variant):
    for seed in range(CASES):
        try:
            run_case(machine, variant, seed)
        except Exception as error:
            raise AssertionError(f"run_case(machine, {variant!r}, seed={seed})") from error


@pytest.mark.parametrize("variant, seed", [
    (Variant("paged_stream", "float16", 64, 4, 64, m=2, window=True, softcap=True, kv_dtype="int8", scales="pages",
             warps=4, stages=3), 34),  # one key a query: its weight was its page's scale, rounded to float16
], ids=str)
def test_what_was_found_wrong(machine, variant, seed):
    run_case(machine, variant, seed)
