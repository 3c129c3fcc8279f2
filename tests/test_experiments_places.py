"""Where workers work: GPUs by number or UUID, several at once, each held by one run. The GPUs are played."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import stub_gpu
from planted import ROOT, SUITE, suite_file

from cuattn.compile import cache_folder
from experiments import cli, environment, store
from experiments.crew import Crew
from experiments.locks import Busy
from experiments.places import CPU_WORKERS, Place, lock_device, places
from experiments.suite import Repeat
from experiments.words import UserError
from experiments.worker import Unavailable, Worker

A, B = (card["uuid"] for card in stub_gpu.CARDS)


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """Two GPUs, whose workers are stubs."""
    monkeypatch.setattr(environment, "gpus", lambda: list(stub_gpu.CARDS))
    monkeypatch.setattr(environment, "gpu_expected", lambda: True)
    monkeypatch.setattr(Worker, "process", staticmethod(stub_gpu.serve))
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STUB_FOLDER", str(tmp_path))
    return stub_gpu.CARDS


# --- choosing


@pytest.mark.parametrize("words, chosen", [
    ("all", [A, B]), ("0", [A]), ("1,0", [B, A]), (B, [B]), ("gpu-bb", [B]), (" 0 , GPU-bbbb", [A, B]),
])
def test_gpus_by_number_and_uuid(cards, words, chosen):
    machine, found = places("best", words)
    assert machine == "gpu" and [place.uuid for place in found] == chosen
    assert [place.environ for place in found] == [{"CUDA_VISIBLE_DEVICES": uuid} for uuid in chosen]


@pytest.mark.parametrize("arguments, sentence", [
    (("gpu", "2"), "'2' names no single GPU of those here: 0 (GPU-aaaa-1), 1 (GPU-bbbb-2)"),
    (("gpu", "GPU-"), "'GPU-' names no single GPU"),
    (("gpu", ""), "'' names no single GPU"),
    (("gpu", "0,"), "'' names no single GPU"),
    (("gpu", "-1"), "'-1' names no single GPU"),
    (("gpu", "0,GPU-aaaa"), "GPU-aaaa-1 is named twice"),
    (("cpu", "0"), "the CPU machine has none"),
    (("gpu", "0", 2), "a GPU has one worker"),
    (("best", None, 2), "leave it out, or run with --machine cpu"),
    (("cpu", None, 0), "at least 1"),
])
def test_what_cannot_be_chosen(cards, arguments, sentence):
    with pytest.raises(UserError) as caught:
        places(*arguments)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_no_gpu_to_choose(monkeypatch):
    monkeypatch.setattr(environment, "gpus", list)
    with pytest.raises(UserError, match=r"--devices: there is no GPU to choose here \("):
        places("best", "0")


def test_without_a_choice_the_first_one_is_taken(cards, monkeypatch):
    assert places("best") == ("best", [Place(A, {"CUDA_VISIBLE_DEVICES": A})])
    monkeypatch.setattr(environment, "gpus", lambda: stub_gpu.CARDS[:1])
    assert places("gpu") == ("gpu", [Place(A)])  # the only one: nothing to choose
    monkeypatch.setattr(environment, "gpus", list)
    assert places("gpu") == ("gpu", [Place()])


def test_workers_on_the_cpu_share_its_processes(monkeypatch):
    monkeypatch.setattr(environment, "gpu_expected", lambda: False)
    monkeypatch.delenv(CPU_WORKERS, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert places("cpu") == ("cpu", [Place()])
    assert places("best", None, 3) == ("cpu", [Place(None, {CPU_WORKERS: "2"})] * 3)
    assert places("cpu", None, 16)[1][0].environ == {CPU_WORKERS: "1"}
    monkeypatch.setenv(CPU_WORKERS, "5")
    assert places("cpu", None, 3)[1][0].environ == {}


def test_the_gpu_is_chosen_before_cupy_is_imported(tmp_path, monkeypatch):
    (tmp_path / "cupy.py").write_text(
        "import os\nraise ImportError('it sees ' + os.environ['CUDA_VISIBLE_DEVICES'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unavailable, match="it sees GPU-1234"):
        Worker("gpu", [], Repeat(), {"CUDA_VISIBLE_DEVICES": "GPU-1234"}).start()


# --- working


def run(tmp_path, monkeypatch, numbers, *words, code=0, out="run"):
    """`run` on the played GPUs, for keys of those numbers; its folder."""
    text = SUITE.replace("[cpu.small]", "[gpu.small]").replace("n = 16", f"n = {list(numbers)}")
    words = ["run", suite_file(tmp_path, text), "--machine", "gpu", "--out", str(tmp_path / out), *words]
    monkeypatch.setattr(sys, "argv", ["experiments", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert (caught.value.code or 0) == code
    return tmp_path / out


def test_one_worker_a_gpu_and_one_journal_a_worker(cards, tmp_path, monkeypatch):
    folder = run(tmp_path, monkeypatch, range(1, 13), "--devices", "all")
    frame = store.read_runs(folder).frame
    assert len(frame) == frame.case_id.nunique() == 12 and set(frame.status) == {"ok"}
    assert set(frame.device_uuid) == {A, B} and frame.device_uuid.value_counts().min() >= 2
    for number, uuid in enumerate((A, B)):
        journal = (folder / f"journal-{number}.jsonl").read_text()
        assert journal.count(uuid) == journal.count("\n") > 0
    manifest = store.read_manifest(folder)
    assert manifest["request"]["devices"] == "all" and "--devices all" in manifest["command"]
    assert list((cache_folder() / "locks").iterdir()) == []


def test_a_worker_that_dies_is_replaced_on_its_gpu(cards, tmp_path, monkeypatch):
    folder = run(tmp_path, monkeypatch, [1, 2, stub_gpu.ABORTS, 4, 5], "--device", "1", code=1)
    frame = store.read_runs(folder).frame.sort_values("n")
    assert frame.status.tolist() == ["ok"] * 4 + ["crash"] and set(frame.device_uuid) == {B}
    assert "SIGABRT while building" in frame.error.tolist()[-1]


def test_a_gpu_that_does_not_come_back_leaves_the_rest_to_the_others(cards, tmp_path, monkeypatch, capsys):
    folder = run(tmp_path, monkeypatch, [1, stub_gpu.LOST, *range(20, 30)], "--devices", "0,1", code=1)
    frame = store.read_runs(folder).frame
    assert len(frame) == frame.case_id.nunique() == 12
    assert frame.status.value_counts().to_dict() == {"ok": 11, "crash": 1}
    assert "a worker is lost and the others go on" in capsys.readouterr().err


def test_when_the_last_gpu_is_lost_the_run_stops_and_can_be_resumed(cards, tmp_path, monkeypatch, capsys):
    folder = run(tmp_path, monkeypatch, [1, stub_gpu.LOST, 3, 4], "--device", "0", code=2)
    assert "has fallen off the bus" in capsys.readouterr().err
    assert sorted(store.read_runs(folder).frame.status) == ["crash", "ok"]
    monkeypatch.setattr(sys, "argv", ["experiments", "resume", str(folder), "--device", "1"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    frame = store.read_runs(folder).frame.sort_values("n")
    assert caught.value.code == 1 and frame.status.tolist() == ["ok", "ok", "ok", "crash"]
    assert frame.device_uuid.tolist() == [A, B, B, A]


def test_gpus_of_two_kinds_make_no_run(cards, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STUB_NAME " + B, "A100")
    folder = run(tmp_path, monkeypatch, [1], "--devices", "all", code=2)
    assert "these are H200 (sm_90a) and A100 (sm_90a)" in capsys.readouterr().err
    assert not folder.exists() and list((cache_folder() / "locks").iterdir()) == []


# --- holding


def crew(*uuids, **more) -> Crew:
    there = [Place(uuid, {"CUDA_VISIBLE_DEVICES": uuid}) for uuid in uuids]
    return Crew("gpu", there, [], Repeat(), **more)


def test_a_gpu_is_held_by_one_run(cards, tmp_path, monkeypatch, capsys):
    with crew(A):
        folder = run(tmp_path, monkeypatch, [1], "--devices", "all", code=2)
        err = capsys.readouterr().err
        assert err.startswith(f"error: {A} is held by process {os.getpid()} on ") and "--wait" in err
        assert err.count("\n") == 1 and not folder.exists()
        run(tmp_path, monkeypatch, [1], "--device", "1", out="on the other")
        with pytest.raises(Busy), crew(B, A):
            pass
        lock_device(B).release()  # the refused ones hold nothing
    run(tmp_path, monkeypatch, [1], "--devices", "all")


def test_waiting_for_a_gpu(cards):
    first, said = crew(A), []
    first.start()

    def say(sentence):
        said.append(sentence)
        first.stop()

    with crew(A, say=say, patient=True) as second:
        assert second.device["device_uuid"] == A
    assert len(said) == 1 and "waiting for it" in said[0]


def test_a_worker_holds_the_gpu_as_long_as_it_lives(cards):
    """Even if its parent is gone: what runs on the GPU would disturb the next one."""
    first = crew(A)
    first.start()
    lock = first._locks[A]
    os.close(lock.handle)
    lock.handle = None
    with pytest.raises(Busy):
        lock_device(A)
    first.stop()
    lock_device(A).release()


RUNNER = """
import time
from experiments.crew import Crew
from experiments.places import Place
from experiments.suite import Repeat
from experiments.worker import Worker
from tests import stub_gpu
if __name__ == "__main__":
    Worker.process = staticmethod(stub_gpu.serve)
    with Crew("gpu", [Place(stub_gpu.CARDS[0]["uuid"])], [], Repeat()):
        print("held", flush=True)
        time.sleep(600)
"""


def test_a_killed_run_holds_its_gpu_no_longer(cards, tmp_path):
    (tmp_path / "runner.py").write_text(RUNNER)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, tmp_path / "runner.py"], env=environ, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(Busy, match=f"process {process.pid} "):
        lock_device(A)
    process.kill()
    process.communicate()
    with crew(A) as next_one:
        assert next_one.device["device_uuid"] == A


def test_a_gpu_that_only_cuda_names_is_held_too(cards, monkeypatch):
    monkeypatch.setattr(environment, "gpus", list)
    machine, there = places("gpu")
    with Crew(machine, there, [], Repeat()), pytest.raises(Busy):
        lock_device(A)
