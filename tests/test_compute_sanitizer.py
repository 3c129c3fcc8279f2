"""Kernels under NVIDIA's compute-sanitizer: what the CPU machine finds is asked of the hardware too.

Every one but the probes that only read, multiply or do nothing.
"""
from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuattn.kernels import ROWS

ROOT = Path(__file__).parent.parent
EVERY_CASE = """
import cuattn
from tests.traffic_cases import CASES
machine = cuattn.open_machine("gpu")
for name, make in CASES.items():
    make(machine).run()
    machine.synchronize()
    print("ran", name, flush=True)
"""
NO_ERRORS = r"ERROR SUMMARY: 0 errors"
CLEAN = {"memcheck": NO_ERRORS, "initcheck": NO_ERRORS, "racecheck": r"RACECHECK SUMMARY: 0 hazards displayed"}


def findings(tool: str, said: str) -> str:
    """What the tool has found, "" if nothing; a tool that did not come to its summary has found something."""
    if re.search(CLEAN[tool], said):
        return ""
    return "\n".join([line for line in said.splitlines() if line.startswith("=========")] or [said])[-4000:]


@pytest.mark.gpu
@pytest.mark.parametrize("tool", CLEAN)
def test_kernels_are_clean(tool):
    from traffic_cases import CASES

    if not shutil.which("compute-sanitizer"):
        pytest.skip("compute-sanitizer comes with the CUDA toolkit, which is not installed here")
    done = subprocess.run(["compute-sanitizer", "--tool", tool, sys.executable, "-c", EVERY_CASE], cwd=ROOT,
                          capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    assert not findings(tool, said), findings(tool, said)
    assert re.findall(r"^ran (.*)$", done.stdout, re.M) == list(CASES)


def test_every_kernel_has_a_case():
    from traffic_cases import CASES

    probes = {name for name, row in ROWS.items() if row.family == "probe"} - {"copy"}
    assert {name.partition(",")[0].split()[0] for name in CASES} == set(ROWS) - probes


@pytest.mark.parametrize("tool, said, found", [
    ("memcheck", "========= COMPUTE-SANITIZER\nran flash\n========= ERROR SUMMARY: 0 errors\n", False),
    ("memcheck", "========= Invalid __global__ write of size 16\n========= ERROR SUMMARY: 10 errors\n", True),
    ("initcheck", "========= Uninitialized __global__ memory read of size 4\n========= ERROR SUMMARY: 1 error\n", True),
    ("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", False),
    ("racecheck", "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", True),
    ("memcheck", "Traceback: no device\n", True),
])
def test_what_a_tool_says_is_read(tool, said, found):
    assert bool(findings(tool, said)) == found
