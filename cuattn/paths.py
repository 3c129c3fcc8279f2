"""Where the CUDA sources lie: beside the package in a checkout, inside it in an installed wheel."""
from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "_kernels"  # pyproject.toml maps kernels_cu to this name in a wheel

KERNELS: Path = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "kernels_cu"
