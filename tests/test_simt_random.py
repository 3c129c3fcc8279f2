"""Random programs of shuffles, votes, shared memory, barriers and arithmetic, against NumPy in lock-step."""
from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simt_launch import kernel, values
from simt_programs import LANES, OPS, REGISTERS, SHARED_BYTES, Instruction, cuda, draw, settle

from cuattn.compile import build
from cuattn.cpu import CpuMachine
from cuattn.machine import RaceError

THREADS = (32, 64, 128, 40, 100)  # the last two leave part of a warp empty
SCHEDULES = ({"order": "forward"}, {"order": "reverse"}, {"order": "shuffle", "seed": 5})


@st.composite
def instructions(choose, op=None):
    return draw(lambda n: choose(st.integers(0, n - 1)), op)


@st.composite
def programs(choose):
    """Some instructions, an exit of some lanes, a few more instructions; settled."""
    size = choose(st.integers(1, 32))  # lists without one are short
    drawn = choose(st.lists(instructions(), min_size=size, max_size=size))
    if choose(st.booleans()):
        drawn += [choose(instructions("EXIT")), *choose(st.lists(instructions(), max_size=6))]
    return settle(drawn, registers(choose(st.sampled_from(THREADS)), choose(st.integers(0, 1 << 20))))


def registers(threads: int, seed: int) -> np.ndarray:
    """Small and large numbers, so that comparisons and addresses fall both ways."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 40, (threads, REGISTERS), dtype=np.uint32)
    large = rng.integers(0, 1 << 32, (threads, REGISTERS), dtype=np.uint32)
    return np.where(rng.random((threads, REGISTERS)) < 0.3, large, small)


@pytest.fixture(scope="module")
def machine():
    made = CpuMachine(workers=1, races=True)
    yield made
    made.close()


def interpreter():
    return kernel("interpreter.cu", "interpreter")


def run(machine, built, program, code=None):
    """What a program leaves behind: (name, got, expected) of its registers and its shared memory."""
    end, shared = machine.empty(program.end.shape, np.uint32), machine.empty(program.shared.shape, np.uint32)
    given = {}
    if code is not None:  # for the interpreter; one number more, since an array without any has no address
        given = {"g_code": machine.upload(np.append(code, np.uint32(0))), "length": len(code)}
    args = values(machine, **given, g_in=machine.upload(program.start), g_out=end, g_shared=shared)
    machine.launch(built, 1, program.threads, SHARED_BYTES, args)
    return ("registers", end, program.end), ("shared", shared, program.shared)


def check(machine, built, program, code=None) -> None:
    """Every order leaves what NumPy does; else the program, and the first number that differs."""
    for schedule in SCHEDULES:
        with machine.schedule(**schedule):
            left = run(machine, built, program, code)
        for name, got, expected in left:
            differ = np.argwhere(got != expected)
            if len(differ):
                listing = "\n".join(map(str, program.code))
                raise AssertionError(f"{schedule}: {name}{differ[0].tolist()} of {program.threads} threads\n"
                                     f"{listing}")


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(program=programs())
def test_interpreted_programs(machine, program):
    check(machine, interpreter(), program, program.words())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(program=programs().filter(lambda program: program.needed), number=st.integers(0, 1 << 10))
def test_a_barrier_that_is_missing_is_a_race_in_every_order(machine, program, number):
    gone = program.needed[number % len(program.needed)]
    code = np.delete(program.words(), gone, axis=0)
    for schedule in SCHEDULES:
        with machine.schedule(**schedule), pytest.raises(RaceError):
            run(machine, interpreter(), program, code)


def test_compiled_programs(machine, tmp_path):
    """Every instruction is a call site of its own, and the two branches of an `if` stand on one line."""
    settled, seen = [], set()
    for seed, threads in enumerate((*THREADS, 128)):
        number = random.Random(seed).randrange
        drawn = [draw(number) for _ in range(30)] + [draw(number, "EXIT")] + [draw(number) for _ in range(6)]
        settled.append(settle(drawn, registers(threads, seed)))
        seen |= {i.op for i in settled[-1].code}
    assert seen == set(OPS)
    assert any(i.otherwise for program in settled for i in program.code)
    (tmp_path / "programs.cu").write_text(cuda(settled))
    for n, program in enumerate(settled):
        built = build(str(tmp_path / "programs.cu"), f"program_{n}", {}, "cpu")
        check(machine, built, program)
        check(machine, interpreter(), program, program.words())


def test_barriers_stand_where_threads_would_race_and_one_that_is_missing_shows(machine):
    """Each thread reads what its neighbour has written, in its own warp, then in another."""
    own, next_word, next_warp = 0, 1 << 8, LANES << 8
    drawn = [Instruction("THREAD", to=1), Instruction("STORE", a=1, immediate=own),
             Instruction("LOAD", to=2, immediate=next_word, masks=(0x7FFFFFFF,) * 4),
             Instruction("LOAD", to=3, immediate=next_warp)]
    program = settle(drawn, registers(64, 0))
    assert [i.op for i in program.code] == ["THREAD", "STORE", "WARP_SYNC", "LOAD", "BLOCK_SYNC", "LOAD"]
    check(machine, interpreter(), program, program.words())
    for gone in program.needed:
        code = np.delete(program.words(), gone, axis=0)
        with pytest.raises(RaceError):
            run(machine, interpreter(), program, code)
        machine.races = False
        with pytest.raises(AssertionError, match="of 64 threads"):
            check(machine, interpreter(), program, code)
        machine.races = True
