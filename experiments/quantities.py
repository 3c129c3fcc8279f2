"""Sizes and counts as users write them and as tables print them. GB is 10⁹ bytes, GiB is 2³⁰."""

from __future__ import annotations

import re

from experiments.words import UserError

BYTE_UNITS = {
    **{"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
}
COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
TOKEN_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
MOST = 10**18
_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)


def _parse(text: str, option: str, units: dict[str, int], expected: str, least: int) -> int:
    match = _NUMBER.fullmatch(text)
    unit = {name.lower(): scale for name, scale in units.items()}.get(match[2].lower()) if match else None
    if unit is None:
        raise UserError(f"{option}: expected {expected}, got {text[:40]!r}")
    value = float(match[1]) * unit
    if not least <= value <= MOST:
        raise UserError(f"{option}: expected at least {least} and at most 10¹⁸, got {text[:40]!r}")
    return round(value)


def parse_bytes(text: str, option: str) -> int:
    """Bytes of "24GB", "80 GiB", …; a size without its unit is refused, since GB and GiB differ by 7 %.

    Raises
    ------
    UserError
        Not a size, no unit, or negative.
    """
    return _parse(text, option, BYTE_UNITS, "a size with its unit, such as 24GB (10⁹) or 24GiB (2³⁰)", 0)


def parse_tokens(text: str, option: str) -> int:
    """Tokens of "4096" or "32K": as in the names of context lengths, K is 1024 and M is 1024²."""
    return _parse(text, option, TOKEN_UNITS, "a number of tokens, such as 4096 or 32K (K is 1024)", 1)


def parse_count(text: str, option: str) -> int:
    """A count such as "70B" parameters: K, M, B and T are powers of 1000."""
    return _parse(text, option, COUNT_UNITS, "a count, such as 7B (10⁹) or 135M (10⁶)", 1)


def gb(size: float) -> str:
    """Bytes in decimal units: 10.7 GB, 131 kB."""
    sign, size = ("-" if size < 0 else ""), abs(size)
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * scale:
            value = size / scale
            return f"{sign}{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    return f"{sign}{size:.0f} B"


def gib(size: float) -> str:
    """Bytes in GiB: 141 GiB."""
    return f"{size / (1 << 30):.4g} GiB"
