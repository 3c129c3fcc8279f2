"""The workers of a run: one a place, and whichever is free gets the next case."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import environment
from experiments.locks import Lock
from experiments.places import Place, lock_device
from experiments.suite import Repeat
from experiments.sweep import Case
from experiments.words import UserError
from experiments.worker import Unavailable, Worker, wait

Say = Callable[[str], None]
LOSSES = 3  # places that may be lost with the same case before it is to blame


class Lost(RuntimeError):
    """A worker's place is gone, and its case has not ended; the message says which place."""


class Crew:
    """Workers on the same kind of device, and the locks of their GPUs.

    Parameters
    ----------
    machine : str
        "cpu", "gpu" or "best".
    places : sequence of Place
    kernel_paths : list of str
    repeat : Repeat
    say : callable
        Told, in a sentence each, what the user should know but need not act on.
    patient : bool
        Whether to wait for a GPU that another run holds, instead of refusing.
    began_on : str, optional
        The device the run began on: a run holds rows of one.
    """

    kind = Worker
    wait = staticmethod(wait)

    def __init__(
        self,
        machine: str,
        places: Sequence[Place],
        kernel_paths: list[str],
        repeat: Repeat,
        say: Say = lambda sentence: None,
        patient: bool = False,
        began_on: str | None = None,
    ):
        self._open = machine, list(kernel_paths), repeat
        self._places, self._say, self._patient = list(places), say, patient
        self._began_on = began_on
        self._locks: dict[str, Lock] = {}
        self.workers: list[Worker] = []
        self.busy: dict[Worker, Case] = {}  # what each is at

    @property
    def machine(self) -> str:
        """Which machine it opened."""
        return self.workers[0].machine

    @property
    def device(self) -> dict[str, Any]:
        """What rows say of the first worker's device."""
        return self.workers[0].device

    def environment(self) -> dict[str, Any]:
        """What the workers run on, for the manifest."""
        return environment.capture()

    def __enter__(self) -> Crew:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def start(self) -> None:
        """Take the GPUs' locks, start all workers, and wait until their machines are open.

        Raises
        ------
        Busy, UserError
            A GPU is in use by another run, or the GPUs are not all of one kind.
        Unavailable
        """
        for uuid in sorted({place.uuid for place in self._places if place.uuid}):
            self._lock(uuid)  # sorted, so that two that wait for each other's GPUs cannot be
        self.workers = [self._worker(place) for place in self._places]
        for worker in self.workers:
            worker.launch()
        for worker in self.workers:
            while worker.starting:
                self.wait([worker])
                worker.step()
        self._one_kind()
        if self.machine != "gpu":
            self._release()
        elif not self._locks and (uuid := self.device["device_uuid"]):
            self._lock(uuid)  # NVML did not name it, CUDA does

    def _worker(self, place: Place) -> Worker:
        lock = self._locks[place.uuid].handle if place.uuid else None
        return self.kind(*self._open, place.environ, lock)

    def _lock(self, uuid: str) -> None:
        lock = lock_device(uuid, self._say if self._patient else None)
        if lock.notice:
            self._say(lock.notice)
        self._locks[uuid] = lock

    def _one_kind(self) -> None:
        kinds = dict.fromkeys((worker.device["device"], worker.device["arch"]) for worker in self.workers)
        if len(kinds) > 1:
            names = " and ".join(f"{name} ({arch})" for name, arch in kinds)
            raise UserError(f"--devices: a run holds rows of one kind of device, and these are {names}; "
                            "start a run for each")
        if self._began_on not in (None, self.device["device"]):
            raise UserError(f"resume: the run began on {self._began_on} and this is {self.device['device']}; "
                            "start a new run here")

    def work(
        self,
        cases: Sequence[Case],
        begun: Callable[[Worker, Case], None],
        ended: Callable[[Worker, Case, Mapping[str, Any]], None],
    ) -> None:
        """Run the cases, each once; a worker that cannot be replaced leaves its case to the others.

        `begun` is told who begins which case, and `ended` the columns it ended with. A case whose place is
        lost ends as interrupted, and begins once more. On an exception `busy` says who was at what.

        Raises
        ------
        Unavailable
            No worker is left.
        """
        queue, self.busy, lost = deque(cases), {}, Counter()
        while queue or self.busy:
            for worker in self.workers:
                if worker not in self.busy and queue:
                    case = self.busy[worker] = queue.popleft()
                    begun(worker, case)
                    self._guard(worker, queue, lambda: worker.assign(case.params))
            if self.busy:
                self.wait(list(self.busy))
            for worker in list(self.busy):
                try:
                    row = self._guard(worker, queue, worker.step)
                except Lost as error:
                    case = self.busy.pop(worker)
                    lost[case.case_id] += 1
                    again = lost[case.case_id] < LOSSES
                    self._say(f"{error}; " + ("it begins once more" if again else "it is given up"))
                    ended(worker, case, {"status": "interrupted" if again else "crash", "error": str(error)})
                    queue.extendleft([case] * again)
                    continue
                if row is not None:
                    ended(worker, self.busy.pop(worker), row)

    def _guard(self, worker: Worker, queue: deque[Case], act: Callable[[], Any]) -> Any:
        """Do something with a worker; one that is beyond replacement leaves."""
        try:
            return act()
        except Unavailable as error:
            queue.appendleft(self.busy.pop(worker))
            worker.stop()
            if len(self.workers) == 1:
                raise
            self.workers = [other for other in self.workers if other is not worker]
            self._say(f"a worker is lost and the others go on ({error})")
            return None

    def stop(self) -> None:
        """Kill the workers and give up the locks."""
        for worker in self.workers:
            worker.stop()
        self._release()

    def _release(self) -> None:
        for lock in self._locks.values():
            lock.release()
        self._locks = {}
