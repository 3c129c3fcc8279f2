"""What fits a card: weights, KV cache, and the scratch of each kernel, for a model, a context and a batch.

Arithmetic alone: every number is *modelled*, and each carries the formula it came from. Sizes are bytes.
Symbols: L layers, H query heads, HKV KV heads, D head dim, N context, B batch, P parameters, size bytes of
an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cuattn.devices import Device
from cuattn.kernels.base import ceil_div, round_up
from experiments.models import Model
from experiments.quantities import gb, gib
from experiments.words import UserError, nearest

BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3": 8, "int8": 8, "int4": 4}
RESERVE = 2 * 10**9  # what is taken for the driver, the framework and the activations where nothing is said


@dataclass(frozen=True)
class Figure:
    """A modelled number: its value and unit ("B", "tokens", "×", "%"), its formula, that with numbers."""

    name: str
    value: float
    unit: str
    formula: str
    numbers: str = ""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Parameters
    ----------
    model : Model
    context : int
        Tokens a sequence may have: what a contiguous cache reserves, and what one prefill computes.
    dtype : str
        Of the KV cache and of the kernels' arrays.
    weights_dtype : str
        Of the weights; `dtype` if empty.
    device : Device or None
        The card the kernels plan for; without one the largest scratch over the cards of the table counts.
    memory : int or None
        Bytes of the card; without it only what is needed is told.
    batch : int
        Sequences in the cache.
    prefill_batch : int or None
        Sequences prefilled in one call; the whole batch if None.
    reserve : int
        Bytes for all that is not modelled: driver, framework, activations.
    page, chunk : int
        Tokens of a page of the cache, and of a chunk of keys.
    lengths : tuple of int
        Real lengths of sequences; a paged cache holds these, a contiguous one `context` for each.
    """

    model: Model
    context: int
    dtype: str = "bfloat16"
    weights_dtype: str = ""
    device: Device | None = None
    memory: int | None = None
    batch: int = 1
    prefill_batch: int | None = None
    reserve: int = RESERVE
    page: int = 16
    chunk: int = 512
    lengths: tuple[int, ...] = ()

    def __post_init__(self):
        for option, name in (("--dtype", self.dtype), ("--weights-dtype", self.weights_dtype or self.dtype)):
            if name not in BITS:
                raise UserError(f"{option}: '{name}' is not a dtype; {nearest(name, BITS)}")
        if self.model.uneven:
            raise UserError(
                f"capacity: the layers of {self.model.name} differ ({self.model.uneven}), which one formula "
                "does not cover; ask for each kind by its numbers, with --layers instead of --model"
            )
        if self.memory is not None and self.model.params is None:
            raise UserError(
                f"capacity: the parameters of {self.model.name} are not known here, so neither are its "
                "weights; add --params, such as --params 7B"
            )
        if max(self.lengths, default=0) > self.context:
            raise UserError(
                f"--lengths: expected at most the context of {self.context} tokens, got "
                f"{max(self.lengths)}; raise --context"
            )


def bytes_of(count: int, dtype: str) -> int:
    """Bytes of that many elements; scales of quantised ones are not counted."""
    return ceil_div(count * BITS[dtype], 8)


def kv_elements(model: Model) -> int:
    """Elements a token takes in one layer's cache: a row of K and one of V a KV head, or the latent alone."""
    return model.kv_heads * (model.head_dim if model.mla else model.head_dim + model.v_head_dim)


def kv_bytes(model: Model, dtype: str, tokens: int) -> int:
    """Bytes of the KV cache of `tokens` tokens over all layers."""
    return bytes_of(model.layers * kv_elements(model) * tokens, dtype)


def windowed_kv_bytes(model: Model, dtype: str, tokens: int) -> int:
    """The same where layers with a window keep only its keys."""
    kept = (model.layers - model.windowed_layers) * tokens
    kept += model.windowed_layers * min(tokens, model.sliding_window or tokens)
    return bytes_of(kv_elements(model) * kept, dtype)


def paged_tokens(lengths: Sequence[int], page: int) -> int:
    """Tokens that the pages of these sequences have room for."""
    return sum(round_up(n, page) for n in lengths)


def batch_kv_bytes(question: Question, batch: int, paged: bool = True) -> int:
    """Bytes of the cache of `batch` sequences: paged at their mean length, contiguous at the full context."""
    q, lengths = question, question.lengths or (question.context,)
    room = paged_tokens(lengths, q.page) if paged else len(lengths) * q.context
    return kv_bytes(q.model, q.dtype, ceil_div(batch * room, len(lengths)))


def utilisation(lengths: Sequence[int], reserved: int) -> float:
    """Share of a contiguous cache in use, where each sequence reserves that many tokens."""
    return sum(lengths) / (len(lengths) * reserved)


def weights_bytes(question: Question) -> int:
    """Bytes of the weights; 0 where the parameters are unknown."""
    return bytes_of(question.model.params or 0, question.weights_dtype or question.dtype)


def left(memory: int, *taken: int) -> int:
    """What is left of a card's memory; negative where it does not suffice."""
    return memory - sum(taken)


def largest_chunk(budget: int, tokens: int, dtype: str, head_batches: int = 1) -> int:
    """Keys of the largest chunk whose N × chunk scores fit `budget`; so many heads × sequences at once."""
    return max(0, budget) * 8 // (head_batches * tokens * BITS[dtype])


def projections_crossing(model: Model) -> float:
    """N from which attention, 4·N²·H·D flop a layer, outweighs its four projections, without a mask."""
    return model.hidden * (model.q_heads + model.kv_heads) / model.q_heads


