"""Context lengths of real requests, read from a log, and the ragged batches a suite builds from them.

Three kinds of file are understood: the Azure LLM inference trace (CSV with ContextTokens and
GeneratedTokens), the Mooncake trace (one JSON object a line, with input_length and output_length), and a
plain column of integers.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from experiments.words import UserError

AZURE = ("ContextTokens", "GeneratedTokens")
MOONCAKE = ("input_length", "output_length")
LONGEST = 1 << 24  # a longer context is a misread file, not a request


def read_lengths(path: Path | str) -> list[int]:
    """Tokens in the cache when each request's last token is decoded: its input, and its output where known.

    Parameters
    ----------
    path : path
        An Azure CSV, a Mooncake JSONL, or one integer a line (a header line is allowed).

    Returns
    -------
    list of int
        In the file's order.

    Raises
    ------
    UserError
        Missing, unreadable or empty, of another kind, or with a line that holds no length.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(
            f"--lengths: {path} cannot be read ({error.strerror}); name a file of lengths"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"--lengths: {path} is not text in UTF-8; name an Azure CSV, a Mooncake JSONL or a "
            "column of integers"
        ) from error
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"--lengths: {path} is empty; it needs at least one length")
    if numbered[0][1].lstrip().startswith("{"):
        return [_mooncake(path, i, line) for i, line in numbered]
    if "," in numbered[0][1]:
        return _azure(path, numbered)
    return _column(path, numbered)


def _azure(path: Path, numbered: list[tuple[int, str]]) -> list[int]:
    header = [name.strip() for name in next(csv.reader([numbered[0][1]]))]
    if any(name not in header for name in AZURE):
        raise UserError(
            f"--lengths: {path} has the columns {', '.join(header)[:120]}; expected {' and '.join(AZURE)} "
            "(Azure), a Mooncake JSONL, or a single column of integers"
        )
    columns = [header.index(name) for name in AZURE]
    found = []
    for i, line in numbered[1:]:
        cells = next(csv.reader([line]))
        found.append(sum(_integer(path, i, cells[c] if c < len(cells) else "") for c in columns))
    if not found:
        raise UserError(f"--lengths: {path} has a header and no rows; it needs at least one request")
    return found


def _mooncake(path: Path, number: int, line: str) -> int:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"--lengths: {path}, line {number} is not JSON ({error}); is the file complete?"
        ) from error
    if not isinstance(record, dict) or any(name not in record for name in MOONCAKE):
        raise UserError(
            f"--lengths: {path}, line {number} has no {' and '.join(MOONCAKE)}; expected a Mooncake JSONL"
        )
    return sum(_integer(path, number, record[name]) for name in MOONCAKE)


def _column(path: Path, numbered: list[tuple[int, str]]) -> list[int]:
    first = numbered[0][1].strip()
    header = first.strip("\"'")[:1].isalpha()
    rows = numbered[1:] if header else numbered
    if not rows:
        raise UserError(f"--lengths: {path} holds no number; expected one length a line")
    return [_integer(path, i, line) for i, line in rows]


def _integer(path: Path, number: int, value) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or int(text) > LONGEST:
        raise UserError(
            f"--lengths: {path}, line {number}: expected a length from 0 to {LONGEST}, got {text[:40]!r}"
        )
    return int(text)


def batches(lengths: list[int], batch: int, count: int) -> list[list[int]]:
    """The first `count` batches of `batch` consecutive requests; a log shorter than that is one batch.

    Raises
    ------
    UserError
        `batch` is not positive.
    """
    if batch < 1:
        raise UserError(f"--batch: expected at least 1, got {batch}")
    whole = [lengths[i : i + batch] for i in range(0, len(lengths) - batch + 1, batch)]
    return whole[:count] or [lengths]
