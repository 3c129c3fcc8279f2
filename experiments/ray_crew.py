"""Workers on several machines, through Ray.

Ray starts one host a place, on the node it is told. A host owns the same worker as a run without Ray, so a
case is killed at its deadline and its process replaced there. The runner keeps the queue and writes every
journal. A node that is lost ends its case as interrupted, and the case begins once more elsewhere.

Every node needs this checkout, its packages and the kernels named by `--kernel`, under the same paths.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from experiments import environment
from experiments.crew import Crew, Lost
from experiments.places import Place, places
from experiments.ray_places import RayPlace, alive, first_line
from experiments.suite import Repeat
from experiments.words import UserError
from experiments.worker import INFINITY, START_S, TRIES, Unavailable

GRACE_S = 60.0  # a host's own deadlines come first


class Host:
    """What Ray starts at a place: a crew of one. Errors travel as strings; here nothing is raised."""

    def start(self, machine: str, kernels: list[str], repeat: Mapping[str, Any], environ: Mapping[str, str],
              patient: bool) -> tuple[str, Any]:
        """("ready", what it runs on), or ("unavailable" | "refused", why)."""
        said: list[str] = []
        try:
            machine, [place] = places(machine)
            place = Place(place.uuid, {**place.environ, **environ})
            self._crew = Crew(machine, [place], kernels, Repeat(**repeat), said.append, patient)
            self._crew.start()
        except UserError as error:
            return "refused", str(error)
        except Unavailable as error:
            return "unavailable", str(error)
        return "ready", {"device": {**self._crew.device, "host": socket.gethostname()}, "said": said,
                         "environment": environment.capture()}

    def run(self, params: Mapping[str, Any]) -> tuple[str, Any]:
        """("row", columns), or ("unavailable", why) where no process can be started."""
        try:
            return "row", self._crew.workers[0].run(params)
        except Unavailable as error:
            return "unavailable", str(error)


class RayWorker:
    """The runner's end of a host; see `worker.Worker`, whose `assign`, `step` and `stop` it has."""

    def __init__(self, machine: str, kernel_paths: list[str], repeat: Repeat, place: RayPlace, patient: bool):
        self.machine, self.place, self.repeat = machine, place, repeat
        self._arguments = list(kernel_paths), asdict(repeat), dict(place.environ), patient
        self.device: dict[str, Any] = {"host": place.host}
        self.answer: dict[str, Any] = {}  # what the host said when it was ready
        self.deadline = INFINITY
        self.pending = None  # Ray's reference to what the host will answer
        self._host = None
        self._case: dict[str, Any] | None = None
        self.starting = False

    def launch(self) -> None:
        """Let Ray start the host, and wait for nothing."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        path = os.pathsep.join(filter(None, (str(environment.ROOT), os.environ.get("PYTHONPATH"))))
        host = ray.remote(Host).options(
            num_cpus=self.place.cpus, num_gpus=int(self.place.gpu), max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.place.node, soft=False),
            runtime_env={"env_vars": {"PYTHONPATH": path}},
        )
        self._host = host.remote()
        self.pending, self.starting = self._host.start.remote(self.machine, *self._arguments), True
        patient = self._arguments[-1]
        self.deadline = INFINITY if patient else time.monotonic() + START_S + GRACE_S

    def assign(self, params: Mapping[str, Any]) -> None:
        """Give it a case; a host is started if there is none.

        Raises
        ------
        Unavailable
            Its node is gone.
        """
        self._case = dict(params)
        if self._host is not None:
            self._hand()
        elif self.place.node in {node["NodeID"] for node in alive()}:
            self.launch()
        else:
            raise Unavailable(f"{self.place} has left the cluster")

    def _hand(self) -> None:
        self.pending = self._host.run.remote(self._case)
        allowed = TRIES * START_S + self.repeat.compile_s + self.repeat.deadline_s + GRACE_S
        self.deadline = time.monotonic() + allowed

    def step(self) -> dict[str, Any] | None:
        """Act on the host's answer, or on its silence; the row's columns if that has ended the case.

        Raises
        ------
        Lost
            The host is gone, in the middle of a case.
        Unavailable
            It cannot be started; the case has not begun.
        """
        import ray

        if not ray.wait([self.pending], timeout=0)[0]:
            if time.monotonic() >= self.deadline:
                self._gone("did not answer in time")
            return None
        try:
            kind, content = ray.get(self.pending)
        except ray.exceptions.RayError as error:
            self._gone(f"was lost ({first_line(error)})")
        self.pending, self.deadline = None, INFINITY
        if kind == "row":
            self._case = None
            return content
        if kind != "ready":
            self.stop()
            why = f"{self.place}: {content}"
            raise UserError(why) if kind == "refused" else Unavailable(why)
        self.starting, self.answer, self.device = False, content, content["device"]
        self.machine = self.device["machine"]  # a replacement must open the same one
        if self._case is not None:
            self._hand()
        return None

    def _gone(self, what: str) -> None:
        starting = self.starting
        self.stop()
        if starting:
            raise Unavailable(f"the worker on {self.place} {what} before it was ready")
        raise Lost(f"the worker on {self.place} {what} while it ran a case")

    def stop(self) -> None:
        """Kill the host, and with it everything that it started."""
        import ray

        self._case, self.starting, self.deadline = None, False, INFINITY
        host, self._host, self.pending = self._host, None, None
        if host is not None and ray.is_initialized():
            ray.kill(host)


def wait(workers: Sequence[RayWorker]) -> None:
    """Sleep until one of the workers has something to act on."""
    import ray

    soonest = min(worker.deadline for worker in workers)
    left = None if soonest == INFINITY else max(0.0, soonest - time.monotonic())
    ray.wait([worker.pending for worker in workers], num_returns=1, timeout=left)


class RayCrew(Crew):
    """Workers on the nodes of a Ray cluster."""

    wait = staticmethod(wait)

    def environment(self) -> dict[str, Any]:
        """That of the first worker's node."""
        return self.workers[0].answer["environment"]

    def start(self) -> None:
        super().start()
        for worker in self.workers:
            for sentence in worker.answer["said"]:
                self._say(f"{worker.place}: {sentence}")
        here = environment.revision()
        for worker in self.workers:
            there = worker.answer["environment"]["revision"]
            if there and here and there != here:
                raise UserError(f"--executor ray: {worker.place} has the revision {there}, and this host "
                                f"{here}; bring both to the same")

    def _worker(self, place: RayPlace) -> RayWorker:
        return RayWorker(*self._open, place, self._patient)

    def _lock(self, uuid: str) -> None:
        """Hosts lock their own GPUs."""

    def stop(self) -> None:
        """Kill the workers and leave the cluster; one that was started for this run ends."""
        import ray

        super().stop()
        ray.shutdown()
