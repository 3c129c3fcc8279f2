"""Constants that `python -m experiments tune` found faster than a plan's own, by device and class of shape.

One file a device, `<device>.json` in `$CUATTN_TUNED`, else in `tuned/` below the cache folder:

    {"schema": 1, "device": "H200", "kernels": {"flash": {"source_hash": "…", "date": "…", "classes": {
        "prefill d128 bfloat16 causal m12 n12 bh5":
            {"constants": {…}, "margin": 0.12, "rows": [[run, case], …]}}}}}

A class holds every shape of a head dim, dtype and mask whose M, N and B·H are about the same powers of two.
The file is a hint: a broken one, another device's, a newer schema's, or an entry for another source is left
aside with one warning a process, and the plan chooses as if there were none. A change of it is noticed by the
next plan; a GPU call that repeats an earlier one keeps the plan it had.
"""
from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

from cuattn.compile import CompileError, cache_folder, source_hash
from cuattn.kernels.base import Row, Unsupported, resolve
from cuattn.kernels.shapes import AttentionShape, DecodeShape
from cuattn.sources import stamp

SCHEMA = 1
_off: ContextVar[bool] = ContextVar("tuned_constants_are_off", default=False)
_said: set[str] = set()


class TunedWarning(UserWarning):
    """Tuned constants that are left aside, and why."""


@dataclass(frozen=True)
class File:
    """What a file says.

    Attributes
    ----------
    kernels : mapping
        Kernel → {"source_hash", "date", "classes"}, as in the file; empty where the file is left aside.
    problem : str
        Why it is left aside; else empty.
    device : str
        The device it names.
    """

    kernels: Mapping[str, Mapping[str, Any]]
    problem: str = ""
    device: str = ""

    @property
    def classes(self) -> int:
        """Number of classes, over all kernels."""
        return sum(len(kernel["classes"]) for kernel in self.kernels.values())


_read: dict[Path, tuple[tuple, File]] = {}


def shape_class(shape) -> str | None:
    """The class of a prefill or decode shape, in words; None for others, and for what has other features.

    N of decode is the room of the block table, since a plan sees no lengths.
    """
    if isinstance(shape, AttentionShape) and not shape.features:
        mask = "causal" if shape.causal else "full"
        head, m = f"prefill d{shape.d} {shape.dtype} {mask}", f" m{power(shape.m)}"
        return f"{head}{m} n{power(shape.n)} bh{power(shape.b * shape.h)}"
    if isinstance(shape, DecodeShape) and shape.features <= {"quantised"}:
        held = f"{shape.dtype} {shape.kv_dtype}" if shape.kv_dtype else shape.dtype
        return f"decode d{shape.d} {held} n{power(shape.room)} bh{power(shape.b * shape.h)}"
    return None


def power(x: int) -> int:
    """The exponent of the power of two nearest to x on the scale of logarithms; −1 for 0."""
    return round(log2(x)) if x > 0 else -1


def folder() -> Path:
    """Where the files are.

    Raises
    ------
    CompileError
        As `cache_folder`.
    """
    chosen = os.environ.get("CUATTN_TUNED")
    return Path(chosen) if chosen else cache_folder() / "tuned"


def path_of(device: str) -> Path:
    """The file of the device of that name."""
    return folder() / (re.sub(r"[^A-Za-z0-9._]+", "-", device) + ".json")


def read(path: Path, device: str | None = None) -> File:
    """A device's file; read again only when it has changed. None takes the device that it names."""
    now = stamp(path)
    if now is None:
        return File({})
    if path not in _read or _read[path][0] != now:
        _read[path] = now, _parsed(path)
    found = _read[path][1]
    if not found.problem and device not in (None, found.device):
        return File({}, f"{path}: was tuned on {found.device}, and this is {device}; tune here")
    return found


def _parsed(path: Path) -> File:
    mend = "remove it, and tune again"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        schema = raw["schema"]
        if type(schema) is int and schema > SCHEMA:
            return File({}, f"{path}: has schema {schema}, newer than the {SCHEMA} known here; update cuattn")
        if schema != SCHEMA or not isinstance(raw["device"], str):
            raise ValueError("no schema or device")
        for kernel in raw["kernels"].values():
            if not isinstance(kernel["source_hash"], str):
                raise TypeError("source_hash")
            if not all(isinstance(entry["constants"], dict) for entry in kernel["classes"].values()):
                raise TypeError("constants")
    except OSError as error:
        return File({}, f"{path}: cannot be read ({error.strerror}); {mend}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return File({}, f"{path}: is damaged, or no file of tuned constants; {mend}")
    return File(raw["kernels"], device=raw["device"])


def constants(row: Row, shape, device) -> dict[str, Any]:
    """The tuned constants of this kernel for this shape on this device; {} where there are none to use."""
    if device.arch == "cpu" or _off.get():
        return {}
    try:
        path = path_of(device.name)
    except CompileError:
        return {}  # whoever compiles says it
    found = read(path, device.name)
    if found.problem:
        _say(found.problem)
    kernel = found.kernels.get(row.name)
    entry = kernel and kernel["classes"].get(shape_class(shape))
    if not entry:
        return {}
    if problem := outdated(path, row, kernel):
        _say(problem)
        return {}
    try:
        resolve(row.constants, entry["constants"])
    except Unsupported as error:
        _say(f"{path}: {row.name}: {error}; tune again")
        return {}
    return dict(entry["constants"])


def outdated(path: Path, row: Row, kernel: Mapping[str, Any]) -> str:
    """Why a kernel's entries are left aside; empty where they are not."""
    if kernel["source_hash"] == source_hash(row.file):
        return ""
    return f"{path}: {row.name} was tuned with another source; tune it again"


def _say(problem: str) -> None:
    if problem not in _said:
        _said.add(problem)
        warnings.warn(f"tuned constants are left aside: {problem}", TunedWarning, stacklevel=2)


@contextmanager
def ignored() -> Iterator[None]:
    """Within it plans choose for themselves: a measured case means the constants it names and no others."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)
