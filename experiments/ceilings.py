"""What a device can do at most, as the suite `ceilings` measured it: no datasheet's numbers here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from experiments import store

SUITE = "ceilings"


@dataclass(frozen=True)
class Ceilings:
    """The best rates its probes reached: reading in GB/s, and `mma.sync` in TFLOP/s by dtype."""

    read_gbps: float | None = None
    tflops: Mapping[str, float] = field(default_factory=dict)

    @property
    def best_tflops(self) -> float | None:
        """Of any dtype."""
        return max(self.tflops.values(), default=None)

    def __bool__(self) -> bool:
        return self.read_gbps is not None or bool(self.tflops)


def of_rows(frame: pd.DataFrame, device: str) -> Ceilings:
    """What these rows say of that device; another's are never borrowed."""
    probes = frame[(frame["family"] == "probe") & (frame["device"] == device) & (frame["status"] == "ok")]
    read = probes[probes["kernel"] == "read"]["modelled_gbps"].max()
    products = probes[probes["kernel"] == "mma"].groupby("dtype", dropna=False)["measured_tflops"].max()
    products = products.dropna()
    return Ceilings(
        float(read) if pd.notna(read) else None, {str(d): float(x) for d, x in products.items()}
    )


def measured(device: str, path: Path) -> Ceilings:
    """Those of the run at `path`, of the newest run of `ceilings` beside it, or of the recorded runs.

    The first of them that has any for this device.
    """
    for folder in _places(path):
        if found := of_rows(store.read_runs(folder).frame, device):
            return found
    return Ceilings()


def _places(path: Path) -> Iterator[Path]:
    for folder in (path, *_beside(path), *sorted(store.RECORDED.glob(f"*/{SUITE}"))):
        if folder.is_dir():
            yield folder


def _beside(path: Path) -> list[Path]:
    found = []
    for manifest in path.resolve().parent.glob("*/manifest.json"):
        try:
            if store.read_manifest(manifest.parent).get("suite") == SUITE:
                found.append(manifest.parent)
        except store.StoreError:
            continue  # `show` reports what cannot be read
    return sorted(found, reverse=True)
