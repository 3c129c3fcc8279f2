"""The CPU machine on aarch64: cross-built and under qemu, with the bits and the messages it has here."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import aarch64
import ml_dtypes
import numpy as np
import pytest
from simt_launch import KERNELS, values

from cuattn.compile import build
from cuattn.cpu import CpuMachine
from cuattn.machine import DeviceError
from cuattn.sanitize import VARIABLE

TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(bool(aarch64.why_not()), reason=aarch64.why_not())
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def unsanitized(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)  # its library would be this computer's


def results(file, entry, block, smem, args, element="bfloat16", schedule=None):
    """The bits of every array, or the message of a launch that fails.

    An array is uploaded, (size, dtype) is an output, an int is an int32.
    """
    machine = CpuMachine(workers=1, **schedule or {})
    given = [machine.upload(a) if isinstance(a, np.ndarray) else machine.empty(*a) if isinstance(a, tuple)
             else a for a in args]
    named = values(machine, **{f"argument_{i}": a for i, a in enumerate(given)})
    constants = {"Element": element} if file == "collectives.cu" else {}
    try:
        built = build(str(KERNELS / file), entry, constants, "cpu")  # not remembered: the compiler changes
        machine.launch(built, 1, block, smem, named)
    except DeviceError as error:
        return str(error)
    finally:
        machine.close()
    return b"".join(a.tobytes() for a in given if isinstance(a, np.ndarray))


def both(*case, **options):
    """The results on this computer, then on an emulated aarch64."""
    here = results(*case, **options)
    with aarch64.emulation():
        return here, results(*case, **options)


def floats(*shape, dtype=np.float32):
    """Normal numbers, and some that are denormal in float32 or in float16."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal(shape)
    scale = rng.choice([1.0, 1e-39, 1e-6], shape, p=[0.8, 0.1, 0.1])
    return (x * scale).astype(dtype)


@pytest.mark.parametrize("entry, smem, args", [
    ("shuffles", 0, [floats(64), (320, np.float32), (64, np.int32)]),
    ("masked", 0, [(64, np.int32)]),
    ("pipeline", 256, [np.arange(288, dtype=np.int32), (288, np.int32), 9]),
    ("staged", 1024, [floats(256), (256, np.float32), 37]),
    ("atomics", 0, [np.arange(64, dtype=np.int32), *(np.zeros(n, d) for n, d in (
        (8, np.int32), (1, np.int32), (1, np.float32), (1, np.uint32))), (1, np.int32)]),
])
@pytest.mark.parametrize("schedule", [{}, {"order": "shuffle", "seed": 2, "async_copies": "eager"}], ids=str)
def test_equal_bits(entry, smem, args, schedule):
    here, there = both("collectives.cu", entry, 64, smem, args, schedule=schedule)
    assert isinstance(here, bytes), here
    assert there == here


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_equal_bits_of_matrix_products(dtype):
    a, b, c = floats(16, 16, dtype=dtype), floats(16, 8, dtype=dtype), floats(16, 8)
    args = [a, b.T.copy(), b, c, (256, np.float32)]
    here, there = both("collectives.cu", "product", 32, 1024, args, element=dtype.name)
    assert np.isfinite(np.frombuffer(here, np.float32)[-256:]).all()
    assert there == here


@pytest.mark.parametrize("entry, block, args, text", [
    ("half_warp_waits", 32, [(32, np.int32)], "deadlock in block (0,0,0): every live thread waits"),
    ("divergent", 64, [(64, np.float32)], "divergent __syncthreads: 32 threads wait"),
    ("no_commit", 64, [floats(64), (64, np.float32)], "cp.async issued here was never waited for"),
    ("read_past_end", 32, [floats(160), (128, np.float32), 35], "read of 16 bytes at byte 640 of argument_0"),
    ("raw_read", 32, [floats(64), (64, np.float32)], "raw dereference of device memory, byte 20 of "),
    ("wide_stack_overflow", 32, [(32, np.int32), 400], "stack overflow: the thread's local arrays"),
    ("illegal", 32, [(32, np.int32)], "an illegal instruction"),
])
def test_equal_messages(entry, block, args, text):
    here, there = both("faults.cu", entry, block, 256, args)
    assert text in here
    assert there == here


def test_the_machines_own_tests_and_attention():
    """All but those that need arrays of gigabytes or wait for processes to end."""
    cases = ["test_simt.py", "test_simt_faults.py", "test_simt_mbarrier.py",
             "test_simt_random.py::test_interpreted_programs", "test_flash.py::test_tiles[cpu-(64, 32, 2)]"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "aarch64", "-p", "no:cacheprovider",
               "-p", "no:xdist", "-k", "not children_end and not past_4_gib",
               *(str(TESTS / case) for case in cases)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) child processes ran on aarch64", done.stdout).group(1)) > 10
