"""The parent's side of one process of the CPU machine: start it, ask it, and say of what it died."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cuattn import cpu_child
from cuattn.cpu_arena import Arena


class Process:
    """A child process and the pipes to it.

    Parameters
    ----------
    arena : Arena
    window : int
        Where its device addresses begin.
    environment : dict of str to str, optional
        Default: that of this process.
    """

    program = (sys.executable, "-S", "-E", str(Path(cpu_child.__file__).resolve()))

    def __init__(self, arena: Arena, window: int, environment: dict[str, str] | None = None):
        self._stderr = tempfile.TemporaryFile()
        numbers = [str(n) for n in (arena.fd, arena.size, window, os.getpid())]
        self.process = subprocess.Popen(
            [*self.program, *numbers], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            pass_fds=(arena.fd,), bufsize=0, env=environment,
        )

    def send(self, request: dict) -> None:
        body = json.dumps(request).encode()
        try:
            self.process.stdin.write(cpu_child.REQUEST.pack(len(body)) + body)
        except BrokenPipeError:
            pass  # it has died; `receive` says of what

    def receive(self) -> tuple[int, bytes]:
        """The reply's kind and bytes; a child that has died gives FAULT with the reason."""
        fd = self.process.stdout.fileno()
        head = cpu_child.read_exactly(fd, cpu_child.REPLY.size)
        if head is not None:
            kind, size = cpu_child.REPLY.unpack(head)
            payload = cpu_child.read_exactly(fd, size)
            if payload is not None:
                return kind, payload
        return cpu_child.FAULT, self._last_words().encode()

    def _last_words(self) -> str:
        code = self.process.wait()
        self._stderr.seek(0)
        tail = self._stderr.read().decode(errors="replace").strip()[-2000:]
        if code == -9:
            return "the CPU machine's process was killed (signal 9), likely out of memory"
        cause = f"signal {-code}" if code < 0 else f"exit status {code}"
        return f"the CPU machine's process ended ({cause})" + (f": {tail}" if tail else "")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self._stderr.close()


def stop_all(processes: list[Process]) -> None:
    while processes:
        processes.pop().stop()
