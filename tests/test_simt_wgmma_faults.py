"""Planted faults of warpgroups: each is reported with its places, in every schedule."""
from __future__ import annotations

import re

import numpy as np
import pytest
from simt_launch import KERNELS, line_of
from wgmma_model import SCHEDULES, attention_inputs, launch, specialised

from cuattn.cpu import CpuMachine
from cuattn.machine import DeviceError, RaceError


@pytest.fixture(scope="module")
def cpu_machine():
    made = CpuMachine(workers=1, races=True)
    yield made
    made.close()


def fault_kernel(machine, entry, block=128, smem=16384, constants=None, **args):
    launch(machine, "wgmma_faults.cu", entry, block, smem,
           {"SWIZZLE": 128, "WITH_BARRIER": False, **(constants or {})}, **args)


def line(text):
    return line_of("wgmma_faults.cu", text)


def report(machine, entry, schedules=SCHEDULES, error=DeviceError, block=128, out="g_d", **constants):
    """What every schedule says; all must say it with the same lines."""
    said = set()
    array = machine.empty(4096, np.float32 if out == "g_d" else np.int32)
    for schedule in schedules:
        with machine.schedule(**schedule), pytest.raises(error) as caught:
            fault_kernel(machine, entry, block, constants=constants, **{out: array})
        text = str(caught.value)
        lines = tuple(sorted({int(n) for n in re.findall(r"wgmma_faults\.cu:(\d+)", text)}))
        said.add((lines, re.sub(r"\(\d+,\d+,\d+\)|bytes \d+ to \d+|\b\d+ of 128|\d+ threads", "", text)))
    assert len({lines for lines, _ in said}) == 1, said
    return said.pop()[0], text


@pytest.mark.parametrize("entry, missing", [
    ("no_proxy_fence", "fence_proxy_async() after that write"),
    ("proxy_fence_too_late", "fence_proxy_async() after that write"),
    ("no_barrier", "a barrier that both reach"),
])
def test_what_the_tensor_cores_do_not_see(cpu_machine, entry, missing):
    lines, text = report(cpu_machine, entry, error=RaceError)
    assert lines == (line(f"// written, {entry}"), line(f"// read, {entry}")), text
    assert "wgmma" in text and (entry == "no_barrier" or f"missing: {missing}" in text), text


def test_a_stage_that_is_filled_early(cpu_machine):
    lines, text = report(cpu_machine, "overwritten_before_the_wait", error=RaceError)
    assert lines == (line("// reads the stage"), line("// refills it early")) and "wgmma_wait" in text, text
    lines, text = report(cpu_machine, "refilled_by_others", error=RaceError, block=256)
    assert lines == (line("// reads for the others"), line("// refills for the others")), text
    for schedule in SCHEDULES:
        with cpu_machine.schedule(**schedule):
            fault_kernel(cpu_machine, "refilled_by_others", 256, constants={"WITH_BARRIER": True},
                         g_d=cpu_machine.empty(4096, np.float32))


@pytest.mark.parametrize("entry, columns", [
    ("no_wait", slice(None)), ("too_few_waited_for", slice(32, None)),
])
def test_accumulators_before_the_wait_are_nan(cpu_machine, entry, columns):
    d = cpu_machine.empty((64, 64), np.float32)
    for schedule in SCHEDULES:
        with cpu_machine.schedule(**schedule):
            fault_kernel(cpu_machine, entry, g_d=d)
        assert np.isnan(d[:, columns]).all() and np.isnan(d).sum() == d[:, columns].size


def test_a_wrong_swizzle_gives_wrong_numbers(cpu_machine):
    place = np.arange(64 * 64)
    a, b = (place % 7).reshape(64, 64), (place % 5).reshape(64, 64)
    for swizzle in (128, 64, 32):
        d = cpu_machine.empty((64, 64), np.float32)
        fault_kernel(cpu_machine, "wrong_swizzle", constants={"SWIZZLE": swizzle}, g_d=d)
        assert (d == a @ b.T).all() == (swizzle == 128)


