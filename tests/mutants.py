"""What each instrument of the CPU machine is worth: every synchronisation of every kernel, deleted in turn.

A mutant is a copy of the kernels in which one call that orders threads or copies is gone, or a wait lets one
more group stay in flight. It runs on small shapes, and whoever notices is recorded:

shadow      the race shadow reports two accesses without an order
poison      NaN or a wrong value, in the forward order with late copies
report      any other error of the machine: a copy nobody waited for, a deadlock, an access out of bounds
schedule    other bits under another schedule

`python -m tests.mutants` tries those of every file whose sources have changed since the table in mutants.md was
written, and of the files that it is given, and writes the table anew, each file with the identity of its sources.
test_mutants.py fails where a source has changed since, and tries some of them again.
"""
from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest

import cuattn
from cuattn import compile as compiler
from cuattn import sources
from cuattn.cpu import ScheduleError, check_schedules
from cuattn.devices import CPU
from cuattn.kernels import ROWS
from cuattn.kernels.shapes import (
    AppendShape,
    AttentionShape,
    CascadeShape,
    DecodeShape,
    PagesShape,
    ProbeShape,
)
from cuattn.machine import DeviceError, RaceError
from cuattn.paths import KERNELS
from tests.mutant_cases import CASES, CONSTANTS, DIM, Case
from tests.own_cache import own_cache

TABLE = Path(__file__).with_name("mutants.md")
COMMAND = "python -m tests.mutants"
VOCABULARY = ("block_sync", "warp_sync", "named_sync", "named_arrive", "cp_async_wait", "cp_async_commit",
              "__threadfence", "__syncthreads", "__syncwarp", "take_ticket",
              "mbarrier_init", "mbarrier_wait", "mbarrier_arrive", "mbarrier_arrive_remote",
              "mbarrier_arrive_expect_tx", "mbarrier_expect_tx", "fence_mbarrier_init", "fence_proxy_async",
              "bulk_commit", "bulk_wait", "bulk_wait_read", "cluster_arrive", "cluster_wait", "cluster_sync",
              "wgmma_fence", "wgmma_commit", "wgmma_wait")
WAITS = ("cp_async_wait", "bulk_wait", "bulk_wait_read", "wgmma_wait")  # with the number of groups that may stay in flight
INSTRUMENTS = ("shadow", "poison", "report", "schedule")
NOTHING = "(void)0"  # what a deleted call becomes
INSTEAD = {"take_ticket": "true"}  # of one whose answer is used: whoever asks is the last
ONE_IN = 20  # are tried again by the tests
STEPS = 1 << 22  # of a block, after which a mutant is taken to wait forever

# Why a mutant that nobody notices is no fault of the instruments, by its key.
REASONS = {
    "prefill/flash_hopper.cu take: `named_sync(barrier(group), THREADS_OF_TWO AT_SITE)`":
        "It says when a warpgroup starts its products, for speed alone; no data waits for it.",
    "prefill/flash_hopper.cu load_keys: `warp_sync()`":
        "Bytes of a copy may arrive before they are announced: the barrier's phase ends only with the arrival that "
        "announces them.",
    "decode/mla_hopper.cu finish: `named_sync(SCORING, WARPGROUP)`":
        "The CPU machine ends a product for the whole warpgroup where its first warp waits; PTX ends it for each warp.",
    "decode/paged_stream.cu paged_stream: `warp_sync()` (number 2)":
        "It keeps loads behind the ticket. The CPU machine holds stores back and never reads ahead, so nothing shows.",
}


# --- finding

_CALL = re.compile(rf"\b({'|'.join(VOCABULARY)})\s*(?:<(?P<allowed>[^;{{}}]*?)>)?\s*\(")
_FUNCTION = re.compile(r"(?:\bKERNEL\([^)]*\)\s*|\b(?:DEVICE|METHOD)\b[^;{}()]*?\b)(\w+)\s*\(")
_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)


