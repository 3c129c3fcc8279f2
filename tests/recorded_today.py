"""Recorded runs as if their kernels had not changed since, for tests of what is said of rows that are not stale."""
from __future__ import annotations

import shutil
from pathlib import Path

from experiments import store
from experiments.catalog import current_hashes


def as_of_today(folder: Path, *names: str) -> list[Path]:
    """Copies of `recorded/h200/NAME` below `folder`, each row with a source that its kernel has today.

    Without names: of all runs there.
    """
    today, made = current_hashes(), []
    for name in names or [part.parent.name for part in sorted(store.RECORDED.glob(f"h200/*/{store.PART}"))]:
        run = folder / name
        shutil.copytree(store.RECORDED / "h200" / name, run)
        rows = store.read_rows(run)
        for row in rows:
            if row["source_hash"] is not None and row["kernel"] in today:
                row["source_hash"] = today[row["kernel"]].split("+")[0]
        store.write_part(run, rows, store.read_manifest(run))
        made.append(run)
    return made
