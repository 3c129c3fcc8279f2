"""What Nsight Compute counts for the launches of `traffic_cases.py`, beside what the CPU machine counts.

On a machine with a GPU and ncu:

    python -m tests.ncu_traffic experiments/recorded/h200/ncu-traffic.json

The record has a row for each entry of each case: how often it was launched, the hash of its source, and the
sums of the metrics below over those launches. `test_ncu_traffic.py` holds the CPU machine to it.
"""
from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.traffic_cases import CASES

RECORD = "experiments/recorded/h200/ncu-traffic.json"
COMMAND = f"python -m tests.ncu_traffic {RECORD}"
_SASS, _SM, _L1 = "smsp__sass_l1tex", "sm__inst_executed_pipe", "l1tex_"  # which unit counts
_PASSES = f"{_SASS}_data_pipe_lsu_wavefronts_mem_shared_op"
_CONFLICTS = f"{_L1}_data_bank_conflicts"

#: Of each name of `traffic_cases.SUMS` the metrics, with signs, whose sum is the same quantity on a GPU.
#: Those of instructions (`sass`) keep loads and copies apart and leave out passes lost to arbitration. Copies
#: go past L1: theirs is what came from L2. HFMA2.MMA, by which the compiler sets constants, is no product.
METRICS = {
    "load sectors": {f"{_SASS}_t_sectors_pipe_lsu_mem_global_op_ld": 1},
    "copy sectors": {"sm__sass_l1tex_m_xbar2l1tex_read_sectors_mem_global_op_ldgsts_cache_bypass": 1,
                     f"{_L1}_m_xbar2l1tex_read_sectors_mem_global_op_tma_ld": 1},
    "store sectors": {f"{_L1}_t_sectors_pipe_lsu_mem_global_op_st": 1},
    "atomic sectors": {f"{_L1}_t_sectors_pipe_lsu_mem_global_op_red": 1},
    "shared load passes": {f"{_PASSES}_ld": 1, f"{_PASSES}_ldsm": 1},
    "shared load conflicts": {f"{_CONFLICTS}_pipe_lsu_mem_shared_op_ld": 1},
    "shared store passes": {f"{_PASSES}_st": 1},
    "shared store conflicts": {f"{_CONFLICTS}_pipe_lsu_mem_shared_op_st": 1},
    "shared copy passes": {f"{_PASSES}_ldgsts": 1},
    "wgmma passes": {f"{_L1}_data_pipe_lsu_wavefronts_mem_shared_op_gmma": 1},
    "tensor instructions": {f"{_SM}_tensor_op_hmma": 1, f"{_SM}_tensor_op_hmma_type_hfma2": -1},
}
#: Passes lost to other users of the memory that L1 and shared memory are; conflicts above contain some.
ARBITRATION = f"{_CONFLICTS}_type_arbitration"
NAMES = sorted({name for metrics in METRICS.values() for name in metrics} | {ARBITRATION})


def launch(listing: str) -> None:
    """Run every case once; write down which launches that were."""
    from cuattn.compilers import compiler_of
    from cuattn.machine import open_machine
    from cuattn.sources import source_hash

    gpu, launches = open_machine("gpu"), []
    for name, make in CASES.items():
        planned = make(gpu)
        planned.run()
        gpu.synchronize()
        launches += [{"case": name, "entry": one.entry, "file": one.file, "source": source_hash(one.file)}
                     for one in planned.plan.launches]
    head = {"device": gpu.device.name, "compiler": compiler_of(gpu.device.arch)[1]}
    Path(listing).write_text(json.dumps({**head, "launches": launches}))


def summed(log: str, launches: list[dict]) -> list[dict]:
    """The rows of the record.

    Parameters
    ----------
    log : str
        What `ncu --csv --page raw` wrote: a line of names, one of units, one a launch.
    launches : list of dict
        The case, entry, file and source hash of each.
    """
    _units, *lines = csv.DictReader(line for line in log.splitlines() if line.startswith('"'))
    names = [line["Kernel Name"].split("(")[0] for line in lines]
    assert names == [one["entry"] for one in launches], "ncu saw other launches than the cases made"
    rows: dict[tuple[str, str], dict] = {}
    for line, one in zip(lines, launches):
        row = rows.setdefault((one["case"], one["entry"]), {**one, "launches": 0, "ncu": Counter()})
        row["launches"] += 1
        row["ncu"].update({name: int(float(line[f"{name}.sum"].replace(",", ""))) for name in NAMES})
    return list(rows.values())


def collect(out: str) -> None:
    """Run the cases under ncu and write the record."""
    with tempfile.TemporaryDirectory() as folder:
        log, listing = Path(folder) / "ncu.csv", Path(folder) / "launches.json"
        again = [sys.executable, "-m", "tests.ncu_traffic", "--launch", str(listing)]
        subprocess.run(again, check=True)  # builds the kernels, and says which there are
        entries = {one["entry"] for one in json.loads(listing.read_text())["launches"]}
        subprocess.run(  # NOTE: counts do not depend on clocks, so the card's stay as they are
            ["ncu", "--clock-control", "none", "--csv", "--page", "raw",
             "--metrics", ",".join(f"{name}.sum" for name in NAMES),
             "--kernel-name", f"regex:^({'|'.join(sorted(entries))})$", "--log-file", str(log), *again],
            check=True)
        found = json.loads(listing.read_text())
        rows = summed(log.read_text(), found.pop("launches"))
    Path(out).write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    launch(sys.argv[2]) if sys.argv[1] == "--launch" else collect(sys.argv[1])