@dataclass(frozen=True)
class Mutant:
    """One call of a file below `kernels_cu/` that becomes another, or nothing.

    Parameters
    ----------
    file, function : str
        Where it stands.
    call, becomes : str
        Its text and what takes its place.
    number : int
        1, 2, … among the equal calls of the function.
    at, line : int
        Where the text begins.
    """

    file: str
    function: str
    call: str
    becomes: str
    number: int
    at: int
    line: int

    @property
    def change(self) -> str:
        """The call and what became of it, as the table names it."""
        number = f" (number {self.number})" if self.number > 1 else ""
        return f"`{self.call}`{number}" + (f" → `{self.becomes}`" if self.becomes != NOTHING else "")

    @property
    def key(self) -> str:
        """A name that edits elsewhere in the file do not change."""
        return f"{self.file} {self.function}: {self.change}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.change.replace('`', '')}"

    def write(self, root: Path) -> None:
        """Changes the file below `root`, a copy of `kernels_cu/`."""
        text = (KERNELS / self.file).read_text(encoding="utf-8")
        changed = text[: self.at] + self.becomes + text[self.at + len(self.call) :]
        (root / self.file).write_text(changed, encoding="utf-8")


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """The mutants of one source text, in its order."""
    code = _TOKEN.sub(lambda token: re.sub(r"[^\n]", " ", token.group()), text)
    seen: Counter = Counter()
    for found in _CALL.finditer(code):
        at = found.start()
        before, function = re.search(r"(\w+)\s*$", code[:at]), function_at(code, at)
        if (before and before.group(1) not in ("else", "do", "return")) or function in VOCABULARY:
            continue  # its own definition, or a primitive that is made of another
        call = text[at : _closing(code, found.end()) + 1]
        seen[function, call] += 1
        place = {"file": file, "function": function, "call": call, "number": seen[function, call],
                 "at": at, "line": text.count("\n", 0, at) + 1}
        yield Mutant(becomes=INSTEAD.get(found.group(1), NOTHING), **place)
        allowed = found["allowed"]
        if found.group(1) in WAITS and allowed.strip() != "0":
            yield Mutant(becomes=call.replace(f"<{allowed}>", f"<{allowed} + 1>"), **place)


def function_at(code: str, at: int) -> str:
    """Name of the kernel, function or method that was begun last before `at`; empty before the first."""
    return ([""] + [found.group(1) for found in _FUNCTION.finditer(code, 0, at)])[-1]


