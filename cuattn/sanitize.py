"""The CPU machine under AddressSanitizer, where $CUATTN_CPU_SANITIZE is `address`.

Kernels are then built with it, and each child process starts with its library loaded before all others.
"""
from __future__ import annotations

import os
import re
import subprocess
from functools import lru_cache
from pathlib import Path

from cuattn.machine import MachineUnavailable

VARIABLE = "CUATTN_CPU_SANITIZE"
OPTIONS = {"": (), "address": ("-fsanitize=address", "-g1", "-O1")}  # -O1 builds in two thirds of the time
# Leaks are Python's; faults go to the machine's own handler, which names arrays; fibers have one stack each.
RUNTIME = ("detect_leaks=0:detect_stack_use_after_return=0:handle_segv=0:handle_sigbus=0:handle_sigfpe=0:"
           "handle_sigill=0:print_legend=0")


def sanitizer() -> str:
    """The sanitizer asked for, "" where there is none.

    Raises
    ------
    ValueError
        It is not one that the machine knows.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in OPTIONS:
        raise ValueError(f"{VARIABLE}: expected 'address' or nothing, got {asked!r}")
    return asked


def compile_options() -> tuple[str, ...]:
    """What the host compiler is told beyond the usual."""
    return OPTIONS[sanitizer()]


def child_environment(compiler: tuple[str, ...]) -> dict[str, str]:
    """The environment of a child process whose kernels come from this compiler.

    Raises
    ------
    ValueError
        See `sanitizer`.
    MachineUnavailable
        The compiler has no libasan.so.
    """
    environment = dict(os.environ)
    if sanitizer():
        loaded = [str(library(compiler)), *filter(None, [environment.get("LD_PRELOAD")])]
        environment["LD_PRELOAD"] = ":".join(loaded)
        environment["ASAN_OPTIONS"] = ":".join([RUNTIME, *filter(None, [environment.get("ASAN_OPTIONS")])])
    return environment


@lru_cache
def library(compiler: tuple[str, ...]) -> Path:
    """AddressSanitizer's shared library, as the compiler finds it.

    Raises
    ------
    MachineUnavailable
        The compiler has none.
    """
    asked = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True)
    path = Path(asked.stdout.strip())
    try:
        if not path.read_bytes().startswith(b"\x7fELF"):  # a linker script: INPUT ( /usr/lib64/libasan.so.8 )
            path = Path(re.search(r"INPUT\s*\(\s*(\S+)", path.read_text()).group(1))
            path.stat()
    except (OSError, UnicodeDecodeError, AttributeError):
        raise MachineUnavailable(
            f"{VARIABLE}: expected a compiler with libasan.so, and '{' '.join(compiler)}' has none; "
            "install g++ with its libasan and set CXX=g++"
        ) from None
    return path
