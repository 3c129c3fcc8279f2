"""A memory limit: what does not fit ends as `oom` with its reason, on both machines; limits never mix."""

from __future__ import annotations

import pytest
from commands import call
from planted import SUITE, suite_file
from test_experiments_case import APPEND, DECODE, PREFILL, PROBE, PlayedGpu, run
from test_experiments_folder import crew

import cuattn
from dashboard import rows
from experiments import costs, environment, inputs, memory, runner, store, subjects
from experiments.catalog import catalog
from experiments.suite import load_suite
from experiments.sweep import Options, cases_of


def limited(params, limit: int, reserve: int = 0) -> dict:
    return {**params, memory.LIMIT: limit, memory.RESERVE: reserve}


def needed(machine, params) -> int:
    """Bytes of inputs, outputs and scratch."""
    return costs.describe(params, catalog()[params["kernel"]], machine.device)["modelled_peak_bytes"]


@pytest.fixture
def gpu(cpu, monkeypatch):
    """The CPU machine under a GPU's name, with its own arena as the pool."""

    class Pooled(PlayedGpu):
        def reset_peak(self, limit=None):
            cpu.reset_peak(limit)

        def lift_limit(self):
            cpu.lift_limit()

        def peak_pool_bytes(self):
            return cpu.peak_pool_bytes()

    monkeypatch.setattr(environment, "sensors", lambda: {"measured_throttle_reasons": ""})
    return Pooled(cpu)


# --- asking


@pytest.mark.parametrize("limit, reserve, words", [
    ("24", None, "--memory-limit: expected a size with its unit, such as 24GB"),
    ("24 apples", None, "--memory-limit: expected a size with its unit"),
    ("-1GB", None, "--memory-limit: expected a size with its unit"),
    ("0GB", None, "--memory-limit: expected more than nothing, got '0GB'"),
    ("24GB", "18", "--reserve: expected a size with its unit"),
    ("24GB", "24GB", "--reserve: expected less than the memory limit of 24.0 GB, got 24.0 GB"),
    ("24GB", "24GiB", "--reserve: expected less than the memory limit of 24.0 GB, got 25.8 GB"),
    (None, "18GB", "--reserve: is taken off --memory-limit; name that too"),
])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_nonsense_is_refused_in_a_sentence(monkeypatch, capsys, command, limit, reserve, words):
    options = [*(["--memory-limit", limit] if limit else []), *(["--reserve", reserve] if reserve else [])]
    code, out, err = call(monkeypatch, capsys, command, "quick", "--machine", "cpu", *options)
    assert code == 2 and words in " ".join(err.split()) and out == ""


def test_a_limit_is_part_of_what_a_case_is_and_its_absence_is_not():
    def ids(**options):
        found = cases_of(load_suite("quick"), "cpu", catalog(), Options(**options))
        return [c.case_id for c in found]

    plain = ids()
    recorded = store.read_manifest(store.RECORDED / "cpu" / "quick")["cases"]
    assert {c["case_id"] for c in recorded} & set(plain)  # as in every run stored before there were limits
    different = [plain, ids(memory_limit="24GB"), ids(memory_limit="24GiB"),
                 ids(memory_limit="24GB", reserve="18GB")]
    assert len({case_id for one in different for case_id in one}) == 4 * len(plain)
    assert ids(memory_limit="24GB", reserve="0B") == ids(memory_limit="24000MB")


# --- the CPU machine


@pytest.mark.parametrize("params", [PREFILL, DECODE, {**APPEND, "page_order": "sorted"}, PROBE],
                         ids=lambda p: p["kernel"])