def _closing(code: str, at: int) -> int:
    """Where the parenthesis that was opened before `at` closes."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(code[at], 0)
        at += 1
    return at - 1


TRIED_AS = {"decode/paged.cu": "paged"}  # files that other kernels launch as they stand, so that one is enough
PLANNED = {  # a shape of each family, to ask a row's plan for its files
    "prefill": AttentionShape(1, 1, 1, 70, 150, DIM, "float16", True),
    "decode": DecodeShape(4, 4, 2, DIM, 16, 64, "float16"),
    "cascade": CascadeShape(4, 4, 2, DIM, 16, ((2, 16),), None, "float16"),
    "mla": DecodeShape(3, 20, 1, 576, 16, 16, "float16"),
    "cache": AppendShape(2, 3, 2, DIM, 16, "float16", rotary=DIM),
    "pages": PagesShape(3, 16, 2, DIM, 2),
    "probe": ProbeShape(1024, 1024),
}


@cache
def files_of(kernel: str) -> tuple[str, ...]:
    """The `.cu` files of a row's plan and every header they reach, the CPU machine's aside."""
    row, made_of = ROWS[kernel], [ROWS[kernel].file]
    if row.family in PLANNED:
        plans = [row.plan(PLANNED[row.family], CPU, constants) for constants in CONSTANTS.get(kernel, ({},))]
        made_of = [launch.file for plan in plans for launch in plan.launches]
    return tuple(dict.fromkeys(name for file in made_of for name, _ in sources.sources(file).texts))


def kernels_of(file: str) -> tuple[str, ...]:
    """The kernels that a mutant of this file is tried in."""
    return tuple(name for name in ROWS if file in files_of(name) and TRIED_AS.get(file, name) == name)


@cache
def all_mutants() -> tuple[Mutant, ...]:
    """Of every file that a kernel of the table is made of."""
    files = sorted({file for kernel in ROWS for file in files_of(kernel)})
    return tuple(mutant for file in files
                 for mutant in mutants_of(file, (KERNELS / file).read_text(encoding="utf-8")))


@cache
def identity(file: str) -> str:
    """8 hex digits over all that runs when a mutant of this file does, comments aside."""
    texts = {name: text for kernel in ROWS if file in files_of(kernel)
             for made_of in files_of(kernel) if made_of.endswith(".cu")
             for name, text in sources.sources(made_of).texts}
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:8]


def sample() -> tuple[Mutant, ...]:
    """One in `ONE_IN` of the mutants, others whenever a source changes."""
    def draw(mutant: Mutant) -> int:
        return int(hashlib.sha256(f"{identity(mutant.file)} {mutant.key}".encode()).hexdigest()[:8], 16)

    drawn = sorted(all_mutants(), key=draw)
    return tuple(drawn[: -(-len(drawn) // ONE_IN)])


# --- running


@contextmanager
def planted(mutant: Mutant):
    """Inside, whatever is made of the mutant's file is built from a copy with it, in a cache of its own."""
    build = compiler.build
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        root = Path(folder) / "kernels_cu"
        shutil.copytree(KERNELS, root)
        mutant.write(root)
        kept = str(own_cache(Path(folder) / "cache"))

        def build_mutant(file, *arguments):
            if mutant.file not in dict(sources.sources(file).texts):
                return build(file, *arguments)
            with pytest.MonkeyPatch.context() as inside:
                inside.setattr(sources, "KERNELS", root)
                inside.setenv("CUATTN_CPU_OPTIMIZE", "g")  # what the machine sees of a kernel is the same
                inside.setenv("CUATTN_CACHE_DIR", kept)
                return build(file, *arguments)

        patch.setattr(compiler, "build", build_mutant)
        yield


def _noticed(machine, row, case: Case, said) -> Iterator[tuple[str, str]]:
    """(instrument, what it says) for each that sees a fault in this run; long ones that have spoken rest."""

    def run() -> None:
        for array in case.outputs.values():
            machine.poison(array)
        case.run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "step_limit", STEPS)
        patch.setattr(machine, "races", True)
        try:
            if "shadow" not in said:
                run()
        except RaceError as error:
            yield "shadow", str(error)
        except DeviceError:
            pass  # the plain run reports it too
        patch.setattr(machine, "races", False)
        try:
            run()
            if not (verdict := case.judge()).ok:
                yield "poison", verdict.message
        except DeviceError as error:
            yield "report", str(error)
        try:
            if row.deterministic and "schedule" not in said:
                check_schedules(machine, case.run, case.outputs)
        except ScheduleError as error:
            yield "schedule", str(error)
        except DeviceError as error:
            yield "report", str(error)


def noticed(machine, mutant: Mutant) -> dict[str, str]:
    """What each instrument that notices a mutant said first; empty where it survives all.

    Raises
    ------
    LookupError
        Its kernel is of a family that has no cases here.
    """
    said: dict[str, str] = {}
    with planted(mutant), pytest.MonkeyPatch.context() as patch:
        # A block takes one tile after the other where there are more tiles than multiprocessors.
        patch.setattr(machine, "device", replace(machine.device, sms=1))
        for row in map(ROWS.get, kernels_of(mutant.file)):
            if row.family not in CASES:
                raise LookupError(f"{row.name}: expected a family with cases ({', '.join(CASES)}), got "
                                  f"{row.family!r}; write some in mutant_cases.py")
            for constants in CONSTANTS.get(row.name, ({},)):
                for case in CASES[row.family](machine, row, constants, np.random.default_rng(0)):
                    for instrument, words in _noticed(machine, row, case, said):
                        said.setdefault(instrument, words)
    return said


# --- the table


