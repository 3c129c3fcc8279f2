"""Ladders: rungs keep their names from suite to row, neighbours differ in one thing, and rows of one run are
read against each other and against the device's ceilings."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from commands import call
from compared_rows import row

from cuattn.devices import CARDS
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from experiments import ceilings, costs, estimate, ladder, runner, schema, store
from experiments.catalog import catalog
from experiments.ceilings import Ceilings
from experiments.suite import Repeat, load_suite, parse_suite, suite_names
from experiments.sweep import Case, cases_of
from experiments.words import UserError
from experiments.worker import Worker

H200 = CARDS["H200"]
STEPS = {
    "title": "t", "question": "q?",
    "rungs": [
        {"name": "0", "kernel": "standard"},
        {"name": "1", "kernel": "chunked_fused", "constants": {"chunk": 32, "tile_n": 32}, "change": "loop"},
        {"name": "2", "kernel": "flash", "change": "none"},
        {"name": "1b", "kernel": "chunked_fused", "constants": {"chunk": 64}, "change": "more", "after": "1"},
    ],
    "cpu": {"small": {"rungs": "all", "h": 1, "hkv": 1, "d": 64, "n": 32}},
}  # fmt: skip


def parse(**changed):
    return parse_suite("steps", {**copy.deepcopy(STEPS), **changed}, "steps.toml")


def with_rung(index: int, **changed) -> dict:
    rungs = copy.deepcopy(STEPS["rungs"])
    rungs[index] |= changed
    return {"rungs": [{k: v for k, v in rung.items() if v is not None} for rung in rungs]}


# --- rungs in a suite


def test_a_sweep_over_rungs_is_one_over_their_kernels_and_constants():
    suite = parse()
    found = cases_of(suite, "cpu", catalog())
    assert [(c.params["kernel"], c.params.get("constants")) for c in found] == [
        ("standard", None), ("chunked_fused", '{"chunk": 32, "tile_n": 32}'),
        ("chunked_fused", '{"chunk": 64}'), ("flash", None),
    ]  # fmt: skip
    assert [rung.after for rung in suite.rungs] == ["", "0", "1", "1"]
    assert ladder.faults(suite.rungs) == {}
    assert ladder.faults(parse(**with_rung(2, faults=[])).rungs) == {("flash", None): frozenset()}
    some = parse(cpu={"small": {**STEPS["cpu"]["small"], "rungs": ["2", "1b"]}})
    assert {c.params["kernel"] for c in cases_of(some, "cpu", catalog())} == {"flash", "chunked_fused"}


@pytest.mark.parametrize("changed, words", [
    ({"rungs": "all"}, "rungs: expected tables that begin with [[rungs]], got 'all'"),
    (with_rung(1, chnge="x"), "did you mean 'change'?"),
    (with_rung(1, constants=3), "constants expected a table"),
    (with_rung(1, name=None), "has no name; add one"),
    (with_rung(1, change=None), "1 has no change; add one"),
    (with_rung(1, name="0"), "0 is there twice"),
    (with_rung(3, constants={"tile_n": 32, "chunk": 32}), "1b is there twice, by its name or by what it is"),
    (with_rung(1, faults="tiles"), "faults expected a list, got 'tiles'"),
    (with_rung(1, faults=["tile"]), "faults: 'tile' is not a cause; did you mean 'tiles'?"),
    (with_rung(1, faults=[["tiles"]]), "faults expected a string"),
    (with_rung(1, after="3"), "1 comes after '3'; known are: 0"),
    ({"cpu": {"small": {**STEPS["cpu"]["small"], "rungs": ["9"]}}}, "'9' is not a rung here; known are: 0"),
    ({"cpu": {"small": {**STEPS["cpu"]["small"], "kernels": ["flash"]}}}, "has rungs beside kernels"),
    ({"rungs": []}, "names no kernels"),
])  # fmt: skip
def test_rungs_that_make_no_sense(changed, words):
    with pytest.raises(UserError) as caught:
        parse(**changed)
    assert words in str(caught.value) and str(caught.value).startswith("steps.toml: ")


class Unstarted:
    """A crew of one worker that is never started: each case ends at once."""

    machine, device = "cpu", {"machine": "cpu", "device": "cpu", "arch": "cpu", "device_uuid": None}

    def __init__(self):
        self.workers, self.busy = [Worker("cpu", [], Repeat())], {}

    def environment(self):
        return {}

    def work(self, cases, begun, ended):
        for case in cases:
            begun(self.workers[0], case)
            ended(self.workers[0], case, {"status": "ok", "counted_launches": 2, "emulation_s": 0.1})


def test_a_stored_run_explains_itself(tmp_path, monkeypatch, capsys):
    """Run, row and manifest; `show` prints the names and what they mean."""
    suite = tmp_path / "steps.toml"
    tables = "".join(
        "[[rungs]]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in rung.items()) for rung in STEPS["rungs"]
    )
    sweep = '[cpu.small]\nrungs = "all"\nh = 1\nhkv = 1\nd = 64\nn = 32\n'
    suite.write_text('title = "t"\nquestion = "q?"\n' + tables + sweep)
    request = runner.Request(str(suite), "cpu")

    with runner.begin(request, crew := Unstarted(), tmp_path / "run") as run:
        runner.execute(run, crew, run.cases, lambda case, row: None)
        runner.finish(run)
    frame = store.read_runs(tmp_path / "run").frame
    assert sorted(zip(frame["rung"], frame["kernel"])) == [
        ("0", "standard"), ("1", "chunked_fused"), ("1b", "chunked_fused"), ("2", "flash"),
    ]  # fmt: skip
    manifest = store.read_manifest(tmp_path / "run")
    assert ladder.rungs_of(manifest) == list(load_suite(str(suite)).rungs)
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = call(monkeypatch, capsys, "show", tmp_path / "run")
    assert code == 0 and "more (against 1)" in out and "chunk=32 tile_n=32" in out
    steps = out[out.index("more (against 1)") :]
    assert [line.split() for line in steps.splitlines() if line.split()[1:2] == ["ok"]] == [
        [name, "ok", "2"] for name in ("0", "1", "2", "1b")
    ]


def _toml(value) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {v}" for k, v in value.items()) + " }"
    return json.dumps(value)


@pytest.mark.parametrize("odd", [3, [3], [{"name": "0"}], [{"name": 0, "kernel": []}], "all", {"name": "0"}])
def test_odd_rungs_in_a_manifest_are_none(odd):
    assert ladder.rungs_of({"rungs": odd}) == [] == ladder.rungs_of({})


# --- the suite `ladder`


def test_neighbouring_rungs_differ_in_one_thing():
    """In one constant, the tile's two extents being one, or in the kernel with what both name alike."""
    rungs = {rung.name: rung for rung in load_suite("ladder").rungs}
    assert list(rungs) == ["0", "0b", "1", "2a", "2b", "3", "4", "5a", "5b", "5c", "6", "7", "8"]
    for rung in list(rungs.values())[1:]:
        before = rungs[rung.after]
        if rung.kernel == before.kernel:
            defaults = ROWS[rung.kernel].constants
            mine, theirs = ({**defaults, **one.constants} for one in (rung, before))
            names = {name.replace("tile_m", "tile_n") for name in mine if mine[name] != theirs[name]}
            assert len(names) == 1, (rung, before)
        else:
            both = set(rung.constants) & set(before.constants)
            assert all(rung.constants[name] == before.constants[name] for name in both), (rung, before)


