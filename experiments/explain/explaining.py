"""`explain`: one run of a kernel on the CPU machine, counted by call site, as a document.

The document is everything the text, the timeline and the dashboard say: what was planned, what each line of
the source did, where shared memory lies, how the counts stand beside the closed forms. It holds the sources
it speaks of, and no times: the CPU machine models none.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import cuattn
from cuattn.cpu_trace import ACCESSES, COLUMNS, STEP_COLUMNS
from cuattn.kernels.base import Launch
from cuattn.kernels.probes import MMA_FLOPS
from cuattn.layout import LayoutUnknown, shared_layout
from cuattn.machine import Counters
from cuattn.paths import KERNELS
from experiments import subjects
from experiments.catalog import PEERS, Entry, catalog
from experiments.explain import asking, saved, timelines
from experiments.words import UserError, nearest

# Of shared memory, among cpu_trace.ACCESSES.
READS = ("shared load", "ldmatrix", "shared atomic", "wgmma", "bulk store")
WRITES = ("shared store", "stmatrix", "shared copy", "shared atomic", "bulk load")
REFUSALS = (cuattn.CompileError, cuattn.CompilerMissing, cuattn.ContractError, cuattn.MachineUnavailable,
            cuattn.Unsupported)


@dataclass(frozen=True)
class Request:
    """What `explain` was asked for.

    Parameters
    ----------
    kernel : str
    shape : str
        Pairs as in `asking.letters_of`.
    dtype : str
    causal : bool, optional
        None where nothing was said, which is full attention.
    constants : tuple of str
        NAME=VALUE.
    paths : tuple of str
        Modules of kernels from outside.
    block : int
        Linear index of the block whose timeline is kept.
    wait_s : float
        Estimated seconds that the run may take.
    """

    kernel: str
    shape: str = ""
    dtype: str = asking.DTYPE
    causal: bool | None = None
    constants: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    block: int = 0
    wait_s: float = asking.WAIT_S


def explain(request: Request, machine=None) -> dict[str, Any]:
    """Runs the kernel once and returns the document.

    Parameters
    ----------
    request : Request
    machine : CpuMachine, optional
        One with `tracing`; the process's own where none is given.

    Raises
    ------
    UserError
        What was asked for cannot be run: an unknown name or letter, a shape that is too large or unsupported.
    DeviceError
        The kernel does something it must not, a race in shared memory included.
    """
    entry = _entry(request)
    letters = asking.letters_of(entry, request.shape)
    constants = asking.constants_of(request.constants)
    params = asking.params_for(entry, letters, request.dtype, request.causal, constants)
    asking.check_size(params, request.wait_s)
    try:
        machine = cuattn.open_machine("cpu") if machine is None else machine
        subject = subjects.make(machine, params, entry, lambda arrays: None)
        planned = subject.planned
        launches = [launch for launch in planned.plan.launches if all(launch.grid)]
        _check_block(request.block, launches)
        counters, trace = _run(machine, subject, request.block)
        sites = [asdict(count) for count in trace.sites]
        shared = [_shared(i, launch, sites) for i, launch in enumerate(launches)]
    except REFUSALS as error:
        said = " ".join(str(error).split())
        raise UserError(said if said.startswith(f"{entry.name}: ") else f"{entry.name}: {said}") from error
    cost, title = planned.cost(), _title(entry, letters, params, constants)
    steps = [asdict(step) for step in trace.steps]
    return {
        "kernel": entry.name, "family": entry.family, "teaches": entry.row.teaches, "title": title,
        "command": command_line(request, entry, letters), "source_hash": planned.source_hash,
        "shape": letters, "dtype": params["dtype"], "causal": params.get("causal"), "constants": constants,
        "verdict": _verdict(subject), "schedule": str(machine.schedule_now),
        "plan": _plan(planned.plan, launches),
        "totals": _totals(counters, cost), "counters": asdict(counters),
        "intensity": _intensity(counters, cost),
        "sites": sites, "shared": shared,
        "timeline": {"block": request.block, "steps": steps,
                     "chart": timelines.whole(steps, f"{entry.name} · {title}").to_dict()},
        "files": _files([*(launch.file for launch in launches), *(site["file"] for site in sites)]),
        "glossary": {"accesses": dict(ACCESSES), "columns": dict(COLUMNS), "steps": dict(STEP_COLUMNS),
                     "counters": counter_meanings()},
    }


def _entry(request: Request) -> Entry:
    known = catalog(request.paths)
    if request.kernel in PEERS:
        raise UserError(f"explain: '{request.kernel}' is a library's kernel, whose source the CPU machine "
                        "cannot run; name one of the project's")
    own = {name: entry for name, entry in known.items() if entry.row is not None}
    if request.kernel not in own:
        raise UserError(f"explain: '{request.kernel}' is not a kernel; {nearest(request.kernel, own)}")
    return own[request.kernel]


def _check_block(block: int, launches: list[Launch]) -> None:
    largest = max((math.prod(launch.grid) for launch in launches), default=1)
    if not 0 <= block < largest:
        raise UserError(f"--block: expected 0 to {largest - 1}, the blocks of the largest launch, got {block}"
                        "; choose another")


def _run(machine, subject, block: int):
    """The counters and the trace of one run on poisoned outputs, in which races are looked for."""
    subject.poison()
    before, machine.races = machine.races, True
    try:
        with machine.counting() as counters, machine.tracing(block=block) as trace:
            subject.run()
    finally:
        machine.races = before
    return counters, trace


def _shared(number: int, launch: Launch, sites: list[dict[str, Any]]) -> dict[str, Any]:
    """One launch's shared memory: its members, and which call sites touched their bytes.

    What a site touched is one range of bytes, from the first to the last.
    """
    made = {"launch": number, "entry": launch.entry, "struct": None, "bytes": launch.smem_bytes, "why": "",
            "members": []}
    try:
        layout = shared_layout(launch)
    except (LayoutUnknown, cuattn.CompileError) as error:
        return made | {"why": f"its members cannot be told: {' '.join(str(error).split())}"}
    if layout is None:
        return made | {"why": "it uses no shared memory"}
    members = []
    for member in layout.members:
        end = member.offset + member.size
        touched = [i for i, site in enumerate(sites)
                   if site["launch"] == number and site["first"] < end and member.offset < site["end"]]
        members.append({**asdict(member),
                        "read_by": [i for i in touched if sites[i]["access"] in READS],
                        "written_by": [i for i in touched if sites[i]["access"] in WRITES]})
    return made | {"struct": layout.struct, "members": members}


def _plan(plan, launches: list[Launch]) -> dict[str, Any]:
    return {
        "constants": dict(plan.constants), "scratch_bytes": plan.scratch_bytes,
        "scratch": {name: {"shape": list(shape), "dtype": dtype}
                    for name, (shape, dtype) in plan.scratch.items()},
        "launches": [{"launch": i, "entry": launch.entry, "file": launch.file, "grid": list(launch.grid),
                      "block": launch.block, "smem_bytes": launch.smem_bytes,
                      "constants": dict(launch.constants)} for i, launch in enumerate(launches)],
    }


def _totals(counters: Counters, cost) -> list[dict[str, Any]]:
    """Counted beside closed forms: they must be equal to the byte."""
    return [{"what": name, "counted": getattr(counters, name), "closed_form": getattr(cost, name),
             "equal": getattr(counters, name) == getattr(cost, name)}
            for name in ("launches", "bytes_loaded", "bytes_stored")]


def _intensity(counters: Counters, cost) -> dict[str, Any]:
    """Useful flops over the bytes requested of global memory, and over those that mma.sync did."""
    moved, done = counters.bytes_loaded + counters.bytes_stored, counters.mma * MMA_FLOPS
    return {"flops": cost.flops, "bytes": moved, "flops_per_byte": cost.flops / moved if moved else None,
            "mma_flops": done, "useful_share": cost.flops / done if done else None}


def _verdict(subject) -> dict[str, Any]:
    verdict = subject.verdict()
    return {"ok": verdict.ok, "message": verdict.message, "max_err": _finite(verdict.max_err),
            "tolerance": _finite(verdict.tol)}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _files(names: Iterable[str]) -> dict[str, str]:
    """The sources by the names that call sites carry; a file that cannot be read is left out."""
    found = {}
    for name in dict.fromkeys(names):
        path = KERNELS / name  # an absolute name stays what it is
        if path.is_file():
            found[name] = path.read_text(encoding="utf-8")
    return found


def _title(entry: Entry, letters: Mapping[str, int], params: Mapping[str, Any], constants) -> str:
    words = [" ".join(f"{name}{value}" if name.isupper() else f"{name} {value}"
                      for name, value in letters.items()), params["dtype"]]
    if entry.family == "prefill":
        words.append("causal" if params["causal"] else "full")
    words += [f"{name}={value}" for name, value in constants.items()]
    return " · ".join(words)


def command_line(request: Request, entry: Entry, letters: Mapping[str, int]) -> str:
    """The command that explains the same again, whatever the defaults then are."""
    words = ["explain", entry.name, "--shape", ",".join(f"{name}={value}" for name, value in letters.items()),
             "--dtype", request.dtype]
    if entry.family == "prefill":
        words.append("--causal" if request.causal else "--full")
    for name, values in (("--constant", request.constants), ("--kernel", request.paths)):
        for value in values:
            words += [name, value]
    if request.block:
        words += ["--block", str(request.block)]
    if request.wait_s != Request.wait_s:
        words += ["--wait", f"{request.wait_s:g}"]
    return "python -m experiments " + shlex.join(words)


def counter_meanings() -> dict[str, str]:
    """What each of the machine's counters counts, in its own words."""
    return {field.name: field.metadata["meaning"] for field in fields(Counters)}


def holds(document: Mapping[str, Any]) -> bool:
    """Whether the result is right and every count equals its closed form."""
    return document["verdict"]["ok"] and all(row["equal"] for row in document["totals"])


def save(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes the document and its timeline; returns their paths.

    Raises
    ------
    StoreError
    """
    steps, title = document["timeline"]["steps"], f"{document['kernel']} · {document['title']}"
    page = timelines.page(timelines.whole(steps, title), title, timelines.lines(steps))
    return saved.write(folder, {**document, "command": out_of(document, folder)}, page)


def out_of(document: Mapping[str, Any], folder: str | Path) -> str:
    """The document's command with a folder to save into."""
    return f"{document['command']} --out {shlex.quote(str(folder))}"
