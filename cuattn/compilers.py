"""The two compilers: a host C++ compiler for the CPU machine, and NVRTC for a GPU; their options and identity."""
from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from cuattn import sanitize
from cuattn import sources as tree
from cuattn.sources import CompileError

# NOTE: CuPy is not asked to compile: its own cache ignores the contents of headers reached through -I.
NVRTC_OPTIONS = ("-std=c++17", "-ftz=true", "-fmad=true", "-lineinfo", "--ptxas-options=-v",
                 "-default-device")
# NOTE: no fused multiply-add and no -march: equal bits on every CPU of an architecture.
HOST_OPTIONS = ("-std=c++20", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-strict-aliasing",
                "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fstack-clash-protection",
                "-DCUATTN_SIMT=1")
QUICK = "-DSIMT_QUICK=1"  # see simt/state.h


class CompilerMissing(RuntimeError):
    """No compiler for this target on this machine; the message says what to install."""


@lru_cache
def host_compiler() -> tuple[str, ...]:
    """The host C++ compiler's command: $CXX, c++, g++, clang++, or zig from PyPI.

    Raises
    ------
    CompilerMissing
        None of them is installed.
    """
    if chosen := os.environ.get("CXX"):
        return tuple(chosen.split())
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return (path,)
    try:
        import ziglang  # noqa: F401
    except ImportError:
        raise CompilerMissing("the CPU machine needs a C++20 compiler and found none of $CXX, c++, g++, "
                              "clang++; install one (Debian: apt install g++) or run: "
                              "pip install ziglang") from None
    return (sys.executable, "-m", "ziglang", "c++")


@lru_cache
def _host_identity(command: tuple[str, ...]) -> str:
    """Compiler version, architecture and the command's own flags: all decide what the binary contains."""
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerMissing(f"CXX: '{' '.join(command)}' does not run ({error}); "
                              "name a C++20 compiler") from None
    return " ".join([version.splitlines()[0], "on", platform.machine(), *command[1:]])


def _nvrtc():
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise CompilerMissing("compiling for a GPU needs CuPy with its NVRTC, and it does not load "
                              f"({error}); in the checkout run: pip install -e '.[cuda13]'") from None
    return nvrtc


@lru_cache
def nvrtc_identity(major: int, minor: int) -> str:
    """NVRTC tells major and minor; its package from PyPI, where there is one, the rest."""
    for package in (f"nvidia-cuda-nvrtc-cu{major}", "nvidia-cuda-nvrtc"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if version.startswith(f"{major}.{minor}."):  # else another NVRTC was loaded
            return f"nvrtc {version}"
    return f"nvrtc {major}.{minor}"


def _optimisation() -> tuple[str, ...]:
    """How hard the C++ compiler tries. Bits and counts are the same; `g` takes about a sixth of the time."""
    level = os.environ.get("CUATTN_CPU_OPTIMIZE") or "2"
    if level not in ("2", "g"):
        raise CompileError(f"CUATTN_CPU_OPTIMIZE: expected 2 or g, got {level!r}; change it or leave it out")
    return ("-O2",) if level == "2" else ("-Og", QUICK)


def compiler_of(target: str) -> tuple[tuple[str, ...], str]:
    """Options and compiler identity of a target."""
    if target == "cpu":
        options = (*HOST_OPTIONS, *_optimisation(), *sanitize.compile_options())
        return options, _host_identity(host_compiler())
    return NVRTC_OPTIONS + (f"-arch={target}",), nvrtc_identity(*_nvrtc().getVersion())


def compile_host(folder: Path, text: str, options, objects: Callable[[], list[Path]]) -> str:
    """`kernel.so` of the unit and of what is linked into it, which is asked for once the unit is compiled; the
    compiler's log."""
    (folder / "unit.cu").write_text(text, encoding="utf-8")
    unit = folder / "unit.o"
    log = _run_host([*options, f"-I{tree.KERNELS}", "-x", "c++", "-c", str(folder / "unit.cu"), "-o", str(unit)])
    log += _run_host([*options, str(unit), *map(str, objects()), "-o", str(folder / "kernel.so")])
    unit.unlink()
    return log


def object_options(options) -> tuple[str, ...]:
    """Those of a file that is linked into many kernels: it is built once, so it is built well."""
    return tuple("-O2" if option == "-Og" else option for option in options
                 if option not in ("-shared", QUICK))


def compile_object(folder: Path, file: str, options) -> str:
    """`object.o` of a file below `kernels_cu/`; the compiler's log."""
    return _run_host([*options, f"-I{tree.KERNELS}", "-c", str(tree.KERNELS / file),
                      "-o", str(folder / "object.o")])


def _run_host(arguments: list[str]) -> str:
    done = subprocess.run([*host_compiler(), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(_first_errors("the C++ compiler", done.stderr))
    return done.stderr


def compile_nvrtc(folder: Path, text: str, options) -> str:
    nvrtc = _nvrtc()
    (folder / "unit.cu").write_text(text, encoding="utf-8")
    # NOTE: NVRTC looks beside the unit first, and a bare name would lie in the working directory.
    program = nvrtc.createProgram(text, str(tree.KERNELS / "unit.cu"), (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*options, f"-I{tree.KERNELS}"))
        except nvrtc.NVRTCError:
            raise CompileError(_first_errors("NVRTC", nvrtc.getProgramLog(program))) from None
        log = nvrtc.getProgramLog(program)
        (folder / "kernel.cubin").write_bytes(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)
    if "setmaxnreg" in log and "ignored" in log:
        raise CompileError(_first_errors("ptxas ignored setmaxnreg", log))
    return log


def _first_errors(who: str, log: str, count: int = 4) -> str:
    lines = [line.strip() for line in log.splitlines() if "error" in line.lower()] or log.strip().splitlines()
    return f"{who} refused the source: " + " | ".join(lines[:count])


def ptxas_report(log: str) -> dict[str, dict[str, int]]:
    """Registers, spills and stack by entry, from `ptxas -v`."""
    report: dict[str, dict[str, int]] = {"registers": {}, "spill_bytes": {}}
    entry = None
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            entry = match.group(1)
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            report["spill_bytes"][entry] = int(match.group(1)) + int(match.group(2))
        elif match := re.search(r"Used (\d+) registers", line):
            report["registers"][entry] = int(match.group(1))
    return report