def weights_crossing(model: Model) -> float:
    """N from which attention outweighs all matrices, without a mask, if each token uses every parameter."""
    return model.params / (2 * model.layers * model.q_heads * model.head_dim)


def figures(question: Question) -> list[Figure]:
    """Every number that no kernel's plan decides."""
    return [*_memory(question), *_scores(question), *_crossings(question), *_shares(question)]


def _memory(q: Question) -> list[Figure]:
    m, size, room = q.model, BITS[q.dtype] / 8, round_up(q.context, q.page)
    wide = "D" if m.mla else "2·D" if m.head_dim == m.v_head_dim else "(D + DV)"
    one = f"{m.layers} × {m.kv_heads} × {kv_elements(m) // m.kv_heads} × {size:g} B"
    kv, weights = batch_kv_bytes(q, q.batch), weights_bytes(q)
    mean = " at its mean length" if q.lengths else ""
    found = [
        Figure("KV cache, one token", kv_bytes(m, q.dtype, 1), "B", f"L·HKV·{wide}·size", one),
        Figure("KV cache, one sequence", kv_bytes(m, q.dtype, room), "B", "one token · ⌈N/page⌉·page",
               f"{gb(kv_bytes(m, q.dtype, 1))} × {room:,}"),
        Figure(f"KV cache, batch {q.batch:,}", kv, "B", f"B · one sequence{mean}",
               f"{q.batch:,} × {gb(kv / q.batch)}"),
        Figure("reserved, not modelled", q.reserve, "B", "driver, framework, activations", "--reserve"),
    ]
    taken = [kv, q.reserve]
    if m.params is not None:
        dtype = q.weights_dtype or q.dtype
        found.insert(0, Figure("weights", weights, "B", "P·size",
                               f"{m.params:,} × {BITS[dtype] / 8:g} B ({dtype})"))
        taken.insert(0, weights)
    terms = [gb(size) for size in taken]
    if q.memory is None:
        what, formula = "needed", "weights + KV + reserved"
        if m.params is None:
            what, formula = "needed, without the weights", "KV + reserved"
        return [*found, Figure(what, sum(taken), "B", formula, " + ".join(terms))]
    return [
        *found,
        Figure("memory of the card", q.memory, "B", "nominal", gib(q.memory)),
        Figure("left for attention", left(q.memory, *taken), "B", "memory − weights − KV − reserved",
               " − ".join([gb(q.memory), *terms])),
    ]


def _scores(q: Question) -> list[Figure]:
    m, n, size, heads = q.model, q.context, BITS[q.dtype] / 8, q.batch * q.model.q_heads
    chunk, each = min(q.chunk, n), f"{q.batch:,} × {m.q_heads} × {n:,}"
    found = [
        Figure("scores, one head", bytes_of(n * n, q.dtype), "B", "N²·size", f"{n:,}² × {size:g} B"),
        Figure("scores, one layer", bytes_of(heads * n * n, q.dtype), "B", "B·H·N²·size",
               f"{each}² × {size:g} B"),
        Figure(f"scores, in chunks of {chunk:,}", bytes_of(heads * n * chunk, q.dtype), "B",
               "B·H·N·chunk·size", f"{each} × {chunk:,} × {size:g} B"),
        Figure("memory ratio of chunking", n / chunk, "×", "N : chunk", f"{n:,} : {chunk:,}"),
    ]
    if q.memory is not None:
        budget = left(q.memory, weights_bytes(q), batch_kv_bytes(q, q.batch), q.reserve)
        found.append(Figure("largest chunk by memory", largest_chunk(budget, n, q.dtype, heads), "tokens",
                            "left / (B·H·N·size)", f"{gb(budget)} / ({each} × {size:g} B)"))
    return found


def _crossings(q: Question) -> list[Figure]:
    m = q.model
    if m.mla:
        return []
    found = [Figure("attention outweighs its projections from N", projections_crossing(m), "tokens",
                    "hidden·(H + HKV)/H", f"{m.hidden:,} × ({m.q_heads} + {m.kv_heads}) / {m.q_heads}")]
    if m.params is not None:
        found.append(Figure("attention outweighs all matrices from N", weights_crossing(m), "tokens",
                            "P / (2·L·H·D), if a token uses all P",
                            f"{m.params:,} / (2 × {m.layers} × {m.q_heads} × {m.head_dim})"))
    return found


def _shares(q: Question) -> list[Figure]:
    m, n = q.model, q.context
    found = [Figure("saved by sharing KV heads", 100 * (1 - m.kv_heads / m.q_heads), "%", "1 − HKV/H",
                    f"1 − {m.kv_heads}/{m.q_heads}")]
    if m.mla:
        found.clear()
    if m.windowed_layers:
        full, token = m.layers - m.windowed_layers, gb(bytes_of(kv_elements(m), q.dtype))
        kept = f"{full} × {n:,} + {m.windowed_layers} × {min(n, m.sliding_window):,}"
        found.append(Figure("one sequence, were only windows kept", windowed_kv_bytes(m, q.dtype, n), "B",
                            "(full·N + windowed·min(N, W)) · one token and layer",
                            f"({kept}) × {token}"))
    if q.lengths:
        total, room = sum(q.lengths), paged_tokens(q.lengths, q.page)
        found += [
            Figure("contiguous cache in use", 100 * utilisation(q.lengths, n), "%",
                   "Σ lengths / (sequences·N)", f"{total:,} / ({len(q.lengths):,} × {n:,})"),
            Figure("paged cache in use", 100 * total / max(room, 1), "%",
                   "Σ lengths / Σ ⌈length/page⌉·page", f"{total:,} / {room:,}"),
        ]
    return found
