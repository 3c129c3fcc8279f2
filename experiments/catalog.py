"""Which kernels a sweep may name: the project's, those given by path, and other people's libraries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.words import UserError

# Peers are named here and adapted in `peers/`, which imports their libraries; the parent process must not.
PEERS = {
    "torch_math": "prefill",
    "torch_flash": "prefill",
    "torch_cudnn": "prefill",
    "fa3": "prefill",
    "flashinfer": "prefill",
    "fa3_decode": "decode",
    "flashinfer_decode": "decode",
    "flashinfer_cascade": "cascade",
    "flashinfer_append": "cache",
    "torch_copy": "pages",
    "vllm_decode": "decode",
}


@dataclass(frozen=True)
class Entry:
    """A kernel by name: its family, and its `Row` unless it is a peer."""

    name: str
    family: str
    row: Any = None
    path: str = ""


def catalog(paths: Iterable[str] = ()) -> dict[str, Entry]:
    """Every kernel by name; one given by path replaces a library's of that name.

    Raises
    ------
    UserError
        A path that is no kernel module, or two modules with kernels of one name.
    """
    from cuattn.kernels import ROWS

    found = {name: Entry(name, row.family, row) for name, row in ROWS.items()}
    found |= {name: Entry(name, family) for name, family in PEERS.items()}
    for path in paths:
        row, module = load_row(path), str(Path(path).resolve())
        if (other := found.get(row.name)) and other.path not in ("", module):
            raise UserError(f"--kernel: two modules define '{row.name}', {other.path} and {module}; give one "
                            "of them another name")
        found[row.name] = Entry(row.name, row.family, row, module)
    return found


def load_row(path: str):
    """The row of a kernel module outside the project."""
    from cuattn.kernels import load

    if not Path(path).is_file():
        raise UserError(f"--kernel: {path} is not a file; give the path of a Python module that defines ROW")
    if Path(path).suffix != ".py":
        raise UserError(f"--kernel: expected a Python module that defines ROW, got {path}; give the .py that "
                        "describes the kernel")
    try:
        return load(path)
    except (Exception, SystemExit) as error:  # the module is the user's own code and may raise anything
        raise UserError(f"--kernel: {path} does not load ({type(error).__name__}: {error})") from error


def current_hashes() -> dict[str, str]:
    """What `store.stale` compares with: each kernel of the project → every source hash it could have today.

    A kernel may launch several files, and its plan decides which, so each gets the hashes of all files,
    joined by "+"; a hash occurs nowhere but in its own file's rows.
    """
    from cuattn.compile import source_hash
    from cuattn.kernels import ROWS
    from cuattn.paths import KERNELS

    files = sorted(path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu"))
    return dict.fromkeys(ROWS, "+".join(source_hash(file) for file in files))
