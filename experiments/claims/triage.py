"""What `diagnose` names first for each row of a ladder; the metric `named_fault` compares it with the rung.

`python -m experiments.claims.triage RUN …` prints it as JSON, for readers that import no kernel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from experiments import ceilings, store
from experiments.catalog import current_hashes
from experiments.diagnose import row_causes
from experiments.diagnose.rules import CAUSES


def causes(frame: pd.DataFrame, hashes: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """(run, case) → the cause named first, "" for none, of every row of a rung that can be diagnosed.

    Rows of devices without measured ceilings cannot: what share of the device they use is not known.

    Parameters
    ----------
    frame : pandas.DataFrame
        As `store.read_runs` gives it.
    hashes : mapping
        Kernel → its hashes today. Stale rows are neither diagnosed nor anybody's baseline or ceiling.
    """
    fresh = frame[~store.stale(frame, hashes)]
    found = {str(device): ceilings.of_rows(fresh, device) for device in fresh["device"].dropna().unique()}
    tops = {device: row_causes.Ceiling.measured(top) for device, top in found.items()
            if top.read_gbps and top.tflops}
    climbed = fresh[fresh["rung"].notna() & fresh["device"].isin(list(tops))]
    return {
        (row["run_id"], row["case_id"]): case.verdict if case.verdict in CAUSES else ""
        for row, case in row_causes.cases(climbed, tops.__getitem__)
        if case.verdict not in (row_causes.TOO_SMALL, row_causes.UNTIMED)
    }


if __name__ == "__main__":
    runs = store.read_runs([Path(path) for path in sys.argv[1:]]).frame
    print(json.dumps([[*place, cause] for place, cause in causes(runs, current_hashes()).items()]))
