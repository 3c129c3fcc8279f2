"""Tune, with simulated times: every trial a row, classes and no shapes, nothing kept that noise explains."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from math import log2
from pathlib import Path

import numpy as np
import pytest
import tuned_rows
from commands import call

from cuattn import binding, tuned
from cuattn.kernels import ROWS
from experiments import case as case_module
from experiments import cli, environment, store
from experiments.ab import pair
from experiments.catalog import PEERS, catalog
from experiments.choosing import tune_cli, tuning
from experiments.costs import constants_of, shape_of
from experiments.suite import AXES, Repeat, load_suite, suite_names
from experiments.sweep import cases_of
from experiments.words import UserError

FLASH, PAGED = ROWS["flash"], ROWS["paged"]
LLAMA = "Llama-3.1-8B"


def flash_time(shape, constants) -> float:
    """The best tile grows with the context; where it is the plan's own depends on the head dim."""
    best = 4 + log2(max(shape.n, 2)) / 6
    far = abs(log2(constants["block_n"]) - best) + abs(constants["block_m"] / 128 - 1)
    return shape.b * shape.h * shape.visible * 1e-6 * (1 + 0.2 * far + 0.01 * constants["warps"])


def even_time(shape, constants) -> float:
    return shape.b * shape.h * shape.visible * 1e-6


@pytest.fixture
def tuned_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CUATTN_TUNED", str(tmp_path / "tuned"))
    return tmp_path / "tuned"


@pytest.fixture
def trial_rows(tmp_path):
    """trial_rows(time, …): the rows of tuning flash for Llama-3.1-8B."""

    def made(time, row=FLASH, **options):
        path = tuning.write_suite(tmp_path / "suites", row, tuning.model_sweeps(LLAMA, row))
        return tuned_rows.rows(row, path, time, **options)

    return made


def chosen(row, shape) -> dict:
    return dict(binding._chosen_plan(row, shape, tuned_rows.H200, None).constants)


@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.choices], ids=lambda r: r.name)
def test_the_trials_are_the_own_choice_and_every_combination(row):
    trials = tuning.trials(row)
    assert trials[0] == {} and len(trials) == 1 + int(np.prod([len(v) for v in row.choices.values()]))
    assert len({json.dumps(t, sort_keys=True) for t in trials}) == len(trials)


@pytest.mark.parametrize("name", suite_names())
def test_a_suite_becomes_a_suite_of_trials_at_its_shapes_and_both_ends_of_their_classes(name, tmp_path):
    suite, known = load_suite(name), catalog()
    for row in (FLASH, PAGED):
        if row.family not in {known[s.kernels[0]].family for s in suite.gpu}:
            with pytest.raises(UserError, match="has no sweep"):
                tuning.sweeps_of(suite, row)
            continue
        path = tuning.write_suite(tmp_path, row, tuning.sweeps_of(suite, row))
        cases = cases_of(load_suite(str(path)), "gpu", known)
        assert {c.params["kernel"] for c in cases} == {row.name}
        own = [c for c in cases if not constants_of(c.params)]
        classes = {}
        for case in own:
            classes.setdefault(tuned.shape_class(shape_of(case.params)), set()).add(shape_of(case.params))
        for case in cases_of(suite, "gpu", known):  # every shape of the suite lies among others of its class
            if case.params["family"] == row.family:
                assert len(classes[tuned.shape_class(shape_of(case.params))]) >= 2


def test_spread_reaches_the_ends_of_a_class_and_not_beyond():
    (sweep,) = tuning.model_sweeps(LLAMA, PAGED)
    low, high = tuning.spread(sweep)[1:]
    for given, least, most in zip(sweep.axes["n"], low.axes["n"], high.axes["n"]):
        assert least < given < most
        assert tuned.power(least) == tuned.power(given) == tuned.power(most)
        assert tuned.power(least - 1) < tuned.power(given) < tuned.power(most + 1)
    assert low.axes["model"] == [LLAMA] and low.axes["b"] == [1, 12, 46] and high.axes["b"] == [1, 22, 90]
    assert tuning.spread(replace(sweep, axes={"model": [LLAMA], "b": [1]})) == [
        replace(sweep, axes={"model": [LLAMA], "b": [1]})]
    assert tuning._low(0) == tuning._high(0) == 0


