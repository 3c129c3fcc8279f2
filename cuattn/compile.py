"""From a `.cu` file and its constants to a binary, through a cache whose key is the whole truth.

key = translation unit + source and transitively included project headers (comments and white space aside) +
constants + options + compiler version + target. The CPU machine itself, which no constant changes, is built
once as an object that is linked into its kernels; it is part of their key. An entry is a folder one can read:
`unit.cu` as compiled, the binary, the compiler's log, and `entry.json` with the key's parts. Entries are
built in a temporary folder and renamed into place, so racing processes are safe; an entry whose binary does
not match its recorded digest is built again. A process reads and checks an entry once, and again when its
files' times or sizes have changed.
"""
from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuattn import sources as tree
from cuattn.compilers import (
    CompilerMissing,
    compile_host,
    compile_nvrtc,
    compile_object,
    compiler_of,
    host_compiler,
    object_options,
    ptxas_report,
)
from cuattn.sources import CompileError, Sources, entries, source_hash, source_path, sources, stamp

STAMPS = "prim/busy.cuh"
# NOTE: float8_e4m3 is declared here and stays incomplete: kernels move bytes and know its name.
TYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "int8": "int8_t",
         "float8_e4m3": "struct float8_e4m3"}
RECORD = {"binary": str, "digest": str, "entries": list, "registers": dict, "spill_bytes": dict}

__all__ = ["Built", "CompileError", "CompilerMissing", "build", "cache_folder", "entries", "host_compiler",
           "linked_object", "source_hash", "sources", "unit"]


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
    """`$CUATTN_CACHE_DIR`, else `~/.cache/cuattn`, else a folder under the system's temporary one.

    Raises
    ------
    CompileError
        The last one exists and is another user's, who could have put any binary there.
    """
    if chosen := os.environ.get("CUATTN_CACHE_DIR"):
        return Path(chosen)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cuattn"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    except OSError:
        pass  # a read-only home: the temporary folder below serves
    folder = Path(tempfile.gettempdir()) / f"cuattn-cache-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass  # whose it is, is asked next
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise CompileError(f"cache: expected {folder} to be a folder of yours, got another user's; "
                           "set CUATTN_CACHE_DIR to a folder of yours")
    return folder


# --- the translation unit


