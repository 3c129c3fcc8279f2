"""The kernels that offer a feature, each with tiles so small that few rows and keys make many."""
from __future__ import annotations

import pytest

from cuattn.kernels import ROWS

TILES = {"flash": {"block_m": 32, "block_n": 16, "warps": 2}, "flash_hopper": {"block_m": 128, "block_n": 16},
         "paged": {"splits": 3, "warps": 2, "stages": 2},
         "paged_stream": {"keys": 16, "warps": 1, "stages": 2, "groups": 5}}


def offering(feature: str, family: str = "prefill"):
    """A test's `kernel`: each kernel of the family whose row names the feature."""
    return pytest.mark.parametrize("kernel", [name for name, row in ROWS.items()
                                              if row.family == family and feature in row.features])
