"""Where workers work: one a GPU, chosen by its UUID, or several on the CPU machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments import environment
from experiments.locks import Lock, take
from experiments.words import UserError

CPU_WORKERS = "CUATTN_CPU_WORKERS"


@dataclass(frozen=True)
class Place:
    """Where one worker works.

    Attributes
    ----------
    uuid : str or None
        The GPU's UUID, as NVML gives it; None for the CPU machine, and where NVML does not say.
    environ : mapping
        What the worker's environment gets before it imports anything.
    """

    uuid: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


def places(machine: str, devices: str | None = None, jobs: int | None = None) -> tuple[str, list[Place]]:
    """The machine and the places that `--machine`, `--devices` and `--jobs` ask for.

    Parameters
    ----------
    machine : {"best", "cpu", "gpu"}
    devices : str, optional
        "all", or numbers and UUIDs separated by commas. A number counts the visible GPUs in the order of their
        bus, from 0. Without it the first one is taken.
    jobs : int, optional
        Workers on the CPU machine; one if not given.

    Raises
    ------
    UserError
    """
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs: expected at least 1 worker, got {jobs}")
    if devices is not None:
        if machine == "cpu":
            raise UserError("--devices: the CPU machine has none; leave it out, or use --jobs for more workers")
        if jobs is not None:
            raise UserError("--jobs: a GPU has one worker; name more GPUs with --devices, or leave it out")
        return "gpu", [_on(uuid) for uuid in chosen(devices, environment.gpus())]
    gpu = machine == "gpu" or machine == "best" and environment.gpu_expected()
    if not gpu:
        return machine if jobs is None else "cpu", [Place(None, _share(jobs or 1))] * (jobs or 1)
    if jobs is not None:
        raise UserError("--jobs: means the CPU machine, and this run takes the GPU; leave it out, or run with "
                        "--machine cpu")
    cards = environment.gpus()
    if len(cards) > 1:
        return machine, [_on(cards[0]["uuid"])]
    return machine, [Place(cards[0]["uuid"] if cards else None)]


def _share(jobs: int) -> dict[str, str]:
    """The processes of each worker's CPU machine, so that all together are as many as there are CPUs."""
    if jobs == 1 or CPU_WORKERS in os.environ:
        return {}
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {CPU_WORKERS: str(max(1, cpus // jobs))}


def _on(uuid: str | None) -> Place:
    return Place(uuid, {"CUDA_VISIBLE_DEVICES": uuid} if uuid else {})


def chosen(words: str, cards: list[dict]) -> list[str]:
    """UUIDs of the GPUs that are named.

    Raises
    ------
    UserError
        One is not here, or named twice.
    """
    if not cards:
        raise UserError(f"--devices: there is no GPU to choose here ({environment.no_gpu_reason()})")
    known = [str(card["uuid"]) for card in cards]
    if words.strip() == "all":
        return known
    found: list[str] = []
    for word in (part.strip() for part in words.split(",")):
        if word.isdecimal():
            match = known[int(word) : int(word) + 1]
        else:
            match = [uuid for uuid in known if word and uuid.lower().startswith(word.lower())]
        if len(match) != 1:
            here = ", ".join(f"{i} ({uuid})" for i, uuid in enumerate(known))
            raise UserError(f"--devices: '{word}' names no single GPU of those here: {here}")
        if match[0] in found:
            raise UserError(f"--devices: {match[0]} is named twice; name each GPU once")
        found += match
    return found


def lock_device(uuid: str, waiting: Callable[[str], None] | None = None) -> Lock:
    """Take the lock of a GPU, so that two runs never time on it at once.

    Its file lies in the kernel cache: runners that do not share that folder do not see each other.

    Raises
    ------
    Busy
    """
    from cuattn.compile import CompileError, cache_folder

    advice = "wait for it with --wait, take another one with --device, or stop that process"
    try:
        folder = cache_folder() / "locks"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, CompileError) as error:
        return Lock(Path(f"{uuid}.lock"), None, f"{uuid} cannot be locked here ({error})")
    return take(folder / f"{uuid}.lock", uuid, advice, waiting)
