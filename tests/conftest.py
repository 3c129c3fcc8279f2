"""Fixtures for all tests: the machines, a seeded generator, and what becomes of `gpu` tests without a GPU."""
from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest

from cuattn.kernels import ROWS
from cuattn.machine import MachineUnavailable, open_machine

os.environ.setdefault("CUATTN_CPU_RACES", "1")  # every kernel a test runs is also checked for races
os.environ.setdefault("CUATTN_CPU_OPTIMIZE", "g")  # most of them run for a moment: building is what takes time
if shutil.which("c++") and shutil.which("ld.gold"):  # it links a kernel in a quarter of the time
    os.environ.setdefault("CXX", "c++ -fuse-ld=gold")
# Tests start a hundred processes, and each would compile every module of the repository anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job; tests send Ctrl-C to children
    signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def why_no_gpu() -> str:
    """Empty where the GPU machine opens, else the reason."""
    try:
        open_machine("gpu")
    except MachineUnavailable as error:
        return str(error)
    return ""


def pytest_report_header(config):
    return f"gpu tests: not run, {why_no_gpu()}" if why_no_gpu() else "gpu tests: run on this machine's GPU"


def pytest_collection_modifyitems(config, items):
    """Without a GPU its tests are deselected; asked for by `-m gpu`, they are skipped with the reason."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or not why_no_gpu():
        return
    if config.getoption("markexpr"):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=why_no_gpu()))
        return
    items[:] = [item for item in items if item not in set(marked)]
    config.hook.pytest_deselected(items=marked)


@pytest.fixture(scope="session")
def cpu():
    """The CPU machine."""
    return open_machine("cpu")


@pytest.fixture(scope="session", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request):
    """Each machine in turn; the GPU only where there is one."""
    return open_machine(request.param)


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """What is there before a file's tests is no garbage: every case of a run collects twice, and would look at
    all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def table_of_kernels():
    """What a test adds to the table of kernels is gone after it."""
    before = dict(ROWS)
    yield
    if before != dict(ROWS):
        ROWS.clear()
        ROWS.update(before)


@pytest.fixture
def rng():
    """A generator with a fixed seed."""
    return np.random.default_rng(20)


@pytest.fixture
def randn(rng):
    """randn(*shape, dtype="float16"): standard normal values of that dtype."""

    def make(*shape, dtype="float16"):
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    return make
