"""What `run` was asked for, and what that means: the suite, the machine and its cases."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any

from cuattn import timing_nvbench
from experiments import environment
from experiments.catalog import catalog
from experiments.suite import Suite, load_suite
from experiments.sweep import Case, Options, cases_of
from experiments.words import UserError, nearest

MACHINES = ("best", "cpu", "gpu")
EXECUTORS = ("local", "ray")
TIMERS = ("events", "nvbench")


@dataclass(frozen=True)
class Request:
    """What `run` was asked to do; kept in the manifest so that `resume` asks for the same."""

    suite: str
    machine: str = "best"
    kernels: tuple[str, ...] = ()
    options: Options = Options()
    devices: str | None = None
    jobs: int | None = None
    executor: str = "local"
    address: str | None = None
    timer: str = "events"

    def known(self) -> dict[str, Any]:
        return catalog(self.kernels)


def plan(request: Request, machine: str | None = None) -> tuple[Suite, str, list[Case]]:
    """The suite, the machine and the cases of a request, without starting anything.

    Raises
    ------
    UserError
    """
    suite, known = load_suite(request.suite), request.known()
    suite = replace(suite, repeat=replace(suite.repeat, timer=request.timer))
    if machine is None:
        machine = request.machine
        if machine == "best":
            machine = "gpu" if environment.gpu_expected() else "cpu"
    external = tuple(entry.name for entry in known.values() if entry.path)
    return suite, machine, cases_of(suite, machine, known, replace(request.options, kernels=external))


def check_machine(machine: str) -> None:
    """Refuses a name that is no machine's.

    Raises
    ------
    UserError
    """
    if machine not in MACHINES:
        raise UserError(f"--machine: '{machine}' is not a machine; {nearest(machine, MACHINES)}")


def check_executor(executor: str, address: str | None) -> None:
    """Refuses a name that is no executor's, and an address that nobody asks for.

    Raises
    ------
    UserError
    """
    if executor not in EXECUTORS:
        raise UserError(f"--executor: '{executor}' is not an executor; {nearest(executor, EXECUTORS)}")
    if address is not None and executor != "ray":
        raise UserError("--address: is a Ray cluster's; add --executor ray, or leave it out")


def check_timer(timer: str, machine: str) -> None:
    """Refuses a name that is no timer's, and one that cannot be had here.

    Raises
    ------
    UserError
    """
    if timer not in TIMERS:
        raise UserError(f"--timer: '{timer}' is not a timer; {nearest(timer, TIMERS)}")
    if timer == "nvbench":
        need_gpu("--timer nvbench", machine, "leave it out")
        if not timing_nvbench.available():
            raise UserError("--timer: nvbench needs cuda-bench, which is not installed; pip install cuda-bench")


def need_gpu(command: str, machine: str, so: str) -> None:
    """Refuses a machine that models no time; `so` says what follows from that.

    Raises
    ------
    UserError
    """
    check_machine(machine)
    if machine == "cpu" or not environment.gpu_expected():
        why = "" if machine == "cpu" else "there is no GPU here with CuPy, and "
        raise UserError(f"{command}: {why}the CPU machine models no time, so {so}")


def command_line(request: Request) -> str:
    """The arguments that ask for the same run again."""
    words = ["run", request.suite, "--machine", request.machine]
    for path in request.kernels:
        words += ["--kernel", path]
    for name in ("only", "limit", "lengths", "batch", "shard", "memory_limit", "reserve"):
        if (value := getattr(request.options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name in ("devices", "jobs", "executor", "address", "timer"):
        if (value := getattr(request, name)) not in (None, "local", "events"):
            words += [f"--{name}", str(value)]
    return shlex.join(words)
