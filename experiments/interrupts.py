"""What Ctrl-C means: one sentence while the program still loads, an exception once a command runs."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager

INTERRUPTED = 130  # the exit code


def _leave(number, frame) -> None:
    os.write(2, b"Stopped before anything began.\n")
    os._exit(INTERRUPTED)  # an exception would end as a traceback through whatever is being imported


def leave_at_once() -> None:
    """From now on an interrupt ends the process, unless interrupts are ignored altogether."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def held():
    """Interrupts wait for the end of the block; a process started in it sees none until it asks for them."""
    pressed: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    ours = callable(handler) and threading.current_thread() is threading.main_thread()
    # NOTE: the mask is for processes that inherit it. Here another thread, of a library, may take the signal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if ours:
        signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pressed:
            handler(signal.SIGINT, None)


def ignore() -> None:
    """From now on interrupts mean nothing: the process is on its way out, and leaves nothing half done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def raise_again() -> None:
    """From now on an interrupt is a KeyboardInterrupt, as usual."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
