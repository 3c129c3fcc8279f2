"""The table of kernels: which constants and grids a plan takes, empty heads, and kernels from outside."""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import cuattn
from cuattn import compile as compiler
from cuattn.devices import for_arch
from cuattn.kernels import ROWS, base, find, load
from cuattn.kernels.base import Unsupported
from cuattn.kernels.paged import combine_launch
from cuattn.kernels.shapes import AppendShape, AttentionShape, CascadeShape, DecodeShape, ProbeShape

PREFILL = AttentionShape(1, 2, 1, 100, 100, 64, "float16")
DECODE = DecodeShape(1, 2, 1, 64, 16, 4, "float16")
CASCADE = CascadeShape(1, 2, 1, 64, 16, ((1, 4),), 4, "float16")
CARD = for_arch("sm_90a")


# --- constants


@pytest.mark.parametrize("value", [0, -1, "64", 64.0, [64], True, np.int64(64)], ids=repr)
@pytest.mark.parametrize("default", [None, 8])
def test_an_integer_tunable_takes_an_integer_of_at_least_1(default, value):
    with pytest.raises(Unsupported) as error:
        base.resolve({"size": default}, {"size": value})
    expected = "an int of at least 1" + (" or None" if default is None else "")
    assert str(error.value) == (f"constants: size: expected {expected}, got {value!r}; "
                                "change it or leave it out")


def test_none_and_strings_are_taken_where_they_are_the_default():
    defaults = {"size": None, "count": 8, "score": "float32"}
    assert base.resolve(defaults, {"size": None, "score": "input"}) == {**defaults, "score": "input"}
    assert base.resolve(defaults, {"size": 1, "count": 2}) == {"size": 1, "count": 2, "score": "float32"}
    for wrong in ({"count": None}, {"score": None}, {"score": 1}):
        with pytest.raises(Unsupported, match=f"constants: {next(iter(wrong))}: expected an? .*, got"):
            base.resolve(defaults, wrong)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.constants])
def test_every_plan_refuses_constants_of_another_kind(name):
    row = ROWS[name]
    shape = {"prefill": PREFILL, "decode": DECODE, "mla": DECODE, "cascade": CASCADE, "probe": ProbeShape(1024, 1024)}[row.family]
    for constant in row.constants:
        with pytest.raises(Unsupported, match=f"constants: {constant}: expected .*, got 64.0; change it"):
            row.plan(shape, CARD, {constant: 64.0})


def test_probes_take_their_rows_dtypes_and_whole_warps():
    for name in ("read", "words", "copy", "mma", "empty"):
        with pytest.raises(Unsupported, match="expected dtype float16 or bfloat16, got float32; choose one"):
            ROWS[name].plan(ProbeShape(1024, 1024, "float32"), CARD)
        for threads in (16, 48, 2048):
            with pytest.raises(Unsupported, match=f"threads must be a multiple of 32 .*, got {threads}"):
                ROWS[name].plan(ProbeShape(1024, 1024), CARD, {"threads": threads})


# --- grids


def test_grids_that_no_device_launches_are_refused():
    most = 65535 * 128
    fits = AttentionShape(1, 1, 1, most, 8, 64, "float16")
    assert max(ROWS["standard"].plan(fits, CARD).launches[0].grid[1:]) == 65535
    with pytest.raises(Unsupported, match=f"at most {most} queries .*, got {most + 1}; split"):
        ROWS["standard"].plan(AttentionShape(1, 1, 1, most + 1, 8, 64, "float16"), CARD)
    with pytest.raises(Unsupported, match="paged: expected at most 65535 sequences, got 65536; split"):
        ROWS["paged"].plan(DecodeShape(65536, 1, 1, 64, 16, 4, "float16"), CARD)
    with pytest.raises(Unsupported, match="at most 65535 KV heads .*, got 80000; split"):
        ROWS["paged"].plan(DecodeShape(1, 40000 * 17, 40000, 64, 16, 4, "float16"), CARD)
    with pytest.raises(Unsupported, match="combine: expected at most 65535 rows, got 65536; split"):
        combine_launch(65536, 1, 64, "float32", "float16")
    with pytest.raises(Unsupported, match="append: expected at most 65535 sequences, got 65536; split"):
        ROWS["append"].plan(AppendShape(65536, 1, 1, 64, 16, "float16"), CARD)


