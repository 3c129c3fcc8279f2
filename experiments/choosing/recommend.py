"""Which kernel, constants and page for a model, a card, a batch and a context, and what one gives up.

Chosen by the stored rows of that card (`choosing`); where it has none of the model's head layout near enough,
by closed forms over the card's ceilings, which is labelled *modelled*. The memory is always modelled
(`capacity`): what does not fit is ruled out before anything is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from cuattn.kernels.base import Plan, Row, Unsupported, ceil_div
from cuattn.kernels.shapes import AttentionShape, DecodeShape
from experiments.capacity.batches import Need, need
from experiments.capacity.budget import Question, weights_bytes
from experiments.catalog import Entry
from experiments.choosing import stored_times
from experiments.choosing.stored_times import EXTENDED, Candidate, Layout
from experiments.diagnose.row_causes import Ceiling
from experiments.quantities import gb, gib

NEAR_TIME, NEAR_MEMORY = 0.02, 0.01  # differences that a choice ignores
FAR_TIME = 0.25  # what is added to an extended time before it is set beside others
MODELLED = "modelled"


@dataclass(frozen=True)
class Asked:
    """What is asked.

    Parameters
    ----------
    question : Question
        Sizes, with a card and without its memory, since the parameters may be unknown.
    memory : int
        Bytes of the card.
    causal : bool
        The mask of prefill.
    peers : bool
        Whether other people's libraries may be chosen.
    """

    question: Question
    memory: int
    causal: bool = True
    peers: bool = False

    def sequences(self, family: str) -> int:
        """Sequences of one call."""
        q = self.question
        return q.batch if family == "decode" else min(q.batch, q.prefill_batch or q.batch)

    def layout(self, family: str) -> Layout:
        """The head layout whose rows count."""
        m, causal = self.question.model, self.causal if family == "prefill" else None
        return Layout(family, m.q_heads, m.kv_heads, m.head_dim, self.question.dtype, causal)

    def shape(self, family: str, page: int) -> AttentionShape | DecodeShape:
        """The problem as a plan takes it."""
        m, q, b = self.question.model, self.question, self.sequences(family)
        n, heads = q.context, (m.q_heads, m.kv_heads)
        if family == "decode":
            return DecodeShape(b, *heads, m.head_dim, page, ceil_div(n, page), q.dtype)
        return AttentionShape(b, *heads, n, n, m.head_dim, q.dtype, self.causal)


@dataclass(frozen=True)
class Offer:
    """One candidate: its time with its label and rows, its memory, or why it is ruled out.

    Attributes
    ----------
    candidate : Candidate
    time_us : float or None
        Of one layer's call; None where it is ruled out.
    how : str
        measured, interpolated, extended (see `stored_times.Estimate`) or modelled.
    total : int or None
        Modelled bytes of weights, cache, reserve, arrays and scratch; None for a peer, which has no plan.
    constants : mapping
        The plan's at this shape.
    rows : tuple of (run, case id)
    peer : bool
    refusal : str
    """

    candidate: Candidate
    time_us: float | None = None
    how: str = ""
    total: int | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[tuple[str, str], ...] = ()
    peer: bool = False
    refusal: str = ""


@dataclass(frozen=True)
class Answer:
    """The offers of one family, fastest first and those ruled out last, and the choice among them.

    `chosen` is None where nothing remains; `missing` are kernels of the family without rows near enough.
    """

    family: str
    offers: tuple[Offer, ...]
    chosen: Offer | None
    missing: tuple[str, ...] = ()

    @property
    def modelled(self) -> bool:
        """Whether no row speaks for this."""
        return all(offer.how in ("", MODELLED) for offer in self.offers)

    @property
    def fastest(self) -> Offer | None:
        """The fastest of all that fit, peers among them."""
        return min(_timed(self.offers), key=lambda o: o.time_us, default=None)

    @property
    def leanest(self) -> Offer | None:
        """The one of the least memory among ours that fit."""
        fit = [o for o in _timed(self.offers) if o.total is not None]
        return min(fit, key=lambda o: (o.total, o.time_us), default=None)


def answer(
    asked: Asked, family: str, rows: pd.DataFrame, known: Mapping[str, Entry], ceiling: Ceiling
) -> Answer:
    """The candidates of a family, judged, and the choice.

    Parameters
    ----------
    asked : Asked
    family : {"prefill", "decode"}
    rows : pandas.DataFrame
        `stored_times.trusted` rows; those of other cards than the question's are left out.
    known : mapping of name to Entry
    ceiling : Ceiling
        Rates for what no row speaks for.
    """
    mine = [entry for entry in known.values() if entry.family == family]
    rows = rows[rows["device"] == asked.question.device.name]
    offers = _measured(asked, family, rows, known)
    if not any(asked.peers or not offer.peer for offer in _timed(offers)):
        # NOTE: a measured time beside modelled ones would mislead.
        offers = [offer for offer in offers if not offer.peer]
        spoken = {offer.candidate.kernel for offer in offers}
        rest = [entry.row for entry in mine if entry.row is not None and entry.name not in spoken]
        offers += [_modelled(asked, row, ceiling) for row in rest]
    spoken = {offer.candidate.kernel for offer in offers}
    offers.sort(key=lambda o: (o.time_us is None, o.time_us, o.candidate))
    pool = [offer for offer in _timed(offers) if asked.peers or not offer.peer]
    missing = tuple(entry.name for entry in mine if entry.name not in spoken)
    return Answer(family, tuple(offers), pick(pool, asked.question.page), missing)


def _timed(offers: Sequence[Offer]) -> list[Offer]:
    return [offer for offer in offers if offer.time_us is not None]


def _held_for(offer: Offer) -> float:
    """Its time in a choice. NOTE: a row far off errs by more than what often tells candidates apart."""
    return offer.time_us * (1 + FAR_TIME if offer.how == EXTENDED else 1)


def pick(pool: Sequence[Offer], page: int) -> Offer | None:
    """The fastest; of those about as fast the leanest; of those about as lean the least peculiar.

    An extended time is held for more. The least peculiar is one whose plan chooses its constants itself, with
    the page nearest to `page`; then the fastest.
    """
    if not pool:
        return None
    limit = min(map(_held_for, pool)) * (1 + NEAR_TIME)
    near = [o for o in pool if _held_for(o) <= limit]
    totals = [o.total for o in near if o.total is not None]
    if totals:
        near = [o for o in near if o.total is not None and o.total <= min(totals) * (1 + NEAR_MEMORY)]

    def peculiar(offer: Offer) -> tuple:
        own, size = bool(offer.candidate.constants), offer.candidate.page or page
        return own, abs(math.log2(size / page)), offer.time_us

    return min(near, key=peculiar)


def _measured(asked: Asked, family: str, rows: pd.DataFrame, known: Mapping[str, Entry]) -> list[Offer]:
    layout = asked.layout(family)
    grid, place = stored_times.grids(rows).get(layout, {}), (asked.sequences(family), asked.question.context)
    found = []
    for candidate, estimate in stored_times.estimates(layout, grid, *place).items():
        offer = judged(asked, known[candidate.kernel].row, candidate)
        if not offer.refusal:
            offer = replace(offer, time_us=estimate.time_us, how=estimate.how, rows=tuple(estimate.rows))
        found.append(offer)
    return found


def _modelled(asked: Asked, row: Row, ceiling: Ceiling) -> Offer:
    """A roofline: the plan's flops at the compute ceiling or its requested bytes at the read ceiling."""
    page = asked.question.page if row.family == "decode" else 0
    offer = judged(asked, row, Candidate(row.name, page=page))
    if offer.refusal:
        return offer
    shape = asked.shape(row.family, page)
    plan = plan_of(asked, row, offer.candidate)
    lengths = [asked.question.context] * shape.b if row.family == "decode" else None
    cost = row.cost(shape, plan, lengths)
    flops = cost.flops / ceiling.tflops / 1e6 if ceiling.tflops else 0.0
    moved = (cost.bytes_loaded + cost.bytes_stored) / ceiling.read_gbps / 1e3 if ceiling.read_gbps else 0.0
    if not max(flops, moved):
        return replace(offer, refusal="no ceiling of this card is known, so its time cannot be modelled")
    return replace(offer, time_us=max(flops, moved), how=MODELLED)


