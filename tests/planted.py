"""Kernels that misbehave, as a user would write them outside the project, and runs of the command line."""
from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import cuattn
from cuattn.compile import build
from cuattn.machine import open_machine
from experiments import inputs

ROOT = Path(__file__).resolve().parent.parent

PLANTED_CU = """
#include "prim/gmem.cuh"
KERNEL(32, 1) planted_nothing() {}
KERNEL(32, 1) planted_hang() { for (volatile int x = 1; x;) {} }
#if defined(CUATTN_SIMT)
KERNEL(32, 1) planted_trap() { __builtin_trap(); }
#endif
KERNEL(32, 1) planted_wrong(const View<float, 3> g_lse) {
  if (threadIdx.x == 0) store_global(g_lse.at(0, 0), 7.f);
}
KERNEL(32, 1) planted_fickle(const View<float, 3> g_lse) {
  static int calls = 0;  // right until it has been checked, and wrong from then on
  if (threadIdx.x == 0 && ++calls > 2) store_global(g_lse.at(0, 0), 7.f);
}
KERNEL(32, 1) planted_outside(const View<float, 3> g_lse) {
  store_global(g_lse.at(0, 0) + (1ll << 40), 1.f);
}
"""
PLANTED_PY = """
import dataclasses, os, signal, sys, threading, time, traceback
import numpy as np
from pathlib import Path
from cuattn.kernels.base import Cost, Launch, Plan, Unsupported
from cuattn.kernels.flash import ROW as FLASH

NAME = Path(__file__).stem
CU = str(Path(__file__).with_name("planted.cu"))
FINE = NAME.startswith("fine")  # what flash is, under another name
LATER = NAME in ("wrong", "fickle")  # flash, and then a launch that spoils its result

def abort_while_running():
    main = threading.main_thread().ident
    while "_counted_run" not in "".join(traceback.format_stack(sys._current_frames()[main])):
        time.sleep(0.01)
    os.abort()

def plan(shape, device, overrides=None):
    if NAME == "abort":
        os.abort()
    if NAME == "sleep":
        Path(__file__).with_name(f"asleep-{os.getpid()}").touch()
        time.sleep(600)
    if NAME == "leave":
        os._exit(3)
    if NAME == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if NAME == "late":
        threading.Thread(target=abort_while_running, daemon=True).start()
    if NAME == "hungry":
        np.empty(1 << 60, "uint8")
    if NAME == "picky":
        raise Unsupported("picky: dislikes this shape; take another")
    if NAME == "typo":
        raise ZeroDivisionError("division by zero")
    if FINE:
        return FLASH.plan(shape, device)
    file = "/nowhere.cu" if NAME == "uncompiled" else CU
    entry = "planted_hang" if NAME == "late" else "planted_" + NAME
    before = FLASH.plan(shape, device) if LATER else Plan((), {})
    return Plan((*before.launches, Launch(file, entry, (1, 1, 1), 32, 0, {})), before.constants)

def arguments(shape, plan, t):
    before = FLASH.arguments(shape, plan, t) if FINE or LATER else []
    return before if FINE else [*before, [("lse", t["lse"])] if LATER or NAME == "outside" else []]

def cost(shape, plan, lengths=None):
    if FINE:
        return FLASH.cost(shape, plan)
    return Cost(1 << 64 if NAME == "boastful" else 1, 2, 3, 1)

ROW = dataclasses.replace(FLASH, name=NAME, file=CU, constants={}, plan=plan, arguments=arguments, cost=cost)
"""
SUITE = """
title = "Planted"
question = "Does every case end as a row?"
[repeat]
compile_s = 6
deadline_s = 2
[cpu.small]
kernels = ["flash"]
h = 2
hkv = 1
d = 64
n = 16
"""
AFTER = """
[cpu.after]
kernels = ["paged"]
h = 2
hkv = 1
d = 64
n = 24
"""


def plant(folder: Path, names) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "planted.cu").write_text(PLANTED_CU)
    for name in names:
        (folder / f"{name}.py").write_text(PLANTED_PY)
    return [str(folder / f"{name}.py") for name in names]


def suite_file(folder: Path, text: str = SUITE) -> str:
    path = folder / "planted suite ü.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def command(*words, **options) -> subprocess.Popen:
    """`python -m experiments …` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", *map(str, words)],
        text=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **options,
    )


def finished(*words, code: int = 0, seconds: float = 120) -> str:
    process = command(*words)
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, out + err
    assert "Traceback" not in out + err, out + err
    return out + err


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def asleep(kernel: str) -> set[int]:
    """The workers that have come to the kernel "sleep"."""
    return {int(path.name.split("-")[1]) for path in Path(kernel).parent.glob("asleep-*")}


def lines(run: Path) -> int:
    """Rows that the run's journals hold by now."""
    return sum(path.read_bytes().count(b"\n") for path in run.glob("journal-*.jsonl"))


def warm(folder: Path) -> None:
    """Compile what the suites above run, outside the deadlines that they set."""
    plant(folder, [])
    for entry in ("nothing", "hang", "outside", "trap", "wrong", "fickle"):
        build(str(folder / "planted.cu"), f"planted_{entry}", {}, "cpu")
    machine = open_machine("cpu")
    params = {"b": 1, "h": 2, "hkv": 1, "d": 64, "dtype": "bfloat16", "seed": 0, "page_size": 16,
              "layout": "bshd", "page_order": "sorted", "m": 16, "n": 16}
    cuattn.plan_attention(**inputs.build(machine, {**params, "family": "prefill"}))
    cuattn.plan_decode(**inputs.build(machine, {**params, "family": "decode", "m": 1, "n": 24}))
