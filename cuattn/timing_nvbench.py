"""The same question put to NVBench, NVIDIA's own timer: a second opinion on what `timing.measure` finds.

Optional: `pip install cuda-bench`. It times with a cold cache, behind a blocking kernel of its own, and stops by
its own rule at the relative noise asked for; clocks, host time and the empty kernel stay with `timing`.
"""
from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from cuattn.kernels.base import Unsupported
from cuattn.timing import EMPTY_SAMPLES, Timing, check_counts, check_request, summarised

_NAMES = (f"call {i}" for i in itertools.count())


def available() -> bool:
    """Whether cuda-bench is installed."""
    return find_spec("cuda") is not None and find_spec("cuda.bench") is not None


def measure(
    fn: Callable[[], object], machine, *, min_samples: int = 10, max_samples: int = 300,
    timeout_s: float = 10.0, rel_noise: float = 0.005, cache: str = "cold", graph: bool = False,
    empty: Callable[[], object] | None = None,
) -> Timing:
    """Time `fn` on a GPU with NVBench; parameters as in `timing.measure`.

    NVBench has no most samples: `max_samples` of them are kept, the first.

    Raises
    ------
    ValueError
        Arguments that make no sense, or no cuda-bench. `Unsupported`, which is one: a warm cache, which NVBench
        does not sample.
    RuntimeError
        NVBench gave up; its reason is in the message.
    """
    check_request(machine, cache, timeout_s)
    check_counts(min_samples, max_samples)
    if cache != "cold":
        raise Unsupported(f"cache: NVBench samples with a cold cache only, got {cache!r}; use the timer 'events'")
    if not available():
        raise ValueError("timer: 'nvbench' needs cuda-bench, which is not installed; pip install cuda-bench")
    import cuda.bench as bench

    call = machine.capture(fn) if graph else fn

    def run(state) -> None:
        def once(launch) -> None:
            with machine.foreign(launch.get_stream().addressof()):
                call()

        state.exec(once, batched=False)

    name = next(_NAMES)
    benchmark = bench.register(run).set_name(name).set_min_samples(min_samples).set_timeout(timeout_s)
    benchmark.set_stopping_criterion("stdrel").set_criterion_param_float64("max-noise", rel_noise)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        bench.run_all_benchmarks(["nvbench", "--quiet", "--benchmark", name, "--jsonbin", str(path)])
        (state,) = bench.results.BenchmarkResult.from_json(path)[name]
    if state.is_skipped or not state.samples:
        raise RuntimeError(f"NVBench took no sample: {state.skip_reason or 'it gave no reason'}")
    samples = [second * 1e6 for second in state.samples[:max_samples]]
    clocks = [hertz / 1e6 for hertz in state.frequencies or ()]
    return summarised(machine, samples, "nvbench", _host_us(call, machine), clocks, cache, graph, empty)


def _host_us(call: Callable[[], object], machine) -> list[float]:
    """µs that the host spends in the call, again and again."""
    taken = []
    for _ in range(EMPTY_SAMPLES):
        begin = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begin) * 1e6)
        machine.synchronize()
    return taken