def test_what_fits_runs_and_its_peak_is_counted(cpu, params):
    free = run(cpu, params)
    row = run(cpu, limited(params, 2 * 10**6, 10**6))
    assert row["status"] == "ok" and row["memory_known_by"] == "counted"
    outside = 32768 + 4 if params is PROBE else 0  # a probe's closed form leaves out what its sink takes
    assert 0 <= row["counted_peak_bytes"] - row["modelled_peak_bytes"] <= outside
    assert "counted_peak_bytes" not in free and "memory_known_by" not in free
    assert {**free, "emulation_s": 0}.items() <= {**row, "emulation_s": 0}.items()


@pytest.mark.parametrize("kernel, limit, need, words", [
    ("standard", 19000, 19072, "scratch of 4.61 kB does not fit into the 4.54 kB that inputs and outputs "
                               "leave of 19.0 kB, the memory limit of 19.0 kB"),
    ("flash", 14400, 14464, "inputs and outputs of 14.5 kB do not fit into 14.4 kB, the memory limit of "
                            "14.4 kB"),
])
def test_what_cannot_fit_is_refused_before_it_takes_anything(cpu, monkeypatch, kernel, limit, need, words):
    monkeypatch.setattr(inputs, "build", None)
    row = run(cpu, limited({**PREFILL, "kernel": kernel}, limit))
    assert row["status"] == "oom" and row["memory_known_by"] == "modelled" and row["error"] == words
    assert row["modelled_peak_bytes"] == need


def test_the_cap_itself_still_fits(cpu):
    need = needed(cpu, PREFILL)
    assert run(cpu, limited(PREFILL, need))["status"] == "ok"
    assert run(cpu, limited(PREFILL, need + 5, 5))["status"] == "ok"
    assert run(cpu, limited(PREFILL, need + 5, 6))["status"] == "oom"


def test_a_kernel_that_takes_more_than_its_closed_form_says_is_found_out(cpu, monkeypatch):
    params = {**PREFILL, "kernel": "standard"}
    honest, need = costs.describe, needed(cpu, params)
    monkeypatch.setattr(costs, "describe", lambda *args: {**honest(*args), "modelled_peak_bytes": 1})
    row = run(cpu, limited(params, need - 1))
    assert row["status"] == "oom" and row["memory_known_by"] == "counted"
    assert "does not fit" in row["error"] and "are in use (a case may use" in row["error"]
    assert run(cpu, PREFILL)["status"] == "ok" and cpu.arena.limit is None


def test_the_check_is_not_held_to_the_limit(cpu, monkeypatch):
    honest = subjects.Prefill.verdict

    def hungry(self):
        assert cpu.empty(10**6, "uint8").nbytes == 10**6
        return honest(self)

    monkeypatch.setattr(subjects.Prefill, "verdict", hungry)
    assert run(cpu, limited(PREFILL, 10**5))["status"] == "ok"


# --- a GPU, played


def test_on_a_gpu_the_pool_holds_no_more_than_the_inputs_leave(gpu):
    params = {**PREFILL, "kernel": "standard"}
    need = needed(gpu, params)
    row = run(gpu, limited(params, need))
    assert row["status"] == "ok" and row["memory_known_by"] == "measured" and row["measured_time_us"] == 10.0
    assert row["measured_peak_pool_bytes"] == need
    row = run(gpu, limited(params, need - 1))
    assert row["status"] == "oom" and row["memory_known_by"] == "measured", row
    assert "does not fit" in row["error"] and "measured_time_us" not in row
    given = inputs.nbytes(inputs.build(gpu, params))
    row = run(gpu, limited(params, given - 1))
    assert row["status"] == "oom" and row["error"].startswith("inputs of")


def test_copies_that_are_kept_for_the_check_are_not_the_cases(gpu, monkeypatch):
    def plan(self, constants):  # on a GPU copies lie in the pool
        self.before = {name: gpu.upload(self.arrays[name]) for name in ("k_cache", "v_cache")}
        return cuattn.plan_append(**self.arrays, kernel="append", constants=constants)

    monkeypatch.setattr(subjects.Append, "_plan", plan)
    need = needed(gpu, APPEND)
    row = run(gpu, limited(APPEND, need))
    assert row["status"] == "ok" and row["measured_peak_pool_bytes"] == need
    assert run(gpu, limited(APPEND, need - 1))["status"] == "oom"


