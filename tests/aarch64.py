"""The CPU machine of an aarch64 system, emulated: kernels by a cross compiler, child processes under qemu.

As a pytest plugin (`-p aarch64`) it makes every CPU machine of the process one of these.
"""
from __future__ import annotations

import atexit
import platform
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from unittest import mock

from cuattn import compilers, cpu, cpu_arena, cpu_process
from cuattn.paths import KERNELS

COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"  # where Debian's cross compiler keeps those of its programs
ARENA_BYTES = 1 << 30  # qemu keeps a note of every page


def why_not() -> str:
    """Empty where it works here, else the reason."""
    if platform.machine() in ("aarch64", "arm64"):
        return "this computer is an aarch64 itself: every other test runs on it"
    loader = Path(LIBRARIES) / "lib" / "ld-linux-aarch64.so.1"
    if not (shutil.which(COMPILER) and shutil.which(QEMU) and loader.exists()):
        return f"needs {COMPILER} and {QEMU} (Debian: apt install g++-aarch64-linux-gnu qemu-user)"
    return ""


@lru_cache
def driver() -> str:
    """The child's program, built once a process."""
    folder = tempfile.mkdtemp(prefix="cuattn-driver-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    binary, source = f"{folder}/driver", str(Path(__file__).parent / "simt_kernels" / "driver.cc")
    subprocess.run([COMPILER, "-std=c++20", "-O1", f"-I{KERNELS}", source, "-o", binary], check=True)
    return binary


class Emulated(cpu_process.Process):
    """A child process whose program is the driver."""

    count = 0

    @property
    def program(self):
        Emulated.count += 1
        return QEMU, "-L", LIBRARIES, driver()


@contextmanager
def emulation():
    """Machines opened inside, and kernels built for them, are those of an aarch64 system."""
    with (
        mock.patch.object(cpu, "Process", Emulated),
        mock.patch.object(cpu_arena, "ARENA_BYTES", (ARENA_BYTES,)),
        mock.patch.object(compilers, "host_compiler", lambda: (COMPILER,)),
        mock.patch.object(platform, "machine", lambda: "aarch64"),
    ):
        yield


def pytest_configure(config):
    if reason := why_not():
        raise RuntimeError(reason)
    config.emulation = emulation()  # NOTE: a context manager that nobody holds ends at once
    config.emulation.__enter__()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{Emulated.count} child processes ran on aarch64")