def _declaration(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {'true' if value else 'false'};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    if isinstance(value, float):
        return f"constexpr float {name} = {value!r}f;"
    if value in TYPES:
        return f"using {name} = {TYPES[value]};"
    raise CompileError(f"constants: {name} must be an integer, a float, a bool or one of {tuple(TYPES)}, "
                       f"got {value!r}")


def unit(
    file: str, constants: Mapping[str, Any], target: str, table: str = "", stamped: bool = False
) -> str:
    """The translation unit: constants, the kernel, and for the CPU machine its launch functions.

    With a `table`, C++ text that exports what the compiler knows of the file's types, the kernels themselves
    are dropped. `stamped`: warps note when they begin and end, see prim/busy.cuh.
    """
    path = source_path(file)
    lines = [f"// {file} for {target}: written by cuattn/compile.py", f'#include "{tree.IMPLICIT}"']
    lines += [_declaration(name, constants[name]) for name in sorted(constants)]
    if table:  # what nobody calls is not compiled
        lines += ["#undef KERNEL", "#define KERNEL(...) static void"]
    if stamped:  # as text, so that the key holds both
        for text in ((tree.KERNELS / STAMPS).read_text("utf-8"),
                     tree.begun_with(path.read_text("utf-8"), "const Busy busy_now;")):
            lines.append(text.replace("#pragma once", ""))
    else:
        lines.append(f'#include "{path.as_posix() if os.path.isabs(file) else file}"')
    if table:
        lines.append(table)
    elif target == "cpu":
        lines += [f"SIMT_EXPORT({entry})" for entry in entries(file)]
    return "\n".join(lines) + "\n"


# --- the cache


def build(
    file: str, entry: str, constants: Mapping[str, Any], target: str, table: str = "", stamped: bool = False
) -> Built:
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
    table : str
        See `unit`; what it exports takes the kernels' place.
    stamped : bool
        See `unit`; an own binary, of the same source hash. A file outside `kernels_cu/` must then name its
        own headers by absolute paths.

    Raises
    ------
    CompileError, CompilerMissing
    """
    made_of, (options, compiler), cache = sources(file), compiler_of(target), cache_folder()
    # NOTE: constants as text: True, 1 and 1.0 are equal in Python and compile to different units.
    call = (file, repr(sorted(constants.items())), target, str(cache), str(tree.KERNELS), options, compiler,
            table, stamped)
    known = _folders.get(call)
    if known is None or known[0] is not made_of:
        parts = _key_parts(file, constants, target, made_of, options, compiler, table, stamped)
        known = _folders[call] = made_of, cache / f"{Path(file).stem}.{_key(parts)}", parts
    _, folder, parts = known
    record = _read_entry(folder) or _build_kernel(folder, file, target, made_of, parts)
    if entry not in record["entries"]:
        raise CompileError(f"entry: expected a kernel of {file} ({', '.join(record['entries'])}), "
                           f"got {entry!r}; mend the row")
    return Built(folder / record["binary"], entry, target, made_of.source_hash,
                 record["registers"].get(entry), record["spill_bytes"].get(entry))


_folders: dict[tuple, tuple[Sources, Path, dict]] = {}  # a call's folder and key, while its sources are these
_verified: dict[Path, tuple[dict, tuple]] = {}  # records whose binary was hashed, with their files' stamps


def _key_parts(file, constants, target, made_of: Sources, options, compiler, table: str, stamped) -> dict:
    host = target == "cpu"
    return {
        "unit": unit(file, constants, target, table, stamped),
        "sources": made_of.lines if host else made_of.texts,  # the CPU machine's reports name lines
        "constants": dict(sorted(constants.items())), "options": options, "compiler": compiler,
        "target": target, "root": str(tree.KERNELS) if host else "",
    }


def _key(parts: dict) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _stamps(folder: Path, record: dict) -> tuple:
    return stamp(f"{folder}/entry.json"), stamp(f"{folder}/{record['binary']}")


def _read_entry(folder: Path) -> dict | None:
    """The entry's record, or None where it is missing, incomplete or damaged."""
    if folder in _verified:
        record, stamps = _verified[folder]
        if stamps == _stamps(folder, record):
            return record
    try:
        record = json.loads((folder / "entry.json").read_text())
        if not all(isinstance(record[name], kind) for name, kind in RECORD.items()):
            return None
        stamps = _stamps(folder, record)
        digest = hashlib.sha256((folder / record["binary"]).read_bytes()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if digest != record["digest"]:
        return None
    _verified[folder] = record, stamps
    return record


def _build_kernel(folder: Path, file: str, target: str, made_of: Sources, parts: dict) -> dict:
    options = parts["options"]
    if target != "cpu":
        return _build_entry(folder, "kernel.cubin", entries(file), parts,
                            lambda scratch: compile_nvrtc(scratch, parts["unit"], options))
    with ThreadPoolExecutor() as pool:  # what is missing is compiled beside the unit
        linked = [pool.submit(linked_object, folder.parent, part, options, parts["compiler"])
                  for part in made_of.linked]
        return _build_entry(
            folder, "kernel.so", entries(file), parts,
            lambda scratch: compile_host(scratch, parts["unit"], options, lambda: [one.result() for one in linked]))


def linked_object(cache: Path, file: str, options, compiler: str) -> Path:
    """The object of a file that the CPU machine links into many kernels, from that cache or built now."""
    options = object_options(options)
    parts = {"file": file, "sources": sources(file).lines, "options": options, "compiler": compiler}
    folder = cache / f"simt-{Path(file).stem}.{_key(parts)}"
    record = _read_entry(folder) or _build_entry(folder, "object.o", (), parts,
                                                 lambda scratch: compile_object(scratch, file, options))
    return folder / record["binary"]


def _build_entry(folder: Path, binary: str, names, parts: dict, compiled: Callable[[Path], str]) -> dict:
    """A new entry that holds `binary` with these kernels; `compiled` makes it in a folder, returns a log."""
    # NOTE: mkdir and not mkdtemp, whose folders are closed to the other users of a shared cache.
    scratch = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise CompileError(f"cache: expected a folder that can be written, got {folder.parent} "
                           f"({error.strerror}); set CUATTN_CACHE_DIR to another") from None
    try:
        log = compiled(scratch)
        record = {"binary": binary, "digest": hashlib.sha256((scratch / binary).read_bytes()).hexdigest(),
                  "entries": list(names), **ptxas_report(log), "key": parts}
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
