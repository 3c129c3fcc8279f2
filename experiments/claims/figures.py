"""The arithmetic behind claims that no row answers: all of it *modelled*, by the formulas of `capacity`.

`python -m experiments.claims.figures` prints all of them as JSON, for readers that import no kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cuattn.devices import lookup
from experiments.capacity import batches, budget
from experiments.capacity.budget import Figure, Question
from experiments.catalog import catalog
from experiments.claims.definition import Book, load
from experiments.models import by_numbers, model
from experiments.words import UserError, nearest

GB = 10**9


def scores(n: int, dtype: str, heads: int = 1) -> Figure:
    """Bytes of the N × N scores of so many heads."""
    return Figure("scores", budget.bytes_of(heads * n * n, dtype), "B", "heads · N² · size",
                  f"{heads:,} · {n:,}² · {_size(dtype)} B")


def score_traffic(n: int, chunk: int, dtype: str) -> Figure:
    """Bytes of one head's scores, each chunk of keys written once and read once."""
    steps = n // chunk
    return Figure("score traffic", budget.bytes_of(steps * 2 * n * chunk, dtype), "B",
                  "N / chunk · 2 · N · chunk · size", f"{steps} · 2 · {n:,} · {chunk} · {_size(dtype)} B")


def score_tile(rows: int, keys: int, dtype: str) -> Figure:
    """Bytes of one tile of scores."""
    return Figure("score tile", budget.bytes_of(rows * keys, dtype), "B", "rows · keys · size",
                  f"{rows} · {keys} · {_size(dtype)} B")


def chunk_ratio(n: int, chunk: int) -> Figure:
    """What chunks of keys save of the scores' memory."""
    return Figure("memory ratio of chunking", n / chunk, "×", "N : chunk", f"{n:,} : {chunk}")


def left(memory: float, taken: Sequence[float]) -> Figure:
    """GB of a card that are left."""
    rest = budget.left(round(memory * GB), *(round(one * GB) for one in taken))
    return Figure("left", rest, "B", "memory − what is taken",
                  " − ".join(f"{one:g} GB" for one in (memory, *taken)))


def largest_chunk(budget_gb: float, n: int, dtype: str, head_batches: int = 1) -> Figure:
    """Keys of the largest chunk whose scores fit so many GB."""
    keys = budget.largest_chunk(round(budget_gb * GB), n, dtype, head_batches)
    return Figure("largest chunk", keys, "tokens", "budget / (heads · B · N · size)",
                  f"{budget_gb:g} GB / ({head_batches} · {n:,} · {_size(dtype)} B)")


def kv_cache(layers: int, kv_heads: int, head_dim: int, tokens: int, dtype: str) -> Figure:
    """Bytes of the KV cache of one sequence."""
    given = by_numbers(layers=layers, q_heads=kv_heads, head_dim=head_dim, kv_heads=kv_heads)
    return Figure("KV cache", budget.kv_bytes(given, dtype, tokens), "B", "2 · L · HKV · D · N · size",
                  f"2 · {layers} · {kv_heads} · {head_dim} · {tokens:,} · {_size(dtype)} B")


def gqa_saving(q_heads: int, kv_heads: int) -> Figure:
    """Percent of the KV cache that sharing KV heads saves."""
    full, shared = (kv_cache(1, heads, 1, 1, "float16").value for heads in (q_heads, kv_heads))
    return Figure("saved by sharing KV heads", 100 * (1 - shared / full), "%", "1 − HKV / H",
                  f"1 − {kv_heads} / {q_heads}")


def weights_and_kv(name: str, batch: int, context: int, dtype: str) -> Figure:
    """Bytes of a model's weights and of the cache of a batch."""
    question = Question(model(name), context, dtype, batch=batch)
    weights, cache = budget.weights_bytes(question), budget.batch_kv_bytes(question, batch)
    return Figure("weights and KV cache", weights + cache, "B", "P · size + B · 2 · L · HKV · D · N · size",
                  f"{weights / GB:.3g} GB + {cache / GB:.3g} GB ({name}, {batch} × {context:,})")


def contiguous_use(lengths: Sequence[int], reserved: int) -> Figure:
    """Percent of a cache in use where each sequence reserves that many tokens."""
    return Figure("in use, contiguous", 100 * budget.utilisation(lengths, reserved), "%",
                  "Σ lengths / (sequences · reserved)", f"{sum(lengths):,} / ({len(lengths)} · {reserved:,})")


def paged_use(lengths: Sequence[int], page: int) -> Figure:
    """Percent of a paged cache in use."""
    room = budget.paged_tokens(lengths, page)
    return Figure("in use, paged", 100 * sum(lengths) / room, "%", "Σ lengths / Σ ⌈length / page⌉ · page",
                  f"{sum(lengths):,} / {room:,}")


def attention_over_projections(n: int, heads: int, head_dim: int) -> Figure:
    """Flops of one layer's attention over those of its four projections, without a mask."""
    given = by_numbers(layers=1, q_heads=heads, head_dim=head_dim)
    crossing = budget.projections_crossing(given)
    return Figure("attention over projections", n / crossing, "×", "4 · n² · d / (8 · n · d²)",
                  f"{n:,} / {crossing:,.0f}, where both are equal")


def batch_gain(
    of: Sequence[str], to: Sequence[str], name: str, card: str, context: int, lengths: Sequence[int]
) -> Figure:
    """How many times as large a batch fits a card with one kernel and cache as with another.

    `of` and `to` are (kernel, "paged" or "contiguous"); one sequence is prefilled at a time.
    """
    device, rows = lookup(card), catalog()
    question = Question(model(name), context, "bfloat16", device=device, memory=device.memory_bytes,
                        prefill_batch=1, lengths=tuple(lengths))

    def largest(kernel: str, cache: str) -> int:
        need = batches.need(question, rows[kernel].row, {})
        return need.largest if cache == "paged" else need.largest_contiguous

    a, b = largest(*of), largest(*to)
    return Figure("gain in batch", a / b if b else float("inf"), "×", "largest batch over largest batch",
                  f"{a:,} ({' '.join(of)}) / {b:,} ({' '.join(to)}), {name} on {device.name}")


def _size(dtype: str) -> str:
    return f"{budget.BITS[dtype] / 8:g}"


FIGURES = {
    f.__name__: f for f in (
        scores, score_traffic, score_tile, chunk_ratio, left, largest_chunk, kv_cache, gqa_saving,
        weights_and_kv, contiguous_use, paged_use, attention_over_projections, batch_gain,
    )
}
ARGUMENTS = {"budget": "budget_gb", "model": "name"}  # as `claims.toml` calls them


def figure(spec: Mapping[str, Any]) -> Figure:
    """The figure that a part of a claim names, with its arguments.

    Raises
    ------
    UserError
        No such figure, or arguments that it does not take.
    """
    name = spec["name"]
    if name not in FIGURES:
        raise UserError(f"claims.toml: '{name}' is not a figure; {nearest(name, FIGURES)}")
    try:
        return FIGURES[name](**{ARGUMENTS.get(k, k): v for k, v in spec.items() if k != "name"})
    except TypeError as error:
        raise UserError(f"claims.toml: figure {name}: {error}") from error


def values(book: Book) -> dict[tuple[int, int], dict[str, Any]]:
    """Every figure of the claims, by (claim, part from 0): value, unit, formula, numbers."""
    return {
        (claim.number, i): asdict(figure(part.figure))
        for claim in book.claims.values() for i, part in enumerate(claim.parts) if part.figure is not None
    }


if __name__ == "__main__":
    print(json.dumps([[*place, found] for place, found in values(load()).items()]))
