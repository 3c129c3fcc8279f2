"""Diagnose: a planted symptom names its own cause first, healthy numbers name none, rows are read right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import ceilings, cli, store
from experiments.catalog import current_hashes
from experiments.diagnose import row_causes
from experiments.diagnose.causes import OPERATORS, check, diagnose
from experiments.diagnose.row_causes import NONE, TOO_SMALL, UNTIMED, kernels
from experiments.diagnose.rules import CAUSES, FACTS, RULES, THRESHOLDS
from experiments.suite import suite_names
from experiments.words import UserError

RECORDED = store.RECORDED
STORY = {"tokens_per_s": 17, "baseline_tokens_per_s": 1150, "gpu_use": 8, "memory_share": 70, "chunk": 128,
         "chunks": 64, "head_dim": 128, "peak_memory": 18e9, "baseline_memory": 23.5e9}
TUNED = {"tokens_per_s": 870, "baseline_tokens_per_s": 1150, "gpu_use": 45, "memory_share": 25, "chunk": 512,
         "chunks": 16, "head_dim": 128, "peak_memory": 19.5e9, "baseline_memory": 23.5e9,
         "accumulator": "float32"}
STANDARD = {"tokens_per_s": 1150, "baseline_tokens_per_s": 1150, "gpu_use": 62, "memory_share": 15}
FLASH = {"tokens_per_s": 1300, "baseline_tokens_per_s": 1150, "gpu_use": 62, "bandwidth_use": 57,
         "launches_per_step": 300, "step_gap_us": 6, "step_us": 9000, "mean_ms": 9, "p99_ms": 9.6,
         "peak_memory": 15e9, "baseline_memory": 23.5e9, "phase": "prefill"}


def causes(**numbers) -> list[str]:
    """The causes inferred, the likeliest first."""
    return [finding.cause for finding in diagnose(check(numbers)).findings]


def run(*arguments: str) -> str:
    """What the command prints, white space folded."""
    result = CliRunner().invoke(cli.app, ["diagnose", *arguments])
    if result.exception is not None:
        raise result.exception
    return " ".join(result.output.split())


def test_the_table_of_rules_is_whole():
    for rule in RULES:
        assert rule.cause in CAUSES and 0 <= rule.strength <= 4 and rule.when
        assert re.fullmatch(r"[AB] \d.*", rule.source), rule
        for condition in (*rule.when, *rule.unless, *rule.support):
            name, sign, limit = condition.split(" ", 2)
            assert name in FACTS, condition
            if sign == "is":
                assert limit in FACTS[name].choices, condition
            else:
                assert sign in OPERATORS and limit in THRESHOLDS and not FACTS[name].choices, condition
    assert set(CAUSES) == {rule.cause for rule in RULES}
    used = {c.split(" ", 2)[2] for rule in RULES for c in (*rule.when, *rule.unless, *rule.support)}
    assert set(THRESHOLDS) <= used
    assert all(t.source or name == "none" for name, t in THRESHOLDS.items())


@pytest.mark.parametrize(
    "cause, numbers",
    [
        ("tiles", {"tokens_per_s": 17, "baseline_tokens_per_s": 1200}),
        ("parallelism", {"gpu_use": 8}),
        ("score-traffic", {"bandwidth_use": 85}),
        ("accumulation", {"chunks": 64, "chunks_cost": 15}),
        ("memory-kept", {"peak_memory": 23e9, "baseline_memory": 23.5e9}),
    ],
)
def test_each_of_the_five_symptoms_names_its_own_cause_first(cause, numbers):
    assert causes(**numbers)[0] == cause
    assert causes(**{**FLASH, "gpu_use": 40, "chunk": 512, **numbers})[0] == cause  # all else is well


@pytest.mark.parametrize(
    "cause, numbers",
    [
        ("launches", {"launches_per_step": 120, "baseline_launches": 10}),
        ("launches", {"launches_per_step": 120, "gpu_use": 22}),
        ("launches", {"launches_per_step": 400, "step_us": 6000}),
        ("tiles", {"launches_per_step": 400, "step_us": 60_000, "gpu_use": 25, "step_gap_us": 100}),
        ("scheduling", {"step_gap_us": 5000}),
        ("scheduling", {"step_gap_us": 30, "step_us": 200}),
        ("allocator", {"period_s": 4, "mean_ms": 20, "p99_ms": 90}),
        ("tail", {"mean_ms": 20, "p99_ms": 90}),
        ("scatter", {"bandwidth_use": 20, "gpu_use": 15, "page": 16, "launches_per_step": 12}),
        ("scatter", {"phase": "decode", "bandwidth_use": 40}),
        ("page", {"page": 8, "tokens_per_s": 1, "baseline_tokens_per_s": 70}),
        ("score-traffic", {"memory_share": 70}),
        ("rounding", {"chunks": 40, "accumulator": "float16"}),
        ("unexplained", {"page": 16, "tokens_per_s": 1, "baseline_tokens_per_s": 70, "launches_per_step": 9}),
    ],
)
def test_other_symptoms(cause, numbers):
    assert causes(**numbers)[0] == cause


def test_the_articles_own_numbers():
    """Before: its four causes in the order of what each gained; after, and standard itself: nothing."""
    assert causes(**STORY)[:4] == ["tiles", "score-traffic", "parallelism", "accumulation"]
    assert causes(**TUNED) == causes(**STANDARD) == []


def test_what_b_means_by_an_idle_gpu_is_told_by_launches_and_gaps():
    assert causes(gpu_use=25) == ["tiles", "scheduling"]
    assert causes(gpu_use=25, launches_per_step=12, step_gap_us=4) == ["tiles"]
    assert causes(gpu_use=25, launches_per_step=12, step_gap_us=5000) == ["scheduling"]
    assert causes(gpu_use=25, launches_per_step=120)[0] == "launches"
    assert "tiles" not in causes(gpu_use=25, launches_per_step=120)
    found = diagnose(check({"gpu_use": 25})).findings
    assert {"--launches-per-step", "--step-gap-us"} <= set(found[0].deciders)
    assert found[1].deciders[0] == "--step-gap-us"


def test_healthy_numbers_name_none():
    assert causes(**FLASH) == []
    assert causes(phase="decode", bandwidth_use=92, gpu_use=45) == []  # reading is all that decode does
    found = diagnose(check(FLASH))
    assert found.weighed and {"gpu_use", "bandwidth_use", "slowdown"} <= set(found.facts)


def test_claim_43_two_or_three_times_is_a_trade_off():
    assert causes(tokens_per_s=100, baseline_tokens_per_s=290) == []
    assert causes(tokens_per_s=100, baseline_tokens_per_s=400) == ["tiles"]
    (weak,) = diagnose(check({"tokens_per_s": 100, "baseline_tokens_per_s": 400})).findings
    (strong,) = diagnose(check({"tokens_per_s": 100, "baseline_tokens_per_s": 1000})).findings
    assert weak.strength < 3 <= strong.strength


@pytest.mark.parametrize("given", [*STORY, *FLASH])
def test_any_one_number_alone_is_taken(given):
    found = diagnose(check({given: {**FLASH, **STORY}[given]}))
    assert found.unseen
    assert found.weighed or not found.findings


def test_missing_numbers_are_named():
    page = diagnose(check({"page": 8}))
    assert not page.weighed and page.findings == ()
    assert page.suspected["page"] == ("--tokens-per-s with --baseline-tokens-per-s",)
    half = diagnose(check({"tokens_per_s": 17}))
    assert not half.weighed and "--tokens-per-s" not in half.unseen
    assert "--baseline-tokens-per-s" in half.unseen


@pytest.mark.parametrize(
    "numbers, words",
    [
        ({"gpu_use": -1}, "--gpu-use: expected 0 to 100, got -1"),
        ({"gpu_use": 0.45}, "write 45 for 45 %"),
        ({"gpu_use": float("nan")}, "got nan"),
        ({"step_us": float("inf")}, "got inf"),
        ({"tokens_per_s": 0}, "more than 0"),
        ({"page": 0}, "at least 1"),
        ({"mean_ms": 5, "p99_ms": 3}, "cannot be below the mean"),
        ({"step_us": 5, "step_gap_us": 9}, "a step holds the gap"),
        ({"phase": "both"}, "prefill or decode"),
    ],
)
def test_nonsense_is_one_sentence(numbers, words):
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        check(numbers)
    assert "\n" not in str(caught.value)


def test_only_suites_that_exist_are_named():
    for finding in diagnose(check(STORY)).findings:
        assert set(finding.suites) == set(CAUSES[finding.cause].suites) & set(suite_names())
    assert "no suite yet (ladder)" in run("--gpu-use", "8") or "ladder" in suite_names()


def verdicts(folder: Path) -> dict[str, str]:
    return {kernel.name: kernel.verdict for kernel in kernels(folder)}


def test_the_recorded_runs():
    quick = verdicts(RECORDED / "h200" / "quick")
    assert quick["standard"] == quick["torch_math"] == "score-traffic"
    assert {quick[k] for k in ("flash", "flash_hopper", "paged", "torch_flash", "torch_cudnn")} == {NONE}
    memory = verdicts(RECORDED / "h200" / "memory")
    assert memory.pop("flash") == NONE
    assert {cause for kernel, cause in memory.items() if kernel.startswith("standard")} == {"score-traffic"}
    assert memory["chunked_unfused chunk=512"] == "launches"  # looped over by the host, in launches by the thousand
    assert memory["chunked_fused parallel=serial scores=global"] == "parallelism"  # a query chunk at a time
    assert NONE not in memory.values()
    assert set(verdicts(RECORDED / "h200" / "page-size").values()) == {NONE}
    counted = verdicts(RECORDED / "cpu" / "quick")
    assert counted == {"standard": "score-traffic", "flash": NONE, "paged": UNTIMED, "paged_stream": UNTIMED}


def test_the_evidence_of_a_recorded_run_is_measured_against_its_device():
    standard = next(k for k in kernels(RECORDED / "h200" / "quick", "standard"))
    text = " ".join(e.full for e in standard.example.diagnosis.findings[0].evidence)
    read = ceilings.measured("H200", RECORDED / "h200" / "quick").read_gbps
    assert "scratch ratio" in text and f"of {read:,.0f}, the ceiling measured on this device" in text
    assert row_causes.ceiling("H100", RECORDED).source == "the datasheet's rate"
    assert row_causes.ceiling("some card", RECORDED) == row_causes.Ceiling()


SHAPE = {"family": "prefill", "b": 1, "h": 32, "hkv": 32, "m": 8192, "n": 8192, "d": 128, "dtype": "float16",
         "causal": False, "max_len": 8192, "tokens": 8192, "mode": "launch"}
FLOPS, ARRAYS = 4 * 32 * 8192**2 * 128, 4 * 8192 * 32 * 128 * 2


def row(kernel: str, **columns) -> dict:
    """A row of an H200 as the runner writes it: 35 % of its compute, 40 % of its bandwidth, one launch."""
    time_us = columns.get("measured_time_us", FLOPS / (0.35 * 638e6))
    return {
        "run_id": "run", "suite": "planted", "attempt": 1, "status": "ok", "machine": "gpu", "device": "H200",
        "kernel": kernel, **SHAPE, "grid": "[[64, 32, 1]]", "constants_used": "{}", "modelled_flops": FLOPS,
        "measured_time_us": time_us, "measured_tflops": FLOPS / time_us / 1e6, "modelled_gbps": 1750.0,
        "measured_empty_us": 2.7, "measured_host_us": 8.0, "modelled_launches": 1,
        "modelled_scratch_bytes": 0, "modelled_peak_bytes": ARRAYS, **columns,
    }


def planted(tmp_path: Path, *rows: dict) -> list[row_causes.Kernel]:
    folder = tmp_path / "runs" / "planted"
    folder.mkdir(parents=True)
    manifest = {"run_id": "run", "suite": "planted"}
    store.write_manifest(folder, manifest)
    store.write_part(folder, [{"case_id": str(i), **r} for i, r in enumerate(rows)], manifest)
    return kernels(folder)


SLOW = 70 * FLOPS / 100e6
TILED = json.dumps({"chunk": 512, "tile_m": 128, "tile_n": 64})
FAULTS = {
    "score-traffic": {"modelled_scratch_bytes": ARRAYS, "modelled_peak_bytes": 2 * ARRAYS},
    "launches": {"modelled_launches": 64 * 32, "measured_time_us": 20_000.0},
    "scheduling": {"measured_host_us": 30_000.0},
    "parallelism": {"measured_tflops": 60.0, "grid": "[[64, 2, 1]]"},
    "tiles": {"measured_time_us": SLOW, "measured_tflops": 150.0,
              "constants_used": json.dumps({"chunk": 128})},
    "tail": {"measured_samples_us": [1.0] * 98 + [9.0, 9.0]},
    "scatter": {"family": "decode", "m": 1, "page_size": 16, "modelled_gbps": 900.0, "modelled_flops": 10**9,
                "modelled_peak_bytes": 10**9},
    "memory-kept": {"measured_peak_pool_bytes": 1000, "constants_used": json.dumps({"chunk": 2048})},
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_planted_in_a_row_is_named(tmp_path, cause):
    standard = row("standard", measured_time_us=FLOPS / 100e6, measured_peak_pool_bytes=1010)
    found = {k.name: k for k in planted(tmp_path, standard, row("mine", **FAULTS[cause]), row("flash"))}
    assert found["mine"].verdict == cause
    assert found["flash"].verdict == NONE


def first(tmp_path: Path, **columns) -> str:
    (mine,) = planted(tmp_path, row("mine", **columns))
    return mine.verdict


IDLE = {"measured_tflops": 60.0, "modelled_launches": 16}  # below 20 % of what it could compute
FEW = {"measured_tflops": 150.0, "grid": "[[64, 2, 1]]"}  # below 30 %, with one block a multiprocessor


@pytest.mark.parametrize("busy, cause", [(None, "parallelism"), (0.44, "parallelism"), (0.45, "unexplained")])
@pytest.mark.parametrize("slow", [IDLE, FEW])
def test_where_multiprocessors_are_busy_it_is_not_parallelism(tmp_path, slow, busy, cause):
    assert first(tmp_path, constants_used=TILED, measured_sm_busy=busy, **slow) == cause


@pytest.mark.parametrize("cause, constants", [
    ("unexplained", {}), ("tiles", {"tile_m": 32}), ("tiles", {"tile_n": 32}), ("tiles", {"chunk": 128}),
    ("tiles", {"chunk": 2048}), ("tiles", {"chunk": 320}), ("tiles", {"tile_m": None, "tile_n": None}),
])
def test_where_the_remedy_would_change_nothing_it_is_not_tiles(tmp_path, cause, constants):
    used = json.dumps({**json.loads(TILED), **constants})
    assert first(tmp_path, constants_used=used, measured_sm_busy=0.9, **IDLE) == cause
    chosen = {name: value for name, value in json.loads(used).items() if value}
    numbers = {"chunk": chosen["chunk"], "head_dim": 128, "tokens_per_s": 1, "baseline_tokens_per_s": 20}
    if "tile_m" in chosen:
        numbers["tile"] = min(chosen["tile_m"], chosen["tile_n"])
    assert causes(**numbers)[0] == cause


def test_scratch_that_may_be_sums_is_no_scores(tmp_path):
    sums = 32 * 8192 * (128 + 2) * 4  # O in float32 with its maximum and sum: half of Q, K, V and O
    assert first(tmp_path, modelled_scratch_bytes=sums, modelled_peak_bytes=ARRAYS + sums) == NONE
    more = {"modelled_scratch_bytes": sums + 1, "modelled_peak_bytes": ARRAYS + sums + 1}
    assert first(tmp_path / "more", **more) == "score-traffic"


def test_a_starved_gpu_is_never_without_a_finding():
    starved = {"gpu_use": 29, "sm_busy": 90, "chunk": 512, "tile": 64, "head_dim": 128,
               "launches_per_step": 1, "step_gap_us": 0}
    assert causes(**starved) == ["unexplained"]
    assert causes(**starved | {"gpu_use": 30}) == causes(**starved, phase="decode") == []
    assert causes(**starved, bandwidth_use=90) == ["score-traffic"]


def test_small_cases_and_failures_are_set_aside(tmp_path):
    small = {"n": 512, "m": 512, "modelled_flops": 10**9, "measured_time_us": 9.0, "measured_tflops": 1.0,
             "modelled_peak_bytes": 10**6, "modelled_gbps": 100.0}
    gone = "measured|modelled|device|grid|constants"
    dead = {k: v for k, v in row("broken", status="crash").items() if not re.match(gone, k)}
    found = {k.name: k for k in planted(tmp_path, row("small", **small), dead)}
    assert found["small"].verdict == TOO_SMALL
    assert found["broken"].verdict == UNTIMED and found["broken"].example.label.endswith("crash")


def test_a_minority_of_rows_is_no_verdict(tmp_path):
    rows = [row("mine", seed=i) for i in range(3)] + [row("mine", seed=9, **FAULTS["parallelism"])]
    (mine,) = planted(tmp_path, *rows)
    assert mine.verdict == NONE and mine.counts == {NONE: 3, "parallelism": 1}


def test_ceilings_beside_the_run_are_used(tmp_path):
    probe = {"run_id": "c", "suite": "ceilings", "case_id": "1", "attempt": 1, "status": "ok",
             "family": "probe", "device": "My card"}
    folder = tmp_path / "runs" / "ceilings"
    folder.mkdir(parents=True)
    store.write_manifest(folder, {"run_id": "c", "suite": "ceilings"})
    store.write_part(folder, [{**probe, "kernel": "read", "modelled_gbps": 1000.0},
                              {**probe, "kernel": "mma", "case_id": "2", "measured_tflops": 200.0}], {})
    (mine,) = planted(tmp_path, row("mine", device="My card", modelled_gbps=900.0, measured_tflops=100.0))
    assert mine.example.diagnosis.facts["bandwidth_use"].value == pytest.approx(90)
    assert mine.example.diagnosis.facts["gpu_use"].value == pytest.approx(50)


def test_the_command_says_inferred():
    printed = run("--tokens-per-s", "17", "--baseline-tokens-per-s", "1200", "--peak-memory", "18GB")
    assert "Inferred causes" in printed and "tiles" in printed and "70.6" in printed and "claim 43" in printed
    healthy = run("--gpu-use", "62", "--bandwidth-use", "57")
    assert "No fault found. Inferred, not measured" in healthy and "gpu use 62 %" in healthy
    assert "Nothing can be inferred" in run("--page", "8")


def test_the_command_reads_runs():
    assert "Inferred from the run quick on H200" in run(str(RECORDED / "h200" / "quick"))
    each = run(str(RECORDED / "h200" / "quick"), "--kernel", "flash")
    assert "row by row" in each and "standard" not in each.split("row by row")[1]


def test_the_command_says_which_rows_are_stale(tmp_path, monkeypatch):
    fresh = current_hashes()["flash"].split("+")[0]
    probe = {**row("mma"), "family": "probe", "source_hash": "0123456789ab"}
    planted(tmp_path, row("flash", source_hash=fresh), row("flash", source_hash="0123456789ab", seed=1),
            row("standard", source_hash="0123456789ab"), row("mine", source_hash="0123456789ab"), probe)
    said = "whose source has changed since, so that what is inferred holds for what it was; run the suite"
    folder = str(tmp_path / "runs" / "planted")
    assert f"stale: 2 rows of flash, standard, {said}" in run(folder)
    assert f"stale: 1 row of flash, {said}" in run(folder, "--kernel", "flash")
    assert "stale" not in run(folder, "--kernel", "mine")  # a kernel that is not the project's
    monkeypatch.setattr("experiments.diagnose.cli.current_hashes", dict)
    assert "stale" not in run(folder)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "got neither"),
        (("--kernel", "flash"), "only means something with a run"),
        ((str(RECORDED / "h200" / "quick"), "--gpu-use", "5"), "got both"),
        ((str(RECORDED / "h200" / "quick"), "--kernel", "flsh"), "did you mean 'flash'?"),
        ((str(RECORDED / "h200" / "ceilings"),), "no rows of prefill or decode"),
        (("nowhere",), "nowhere does not exist"),
        (("--peak-memory", "18"), "with its unit"),
    ],
)
def test_mistakes_get_one_sentence(arguments, words):
    with pytest.raises(UserError, match=re.escape(words)):
        run(*arguments)
