"""The command `capacity`: its options, and its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape

from cuattn.devices import CARDS, Device, lookup
from experiments import tables
from experiments.capacity import batches, budget
from experiments.catalog import catalog
from experiments.lengths import read_lengths
from experiments.models import Model, by_numbers, changed, model
from experiments.quantities import gb, gib, parse_bytes, parse_count, parse_tokens
from experiments.words import UserError, nearest

Text, Number = Optional[str], Optional[int]


def option(flag: str, meaning: str):
    return typer.Option(flag, help=meaning)


ModelName = Annotated[Text, option("--model", "A model of experiments/models.csv.")]
Context = Annotated[str, option("--context", "Tokens a sequence may have: 4096, 32K.")]
Card = Annotated[Text, option("--card", "A card of cuattn/devices.py: H200, RTX 4090, …")]
Memory = Annotated[Text, option("--memory", "Memory of the card: 24GB (10⁹) or 24GiB (2³⁰).")]
Dtype = Annotated[str, option("--dtype", "Of the cache and of the kernels.")]
WeightsDtype = Annotated[Text, option("--weights-dtype", "Of the weights, if another: int4, …")]
Batch = Annotated[int, option("--batch", "Sequences in the cache.")]
AtOnce = Annotated[Number, option("--prefill-batch", "Sequences prefilled at once; all if not given.")]
Reserve = Annotated[str, option("--reserve", "For driver, framework, activations: not modelled.")]
Page = Annotated[int, option("--page", "Tokens of a page of the cache.")]
Chunk = Annotated[int, option("--chunk", "Keys of a chunk of scores.")]
Lengths = Annotated[Text, option("--lengths", "Real lengths: 500,1000,200, or a request log.")]
Layers = Annotated[Number, option("--layers", "Instead of --model, with --heads and --head-dim.")]
Heads = Annotated[Number, option("--heads", "Query heads.")]
KVHeads = Annotated[Number, option("--kv-heads", "As many as heads if not given.")]
HeadDim = Annotated[Number, option("--head-dim", "Elements of a row of Q, K and V.")]
VHeadDim = Annotated[Number, option("--v-head-dim", "Of a row of V, if another.")]
Hidden = Annotated[Number, option("--hidden", "heads · head dim if not given.")]
Params = Annotated[Text, option("--params", "Parameters: 70B, 135M.")]
Kernels = Annotated[Optional[list[str]], option("--kernel", "Add a kernel: a module that defines ROW.")]


def register(app: typer.Typer, console: Console) -> None:
    """Add the command to the application."""

    @app.command("capacity")
    def command(
        name: ModelName = None, context: Context = "4096", card: Card = None, memory: Memory = None,
        dtype: Dtype = "bfloat16", weights_dtype: WeightsDtype = None, batch: Batch = 1,
        prefill_batch: AtOnce = None, reserve: Reserve = "2GB", page: Page = 16, chunk: Chunk = 512,
        lengths: Lengths = None, layers: Layers = None, heads: Heads = None, kv_heads: KVHeads = None,
        head_dim: HeadDim = None, v_head_dim: VHeadDim = None, hidden: Hidden = None,
        params: Params = None, kernel: Kernels = None,
    ) -> None:
        """Say what fits: weights, KV cache, each kernel's scratch, the largest batch. Arithmetic alone."""
        numbers = {"layers": layers, "q_heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
                   "v_head_dim": v_head_dim, "hidden": hidden}
        check_counts(
            {"batch": batch, "prefill_batch": prefill_batch, "page": page, "chunk": chunk, **numbers}
        )
        device = asked_card(card, ", or give --memory alone")
        question = budget.Question(
            asked_model(name, {**numbers, "params": params and parse_count(params, "--params")}),
            parse_tokens(context, "--context"), dtype, weights_dtype or "", device,
            parse_bytes(memory, "--memory") if memory else device and device.memory_bytes,
            batch, prefill_batch, parse_bytes(reserve, "--reserve"), page, chunk, _lengths(lengths),
        )
        rows = [entry.row for entry in catalog(kernel or ()).values() if entry.row is not None]
        _print(console, question, rows)


def check_counts(counts: dict[str, int | None]) -> None:
    """Refuses an option's count that is below 1 or beyond all use."""
    most = {"batch": batches.MOST_SEQUENCES}
    for name, value in counts.items():
        option = "--" + {"q_heads": "heads"}.get(name, name).replace("_", "-")
        if value is not None and not 1 <= value <= most.get(name, 1 << 24):
            raise UserError(f"{option}: expected 1 to {most.get(name, 1 << 24)}, got {value}")


