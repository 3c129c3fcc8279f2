"""What a build is made of: a `.cu`, the project headers it reaches, and the hashes of both.

Comments and white space are no part of a hash. What was read is remembered with the files' times and sizes:
asking again costs a look at each file, and an edited header is noticed.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cuattn.paths import KERNELS

IMPLICIT = "prim/num.cuh"  # every translation unit begins with it: the constants may name its types
# What the CPU machine links into a kernel that reaches a header: the same for all of them, so built once.
LINKED = {"simt/lang.h": "simt/machine.cc", "simt/wgmma.h": "simt/wgmma.cc"}

_INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.M)
_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', re.S)
_ENTRY = re.compile(r"^KERNEL\([^)]*\)\s*(\w+)\s*\(", re.M)


class CompileError(RuntimeError):
    """The compiler refused the source; the message carries its first errors."""


@dataclass(frozen=True)
class Sources:
    """A kernel's file and the project headers it reaches.

    Parameters
    ----------
    source_hash : str
        12 hex digits of the kernel and its headers, the CPU machine's aside.
    entries : tuple of str
        Names of the kernels the file defines.
    texts : tuple of (name, digest)
        The kernel and its headers, whatever their layout.
    lines : tuple of (name, digest)
        The same and the CPU machine's headers and linked files, line by line.
    linked : tuple of str
        The files whose objects the CPU machine links into the kernel.
    seen : mapping of path to stamp
        Every file that was read, and every one that would have been read had it existed.
    """

    source_hash: str
    entries: tuple[str, ...]
    texts: tuple[tuple[str, str], ...]
    lines: tuple[tuple[str, str], ...]
    linked: tuple[str, ...]
    seen: dict[str, tuple | None]


def stamp(path: str | Path) -> tuple[int, int, int] | None:
    """What changes when a file does, without reading it; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def without_comments(text: str) -> str:
    """Comments become blanks; line breaks stay, because reports name lines."""

    def blank(match: re.Match) -> str:
        token = match.group()
        return re.sub(r"[^\n]+", " ", token) if token.startswith("/") else token

    lines = _TOKEN.sub(blank, text).split("\n")
    return "\n".join(" ".join(line.split()) for line in lines)


def _without_lines(text: str) -> str:
    """The same text whatever its layout: only preprocessor lines keep their line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"(?m)^(\s*#.*)$", r"\1;;", text)).strip()


def source_path(file: str) -> Path:
    """The `.cu` itself: below `kernels_cu/`, or an absolute path for a kernel from outside."""
    path = Path(file) if os.path.isabs(file) else KERNELS / file
    if not path.is_file():
        raise CompileError(f"file: expected a CUDA source, got {file!r}, which does not exist; "
                           "check the kernel's row")
    return path


def _included(text: str, folder: Path, root: Path) -> Iterator[Path]:
    """Where the compiler looks for each header, in its order: a quoted name first beside the includer."""
    for quoted, angled in _INCLUDE.findall(text):
        for path in ([folder / quoted, root / quoted] if quoted else [root / angled]):
            yield path
            if path.is_file():
                break


def _read(file: str) -> Sources:
    """Reads everything `file` reaches, each file once, by the folder in which it lies."""
    main, root = source_path(file), KERNELS.resolve()
    found: dict[Path, str] = {}
    seen: dict[str, tuple | None] = {}
    todo = [main, root / IMPLICIT]
    while todo:
        path = todo.pop()
        path = path.parent.resolve() / path.name  # NOTE: a link's own headers lie beside the link
        if path in found:
            continue
        seen[str(path)] = stamp(path)  # before it is read: an edit in between is noticed later
        if seen[str(path)] is None or not path.is_file():
            continue
        found[path] = without_comments(path.read_text(encoding="utf-8"))
        todo += _included(found[path], path.parent, root)
        todo += [root / part for header, part in LINKED.items() if path == root / header]
    names = {path: path.relative_to(root).as_posix() if path.is_relative_to(root)
             else "./" + Path(os.path.relpath(path, main.parent.resolve())).as_posix() for path in found}
    kernel = sorted((names[path], _without_lines(text)) for path, text in found.items()
                    if not path.is_relative_to(root / "simt"))
    everything = sorted((names[path], text) for path, text in found.items())
    return Sources(
        source_hash=_digest(json.dumps(kernel))[:12],
        entries=tuple(_ENTRY.findall(found[main.parent.resolve() / main.name])),
        texts=tuple((name, _digest(text)) for name, text in kernel),
        lines=tuple((name, _digest(text)) for name, text in everything),
        linked=tuple(part for part in LINKED.values() if root / part in found),
        seen=seen,
    )


def begun_with(text: str, statement: str) -> str:
    """A kernel file's text in which the body of each `KERNEL` begins with that statement.

    Line numbers stay.
    """
    plain, out, end = _blanked(text), [], 0
    for match in _ENTRY.finditer(plain):
        at, depth = match.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(plain[at], 0)
            at += 1
        at = plain.index("{", at) + 1
        out += [text[end:at], f" {statement}"]
        end = at
    return "".join([*out, text[end:]])


def _blanked(text: str) -> str:
    """The same number of characters, with blanks for comments and literals."""
    return _TOKEN.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_remembered: dict[tuple[str, str], Sources] = {}


def sources(file: str) -> Sources:
    """What `file` is made of, read again only where a file it reaches has changed."""
    key = (str(KERNELS), file)
    known = _remembered.get(key)
    if known is None or any(stamp(path) != was for path, was in known.seen.items()):
        known = _remembered[key] = _read(file)
    return known


def source_hash(file: str) -> str:
    """12 hex digits over the kernel and its headers: the identity that measured rows carry."""
    return sources(file).source_hash


def entries(file: str) -> tuple[str, ...]:
    """Names of the kernels a file defines."""
    return sources(file).entries
