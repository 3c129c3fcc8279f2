"""Tuned constants: which class a shape has, who wins over whom, and that no file of them can do harm."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import binding, tuned
from cuattn.compile import source_hash
from cuattn.devices import CARDS, CPU
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.shapes import AttentionShape, DecodeShape
from experiments import doctor

H200, FLASH = CARDS["H200"], ROWS["flash"]
SHAPE = AttentionShape(1, 32, 8, 4096, 4096, 128, "bfloat16", True)
CLASS = "prefill d128 bfloat16 causal m12 n12 bh5"
BEST = {"block_m": 64, "block_n": 64, "warps": 4}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """file(changes): the H200's file with BEST for SHAPE's class, `changes` made to the document."""
    monkeypatch.setenv("CUATTN_TUNED", str(tmp_path))
    monkeypatch.setattr(tuned, "_said", set())

    def write(constants=BEST, text=None, hashed=None, **changes):
        entry = {"constants": constants, "margin": 0.1, "rows": [["run", "case"]]}
        kernel = {"source_hash": hashed or source_hash(FLASH.file), "date": "2026-11-29T00:00:00+00:00",
                  "classes": {CLASS: entry}}
        document = {"schema": 1, "device": "H200", "kernels": {"flash": kernel}} | changes
        path = tuned.path_of("H200")
        path.write_text(json.dumps(document) if text is None else text)
        return path

    return write


def chosen(shape=SHAPE, device=H200, constants=None) -> dict:
    return dict(binding._chosen_plan(FLASH, shape, device, constants).constants)


OWN = dict(FLASH.plan(SHAPE, H200).constants)


def test_the_caller_wins_over_the_file_and_the_file_over_the_plan(file):
    assert chosen() == OWN != BEST
    file()
    assert chosen() == BEST
    given = chosen(constants={"block_n": 32})
    assert given == dict(FLASH.plan(SHAPE, H200, {"block_n": 32}).constants)  # no mixture of the two
    assert chosen(constants={}) == BEST
    with tuned.ignored():
        assert chosen() == OWN
    assert chosen() == BEST


def test_neighbours_have_the_same_constants_and_others_do_not(file):
    file()
    for m, n in ((4095, 4096), (4097, 4100), (2897, 5792), (3000, 5000)):
        assert chosen(replace(SHAPE, m=m, n=n)) == BEST
    for change in ({"m": 2896}, {"n": 5793}, {"d": 64}, {"dtype": "float16"}, {"causal": False}, {"b": 2}):
        shape = replace(SHAPE, **change)
        assert chosen(shape) == dict(FLASH.plan(shape, H200).constants)
    assert chosen(replace(SHAPE, h=30, hkv=10)) == BEST


@given(st.integers(1, 1 << 20))
def test_a_class_reaches_half_a_power_of_two_either_way(x):
    power = tuned.power(x)
    assert 2 ** (power - 0.5) <= x <= 2 ** (power + 0.5)


def test_every_family_has_classes_or_none():
    decode = DecodeShape(16, 32, 8, 128, 16, 256, "bfloat16")
    assert tuned.shape_class(SHAPE) == CLASS
    assert tuned.shape_class(decode) == "decode d128 bfloat16 n12 bh9"
    assert tuned.shape_class(replace(decode, m=2)) is tuned.shape_class(replace(decode, window=(9, -1))) is None
    assert tuned.shape_class(replace(SHAPE, n=0)).endswith("n-1 bh5")
    assert tuned.shape_class(object()) is None


@pytest.mark.parametrize("what, said", [
    ({"text": "{"}, "is damaged"), ({"text": ""}, "is damaged"), ({"text": "[]"}, "is damaged"),
    ({"text": "\0"}, "is damaged"), ({"schema": "1"}, "is damaged"), ({"schema": None}, "is damaged"),
    ({"kernels": []}, "is damaged"), ({"kernels": {"flash": {}}}, "is damaged"),
    ({"device": 5}, "is damaged"),
    ({"constants": 7}, "is damaged"), ({"schema": 2}, "newer than the 1 known here"),
    ({"device": "H100"}, "was tuned on H100, and this is H200"),
    ({"hashed": "0" * 12}, "flash was tuned with another source"),
    ({"constants": {"tile": 4}}, "'tile' is not a tunable"),
    ({"constants": {"warps": 4.0}}, "expected an int"),
])  # fmt: skip
def test_what_cannot_be_used_is_left_aside_with_one_warning(file, what, said):
    file(**what)
    with pytest.warns(tuned.TunedWarning, match=said):
        assert chosen() == OWN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == OWN  # said once a process


def test_constants_that_do_not_suit_a_shape_of_their_class_give_way(file):
    file({"block_m": 128, "block_n": 128, "warps": 16})  # 128 rows are no multiple of 16 · 16
    with pytest.raises(Unsupported):
        FLASH.plan(SHAPE, H200, {"block_m": 128, "block_n": 128, "warps": 16})
    assert chosen() == OWN


def test_another_device_and_the_cpu_machine_have_their_own_ways(file):
    file()
    other = CARDS["A100-80"]
    assert chosen(device=other) == dict(FLASH.plan(SHAPE, other).constants)
    assert chosen(device=CPU) == dict(FLASH.plan(SHAPE, CPU).constants)


def test_a_file_written_later_is_noticed(file):
    path = file()
    assert chosen() == BEST
    file({**BEST, "block_n": 32})
    assert chosen()["block_n"] == 32
    path.unlink()
    assert chosen() == OWN


def test_choices_are_constants_of_their_row():
    for row in ROWS.values():
        assert set(row.choices) <= set(row.constants)
        assert all(isinstance(values, tuple) and values for values in row.choices.values())


def test_doctor_names_the_files_and_what_is_wrong_with_them(file, tmp_path):
    assert not list(doctor._tuned())
    path = file()
    ((what, works, detail, _),) = doctor._tuned()
    assert (what, works) == ("tuned constants", True) and detail == f"H200: 1 class of 1 kernel, {path}"
    file(hashed="0" * 12)
    said = [detail for _, works, detail, _ in doctor._tuned() if works is None]
    assert len(said) == 1 and "flash was tuned with another source" in said[0]
    file(text="{")
    ((_, works, detail, _),) = doctor._tuned()
    assert works is None and "is damaged" in detail
