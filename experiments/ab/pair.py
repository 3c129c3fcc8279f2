"""Two kernels timed in turn, in the worker: same inputs, each found right before and after, every pair kept.

As in `case`, no time leaves this module without a correctness pass on the buffers it was taken on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

from cuattn import timing, tuned
from cuattn.kernels.base import Unsupported
from experiments import environment, subjects
from experiments.ab import statistics
from experiments.case import classify
from experiments.suite import Repeat

SIDES = ("A", "B")


def run_pair(
    machine,
    pair: Mapping[str, Any],
    repeat: Repeat,
    kernels: Mapping[str, Any],
    phase: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Time two cases of one shape in turn; every failure inside is a status, never an exception.

    Parameters
    ----------
    machine : Machine
    pair : mapping
        `a` and `b`: parameters of two cases that differ in kernel and constants alone. `confidence`: of the
        interval whose width decides when to stop.
    repeat : Repeat
        `rel_noise` is the half width to reach, `max_samples` the most pairs, `timeout_s` the time allowed.
    kernels : mapping of str to Entry
    phase : callable

    Returns
    -------
    dict
        `status` and, unless it is ok, `error` and `side`, which is "A", "B" or, where it was neither's fault,
        "A and B". Where it is ok also `pairs_us`, `stop_reason`, `host_a_us`, `host_b_us`, the SM clock and
        the sensors' readings after timing.
    """
    found: dict[str, Any] = {"status": "ok"}
    made: list[Any] = []
    try:
        phase("build")
        with tuned.ignored():
            _attempt(machine, pair, repeat, kernels, phase, found, made)
    except Exception as error:  # whatever a kernel or its compiler does is the pair's outcome
        found["status"], found["error"] = classify(error)
        error.__traceback__ = None  # its frames hold the arrays
    finally:
        for subject in made:
            subject.close()
    if found["status"] == "ok":
        del found["side"]
    elif found["status"] != "throttled":
        found = {name: found[name] for name in ("status", "error", "side")}
    made.clear()
    gc.collect()
    return found


@contextmanager
def _side(found: dict[str, Any], name: str):
    """What fails in here is that side's."""
    found["side"] = name
    yield
    found["side"] = " and ".join(SIDES)


def _attempt(machine, pair, repeat: Repeat, kernels, phase, found, made) -> None:
    found["side"] = " and ".join(SIDES)
    if machine.name == "cpu":
        raise Unsupported("the CPU machine models no time; two kernels are timed in turn on a GPU only")
    gc.collect()
    machine.reset_peak()
    for name, params in zip(SIDES, (pair["a"], pair["b"])):
        with _side(found, name):
            arrays = made[0].arrays if made else None
            made.append(subjects.make(machine, params, kernels[params["kernel"]], _collect, arrays))
    for name, subject in zip(SIDES, made):
        with _side(found, name):
            subject.run()  # loads the module, and makes a peer's workspace, before the deadline starts
            machine.synchronize()
    phase("run")
    if _right(machine, made, found):
        _time(machine, pair, made, repeat, found)
        _right(machine, made, found)


def _collect(arrays) -> None:
    gc.collect()


def _right(machine, made, found) -> bool:
    """Run and judge each on poisoned outputs; the first that is wrong makes the pair `incorrect`."""
    for name, subject in zip(SIDES, made):
        with _side(found, name):
            subject.poison()
            subject.run()
            machine.synchronize()
            verdict = subject.verdict()
        if not verdict.ok:
            found |= {"status": "incorrect", "error": verdict.message, "side": name}
            return False
    return True


def _time(machine, pair, made, repeat: Repeat, found) -> None:
    def settled(pairs) -> bool:
        if not statistics.usable(pairs):
            return False
        return statistics.paired_ratio(pairs, pair["confidence"]).half_width <= repeat.rel_noise

    taken = timing.measure_pair(
        made[0].run,
        made[1].run,
        machine,
        settled=settled,
        max_pairs=repeat.max_samples,
        timeout_s=repeat.timeout_s,
        cache=pair["a"]["cache_mode"],
        graph=pair["a"]["mode"] == "graph",
    )
    found |= {
        "pairs_us": [list(times) for times in taken.pairs_us],
        "stop_reason": taken.stop_reason,
        "host_a_us": taken.host_a_us,
        "host_b_us": taken.host_b_us,
        "sm_clock_mhz": taken.sm_clock_mhz,
        "sm_clock_min_mhz": taken.sm_clock_min_mhz,
        **environment.sensors(),
    }
    reasons = found.get("measured_throttle_reasons") or ""
    # A clock that moves is no reason to give up here: both kernels meet it, and it divides out.
    if environment.slowed(reasons):
        found |= {"status": "throttled", "error": f"the GPU slowed its clock while timing ({reasons})"}
