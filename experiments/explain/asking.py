"""What `explain` runs: pairs such as M=128,N=256 become the parameters of one case small enough for a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cuattn.kernels.mla import WIDTH
from cuattn.kernels.probes import MMA_FLOPS, WORD
from experiments import estimate
from experiments.catalog import Entry
from experiments.costs import array_bytes
from experiments.suite import AXES, defaults
from experiments.sweep import params_of, work
from experiments.words import UserError, nearest


@dataclass(frozen=True)
class Letter:
    """One letter of `--shape`: the parameter it sets, what it takes where it is left out, and its meaning."""

    column: str
    default: int
    meaning: str
    least: int = 0


_HEADS = {
    "H": Letter("h", 4, "query heads", 1),
    "HKV": Letter("hkv", 2, "key/value heads", 1),
    "D": Letter("d", 64, "head dim", 1),
}
_KV_HEADS = {name: letter for name, letter in _HEADS.items() if name != "H"}
_PAGE = {"page": Letter("page_size", 16, "tokens a page holds", 1)}
LETTERS: dict[str, dict[str, Letter]] = {
    "prefill": {
        "B": Letter("b", 1, "batch"),
        "M": Letter("m", 128, "queries a sequence"),
        "N": Letter("n", 256, "keys a sequence"),
        **_HEADS,
    },
    "decode": {"B": Letter("b", 2, "batch"), "N": Letter("n", 256, "keys a sequence"), **_HEADS, **_PAGE},
    "cascade": {
        "B": Letter("b", 4, "batch"),
        "N": Letter("n", 150, "keys a sequence"),
        "prefix": Letter("prefix", 128, "keys of these that all sequences share, in whole pages"),
        **_HEADS,
        **_PAGE,
    },
    "mla": {
        "B": Letter("b", 2, "batch"),
        "N": Letter("n", 256, "keys a sequence"),
        "H": Letter("h", 16, "query heads", 1),
        **_PAGE,
    },
    "cache": {
        "B": Letter("b", 2, "batch"),
        "T": Letter("m", 4, "new rows a sequence", 1),
        "N": Letter("n", 30, "rows a sequence holds before"),
        **_KV_HEADS,
        **_PAGE,
    },
    "pages": {
        "B": Letter("b", 2, "batch"),
        "N": Letter("n", 60, "rows a sequence holds, whose pages are copied"),
        **_KV_HEADS,
        **_PAGE,
    },
    "probe": {"n": Letter("n", 69632, "16-byte words moved, or mma.sync instructions done")},
}
USAGE = "; ".join(f"{family}: {', '.join(f'{name}={letter.default}' for name, letter in letters.items())}"
                  for family, letters in LETTERS.items())
DTYPE, WAIT_S = AXES["dtype"].default, 60.0
MAX_BYTES = 10**9  # of a case's arrays
TRACE_FACTOR = 4.0  # how much longer a run takes that is counted by call site


def letters_of(entry: Entry, text: str) -> dict[str, int]:
    """Every letter of the kernel's family with its value, those left out by their defaults.

    M left out beside a given N is N, as in the suites; HKV left out is 2 where that divides H, else 1.

    Raises
    ------
    UserError
        A letter that means nothing for this family, or a value it cannot take.
    """
    known = LETTERS[entry.family]
    spelled = {name.upper(): name for name in known}
    given: dict[str, int] = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise UserError(f"--shape: expected pairs such as {_example(known)}, got '{part}'; mend it")
        letter = spelled.get(name.upper())
        if letter is None:
            raise UserError(f"--shape: '{name}' means nothing for {entry.family} kernels, "
                            f"which take {', '.join(known)}; remove it")
        if letter in given:
            raise UserError(f"--shape: {letter} is given twice; keep one")
        given[letter] = _integer(f"--shape: {letter}", value, known[letter].least)
    chosen = {name: given.get(name, letter.default) for name, letter in known.items()}
    if "M" in known and "M" not in given and "N" in given:
        chosen["M"] = chosen["N"]
    if "H" in given and "HKV" in known and "HKV" not in given:
        chosen["HKV"] = 2 if chosen["H"] % 2 == 0 else 1
    return chosen


def _example(known: Mapping[str, Letter]) -> str:
    return ",".join(f"{name}={letter.default}" for name, letter in list(known.items())[-2:])


def _integer(where: str, text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise UserError(f"{where}: expected an integer of at least {least}, got '{text}'; change it")
    return int(text)


def constants_of(words: Iterable[str]) -> dict[str, Any]:
    """`NAME=VALUE` words as a kernel's tunables: integers, true and false, and otherwise text."""
    chosen: dict[str, Any] = {}
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not (name and equals and value):
            raise UserError(f"--constant: expected NAME=VALUE such as block_n=64, got '{word}'; mend it")
        plain = {"true": True, "false": False}.get(value.lower(), value)
        chosen[name] = int(value) if value.isascii() and value.isdigit() else plain
    return chosen


def params_for(
    entry: Entry, letters: Mapping[str, int], dtype: str, causal: bool | None, constants: dict[str, Any]
) -> dict[str, Any]:
    """The parameters of the case, as a suite would spell them.

    Raises
    ------
    UserError
        A dtype or a mask that the kernel does not have, or an unknown constant.
    """
    row, family = entry.row, entry.family
    if dtype not in row.dtypes:
        raise UserError(f"--dtype: '{dtype}' is not one of {entry.name}'s; {nearest(dtype, row.dtypes)}")
    if causal is not None and family != "prefill":
        raise UserError(f"--causal, --full: mean nothing for {family} kernels; leave them out")
    for name in constants:
        if name not in row.constants:
            raise UserError(f"--constant: '{name}' is not a tunable of {entry.name}; "
                            f"{nearest(name, row.constants)}")
    point = defaults(family)
    point |= {LETTERS[family][name].column: value for name, value in letters.items()}
    point["dtype"] = dtype
    if family == "prefill":
        point["causal"] = bool(causal)
    if family in ("cache", "pages"):
        point["h"] = point["hkv"]  # it has no queries; the suites name both
    if family == "mla":
        point |= {"hkv": 1, "d": WIDTH}
    if family == "probe":
        units = point.pop("n")
        point |= {"flops": MMA_FLOPS * units} if entry.name == "mma" else {"bytes": WORD * units}
    return params_of(entry.name, family, point, constants)


def check_size(params: Mapping[str, Any], wait_s: float) -> None:
    """Refuses what the CPU machine would take too long for, with an estimate.

    Raises
    ------
    UserError
    """
    size = array_bytes(params)
    if size > MAX_BYTES:
        raise UserError(f"--shape: its arrays take {size / 1e9:.3g} GB, and explain stops at "
                        f"{MAX_BYTES / 1e9:.0f}; a smaller shape explains the same kernel")
    seconds = seconds_for(params)
    if seconds > wait_s:
        raise UserError(f"--shape: would take about {duration(seconds)} on the CPU machine (estimated); take "
                        "a smaller one, which explains the same kernel, or allow it: --wait "
                        f"{math.ceil(seconds)}")


def seconds_for(params: Mapping[str, Any]) -> float:
    """Estimated seconds of the traced run and of its check."""
    flops, moved = work(params)
    run = flops / estimate.EMULATED_FLOPS + moved / estimate.EMULATED_BYTES
    return TRACE_FACTOR * run + flops / estimate.REFERENCE_FLOPS["cpu"]


def duration(seconds: float) -> str:
    """ "40 s", "12 min", "3 h"."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"
