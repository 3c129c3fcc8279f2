"""A run's folder: how it begins and is taken up again, and what is refused in one sentence."""
from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from commands import call
from planted import AFTER, SUITE, plant, suite_file

from cuattn.paths import KERNELS
from experiments import runner, store
from experiments.catalog import catalog
from experiments.crew import Crew
from experiments.places import Place
from experiments.suite import Repeat
from experiments.words import UserError
from experiments.worker import Unavailable, Worker


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["run", "quik"], "did you mean 'quick'?"),
        (["plan", "quick", "--only", "flsh"], "did you mean 'flash'?"),
        (["run", "quick", "--machine", "gpo"], "did you mean 'gpu'?"),
        (["run", "quick", "--kernel", "/nowhere/x.py"], "is not a file"),
        (["run", "quick", "--kernel", __file__], "no ROW"),
        (["plan", "quick", "--kernel", str(KERNELS / "prefill" / "flash.cu")], "flash.cu; give the .py"),
        (["show", "/nowhere"], "does not exist"),
        (["run", "page-size", "--lengths", "/nowhere"], "cannot be read"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(words, sentence, capsys, monkeypatch):
    from experiments import cli

    monkeypatch.setattr(sys, "argv", ["experiments", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1 and sentence in err


def test_a_kernel_module_that_ends_the_program_does_not_end_the_runner(tmp_path):
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    with pytest.raises(UserError, match=r"exits.py does not load \(SystemExit: 3\)"):
        catalog([str(tmp_path / "exits.py")])


def test_of_two_kernels_of_one_name_neither_hides_the_other(tmp_path):
    one, two = plant(tmp_path / "one", ["nothing"]) + plant(tmp_path / "two", ["nothing"])
    assert catalog([one, one])["nothing"].path == one
    with pytest.raises(UserError, match="two modules define 'nothing'.*another name"):
        catalog([one, two])


def test_one_case_is_no_plural(monkeypatch, capsys):
    words = ("plan", "quick", "--machine", "cpu", "--limit")
    assert "\n1 case, estimated " in call(monkeypatch, capsys, *words, 1)[1]
    assert "\n2 cases, estimated " in call(monkeypatch, capsys, *words, 2)[1]


def test_an_unknown_machine_says_what_is_missing():
    with pytest.raises(Unavailable, match="machine"):
        Worker("tpu", [], Repeat()).start()


class Fake(Worker):
    """A worker without a process: every case ends at once."""

    def launch(self):
        self.device = {"machine": "cpu", "device": "cpu", "arch": "cpu", "device_uuid": None}

    def assign(self, params):
        self.pipe, theirs = os.pipe()
        os.close(theirs)
        self.deadline = 0.0  # there is something to act on

    def step(self):
        os.close(self.pipe)
        return {"status": "ok", "max_err": 0.0}


class FakeCrew(Crew):
    kind = Fake


def crew() -> Crew:
    made = FakeCrew("cpu", [Place()], [], Repeat())
    made.start()
    return made


def opened(tmp_path, out=None):
    path = suite_file(tmp_path, SUITE + AFTER)
    return runner.begin(runner.Request(path, "cpu"), crew(), out or tmp_path / "run")


JOURNAL = runner.journal_name(0)


def test_a_disk_that_fills_while_journalling_stops_with_the_reason(tmp_path):
    run = opened(tmp_path)
    runner.execute(run, crew(), run.cases[:1], lambda case, row: None)
    kept = (run.path / JOURNAL).read_bytes()
    (run.path / JOURNAL).rename(run.path / "journal-1.jsonl")
    (run.path / JOURNAL).symlink_to("/dev/full")
    with pytest.raises(store.StoreError, match="the disk is full.*resume"):
        runner.execute(run, crew(), run.cases[1:], lambda case, row: None)
    (run.path / JOURNAL).unlink()
    assert (run.path / "journal-1.jsonl").read_bytes() == kept and len(store.read_runs(run.path).frame) == 1
    run.close()
    with runner.reopen(run.path) as again:
        assert [c.case_id for c in again.pending()] == [run.cases[1].case_id]


def test_a_folder_that_cannot_hold_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out: .* cannot be made"):
        opened(tmp_path, tmp_path / "file" / "run")
    opened(tmp_path).close()
    with pytest.raises(UserError, match="already holds a run"):
        opened(tmp_path)
    if os.geteuid():  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises((UserError, store.StoreError), match="cannot be"):
            opened(tmp_path, tmp_path / "locked" / "run")


def test_a_read_only_folder(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match="Read-only file system.*writable folder"):
        runner.begin(runner.Request("quick", "cpu"), crew(), tmp_path / "run")


def test_a_run_without_cases_cannot_be_resumed(tmp_path):
    store.write_manifest(tmp_path, {"run_id": "x"})
    with pytest.raises(store.StoreError, match="does not say suite, .*cannot be resumed"):
        runner.reopen(tmp_path)


def test_what_cannot_be_resumed_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match="^resume: .*nothing does not exist; name a run's folder$"):
        runner.reopen(tmp_path / "nothing")
    with pytest.raises(UserError, match="has no manifest.json and so is no run; name a run's folder$"):
        runner.reopen(tmp_path)
    run = opened(tmp_path)
    run.close()
    with pytest.raises(UserError, match="name one that it holds, such as .*run$"):
        runner.reopen(tmp_path)
    manifest = run.path / store.MANIFEST
    manifest.write_text(manifest.read_text()[:200])
    with pytest.raises(store.StoreError, match="is not JSON .*; the run cannot be resumed, but show"):
        runner.reopen(run.path)


@pytest.mark.parametrize("words, sentence", [
    (("--executor", "foo"), "--executor: 'foo' is not an executor; known are: local, ray"),
    (("--address", "10.0.0.1:6379"), "--address: is a Ray cluster's; add --executor ray, or leave it out"),
])  # fmt: skip
def test_resume_refuses_words_that_mean_nothing(monkeypatch, capsys, tmp_path, words, sentence):
    run = opened(tmp_path)
    run.close()
    code, _, err = call(monkeypatch, capsys, "resume", run.path, *words)
    assert code == 2 and sentence in err and err.count("error:") == 1


def test_the_manifest_repeats_the_command(tmp_path):
    run = opened(tmp_path)
    assert run.manifest["command"].startswith("python -m experiments run ")
    assert "--machine cpu" in run.manifest["command"]
    assert {c["case_id"] for c in run.manifest["cases"]} == {c.case_id for c in run.cases}
    assert run.manifest["environment"]["packages"]["numpy"]


def test_a_run_that_kept_only_its_parquet_is_resumed_without_losing_it(tmp_path):
    run = opened(tmp_path)
    runner.execute(run, crew(), run.cases[:1], lambda case, row: None)
    runner.finish(run)
    (run.path / JOURNAL).unlink()
    run.close()
    with runner.reopen(run.path) as again:
        assert [c.case_id for c in again.pending()] == [run.cases[1].case_id]
        runner.execute(again, crew(), again.pending(), lambda case, row: None)
        runner.finish(again)
    assert len(store.read_runs(run.path).frame) == 2
    with runner.reopen(run.path) as again:
        assert again.pending() == []
