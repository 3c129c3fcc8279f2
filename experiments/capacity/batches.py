"""What each kernel adds to weights and cache, by its own plan, and the largest batch that then fits a card.

All of it is *modelled*. A prefill kernel computes the whole context of a few sequences at once; a decode
kernel one token of every sequence. One layer runs at a time, so its scratch serves all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuattn.devices import CARDS, OLDEST, Device
from cuattn.kernels.base import (
    ELEMENT_BYTES,
    Plan,
    Row,
    Unsupported,
    ceil_div,
)
from cuattn.kernels.shapes import AttentionShape, DecodeShape
from experiments.capacity.budget import Question, batch_kv_bytes, kv_bytes, weights_bytes
from experiments.costs import LSE_BYTES
from experiments.quantities import gb

MOST_SEQUENCES = 4096  # no larger batch is tried: more than a scheduler keeps in flight
FAMILIES = ("prefill", "decode")
# Tunables worth a line of their own, as the suite `memory` sweeps them.
VARIANTS: dict[str, tuple[Mapping[str, Any], ...]] = {"standard": ({}, {"head_group": 8})}


@dataclass(frozen=True)
class Need:
    """What one kernel needs at the question's batch, and how far it goes.

    Attributes
    ----------
    name, family : str
    scratch, arrays : int
        Bytes of its scratch; of Q, O and LSE of one call.
    formula : str
        The scratch as its plan names it: every array's extents and dtype.
    total : int
        Weights, cache, reserve, arrays and scratch together.
    largest : int or None
        Largest batch on a paged cache; None without a card's memory, or where the kernel refuses.
    largest_contiguous : int or None
        The same where each sequence reserves the whole context; None for a kernel of paged caches alone.
    refusal : str
        Why the kernel cannot run this, and so has no numbers; else empty.
    """

    name: str
    family: str
    scratch: int = 0
    arrays: int = 0
    formula: str = ""
    total: int = 0
    largest: int | None = None
    largest_contiguous: int | None = None
    refusal: str = ""


@dataclass(frozen=True)
class _Asked:
    """A kernel with constants, on the cards whose plans count."""

    question: Question
    row: Row
    constants: Mapping[str, Any]
    cards: Sequence[Device]
    _scratch: dict[int, int] = field(default_factory=dict)

    def scratch(self, batch: int) -> int:
        """Bytes of scratch at that batch; a plan of many launches takes its time, so each is made once."""
        if batch not in self._scratch:
            self._scratch[batch] = self.plan(batch).scratch_bytes
        return self._scratch[batch]

    def plan(self, batch: int) -> Plan:
        """The plan with the most scratch over the cards that can run it."""
        plans, refusal = [], None
        for card in self.cards:
            try:
                plans.append(self.row.plan(self.shape(batch), card, self.constants))
            except Unsupported as error:
                refusal = error
        if not plans:
            raise refusal
        return max(plans, key=lambda plan: plan.scratch_bytes)

    def shape(self, batch: int) -> AttentionShape | DecodeShape:
        """The problem of one call."""
        q, m = self.question, self.question.model
        if self.row.family == "decode":
            pages = ceil_div(q.context, q.page)
            return DecodeShape(batch, m.q_heads, m.kv_heads, m.head_dim, q.page, pages, q.dtype)
        at_once = min(batch, q.prefill_batch or batch)
        return AttentionShape(
            at_once, m.q_heads, m.kv_heads, q.context, q.context, m.head_dim, q.dtype,
            causal="causal" in self.row.features,
        )

    def arrays(self, batch: int) -> int:
        """Bytes of Q, O and LSE of one call; K and V are the cache's."""
        shape = self.shape(batch)
        rows = shape.b * shape.h * getattr(shape, "m", 1)
        return rows * (2 * shape.d * ELEMENT_BYTES[shape.dtype] + LSE_BYTES)

    def total(self, batch: int, paged: bool) -> int:
        """Bytes of everything at that batch."""
        q = self.question
        kept = weights_bytes(q) + batch_kv_bytes(q, batch, paged) + q.reserve
        return kept + self.arrays(batch) + self.scratch(batch)

    def largest(self, paged: bool) -> int:
        """Largest batch that fits the card."""
        q = self.question
        one = max(batch_kv_bytes(q, 1, paged), 1)
        upper = min(MOST_SEQUENCES, max(0, q.memory - weights_bytes(q) - q.reserve) // one)

        def fits(batch: int) -> bool:
            try:
                return self.total(batch, paged) <= q.memory
            except Unsupported:
                return False

        return largest_that(fits, upper)


def largest_that(fits: Callable[[int], bool], upper: int) -> int:
    """A batch that fits while one more does not, or `upper`; 0 where not even one fits."""
    low, high = 0, 1
    while high <= upper and fits(high):
        low, high = high, 2 * high
    high = min(high, upper + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def refusal(question: Question, row: Row) -> str:
    """Why the kernel cannot run this model on this card; empty where it can."""
    m, dtype, card = question.model, question.dtype, question.device
    if m.mla:
        return "latent attention is not among its shapes"
    if m.head_dim != m.v_head_dim:
        return f"K rows of {m.head_dim} beside V rows of {m.v_head_dim} are not among its shapes"
    if dtype not in row.dtypes:
        return f"takes {', '.join(row.dtypes)}, not {dtype}"
    if m.head_dim not in row.head_dims:
        return f"head dim {m.head_dim} is not among its {row.head_dims.start} to {row.head_dims[-1]}"
    if card and not row.runs_on(card.arch):
        return f"needs {' or '.join(row.archs)}, {card.name} is {card.arch}"
    return ""


def needs(question: Question, rows: Sequence[Row]) -> list[Need]:
    """Every prefill and decode kernel's need, those of one family together."""
    ours = sorted((r for r in rows if r.family in FAMILIES), key=lambda r: FAMILIES.index(r.family))
    return [need(question, row, constants) for row in ours for constants in VARIANTS.get(row.name, ({},))]


def need(question: Question, row: Row, constants: Mapping[str, Any]) -> Need:
    """One kernel's need with those constants."""
    name = " ".join([row.name, *(f"{k}={v}" for k, v in constants.items())])
    if why := refusal(question, row):
        return Need(name, row.family, refusal=why)
    cards = [question.device] if question.device else able()
    return _need(name, _Asked(question, row, constants, cards))


def _need(name: str, asked: _Asked) -> Need:
    q, family = asked.question, asked.row.family
    try:
        plan = asked.plan(q.batch)
    except Unsupported as error:
        return Need(name, family, refusal=str(error))
    formula = " + ".join(
        f"{array}: {' × '.join(f'{extent:,}' for extent in shape)} {dtype}"
        for array, (shape, dtype) in plan.scratch.items()
    )
    contiguous = family == "prefill"
    return Need(
        name, family, plan.scratch_bytes, asked.arrays(q.batch), formula or "none",
        asked.total(q.batch, paged=True),
        None if q.memory is None else asked.largest(paged=True),
        asked.largest(paged=False) if q.memory is not None and contiguous else None,
    )


def able() -> list[Device]:
    """The cards of the table that the kernels run on."""
    return [card for card in CARDS.values() if card.arch_number >= OLDEST]


def smallest_card(size: int) -> Device | None:
    """That of them with the least memory that holds so many bytes."""
    holding = [card for card in able() if card.memory_bytes >= size]
    return min(holding, key=lambda card: card.memory_bytes, default=None)


def notes(question: Question) -> list[str]:
    """What the reader should know about these numbers."""
    q, m = question, question.model
    found = []
    if m.max_context and q.context > m.max_context:
        found.append(f"{q.context:,} tokens are more than the {m.max_context:,} that {m.name} was made for")
    if m.windowed_layers:
        found.append(f"{m.windowed_layers} of {m.layers} layers see {m.sliding_window:,} tokens alone; the "
                     "cache here keeps all, as PagedKVCache does")
    if (q.weights_dtype or q.dtype) in ("int8", "int4", "float8_e4m3"):
        found.append("the scales of quantised numbers are not counted")
    if m.mla:
        found.append(m.mla)
    if m.note:
        found.append(f"{m.name}: {m.note}")
    if q.memory is not None and weights_bytes(q) + q.reserve + kv_bytes(m, q.dtype, q.page) > q.memory:
        short = weights_bytes(q) + q.reserve + kv_bytes(m, q.dtype, q.page) - q.memory
        found.append(f"weights, reserve and a single page exceed the card by {gb(short)}: take a larger one, "
                     "fewer bits (--weights-dtype), or spread the model over several")
    return found
