"""A suite: a TOML file with a question and the sweeps that answer it, checked word by word when it is read.

    title = "…"            question = "…"            claims = [1, 13]

    [repeat]               # optional: how long to sample and when to give up
    [[rungs]]              # optional: kernels with constants that have a name; any number of them
    [gpu.NAME]             # a sweep for GPUs: kernels or rungs, axes, limits; any number of them
    [cpu.NAME]             # a small one for the CPU machine

An axis is a value or a list of values; the cases are their cross product, less those a limit excludes.

A rung is a step of a ladder: `name`, `kernel`, `constants`, and, but for the first, `change`, a phrase that
says in what it differs from the rung before it, or from the one that `after` names. `faults` lists what is
wrong with it by construction, as causes that `diagnose` knows, `[]` where nothing is; a rung without it says
nothing of them. A sweep says `rungs = "all"` or a list of names in place of `kernels` and `constants`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from experiments.diagnose.rules import CAUSES
from experiments.words import UserError, nearest

SUITES = Path(__file__).with_name("suites")
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3")
KV_DTYPES = ("float8_e4m3", "int8")  # of a cache that is not of dtype
PACKED = "thd"  # the layout of sequences that lie one behind the other


@dataclass(frozen=True)
class Axis:
    """What an axis may hold, in which families it means something, and its value where a sweep names none."""

    type: type
    families: tuple[str, ...]
    default: Any = None
    choices: tuple[Any, ...] = ()
    least: int = 0


_PAGED = ("decode", "mla", "cascade", "cache", "pages")
_ATTENTION = ("prefill", *_PAGED)
_ALL = (*_ATTENTION, "probe")
AXES = {
    "model": Axis(str, _ATTENTION),
    "b": Axis(int, _ATTENTION, 1),
    "h": Axis(int, _ATTENTION, least=1),
    "hkv": Axis(int, _ATTENTION, least=1),
    "d": Axis(int, _ATTENTION, least=1),
    "m": Axis(int, ("prefill", "decode", "cache")),  # of a decode step 1, or those that are verified together
    "n": Axis(int, _ATTENTION),
    "prefix": Axis(int, ("decode", "cascade")),  # of n, the keys that all sequences share, in whole pages
    "dtype": Axis(str, _ALL, "bfloat16", DTYPES),
    "kv_dtype": Axis(str, ("decode", "cache"), None, KV_DTYPES),  # without it a cache is of dtype
    "causal": Axis(bool, ("prefill",), False),  # decode always is
    "window": Axis(int, ("prefill", "decode")),  # keys before its own that a query sees; without it all
    "softcap": Axis(float, ("prefill", "decode"), least=1),  # without it scores have no bound
    "sinks": Axis(bool, ("prefill", "decode"), choices=(True,)),  # without it no head has one
    "layout": Axis(str, ("prefill",), "bshd", ("bshd", "bhsd", PACKED)),
    "key_order": Axis(str, ("prefill",), None, ("mixed", "rising", "falling")),  # without it keys are plain
    "page_size": Axis(int, ("prefill", *_PAGED), 16, least=1),  # without it keys of prefill lie in no pages
    "page_order": Axis(str, ("prefill", *_PAGED), "sorted", ("sorted", "shuffled")),
    "bytes": Axis(int, ("probe",)),
    "flops": Axis(int, ("probe",)),
    "cache_mode": Axis(str, _ALL, "cold", ("cold", "warm")),
    "mode": Axis(str, _ALL, "launch", ("launch", "graph")),
    "seed": Axis(int, _ALL, 0),
}
SCORES = ("window", "softcap", "sinks")  # axes of what becomes of scores; without one it is left undone
LIMITS = {"min_tokens": int, "max_tokens": int, "max_kv_gb": float, "max_scores_gb": float, "within_context": bool}


def defaults(family: str, named: Iterable[str] = ()) -> dict[str, Any]:
    """Values of the family's axes beside those `named`; without a page size prefill has no pages."""
    dense = family == "prefill" and "page_size" not in named
    return {name: axis.default for name, axis in AXES.items()
            if family in axis.families and axis.default is not None and name not in named
            and not (dense and name in ("page_size", "page_order"))}


@dataclass(frozen=True)
class Repeat:
    """How often a case is timed and how long it may take (seconds).

    `sm_busy`: whether a run of its own says how busy the multiprocessors are, see `cuattn.busy`. `rest_us`: see
    `cuattn.timing.measure`; NVIDIA's timer has a pace of its own.
    """

    min_samples: int = 10
    max_samples: int = 200
    rel_noise: float = 0.005
    timeout_s: float = 3.0
    compile_s: float = 300.0
    deadline_s: float = 120.0
    timer: str = "events"  # chosen by the command line, not by a suite
    sm_busy: bool = False
    rest_us: float = 0.0


