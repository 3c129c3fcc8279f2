"""A smaller card on a larger one: a case that needs more memory than `--memory-limit` leaves ends as `oom`.

The cap is the limit less what is reserved for weights and the rest of a service. A case's use is its
inputs, outputs and scratch, and what a peer takes beside the pool. A GPU's use is *measured*: the memory pool
may hold no more than the cap, and the peak of one run is judged once more with what lies outside the pool. On
the CPU machine the closed form is judged first (*modelled*), because a laptop need not hold what it refuses;
then its arena is capped and *counted*. The check and the timer are no part of the case, and run without it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.quantities import gb, parse_bytes
from experiments.words import UserError

LIMIT, RESERVE = "memory_limit_bytes", "memory_reserve_bytes"


class OverLimit(MemoryError):
    """The case needs more than the cap; the message says what for, and how much was left."""


@dataclass(frozen=True)
class Cap:
    """What one case may use, in bytes: `limit` less `reserve`."""

    limit: int
    reserve: int

    @property
    def bytes(self) -> int:
        return self.limit - self.reserve

    @property
    def words(self) -> str:
        """"24.0 GB" or "24.0 GB less 18.0 GB"."""
        return gb(self.limit) + (f" less {gb(self.reserve)}" if self.reserve else "")

    def __str__(self) -> str:
        return f"the memory limit of {self.words}" + " reserved" * bool(self.reserve)


def parameters(limit: str | None, reserve: str | None) -> dict[str, int]:
    """What `--memory-limit` and `--reserve` add to a case's parameters; nothing without a limit.

    Raises
    ------
    UserError
        No sizes with their units, a reserve without a limit, or one that leaves nothing of it.
    """
    if limit is None:
        if reserve is not None:
            raise UserError("--reserve: is taken off --memory-limit; name that too, such as 24GB")
        return {}
    most = parse_bytes(limit, "--memory-limit")
    kept = 0 if reserve is None else parse_bytes(reserve, "--reserve")
    if most < 1:
        raise UserError(f"--memory-limit: expected more than nothing, got '{limit}'; name a card's memory, "
                        "such as 24GB")
    if kept >= most:
        raise UserError(f"--reserve: expected less than the memory limit of {gb(most)}, got {gb(kept)}; "
                        "nothing would be left for attention")
    return {LIMIT: most, RESERVE: kept}


def cap_of(params: Mapping[str, Any]) -> Cap | None:
    """The case's cap, where it has one."""
    return None if params.get(LIMIT) is None else Cap(params[LIMIT], params[RESERVE])


class Room:
    """The memory of one case: measures it on a GPU, and holds it to its cap where it has one.

    Parameters
    ----------
    machine : Machine
    params : mapping
        The case's parameters.
    row : dict
        Gets the columns that say what was used and how that is known.
    """

    def __init__(self, machine, params: Mapping[str, Any], row: dict[str, Any]):
        self._machine, self._params, self._row = machine, params, row
        self._gpu, self._cap = machine.name == "gpu", cap_of(params)
        if self._gpu:
            self._fresh()

    def __enter__(self) -> Room:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._cap is None:
            return
        self._machine.lift_limit()
        if kind is not None and "Memory" in kind.__name__ and not isinstance(error, OverLimit):
            error.add_note(f"(a case may use {gb(self._cap.bytes)}, {self._cap})")

    def _fresh(self, limit: int | None = None) -> None:
        """Forget temporaries, and count memory from here."""
        gc.collect()
        self._machine.reset_peak(limit)

    def foresee(self) -> None:
        """On the CPU machine: judge the closed form before anything is allocated.

        Raises
        ------
        OverLimit
        """
        need = self._row.get("modelled_peak_bytes")
        if self._cap is None or self._gpu or need is None or need <= self._cap.bytes:
            return
        self._row["memory_known_by"] = "modelled"
        scratch = self._row["modelled_scratch_bytes"]
        left = self._cap.bytes - (need - scratch)
        if left < 0:
            raise OverLimit(f"inputs and outputs of {gb(need - scratch)} do not fit into "
                            f"{gb(self._cap.bytes)}, {self._cap}")
        raise OverLimit(f"scratch of {gb(scratch)} does not fit into the {gb(left)} that inputs and outputs "
                        f"leave of {gb(self._cap.bytes)}, {self._cap}")

    def open(self, arrays: Mapping[str, Any]) -> None:
        """The inputs are there: what is allocated from now on may be as much as they leave.

        Raises
        ------
        OverLimit
        """
        if self._cap is None:
            if self._gpu:
                self._fresh()
            return
        self._row["memory_known_by"] = "measured" if self._gpu else "counted"
        inputs = sum(array.nbytes for array in arrays.values())
        left = self._cap.bytes - inputs
        if left < 0:
            raise OverLimit(f"inputs of {gb(inputs)} do not fit into {gb(self._cap.bytes)}, {self._cap}")
        if self._gpu and self._params["family"] in ("cache", "pages"):  # the check keeps copies in the pool
            left += arrays["k_cache"].nbytes + arrays["v_cache"].nbytes
        self._fresh(left)

    def judge(self, subject) -> None:
        """After a run: its peak, which may not be above the cap; from here on there is no limit.

        Raises
        ------
        OverLimit
        """
        if not self._gpu and self._cap is None:
            return
        outside = subject.outside_bytes()
        peak = subject.input_bytes() + self._machine.peak_pool_bytes() - subject.kept_bytes() + outside
        self._machine.lift_limit()
        if self._gpu:
            self._row |= {"measured_peak_pool_bytes": peak,
                          "measured_device_used_bytes": self._machine.used_bytes()}
        else:
            self._row["counted_peak_bytes"] = peak
        if self._cap is not None and peak > self._cap.bytes:
            beside = f", {gb(outside)} of it outside the pool," if outside else ""
            raise OverLimit(f"a peak of {gb(peak)}{beside} is above {gb(self._cap.bytes)}, {self._cap}")