def test_the_faults_of_a_rung_follow_from_what_it_is():
    for rung in load_suite("ladder").rungs:
        kernel, used = rung.kernel, {**ROWS[rung.kernel].constants, **rung.constants}
        loops = kernel == "chunked_unfused" or used.get("parallel") == "serial"
        through_memory = kernel in ("standard", "chunked_unfused") or used.get("scores") == "global"
        built = {
            "tiles": used.get("tile_m") == 32,
            "launches": loops and through_memory,
            "score-traffic": through_memory,
            "parallelism": loops and used["streams"] == 1,
            "rounding": used.get("accumulate") == "float16",
            "accumulation": kernel == "chunked_atomic",
        }
        assert rung.faults == [fault for fault, there in built.items() if there], rung


def test_the_ladder_is_at_the_articles_shape_and_at_others():
    found: dict[tuple, set] = {}
    names = ladder.named((suite := load_suite("ladder")).rungs)
    for p in (case.params for case in cases_of(suite, "gpu", catalog())):
        shape = tuple(p[k] for k in ("b", "m", "n", "h", "hkv", "d", "mode"))
        found.setdefault(shape, set()).add(names.get((p["kernel"], p.get("constants"))))
        assert p["dtype"] == "float16" and p["causal"] is False
    assert {shape for shape, rungs in found.items() if set(names.values()) <= rungs} == {
        *((b, 8192, 8192, 32, 32, 128, "launch") for b in (8, 16)), (1, 8192, 8192, 32, 8, 128, "launch"),
        *((1, 4096, 4096, 32, 32, 128, mode) for mode in ("launch", "graph")),
        (1, 4096, 4096, 8, 8, 64, "launch"),
    }  # fmt: skip
    one_head = [found[1, 8192, 8192, 1, 1, 128, mode] for mode in ("launch", "graph")]
    assert one_head == [{"0", "1"}] * 2  # what a loop over heads runs


# --- every suite on a card that is not here


