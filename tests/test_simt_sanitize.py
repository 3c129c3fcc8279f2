"""The CPU machine under AddressSanitizer: its own tests are clean, an overflow in a kernel is reported."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from simt_launch import KERNELS, line_of, values

from cuattn.compile import build, host_compiler
from cuattn.cpu import CpuMachine
from cuattn.machine import DeviceError, MachineUnavailable
from cuattn.sanitize import VARIABLE, library

TESTS = Path(__file__).parent
OVERFLOW = KERNELS / "overflow.cu"


@pytest.fixture
def asan(monkeypatch):
    """The variable is set; the test is skipped where the compiler has no libasan."""
    try:
        library(host_compiler())
    except MachineUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setenv(VARIABLE, "address")


def launch(machine, entry, size):
    """The output of a kernel of overflow.cu whose arrays hold 4 numbers."""
    out = machine.empty(64, np.int32)
    built = build(str(OVERFLOW), entry, {}, "cpu")  # not remembered: the variable changes
    machine.launch(built, 1, 64, 0, values(machine, g_out=out, size=size))
    return out


@pytest.mark.parametrize("entry, what, text", [
    ("past_local_array", "stack-buffer-overflow, WRITE of size 4", "past its end where size is more than 4"),
    ("past_table", "global-buffer-overflow, READ of size 4", "past the table where size is 4"),
])
def test_an_overflow_is_reported_and_the_next_launch_works(asan, entry, what, text):
    machine = CpuMachine(workers=1)
    assert (launch(machine, entry, 3) <= 5).all()
    with pytest.raises(DeviceError) as caught:
        launch(machine, entry, 5)
    message = str(caught.value)
    assert message.startswith(f"{entry}: AddressSanitizer: {what} in {entry} ")
    assert f"overflow.cu:{line_of('overflow.cu', text)}" in message
    assert message.endswith(",0,0) of block (0,0,0)")
    launch(machine, entry, 3)
    machine.close()


def test_without_it_the_same_overflow_goes_unseen(asan, monkeypatch):
    """So what is seen above is the sanitizer's; and its builds have a place of their own in the cache."""
    monkeypatch.delenv(VARIABLE)
    machine = CpuMachine(workers=1)
    launch(machine, "past_table", 4)
    machine.close()
    built = build(str(OVERFLOW), "past_table", {}, "cpu").path
    assert "-fsanitize=address" not in (built.parent / "entry.json").read_text()
    monkeypatch.setenv(VARIABLE, "address")
    assert build(str(OVERFLOW), "past_table", {}, "cpu").path != built


def test_the_machine_is_clean_and_reports_its_own_faults(asan):
    """All of its unit tests but those that wait for processes to end, and one case of attention."""
    cases = ["test_simt.py", "test_simt_faults.py", "test_simt_races.py", "test_simt_mbarrier.py",
             "test_flash.py::test_tiles[cpu-(64, 32, 2)]"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
               "-k", "not children_end", *(str(TESTS / case) for case in cases)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_unknown_sanitizers_are_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "thread")
    for action in (CpuMachine, lambda: build(str(OVERFLOW), "past_table", {}, "cpu")):
        with pytest.raises(ValueError, match=f"{VARIABLE}: expected 'address' or nothing, got 'thread'"):
            action()


def compiler_that_names(path: object, folder: Path) -> tuple[str, ...]:
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\necho {path}\n")
    script.chmod(0o755)
    return (str(script),)


def test_the_library_is_found_behind_a_linker_script_or_missed_in_one_sentence(tmp_path):
    (tmp_path / "libasan.so.8").write_bytes(b"\x7fELF")
    script = tmp_path / "libasan.so"
    script.write_text(f"INPUT ( {tmp_path}/libasan.so.8 )\n")
    assert library(compiler_that_names(script, tmp_path)) == tmp_path / "libasan.so.8"
    library.cache_clear()
    with pytest.raises(MachineUnavailable, match="expected a compiler with libasan.so, and .* has none"):
        library(compiler_that_names("libasan.so", tmp_path))
