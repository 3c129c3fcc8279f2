"""The table of kernels.

Every module here that defines `ROW`, or `ROWS` where one `.cu` holds several kernels.
"""
from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from cuattn.kernels.base import Plan, Row


def _rows_of(module) -> tuple[Row, ...]:
    return tuple(getattr(module, "ROWS", ())) or ((module.ROW,) if hasattr(module, "ROW") else ())


def _discover() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        if info.name != "base" and not info.name.startswith("_"):
            for row in _rows_of(importlib.import_module(f"{__name__}.{info.name}")):
                found[row.name] = row
    return found


ROWS: dict[str, Row] = _discover()
_OWN = frozenset(ROWS)
_loaded: dict[Path, tuple[Row, ...]] = {}  # kernels from outside, by their modules


def find(name: str, family: str | None = None) -> Row:
    """The row of that name.

    Raises
    ------
    ValueError
        If there is none, or it is of another family.
    """
    rows = {n: r for n, r in ROWS.items() if family in (None, r.family)}
    if name not in rows:
        raise ValueError(f"kernel: '{name}' is not a {family or 'known'} kernel; "
                         f"choose one of {', '.join(sorted(rows))}")
    return rows[name]


def load(path: str | Path) -> Row:
    """Adds a kernel from outside the repository: a module like those here, its `.cu` beside it.

    A relative `file`, in its row or in a launch of its plan, is taken from the module's folder where it
    exists there, else from `kernels_cu/`. Loading a module again replaces its rows.

    Raises
    ------
    ValueError
        If the file does not exist, does not run, defines no `ROW`, or one with the name of a kernel here.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise ValueError(f"kernel: expected a Python module, got {str(path)!r}, which does not exist; "
                         "check the path")
    rows = _rows_of(_executed(path))
    if not rows or not all(isinstance(row, Row) for row in rows):
        raise ValueError(f"kernel: {path} defines no ROW; see cuattn/kernels/flash.py for the format")
    if taken := [row.name for row in rows if row.name in _OWN]:
        raise ValueError(f"kernel: expected a name of its own in {path}, got '{taken[0]}', which is a kernel "
                         "of this package; rename it")
    for row in _loaded.pop(path, ()):
        if ROWS.get(row.name) is row:
            del ROWS[row.name]
    rows = _loaded[path] = tuple(_beside(row, path.parent) for row in rows)
    ROWS.update((row.name, row) for row in rows)
    return rows[0]


def _executed(path: Path):
    """The module, run afresh from its source."""
    name = f"cuattn_external_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    try:
        # NOTE: not exec_module, whose cached bytecode may be older than an edit within the same second.
        exec(spec.loader.source_to_code(spec.loader.get_data(str(path)), str(path)), module.__dict__)
    except Exception as error:  # a stranger's module: any failure is its own, and one sentence for the user
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        raise ValueError(f"kernel: {path} does not load ({type(error).__name__}: {error}); "
                         "mend it") from error
    return module


def _beside(row: Row, folder: Path) -> Row:
    """The row with its files found in its module's folder."""

    def found(file: str) -> str:
        return str(folder / file) if (folder / file).is_file() else file  # an absolute path stays what it is

    def plan(*arguments, **options) -> Plan:
        made = row.plan(*arguments, **options)
        return replace(made, launches=tuple(replace(launch, file=found(launch.file))
                                            for launch in made.launches))

    return replace(row, file=found(row.file), plan=plan)
