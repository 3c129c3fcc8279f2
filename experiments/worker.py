"""The process that runs cases: it alone opens a machine, so that nothing it does can hurt the runner.

Messages to it: a case's parameters, or {"pair": …} for two kernels timed in turn. Messages to the parent:
("ready", device) or ("unavailable", why) once; for each case any number of ("phase", name) and one ("row",
columns). Errors travel as strings, because a library's exceptions may not unpickle elsewhere.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing import connection, resource_tracker
from typing import Any
from uuid import UUID

from experiments.interrupts import held
from experiments.locks import Inherited
from experiments.suite import Repeat

INFINITY = float("inf")
START_S = 120.0  # a worker imports, opens its machine and maybe loads a driver in this time
TRIES = 3  # processes that may die before they begin a case
_PR_SET_PDEATHSIG = 1


class Unavailable(RuntimeError):
    """The worker cannot open the machine; the message says why."""


def isolate(parent: int) -> None:
    """A process group of its own, no core files of a GPU's size, and no life after its parent."""
    import resource

    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)


def serve(
    pipe, parent: int, machine_name: str, kernel_paths: list[str], repeat: Mapping[str, Any],
    environ: Mapping[str, str], lock: int | None,
) -> None:
    """Open the machine, then run cases until the pipe closes.

    `environ` is set before anything is imported that may load CUDA. `lock` is an open file that stays open as
    long as this process lives.
    """
    isolate(parent)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order NVML uses
    os.environ.update(environ)

    try:
        import cuattn
        from cuattn import compile as compiler
        from experiments.ab.pair import run_pair
        from experiments.case import run_case
        from experiments.catalog import catalog

        machine = cuattn.open_machine(machine_name)
        if machine.name == "cpu":
            compiler.host_compiler()  # said once, and not by every case
        kernels = catalog(kernel_paths)
    except Exception as error:  # no driver, no compiler, a broken install: the parent says it in one sentence
        tell(pipe, "unavailable", f"{' '.join(str(error).split()) or type(error).__name__}")
        return
    tell(pipe, "ready", device_of(machine))
    hush_destructors()
    limits = Repeat(**repeat)
    while (params := receive(pipe)) is not None:
        attempt, what = (run_pair, params["pair"]) if "pair" in params else (run_case, params)
        tell(pipe, "row", attempt(machine, what, limits, kernels, lambda name: tell(pipe, "phase", name)))


def hush_destructors() -> None:
    """Keeps quiet where CuPy cannot free something: once a kernel has failed no destructor succeeds.

    The row says why. Cython tells some of it to one hook, some to the other.
    """

    def quiet(hook, error_of):
        def told(*what) -> None:
            if not type(error_of(*what)).__module__.startswith("cupy"):
                hook(*what)

        return told

    sys.unraisablehook = quiet(sys.unraisablehook, lambda what: what.exc_value)
    sys.excepthook = quiet(sys.excepthook, lambda kind, error, trace: error)


def device_of(machine) -> dict[str, Any]:
    """What every row says of the machine."""
    from experiments import environment

    uuid = None
    if machine.name == "gpu":
        cards = environment.gpus()
        uuid = cards[0]["uuid"] if cards else machine.uuid and f"GPU-{UUID(hex=machine.uuid)}"
    device = machine.device
    return {"machine": machine.name, "device": device.name, "arch": device.arch, "device_uuid": uuid}


def tell(pipe, kind: str, content: Any) -> None:
    """Send a message; where the parent is gone, there is nothing left to do."""
    try:
        pipe.send((kind, content))
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)