@pytest.mark.parametrize("entry, marks, sentence", [
    ("never_waited_for", ["// issued, never waited for"], "was never waited for"),
    ("not_committed", ["// issued, not committed"], "was never waited for"),
    ("other_descriptor", ["// one lane's"], "divergent wgmma: .* with another descriptor of B"),
    ("no_wgmma_fence", ["// not fenced"], "wgmma without a wgmma_fence before it"),
    ("out_of_bounds", ["// 64 columns from 32 of 64 on"], "wgmma reads 16 bytes of B at byte"),
    ("fragments_not_named", ["// fragments not named", "  wgmma_fence(acc);\n  wgmma_ab<"],
     "fragments of A that"),
    ("written_after_wgmma_fence", ["// changed too late", "  wgmma_fence(acc);\n  acc.tile[0][3]"],
     "accumulators that"),
    ("no_second_wgmma_fence", ["// not fenced again", "  wgmma_wait<0>(acc);\n}\n\nKERNEL(128, 1) no_proxy"],
     "wgmma without a wgmma_fence since the wgmma_wait"),
    ("other_shape_under_way", ["// 64 columns wide", "// 32 wide"], "wait for it first"),
    ("divergent", ["// two warps", "// the other two"], "divergent wgmma: .* with another call site"),
    ("other_groups", ["// one lane's group"], "divergent wgmma_commit: 1 wgmmas precede it|divergent wgmma_commit: 2"),
])
def test_misuse(cpu_machine, entry, marks, sentence):
    text_of_file = (KERNELS / "wgmma_faults.cu").read_text()
    wanted = sorted(text_of_file[:text_of_file.index(mark)].count("\n") + 1 if "\n" in mark else line(mark)
                    for mark in marks)
    lines, text = report(cpu_machine, entry)
    assert re.search(sentence, text) and list(lines) == wanted, (text, wanted)


@pytest.mark.parametrize("entry, mark, sentence", [
    ("a_changed", "// takes fragments", "the fragments of A of this wgmma changed before its wait"),
    ("accumulators_scaled", "// issued, then scaled",
     "the accumulators of this wgmma were written before its wait"),
])
def test_registers_that_change_under_way(cpu_machine, entry, mark, sentence):
    lines, text = report(cpu_machine, entry)
    assert sentence in text and lines == (line(mark),), text


def test_warps_may_wait_apart(cpu_machine):
    d = cpu_machine.empty((64, 64), np.float32)
    for schedule in SCHEDULES:
        with cpu_machine.schedule(**schedule):
            fault_kernel(cpu_machine, "warps_wait_apart", g_d=d)
        assert (d == 64).all()


def test_warpgroups_that_do_not_meet(cpu_machine):
    out, place = cpu_machine.empty(4096, np.float32), rf" at wgmma_faults.cu:{line('// three warps')}\b"
    exited = "a thread exited without the wgmma that .* of its warpgroup have reached.*"
    waits = "96 of 128 threads wait at .* in wgmma_wait; 96 of them have reached the wgmma"
    for schedule in SCHEDULES:
        with cpu_machine.schedule(**schedule):
            with pytest.raises(DeviceError, match=f"({exited}|{waits}){place}"):
                fault_kernel(cpu_machine, "a_warp_is_missing", g_d=out)
            with pytest.raises(DeviceError, match=waits):
                fault_kernel(cpu_machine, "a_warp_waits_elsewhere", g_d=out)
    with pytest.raises(DeviceError, match="the block's 96 threads hold only part of its warpgroup"):
        fault_kernel(cpu_machine, "not_whole", 96, g_d=out)


@pytest.mark.parametrize("entry, block, sentence", [
    ("too_many_registers", 384,
     "in setmaxnreg for 240 registers a thread: it has 168, and 8192 of the block's 65536"),
    ("odd_registers", 128, "setmaxnreg.dec to 100 registers: expected a multiple of 8 from 24 to 256"),
    ("wrong_way", 384, "setmaxnreg.dec to 240 registers, but a thread of warpgroup . has 168"),
    ("half_a_warpgroup", 128, "a thread exited while .* wait for it in setmaxnreg|wait at .* in setmaxnreg"),
])
def test_registers_that_are_not_there(cpu_machine, entry, block, sentence):
    for schedule in SCHEDULES:
        with cpu_machine.schedule(**schedule), pytest.raises(DeviceError, match=sentence):
            fault_kernel(cpu_machine, entry, block, g_out=cpu_machine.empty(384, np.int32))


@pytest.mark.parametrize("fault", [1, 2])  # no wait for the stage; the stage given back before wgmma_wait
def test_faults_between_copies_and_products(cpu, rng, fault):
    args, _, sigma2 = attention_inputs(cpu, rng)
    wanted = {line_of("specialised.cu", f"// {what} a stage of K") for what in ("reads", "fills")}
    for schedule in SCHEDULES:
        with cpu.schedule(**schedule), pytest.raises(RaceError) as caught:
            specialised(cpu, args, sigma2, fault)
        text = str(caught.value)
        assert {int(n) for n in re.findall(r"specialised\.cu:(\d+)", text)} == wanted and "wgmma's read" in text, text
