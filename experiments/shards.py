"""A run in parts: which cases the i-th of n machines runs, so that they need not speak to each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.words import UserError


@dataclass(frozen=True)
class Shard:
    """The `index`-th part, from 1, of `of`."""

    index: int
    of: int

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"


def parse_shard(text: str) -> Shard:
    """The shard that "i/n" names.

    Raises
    ------
    UserError
    """
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        raise UserError(f"--shard: expected I/N, such as 1/4 for the first of four, got '{text}'")
    index, of = map(int, match.groups())
    if not 1 <= index <= of:
        raise UserError(f"--shard: expected I/N, I from 1 to N, got '{text}'; the first of four is 1/4")
    return Shard(index, of)


def select(cases: Sequence, shard: Shard) -> list:
    """The cases of one shard, in their order: every n-th of all cases sorted by `case_id`.

    Together the n shards are all cases, no two share one, and their sizes differ by at most one. Which cases a
    shard has depends on the set of cases alone.

    Raises
    ------
    UserError
        There are fewer cases than shards, and none is left for this one.
    """
    ranked = sorted(case.case_id for case in cases)
    mine = set(ranked[shard.index - 1 :: shard.of])
    if not mine:
        raise UserError(f"--shard: {shard} has no case, for there are {len(ranked)}; use that many shards")
    return [case for case in cases if case.case_id in mine]