@pytest.mark.parametrize("h, hkv", [(0, 0), (0, 2)])
@pytest.mark.parametrize("splits", [None, 3])
def test_decode_without_heads_is_nothing_to_do(h, hkv, splits):
    shape = DecodeShape(2, h, hkv, 64, 16, 4, "float16")
    assert shape.group == 0
    plan = ROWS["paged"].plan(shape, CARD, {"splits": splits})
    cost = ROWS["paged"].cost(shape, plan, [5, 0])
    assert plan.launch_count == 0
    assert plan.launches[0].constants["GROUP"] == 1  # compiled all the same, and the kernel divides by it
    assert (cost.flops, cost.bytes_loaded, cost.bytes_stored) == (0, 0, 0)
    q, cache = np.zeros((2, 1, h, 64), "float16"), np.zeros((4, 16, hkv, 64), "float16")
    table, lengths = np.zeros((2, 2), np.int32), np.array([5, 0], np.int32)
    o, lse = cuattn.plan_decode(q, cache, cache, table, lengths, constants={"splits": splits}).run()
    assert o.shape == (2, 1, h, 64) and lse.shape == (2, h, 1)


# --- kernels from outside

CU = """
#include "prim/gmem.cuh"
#include "value.cuh"
KERNEL(32, 1) mine() { constexpr int value = VALUE; }
"""
MODULE = """
from __future__ import annotations
import dataclasses
from cuattn.kernels.base import Cost, Launch, Plan
from cuattn.kernels.flash import ROW as FLASH

@dataclasses.dataclass
class Choice:  # needs its module to be known while it is made
    tile: int = 1

def plan(shape, device, overrides=None):
    launches = [Launch(file, entry, (1, 1, 1), 32, 0, {})
                for file, entry in (("mine.cu", "mine"), ("probe/probes.cu", "probe_empty"))]
    return Plan(tuple(launches), {})

ROW = dataclasses.replace(FLASH, name="mine", file="mine.cu", constants={}, plan=plan,
                          arguments=lambda shape, plan, t: [[], []],
                          cost=lambda shape, plan, lengths=None: Cost(1, 2, 3, 1))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A kernel module with its `.cu`."""
    monkeypatch.chdir("/")
    (tmp_path / "mine.cu").write_text(CU)
    (tmp_path / "value.cuh").write_text("#define VALUE 1\n")
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path / "mine.py"


def test_files_of_a_kernel_from_outside_lie_beside_its_module(module):
    row = load(module)
    assert row is find("mine") and row.file == str(module.with_name("mine.cu"))
    plan = row.plan(PREFILL, CARD, None)
    assert [launch.file for launch in plan.launches] == [row.file, "probe/probes.cu"]
    first = plan.launches[0]
    before = compiler.build(first.file, first.entry, first.constants, "cpu")
    module.with_name("value.cuh").write_text("#define VALUE 2\n")
    assert compiler.build(first.file, first.entry, first.constants, "cpu").source_hash != before.source_hash


def test_loading_again_replaces_the_row(module, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    first = load(module)
    module.write_text(MODULE.replace('name="mine"', 'name="nine"'))  # as long, and within the same second
    again = load(module)
    assert again.name == "nine" and find("nine") is again is not first and "mine" not in ROWS
    assert not list(module.parent.glob("__pycache__"))


@pytest.mark.parametrize("text, match", [
    (MODULE.replace('name="mine"', 'name="flash"'), "a name of its own in .*got 'flash'.*; rename it"),
    (MODULE.replace("ROW =", "OTHER ="), "defines no ROW"),
    ("ROW = 3", "defines no ROW"),
    ("1 / 0", "does not load .ZeroDivisionError: division by zero.; mend it"),
])
def test_modules_that_are_refused_leave_the_table_as_it_was(module, text, match):
    row, before = load(module), dict(ROWS)
    module.write_text(text)
    with pytest.raises(ValueError, match=match):
        load(module)
    assert ROWS == before and find("mine") is row


def test_a_module_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match="expected a Python module, got .*absent.py.*; check the path"):
        load(Path(tmp_path / "absent.py"))
