"""What Ctrl-C means: one sentence while the program still loads, an exception once a command runs."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130  # the exit code


def _leave(number, frame) -> None:
    os.write(2, b"Stopped before anything began.\n")
    os._exit(INTERRUPTED)  # an exception would end as a traceback through whatever is being imported


def leave_at_once() -> None:
    """From now on an interrupt ends the process, unless interrupts are ignored altogether."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def ignore() -> None:
    """From now on interrupts mean nothing: the process is on its way out, and leaves nothing half done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def raise_again() -> None:
    """From now on an interrupt is a KeyboardInterrupt, as usual."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
