"""Writing that survives: files replaced whole, journals whose every line is on the disk before the next."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.schema import SCHEMA_VERSION, encode

_HALF = re.compile(r"\.(manifest\.json|part\.parquet)\.\d+")  # what `write_atomic` names them
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class StoreError(RuntimeError):
    """The store cannot be written; the message says which file and why. What was written before stays."""


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Write a hidden file beside `path` and rename it: a reader sees the old file or the new, never a half.

    Raises
    ------
    StoreError
        The disk is full or the folder cannot be written.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(hidden)
        with open(hidden, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(hidden, path)
        sync_folder(path.parent)
    except OSError as error:
        raise StoreError(_write_reason(path, error)) from error
    finally:
        hidden.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the hidden halves that writers killed in `write_atomic` left; for a folder's only writer."""
    for path in folder.glob(".*.*"):
        if _HALF.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Put a folder's own entries on the disk; until then a new file may lose its name to a power cut.

    Folders that cannot be synchronised, as on some network file systems, are left to their system.

    Raises
    ------
    OSError
        The disk fails or is full.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.EIO, *_NO_ROOM):
            raise


class Journal:
    """An append-only file of rows: each is on the disk when `append` returns. One writer, so no locks."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._handle = open(path, "ab", buffering=0)
            # After a kill the last line may be torn; starting a new one keeps the damage to that line.
            if self._handle.tell() > 0 and not _ends_with_newline(path):
                self._write(b"\n")
            sync_folder(path.parent)
        except OSError as error:
            raise StoreError(_write_reason(path, error)) from error

    def append(self, row: dict[str, Any]) -> None:
        """Write one row and fsync.

        Raises
        ------
        StoreError
            The disk is full or the file cannot be written.
        """
        plain = {"schema_version": SCHEMA_VERSION, **encode(row)}
        line = json.dumps(plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            self._write(line)
        except OSError as error:
            raise StoreError(_write_reason(self.path, error)) from error

    def _write(self, data: bytes) -> None:
        while data:  # a raw write may be short, on a disk that is nearly full for one
            data = data[self._handle.write(data) :]
        try:
            os.fsync(self._handle.fileno())
        except OSError as error:
            if error.errno != errno.EINVAL:  # pipes and character devices cannot be synchronised
                raise

    def close(self) -> None:
        self._handle.close()


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as handle:
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) == b"\n"


def _write_reason(path: Path, error: OSError) -> str:
    if error.errno in _NO_ROOM:
        return f"{path}: the disk is full; free some space, then resume the run (what was measured is kept)"
    reason = os.strerror(error.errno) if error.errno else error  # Arrow's own words name the hidden half
    advice = ""
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        advice = f"; make {path.parent} writable, or name another folder"
    return f"{path}: cannot be written ({reason}){advice}"