def asked_model(name: str | None, numbers: dict[str, int | None], command: str = "capacity") -> Model:
    """The model named, with the numbers given, or one by its numbers alone."""
    if name is not None:
        return changed(model(name), **numbers)
    needed = {"layers": "--layers", "q_heads": "--heads", "head_dim": "--head-dim"}
    missing = [option for key, option in needed.items() if numbers[key] is None]
    if missing:
        raise UserError(
            f"{command}: expected a model, got neither --model nor {', '.join(missing)}; such as --model "
            "Llama-3.1-8B, or --layers 80 --heads 64 --kv-heads 8 --head-dim 128 --params 70B"
        )
    return by_numbers(**numbers)


def asked_card(name: str | None, otherwise: str = "") -> Device | None:
    """The card of the table of that name; a refusal ends with what else one may do."""
    if name is None:
        return None
    found = lookup(name)
    if found is None or found.arch == "cpu":
        raise UserError(f"--card: '{name}' is not a GPU of cuattn/devices.py; {nearest(name, CARDS)}"
                        f"{otherwise}")
    return found


def _lengths(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if all(part.isascii() and part.isdigit() for part in parts):
        return tuple(int(part) for part in parts)
    if not Path(text).is_file():
        raise UserError(f"--lengths: expected integers such as 500,1000,200, or the path of a request log, "
                        f"got {text!r}")
    return tuple(read_lengths(text))


def _print(console: Console, question: budget.Question, rows) -> None:
    q = question
    on = f" on {q.device.name}" if q.device else ""
    title = f"Capacity of {escape(q.model.name)}{on}, {q.context:,} tokens, {q.dtype}: modelled"
    table = tables.new_table(title, "Arithmetic: nothing was run. GB is 10⁹ bytes, GiB is 2³⁰. L layers, "
                             "H heads, HKV KV heads, D head dim, N context, B batch, P parameters.")
    table.add_column("modelled", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("formula", overflow="fold")
    table.add_column("with numbers", overflow="fold")
    for figure in budget.figures(q):
        table.add_row(figure.name, _value(figure), figure.formula, figure.numbers)
    console.print(table)
    console.print(_kernels(q, batches.needs(q, rows)))
    for note in batches.notes(q):
        console.print(f"Note: {escape(note)}", highlight=False, soft_wrap=True)


def _value(figure: budget.Figure) -> str:
    if figure.unit == "B":
        return gb(figure.value)
    if figure.unit == "tokens":
        return f"{figure.value:,.0f}"
    return f"{figure.value:.3g} {figure.unit}"


def _kernels(q: budget.Question, needs: list[batches.Need]):
    at_once = min(q.batch, q.prefill_batch or q.batch)
    caption = (
        f"Total: weights, KV of batch {q.batch:,}, reserve, Q, O and LSE, scratch. Prefill computes "
        f"{at_once:,} × {q.context:,} tokens at once, decode one token of each sequence."
    )
    if q.device is None:
        caption += " Scratch: the most over the cards of cuattn/devices.py."
    if q.model.params is None:
        caption = caption.replace("Total: weights,", "Total, without the unknown weights:")
    table = tables.new_table("Kernels: modelled", caption)
    for head in ("kernel", "family"):
        table.add_column(head, no_wrap=True)
    for head in ("scratch", "Q, O, LSE", "total"):
        table.add_column(head, justify="right", no_wrap=True)
    heads = ["largest batch,\npaged"] + ["largest batch,\ncontiguous"] * bool(q.lengths)
    if q.memory is None:
        heads = ["smallest card\nthat holds it"] if q.model.params is not None else []
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("scratch by the kernel's plan", overflow="fold")
    for need in needs:
        if need.refusal:
            cells = ["", "", "", *([""] * len(heads)), f"[dim]unsupported: {escape(need.refusal)}[/]"]
        else:
            sizes = [gb(need.scratch), gb(need.arrays), gb(need.total)]
            cells = [*sizes, *_reach(q, need)[: len(heads)], escape(need.formula)]
        table.add_row(need.name, need.family, *cells)
    return table


def _reach(q: budget.Question, need: batches.Need) -> list[str]:
    if q.memory is None:
        card = batches.smallest_card(need.total)
        return [f"{card.name}, {gib(card.memory_bytes)}" if card else "none"]
    return [_batch(need.largest), _batch(need.largest_contiguous)]


def _batch(value: int | None) -> str:
    if value is None:
        return "–"
    return f"≥ {value:,}" if value == batches.MOST_SEQUENCES else f"{value:,}"
