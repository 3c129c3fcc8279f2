"""From a suite to its cases: the cross product of its axes, less what its limits exclude."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuattn.kernels.base import ELEMENT_BYTES
from cuattn.kernels.mla import LATENT, WIDTH
from cuattn.kernels.shapes import AttentionShape
from experiments import memory
from experiments.catalog import Entry
from experiments.lengths import batches, read_lengths
from experiments.models import model
from experiments.shards import parse_shard, select
from experiments.suite import AXES, PACKED, Suite, Sweep, defaults
from experiments.words import UserError, nearest

RAGGED_BATCHES = 4  # batches a request log yields a combination of the other axes
DECODES = ("decode", "mla", "cascade")  # families that attend to a paged cache with one query a sequence
DEFAULT_BATCH = {"gpu": 64, "cpu": 4}


@dataclass(frozen=True)
class Case:
    """One point of a sweep.

    `params` holds the parameter columns that the case fixes, and for a ragged batch its `lengths`. `case_id`
    hashes them, so the same point has the same id in every run and on every machine.
    """

    case_id: str
    params: Mapping[str, Any]
    estimate_s: float = 0.0

    @property
    def label(self) -> str:
        """A few words for a progress bar."""
        p = self.params
        shape = " ".join(
            f"{k}{p[k]}" for k in ("b", "m", "n", "d", "page_size", "bytes") if p.get(k) is not None
        )
        return f"{p['kernel']} {p.get('model') or ''} {shape}".replace("  ", " ")


def case_id(params: Mapping[str, Any]) -> str:
    """12 hex digits over the parameters, whatever their order."""
    text = json.dumps(params, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Options:
    """What the command line adds to a suite."""

    kernels: tuple[str, ...] = ()  # names of kernels given by path: added to every sweep of their family
    only: str | None = None
    limit: int | None = None
    lengths: str | None = None
    batch: int | None = None
    shard: str | None = None  # "i/n", of the cases that the other options leave
    memory_limit: str | None = None  # a size such as "24GB", and what of it no case may use
    reserve: str | None = None


def cases_of(
    suite: Suite, machine: str, known: Mapping[str, Entry], options: Options = Options()
) -> list[Case]:
    """Every case of the suite on that machine, in the suite's order, without duplicates.

    Raises
    ------
    UserError
        An unknown kernel or model, axes that do not belong together, a shard or memory limit that is none, or
        no case left.
    """
    ragged, limit = _ragged(options, machine), memory.parameters(options.memory_limit, options.reserve)
    found: dict[str, Case] = {}
    for sweep in suite.sweeps(machine):
        for params in _expand(sweep, known, options, ragged, f"{suite.name}: {machine}.{sweep.name}"):
            params |= limit
            identity = case_id(params)
            found.setdefault(identity, Case(identity, params))
    if options.only and options.only not in known:
        raise UserError(f"--only: '{options.only}' is not a kernel; {nearest(options.only, known)}")
    cases = [c for c in found.values() if options.only in (None, c.params["kernel"])]
    if options.limit is not None:
        if options.limit < 1:
            raise UserError(f"--limit: expected at least 1, got {options.limit}")
        cases = cases[: options.limit]
    if not cases:
        why = (
            f"--only {options.only}"
            if options.only
            else "its limits"
            if suite.sweeps(machine)
            else "its tables"
        )
        raise UserError(
            f"suite: '{suite.name}' has no case on the {machine} machine with {why}; see the plan of "
            "another suite with: python -m experiments list"
        )
    return cases if options.shard is None else select(cases, parse_shard(options.shard))


def _ragged(options: Options, machine: str) -> list[dict[str, Any]]:
    if options.lengths is None:
        if options.batch is not None:
            raise UserError("--batch: only means something with --lengths FILE; leave it out or name a file")
        return []
    batch = DEFAULT_BATCH[machine] if options.batch is None else options.batch
    count = RAGGED_BATCHES if machine == "gpu" else 1
    return [
        {"b": len(part), "lengths": part, "lengths_source": Path(options.lengths).name}
        for part in batches(read_lengths(options.lengths), batch, count)
    ]


def _expand(sweep: Sweep, known: Mapping[str, Entry], options: Options, ragged, where: str) -> Iterable[dict]:
    family = _family(sweep, known, where)
    if options.lengths is not None and family not in DECODES:
        return  # a request log says nothing about the other families
    names = [*sweep.kernels, *(k for k in options.kernels if known[k].family == family)]
    axes = _axes(sweep, family, bool(ragged), where)
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values))
        for extra in ragged or [{}]:
            for name in dict.fromkeys(names):
                for constants in sweep.constants.get(name, [{}]):
                    params = params_of(name, family, {**point, **extra}, constants)
                    if within(params, sweep.limits):
                        yield params


def _family(sweep: Sweep, known: Mapping[str, Entry], where: str) -> str:
    for name in sweep.kernels:
        if name not in known:
            raise UserError(f"{where}: '{name}' is not a kernel; {nearest(name, known)}")
    families = {known[name].family for name in sweep.kernels}
    if len(families) > 1:
        raise UserError(
            f"{where}: mixes kernels of the families {', '.join(sorted(families))}; give each its sweep"
        )
    return families.pop()


def _axes(sweep: Sweep, family: str, ragged: bool, where: str) -> dict[str, list]:
    for name in sweep.axes:
        if family not in AXES[name].families:
            raise UserError(f"{where}: {name} means nothing for {family} kernels; remove it")
    drop = {"b", "n"} if ragged else set()
    axes = {name: values for name, values in sweep.axes.items() if name not in drop}
    axes |= {name: [value] for name, value in defaults(family, axes).items() if name not in drop}
    if family == "prefill":
        _check_prefill(axes, where)
    if family != "probe":
        missing = [n for n in ("h", "hkv", "d") if n not in axes] if "model" not in axes else []
        missing += ["n"] if "n" not in axes and not ragged else []
        if missing:
            raise UserError(
                f"{where}: does not say {', '.join(missing)}; name them, or a model for h, hkv and d"
            )
    return axes


def _check_prefill(axes: dict[str, list], where: str) -> None:
    """Refuses axes that mean nothing together."""
    if "key_order" in axes and True in axes["causal"]:
        raise UserError(
            f"{where}: has key_order with causal = true, under which other orders give other results; "
            "keep one or the other"
        )
    if "key_order" in axes and PACKED in axes["layout"]:
        raise UserError(f"{where}: has key_order with layout = {PACKED}, whose sequences have no order of keys in "
                        "common; choose another layout")
    if "window" in axes and False in axes["causal"]:
        raise UserError(f"{where}: has a window without causal = true, so that a query would see all keys behind its "
                        "own; add that")
    if ("page_size" in axes or "page_order" in axes) and (axes["layout"] != [PACKED] or "page_size" not in axes):
        raise UserError(f"{where}: has pages without layout = {PACKED} and a page_size, by which prefill reads "
                        "them; add both, or remove them")


def params_of(name: str, family: str, point: dict[str, Any], constants: dict[str, Any]) -> dict[str, Any]:
    """The parameter columns of one case, those without a value left out."""
    params = {"kernel": name, "family": family, **point}
    if "model" in params:
        shape = model(params["model"])
        params |= {"h": shape.q_heads, "hkv": shape.kv_heads, "d": shape.head_dim}
    if constants:
        params["constants"] = json.dumps(constants, sort_keys=True)
    if family == "prefill":
        params.setdefault("m", params["n"])
    if family in DECODES:
        params = {"m": 1, "lengths_source": "uniform", **params}
    if family in (*DECODES, "cache", "pages"):
        lengths = params.get("lengths") or [params["n"]] * params["b"]
        params |= {"tokens": sum(lengths), "max_len": max(lengths, default=0)}
        if (prefix := params.get("prefix", 0)) > min(lengths, default=0) or prefix % params["page_size"]:
            raise UserError(f"prefix: expected whole pages of {params['page_size']} tokens and at most the shortest "
                            f"context, got {prefix}; change it")
    elif family == "prefill":
        params |= {"tokens": params["b"] * params["n"], "max_len": params["n"]}
    return params


def within(params: Mapping[str, Any], limits: Mapping[str, Any]) -> bool:
    """Whether a case obeys a sweep's named limits.

    `min_tokens`, `max_tokens`: tokens in the batch. `max_kv_gb`: keys and values, 10⁹ bytes. `max_scores_gb`: one M × N
    score matrix a head, 10⁹ bytes. `within_context`: no longer than the model was made for.
    """
    size = ELEMENT_BYTES.get(params["dtype"], 1)
    tokens, rows = params.get("tokens", 0), params.get("m", 0) * params.get("b", 0) * params.get("h", 0)
    if not limits.get("min_tokens", tokens) <= tokens <= limits.get("max_tokens", tokens):
        return False
    rows_a_key = 1 if params["family"] == "mla" else 2
    kv_gb = rows_a_key * held_tokens(params) * params.get("hkv", 0) * params.get("d", 0) * kv_bytes(params) / 1e9
    if kv_gb > limits.get("max_kv_gb", kv_gb):
        return False
    scores_gb = rows * params.get("max_len", 0) * size / 1e9
    if scores_gb > limits.get("max_scores_gb", scores_gb):
        return False
    if limits.get("within_context") and "model" in params:
        return params["max_len"] <= model(params["model"]).max_context
    return True


def held_tokens(params: Mapping[str, Any]) -> int:
    """Tokens whose keys are in memory: a shared prefix is there once."""
    return params.get("tokens", 0) - max(params.get("b", 0) - 1, 0) * params.get("prefix", 0)


def kv_bytes(params: Mapping[str, Any]) -> int:
    """Bytes of an element of K and V."""
    return ELEMENT_BYTES.get(params.get("kv_dtype") or params["dtype"], 1)


def work(params: Mapping[str, Any]) -> tuple[float, float]:
    """(flop, bytes) a case roughly needs, whatever its kernel: for estimates of time alone."""
    if params["family"] == "probe":
        return params.get("flops", 0), 2 * params.get("bytes", 0)
    b, h, hkv, d = (params[k] for k in ("b", "h", "hkv", "d"))
    m, size = params.get("m", 1), ELEMENT_BYTES.get(params["dtype"], 1)
    rows, moved = 2 * b * m * h * d * size, 2 * params["tokens"] * hkv * d * kv_bytes(params)
    if params["family"] == "cache":
        return 0, 2 * b * m * hkv * d * (size + kv_bytes(params))
    if params["family"] == "pages":
        return 0, 2 * moved
    if params["family"] == "mla":
        return 2 * params["tokens"] * h * (WIDTH + LATENT), rows + moved / 2
    if params["family"] == "cascade":
        return 4 * params["tokens"] * h * d, rows + moved * held_tokens(params) / max(params["tokens"], 1)
    if params["family"] == "decode":
        pairs, seen = _attended(params)
        return 4 * pairs * h * d, rows + moved * seen / max(params["tokens"], 1)
    shape = AttentionShape(b, h, hkv, m, params["n"], d, params["dtype"], params["causal"], window_of(params))
    return 4 * b * h * shape.visible * d, rows + moved


def window_of(params: Mapping[str, Any]) -> tuple[int, int]:
    """The case's `window_size`, beside a causal mask."""
    window = params.get("window")
    return -1 if window is None else window, -1


def _attended(params: Mapping[str, Any]) -> tuple[int, int]:
    """(query, key) pairs of a head in a decode case, and keys that some query sees, of all sequences."""
    pairs = seen = 0
    for n, count in Counter(params.get("lengths") or [params["n"]] * params["b"]).items():
        shape = AttentionShape(1, 1, 1, params.get("m", 1), n, 1, params["dtype"], True, window_of(params))
        first, end = shape.keys(0, shape.m - 1)
        pairs, seen = pairs + count * shape.visible, seen + count * (end - first)
    return pairs, seen
