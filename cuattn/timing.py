"""How long a call takes on a GPU: between two events on its stream, many times, with every sample kept.

The time is *measured* and covers all that `fn` launches. What it does not cover has a number of its own: the
host's part of the call, and an empty kernel's time in the same mode. Neither is subtracted. `measure` times
one call, `measure_pair` two in turn, so that what drifts meets both.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

WARM_UP_S = 0.1  # a GPU that idled needs about this long to raise its clock
WARM_UP_LIMIT_S = 1.0
SETTLED = 0.01  # relative change between the third and the last quarter of the warm-up's samples
CLOCK_EVERY = 10  # samples between two looks at the SM clock
EMPTY_SAMPLES = 21
LOOKS = 1.25  # pairs grow by this factor between two looks at them: each look may stop by luck, too early
HOLD_MAX_US = 5e3  # a call whose host part takes longer is bound by the host, and its time may say so


@dataclass(frozen=True)
class Timing:
    """Samples in µs, in the order they were taken, and their summary.

    Parameters
    ----------
    samples_us : tuple of float
    median_us, q1_us, q3_us, min_us : float
    n_samples : int
    stop_reason : {"noise", "max_samples", "timeout", "nvbench"}
        "noise": the median is known to the relative precision asked for. "nvbench": that timer's own rule.
    host_us : float
        Median time the host spends in the call.
    empty_us : float or None
        Median time of an empty kernel in the same mode; None where no such kernel was given.
    sm_clock_mhz, sm_clock_min_mhz : float or None
        Median and minimum over the run; None where the machine cannot tell.
    cache_mode : {"cold", "warm"}
        Whether the L2 cache was flushed before each sample.
    mode : {"launch", "graph"}
        Launched call by call, or replayed from a captured graph.
    """

    samples_us: tuple[float, ...]
    median_us: float
    q1_us: float
    q3_us: float
    min_us: float
    n_samples: int
    stop_reason: str
    host_us: float
    empty_us: float | None
    sm_clock_mhz: float | None
    sm_clock_min_mhz: float | None
    cache_mode: str
    mode: str


@dataclass(frozen=True)
class PairTiming:
    """Two calls timed in turn; times in µs, in the order they were taken.

    Parameters
    ----------
    pairs_us : tuple of (float, float)
        (a, b) of each pair: a came first in pairs 0, 2, …, b in pairs 1, 3, …
    stop_reason : {"settled", "max_pairs", "timeout"}
        "settled": the caller's `settled` was content.
    host_a_us, host_b_us : float
        Median time the host spends in each call.
    sm_clock_mhz, sm_clock_min_mhz : float or None
    cache_mode : {"cold", "warm"}
    mode : {"launch", "graph"}
    """

    pairs_us: tuple[tuple[float, float], ...]
    stop_reason: str
    host_a_us: float
    host_b_us: float
    sm_clock_mhz: float | None
    sm_clock_min_mhz: float | None
    cache_mode: str
    mode: str


def median_noise(samples) -> float:
    """Relative standard error of the median, from the quartiles so that outliers do not decide.

    For a normal distribution 0.93 · (q3 − q1) / √n. Infinite where the median is 0: a time below the events'
    resolution has no relative precision.
    """
    q1, median, q3 = np.percentile(samples, (25, 50, 75))
    if not median > 0:
        return float("inf")
    return float(0.93 * (q3 - q1) / median / len(samples) ** 0.5)


def _sample(machine, call: Callable[[], object], cache: str, hold_us: float) -> tuple[float, float]:
    """One (device µs, host µs).

    The stream is held ahead of the first event while the host queues the call; else a short kernel would wait
    for the host inside the window and the time be the host's.
    """
    start, stop = machine.event(), machine.event()
    if cache == "cold":
        machine.flush_l2()
    else:
        call()
    machine.hold(hold_us)
    start.record()
    begin = time.perf_counter()
    call()
    host_s = time.perf_counter() - begin
    stop.record()
    machine.synchronize()
    return machine.elapsed_us(start, stop), host_s * 1e6


def _hold_for(host_us: list[float], rest_us: float = 0.0) -> float:
    """How long to hold the stream: twice what the host lately needed, and a little for the event itself."""
    return min(max(20 + 2 * float(np.median(host_us[-CLOCK_EVERY:] or [0.0])), rest_us), HOLD_MAX_US)


def _warm_up(machine, call, cache: str, deadline: float, rest_us: float = 0.0) -> float:
    """Call until times have settled and the clock had time to rise, or the limit has passed; µs to hold."""
    begin, samples, host = time.perf_counter(), [], []
    while True:
        device_us, host_us = _sample(machine, call, cache, _hold_for(host, rest_us))
        samples.append(device_us)
        host.append(host_us)
        now = time.perf_counter()
        if now - begin >= WARM_UP_LIMIT_S or now >= deadline:
            return _hold_for(host, rest_us)
        quarter = len(samples) // 4
        if now - begin < WARM_UP_S or quarter == 0:
            continue
        # Quarters grow with the run: a slow drift that hides between neighbours shows between them.
        before, after = np.median(samples[-2 * quarter : -quarter]), np.median(samples[-quarter:])
        if abs(after - before) <= SETTLED * before:
            return _hold_for(host, rest_us)


def check_request(machine, cache: str, timeout_s: float) -> None:
    """Refuses the CPU machine, an unknown cache mode, and no time."""
    if machine.name == "cpu":
        raise ValueError(
            "machine: expected a GPU, got the CPU machine, which models no time; use m.counting() on it"
        )
    if cache not in ("cold", "warm"):
        raise ValueError(f"cache: expected 'cold' or 'warm', got {cache!r}; choose one")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s: expected seconds above 0, got {timeout_s}; allow some time")


def check_counts(min_samples: int, max_samples: int) -> None:
    """Refuses numbers of samples that contradict each other."""
    if not 1 <= min_samples <= max_samples:
        raise ValueError(
            f"min_samples: expected 1 ≤ min_samples ≤ max_samples, got {min_samples} and {max_samples}; "
            "change one of them"
        )


def _stop(samples, min_samples: int, max_samples: int, rel_noise: float, deadline: float) -> str:
    """Why to stop now; empty to go on."""
    if time.perf_counter() >= deadline:
        return "timeout"
    if len(samples) >= min_samples and median_noise(samples) <= rel_noise:
        return "noise"
    return "max_samples" if len(samples) >= max_samples else ""


def measure(
    fn: Callable[[], object], machine, *, min_samples: int = 10, max_samples: int = 300,
    timeout_s: float = 10.0, rel_noise: float = 0.005, cache: str = "cold", graph: bool = False,
    empty: Callable[[], object] | None = None, rest_us: float = 0.0,
) -> Timing:
    """Time `fn` on a GPU.

    Parameters
    ----------
    fn : callable
        Launches the work on the machine's stream; must not synchronise.
    machine : Machine
        A GPU machine: event, elapsed_us, flush_l2, hold, capture, synchronize, sm_clock_mhz.
    min_samples, max_samples : int
        Fewer than `min_samples` come only out of a time-out.
    timeout_s : float
        Host seconds for warm-up and samples together. One sample is always taken.
    rel_noise : float
        Stop once the relative standard error of the median is at most this.
    cache : {"cold", "warm"}
        "cold" overwrites twice the L2 cache before each sample, outside the measured window.
    graph : bool
        Capture `fn` once and time the replay.
    empty : callable, optional
        Launches an empty kernel, to be timed in the same mode.
    rest_us : float
        The GPU is held at least so long before each sample, at most 5 ms. At its power limit a GPU trades clock for
        rest: where calls whose host parts differ are compared, one value beyond all of them gives each as much.

    Raises
    ------
    ValueError
        On the CPU machine, which models no time, and for arguments that make no sense.
    """
    check_request(machine, cache, timeout_s)
    check_counts(min_samples, max_samples)
    deadline = time.perf_counter() + timeout_s
    call = machine.capture(fn) if graph else fn
    hold_us = _warm_up(machine, call, cache, deadline, rest_us)
    samples, host, clocks, reason = [], [], [], ""
    while not reason:
        if len(samples) % CLOCK_EVERY == 0:
            clocks.append(machine.sm_clock_mhz())
        device_us, host_us = _sample(machine, call, cache, hold_us)
        samples.append(device_us)
        host.append(host_us)
        reason = _stop(samples, min_samples, max_samples, rel_noise, deadline)
    clocks.append(machine.sm_clock_mhz())
    return summarised(machine, samples, reason, host, clocks, cache, graph, empty)


def summarised(machine, samples, reason: str, host, clocks, cache: str, graph: bool, empty) -> Timing:
    """The timing that these samples and host times, in µs, and SM clocks, in MHz or None, amount to.

    The empty kernel, where there is one, is timed here.
    """
    q1, median, q3 = (float(x) for x in np.percentile(samples, (25, 50, 75)))
    return Timing(
        tuple(samples), median, q1, q3, min(samples), len(samples), reason, float(np.median(host)),
        _empty_us(machine, empty, cache, graph), *_summary(clocks), cache, "graph" if graph else "launch",
    )


def _summary(clocks: list[float | None]) -> tuple[float | None, float | None]:
    """(median, minimum) of the SM clock; None where the machine cannot tell."""
    known = [mhz for mhz in clocks if mhz is not None]
    return (float(np.median(known)), min(known)) if known else (None, None)


def _empty_us(machine, empty: Callable[[], object] | None, cache: str, graph: bool) -> float | None:
    if empty is None:
        return None
    call = machine.capture(empty) if graph else empty
    return float(np.median([_sample(machine, call, cache, 100.0)[0] for _ in range(EMPTY_SAMPLES)]))


def measure_pair(
    fn_a: Callable[[], object], fn_b: Callable[[], object], machine, *,
    settled: Callable[[Sequence[tuple[float, float]]], bool], max_pairs: int = 2000, timeout_s: float = 10.0,
    cache: str = "cold", graph: bool = False,
) -> PairTiming:
    """Time two calls in turn on a GPU, A B B A again and again, with every pair kept.

    Of a slow drift both calls get the same share: within one A B B A, a drift in a straight line adds as much
    to the two A as to the two B, and so does whatever favours the second call of a pair.

    Parameters
    ----------
    fn_a, fn_b : callable
        As `fn` of `measure`.
    settled : callable
        Told every pair so far, from time to time; true to stop.
    max_pairs : int
        At least 2; an odd number is rounded up to whole A B B A.
    timeout_s : float
        Host seconds for warm-ups and pairs together. One A B B A is always taken.
    machine, cache, graph
        As for `measure`.

    Raises
    ------
    ValueError
        On the CPU machine, which models no time, and for arguments that make no sense.
    """
    check_request(machine, cache, timeout_s)
    if max_pairs < 2:
        raise ValueError(f"max_pairs: expected at least 2, one A B B A, got {max_pairs}; allow more")
    deadline = time.perf_counter() + timeout_s
    calls = [machine.capture(fn) if graph else fn for fn in (fn_a, fn_b)]
    holds = [_warm_up(machine, call, cache, deadline) for call in calls]
    pairs, host_a, host_b, clocks, reason, look = [], [], [], [], "", 0.0
    while not reason:
        if len(pairs) % CLOCK_EVERY == 0:
            clocks.append(machine.sm_clock_mhz())
        a1, b1, b2, a2 = (_sample(machine, calls[side], cache, holds[side]) for side in (0, 1, 1, 0))
        pairs += [(a1[0], b1[0]), (a2[0], b2[0])]
        host_a += [a1[1], a2[1]]
        host_b += [b1[1], b2[1]]
        if len(pairs) >= look:
            reason, look = "settled" if settled(pairs) else "", LOOKS * len(pairs)
        late = "timeout" if time.perf_counter() >= deadline else ""
        reason = reason or late or ("max_pairs" if len(pairs) >= max_pairs else "")
    clocks.append(machine.sm_clock_mhz())
    return PairTiming(
        tuple(pairs), reason, float(np.median(host_a)), float(np.median(host_b)), *_summary(clocks), cache,
        "graph" if graph else "launch",
    )
