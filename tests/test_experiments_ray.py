"""Runs on a Ray cluster: two nodes on this host, of which one is lost; runners stopped and killed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tomllib
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import stub_gpu
from commands import call
from planted import ROOT, command, finished, lines, suite_file, wait_for, warm

from experiments import environment, ray_crew, ray_places, store
from experiments.crew import Crew, Lost
from experiments.places import CPU_WORKERS, Place
from experiments.suite import Repeat
from experiments.sweep import Case
from experiments.words import UserError
from experiments.worker import Worker

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: see CONTRIBUTING.md")
PERIOD = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
SUITE = """
title = "Ray"
question = "Is every case there, exactly once?"
[repeat]
compile_s = 300
[cpu.long]
kernels = ["flash"]
h = 2
hkv = 1
d = 64
n = 16
[cpu.short]
kernels = ["paged"]
h = 2
hkv = 1
d = 64
n = [20, 21, 22, 23, 24]
"""
CASES = 7
NAP = """
import dataclasses, os, time
from pathlib import Path
from cuattn.kernels.flash import ROW as FLASH

def plan(shape, device, overrides=None):
    Path(__file__).with_name(f"asleep-{os.getpid()}").touch()
    while not Path(__file__).with_name("awake").exists():
        time.sleep(0.02)
    return FLASH.plan(shape, device)

