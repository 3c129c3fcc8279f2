"""Attention shapes of real models, from `models.csv`: heads, head dim, layers, context, and the source."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from experiments.words import UserError, nearest


@dataclass(frozen=True)
class Model:
    """One model's attention.

    `kv_heads`, `head_dim` are those the cache holds; `mla` says how a latent-attention model's were counted,
    and is empty for the others. `sliding_window` is None where every layer sees the whole context.
    """

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    max_context: int
    sliding_window: int | None
    mla: str
    source: str
    note: str


@lru_cache
def models() -> dict[str, Model]:
    """Every model of the table, by name, in the table's order."""
    found = {}
    with open(Path(__file__).with_name("models.csv"), encoding="utf-8", newline="") as handle:
        for row in csv.DictReader(handle):
            counts = (
                int(row[c])
                for c in ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "v_head_dim", "max_context")
            )
            window = int(row["sliding_window"]) if row["sliding_window"] else None
            found[row["model"]] = Model(row["model"], *counts, window, row["mla"], row["source"], row["note"])
    return found


def model(name: str) -> Model:
    """The model of that name.

    Raises
    ------
    UserError
        The table has none of that name.
    """
    known = models()
    if name not in known:
        raise UserError(f"model: '{name}' is not in experiments/models.csv; {nearest(name, known)}")
    return known[name]