def receive(pipe):
    """The next case; None when the parent is gone."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


class Worker:
    """The parent's end: starts the process, watches deadlines, kills and replaces it.

    One parent can look after several: `assign` gives a worker a case, `step` acts on what its process has
    said, or has failed to say by `deadline`; neither blocks, `wait` does. `start` and `run` are for one alone.

    Parameters
    ----------
    machine : str
        "cpu", "gpu" or "best".
    kernel_paths : list of str
    repeat : Repeat
    environ : mapping, optional
        What the process's environment gets before it imports anything.
    lock : int, optional
        An open file that the process is to keep open.
    """

    process = staticmethod(serve)  # what the process does

    def __init__(self, machine: str, kernel_paths: list[str], repeat: Repeat, environ=None, lock=None):
        self.machine, self.kernel_paths, self.repeat = machine, kernel_paths, repeat
        self.environ, self.lock = dict(environ or {}), lock
        self.device: dict[str, Any] = {}
        self.pipe = None
        self.deadline = INFINITY  # on the monotonic clock
        self._process = None
        self._case: dict[str, Any] | None = None
        self._doing = "idle"  # or starting, handed (a case), building, running
        self._allowed, self._tries = 0.0, 0

    @property
    def starting(self) -> bool:
        return self._doing == "starting"

    def start(self) -> None:
        """Start the process and wait until its machine is open.

        Raises
        ------
        Unavailable
            The machine does not open, or the process dies or hangs before it does.
        """
        self.launch()
        while self.starting:
            wait([self])
            self.step()

    def launch(self) -> None:
        """Start the process, and wait for nothing."""
        context = mp.get_context("spawn")  # a forked process cannot use CUDA
        self.pipe, theirs = context.Pipe()
        lock = None if self.lock is None else Inherited(self.lock)
        repeat = asdict(self.repeat)
        arguments = (theirs, os.getpid(), self.machine, self.kernel_paths, repeat, self.environ, lock)
        process = context.Process(target=self.process, args=arguments, daemon=True)
        resource_tracker.ensure_running()  # it would let interrupts through if it came to life below
        with held():  # one that comes while the process loads is the parent's
            process.start()
            self._process = process
            self._enter("starting", START_S)
        theirs.close()

    def run(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Run one case, or pair, in the process, whatever it does to it; returns the row's columns."""
        self.assign(params)
        while (row := self.step()) is None:
            wait([self])
        return row

    def assign(self, params: Mapping[str, Any]) -> None:
        """Give it a case; a process is started if there is none."""
        self._case, self._tries = dict(params), 0
        self._hand()

    def step(self) -> dict[str, Any] | None:
        """Act on one message, a death or a missed deadline; the row's columns if that has ended the case.

        Raises
        ------
        Unavailable
            There is no process and none can be started; the case has not begun.
        """
        kind, content = self._message()
        if kind == "nothing":
            return None
        if self.starting:
            self._started(kind, content)
        elif kind == "phase":
            building = content == "build"
            self._enter("building" if building else "running", self._limit(building))
        elif kind == "row":
            return self._end(content)
        elif kind == "late":
            doing = "running" if self._doing == "running" else "building"
            why = f"killed after {self._allowed:g} s of {doing}"
            return self._end({"status": "timeout", "error": why}, kill=True)
        elif self._doing in ("building", "running"):
            why = f"{self._death()} while {self._doing}"
            return self._end({"status": "crash", "error": why}, kill=True)
        else:
            self._kill()
            if self._case is not None:  # handed over, never begun
                self._hand()
        return None

    def _hand(self) -> None:
        """Send the case, or start a process that will get it once it is ready."""
        while not self.starting:
            if self._process is None:
                if self._tries == TRIES:
                    raise Unavailable("the worker dies as soon as it is idle")
                self._tries += 1
                self.launch()
                return
            try:
                self.pipe.send(self._case)
            except OSError:  # it died idle
                self._kill()
                continue
            self._enter("handed", self._limit(building=True))
            return

    def _started(self, kind: str, content: Any) -> None:
        if kind != "ready":
            why = content if kind == "unavailable" else self._death()
            self.stop()
            raise Unavailable(why)
        self.device, self.machine = content, content["machine"]  # a replacement must open the same one
        self._enter("idle", INFINITY)
        if self._case is not None:
            self._hand()

    def _end(self, row: dict[str, Any], kill: bool = False) -> dict[str, Any]:
        self._case = None
        self._enter("idle", INFINITY)
        if kill or row["status"] == "cuda_error":
            self._kill()  # its context may be poisoned, and then even destructors fail at exit
        return row

    def _enter(self, doing: str, allowed: float) -> None:
        self._doing, self._allowed, self.deadline = doing, allowed, time.monotonic() + allowed

    def _limit(self, building: bool) -> float:
        return self.repeat.compile_s if building else self.repeat.deadline_s

    def _message(self) -> tuple[str, Any]:
        """What the process said; else ("gone", None), ("late", None) or ("nothing", None)."""
        try:
            if self.pipe is not None and self.pipe.poll():
                return self.pipe.recv()
        except Exception:  # it has ended, or what it has sent is no message
            self._process.join(5)
            return "gone", None
        return ("late" if time.monotonic() >= self.deadline else "nothing"), None

    def _death(self) -> str:
        code = self._process.exitcode
        if code is None:
            late = time.monotonic() >= self.deadline
            return f"the worker did not answer within {self._allowed:g} s" if late else "the worker fell silent"
        if code < 0:
            known = -code in set(signal.Signals)
            return f"the worker was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"
        return f"the worker ended with exit code {code}"

    def stop(self) -> None:
        """Kill the process and everything it started, whatever it is doing."""
        self._case = None
        self._kill()

    def _kill(self) -> None:
        if self._process is None:
            return
        if self._process.is_alive():
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()  # it has no group of its own yet
        self._process.join(10)
        self.pipe.close()
        self._process = self.pipe = None
        self._enter("idle", INFINITY)


def wait(workers: list[Worker]) -> None:
    """Sleep until one of the workers has something to act on; each of them starts or has a case."""
    soonest = min(worker.deadline for worker in workers) - time.monotonic()
    connection.wait([worker.pipe for worker in workers], max(0.0, soonest))