ROW = dataclasses.replace(FLASH, name="nap", constants={}, plan=plan)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head that works for nobody, and two nodes with a CPU each."""
    from ray.cluster_utils import Cluster

    warm(tmp_path_factory.mktemp("warm"))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={**small, "num_cpus": 0, "_system_config": PERIOD})
    for _ in range(2):
        made.add_node(num_cpus=1, **small)
    yield made
    made.shutdown()


@pytest.fixture
def asked(cluster, tmp_path):
    """The words of a run on the cluster, in which one case sleeps until there is a file `awake`."""
    (tmp_path / "nap.py").write_text(NAP)
    return ("run", suite_file(tmp_path, SUITE), "--machine", "cpu", "--kernel", tmp_path / "nap.py",
            "--executor", "ray", "--address", cluster.address, "--out", tmp_path / "run")


def asleep(folder: Path, besides: int | None = None) -> int:
    """The process that has come to the sleeping case, if need be after another one."""
    def found() -> set[int]:
        return {int(path.name.split("-")[1]) for path in folder.glob("asleep-*")} - {besides}

    wait_for(found, 120)
    return found().pop()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def attempts(run: Path):
    return store.read_runs(run, attempts="all").frame.sort_values(["kernel", "n", "attempt"])


@needs_ray
def test_a_killed_runner_leaves_a_run_that_is_resumed_on_the_cluster(asked, tmp_path):
    process = command(*asked)
    worker, run = asleep(tmp_path), tmp_path / "run"
    wait_for(lambda: lines(run) == CASES - 1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: gone(worker))  # nothing works on for a runner that is no more
    (tmp_path / "awake").touch()
    assert "7 of 7 cases: 7 ok" in finished("resume", run)
    frame = attempts(run)
    assert len(frame) == frame.case_id.nunique() == CASES and set(frame.status) == {"ok"}


@needs_ray
def test_an_interrupted_run_is_resumed_without_the_cluster(asked, tmp_path):
    process = command(*asked)
    worker, run = asleep(tmp_path), tmp_path / "run"
    wait_for(lambda: lines(run) == CASES - 1)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "go on with: python -m experiments resume" in out, out + err
    assert "Traceback" not in out + err
    wait_for(lambda: gone(worker))
    (tmp_path / "awake").touch()
    finished("resume", run, "--executor", "local")
    frame = attempts(run)
    assert frame[frame.kernel == "nap"].status.tolist() == ["interrupted", "ok"] and len(frame) == CASES + 1


@needs_ray
def test_a_lost_workers_and_a_lost_nodes_case_is_recorded_and_runs_elsewhere(cluster, asked, tmp_path):
    process = command(*asked)
    first, run = asleep(tmp_path), tmp_path / "run"
    wait_for(lambda: lines(run) == CASES - 1)  # the other node has done the rest
    os.kill(parent(first), signal.SIGKILL)
    worker = asleep(tmp_path, besides=first)
    raylet = parent(parent(worker))
    [lost] = [node for node in cluster.list_all_nodes()
              if raylet in [info.process.pid for info in node.all_processes["raylet"]]]
    cluster.remove_node(lost, allow_graceful=False)
    wait_for(lambda: gone(worker))
    (tmp_path / "awake").touch()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "7 of 7 cases: 7 ok" in out, out + err
    assert "Traceback" not in out + err and "it begins once more" in err
    frame = attempts(run)
    nap = frame[frame.kernel == "nap"]
    assert nap.status.tolist() == ["interrupted", "interrupted", "ok"] and nap.attempt.tolist() == [1, 2, 3]
    assert "was lost (" in nap.error.iloc[0] and f"node {lost.node_id[:8]}) was lost (" in nap.error.iloc[1]
    others = frame[frame.kernel != "nap"]
    assert len(others) == others.case_id.nunique() == CASES - 1 and set(others.status) == {"ok"}
    assert len(list(run.glob("journal-*.jsonl"))) == 2
    manifest = store.read_manifest(run)
    assert manifest["request"]["executor"] == "ray" and manifest["environment"]["packages"]["numpy"]
    assert f"--executor ray --address {cluster.address}" in manifest["command"]


@needs_ray
def test_a_worker_sees_the_one_gpu_that_ray_gave_it(cluster, tmp_path):
    seen = "import os\nraise ImportError('seen: ' + os.environ['CUDA_VISIBLE_DEVICES'])\n"
    (tmp_path / "cupy.py").write_text(seen)
    added = cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=80 << 20, include_dashboard=False)
    words = "run", "quick", "--machine", "gpu", "--executor", "ray", "--address", cluster.address
    process = command(*words, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    _, err = process.communicate(timeout=120)
    cluster.remove_node(added)
    assert process.returncode == 2 and err.startswith("error: "), err
    assert f"node {added.node_id[:8]}): the GPU machine needs CuPy (seen: 0)" in err or "(seen: 1)" in err


@needs_ray
@pytest.mark.parametrize("address, words", [
    ("127.0.0.1:1", "--address: no Ray cluster that one can join answers at '127.0.0.1:1'"),
    ("nonsense", "--address: expected HOST:PORT, such as 10.0.0.1:6379, got 'nonsense'"),
    ("ray://10.0.0.1:10001", "--address: expected HOST:PORT, such as 10.0.0.1:6379"),
])
def test_an_address_where_no_cluster_answers(address, words):
    said = finished("run", "quick", "--machine", "cpu", "--executor", "ray", "--address", address, code=2)
    assert words in " ".join(said.split())


# --- without Ray


def test_who_is_not_let_into_a_cluster_is_told_of_its_token(monkeypatch):
    def init(*words, **options):
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    advice = "if it asks for a token, set RAY_AUTH_MODE=token here, too; else start one with: ray start"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "127.0.0.1:%d" % server.getsockname()[1]
        with pytest.raises(UserError, match=rf"\(Failed to connect to .*:6379\); {advice}"):
            ray_places.connect(address)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        with pytest.raises(UserError, match=r":6379\); start one with"):
            ray_places.connect(address)
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(UserError, match=r"refused\); start one with"):  # nothing listens any more
        ray_places.connect(address)


class Loses:
    """A worker that loses the cases of its number, and is right about the others."""

    machine, device, starting, deadline = "cpu", {"device": "cpu", "arch": "cpu"}, False, 0.0

    def __init__(self, *arguments):
        self.stopped = False

    def launch(self):
        pass

    def assign(self, params):
        self.case = params["n"]

    def step(self):
        if self.case == 3:
            raise Lost("the worker on b was lost while it ran a case")
        return {"status": "ok"}

    def stop(self):
        self.stopped = True


class LosingCrew(Crew):
    kind = Loses
    wait = staticmethod(lambda workers: None)


def test_a_case_with_which_every_place_is_lost_is_given_up():
    said, rows = [], []
    cases = [Case(str(n), {"n": n}) for n in range(1, 6)]
    with LosingCrew("cpu", [Place(), Place()], [], Repeat(), said.append) as crew:
        crew.work(cases, lambda *begun: None, lambda worker, case, row: rows.append((case.case_id, row)))
    assert sorted(case for case, row in rows if row["status"] == "ok") == ["1", "2", "4", "5"]
    assert [row["status"] for case, row in rows if case == "3"] == ["interrupted", "interrupted", "crash"]
    ends = [sentence.rpartition("; ")[2] for sentence in said]
    assert ends == ["it begins once more", "it begins once more", "it is given up"]


def node(name: str, **resources) -> dict:
    return {"NodeID": f"{name}-id", "NodeManagerHostname": name, "Alive": True, "Resources": resources}


@pytest.fixture
def nodes(monkeypatch):
    found = [node("a", CPU=2.0), node("b", CPU=8.0, GPU=2.0, **{"accelerator_type:H200": 1.0}),
             node("c", CPU=8.0, GPU=1.0, **{"accelerator_type:A100": 1.0}), node("head", CPU=0.0)]
    monkeypatch.setattr(ray_places, "alive", lambda: found)
    return found


@pytest.mark.parametrize("asked, hosts", [
    (("best",), "bbc"), (("gpu", "all"), "bbc"), (("best", "h200"), "bb"), (("gpu", "A100"), "c"),
    (("cpu",), "abc"), (("cpu", None, 2), "aabbcc"),
])
def test_places_are_the_clusters_gpus_or_its_nodes(nodes, asked, hosts):
    machine, found = ray_places.ray_places(*asked)
    assert "".join(place.host for place in found) == hosts
    assert machine == ("cpu" if asked[0] == "cpu" else "gpu")
    assert {place.gpu for place in found} == {machine == "gpu"}


def test_workers_of_a_node_share_its_cpus(nodes):
    _, found = ray_places.ray_places("cpu", None, 16)
    assert (found[0].cpus, found[0].environ) == (0.12, {CPU_WORKERS: "1"})
    assert (found[-1].cpus, found[-1].environ) == (0.5, {CPU_WORKERS: "1"})
    assert [place.cpus for place in ray_places.ray_places("best")[1]] == [1.0] * 3
    nodes[1]["Resources"]["CPU"] = 1.0
    assert [(place.cpus, place.environ) for place in ray_places.ray_places("gpu")[1]][0] == (0.5, {})
    del nodes[1:3]
    assert [place.host for place in ray_places.ray_places("best")[1]] == ["a"]


@pytest.mark.parametrize("asked, words", [
    (("cpu", "all"), "--devices: the CPU machine has none"),
    (("gpu", None, 2), "--jobs: a GPU has one worker"),
    (("best", None, 2), "--jobs: a GPU has one worker"),
    (("gpu", "T4"), "--executor ray: the cluster has no such GPU; its GPUs are: A100, H200"),
    (("cpu", None, 0), "--jobs: expected at least 1"),
])
def test_places_the_cluster_has_not(nodes, asked, words):
    with pytest.raises(UserError) as caught:
        ray_places.ray_places(*asked)
    assert words in str(caught.value)


def test_a_cluster_without_gpus_or_cpus(nodes):
    del nodes[:3]
    with pytest.raises(UserError, match="--executor ray: the cluster has no such GPU; its GPUs are: none"):
        ray_places.ray_places("gpu")
    with pytest.raises(UserError, match="no node of the cluster offers a CPU"):
        ray_places.ray_places("best")


def test_a_host_locks_the_gpu_that_ray_shows_it(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda: stub_gpu.CARDS[:1])
    monkeypatch.setattr(Worker, "process", staticmethod(stub_gpu.serve))
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STUB_FOLDER", str(tmp_path))
    uuid = stub_gpu.CARDS[0]["uuid"]
    arguments = "gpu", [], asdict(Repeat()), {}, False
    host = ray_crew.Host()
    kind, said = host.start(*arguments)
    assert kind == "ready" and said["device"]["device_uuid"] == uuid and said["environment"]["gpus"]
    assert said["device"]["host"] == socket.gethostname() and said["said"] == []
    assert host.run({"n": 1}) == ("row", {"status": "ok", "max_err": 0.0})
    kind, why = ray_crew.Host().start(*arguments)
    assert kind == "refused" and why.startswith(f"{uuid} is held by process")
    assert host.run({"n": stub_gpu.LOST})[1]["status"] == "crash"
    kind, why = host.run({"n": 2})
    assert kind == "unavailable" and "fallen off the bus" in why
    host._crew.stop()


def test_without_ray_a_sentence_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, out, err = call(monkeypatch, capsys, "run", "quick", "--machine", "cpu", "--executor", "ray")
    assert code == 2 and "--executor ray: needs Ray" in err and ray_places.INSTALL in " ".join(err.split())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert ray_places.INSTALL == f"pip install '{extras['ray'][0]}'"


@pytest.mark.parametrize("words, sentence", [
    (["--executor", "rai"], "--executor: 'rai' is not an executor; did you mean 'ray'?"),
    (["--address", "10.0.0.1:6379"], "--address: is a Ray cluster's; add --executor ray"),
])
def test_words_that_mean_nothing(monkeypatch, capsys, words, sentence):
    code, out, err = call(monkeypatch, capsys, "run", "quick", "--machine", "cpu", *words)
    assert code == 2 and sentence in " ".join(err.split())
