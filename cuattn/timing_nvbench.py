"""The same question put to NVBench, NVIDIA's own timer: a second opinion on what `timing.measure` finds.

Optional: `pip install cuda-bench`. It times with a cold cache, behind a blocking kernel of its own, and stops by
its own rule at the relative noise asked for; clocks, host time and the empty kernel stay with `timing`.

NVBench runs once a process, and what it runs is registered before. So its one run goes on, in a thread of its
own, until the process ends, and its one benchmark waits for the next call to time.
"""
from __future__ import annotations

import array
import atexit
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from cuattn.kernels.base import Unsupported
from cuattn.timing import EMPTY_SAMPLES, Timing, check_counts, check_request, summarised

FAREWELL_S = 5.0  # most seconds that the end of the process waits for a sample under way


def available() -> bool:
    """Whether cuda-bench is installed."""
    return find_spec("cuda") is not None and find_spec("cuda.bench") is not None


def measure(
    fn: Callable[[], object], machine, *, min_samples: int = 10, max_samples: int = 300,
    timeout_s: float = 10.0, rel_noise: float = 0.005, cache: str = "cold", graph: bool = False,
    empty: Callable[[], object] | None = None, rest_us: float = 0.0,
) -> Timing:
    """Time `fn` on a GPU with NVBench; parameters as in `timing.measure`.

    NVBench has no most samples: `max_samples` of them are kept, the first. It has a pace of its own, whatever
    `rest_us`. `fn` is called from another thread, one call at a time.

    Raises
    ------
    ValueError
        Arguments that make no sense, or no cuda-bench. `Unsupported`, which is one: a warm cache, which NVBench
        does not sample, and another `rel_noise` than the process's first, which NVBench keeps.
    RuntimeError
        NVBench gave up; its reason is in the message.
    """
    check_request(machine, cache, timeout_s)
    check_counts(min_samples, max_samples)
    if cache != "cold":
        raise Unsupported(f"cache: NVBench samples with a cold cache only, got {cache!r}; use the timer 'events'")
    if not available():
        raise ValueError("timer: 'nvbench' needs cuda-bench, which is not installed; pip install cuda-bench")
    call = machine.capture(fn) if graph else fn
    seconds, hertz = _run_of(machine, rel_noise).time(call, min_samples, timeout_s)
    if not seconds:
        raise RuntimeError("NVBench took no sample: the time-out passed, or the GPU's clock was low throughout")
    samples, clocks = [second * 1e6 for second in seconds[:max_samples]], [rate / 1e6 for rate in hertz]
    return summarised(machine, samples, "nvbench", _host_us(call, machine), clocks, cache, graph, empty)


class _Run:
    """NVBench's run: from the first call that is timed to the end of the process.

    Parameters
    ----------
    machine : Machine
    rel_noise : float
        NVBench takes it as the run begins.
    """

    def __init__(self, machine, rel_noise: float):
        self.rel_noise, self._machine = rel_noise, machine
        self._asked: queue.SimpleQueue = queue.SimpleQueue()  # (answer, call, min_samples, timeout_s); None: end
        self._answer: Future | None = None  # what the caller waits for
        self._ended: RuntimeError | None = None
        self._turn = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="cuattn-nvbench-")
        self._thread = threading.Thread(target=self._go, name="nvbench", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def time(self, call: Callable[[], object], min_samples: int, timeout_s: float) -> tuple[list, list]:
        """(seconds, SM clocks in Hz) of the samples.

        Raises
        ------
        RuntimeError
            NVBench gave up. What the call itself raises comes as it is.
        """
        with self._turn:
            self._answer = answer = Future()
            self._asked.put((answer, call, min_samples, timeout_s))
            if self._ended is not None:
                raise self._ended
            try:
                return answer.result()
            finally:
                answer.cancel()  # interrupted: the call that nobody waits for is not sampled further

    def _go(self) -> None:
        """The thread: NVBench's one run."""
        import cuda.bench as bench

        def cuattn(state) -> None:
            while (asked := self._asked.get()) is not None:
                answer = asked[0]
                with suppress(InvalidStateError):
                    try:
                        answer.set_result(self._sample(state, *asked))
                    except Exception as error:
                        answer.set_exception(error)

        try:
            bench.register(cuattn)
            bench.run_all_benchmarks([
                "nvbench", "--quiet", "--devices", str(self._machine.index), "--stopping-criterion", "stdrel",
                "--max-noise", repr(100 * self.rel_noise), "--jsonbin", str(Path(self._folder.name) / "run.json"),
            ])
            why = "it gave no reason"
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
        self._ended = RuntimeError(f"NVBench has ended its run, {why}; time in another process")
        if self._answer is not None:
            with suppress(InvalidStateError):
                self._answer.set_exception(self._ended)

    def _sample(self, state, answer: Future, call, min_samples: int, timeout_s: float) -> tuple[list, list]:
        def once(launch) -> None:
            if answer.cancelled():
                raise RuntimeError("nobody waits for this call any more")
            with self._machine.foreign(launch.get_stream().addressof()):
                call()

        state.set_min_samples(min_samples)
        state.set_timeout(timeout_s)
        state.exec(once, batched=False)
        return self._written("run.json-bin"), self._written("run.json-freqs-bin")

    def _written(self, folder: str) -> list[float]:
        """The float32 numbers of the only file in a folder, which is gone after it; none where there is no file.

        NOTE: NVBench's reader, `cuda.bench.results`, needs the index of these files, written as the run ends.
        """
        numbers = array.array("f")
        for path in (Path(self._folder.name) / folder).glob("*.bin"):
            numbers.frombytes(path.read_bytes())
            path.unlink()
        return numbers.tolist()

    def _end(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
        self._asked.put(None)
        self._thread.join(FAREWELL_S)


_runs: list[_Run] = []
_beginning = threading.Lock()


def _run_of(machine, rel_noise: float) -> _Run:
    """The process's run, begun now if there is none."""
    with _beginning:
        if not _runs:
            _runs.append(_Run(machine, rel_noise))
    (run,) = _runs
    if rel_noise != run.rel_noise:
        raise Unsupported(f"rel_noise: NVBench keeps the first of a process, {run.rel_noise:g}, got {rel_noise:g}; "
                          "ask for that one, or in another process")
    return run


def _host_us(call: Callable[[], object], machine) -> list[float]:
    """µs that the host spends in the call, again and again."""
    taken = []
    for _ in range(EMPTY_SAMPLES):
        begin = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begin) * 1e6)
        machine.synchronize()
    return taken
