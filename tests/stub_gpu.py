"""Workers on GPUs that are not there: what a worker's process says and does, without a machine."""
from __future__ import annotations

import os
import time
from pathlib import Path

from experiments import worker

CARDS = [{"uuid": "GPU-aaaa-1", "name": "H200"}, {"uuid": "GPU-bbbb-2", "name": "H200"}]
ABORTS, LOST = 13, 14  # keys of the cases at which a worker dies, and does not come back


def serve(pipe, parent: int, machine: str, kernels: list[str], repeat, environ, lock) -> None:
    """A worker on the GPU that its environment shows, which keeps its lock open."""
    worker.isolate(parent)
    os.environ.update(environ)
    uuid = os.environ.get("CUDA_VISIBLE_DEVICES", CARDS[0]["uuid"])
    if lock is not None:
        os.fstat(lock)
    gone = Path(os.environ["STUB_FOLDER"]) / uuid
    if gone.exists():
        worker.tell(pipe, "unavailable", f"{uuid} has fallen off the bus")
        return
    name = os.environ.get("STUB_NAME " + uuid, "H200")
    worker.tell(pipe, "ready", {"machine": "gpu", "device": name, "arch": "sm_90a", "device_uuid": uuid})
    while (params := worker.receive(pipe)) is not None:
        worker.tell(pipe, "phase", "build")
        time.sleep(0.02)
        if params["n"] == LOST:
            gone.touch()
        if params["n"] in (ABORTS, LOST):
            os.abort()
        worker.tell(pipe, "row", {"status": "ok", "max_err": 0.0})
