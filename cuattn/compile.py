"""From a `.cu` file and its constants to a binary, through a cache whose key is the whole truth.

key = source and transitively included project headers (comments and white space aside) + constants + options
+ compiler version + target. An entry is a folder one can read: `unit.cu` as compiled, the binary, the
compiler's log, and `entry.json` with the key's parts. Entries are built in a temporary folder and renamed
into place, so racing processes are safe; an entry whose binary does not match its recorded digest is built
again.
"""
from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cuattn.paths import KERNELS

# NOTE: CuPy is not asked to compile: its own cache ignores the contents of headers reached through -I.
NVRTC_OPTIONS = ("-std=c++17", "-ftz=true", "-fmad=true", "-lineinfo", "--ptxas-options=-v",
                 "-default-device")
# NOTE: no fused multiply-add and no -march: equal bits on every CPU of an architecture.
HOST_OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-strict-aliasing",
                "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fstack-clash-protection",
                "-DCUATTN_SIMT=1")
TYPES = ("float16", "bfloat16", "float32")


class CompileError(RuntimeError):
    """The compiler refused the source; the message carries its first errors."""


class CompilerMissing(RuntimeError):
    """No compiler for this target on this machine; the message says what to install."""


@dataclass(frozen=True)
class Built:
    """A compiled kernel.

    Parameters
    ----------
    path : Path
        `kernel.cubin` (GPU) or `kernel.so` (CPU machine); one file may hold several entries.
    entry : str
        The kernel's name in it.
    target : str
        "cpu" or an architecture.
    source_hash : str
        12 hex digits of the kernel's source and headers alone, equal on both machines.
    registers, spill_bytes : int or None
        As ptxas reports them; None for the CPU machine.
    """

    path: Path
    entry: str
    target: str
    source_hash: str
    registers: int | None
    spill_bytes: int | None


def cache_folder() -> Path:
    """`$CUATTN_CACHE_DIR`, else `~/.cache/cuattn`, else a folder under the system's temporary one."""
    if chosen := os.environ.get("CUATTN_CACHE_DIR"):
        return Path(chosen)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cuattn"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    except OSError:
        pass  # a read-only home: the temporary folder below serves
    return Path(tempfile.gettempdir()) / f"cuattn-cache-{os.getuid()}"


# --- what a build is made of

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', re.S)
_ENTRY = re.compile(r"^KERNEL\([^)]*\)\s*(\w+)\s*\(", re.M)


def _without_comments(text: str) -> str:
    """Comments become blanks; line breaks stay, because reports name lines."""

    def blank(match: re.Match) -> str:
        token = match.group()
        return re.sub(r"[^\n]+", " ", token) if token.startswith("/") else token

    lines = _TOKEN.sub(blank, text).split("\n")
    return "\n".join(" ".join(line.split()) for line in lines)


