"""Real models, from `models.csv`: heads, head dim, layers, context, parameters, and the source.

Parameters were counted from the same configurations: every expert of a mixture, norms and biases, and the
embeddings once where the output matrix shares them; litgpt does not say where, so for its models that is
from memory, and empty for the two of which it was not certain.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from experiments.words import UserError, nearest


@dataclass(frozen=True)
class Model:
    """One model's attention.

    `kv_heads`, `head_dim` are those the cache holds; `mla` says how a latent-attention model's were counted,
    and is empty for the others. `sliding_window` is None where every layer sees the whole context;
    `windowed_layers` have it. `params` is None where it is not known. `uneven` says how a model's layers
    differ in heads, and is empty where they do not.
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
    params: int | None = None
    windowed_layers: int = 0
    uneven: str = ""


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
            window, params, windowed = (
                int(row[c]) if row[c] else None for c in ("sliding_window", "params", "windowed_layers")
            )
            found[row["model"]] = Model(
                row["model"], *counts, window, row["mla"], row["source"], row["note"], params, windowed or 0,
                row["uneven"],
            )
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


def by_numbers(
    *, layers: int, q_heads: int, head_dim: int, kv_heads: int | None = None, v_head_dim: int | None = None,
    hidden: int | None = None, params: int | None = None,
) -> Model:
    """A model by its numbers; where they are not said, as many KV heads as heads, and hidden = heads · D.

    Raises
    ------
    UserError
        The KV heads do not divide the heads.
    """
    made = Model("the model given", layers, hidden or q_heads * head_dim, q_heads, kv_heads or q_heads,
                 head_dim, v_head_dim or head_dim, 0, None, "", "given", "", params)
    return _divided(made)


def changed(model: Model, **numbers: int | None) -> Model:
    """The model with those numbers replaced that are not None; its parameters are then unknown unless given.

    Raises
    ------
    UserError
        A latent-attention model, whose numbers hang together, or KV heads that do not divide the heads.
    """
    numbers = {name: value for name, value in numbers.items() if value is not None}
    shape = {name: value for name, value in numbers.items() if name != "params"}
    if not shape:
        return replace(model, **numbers)
    if model.mla:
        raise UserError(f"{model.name}: expected its own heads and head dims, since its attention is latent, "
                        f"got {', '.join(shape)}; leave them out")
    words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shape.items())
    numbers = {"params": None, **numbers}
    if "head_dim" in shape:
        numbers.setdefault("v_head_dim", shape["head_dim"])
    if "layers" in shape:
        numbers |= {"sliding_window": None, "windowed_layers": 0}
    return _divided(replace(model, name=f"{model.name} with {words}", **numbers))


def _divided(model: Model) -> Model:
    if model.q_heads % model.kv_heads:
        raise UserError(f"--kv-heads: expected a divisor of the {model.q_heads} heads, got {model.kv_heads}; "
                        "change one")
    return model
