"""The shared memory of a kernel as its struct lays it out: names from the `.cu`, numbers from the compiler.

A kernel declares all its shared memory in one struct and reaches it through `dynamic_smem<Struct>()`. The
text tells the members' names; a small shared object, built with the launch's own constants, where they lie.
"""
from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

from cuattn import compile as compiler
from cuattn.kernels.base import Launch
from cuattn.sources import source_path, without_comments

TABLE = "cuattn_layout"

_STRINGS = re.compile(r'"(?:\\.|[^"\\])*"')
_ALIGN = re.compile(r"\b(?:alignas|__align__)\s*\([^()]*(?:\([^()]*\)[^()]*)*\)")
_NO_MEMBER = re.compile(r"\s*(?:static|constexpr|using|typedef|friend|template|enum)\b|\s*static_assert\b")
_DECLARED = re.compile(r"(?P<type>.*?)\s*\b(?P<name>[A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)*", re.S)
_OPEN, _CLOSE = "([{<", ")]}>"


class LayoutUnknown(ValueError):
    """The members of this kernel's shared memory cannot be told; the message says why."""


@dataclass(frozen=True)
class Member:
    """One member of the struct.

    Parameters
    ----------
    name, type : str
        As the source writes them, array extents aside.
    offset, size : int
        Bytes from the start of shared memory, and bytes in all.
    count : int
        Elements of an array, over all its extents; 1 for what is none.
    """

    name: str
    type: str
    offset: int
    size: int
    count: int


@dataclass(frozen=True)
class Layout:
    """A launch's shared memory: its struct's name, `sizeof`, and members, which overlap in a union."""

    struct: str
    bytes: int
    members: tuple[Member, ...]


def shared_layout(launch: Launch) -> Layout | None:
    """The layout of a launch's shared memory on the CPU machine; None for a launch without.

    Raises
    ------
    LayoutUnknown
        The kernel does not reach its shared memory through one struct of its own file.
    CompileError, CompilerMissing
    """
    text = _STRINGS.sub('""', without_comments(source_path(launch.file).read_text(encoding="utf-8")))
    struct = _struct_of(text, launch)
    if struct is None:
        return None
    names = members_of(text, struct)
    rows = [f"sizeof({struct}), 0, 0"]
    for _, name in names:
        of = f"decltype({struct}::{name})"
        rows.append(f"__builtin_offsetof({struct}, {name}), sizeof({of}), "
                    f"sizeof({of}) / sizeof(std::remove_all_extents_t<{of}>)")
    table = ('#include <type_traits>\n'
             f'extern "C" __attribute__((visibility("default"))) const unsigned long long {TABLE}[] = {{\n  '
             + ",\n  ".join(rows) + "};")
    built = compiler.build(launch.file, launch.entry, launch.constants, "cpu", table)
    numbers = (ctypes.c_ulonglong * (3 * len(rows))).in_dll(ctypes.CDLL(str(built.path)), TABLE)
    members = [Member(name, kind, *numbers[3 * i: 3 * i + 3]) for i, (kind, name) in enumerate(names, 1)]
    return Layout(struct, numbers[0], tuple(sorted(members, key=lambda member: member.offset)))


def _struct_of(text: str, launch: Launch) -> str | None:
    """The struct that the entry's body asks for."""
    found = re.search(rf"\bKERNEL\([^)]*\)\s*{re.escape(launch.entry)}\s*\(", text)
    if found is None:
        raise LayoutUnknown(f"{launch.file} defines no KERNEL {launch.entry}")
    body = text[text.index("{", _closed(text, found.end() - 1)):]
    structs = dict.fromkeys(re.findall(r"\bdynamic_smem\s*<\s*([\w:]+)\s*>", body[: _closed(body, 0)]))
    if len(structs) == 1:
        return next(iter(structs))
    if not structs and not launch.smem_bytes:
        return None
    said = " and ".join(f"dynamic_smem<{name}>()" for name in structs) or "no dynamic_smem<…>()"
    raise LayoutUnknown(f"{launch.entry} takes {launch.smem_bytes} bytes of shared memory, and its body has "
                        f"{said}, where one is expected")


def _closed(text: str, at: int) -> int:
    """One past the bracket that closes the one at `at`; angle brackets do not count."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i + 1
    raise LayoutUnknown("a bracket of the source is never closed")


def members_of(text: str, struct: str) -> list[tuple[str, str]]:
    """(type, name) of the data members of a struct, those of anonymous unions and structs in it included.

    Parameters
    ----------
    text : str
        A source without comments and strings.
    struct : str

    Raises
    ------
    LayoutUnknown
        The text does not define the struct, or not as a plain list of members.
    """
    aligned = r"(?:alignas|__align__)\s*\([^;{]*\)\s*"
    found = re.search(rf"\bstruct\s+(?:{aligned})?{re.escape(struct)}\s*(?:final\s*)?\{{", text)
    if found is None:
        raise LayoutUnknown(f"struct {struct} is not defined in the kernel's own file, or it has a base")
    return _members(text[found.end(): _closed(text, found.end() - 1) - 1])


def _members(body: str) -> list[tuple[str, str]]:
    """The members of a struct's body, in order."""
    body = re.sub(r"(?m)^\s*#.*$|\b(?:public|private|protected)\s*:(?!:)", "", body)
    made: list[tuple[str, str]] = []
    while body := body.lstrip("; \n"):
        stop = re.search(r"[;{]|$", body).start()
        head = body[:stop].strip()
        if body[stop: stop + 1] != "{":
            made += _declared(head)
            body = body[stop:]
            continue
        end = _closed(body, stop)
        inner = body[stop + 1: end - 1]
        if "(" in _ALIGN.sub("", head) and "=" not in head:  # a method: no semicolon need follow
            body = body[end:]
            continue
        tail, _, body = body[end:].partition(";")
        if head in ("union", "struct") and not tail.strip():
            made += _members(inner)
        elif re.match(r"(?:union|struct|class|enum)\b", head):
            made += _declared(f"{head} {tail}") if tail.strip() else []
        else:
            made += _declared(head.rstrip("= ") + tail)  # the braces were an initialiser's
    return made


def _declared(text: str) -> list[tuple[str, str]]:
    """The members that one declaration names: `float m[4], l[4]` are two."""
    text = _ALIGN.sub("", text).strip()
    if not text or _NO_MEMBER.match(text) or "(" in re.sub(r"\[[^\]]*\]|<.*>", "", text):
        return []
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    first = _DECLARED.fullmatch(parts[0].split("=")[0].strip())
    if first is None or not first["type"]:
        raise LayoutUnknown(f"a member cannot be read: {text[:60]!r}")
    kind = " ".join(first["type"].split())
    return [(kind, _DECLARED.fullmatch(part.split("=")[0].strip())["name"]) for part in parts]
