"""The tolerance, and what the comparison of one output with its reference found.

The yardstick is not a constant but the dense computation in the same dtype, or for a kernel that rounds its
sum at each chunk of keys the same in NumPy: a kernel may be off by at most twice what that is off against
float64, plus an eighth of the dtype's step at the largest value. NaN and infinities must sit exactly where
the reference has them.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from cuattn.dense import eps
from cuattn.reference import widen

LSE_ABSOLUTE, LSE_RELATIVE = 1e-5, 2.0**-21


class Mismatch(AssertionError):
    """A kernel's output is outside the tolerance; the message names the worst element."""


@dataclass(frozen=True)
class Verdict:
    """What the comparison found.

    Parameters
    ----------
    ok : bool
    max_err, tol : float
        Largest |O − reference| and what was allowed.
    lse_err, lse_tol : float or None
        The same for the log-sum-exp, at its worst element; None where there is none.
    worst_index : tuple of int
        (b, m, h, d) of the worst element of O, or of the first misplaced NaN or infinity.
    message : str
        One sentence; says what was compared even when all is well.
    check : {"full", "sampled"}
    """

    ok: bool
    max_err: float
    tol: float
    lse_err: float | None
    lse_tol: float | None
    worst_index: tuple[int, ...]
    message: str
    check: str = "full"

    def raise_if_bad(self) -> Verdict:
        """Itself, or `Mismatch` if not ok."""
        if not self.ok:
            raise Mismatch(self.message)
        return self


def array_module(x):
    """numpy or cupy, whichever made `x`; cupy is never imported here."""
    return np if isinstance(x, np.ndarray) else sys.modules[type(x).__module__.split(".")[0]]


def misplaced(got, want, xp):
    """Flat index of the first NaN or infinity that only one side has, and their number; None if none."""
    differ = (xp.isnan(got) != xp.isnan(want)) | (xp.isposinf(got) != xp.isposinf(want))
    differ |= xp.isneginf(got) != xp.isneginf(want)
    count = int(differ.sum())
    return (int(differ.argmax()), count) if count else None


def distance(got, want, xp):
    """|got − want|, and 0 where either is not finite."""
    finite = xp.isfinite(got) & xp.isfinite(want)
    return xp.abs(xp.where(finite, got, 0.0) - xp.where(finite, want, 0.0))


def index_of(flat: int, shape, rows) -> tuple[int, ...]:
    """The element's index in the whole array; `rows` are the (b, m, h) of each compared row."""
    at = tuple(int(i) for i in np.unravel_index(flat, shape))
    return at if rows is None else (*(int(i) for i in rows[at[0]]), *at[1:])


def letters_of(index, letters: str) -> str:
    if len(index) != len(letters):
        return f"index {index}"
    return ", ".join(f"{letter}={i}" for letter, i in zip(letters, index))


def _misplaced_message(name, found, got, want, where) -> str:
    flat, count = found
    return (
        f"{name}: {count} NaN or infinite values differ from the reference, the first at {where}: "
        f"got {float(got.ravel()[flat]):g}, expected {float(want.ravel()[flat]):g}"
    )


def check_lse(lse, lse_ref, lse_dense, rows):
    """(ok, err, tol, message) of the log-sum-exp at its worst element; all is well without one."""
    if lse is None:
        return True, None, None, ""
    xp = array_module(lse)
    got, want = widen(lse), widen(lse_ref)
    letters = "bhm" if rows is None else "bmh"

    def at(flat):
        return letters_of(index_of(flat, got.shape, rows), letters)

    if got.size == 0:
        return True, 0.0, LSE_ABSOLUTE, ""
    found = misplaced(got, want, xp)
    if found:
        return False, float("nan"), 0.0, _misplaced_message("LSE", found, got, want, at(found[0]))
    slack = 0.0 if lse_dense is None else 2 * float(distance(widen(lse_dense), want, xp).max())
    err = distance(got, want, xp)
    tol = LSE_ABSOLUTE + LSE_RELATIVE * xp.abs(xp.where(xp.isfinite(want), want, 0.0)) + slack
    flat = int((err - tol).argmax())
    worst, allowed = float(err.ravel()[flat]), float(tol.ravel()[flat])
    ok = worst <= allowed
    message = "" if ok else (
        f"LSE: error {worst:.3g} exceeds {allowed:.3g} at {at(flat)}: "
        f"got {float(got.ravel()[flat]):.8g}, expected {float(want.ravel()[flat]):.8g}"
    )
    return ok, worst, allowed, message


def check(o, lse, *, o_ref, lse_ref, o_dense, v_max, dtype, lse_dense=None, rows=None) -> Verdict:
    """Compare one output with its reference.

    Parameters
    ----------
    o : (B, M, H, D), or (S, D) for sampled rows
    lse : (B, H, M), or (S,); None if the kernel returns none
    o_ref, lse_ref : same shapes, float64
    o_dense : same shape
        The dense same-dtype computation, or the chunked one (`cuattn.dense`); sets the tolerance
        2 · max|o_dense − o_ref| + (eps/8) · v_max.
    v_max : float
        Largest |V|.
    dtype : str
        The inputs' dtype, whose eps is meant.
    lse_dense : array, optional
        Given for kernels that round scores to the input dtype: their LSE may be off by twice as much as this.
    rows : (S, 3) int, optional
        (b, m, h) of each sampled row.
    """
    if tuple(o.shape) != tuple(o_ref.shape):
        raise ValueError(
            f"o: expected shape {tuple(o_ref.shape)} as in the reference, got {tuple(o.shape)}; pass all"
        )
    xp = array_module(o)
    lse_ok, lse_err, lse_tol, lse_message = check_lse(lse, lse_ref, lse_dense, rows)
    kind = "full" if rows is None else "sampled"
    got, want = widen(o), widen(o_ref)
    if got.size == 0:
        return Verdict(lse_ok, 0.0, 0.0, lse_err, lse_tol, (), lse_message or "O is empty", kind)
    tol = 2 * float(distance(widen(o_dense), want, xp).max()) + eps(dtype) / 8 * float(v_max)
    found = misplaced(got, want, xp)
    if found:
        index = index_of(found[0], got.shape, rows)
        message = _misplaced_message("O", found, got, want, letters_of(index, "bmhd"))
        return Verdict(False, float("nan"), tol, lse_err, lse_tol, index, message, kind)
    err = distance(got, want, xp)
    flat = int(err.argmax())
    index, worst = index_of(flat, got.shape, rows), float(err.ravel()[flat])
    ok = worst <= tol
    message = (
        f"O: max error {worst:.3g} {'within' if ok else 'exceeds'} {tol:.3g} at {letters_of(index, 'bmhd')}: "
        f"got {float(got.ravel()[flat]):.8g}, expected {float(want.ravel()[flat]):.8g}"
    )
    if not lse_ok:
        message = lse_message if ok else f"{message}; {lse_message}"
    return Verdict(ok and lse_ok, worst, tol, lse_err, lse_tol, index, message, kind)