def test_what_the_plan_refuses_is_a_row_and_never_the_best(trial_rows):
    lines = trial_rows(flash_time)
    refused = [line for line in lines if line["status"] == "unsupported"]
    assert refused and all(line["error"] and line["measured_time_us"] is None for line in refused)
    sets = {line["constants"] for line in refused}
    assert '{"block_m": 64, "block_n": 32, "warps": 8}' in sets
    assert all(json.dumps(f.constants) not in sets for f in tuning.judge(lines, FLASH))


def test_the_best_of_a_class_is_kept_with_its_margin_and_rows(trial_rows, tuned_folder):
    lines = trial_rows(flash_time)
    found = tuning.judge(lines, FLASH)
    assert len(found) == 6 and all(one.shapes == 3 for one in found)
    kept = {one.name: one for one in found if one.keep}
    assert kept
    path = tuning.store_best(found, FLASH, "H200")
    document = json.loads(path.read_text())
    assert path == tuned_folder / "H200.json" and document["schema"] == 1 and document["device"] == "H200"
    classes = document["kernels"]["flash"]["classes"]
    assert set(classes) == set(kept)
    by_case = {(line["run_id"], line["case_id"]): line for line in lines}
    for name, entry in classes.items():
        pairs = [by_case[tuple(pair)] for pair in entry["rows"]]
        assert all(tuned.shape_class(shape_of(line)) == name for line in pairs)
        ratios = [a["measured_time_us"] / b["measured_time_us"] for a, b in zip(pairs[::2], pairs[1::2])]
        assert entry["margin"] == pytest.approx(np.prod(ratios) ** (1 / 3) - 1, abs=1e-4)
        assert entry["margin"] > tuning.MARGIN


def test_held_out_shapes_of_a_class_share_its_constants_and_are_not_slower(trial_rows, tuned_folder):
    found = tuning.judge(trial_rows(flash_time), FLASH)
    tuning.store_best(found, FLASH, "H200")
    measured = {shape_of(line) for line in trial_rows(flash_time)}
    classes = {shape: tuned.shape_class(shape) for shape in measured}
    random, gained, seen = np.random.default_rng(1), 0, 0
    for shape in sorted(measured, key=str):
        for _ in range(20):
            n = int(shape.n * 2 ** random.uniform(-0.5, 0.5))
            near = replace(shape, n=n, m=n)
            if near in measured:
                continue
            own = dict(FLASH.plan(near, tuned_rows.H200).constants)
            taken = chosen(FLASH, near)
            ratio = flash_time(near, taken) / flash_time(near, own)
            assert ratio <= 1 + tuning.MARGIN
            gained += ratio < 1 - tuning.MARGIN
            seen += 1
            if tuned.shape_class(near) == classes[shape]:
                assert taken == chosen(FLASH, shape)
    assert seen > 100 and gained > 0.3 * seen


def test_a_crossing_inside_a_class_keeps_nothing_in_it(trial_rows):
    """64 × 64 gains below 4096 and loses above: good at the class's lower end, bad at its upper."""

    def crossing(shape, constants):
        small = (constants["block_m"], constants["block_n"], constants["warps"]) == (64, 64, 4)
        return even_time(shape, constants) * ((shape.n / 4096) ** 0.5 if small else 1.0)

    found = {one.name: one.keep for one in tuning.judge(trial_rows(crossing), FLASH)}
    assert found["prefill d128 bfloat16 causal m10 n10 bh5"]
    assert not found["prefill d128 bfloat16 causal m12 n12 bh5"]
    assert not found["prefill d128 bfloat16 causal m14 n14 bh5"]


@pytest.mark.parametrize("noise", [0.002, 0.05, 0.3])
def test_noise_is_not_kept(trial_rows, noise):
    for seed in range(3):
        assert not any(one.keep for one in tuning.judge(trial_rows(even_time, noise=noise, seed=seed), FLASH))


