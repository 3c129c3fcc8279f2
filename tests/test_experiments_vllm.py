"""vLLM's PagedAttention as a peer: its layouts, its choice between two kernels, and where it cannot run."""
from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from played_torch import Operator, Tensor, play_gpu, play_vllm
from test_experiments_case import DECODE, run

from cuattn.kernels.base import Unsupported
from experiments import doctor, inputs, peers
from experiments.catalog import PEERS, catalog
from experiments.peers import vllm
from experiments.suite import load_suite
from experiments.sweep import cases_of

CASE = {**DECODE, "kernel": "vllm_decode", "page_size": 8, "h": 4, "hkv": 2}


@pytest.fixture
def gpu(cpu, monkeypatch):
    return play_gpu(cpu, monkeypatch)


@pytest.fixture
def kernels(gpu, monkeypatch, tmp_path):
    return play_vllm(monkeypatch, tmp_path)


def refused(said: str, gpu, monkeypatch, **changes) -> None:
    """The case is a row that says so, and has taken no memory."""
    monkeypatch.setattr(inputs, "build", None)
    row = run(gpu, {**CASE, **changes})
    assert row["status"] == "unsupported" and said in row["error"]
    assert row["error"].startswith("vllm_decode: ")


# --- what it computes


@pytest.mark.parametrize(("changes", "kernel"), [
    ({}, "paged_attention_v1"),
    ({"page_size": 16, "page_order": "sorted", "hkv": 4, "dtype": "bfloat16"}, "paged_attention_v1"),
    ({"lengths": [512, 1, 0]}, "paged_attention_v1"),
    ({"lengths": [513, 1, 1030]}, "paged_attention_v2"),
    ({"lengths": [0, 1100, 512], "page_size": 32, "d": 120, "dtype": "bfloat16"}, "paged_attention_v2"),
    ({"lengths": [600], "b": 1, "h": 513, "hkv": 1, "d": 32}, "paged_attention_v1"),
])
def test_a_case_is_converted_checked_and_timed(gpu, kernels, changes, kernel):
    case = {**CASE, **changes}
    row = run(gpu, {**case, "tokens": sum(case["lengths"]), "max_len": max(case["lengths"])})
    assert row["status"] == "ok", row["error"]
    assert row["measured_time_us"] == 10 and row["max_err"] <= row["tolerance"]
    assert row["lse_err"] is None and row["lse_tolerance"] is None  # it returns none
    assert [name for name, each in vars(kernels).items() if each.calls] == [kernel]


def test_the_operators_get_their_arguments_in_order(gpu, kernels):
    assert run(gpu, {**CASE, "lengths": [513, 0, 5], "tokens": 518, "max_len": 513})["status"] == "ok"
    given = kernels.paged_attention_v2.calls[-1]
    scalars = {name: given[name] for name in given if np.ndim(given[name]) == 0}
    assert scalars == {
        "num_kv_heads": 2, "scale": 0.125, "block_size": 8, "max_seq_len": 520, "alibi_slopes": None,
        "kv_cache_dtype": "auto", "tp_rank": 0, "blocksparse_local_blocks": 0, "blocksparse_vert_stride": 0,
        "blocksparse_block_size": 64, "blocksparse_head_sliding_step": 0,
    }
    assert given["k_scale"] == given["v_scale"] == [1] and given["k_scale"].dtype == np.float32
    assert given["block_tables"].dtype == given["seq_lens"].dtype == np.int32
    assert given["exp_sums"].shape == given["max_logits"].shape == (3, 4, 2)
    assert given["exp_sums"].dtype == given["max_logits"].dtype == np.float32
    assert given["tmp_out"].shape == (3, 4, 2, 64)
    assert given["tmp_out"].dtype == given["out"].dtype == np.float16
    assert given["query"].shape == given["out"].shape == (3, 4, 64)


