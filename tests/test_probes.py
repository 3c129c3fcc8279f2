"""The probe of load widths: every byte once at each width, and an answer that no wrong buffer has."""
from __future__ import annotations

import json

import numpy as np
import pytest

from cuattn.devices import CPU
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.shapes import ProbeShape
from experiments import subjects
from experiments.catalog import catalog

WIDTHS = (2, 4, 8, 16)
SIZES = {"none": 0, "one word": 16, "ends": 16 * 1003 + 12, "unrolled": 1 << 18}
PARAMS = {"kernel": "words", "family": "probe", "dtype": "bfloat16"}


def probe(machine, rng, width: int, size: int) -> subjects.Probe:
    """The probe over random bytes."""
    params = {**PARAMS, "bytes": size, "constants": json.dumps({"width": width})}
    made = subjects.make(machine, params, catalog()["words"], lambda arrays: None)
    source = made.planned.outputs[0]
    source[...] = machine.upload(rng.integers(1 << 32, size=source.size, dtype=np.uint32))
    return made


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_reads_every_byte_once(machine, rng, width, size):
    one = probe(machine, rng, width, SIZES[size])
    one.run()
    assert one.verdict().ok
    source, sink = one.planned.outputs
    used = SIZES[size] // 16 * 4
    for word in {0, 1, used // 2, used - 1} if used else ():
        for bit in (0, 15, 16, 31):
            source[word] ^= np.uint32(1 << bit)
            assert not one.verdict().ok
            source[word] ^= np.uint32(1 << bit)
    source[used:] = 7  # less than 16 bytes are left out at any width
    assert one.verdict().ok
    one.poison()
    assert one.verdict().ok == (used == 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", WIDTHS)
def test_counted_is_the_closed_form_at_every_width(cpu, rng, width, size):
    one = probe(cpu, rng, width, SIZES[size])
    with cpu.tracing() as trace:
        one.run()
    cost = one.planned.cost()
    assert trace.total("bytes", "global load") == cost.bytes_loaded == SIZES[size] // 16 * 16
    assert trace.total("bytes", "global store") == cost.bytes_stored


def test_narrow_loads_are_more_of_them_and_the_same_sectors(cpu, rng):
    counted = {}
    for width in WIDTHS:
        one = probe(cpu, rng, width, 1 << 18)
        with cpu.tracing() as trace:
            one.run()
        counted[width] = [trace.total(name, "global load") for name in ("instructions", "sectors")]
    assert counted == {width: [(1 << 18) // (32 * width), 1 << 13] for width in WIDTHS}


@pytest.mark.parametrize("width", [1, 3, 12, 32])
def test_a_width_that_no_load_has_is_refused(width):
    with pytest.raises(Unsupported) as error:
        ROWS["words"].plan(ProbeShape(1024), CPU, {"width": width})
    assert str(error.value) == f"probe_words: width must be 2, 4, 8 or 16 bytes, got {width}; choose one"


def test_only_the_probe_of_widths_has_one():
    with pytest.raises(Unsupported, match="width"):
        ROWS["read"].plan(ProbeShape(1024), CPU, {"width": 4})