def test_a_gain_within_the_margin_is_not_kept_and_one_beyond_is(trial_rows):
    def better(gain):
        def time(shape, constants):
            chosen = (constants["block_m"], constants["block_n"]) == (64, 64)
            return even_time(shape, constants) * (1 - gain * chosen)

        return time

    assert not any(one.keep for one in tuning.judge(trial_rows(better(0.015)), FLASH))
    assert all(one.keep for one in tuning.judge(trial_rows(better(0.04)), FLASH))
    assert not any(one.keep for one in tuning.judge(trial_rows(better(0.04)), FLASH, margin=0.1))


def test_rows_that_do_not_count_keep_nothing(trial_rows):
    good = trial_rows(flash_time)
    assert any(one.keep for one in tuning.judge(good, FLASH))

    def keeps(change, of=lambda line: True):
        changed = [line | change if of(line) else line for line in good]
        return any(one.keep for one in tuning.judge(changed, FLASH))

    assert not keeps({"source_hash": "0" * 12})
    assert not keeps({"status": "throttled"}, lambda line: line["constants"] is not None)
    assert not keeps({"status": "incorrect"}, lambda line: line["constants"] is None)
    assert not keeps({"measured_samples_us": [1.0, 2.0, 3.0]})
    one_shape = [line for line in good if line["n"] == 4096]
    assert {f.why for f in tuning.judge(one_shape, FLASH)} == {"one shape alone"}


def test_the_file_keeps_what_another_tuning_found(trial_rows, tuned_folder):
    found = tuning.judge(trial_rows(flash_time), FLASH)
    path = tuning.store_best(found, FLASH, "H200")
    best = json.loads(path.read_text())["kernels"]["flash"]["classes"]

    def classes():
        return json.loads(path.read_text())["kernels"]["flash"]["classes"]

    other = tuning.Found("decode of old", 2, {"warps": 4}, 0.5, True, (("r", "c"),))
    tuning.store_best([other], PAGED, "H200")
    assert classes() == best and tuned.read(path, "H200").classes == len(best) + 1
    lost = next(one for one in found if one.keep)
    tuning.store_best([replace(lost, keep=False)], FLASH, "H200")
    assert set(classes()) == set(best) - {lost.name}
    tuning.store_best([replace(lost, constants={}, keep=False)], FLASH, "H200")
    document = json.loads(path.read_text())
    document["kernels"]["flash"]["source_hash"] = "0" * 12
    path.write_text(json.dumps(document))
    tuning.store_best([lost], FLASH, "H200")
    assert set(classes()) == {lost.name}
    path.write_text("{")
    tuning.store_best([lost], FLASH, "H200")
    assert set(classes()) == {lost.name}
    path.write_text(json.dumps({"schema": 2, "device": "H200", "kernels": {}}))
    with pytest.raises(UserError, match="newer than the 1 known here; update cuattn, or name another folder"):
        tuning.store_best([lost], FLASH, "H200")
    assert json.loads(path.read_text())["schema"] == 2


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, tuned_folder):
    """command(words): exit code and what was printed; the runner is replaced by one that simulates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "gpu_expected", lambda: True)
    asked = []

    def measure(app, words):
        asked.append(words)
        if words[0] == "run":
            lines = tuned_rows.rows(FLASH, Path(words[1]), flash_time)
            tuned_rows.write(Path(words[words.index("--out") + 1]), lines)
        return 0

    def run(*words) -> tuple[int, str]:
        code, out, err = call(monkeypatch, capsys, "tune", *words)
        return code, " ".join((out + err).split())

    monkeypatch.setattr(tune_cli, "measure", measure)
    run.asked = asked
    return run


def test_the_command_runs_the_trials_and_stores_the_best(command, tuned_folder):
    code, out = command("flash", "--model", LLAMA)
    assert code == 0 and "of 6 classes have constants faster than flash's own choice" in out
    assert (tuned_folder / "H200.json").exists()
    ((word, suite, *rest),) = command.asked
    assert word == "run" and rest[:2] == ["--machine", "gpu"] and rest[3].startswith("runs/tune-flash-")
    assert Path(suite).parent == Path("runs/suites") and tomllib.loads(Path(suite).read_text())["gpu"]
    before = (tuned_folder / "H200.json").read_text()
    code, out = command("flash", "--run", rest[3], "--margin", "50%")
    assert code == 0 and command.asked[-1] == ["resume", rest[3]] and "0 of 6 classes" in out
    assert before != (tuned_folder / "H200.json").read_text()
    assert len(store.find_runs("runs")) == 1  # the suites are no runs


def test_an_interrupted_search_stores_nothing_and_says_how_to_go_on(command, monkeypatch, tuned_folder):
    monkeypatch.setattr(tune_cli, "measure", lambda app, words: 130)
    code, out = command("flash", "--suite", "quick", "--out", "runs/mine")
    assert code == 130 and "python -m experiments tune flash --run runs/mine" in out
    assert not tuned_folder.exists()


def test_the_ordinary_runner_is_what_measures(tmp_path, monkeypatch):
    """Its exit codes come back, and a user's mistake stays an exception for `main` to say."""
    assert tune_cli.measure(cli.app, ["plan", "quick", "--machine", "gpu", "--limit", "1"]) == 0
    assert tune_cli.measure(cli.app, ["recommend", "--model", "DeepSeek-V3", "--card", "H200"]) == 1
    with pytest.raises(UserError, match="is not a suite"):
        tune_cli.measure(cli.app, ["plan", "nothing"])