@pytest.mark.parametrize("page", vllm.PAGE_SIZES)
def test_every_element_of_the_caches_is_where_the_kernels_look_for_it(rng, gpu, page):
    k, v = (rng.standard_normal((5, page, 3, 32)).astype(np.float16) for _ in range(2))
    own_k, own_v = (x.array for x in vllm.own_layout(Tensor(k), Tensor(v)))
    assert own_k.flags.c_contiguous and own_k.shape == (5, 3, 4, page, 8)
    assert own_v.flags.c_contiguous and own_v.shape == (5, 3, 32, page)
    for p, s, h, d in np.ndindex(k.shape):
        assert own_k[p, h, d // 8, s, d % 8] == k[p, s, h, d] and own_v[p, h, d, s] == v[p, s, h, d]


@pytest.mark.parametrize(("keys", "rows", "v1"), [
    (1, 1, True), (512, 1, True), (513, 512, False), (513, 513, True), (8192, 512, False), (8192, 513, True),
    (8193, 513, False), (131072, 100_000, False),
])
def test_the_choice_between_the_kernels_is_vllms(keys, rows, v1):
    assert vllm.takes_v1(keys, rows) is v1


def test_a_captured_call_follows_lengths_and_allocates_nothing(gpu, kernels):
    arrays = inputs.build(gpu, CASE)
    subject = peers.make(gpu, CASE, arrays)
    before = sys.modules["torch"].allocated
    for lengths in ([33, 5, 0], [1, 2, 40]):
        arrays["cache_seqlens"][...] = lengths
        arrays["block_table"][...] = np.arange(15).reshape(3, 5)[::-1] % len(arrays["k_cache"])
        subject.poison()
        subject.run()
        subject.verdict().raise_if_bad()
    assert sys.modules["torch"].allocated == before


def test_the_caches_in_our_layout_are_not_counted_as_its_own(gpu, kernels):
    arrays = inputs.build(gpu, CASE)
    subject = peers.make(gpu, CASE, arrays)
    caches = arrays["k_cache"].nbytes + arrays["v_cache"].nbytes
    scales, out = 4, arrays["q"].nbytes
    assert subject.kept_bytes() == caches and subject.outside_bytes() == caches + scales + out
    subject.close()


# --- where it cannot run


@pytest.mark.parametrize(("changes", "said"), [
    ({"page_size": 64}, "is compiled for pages of 8, 16, 32, got 64; choose one of these"),
    ({"d": 72}, "is compiled for head dims of 32, 64, 80, 96, 112, 120, 128, 192, 256, got 72"),
    ({"dtype": "float8_e4m3"}, "float16 and bfloat16, got float8_e4m3"),
])
def test_what_it_is_not_compiled_for_is_refused(gpu, kernels, monkeypatch, changes, said):
    refused(said, gpu, monkeypatch, **changes)


def test_a_library_that_is_not_there_is_named(gpu, monkeypatch):
    monkeypatch.delenv(vllm.LIBRARY, raising=False)
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    refused("install vLLM, or name its _C.abi3.so in CUATTN_VLLM_LIBRARY", gpu, monkeypatch)


def test_a_library_that_does_not_load_is_named(gpu, kernels, monkeypatch):
    monkeypatch.setenv(vllm.LIBRARY, "elsewhere/_C.abi3.so")
    refused("PyTorch 2.9.0 does not load elsewhere/_C.abi3.so (Could not load", gpu, monkeypatch)


def test_a_version_that_has_dropped_the_kernels_is_named(gpu, kernels, monkeypatch):
    del kernels.paged_attention_v2
    refused("has no paged_attention_v2, which newer versions of vLLM have dropped", gpu, monkeypatch)


def test_a_version_with_other_arguments_is_named(gpu, kernels, monkeypatch, tmp_path):
    del kernels.paged_attention_v1._schema.arguments[-1]
    refused("paged_attention_v1 of ", gpu, monkeypatch)
    play_vllm(monkeypatch, tmp_path, scales="float")
    refused("takes other arguments than that of vLLM 0.7 and later", gpu, monkeypatch)


def test_what_a_kernel_says_is_in_its_row(gpu, kernels):
    class Failing(Operator):
        def __call__(self, *values):
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    kernels.paged_attention_v1 = Failing("paged_attention_v1")
    row = run(gpu, CASE)
    assert row["status"] == "cuda_error" and "no kernel image" in row["error"]


def test_an_installed_vllm_brings_its_libraries_and_a_named_one_goes_first(monkeypatch, tmp_path):
    monkeypatch.delenv(vllm.LIBRARY, raising=False)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(vllm, "find_spec", {"vllm": spec}.get)
    assert vllm.libraries() == [] and doctor._vllm()[1] is None
    files = [tmp_path / "_C.abi3.so", tmp_path / "_C_stable_libtorch.abi3.so"]
    for i, path in enumerate(files):
        path.touch()
        assert vllm.libraries() == files[: i + 1]
    assert doctor._vllm() == ("vLLM's library", True, f"{files[0]}, {files[1]}", "")
    monkeypatch.setenv(vllm.LIBRARY, "elsewhere.so")
    assert [str(path) for path in vllm.libraries()] == ["elsewhere.so"]
    _, works, detail, remedy = doctor._vllm()
    assert works is None and detail == "elsewhere.so is not a file" and "CUATTN_VLLM_LIBRARY" in remedy


def test_it_stands_beside_all_other_peers_of_decode():
    found = {}
    for case in cases_of(load_suite("peers"), "gpu", catalog()):
        if case.params["family"] == "decode":
            point = tuple(case.params[x] for x in ("b", "h", "hkv", "d", "n", "page_size"))
            found.setdefault(point, set()).add(case.params["kernel"])
    decode = {name for name, family in PEERS.items() if family == "decode"}
    assert len(found) == 30 and all(kernels == {"paged", "paged_stream", *decode} for kernels in found.values())


def test_cases_outside_its_pages_never_look_for_the_library():
    with pytest.raises(Unsupported, match="got 64"):
        vllm.refuse("vllm_decode", {**CASE, "page_size": 64})
