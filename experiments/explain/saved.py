"""Explanations on the disk: one `explain.json` a folder, checked field by field when it is read.

Imports no kernel: the dashboard reads through here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from experiments.disk import StoreError, write_atomic

FORMAT, SCHEMA_VERSION = "cuattn explanation", 1
DOCUMENT, TIMELINE = "explain.json", "timeline.html"

NUMBER = (int, float, type(None))
SITE = {"entry": str, "file": str, "access": str} | dict.fromkeys(
    ("launch", "line", "column", "instructions", "lanes", "bytes", "sectors", "wavefronts", "conflicts",
     "first", "end"), int)
STEP = {"entry": str, "ended_by": str, "file": str} | dict.fromkeys(
    ("launch", "warp", "step", "line", "bytes_loaded", "bytes_copied", "bytes_stored", "shared_bytes_loaded",
     "shared_bytes_stored", "mma", "shuffles"), int)
# What a document must hold: a type, a list of forms, or a table of them. Further keys are free.
FORM: dict[str, Any] = {
    "kernel": str, "family": str, "teaches": str, "title": str, "command": str, "source_hash": str,
    "shape": dict, "dtype": str, "causal": (bool, type(None)), "constants": dict,
    "schedule": str,
    "verdict": {"ok": bool, "message": str, "max_err": NUMBER, "tolerance": NUMBER},
    "plan": {
        "constants": dict, "scratch_bytes": int,
        "launches": [{"launch": int, "entry": str, "file": str, "grid": [int], "block": int,
                      "smem_bytes": int, "constants": dict}],
    },
    "totals": [{"what": str, "counted": int, "closed_form": int, "equal": bool}],
    "counters": dict,
    "intensity": {"flops": int, "bytes": int, "flops_per_byte": NUMBER, "mma_flops": int,
                  "useful_share": NUMBER},
    "sites": [SITE],
    "shared": [{"launch": int, "entry": str, "struct": (str, type(None)), "bytes": int, "why": str,
                "members": [{"name": str, "type": str, "offset": int, "size": int, "count": int,
                             "read_by": [int], "written_by": [int]}]}],
    "timeline": {"block": int, "steps": [STEP], "chart": dict},
    "files": dict,
    "glossary": {"accesses": dict, "columns": dict, "steps": dict, "counters": dict},
}


def write(folder: Path, document: dict[str, Any], timeline: str) -> list[Path]:
    """Writes `explain.json` and `timeline.html`; a folder that holds an explanation gets the new one.

    Raises
    ------
    StoreError
        The folder holds something else, or cannot be written.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / DOCUMENT).is_file():
        raise StoreError(f"{folder}: is not empty and holds no explanation; name another with --out DIR")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be made ({error.strerror}); "
                         "name a writable folder with --out DIR") from error
    text = dumped({"format": FORMAT, "schema_version": SCHEMA_VERSION, **document})
    for name, content in ((DOCUMENT, text + "\n"), (TIMELINE, timeline)):
        write_atomic(folder / name, partial(Path.write_text, data=content, encoding="utf-8"))
    return [folder / DOCUMENT, folder / TIMELINE]


def dumped(value: Any, margin: str = "") -> str:
    """JSON whose innermost objects and lists take a line each: a call site or a step is one line.

    Raises
    ------
    ValueError
        A number is NaN or infinite.
    """
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if not any(isinstance(item, (dict, list, tuple)) for item in inner):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    more, opened, closed = margin + " ", *("{}" if isinstance(value, dict) else "[]")
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {dumped(item, more)}" for key, item in value.items()]
    else:
        items = [dumped(item, more) for item in value]
    return f"{opened}\n{more}" + f",\n{more}".join(items) + f"\n{margin}{closed}"


def read(path: Path) -> dict[str, Any]:
    """One document.

    Raises
    ------
    StoreError
        It cannot be read, is no explanation, is of a newer version, or lacks a field.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: is not JSON ({str(error)[:100]})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"{path}: is no explanation of a kernel")
    version = document.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise StoreError(f"{path}: has schema version {version}, and {SCHEMA_VERSION} is known here; update "
                         "the project, or explain the kernel anew")
    if wrong := misfit(document, FORM):
        raise StoreError(f"{path}: {wrong}; explain the kernel anew")
    return document


def _no_number(name: str):
    raise ValueError(f"{name} is no number of JSON")


def misfit(value: Any, form: Any, where: str = "") -> str:
    """What of a value does not have the form, in words; empty where all does."""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return f"{where or 'it'} is no object"
        for key, inner in form.items():
            name = f"{where}.{key}" if where else key
            if key not in value:
                return f"has no {name}"
            if wrong := misfit(value[key], inner, name):
                return wrong
        return ""
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        wrong = (misfit(item, form[0], f"{where}[{i}]") for i, item in enumerate(value))
        return next(filter(None, wrong), "")
    kinds = form if isinstance(form, tuple) else (form,)
    if type(value) in kinds:  # a bool is an int to isinstance
        return ""
    return f"{where} is of type {type(value).__name__}, not {' or '.join(kind.__name__ for kind in kinds)}"


def find(roots: Iterable[Path]) -> list[Path]:
    """Every document below the folders, hidden folders aside."""
    found = []
    for root in roots:
        for folder, below, files in os.walk(root):
            below[:] = sorted(name for name in below if not name.startswith("."))
            if DOCUMENT in files:
                found.append(Path(folder) / DOCUMENT)
    return found