def _without_lines(text: str) -> str:
    """The same text whatever its layout: only preprocessor lines keep their line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"(?m)^(\s*#.*)$", r"\1;;", text)).strip()


def source_path(file: str) -> Path:
    """The `.cu` itself: below `kernels_cu/`, or an absolute path for a kernel from outside."""
    path = Path(file) if os.path.isabs(file) else KERNELS / file
    if not path.is_file():
        raise CompileError(f"file: expected a CUDA source, got {file!r}, which does not exist; "
                           "check the kernel's row")
    return path


def sources(file: str, simt: bool = False) -> dict[str, str]:
    """The `.cu` and every project header it reaches, by name, comments removed.

    `simt` adds the CPU machine's headers, which are no part of the kernel.
    """
    found: dict[str, str] = {}
    todo = [(Path(file).name if os.path.isabs(file) else file, source_path(file))]
    while todo:
        name, path = todo.pop()
        if name in found:
            continue
        text = found[name] = _without_comments(path.read_text(encoding="utf-8"))
        for include in _INCLUDE.findall(text):
            if include.startswith("simt/") and not simt:
                continue
            beside, below = path.parent / include, KERNELS / include
            if below.is_file():
                todo.append((include, below))
            elif beside.is_file():
                local = beside.relative_to(KERNELS).as_posix() if beside.is_relative_to(KERNELS) else include
                todo.append((local, beside))
    return found


def source_hash(file: str) -> str:
    """12 hex digits over the kernel and its headers: the identity that measured rows carry."""
    parts = sorted((name, _without_lines(text)) for name, text in sources(file).items())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _declaration(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {'true' if value else 'false'};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    if isinstance(value, float):
        return f"constexpr float {name} = {value!r}f;"
    if value in TYPES:
        return f"using {name} = {'float' if value == 'float32' else value};"
    raise CompileError(f"constants: {name} must be an integer, a float, a bool or one of {TYPES}, "
                       f"got {value!r}")


def unit(file: str, constants: Mapping[str, Any], target: str) -> str:
    """The translation unit: constants, the kernel, and for the CPU machine its launch functions."""
    path = source_path(file)
    lines = [f"// {file} for {target}: written by cuattn/compile.py", '#include "prim/num.cuh"']
    lines += [_declaration(name, constants[name]) for name in sorted(constants)]
    lines.append(f'#include "{path.as_posix() if os.path.isabs(file) else file}"')
    if target == "cpu":
        lines += [f"SIMT_EXPORT({entry})" for entry in entries(file)]
    return "\n".join(lines) + "\n"


def entries(file: str) -> tuple[str, ...]:
    """Names of the kernels a file defines."""
    return tuple(_ENTRY.findall(_without_comments(source_path(file).read_text(encoding="utf-8"))))


# --- compilers


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
def _host_identity() -> str:
    """Compiler version and architecture: both decide what the binary contains."""
    try:
        version = subprocess.run([*host_compiler(), "--version"], capture_output=True, text=True,
                                 check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerMissing(f"CXX: '{' '.join(host_compiler())}' does not run ({error}); "
                              "name a C++20 compiler") from None
    return f"{version.splitlines()[0]} on {platform.machine()}"


def _nvrtc():
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise CompilerMissing("compiling for a GPU needs CuPy with its NVRTC, and it does not load "
                              f"({error}); run: pip install 'cuattn[cuda13]'") from None
    return nvrtc


def _options(target: str) -> tuple[tuple[str, ...], str]:
    """Options and compiler identity of a target."""
    if target == "cpu":
        return HOST_OPTIONS, _host_identity()
    return NVRTC_OPTIONS + (f"-arch={target}",), "nvrtc {}.{}".format(*_nvrtc().getVersion())


def _compile_host(folder: Path, text: str, options) -> str:
    (folder / "unit.cu").write_text(text, encoding="utf-8")
    command = [*host_compiler(), *options, f"-I{KERNELS}", "-x", "c++", str(folder / "unit.cu"),
               "-o", str(folder / "kernel.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(_first_errors("the C++ compiler", done.stderr))
    return done.stderr


def _compile_nvrtc(folder: Path, text: str, options) -> str:
    nvrtc = _nvrtc()
    (folder / "unit.cu").write_text(text, encoding="utf-8")
    program = nvrtc.createProgram(text, "unit.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*options, f"-I{KERNELS}"))
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


def _ptxas_report(log: str) -> dict[str, dict[str, int]]:
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


# --- the cache


def build(file: str, entry: str, constants: Mapping[str, Any], target: str) -> Built:
    """The kernel `entry` of `file` with `constants` compiled in, from the cache or built now.

    Parameters
    ----------
    file : str
        Below `kernels_cu/`, or absolute.
    entry : str
        Name of a `KERNEL` in the file.
    constants : mapping of str to int, float, bool or a dtype name
    target : str
        "cpu" or an architecture such as "sm_90a".

    Raises
    ------
    CompileError, CompilerMissing
    """
    options, compiler = _options(target)
    host = target == "cpu"
    layout = (lambda text: text) if host else _without_lines  # the CPU machine's reports name lines
    parts = {
        "sources": {n: hashlib.sha256(layout(t).encode()).hexdigest()
                    for n, t in sources(file, simt=host).items()},
        "constants": dict(sorted(constants.items())), "options": options, "compiler": compiler,
        "target": target, "root": str(KERNELS) if host else "",
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_folder() / f"{Path(file).stem}.{key}"
    record = _read_entry(folder)
    if record is None:
        record = _build_entry(folder, file, constants, target, options, parts)
    if entry not in record["entries"]:
        raise CompileError(f"entry: expected a kernel of {file} ({', '.join(record['entries'])}), "
                           f"got {entry!r}; mend the row")
    return Built(folder / record["binary"], entry, target, source_hash(file),
                 record["registers"].get(entry), record["spill_bytes"].get(entry))


def _read_entry(folder: Path) -> dict | None:
    """The entry's record, or None where it is missing, incomplete or damaged."""
    try:
        record = json.loads((folder / "entry.json").read_text())
        digest = hashlib.sha256((folder / record["binary"]).read_bytes()).hexdigest()
        return record if digest == record["digest"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build_entry(folder: Path, file: str, constants, target: str, options, parts) -> dict:
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        text = unit(file, constants, target)
        log = (_compile_host if target == "cpu" else _compile_nvrtc)(scratch, text, options)
        binary = "kernel.so" if target == "cpu" else "kernel.cubin"
        record = {"binary": binary, "digest": hashlib.sha256((scratch / binary).read_bytes()).hexdigest(),
                  "entries": entries(file), **_ptxas_report(log), "key": parts}
        (scratch / "log.txt").write_text(log)
        (scratch / "entry.json").write_text(json.dumps(record, indent=1))
        return _install(scratch, folder, record)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _install(scratch: Path, folder: Path, record: dict) -> dict:
    """Renames the new entry into place; another process may have been first, or have left a broken one."""
    for _ in range(3):
        try:
            os.rename(scratch, folder)
            return record
        except OSError:
            if (other := _read_entry(folder)) is not None:
                return other
            shutil.rmtree(folder, ignore_errors=True)
    raise CompileError(f"cache: could not replace {folder}; remove that folder, or set CUATTN_CACHE_DIR")