@dataclass(frozen=True)
class Sweep:
    """Axes (each a list), the kernels they are swept for, constants by kernel, and limits."""

    name: str
    kernels: tuple[str, ...]
    axes: dict[str, list]
    constants: dict[str, list[dict]] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rung:
    """A kernel with constants under a name, what it changes against the rung `after`, its built-in faults."""

    name: str
    kernel: str
    constants: dict[str, Any] = field(default_factory=dict)
    change: str = ""
    after: str = ""
    faults: list[str] | None = None


@dataclass(frozen=True)
class Suite:
    """A suite file, checked."""

    name: str
    title: str
    question: str
    claims: tuple[int, ...]
    repeat: Repeat
    gpu: tuple[Sweep, ...]
    cpu: tuple[Sweep, ...]
    rungs: tuple[Rung, ...] = ()

    def sweeps(self, machine: str) -> tuple[Sweep, ...]:
        return self.gpu if machine == "gpu" else self.cpu


def suite_names() -> list[str]:
    """The suites that come with the project."""
    return sorted(path.stem for path in SUITES.glob("*.toml"))


def load_suite(name: str) -> Suite:
    """A suite by name, or from a file of one's own.

    Raises
    ------
    UserError
        No such suite, not TOML, or a key, type or name in it that is not known.
    """
    path = Path(name) if name.endswith(".toml") else SUITES / f"{name}.toml"
    if not path.is_file():
        if name.endswith(".toml"):
            raise UserError(f"suite: {name} is not a file; check the path")
        raise UserError(f"suite: '{name}' is not a suite; {nearest(name, suite_names())}")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path.name}: is not valid TOML ({error})") from error
    return parse_suite(path.stem, raw, path.name)


def parse_suite(name: str, raw: dict[str, Any], where: str) -> Suite:
    """Check a suite's keys and types; `where` opens every message."""
    _only(raw, ("title", "question", "claims", "repeat", "rungs", "gpu", "cpu"), where)
    for key, kind in (("title", str), ("question", str)):
        if key not in raw:
            raise UserError(f"{where}: has no {key}; add a {key} of one sentence")
        _typed(raw[key], kind, f"{where}: {key}")
    claims = [_typed(claim, int, f"{where}: claims") for claim in _list(raw.get("claims", []))]
    rungs = _rungs(raw.get("rungs", []), f"{where}: rungs")
    sweeps = {
        m: tuple(
            _sweep(f"{where}: {m}.{part}", part, body, rungs) for part, body in _table(raw, m, where).items()
        )
        for m in ("gpu", "cpu")
    }
    if not any(sweeps.values()):
        raise UserError(f"{where}: has no sweep; add a table [gpu.NAME] or [cpu.NAME]")
    repeat = _repeat(raw, where)
    return Suite(name, raw["title"], raw["question"], tuple(claims), repeat, **sweeps, rungs=rungs)


def _table(raw: dict, key: str, where: str) -> dict:
    body = raw.get(key, {})
    if (
        not isinstance(body, dict)
        or any(not isinstance(v, dict) for v in body.values())
        and key in ("gpu", "cpu")
    ):
        raise UserError(f"{where}: {key} expected named tables such as [{key}.prefill]; name the sweep")
    return body


def _repeat(raw: dict, where: str) -> Repeat:
    body = raw.get("repeat", {})
    if not isinstance(body, dict):
        raise UserError(f"{where}: repeat expected a table, got {body!r}")
    known = {f.name: type(f.default) for f in fields(Repeat) if f.name != "timer"}
    _only(body, known, f"{where}: repeat")
    for key, value in body.items():
        _typed(value, known[key], f"{where}: repeat.{key}")
        if known[key] is not bool and value <= 0:
            raise UserError(f"{where}: repeat.{key} expected a positive number, got {value!r}")
    return Repeat(**body)


