"""The places of a Ray cluster: a GPU each, or on the CPU machine a share of a node; and how to join one."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.places import CPU_WORKERS
from experiments.words import UserError

INSTALL = "pip install 'ray[default]>=2.40,<3'"
STORE_BYTES = 80 << 20  # nothing large goes through Ray's object store; this is the least it takes
ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True)
class RayPlace:
    """A node of the cluster, by Ray's id and by its host's name, and what its worker gets of it."""

    node: str
    host: str
    gpu: bool
    cpus: float
    environ: Mapping[str, str] = field(default_factory=dict)
    uuid: None = None  # a host locks its own GPU

    def __str__(self) -> str:
        return f"{self.host} (Ray's node {self.node[:8]})"


def connect(address: str | None) -> None:
    """Join the cluster, or start one of this host alone where none is named and none runs.

    Raises
    ------
    UserError
        Ray is not installed, the address is none, or nothing answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(f"--executor ray: needs Ray ({error}); install it with: {INSTALL}") from None
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        if address is not None:
            _knock(address)
        ray.init(address or "auto", **quiet)
    except (ConnectionError, RuntimeError, OSError) as error:
        if address is None and isinstance(error, ConnectionError):
            ray.init("local", include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
            return
        where = "on this host" if address is None else f"at '{address}'"
        raise UserError(f"--address: no Ray cluster that one can join answers {where} ({first_line(error)}); "
                        f"{_advice(error)}start one with: ray start --head") from None


def _advice(error: BaseException) -> str:
    """What to try first where something listens and does not let this process in."""
    if isinstance(error, ConnectionRefusedError) or "RAY_AUTH_MODE" in os.environ:
        return ""
    # NOTE: newer versions of `ray start` ask for a token, which a named address does not tell to who joins.
    return "if it asks for a token, set RAY_AUTH_MODE=token here, too; else "


def _knock(address: str) -> None:
    """Whether anything listens there; Ray itself would try for minutes.

    Raises
    ------
    UserError, OSError
    """
    host, colon, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address:
        raise UserError(f"--address: expected HOST:PORT, such as 10.0.0.1:6379, got '{address}'; a run joins "
                        "the cluster on one of its nodes")
    socket.create_connection((host, int(port)), timeout=10).close()


def ray_places(
    machine: str, devices: str | None = None, jobs: int | None = None
) -> tuple[str, list[RayPlace]]:
    """The machine and the places that the joined cluster has: one a GPU, or `jobs` a node on the CPU machine.

    Parameters
    ----------
    machine : {"best", "cpu", "gpu"}
        "best" is the GPUs where any node has one.
    devices : str, optional
        "all", or what a GPU's accelerator type contains, as Ray names it, such as "H200".
    jobs : int, optional
        Workers a node on the CPU machine; one if not given.

    Raises
    ------
    UserError
        Options that mean nothing there, or no such GPU.
    """
    nodes = alive()
    cards = [node for node in nodes if node["Resources"].get("GPU", 0) >= 1]
    if machine == "gpu" or devices is not None or machine == "best" and cards:
        if machine == "cpu":
            raise UserError("--devices: the CPU machine has none; leave it out, or use --jobs for more")
        if jobs is not None:
            raise UserError("--jobs: a GPU has one worker, and this run takes the cluster's GPUs; leave it "
                            "out, or run with --machine cpu")
        wanted = "" if devices in (None, "all") else devices.lower()
        chosen = [node for node in cards if wanted in kind(node).lower()]
        if not chosen:
            kinds = ", ".join(sorted({kind(node) or "of no named type" for node in cards})) or "none"
            raise UserError(f"--executor ray: the cluster has no such GPU; its GPUs are: {kinds}")
        return "gpu", [place for node in chosen for place in _on(node, int(node["Resources"]["GPU"]), True)]
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs: expected at least 1 worker, got {jobs}")
    nodes = [node for node in nodes if node["Resources"].get("CPU", 0) > 0]
    if not nodes:
        raise UserError("--executor ray: no node of the cluster offers a CPU; start one with: ray start "
                        "--address …")
    return "cpu", [place for node in nodes for place in _on(node, jobs or 1, False)]


def _on(node: Mapping[str, Any], workers: int, gpu: bool) -> list[RayPlace]:
    """The places of a node, whose workers together take its CPUs at most once."""
    cpus = node["Resources"].get("CPU", 0)
    share = min(1.0, int(100 * cpus / workers) / 100)  # Ray takes hundredths
    alone = gpu or workers == 1
    environ = {} if alone else {CPU_WORKERS: str(max(1, int(cpus / workers)))}
    return [RayPlace(node["NodeID"], node["NodeManagerHostname"], gpu, share, environ)] * workers


def alive() -> list[dict[str, Any]]:
    """The cluster's nodes, as Ray describes them, in a lasting order."""
    import ray

    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"])


def kind(node: Mapping[str, Any]) -> str:
    """The type of a node's GPUs; empty where Ray does not know it."""
    names = [name for name in node["Resources"] if name.startswith(ACCELERATOR)]
    return names[0].removeprefix(ACCELERATOR) if names else ""


def first_line(error: BaseException) -> str:
    """What an error of Ray says, without the page that follows."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