@pytest.mark.parametrize("name", suite_names())
def test_every_case_has_a_plan_or_says_why_not(name):
    """On an H200 all but those whose scores do not fit; on a small card some are refused in a sentence."""
    suite, known = load_suite(name), catalog()
    oom = []
    for case in cases_of(suite, "gpu", known):
        entry = known[case.params["kernel"]]
        described = costs.describe(case.params, entry, H200)
        if described.get("modelled_peak_bytes", 0) > H200.memory_bytes:
            oom.append(case)
        try:
            costs.describe(case.params, entry, CARDS["RTX 4090"])
        except Unsupported as refusal:
            assert "; choose" in str(refusal)
    assert all(c.params["kernel"] == "standard" for c in oom)


@pytest.mark.parametrize("name", suite_names())
def test_no_deadline_cuts_a_case_short(name):
    """A case is estimated to take half of what the runner allows, at most, and a suite half an hour."""
    suite = load_suite(name)
    found = estimate.with_estimates(cases_of(suite, "gpu", catalog()), "gpu", suite.repeat, H200)
    assert max(c.estimate_s for c in found) < suite.repeat.deadline_s / 2
    total = sum(c.estimate_s for c in found)
    assert total < (900 if name == "block-size" else 1800)


def test_launches_cost_time_in_an_estimate():
    """A loop of 8,224 launches takes longer than one of 528, which moves as much; replayed it takes less."""
    suite = load_suite("ladder")
    found = {}
    for case in estimate.with_estimates(cases_of(suite, "gpu", catalog()), "gpu", suite.repeat, H200):
        p = case.params
        if (p["kernel"], p["b"], p["n"], p["h"]) == ("chunked_unfused", 1, 4096, 32):
            found[json.loads(p["constants"])["chunk"], p["mode"]] = case.estimate_s
    assert found[128, "launch"] > 1.5 * found[512, "launch"]
    assert found[128, "graph"] < found[128, "launch"]


def test_a_case_without_room_or_plan_is_estimated_to_end_at_once():
    suite = load_suite("ladder")
    [whole] = [c for c in cases_of(suite, "gpu", catalog())
               if c.params["kernel"] == "standard" and c.params["b"] == 16 and "constants" not in c.params]
    refused = Case("x", {**whole.params, "kernel": "chunked_unfused", "constants": '{"chunk": 40}'})
    for case in (whole, refused):
        [found] = estimate.with_estimates([case], "gpu", suite.repeat, H200)
        assert found.estimate_s == estimate.CASE_S["gpu"]
    [fits] = estimate.with_estimates([whole], "gpu", suite.repeat, replace(H200, memory_bytes=1 << 40))
    assert fits.estimate_s > 10


def test_rows_of_thousands_of_launches_stay_short():
    suite, known = load_suite("ladder"), catalog()
    found = [costs.describe(c.params, known[c.params["kernel"]], H200) for c in cases_of(suite, "gpu", known)]
    assert max(one["modelled_launches"] for one in found) == 16448
    assert max(len(one["grid"]) + len(one["block"]) for one in found) < 200


# --- rows read against each other


def rows(*some) -> pd.DataFrame:
    return pd.DataFrame(list(some)).convert_dtypes(dtype_backend="pyarrow")


def timed(case: str, kernel: str, us: float, **values) -> dict:
    more = {"family": "prefill", "h": 8, "hkv": 8, "dtype": "float16", "causal": False, "cache_mode": "cold"}
    return schema.derive(row(case, us, kernel=kernel, **{**more, **values}))


def test_slowdowns_are_within_a_run_a_shape_and_a_mode():
    frame = rows(
        timed("1", "standard", 100.0), timed("2", "flash", 50.0), timed("3", "chunked_unfused", 700.0),
        timed("4", "chunked_unfused", 300.0, mode="graph"), timed("5", "flash", 30.0, mode="graph"),
        timed("6", "chunked_unfused", 900.0, n=4096), timed("7", "flash", 60.0, device="A100-80"),
        timed("8", "flash", 5.0, status="incorrect", n=4096),
    )  # fmt: skip
    found = ladder.facts(frame, {})
    np.testing.assert_allclose(found["x_standard"], [1, 0.5, 7, np.nan, np.nan, np.nan, np.nan, np.nan])
    np.testing.assert_allclose(found["x_flash"], [2, 1, 14, 10, 1, np.nan, 1, np.nan])
    assert found[["tail", "tensor_use", "bandwidth_use"]].isna().all(axis=None)


