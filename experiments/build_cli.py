"""The command build: compile what suites will launch on a card, on a host that need not have one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Annotated, Any, Optional

import typer

from cuattn import compile as compiler
from cuattn.compilers import compiler_of
from cuattn.devices import Device
from cuattn.kernels.base import Launch, Unsupported
from experiments.capacity.cli import asked_card
from experiments.catalog import Entry, catalog
from experiments.console import console, fail, progress_bar
from experiments.costs import plan_of
from experiments.run_cli import KernelPaths
from experiments.suite import Suite, load_suite
from experiments.sweep import cases_of
from experiments.words import UserError, several


@dataclass(frozen=True)
class Wanted:
    """A binary: a file with its constants, `stamped` where a suite asks how busy multiprocessors are.

    It holds every kernel of the file, of which `entry` is one.
    """

    file: str
    constants: tuple[tuple[str, Any], ...]
    stamped: bool
    entry: str = field(compare=False)

    @classmethod
    def of(cls, launch: Launch, stamped: bool = False) -> Wanted:
        """What a launch needs."""
        return cls(launch.file, tuple(sorted(launch.constants.items())), stamped, launch.entry)


def wanted(suite: Suite, card: Device, known: Mapping[str, Entry]) -> dict[Wanted, None]:
    """The binaries of a suite's cases on that card, in its order; the cases it cannot run need none."""
    found: dict[Wanted, None] = {}
    for case in cases_of(suite, "gpu", known):
        entry = known[case.params["kernel"]]
        if entry.row is None or not entry.row.runs_on(card.arch):
            continue
        try:
            plan = plan_of(case.params, entry, card)
        except Unsupported:
            continue
        for launch in plan.launches:
            for stamped in (False, True)[: 1 + suite.repeat.sm_busy]:
                found.setdefault(Wanted.of(launch, stamped))
    if found:  # every time stands beside that of an empty kernel
        empty = plan_of({"family": "probe", "dtype": "bfloat16"}, known["empty"], card)
        found |= dict.fromkeys(map(Wanted.of, empty.launches))
    return found


def compile_one(target: str, what: Wanted) -> str:
    """Build it into the cache; what the compiler says against it, "" if nothing."""
    try:
        compiler.build(what.file, what.entry, dict(what.constants), target, stamped=what.stamped)
    except (compiler.CompileError, compiler.CompilerMissing) as error:
        return f"{what.entry} of {what.file}: {error}"
    return ""


def compile_all(binaries: Iterable[Wanted], target: str, jobs: int) -> list[str]:
    """Build them on so many processes, with a bar; the failures in a sentence each."""
    binaries, failures = list(binaries), []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool, progress_bar() as bar:
        task = bar.add_task("compiling", total=len(binaries))
        for done in as_completed([pool.submit(compile_one, target, what) for what in binaries]):
            failures += filter(None, [done.result()])
            bar.advance(task)
    return failures


def build(
    suites: Annotated[list[str], typer.Argument(help="Suites' names (see `list`) or paths of TOML files.")],
    card: Annotated[str, typer.Option(help="A card of cuattn/devices.py: H200, RTX 4090, …")],
    kernel: KernelPaths = None,
    jobs: Annotated[
        Optional[int], typer.Option(help="Compilers at once; as many as CPUs if not given.")
    ] = None,
) -> None:
    """Compile every kernel that suites launch on a card, here: nothing is run, and no GPU is needed.

    Where the card is, the same cache ($CUATTN_CACHE_DIR) and the same version of NVRTC then start at once.
    """
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs: expected at least 1, got {jobs}; give how many compilers may run at once")
    device, known, binaries = asked_card(card), catalog(kernel or ()), {}
    for name in suites:
        binaries |= wanted(load_suite(name), device, known)
    if not binaries:
        raise UserError(f"build: no kernel of {', '.join(suites)} runs on {device.name}; name another suite or "
                        "card")
    try:
        identity = compiler_of(device.arch)[1]
    except compiler.CompilerMissing as error:
        raise UserError(f"build: {error}") from None
    begin = time.perf_counter()
    failures = compile_all(binaries, device.arch, min(jobs or os.cpu_count() or 1, len(binaries)))
    for failure in failures:
        fail(RuntimeError(failure))
    console.print(
        f"{several(len(binaries) - len(failures), 'kernel')} for {device.arch} by {identity}, in "
        f"{time.perf_counter() - begin:.0f} s\nCache: {compiler.cache_folder()}",
        highlight=False,
    )
    if failures:
        raise typer.Exit(1)
