"""Every synchronisation of every kernel, deleted in turn: who notices is as mutants.md says."""
from __future__ import annotations

import os
import re
from dataclasses import replace

import mutants
import pytest
from mutants import COMMAND, TABLE, VOCABULARY, all_mutants

from cuattn.kernels import ROWS
from cuattn.paths import KERNELS

FILES = sorted({mutant.file for mutant in all_mutants()})
TRIED = all_mutants() if os.environ.get("CUATTN_ALL_MUTANTS") else mutants.sample()


# --- the table


@pytest.mark.parametrize("mutant", TRIED, ids=str)
def test_who_notices(cpu, mutant):
    said = mutants.noticed(cpu, mutant)
    was = mutants.recorded().get(mutant, "not there")
    assert was == set(said), (f"{TABLE.name}: {mutant} is noticed by {said or 'nobody'}, and the table says "
                              f"{was or 'nobody'}; if that is right, rewrite it with: {COMMAND}")


def test_the_table_is_what_the_script_writes():
    """Its rows, their order, the counts and the sources it is of, given who notices what."""
    written = mutants.table(mutants.recorded())
    assert len(mutants.recorded()) == len(all_mutants()) and written == TABLE.read_text(encoding="utf-8"), (
        f"{TABLE.name} is not up to date; rewrite it with: {COMMAND}")


def test_only_what_has_aged_is_tried_anew(monkeypatch, tmp_path):
    """And the files that are named; what is said of others stays."""
    results = {mutant: {"poison"} for mutant in all_mutants()}
    monkeypatch.setattr(mutants, "TABLE", tmp_path / "table.md")
    mutants.TABLE.write_text(mutants.table(results).replace(mutants.identity("decode/mla.cu"), "0" * 8), "utf-8")
    monkeypatch.setattr(mutants, "noticed", lambda machine, mutant: {"report": "why"})
    assert mutants.aged() == {"decode/mla.cu"} and mutants.main(["prefill/flash.cu"]) == 1
    again = {mutant.file for mutant, who in mutants.recorded().items() if who == {"report"}}
    assert again == {"decode/mla.cu", "prefill/flash.cu"} and not mutants.aged()
    assert mutants.main(["absent.cu"]) == 2


def test_survivors_have_reasons_and_nothing_else_has():
    assert mutants.complaints({mutant.key: who for mutant, who in mutants.recorded().items()}, mutants.REASONS) == []


def test_what_is_complained_of():
    results = {"noticed": {"shadow"}, "explained": set(), "silent": set(), "both": {"report"}}
    silent, noticed, gone = mutants.complaints(results, dict.fromkeys(("explained", "both", "gone"), "why"))
    assert silent.startswith("silent: nobody notices")
    assert noticed.startswith("both: has a reason and is noticed")
    assert gone.startswith("gone: has a reason and does not exist")


# --- no false reports


def files_that_try_every_family() -> list[str]:
    """One of each family's cases: that a kernel as it stands is not reported, its own tests say."""
    found = {}
    for file in sorted(FILES, key=lambda file: len(mutants.kernels_of(file))):
        for kernel in mutants.kernels_of(file):
            found.setdefault(ROWS[kernel].family, file)
    return sorted(set(found.values()))


@pytest.mark.parametrize("file", files_that_try_every_family())
def test_a_copy_without_a_mutation_survives(cpu, file):
    first = next(mutant for mutant in all_mutants() if mutant.file == file)
    assert mutants.noticed(cpu, replace(first, becomes=first.call)) == {}


def test_a_kernel_that_has_no_cases_is_named(cpu, monkeypatch):
    monkeypatch.setattr(mutants, "CASES", {})
    with pytest.raises(LookupError, match=r"flash: expected a family with cases .*, got 'prefill'; write"):
        mutants.noticed(cpu, next(mutant for mutant in all_mutants() if mutant.file == "prefill/flash.cu"))


# --- finding

SOURCE = """
// block_sync(); in a comment, and /* cp_async_commit(); */ in another
DEVICE void warp_sync(SITE_ONLY) { __syncwarp(); }
template <int PENDING> DEVICE void cp_async_wait(SITE_ONLY);
struct Ring {
  template <class T> METHOD void step(T& s SITE) const {
    say("block_sync()"), cp_async_commit(ONLY_AT_SITE);
    cp_async_wait<max(STAGES - 2, 0)>();
  }
};
KERNEL(THREADS, 1)
twice(int n) {
  if (n) block_sync(); else block_sync();
  named_sync(1 + (n / (2 + f(n))), 64);
  cp_async_wait<0>(), __threadfence();
  if (take_ticket(tickets + n, 2)) say("last");
}
"""


def test_calls_are_found_by_themselves():
    found = list(mutants.mutants_of("x.cu", SOURCE))
    assert [(m.function, m.line, m.change) for m in found] == [
        ("step", 7, "`cp_async_commit(ONLY_AT_SITE)`"),
        ("step", 8, "`cp_async_wait<max(STAGES - 2, 0)>()`"),
        ("step", 8, "`cp_async_wait<max(STAGES - 2, 0)>()` → `cp_async_wait<max(STAGES - 2, 0) + 1>()`"),
        ("twice", 13, "`block_sync()`"), ("twice", 13, "`block_sync()` (number 2)"),
        ("twice", 14, "`named_sync(1 + (n / (2 + f(n))), 64)`"), ("twice", 15, "`cp_async_wait<0>()`"),
        ("twice", 15, "`__threadfence()`"), ("twice", 16, "`take_ticket(tickets + n, 2)` → `true`"),
    ]
    assert all(SOURCE[m.at :].startswith(m.call) for m in found)


def test_some_are_tried_again():
    tried = mutants.sample()
    assert set(tried) < set(all_mutants()) and len(tried) == -(-len(all_mutants()) // mutants.ONE_IN)
    assert mutants.sample() == tried


def test_keys_tell_mutants_apart():
    assert len({mutant.key for mutant in all_mutants()}) == len(all_mutants()) > 20


def test_the_vocabulary_holds_every_primitive_that_orders():
    """A new one in prim/ that waits, arrives or fences is to be deleted too."""
    wrappers = set()
    for path in (KERNELS / "prim").glob("*.cuh"):
        code = path.read_text(encoding="utf-8")
        for found in re.finditer(r"\bsimt::\w*((?<!a)sync|barrier|wait|arrive|commit|fence)\w*\(", code):
            wrappers.add(mutants.function_at(code, found.start()))
    assert wrappers and wrappers <= set(VOCABULARY), f"add to VOCABULARY: {wrappers - set(VOCABULARY)}"
