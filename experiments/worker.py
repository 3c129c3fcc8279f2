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
from typing import Any

from experiments.suite import Repeat

START_S = 120.0  # a worker imports, opens its machine and maybe loads a driver in this time
_PR_SET_PDEATHSIG = 1


class Unavailable(RuntimeError):
    """The worker cannot open the machine; the message says why."""


def isolate(parent: int) -> None:
    """A process group of its own, no core files of a GPU's size, and no life after its parent."""
    import resource

    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)


def serve(pipe, parent: int, machine_name: str, kernel_paths: list[str], repeat: Mapping[str, Any]) -> None:
    """Open the machine, then run cases until the pipe closes."""
    isolate(parent)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order NVML uses
    from experiments import environment

    try:
        import cuattn
        from cuattn import compile as compiler
        from experiments.case import run_case
        from experiments.catalog import catalog
        from experiments.pair import run_pair

        machine = cuattn.open_machine(machine_name)
        if machine.name == "cpu":
            compiler.host_compiler()  # said once, and not by every case
        kernels = catalog(kernel_paths)
    except Exception as error:  # no driver, no compiler, a broken install: the parent says it in one sentence
        pipe.send(("unavailable", f"{' '.join(str(error).split()) or type(error).__name__}"))
        return
    cards = environment.gpus() if machine.name == "gpu" else []
    pipe.send(
        (
            "ready",
            {
                "machine": machine.name,
                "device": machine.device.name,
                "arch": machine.device.arch,
                "device_uuid": cards[0]["uuid"] if cards else None,
            },
        )
    )
    limits = Repeat(**repeat)
    while (params := receive(pipe)) is not None:
        attempt, what = (run_pair, params["pair"]) if "pair" in params else (run_case, params)
        pipe.send(("row", attempt(machine, what, limits, kernels, lambda name: pipe.send(("phase", name)))))


def receive(pipe):
    """The next case; None when the parent is gone."""
    try:
        return pipe.recv()
    except EOFError:
        return None


class Worker:
    """The parent's end: starts the process, watches deadlines, kills and replaces it.

    Parameters
    ----------
    machine : str
        "cpu", "gpu" or "best".
    kernel_paths : list of str
    repeat : Repeat
    """

    process = staticmethod(serve)  # what the process does

    def __init__(self, machine: str, kernel_paths: list[str], repeat: Repeat):
        self.machine, self.kernel_paths, self.repeat = machine, kernel_paths, repeat
        self.device: dict[str, Any] = {}
        self._process = None
        self._pipe = None

    def start(self) -> None:
        """Start the process and wait until its machine is open.

        Raises
        ------
        Unavailable
            The machine does not open, or the process dies or hangs before it does.
        """
        context = mp.get_context("spawn")  # a forked process cannot use CUDA
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), self.machine, self.kernel_paths, asdict(self.repeat))
        self._process = context.Process(target=self.process, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        message = self._wait(time.monotonic() + START_S)
        if message is None or message[0] != "ready":
            why = message[1] if message else self._death()
            self.stop()
            raise Unavailable(why)
        self.device = message[1]
        self.machine = self.device["machine"]  # a replacement must open the same one

    def run(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Run one case, or pair, in the process, whatever it does to it; returns the row's columns."""
        for _ in range(3):
            if self._process is None or not self._process.is_alive():
                self.stop()
                self.start()
            try:
                self._pipe.send(dict(params))
                break
            except (BrokenPipeError, ConnectionResetError):
                continue  # it died idle: the case never began
        else:
            raise Unavailable("the worker dies as soon as it is idle")
        row = self._collect()
        if row["status"] == "cuda_error":
            self.stop()  # its context may be poisoned, and then even destructors fail at exit
        return row

    def _collect(self) -> dict[str, Any]:
        name, allowed = "build", self.repeat.compile_s
        while True:
            message = self._wait(time.monotonic() + allowed)
            if message is None:
                alive = self._process.is_alive()
                death = "" if alive else self._death()
                self.stop()
                doing = "building" if name == "build" else "running"
                if alive:
                    return {"status": "timeout", "error": f"killed after {allowed:g} s of {doing}"}
                return {"status": "crash", "error": f"{death} while {doing}"}
            kind, content = message
            if kind == "row":
                return content
            name = content
            allowed = self.repeat.compile_s if name == "build" else self.repeat.deadline_s

    def _wait(self, deadline: float):
        """The next message; None when the deadline passes or the process is gone."""
        try:
            if self._pipe.poll(max(0.0, deadline - time.monotonic())):
                return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
        return None

    def _death(self) -> str:
        code = self._process.exitcode
        if code is None:
            return f"the worker did not answer within {START_S:g} s"
        if code < 0:
            return f"the worker was ended by {signal.Signals(-code).name}"
        return f"the worker ended with exit code {code}"

    def stop(self) -> None:
        """Kill the process and everything it started."""
        if self._process is None:
            return
        if self._process.is_alive():
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()  # it has no group of its own yet
        self._process.join(10)
        self._pipe.close()
        self._process = None
