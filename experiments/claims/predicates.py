"""The tests themselves: pure functions of numbers. Every comparison is written so that NaN fails it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

WORDS_UP_DOWN = ("up", "down")


def within(value: float, low: float | None, high: float | None) -> bool:
    """Whether low ≤ value ≤ high; a bound that is None holds for every number."""
    return (low is None or value >= low) and (high is None or value <= high) and not math.isnan(value)


def equals(value: float, expected: float, tolerance: float) -> bool:
    """Whether the value is within `tolerance`, relative, of what is expected."""
    return abs(value - expected) <= tolerance * abs(expected)


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of the straight line of least squares through (log x, log y); all must be above 0.

    y = c · x^slope is a straight line there.
    """
    u, v = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    spread = sum((a - mean_u) ** 2 for a in u)
    return sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v)) / spread


def best_at(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The x of the highest y; of equal ones the smallest."""
    return min(x for x, y in zip(xs, ys) if y == max(ys))


def multiple(x: float, of: Collection[float]) -> bool:
    """Whether x is a whole multiple of each."""
    return all(x % one == 0 for one in of)


def inside(x: float, xs: Sequence[float]) -> bool:
    """Whether x lies strictly between the ends."""
    return min(xs) < x < max(xs)


def monotone(ys: Sequence[float], direction: str, gain: float, tolerance: float) -> bool:
    """Whether y goes up (or down) from the first to the last, in their order.

    Parameters
    ----------
    ys : sequence of float
        All above 0.
    direction : {"up", "down"}
    gain : float
        By how much, relative, the last must exceed the first (going down: the first the last).
    tolerance : float
        By how much, relative, a single step may go the other way.
    """
    ys = list(ys) if direction == "up" else list(reversed(ys))
    steps = all(b >= a * (1 - tolerance) for a, b in zip(ys, ys[1:]))
    return steps and ys[-1] >= ys[0] * (1 + gain)