def test_the_yardstick_is_the_default_where_that_fitted():
    grouped = {"constants": '{"head_group": 8}'}
    fits = rows(timed("1", "standard", 100.0), timed("2", "standard", 90.0, **grouped))
    np.testing.assert_allclose(ladder.yardstick(fits, "standard"), 100)
    oom = timed("1", "standard", 100.0, status="oom", measured_time_us=None)
    frame = rows(oom, timed("2", "standard", 120.0, **grouped), timed("3", "flash", 10.0))
    np.testing.assert_allclose(ladder.yardstick(frame, "standard"), 120)
    np.testing.assert_allclose(ladder.facts(frame, {})["x_standard"], [np.nan, 1, 10 / 120])


def test_uses_are_shares_of_what_this_device_was_measured_to_do():
    work = {"modelled_flops": 2 * 10**9, "modelled_bytes_loaded": 3 * 10**8, "modelled_bytes_stored": 10**8,
            "modelled_launches": 10, "measured_empty_us": 2.0}
    frame = rows(timed("1", "flash", 100.0, **work), timed("2", "flash", 100.0, dtype="bfloat16", **work),
                 timed("3", "flash", 100.0, device="A100-80", **work))
    found = ladder.facts(frame, {"H200": Ceilings(8000.0, {"float16": 40.0})})
    np.testing.assert_allclose(found["tensor_use"], [0.5, np.nan, np.nan])
    np.testing.assert_allclose(found["bandwidth_use"], [0.5, 0.5, np.nan])
    time_of_the_bytes_us = 4e8 / 8000e9 * 1e6
    assert found["bandwidth_use"][0] == pytest.approx(time_of_the_bytes_us / 100.0)
    np.testing.assert_allclose(found["launch_share"], 0.2)


def test_a_tail_wants_a_hundred_samples():
    few, many = [100.0] * 98 + [150.0], [100.0] * 95 + [150.0] * 5
    frame = rows(timed("1", "flash", 100.0, measured_samples_us=few),
                 timed("2", "flash", 100.0, measured_samples_us=many))
    assert pd.isna(frame["measured_p99_us"][0]) and frame["measured_p99_us"][1] == pytest.approx(150)
    np.testing.assert_allclose(ladder.facts(frame, {})["tail"], [np.nan, 1.5])


def test_a_mean_is_of_the_samples_and_no_median():
    samples = [100.0] * 3 + [500.0]
    frame = rows(timed("1", "flash", 100.0, measured_samples_us=samples),
                 timed("2", "flash", 100.0, measured_samples_us=None),
                 timed("3", "flash", 100.0, status="incorrect", measured_samples_us=samples))
    np.testing.assert_allclose(ladder.facts(frame, {})["mean_us"], [200, np.nan, np.nan])


@pytest.mark.parametrize("suite", ["ladder", "paged-ladder"])
def test_a_hundred_samples_of_the_slowest_rung_fit_the_time_it_is_given(suite):
    """By the times that were recorded; and each says how busy the multiprocessors are."""
    slowest_s = pd.read_parquet(store.RECORDED / "h200" / suite / store.PART)["measured_time_us"].max() / 1e6
    repeat = load_suite(suite).repeat
    assert repeat.sm_busy and repeat.min_samples >= schema.TAIL_SAMPLES
    assert repeat.timeout_s > schema.TAIL_SAMPLES * slowest_s


def test_ceilings_are_read_by_dtype_and_never_borrowed(tmp_path):
    found = ceilings.measured("H200", tmp_path)  # of the recorded runs
    assert set(found.tflops) == {"float16", "bfloat16"} and found.best_tflops > 600 and found.read_gbps > 4000
    assert not ceilings.measured("some card", tmp_path)
    probe = {"family": "probe", "n": None, "m": None, "device": "H200"}
    frame = rows(timed("1", "read", 10.0, **probe, modelled_bytes_loaded=10**7),
                 timed("2", "mma", 10.0, **probe, modelled_flops=10**9, status="throttled"))
    assert ceilings.of_rows(frame, "H200") == Ceilings(1000.0, {})


def test_show_reads_a_ladder_of_a_gpu(tmp_path, monkeypatch, capsys):
    """Times, slowdowns and uses beside each rung, a table a shape."""
    folder = tmp_path / "run"
    folder.mkdir()
    rungs = [vars(rung) for rung in parse().rungs]
    manifest = {"run_id": "run-0", "suite": "steps", "title": "t", "rungs": rungs}
    made = [timed("1", "standard", 4000.0, rung="0"),
            timed("2", "flash", 1000.0, rung="2", modelled_flops=10**11)]
    store.write_manifest(folder, manifest)
    store.write_part(folder, made, manifest)
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = call(monkeypatch, capsys, "show", folder)
    [flash] = [line.split() for line in out.splitlines() if line.split()[:2] == ["2", "ok"]]
    assert flash[2:5] == ["1.000", "0.25", "1.00"] and "100.0" in flash and "16%" in flash
