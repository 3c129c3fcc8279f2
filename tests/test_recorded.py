"""What ships as recorded: small, named with what it lacks, right, and counted to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from experiments import ladder, store

RUNS = sorted(path.parent for path in store.RECORDED.glob("*/*/" + store.PART))
README = (store.RECORDED / "README.md").read_text()


def rows(run: Path) -> pd.DataFrame:
    return pd.read_parquet(run / store.PART)


def manifest(run: Path) -> dict:
    return json.loads((run / "manifest.json").read_text())


@pytest.mark.parametrize("folder", sorted(store.RECORDED.glob("*/*/")), ids=lambda path: path.name)
def test_a_folder_is_small(folder):
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 2e6


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}-{run.name}")
def test_a_run_is_named_with_what_it_lacks(run):
    name = run.name
    assert run.parent.name == "cpu" or f"`h200/{name}`" in README or f"`{name}`" in README
    planned, done = len(manifest(run)["cases"]), rows(run)["case_id"].nunique()
    assert done == planned or f"{done} of {planned}" in README


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parent.name}-{run.name}")
def test_what_is_timed_or_counted_is_right(run):
    found = rows(run)
    known = found[found["measured_time_us"].notna() | found["counted_bytes_loaded"].notna()]
    assert set(known["status"]) <= {"ok"}
    compared = known[~known["family"].isin(["probe", "cache"])]
    assert (compared["max_err"] <= compared["tolerance"]).all()


@pytest.mark.parametrize("run", [run for run in RUNS if run.parent.name == "cpu"], ids=lambda run: run.name)
def test_counts_are_the_closed_forms_to_the_byte(run):
    found = rows(run)
    assert len(found) and found["measured_time_us"].isna().all()
    for what in ("bytes_loaded", "bytes_stored", "launches"):
        assert (found[f"counted_{what}"] == found[f"modelled_{what}"]).all(), what


def test_every_rung_of_the_ladder_reports_what_it_costs_and_buys():
    """At the articles' shape and at three more; what does not fit is `oom`."""
    found = rows(store.RECORDED / "h200" / "ladder")
    rungs = [rung.name for rung in ladder.rungs_of(manifest(store.RECORDED / "h200" / "ladder"))]
    wanted = ["measured_time_us", "measured_tflops", "measured_tokens_per_s", "measured_peak_pool_bytes",
              "measured_sm_busy", "measured_empty_us", "modelled_launches", "modelled_bytes_loaded"]
    shapes = found[found["rung"].notna() & (found["m"] == found["n"])].groupby(["b", "h", "hkv", "n", "mode"])
    whole = {shape: part for shape, part in shapes if sorted(part["rung"]) == sorted(rungs)}
    assert {(8, 32, 32, 8192, "launch"), (16, 32, 32, 8192, "launch")} < set(whole) and len(whole) >= 5
    for shape, part in whole.items():
        lost = part[part["status"] != "ok"]
        assert list(lost["rung"]) == (["0"] if shape[0] == 16 else []) and (lost["status"] == "oom").all()
        assert part.loc[part["status"] == "ok", wanted].notna().all(axis=None), shape
