"""One runner at a time: advisory locks that die with whoever holds them.

A lock is `flock` on a file that names its holder. The system drops it when the last process that has the file
open is gone, however that ended, so no lock is ever stale. The file itself may stay behind after a kill, and
means nothing then.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing import reduction
from pathlib import Path

from experiments.words import UserError

POLL_S = 0.2
GRACE_S = 10.0  # a killed runner's worker may take this long to leave its GPU


class Busy(UserError):
    """Somebody else holds it; the message says who."""


@dataclass
class Lock:
    """A lock that is held, or the word why there is none.

    Attributes
    ----------
    path : Path
    handle : int or None
        The open file; a process that inherits it holds the lock as well.
    notice : str
        Why nothing is locked: the file system knows no locks, or takes no file. Empty where it is.
    """

    path: Path
    handle: int | None
    notice: str = ""

    def release(self) -> None:
        """Give it up, and remove its file."""
        if self.handle is not None:
            self.path.unlink(missing_ok=True)
            os.close(self.handle)
            self.handle = None


class Inherited:
    """An open file as an argument of a spawned process, which gets its number and keeps it open."""

    def __init__(self, handle: int):
        self._handle = handle

    def __reduce__(self):
        return _detach, (reduction.DupFd(self._handle),)


def _detach(copy) -> int:
    return copy.detach()


def take(path: Path, what: str, advice: str, waiting: Callable[[str], None] | None = None) -> Lock:
    """Take the lock on a file, which is made if need be.

    Parameters
    ----------
    path : Path
    what : str
        What the lock stands for, such as "runs/quick"; it opens every sentence.
    advice : str
        What to do about another holder; it closes the sentence.
    waiting : callable, optional
        Without it a lock that is held is refused. With it the holder is waited for, and `waiting` told once.

    Raises
    ------
    Busy
        Another process holds it; one sentence that names its number and host.
    """
    patience, told = time.monotonic() + GRACE_S, False
    while True:
        try:
            handle = _try(path)
        except BlockingIOError:
            holder = _holder(path)
            if waiting is None and not (_gone(holder) and time.monotonic() < patience):
                raise Busy(f"{what} is held by {_named(holder)}; {advice}") from None
            if waiting is not None and not told:
                waiting(f"{what} is held by {_named(holder)}; waiting for it")
                told = True
            time.sleep(POLL_S)
            continue
        except OSError as error:
            why = error.strerror or str(error)
            return Lock(path, None, f"{what} cannot be locked here ({why}): let nothing else work with it")
        if handle is not None:
            return Lock(path, handle)


def _try(path: Path) -> int | None:
    """The locked file; None where its last holder removed it in between."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _still_there(path, handle):
            os.close(handle)
            return None
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        os.truncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _still_there(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> dict:
    """What the file says of its holder; {} where that has not written it yet."""
    for _ in range(5):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(said, dict):
                return said
        except (OSError, ValueError):
            pass
        time.sleep(0.02)
    return {}


def _named(holder: dict) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"


def _gone(holder: dict) -> bool:
    """Whether the holder has died on this host, so that only what it started can still hold the lock."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