def complaints(results: dict[str, set[str]], reasons: dict[str, str]) -> list[str]:
    """Survivors without a reason, reasons without a survivor; `results`: who noticed, by a mutant's key."""
    silent = [f"{key}: nobody notices; find out why and give REASONS a sentence, or mend the instruments"
              for key, who in results.items() if not who and key not in reasons]
    stale = [f"{key}: has a reason and {'is noticed' if key in results else 'does not exist'}; "
             "take it out of REASONS" for key in reasons if results.get(key, {"no such"})]
    return silent + stale


def table(results: dict[Mutant, set[str]]) -> str:
    """The table as Markdown: how many each instrument notices, who notices each mutant, the survivors."""
    head, rule = " | ".join(INSTRUMENTS), "---|" * len(INSTRUMENTS)
    noticing = [[name for name in INSTRUMENTS if name in who] for who in results.values()]
    counts = {
        "notices": Counter(name for names in noticing for name in names),
        "is the first of them to notice": Counter(name for names in noticing for name in names[:1]),
        "is the only one to notice": Counter(names[0] for names in noticing if len(names) == 1),
    }
    survivors = [mutant for mutant, who in results.items() if not who]
    text = ["# Deleted synchronisation, and who notices", "",
            f"Written by `{COMMAND}`. Each row is one call of a kernel, deleted or weakened as shown;",
            "× marks the instruments that notice, in the order in which they are tried.",
            "[mutants.py](mutants.py) says what each is.", "",
            f"Mutants: {len(results)}. Survivors: {len(survivors)}.", "", f"| | {head} |", f"|---|{rule}"]
    text += [f"| {what} | " + " | ".join(str(count[name]) for name in INSTRUMENTS) + " |"
             for what, count in counts.items()]
    for file in dict.fromkeys(mutant.file for mutant in results):
        text += ["", f"## {file}", "", f"Of the sources `{identity(file)}`.", "", f"| in | call | {head} |", f"|---|---|{rule}"]
        for mutant, who in results.items():
            if mutant.file == file:
                marks = " | ".join("×" if name in who else "" for name in INSTRUMENTS)
                text.append(f"| `{mutant.function}` | {mutant.change} | {marks} |")
    if survivors:
        text += ["", "## Why some survive", ""]
        text += [f"* {mutant.key}: {REASONS.get(mutant.key, '?')}" for mutant in survivors]
    return "\n".join(text) + "\n"


def recorded() -> dict[Mutant, set[str]]:
    """Who notices each mutant, as the committed table has it."""
    marks, file = {}, ""
    for row in TABLE.read_text(encoding="utf-8").splitlines():
        if row.startswith("## "):
            file = row[3:]
        elif file and row.startswith("| `"):
            function, change, *cells = (cell.strip() for cell in row.strip("|").split("|"))
            who = {name for name, cell in zip(INSTRUMENTS, cells) if cell}
            marks[file, function.strip("`"), change] = who
    keys = {mutant: (mutant.file, mutant.function, mutant.change) for mutant in all_mutants()}
    return {mutant: marks[key] for mutant, key in keys.items() if key in marks}


def aged() -> set[str]:
    """The files whose sources are not those that the committed table was written for."""
    of = re.findall(r"^## (.*)\n\nOf the sources `(.*)`", TABLE.read_text(encoding="utf-8"), re.M)
    return {mutant.file for mutant in all_mutants()} - {file for file, was in of if was == identity(file)}


def main(files: list[str]) -> int:
    if unknown := set(files) - {mutant.file for mutant in all_mutants()}:
        print(f"expected files below kernels_cu/ that have mutants, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    machine, results, again = cuattn.open_machine("cpu"), recorded(), aged() | set(files)
    for mutant in all_mutants():
        if mutant.file in again or mutant not in results:
            results[mutant] = set(said := noticed(machine, mutant))
            print(f"{str(mutant):70} {' '.join(said) or 'survives'}", flush=True)
    TABLE.write_text(table({mutant: results[mutant] for mutant in all_mutants()}), encoding="utf-8")
    wrong = complaints({mutant.key: who for mutant, who in results.items()}, REASONS)
    print(f"\nwritten to {TABLE}", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
