"""The table of kernels.

Every module here that defines `ROW`, or `ROWS` where one `.cu` holds several kernels.
"""
from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from pathlib import Path

from cuattn.kernels.base import Row


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

    A relative `file` in its row is taken from the module's folder.

    Raises
    ------
    ValueError
        If the file does not exist, does not run, or defines no `ROW`.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise ValueError(f"kernel: expected a Python module, got {str(path)!r}, which does not exist; "
                         "check the path")
    spec = importlib.util.spec_from_file_location(f"cuattn_external_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a stranger's module: any failure is its own, and one sentence for the user
        raise ValueError(f"kernel: {path} does not load ({type(error).__name__}: {error}); "
                         "mend it") from error
    rows = _rows_of(module)
    if not rows:
        raise ValueError(f"kernel: {path} defines no ROW; see cuattn/kernels/flash.py for the format")
    for row in rows:
        ROWS[row.name] = row
    return rows[0]