def test_memory_outside_the_pool_counts_as_well(gpu, monkeypatch):
    need = needed(gpu, PREFILL)
    monkeypatch.setattr(subjects._Ours, "outside_bytes", lambda self: 5 * 10**6)
    row = run(gpu, limited(PREFILL, need + 4 * 10**6))
    assert row["status"] == "oom" and "5.00 MB of it outside the pool, is above" in row["error"]
    assert row["measured_peak_pool_bytes"] == need + 5 * 10**6 and "measured_time_us" not in row
    assert run(gpu, limited(PREFILL, need + 5 * 10**6))["status"] == "ok"


@pytest.mark.gpu
def test_the_pool_of_a_gpu_refuses_what_is_beyond_its_limit():
    from cuattn import open_machine

    machine = open_machine("gpu")
    params = {**PREFILL, "kernel": "standard", "m": 2048, "n": 2048, "tokens": 2048, "max_len": 2048}
    need = run(machine, params)["measured_peak_pool_bytes"]
    fits, not_quite = run(machine, limited(params, need)), run(machine, limited(params, need - 4096))
    assert fits["status"] in ("ok", "throttled") and fits["measured_time_us"] > 0, fits.get("error")
    assert not_quite["status"] == "oom" and not_quite["memory_known_by"] == "measured", not_quite
    assert "Out of memory allocating" in not_quite["error"] and "a case may use" in not_quite["error"]
    assert run(machine, params)["status"] in ("ok", "throttled")


# --- whole runs, and their readers


def test_runs_with_and_without_a_limit_are_never_one(monkeypatch, capsys, tmp_path):
    text = SUITE.replace('["flash"]', '["standard", "flash"]').replace("n = 16", "n = 64\ncausal = true")
    suite = suite_file(tmp_path, text.replace("compile_s = 3", "compile_s = 60"))
    with runner.begin(runner.Request(suite, "cpu"), crew(), tmp_path / "runs" / "free") as free:
        runner.execute(free, crew(), free.cases, lambda case, row: None)
    more = ["--memory-limit", "1.08MB", "--reserve", "1MB", "--out", tmp_path / "runs" / "limited"]
    code, out, _ = call(monkeypatch, capsys, "run", suite, "--machine", "cpu", *more)
    text = " ".join(out.split())
    assert code == 0 and "memory_limit 1.08 MB · memory_reserve 1.00 MB" in text
    assert "the memory limit of 1.08 MB less 1.00 MB reserved" in text and "1 oom, 1 ok" in text
    manifest = store.read_manifest(tmp_path / "runs" / "limited")
    assert manifest["request"]["memory_limit"] == "1.08MB" and manifest["request"]["reserve"] == "1MB"
    assert "--memory-limit 1.08MB --reserve 1MB" in manifest["command"]
    loaded = store.read_runs(tmp_path / "runs")
    assert loaded.frame.case_id.nunique() == len(loaded.frame) == 4
    with runner.reopen(tmp_path / "runs" / "limited") as opened:
        assert opened.pending() == [] and opened.cases[0].params[memory.LIMIT] == 1_080_000
    both = tmp_path / "runs/free", tmp_path / "runs/limited"
    code, out, _ = call(monkeypatch, capsys, "compare", *both)
    assert code == 1 and "no case in common" in " ".join(out.split()) and "in 1.08 MB less 1.00 MB" in out
    panels = rows.prepare(loaded.frame).groupby("run_path")["panel"].unique()
    assert panels.iloc[0].tolist() == ["2/1 heads · D64 · B1 · causal"]
    assert panels.iloc[1].tolist() == ["2/1 heads · D64 · in 1.08 MB − 1 MB · B1 · causal"]