def _rungs(body: Any, where: str) -> tuple[Rung, ...]:
    if not isinstance(body, list):
        raise UserError(f"{where}: expected tables that begin with [[rungs]], got {body!r}")
    kinds = {"name": str, "kernel": str, "constants": dict, "change": str, "after": str, "faults": list}
    found: dict[str, Rung] = {}
    for one in body:
        _only(_typed(one, dict, where), kinds, where)
        for key, value in one.items():
            _typed(value, kinds[key], f"{where}: {key}")
        if missing := [key for key in ("name", "kernel", "change")[: 3 if found else 2] if not one.get(key)]:
            raise UserError(f"{where}: {one.get('name', one)} has no {missing[0]}; add one")
        for fault in one.get("faults", []):
            if _typed(fault, str, f"{where}: faults") not in CAUSES:
                raise UserError(f"{where}: faults: '{fault}' is not a cause; {nearest(fault, CAUSES)}")
        rung = Rung(**{"after": next(reversed(found), ""), **one})
        if rung.name in found or any(r.kernel == rung.kernel and r.constants == rung.constants
                                     for r in found.values()):
            raise UserError(f"{where}: {rung.name} is there twice, by its name or by what it is; keep one")
        if rung.after not in found and found:
            raise UserError(f"{where}: {rung.name} comes after '{rung.after}'; {nearest(rung.after, found)}")
        found[rung.name] = rung
    return tuple(found.values())


def _of_rungs(where: str, asked: Any, rungs: tuple[Rung, ...]) -> dict[str, Any]:
    """`kernels` and `constants` of a sweep over rungs."""
    known = {rung.name: rung for rung in rungs}
    chosen: dict[str, list[dict]] = {}
    for name in known if asked == "all" else _list(asked):
        if _typed(name, str, where) not in known:
            raise UserError(f"{where}: '{name}' is not a rung here; {nearest(name, known)}")
        chosen.setdefault(known[name].kernel, []).append(known[name].constants)
    return {"kernels": list(chosen), "constants": chosen}


def _sweep(where: str, name: str, body: dict, rungs: tuple[Rung, ...]) -> Sweep:
    _only(body, ("kernels", "constants", "rungs", "limits", *AXES), where)
    if "rungs" in body:
        if "kernels" in body or "constants" in body:
            raise UserError(f"{where}: has rungs beside kernels or constants; rungs fix those, so keep one")
        body = body | _of_rungs(f"{where}: rungs", body["rungs"], rungs)
    kernels = [_typed(k, str, f"{where}: kernels") for k in _list(body.get("kernels", []))]
    if not kernels:
        raise UserError(f'{where}: names no kernels; add kernels = ["flash"] or the like')
    axes = {key: _axis(where, key, body[key]) for key in AXES if key in body}
    if "model" in axes and any(key in axes for key in ("h", "hkv", "d")):
        raise UserError(
            f"{where}: has both model and h, hkv or d; a model fixes those, so keep one or the other"
        )
    limits = body.get("limits", {})
    _only(limits, LIMITS, f"{where}: limits")
    for key, value in limits.items():
        _typed(value, LIMITS[key], f"{where}: limits.{key}")
    return Sweep(
        name, tuple(kernels), axes, _constants(where, body.get("constants", {}), kernels), dict(limits)
    )


def _axis(where: str, key: str, value: Any) -> list:
    axis, values = AXES[key], _list(value)
    if not values:
        raise UserError(f"{where}: {key} is an empty list; give it a value or leave it out")
    for item in values:
        _typed(item, axis.type, f"{where}: {key}")
        if axis.choices and item not in axis.choices:
            raise UserError(f"{where}: {key} expected one of {', '.join(map(str, axis.choices))}, got {item!r}")
        if axis.type in (int, float) and not item >= axis.least:
            raise UserError(f"{where}: {key} expected at least {axis.least}, got {item}")
    return [axis.type(item) for item in values]


def _constants(where: str, body: Any, kernels: list[str]) -> dict[str, list[dict]]:
    if not isinstance(body, dict):
        raise UserError(f"{where}: constants expected a table of kernel = [{{NAME = value}}], got {body!r}")
    _only(body, kernels, f"{where}: constants")
    for kernel, sets in body.items():
        for one in _list(sets):
            _typed(one, dict, f"{where}: constants.{kernel}")
    return {kernel: _list(sets) for kernel, sets in body.items()}


def _only(body: dict, known, where: str) -> None:
    for key in body:
        if key not in known:
            raise UserError(f"{where}: '{key}' is not a key here; {nearest(key, known, limit=30)}")


def _list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _typed(value: Any, kind: type, where: str) -> Any:
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        words = {
            int: "an integer",
            float: "a number",
            str: "a string",
            bool: "true or false",
            dict: "a table",
            list: "a list",
        }
        raise UserError(f"{where} expected {words[kind]}, got {value!r}")
    return value
