"""The command `recommend`: its options, its tables, and the sentence at the end."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape

from cuattn.devices import Device, lookup
from experiments import environment, store, tables
from experiments.capacity import cli as capacity_cli
from experiments.capacity.budget import RESERVE, Question
from experiments.capacity.cli import option
from experiments.catalog import Entry, catalog
from experiments.choosing import recommend
from experiments.choosing.recommend import FAR_TIME, MODELLED, NEAR_MEMORY, NEAR_TIME, Answer, Asked, Offer
from experiments.choosing.stored_times import FAMILIES, REACH, set_aside, trusted
from experiments.console import say_unreadable
from experiments.diagnose.row_causes import ceiling
from experiments.folder import RUNS
from experiments.models import models
from experiments.quantities import gb, parse_bytes, parse_count, parse_tokens
from experiments.suite import load_suite
from experiments.words import UserError, nearest, several

SHOWN = 10  # candidates a table lists
PAGES = (16, 64, 256)  # what a suite that is written measures

Batch = Annotated[int, option("--batch", "Sequences decoded at once.")]
AtOnce = Annotated[int, option("--prefill-batch", "Sequences prefilled at once.")]
Page = Annotated[int, option("--page", "Tokens of a page, where no row says which is best.")]
Causal = Annotated[bool, typer.Option("--causal/--full", help="The mask of prefill.")]
Phase = Annotated[Optional[str], option("--phase", "prefill or decode; both if not given.")]
Peers = Annotated[bool, typer.Option("--peers", help="Other people's libraries may be chosen, too.")]
Runs = Annotated[Optional[Path], option("--runs", "Your runs; ./runs if not given.")]
Write = Annotated[Optional[Path], option("--write", "Write the suite that would measure this: a .toml.")]


def register(app: typer.Typer, console: Console) -> None:
    """Add the command to the application."""

    @app.command("recommend")
    def command(
        name: capacity_cli.ModelName = None, card: capacity_cli.Card = None, batch: Batch = 1,
        context: capacity_cli.Context = "4096", phase: Phase = None, prefill_batch: AtOnce = 1,
        causal: Causal = True, dtype: capacity_cli.Dtype = "bfloat16",
        weights_dtype: capacity_cli.WeightsDtype = None, memory: capacity_cli.Memory = None,
        reserve: capacity_cli.Reserve = "2GB", page: Page = 16, layers: capacity_cli.Layers = None,
        heads: capacity_cli.Heads = None, kv_heads: capacity_cli.KVHeads = None,
        head_dim: capacity_cli.HeadDim = None, params: capacity_cli.Params = None, peers: Peers = False,
        kernel: capacity_cli.Kernels = None, runs: Runs = None, write: Write = None,
    ) -> None:
        """Say which kernel, constants and page to use, by the stored rows of that card, and what it costs."""
        numbers = {"layers": layers, "q_heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        capacity_cli.check_counts({"batch": batch, "prefill_batch": prefill_batch, "page": page, **numbers})
        numbers["params"] = params and parse_count(params, "--params")
        device = _card(card)
        question = Question(
            capacity_cli.asked_model(name, numbers, "recommend"), parse_tokens(context, "--context"), dtype,
            weights_dtype or "", device, None, batch, prefill_batch, parse_bytes(reserve, "--reserve"), page,
        )
        size = parse_bytes(memory, "--memory") if memory else device.memory_bytes
        asked = Asked(question, size, causal, peers)
        families = _families(phase)
        known = catalog(kernel or ())
        if write is not None:
            _write(write, asked, families, known)
        raise SystemExit(_answer(console, asked, families, known, runs, write))


def _card(name: str | None) -> Device:
    """The card named, or the one that is here."""
    if name is not None:
        return capacity_cli.asked_card(name)
    here = environment.gpus()
    found = lookup(here[0]["name"] or "") if here else None
    if found is None:
        what = f"'{here[0]['name']}', which is not in cuattn/devices.py" if here else "no GPU here"
        raise UserError(f"--card: expected a card, got none and {what}; name one, such as --card H200")
    return found


def _families(phase: str | None) -> tuple[str, ...]:
    if phase is None:
        return FAMILIES
    if phase not in FAMILIES:
        raise UserError(f"--phase: '{phase}' is not a phase; {nearest(phase, FAMILIES)}")
    return (phase,)


def _answer(console, asked: Asked, families, known, runs: Path | None, written: Path | None) -> int:
    """Read the rows, print tables and the sentence; returns the exit code."""
    if runs is not None and not runs.exists():
        raise UserError(f"--runs: {runs} does not exist; name a folder of runs")
    folders, card = [store.RECORDED, runs or RUNS], asked.question.device.name
    loaded = store.read_runs(folders)
    say_unreadable(loaded)
    frame = loaded.frame
    rows, top = trusted(frame, known), ceiling(card, runs or RUNS)
    answers = [recommend.answer(asked, family, rows, known, top) for family in families]
    for answer in answers:
        if answer.fastest is not None:
            console.print(_table(asked, answer, top.source))
        for line in _notes(answer):
            console.print(escape(line), highlight=False, soft_wrap=True)
    if aside := set_aside(frame, known, card):
        words = ", ".join(f"{count} {word}" for word, count in aside.most_common())
        console.print(f"Rows of {card} not used: {words}", highlight=False)
    console.print(escape(sentence(asked, answers, written)), highlight=False, soft_wrap=True)
    return 0 if any(answer.chosen for answer in answers) else 1


def _table(asked: Asked, answer: Answer, top: str):
    q = asked.question
    b, title = asked.sequences(answer.family), answer.family.capitalize()
    if answer.modelled:
        caption = (f"Times are modelled: flops and requested bytes (as if none were found in L2) at {top}. "
                   f"No row of {q.device.name} is near enough.")
    else:
        caption = (f"Times of one layer: measured; interpolated between the nearest rows of {q.device.name}, "
                   f"log-log in N and B; or extended up to {REACH}× beyond them, as that of the kernel "
                   "most alike changes.")
    least = "the plan's own constants" + f", the page nearest to {q.page}" * (answer.family == "decode")
    caption += (f" Memory is modelled. Chosen: the fastest, extended times held for {FAR_TIME:.0%} more; within "
                f"{NEAR_TIME:.0%} of it the leanest; within {NEAR_MEMORY:.0%} of that {least}.")
    table = tables.new_table(f"{title}: {escape(q.model.name)}, {b:,} × {q.context:,} tokens", caption)
    for head in ("", "kernel"):
        table.add_column(head, no_wrap=True)
    table.add_column("constants", overflow="fold")
    for head in ("page", "time\nµs", "against\nthe fastest", "modelled\nmemory", "above\nthe leanest"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("time is", no_wrap=True)
    shown = [o for o in answer.offers if o.time_us is not None][:SHOWN]
    if answer.chosen and answer.chosen not in shown:
        shown.append(answer.chosen)
    for offer in shown:
        table.add_row(*_cells(offer, answer))
    return table


def _cells(offer: Offer, answer: Answer) -> list[str]:
    lean = answer.leanest
    memory = ["not known", ""] if offer.total is None else [gb(offer.total), gb(offer.total - lean.total)]
    ratio = f"{offer.time_us / answer.fastest.time_us:.2f}×"
    how = offer.how if offer.how == MODELLED else f"{offer.how}, {several(len(offer.rows), 'row')}"
    mark, page = "→" if offer is answer.chosen else "", str(offer.candidate.page or "")
    name = offer.candidate.kernel + (" (peer)" if offer.peer else "")
    return [mark, name, _constants(offer), page, f"{offer.time_us:,.1f}", ratio, *memory, how]


def _constants(offer: Offer) -> str:
    return " ".join(f"{name}={value}" for name, value in offer.constants.items())


def _notes(answer: Answer) -> list[str]:
    """The rows behind the choice, who is ruled out and why, who has no rows."""
    found = []
    if answer.chosen is not None and answer.chosen.rows:
        runs: dict[str, list[str]] = {}
        for run, case in answer.chosen.rows:
            runs.setdefault(run, []).append(case)
        cases = "; ".join(f"run {run}: {', '.join(ids)}" for run, ids in runs.items())
        found.append(f"{answer.chosen.candidate.kernel} rests on {cases}")
    refusals: dict[tuple[str, str], None] = {}
    for offer in answer.offers:
        if offer.refusal:
            refusals[offer.candidate.kernel, offer.refusal] = None
    found += [f"Ruled out: {kernel}: {why}" for kernel, why in refusals]
    timed = sum(offer.time_us is not None for offer in answer.offers)
    if timed > SHOWN:
        found.append(f"{timed - SHOWN} slower candidates are not shown")
    if answer.missing:
        found.append(f"Not compared, for want of rows near enough: {', '.join(answer.missing)}")
    return found


def sentence(asked: Asked, answers: list[Answer], written: Path | None = None) -> str:
    """What to use and what it gives up, in one sentence."""
    q = asked.question
    where = f"For {q.model.name} on {q.device.name}, batch {q.batch:,} at {q.context:,} tokens: "
    text = where + "; ".join(f"{answer.family} {_choice(answer)}" for answer in answers)
    if q.model.params is None:
        text += " (memory without the weights, whose number is not known)"
    if written is not None:
        return f"{text}; to measure it: python -m experiments run {shlex.quote(str(written))}."
    if any(answer.modelled for answer in answers if answer.chosen):
        again = command_line(asked, tuple(answer.family for answer in answers))
        return (f"{text}; to measure it: {again} --write mine.toml, then "
                "python -m experiments run mine.toml.")
    return text + "."


def _choice(answer: Answer) -> str:
    chosen, fastest, lean = answer.chosen, answer.fastest, answer.leanest
    if chosen is None:
        why = (f"{o.candidate.kernel}: {o.refusal}" for o in answer.offers if o.refusal)
        return f"has no kernel to use ({next(why, 'none is known')})"
    page = f" on pages of {chosen.candidate.page}" if chosen.candidate.page else ""
    constants = f" ({_constants(chosen)})" if chosen.constants else ""
    ratio, time = chosen.time_us / fastest.time_us, "the fastest"
    if chosen is not fastest:
        slower = f"{100 * (ratio - 1):.1f} % slower than" if ratio < 1.1 else f"{ratio:.2f}× the time of"
        time = f"{slower} {_name(fastest)}{' (a peer)' * fastest.peer}"
    memory = "of memory not known"
    if chosen.total is not None:
        above = chosen.total - lean.total
        memory = f"{gb(above)} above {_name(lean)}" if above else "the leanest"
    return (f"with {chosen.candidate.kernel}{page}{constants}, {chosen.time_us:,.1f} µs a layer "
            f"({chosen.how}), {time} and {memory}")


def _name(offer: Offer) -> str:
    page = f" on pages of {offer.candidate.page}" if offer.candidate.page else ""
    sets = " " + " ".join(f"{k}={v}" for k, v in offer.candidate.settings().items())
    return offer.candidate.kernel + sets.rstrip() + page


def command_line(asked: Asked, families: tuple[str, ...] = FAMILIES) -> str:
    """The command that asks the same again."""
    q, m = asked.question, asked.question.model
    words = ["--model", m.name]
    if m.name not in models():
        words = ["--layers", m.layers, "--heads", m.q_heads, "--kv-heads", m.kv_heads]
        words += ["--head-dim", m.head_dim] + ["--params", m.params] * bool(m.params)
    words += ["--card", q.device.name, "--batch", q.batch, "--context", q.context, "--dtype", q.dtype]
    words += ["--prefill-batch", q.prefill_batch, "--page", q.page]
    words += ["--memory", f"{asked.memory}B"] * (asked.memory != q.device.memory_bytes)
    words += ["--reserve", f"{q.reserve}B"] * (q.reserve != RESERVE)
    words += ["--weights-dtype", q.weights_dtype] * bool(q.weights_dtype)
    words += ["--phase", families[0]] * (len(families) == 1)
    words += ["--full"] * (not asked.causal) + ["--peers"] * asked.peers
    return shlex.join(["python", "-m", "experiments", "recommend", *map(str, words)])


def suite_text(asked: Asked, families: tuple[str, ...], known: Mapping[str, Entry]) -> str:
    """A suite that measures what is asked: every kernel of the families at this very shape."""
    q, m = asked.question, asked.question.model
    shape = f'model = "{m.name}"' if m.name in models() else (
        f"h = {m.q_heads}\nhkv = {m.kv_heads}\nd = {m.head_dim}")
    lines = [f'title = "{m.name} at {q.context} tokens"',
             f'question = "Which kernel is fastest for {m.name} at {q.context} tokens?"',
             "", "[repeat]", "timeout_s = 1.0"]
    for family in families:
        names = [name for name, entry in known.items() if entry.family == family and not entry.path]
        if not names:
            continue
        quoted = ", ".join(f'"{name}"' for name in names)
        lines += ["", f"[gpu.{family}]", f"kernels = [{quoted}]", shape, f"b = {asked.sequences(family)}",
                  f"n = {q.context}", f'dtype = "{q.dtype}"']
        if family == "prefill":
            lines.append(f"causal = {str(asked.causal).lower()}")
        else:
            lines.append(f"page_size = {sorted({*PAGES, q.page})}")
    return "\n".join(lines) + "\n"


def _write(path: Path, asked: Asked, families, known) -> None:
    """The suite into a new file.

    Raises
    ------
    UserError
    """
    if path.suffix != ".toml":
        raise UserError(f"--write: expected the name of a .toml file, got '{path}'; rename it")
    try:
        with open(path, "x", encoding="utf-8") as handle:
            handle.write(suite_text(asked, families, known))
    except FileExistsError as error:
        raise UserError(f"--write: {path} exists; name a new file") from error
    except OSError as error:
        raise UserError(f"--write: {path} cannot be written ({error.strerror}); name another") from error
    load_suite(str(path))