def plan_of(asked: Asked, row: Row, candidate: Candidate) -> Plan:
    """The candidate's plan for what is asked.

    Raises
    ------
    Unsupported
    """
    shape = asked.shape(row.family, candidate.page)
    return row.plan(shape, asked.question.device, candidate.settings())


def judged(asked: Asked, row: Row | None, candidate: Candidate) -> Offer:
    """A candidate with its memory and constants, or with the sentence that rules it out; no time yet."""
    q = asked.question
    if row is None:
        return Offer(candidate, peer=True)
    needed = need(replace(q, page=candidate.page or q.page), row, candidate.settings())
    refusal = needed.refusal
    if not refusal and row.family == "prefill" and asked.causal and "causal" not in row.features:
        refusal = "has no causal mask"
    if refusal:
        return Offer(candidate, refusal=refusal)
    if needed.total > asked.memory:
        return Offer(candidate, total=needed.total, refusal=_too_large(asked, needed))
    try:
        plan = plan_of(asked, row, candidate)
    except Unsupported as error:
        return Offer(candidate, refusal=str(error))
    return Offer(candidate, total=needed.total, constants=dict(plan.constants))


def _too_large(asked: Asked, needed: Need) -> str:
    q = asked.question
    parts = {"weights": weights_bytes(q), "scratch": needed.scratch, "Q, O and LSE": needed.arrays,
             "reserve": q.reserve}
    parts["KV cache"] = needed.total - sum(parts.values())
    most = max(parts, key=parts.get)
    return (f"does not fit: needs {gb(needed.total)}, of it {gb(parts[most])} {most}, and the card has "
            f"{gb(asked.memory)} ({gib(asked.memory)})")