@pytest.mark.parametrize("words, said", [
    (["flsh", "--model", LLAMA], "did you mean 'flash'?"),
    (["append", "--model", LLAMA], "append is a cache kernel"),
    ([next(iter(PEERS)), "--model", LLAMA], "another library's kernel"),
    (["flash"], "expected one of --suite, --model and --run"),
    (["flash", "--suite", "quick", "--model", LLAMA], "expected one of"),
    (["flash", "--suite", "ceilings"], "has no sweep of prefill kernels"),
    (["flash", "--model", "Llama-3.1-9B"], "did you mean"),
    (["flash", "--model", LLAMA, "--machine", "tpu"], "--machine: 'tpu' is not a machine"),
    (["flash", "--model", LLAMA, "--machine", "cpu"], "the CPU machine models no time"),
    (["flash", "--model", LLAMA, "--margin", "2"], "did you mean 2%?"),
])  # fmt: skip
def test_wrong_arguments_end_in_one_sentence(command, words, said):
    code, out = command(*words)
    assert code == 2 and said in out and out.count("error:") == 1 and not command.asked


def test_without_a_gpu_it_says_so(command, monkeypatch):
    monkeypatch.setattr(environment, "gpu_expected", lambda: False)
    code, out = command("flash", "--model", LLAMA)
    assert code == 2 and "there is no GPU here with CuPy, and the CPU machine models no time" in out


def test_a_kernel_without_choices_says_what_to_add():
    bare = replace(FLASH, choices={})
    with pytest.raises(UserError, match="flash names no choices .* block_m, block_n, warps"):
        tuning.trials(bare)
    with pytest.raises(UserError, match="choices for 'tile', which is none of its constants"):
        tuning.trials(replace(FLASH, choices={"tile": (1, 2)}))


@pytest.mark.parametrize("module, run", [(case_module, case_module.run_case), (pair, pair.run_pair)])
def test_a_measured_case_means_the_constants_it_names(monkeypatch, module, run):
    """Tuned constants must not slip into the rows of a kernel as it is, least of all into those of `tune`."""
    seen = []

    def attempt(*_):
        seen.append(tuned._off.get())
        raise KeyboardInterrupt  # past the handler that makes a status of whatever goes wrong

    monkeypatch.setattr(module, "_attempt", attempt)
    with pytest.raises(KeyboardInterrupt):
        run(None, {}, Repeat(), {})
    assert seen == [True] and not tuned._off.get()


def test_every_axis_of_a_suite_survives_but_those_that_are_the_tuners(tmp_path):
    (sweep,) = tuning.sweeps_of(load_suite("page-size"), PAGED)
    sweep = replace(sweep, axes=sweep.axes | {"mode": ["graph"], "seed": [4]})
    (own, *_) = load_suite(str(tuning.write_suite(tmp_path, PAGED, [sweep]))).gpu
    assert own.axes == {name: values for name, values in sweep.axes.items() if name != "mode"}
    assert own.limits == sweep.limits and set(own.axes) <= set(AXES)
