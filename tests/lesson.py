"""Plays a Markdown lesson as its reader would: every block in order, and what it prints is what it shows.

    ```console              commands after `$ `, each followed by what it prints; every command must succeed
    ```python               lines for the one Python session, typed as they stand, and an Enter at the end
    ```text                 right after it: what these lines print
    ```cuda lab/x.cu        any language and a path below `lab/`: the reader saves the block under that name
    ```cuda kernels_cu/…    a path in the repository: a quotation, whose lines stand there one after the other

A `…` in an output stands for anything in its line; alone on a line, for any number of lines.
"""
from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from own_cache import own_cache

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ".venv/bin/python"  # as the README writes it
PROMPT, ANY = "$ ", "…"
SAVED = "lab/"

# Types what it is sent into a Python console; answers with what that printed, and whether it waits for more.
SESSION = """
import code, contextlib, io, json, sys
answers, console = sys.stdout, code.InteractiveConsole()
for request in sys.stdin:
    printed, unfinished = io.StringIO(), False
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for line in json.loads(request).split("\\n") + [""]:
            unfinished = console.push(line)
        console.resetbuffer()
    print(json.dumps([printed.getvalue(), unfinished]), file=answers, flush=True)
"""


class Wrong(AssertionError):
    """A lesson does not do what it shows; the message names the line."""


@dataclass(frozen=True)
class Block:
    """A fenced block: the line of its fence, its language, the path after that if there is one, its text."""

    line: int
    kind: str
    file: str
    text: str


def blocks(lesson: str) -> list[Block]:
    """The fenced blocks, in order."""
    found, words, start, inside = [], None, 0, []
    for number, line in enumerate(lesson.splitlines(), 1):
        if words is None and line.startswith("```"):
            words, start, inside = [*line[3:].split(), "", ""], number, []
        elif words is not None and line == "```":
            found.append(Block(start, words[0], words[1], "\n".join(inside)))
            words = None
        elif words is not None:
            inside.append(line)
    if words is not None:
        raise Wrong(f"line {start}: the block has no end")
    return found


def matches(shown: str, printed: str) -> bool:
    """Whether an output is the one shown, which may hold `…`; white space at the ends of lines aside."""
    pattern = ""
    for line in _lines(shown):
        alone = line.strip() == ANY
        pattern += r"(?:.*\n)*?" if alone else ".*?".join(map(re.escape, line.split(ANY))) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _lines(printed))) is not None


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def compare(line: int, what: str, shown: str, printed: str) -> None:
    """Raises `Wrong` with a diff unless the output is the one shown."""
    if not matches(shown, printed):
        diff = difflib.unified_diff(_lines(shown), _lines(printed), "shown", "printed", lineterm="", n=30)
        raise Wrong("\n".join([f"line {line}: {what} prints something else", *diff]))


def commands(block: Block) -> list[tuple[int, str, str]]:
    """(line, command, what it shows) of a console block."""
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith(PROMPT):
            found.append((number, line[len(PROMPT):], []))
        elif found:
            found[-1][2].append(line)
        else:
            raise Wrong(f"line {number}: a console block begins with `{PROMPT}` and a command")
    return [(number, command, "\n".join(shown)) for number, command, shown in found]


class Reader:
    """Someone at a terminal in a copy of the repository, with a Python session open beside it.

    Parameters
    ----------
    folder : Path
        Empty; it becomes the copy, of links, so that kernels built from the repository are the same files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        for path in ROOT.iterdir():
            if not path.name.startswith(".") and path.name not in ("runs", "lab"):
                (folder / path.name).symlink_to(path)
        cache = own_cache(folder / "cache")
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith("CUATTN_") and name not in ("FORCE_COLOR", "PYTHONPATH")}
        self.environment = {**kept, "PYTHONUTF8": "1", "CUATTN_CACHE_DIR": str(cache),
                            "CUATTN_CPU_OPTIMIZE": "g"}  # its kernels run for a moment
        self.session = subprocess.Popen(
            [sys.executable, "-c", SESSION], cwd=folder, env=self.environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_) -> None:
        self.session.stdin.close()
        self.session.wait()
        self.session.stdout.close()

    def play(self, lesson: str) -> None:
        """Does everything the lesson says.

        Raises
        ------
        Wrong
            At the first block that does something else than it shows.
        """
        todo = blocks(lesson)
        while todo:
            block = todo.pop(0)
            if block.file.startswith(SAVED):
                self._save(block)
            elif block.file:
                quoted(block)
            elif block.kind == "console":
                self._type(block)
            elif block.kind == "python":
                shown = todo.pop(0).text if todo and (todo[0].kind, todo[0].file) == ("text", "") else ""
                self._tell(block, shown)
            else:
                raise Wrong(f"line {block.line}: no reader would know what to do with '{block.kind}' here")

    def _save(self, block: Block) -> None:
        path = self.folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text + "\n", encoding="utf-8")

    def _type(self, block: Block) -> None:
        for line, command, shown in commands(block):
            done = subprocess.run(command.replace(PYTHON, shlex.quote(sys.executable)), shell=True, text=True,
                                  cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            compare(line, "the command", shown, done.stdout)
            if done.returncode:
                raise Wrong(f"line {line}: the command ends with exit code {done.returncode}")

    def _tell(self, block: Block, shown: str) -> None:
        self.session.stdin.write(json.dumps(block.text) + "\n")
        self.session.stdin.flush()
        answer = self.session.stdout.readline()
        if not answer:
            raise Wrong(f"line {block.line}: the Python session ended, exit code {self.session.wait()}")
        printed, unfinished = json.loads(answer)
        compare(block.line, "the Python block", shown, printed)
        if unfinished:
            raise Wrong(f"line {block.line}: Python waits for more; complete the block")


def quoted(block: Block) -> None:
    """Raises `Wrong` unless the block's lines stand in the file it names, one after the other."""
    path = ROOT / block.file
    if not path.is_file():
        raise Wrong(f"line {block.line}: there is no {block.file}")
    if f"\n{block.text}\n" not in f"\n{path.read_text(encoding='utf-8')}":
        raise Wrong(f"line {block.line}: these lines do not stand in {block.file}")
