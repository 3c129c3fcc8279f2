"""`build`: every binary that a suite launches on a card is in the cache before there is a card."""
from __future__ import annotations

import pytest
from commands import call

from cuattn import compile as compiler
from cuattn.devices import CARDS
from experiments import build_cli
from experiments.catalog import catalog
from experiments.suite import load_suite

pytest.importorskip("cupy_backends", reason="NVRTC comes with CuPy, which is not installed here")
H200 = CARDS["H200"]
SUITE = """
title = "Small"
question = "Is it built?"
[gpu.prefill]
kernels = ["flash", "flash_hopper", "fa3"]
h = 2
hkv = 2
d = 64
n = [128, 256]
"""
BROKEN_CU = """#include "prim/gmem.cuh"
KERNEL(32, 1) broken(float* g_o) { this is no C; }
"""
BROKEN_PY = """
from dataclasses import replace
from cuattn.kernels.base import Launch, Plan
from cuattn.kernels.flash import ROW as FLASH
ROW = replace(FLASH, name="broken", file="broken.cu", constants={}, choices={},
              plan=lambda shape, device, overrides=None: Plan(
                  (Launch("broken.cu", "broken", (1, 1, 1), 32, 0, {}),), {}))
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A suite's file, in a folder of its own; the cache is empty."""
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "small suite ü.toml"
    path.write_text(SUITE, encoding="utf-8")
    return path


def test_a_suites_binaries_are_each_built_once(suite, tmp_path, monkeypatch, capsys):
    suite.write_text(SUITE.replace('"flash_hopper", ', ""), encoding="utf-8")
    code, out, err = call(monkeypatch, capsys, "build", suite, "--card", "h200", "--jobs", 1)
    assert (code, err) == (0, "") and "2 kernels for sm_90a by nvrtc" in out
    assert str(tmp_path / "cache") in out
    # What a run will ask for is there: two lengths share a binary, a peer has none, the empty kernel is timed
    # too.
    found = build_cli.wanted(load_suite(str(suite)), H200, catalog())
    assert [what.entry for what in found] == ["flash", "probe_empty"]
    monkeypatch.setattr(compiler, "compile_nvrtc", None)  # the cache answers
    for what in found:
        assert compiler.build(what.file, what.entry, dict(what.constants), "sm_90a").path.is_file()


def test_only_what_the_card_runs_is_built(suite):
    found = build_cli.wanted(load_suite(str(suite)), CARDS["A100-80"], catalog())
    assert [what.entry for what in found] == ["flash", "probe_empty"]


def test_what_a_run_refuses_is_not_built(suite):
    suite.write_text(SUITE + 'dtype = ["float16", "float8_e4m3"]\n', encoding="utf-8")
    found = build_cli.wanted(load_suite(str(suite)), H200, catalog())
    elements = [dict(what.constants)["Element"] for what in found if what.entry != "probe_empty"]
    assert elements == ["float16", "float16"]


def test_a_suite_that_asks_for_busy_multiprocessors_gets_stamped_binaries_too():
    found = build_cli.wanted(load_suite("ladder"), H200, catalog())
    binaries = [(what.file, what.constants, what.stamped) for what in found]
    assert len(set(binaries)) == len(binaries)  # of several kernels of a file, one asks for all
    bare = {(what.file, what.constants) for what in found if not what.stamped and what.entry != "probe_empty"}
    assert bare == {(what.file, what.constants) for what in found if what.stamped} and len(bare) > 20


def test_one_that_does_not_compile_is_said_and_harms_no_other(suite, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.cu").write_text(BROKEN_CU)
    (tmp_path / "broken.py").write_text(BROKEN_PY)
    suite.write_text(SUITE.replace('"flash_hopper", "fa3"', '"broken"'), encoding="utf-8")
    code, out, err = call(monkeypatch, capsys, "build", suite, "--card", "H200",
                          "--kernel", tmp_path / "broken.py", "--jobs", 2)
    assert code == 1 and "2 kernels for sm_90a" in out
    assert err.startswith("error: broken of ") and "broken.cu: NVRTC" in err and err.count("\n") == 1


@pytest.mark.parametrize("words, said", [
    (["quick", "--card", "H20"], "--card: 'H20' is not a GPU of cuattn/devices.py; did you mean 'H200'?"),
    (["quick", "--card", "cpu"], "--card: 'cpu' is not a GPU of cuattn/devices.py"),
    (["quik", "--card", "H200"], "suite: 'quik' is not a suite; did you mean 'quick'?"),
    (["quick", "--card", "H200", "--jobs", "0"], "--jobs: expected at least 1, got 0; give how many"),
    (["quick", "--card", "T4"], "build: no kernel of quick runs on T4; name another suite or card"),
])
def test_one_sentence_each(monkeypatch, capsys, words, said):
    code, out, err = call(monkeypatch, capsys, "build", *words)
    assert (code, out) == (2, "") and err.startswith(f"error: {said}")
