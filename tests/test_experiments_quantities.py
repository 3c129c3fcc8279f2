"""Sizes and counts: GB is never taken for GiB, and what is no number is refused in a sentence."""

from __future__ import annotations

import pytest

from experiments.quantities import gb, gib, parse_bytes, parse_count, parse_tokens
from experiments.words import UserError


def test_units():
    assert parse_bytes("24GB", "--memory") == 24 * 10**9
    assert parse_bytes(" 24 gib ", "--memory") == 24 << 30
    assert parse_bytes("1.5TB", "--memory") == 1_500_000_000_000
    assert parse_tokens("32K", "--context") == 32768 and parse_tokens("100", "--context") == 100
    assert parse_count("70B", "--params") == 70 * 10**9 and parse_count("135m", "--params") == 135_000_000
    for parse, text in (
        (parse_bytes, "24"), (parse_bytes, "24G"), (parse_bytes, "-1GB"), (parse_bytes, ""),
        (parse_bytes, "9" * 400 + "GB"), (parse_tokens, "0"), (parse_tokens, "1e3"), (parse_tokens, "4KB"),
        (parse_count, "many"),
    ):
        with pytest.raises(UserError, match="--option: expected"):
            parse(text, "--option")
    printed = " ".join(gb(x) for x in (0, 999, 1000, 131072, 1.342e9, 85.9e9, 150e9, -2e9, 2e12))
    assert printed == "0 B 999 B 1.00 kB 131 kB 1.34 GB 85.9 GB 150 GB -2.00 GB 2.00 TB"
    assert gib(141 << 30) == "141 GiB"
