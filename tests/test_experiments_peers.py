"""Other people's libraries as kernels: named in one place, refused in a sentence where they cannot run."""
from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
from played_torch import Gpu, Tensor, play, play_vllm
from test_experiments_case import PAGES, run

from cuattn.kernels.base import Unsupported
from cuattn.machine import open_machine
from experiments import environment, inputs, peers
from experiments.catalog import PEERS

PREFILL = {"family": "prefill", "b": 1, "h": 2, "hkv": 2, "m": 8, "n": 8, "d": 64, "dtype": "bfloat16", "causal": True,
           "layout": "bshd", "mode": "launch"}
DECODE = {"family": "decode", "b": 1, "h": 2, "hkv": 2, "m": 1, "n": 48, "d": 64, "dtype": "bfloat16", "page_size": 16,
          "mode": "launch"}
CASES = {"prefill": PREFILL, "decode": DECODE, "cascade": {**DECODE, "family": "cascade", "prefix": 16},
         "cache": {**DECODE, "family": "cache"}, "pages": {**DECODE, "family": "pages"}}


def test_every_peer_has_an_adapter_that_needs_its_library_only_when_it_runs(monkeypatch, tmp_path):
    """But for vLLM's, which no module's name tells of."""
    play(monkeypatch)
    play_vllm(monkeypatch, tmp_path)
    assert set(PEERS) == set(peers.ADAPTERS)
    for name, (module, *_) in peers.ADAPTERS.items():
        adapter = import_module(f"experiments.peers.{module}")
        assert name in adapter.SUBJECTS
        adapter.refuse(name, {**CASES[PEERS[name]], "kernel": name})


@pytest.mark.parametrize("name", PEERS)
def test_the_cpu_machine_has_no_peers(cpu, name):
    with pytest.raises(Unsupported, match=f"{name}: a peer is compared on a GPU only"):
        peers.require(cpu, {**CASES[PEERS[name]], "kernel": name})


@pytest.mark.parametrize(("name", "changes", "said"), [
    ("torch_cudnn", {"m": 4}, "aligns a causal mask top-left"),
    ("torch_flash", {"mode": "graph"}, "use mode launch"),
    ("fa3", {"dtype": "float32"}, "float16 and bfloat16, got float32"),
    ("flashinfer", {"layout": "bhsd"}, "got bhsd"),
    ("fa3_decode", {"kv_dtype": "float8_e4m3"}, "for queries of float8_e4m3 alone, whose result is another"),
    ("flashinfer_decode", {"kv_dtype": "int8"}, "q's dtype or float8_e4m3, got one of int8"),
    ("vllm_decode", {"kv_dtype": "float8_e4m3"}, "q's dtype, got one of float8_e4m3"),
    ("vllm_decode", {"m": 2}, "vllm_decode: is not compared with several queries a sequence; choose another peer"),
    ("vllm_decode", {"window": 5}, "is not compared with window_size"),
    ("torch_cudnn", {"softcap": 3.0}, "is not compared with softcap"),
    ("torch_math", {"layout": "thd"}, "is not compared with cu_seqlens_q"),
    ("torch_flash", {"sinks": True}, "is not compared with sinks"),
])
def test_what_a_peer_computes_otherwise_is_refused(name, changes, said):
    adapter = import_module(f"experiments.peers.{peers.ADAPTERS[name][0]}")
    with pytest.raises(Unsupported, match=said):
        adapter.refuse(name, {**CASES[PEERS[name]], **changes, "kernel": name})


def test_pages_are_copied_by_pytorch_and_the_copy_is_judged(cpu, monkeypatch):
    monkeypatch.setattr(environment, "sensors", lambda: {"measured_throttle_reasons": ""})
    play(monkeypatch)
    gpu, case = Gpu(cpu), {**PAGES, "kernel": "torch_copy"}
    row = run(gpu, case)
    assert row["status"] == "ok" and row["measured_time_us"] == 10, row["error"]
    arrays = inputs.build(gpu, case)
    subject = peers.make(gpu, case, arrays)
    assert subject.kept_bytes() == arrays["k_cache"].nbytes + arrays["v_cache"].nbytes  # the check's copies
    monkeypatch.setattr(Tensor, "index_copy_", lambda self, dim, index, rows: self)
    row = run(gpu, case)
    assert row["status"] == "incorrect" and "k_cache" in row["error"]


def missing(said: str, machine) -> None:
    with pytest.raises(Unsupported, match=said):
        peers.require(machine, {**PREFILL, "kernel": "fa3"})


def test_what_is_not_there_is_named(monkeypatch):
    gpu = SimpleNamespace(name="gpu")
    monkeypatch.setattr(peers, "find_spec", lambda module: None)
    missing("fa3: PyTorch is not installed", gpu)
    monkeypatch.undo()
    monkeypatch.setitem(peers.ADAPTERS, "fa3", ("fa3", "no_such_module", "the shop"))
    play(monkeypatch, 0)
    missing("fa3: this PyTorch .2.9.0. sees no GPU; install a build with CUDA", gpu)
    play(monkeypatch, 1)
    missing("the module no_such_module is not installed; install it .the shop.", gpu)


@pytest.mark.gpu
def test_on_a_gpu_a_library_that_is_not_there_is_named(monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setitem(peers.ADAPTERS, "fa3", ("fa3", "no_such_module", "the shop"))
    missing("the module no_such_module is not installed; install it .the shop.", open_machine("gpu"))
