"""FlashInfer as a peer: what it is asked, that its answer is judged, and what it is not asked at all."""
from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import played_flashinfer
import pytest
from played_flashinfer import play_flashinfer
from played_torch import play_gpu
from test_experiments_case import APPEND, DECODE, PREFILL, SHARED, run

from experiments import inputs
from experiments.suite import load_suite

CASE = {**DECODE, "kernel": "flashinfer_decode", "h": 4, "hkv": 2}
BYTES = {**CASE, "kv_dtype": "float8_e4m3"}
DENSE = {**PREFILL, "kernel": "flashinfer", "h": 4, "hkv": 2}
PACKED = {**DENSE, "layout": "thd", "b": 3, "tokens": 72}
PAGES = {**PACKED, "page_size": 8, "page_order": "shuffled"}
SEEN = {**CASE, "lengths": [17, 9, 33], "tokens": 59, "h": 8}  # enough keys for several queries
WIDE = {**SEEN, "d": 128, "sinks": True}
WIDE_PAGES = {**PAGES, "d": 128, "sinks": True, "window": 9}
CASCADE = {**SHARED, "kernel": "flashinfer_cascade", "family": "cascade", "h": 4, "hkv": 2}


@pytest.fixture
def gpu(cpu, monkeypatch):
    return play_gpu(cpu, monkeypatch)


@pytest.fixture
def wrappers(gpu, monkeypatch):
    return play_flashinfer(monkeypatch)


@pytest.mark.parametrize("params", [CASE, {**CASE, "dtype": "bfloat16", "page_order": "sorted"}, BYTES,
                                    {**CASE, **SHARED, "kernel": "flashinfer_decode"}, CASCADE,
                                    {**CASCADE, "prefix": 4, "lengths": [4, 5, 40], "tokens": 49, "max_len": 40},
                                    {**CASE, "window": 6}, {**CASE, "window": 6, "softcap": 2.0}, {**SEEN, "m": 4},
                                    {**SEEN, "m": 8, "window": 3, "softcap": 2.0}, WIDE, {**WIDE, "m": 4, "window": 5},
                                    DENSE, {**DENSE, "window": 5, "softcap": 2.0}, {**DENSE, "causal": False}, PACKED,
                                    {**PACKED, "window": 3}, PAGES, {**PAGES, "softcap": 2.0, "window": 9},
                                    WIDE_PAGES])
@pytest.mark.parametrize("mode", ["launch", "graph"])
def test_a_case_is_judged_and_timed_with_its_plan_or_with_a_graph_beside_it(gpu, wrappers, params, mode, monkeypatch):
    monkeypatch.setattr(gpu, "capture", lambda launch: launch, raising=False)
    row = run(gpu, {**params, "mode": mode})
    assert row["status"] == "ok", row["error"]
    assert row["measured_time_us"] == 10 and row["max_err"] <= row["tolerance"]
    assert row["lse_err"] is None and ("measured_plan_us" in row) == (mode == "graph")
    (wrapper,) = wrappers
    assert wrapper.graph == (mode == "graph")
    planned = len(wrapper.planned) - 1  # beside the first
    assert planned == (20 if mode == "graph" else len(wrapper.ran))


def test_a_cache_of_bytes_is_read_with_one_scale_for_queries_of_16_bits(gpu, wrappers):
    assert run(gpu, BYTES)["status"] == "ok" and run(gpu, CASE)["status"] == "ok"
    held, plain = wrappers
    assert held.planned[-1]["kv_data_type"] == ml_dtypes.float8_e4m3fn and held.planned[-1]["q_data_type"] == np.float16
    assert held.ran[-1] == {"k_scale": inputs.KV_SCALES["float8_e4m3"], "v_scale": inputs.KV_SCALES["float8_e4m3"]}
    assert plain.planned[-1]["kv_data_type"] == np.float16
    assert plain.ran[-1] == {"k_scale": None, "v_scale": None}


def test_a_wrong_scale_is_noticed(gpu, wrappers, monkeypatch):
    monkeypatch.setattr("experiments.peers.flashinfer.quantised", lambda params: {"k_scale": 0.25, "v_scale": 1.0})
    row = run(gpu, BYTES)
    assert row["status"] == "incorrect" and "measured_time_us" not in row


def test_several_queries_sinks_and_pages_choose_their_wrappers(gpu, wrappers):
    several = {**SEEN, "m": 2}
    for params, name, backend in [(several, "BatchDecodeWithPagedKVCacheWrapper", None),
                                  (WIDE, "BatchAttentionWithAttentionSinkWrapper", "fa2"),
                                  (PACKED, "BatchPrefillWithRaggedKVCacheWrapper", None),
                                  (PAGES, "BatchPrefillWithPagedKVCacheWrapper", "auto"),
                                  ({**WIDE, "m": 2}, "BatchAttentionWithAttentionSinkWrapper", "fa2"),
                                  (WIDE_PAGES, "BatchAttentionWithAttentionSinkWrapper", "auto")]:
        assert run(gpu, params)["status"] == "ok"
        made = wrappers.pop()
        assert type(made).__name__ == name and getattr(made, "backend", None) == backend
        assert made.planned[-1].get("q_len_per_req", 1) == (2 if params is several else 1)


@pytest.mark.parametrize("more", [{}, {"m": 7, "page_order": "sorted", "dtype": "bfloat16"}, {"m": 1, "hkv": 2}])
def test_rows_are_appended_behind_each_sequence(gpu, wrappers, more, monkeypatch):
    """And a row left out or put elsewhere is noticed."""
    case = {**APPEND, "kernel": "flashinfer_append", **more}
    row = run(gpu, case)
    assert row["status"] == "ok" and row["measured_time_us"] == 10, row["error"]
    write = played_flashinfer.append_paged_kv_cache
    for shift in (lambda x: x[:-1], lambda x: x - 1):
        monkeypatch.setattr(sys.modules["flashinfer"], "append_paged_kv_cache",
                            lambda *, positions, **given: write(positions=shift(positions), **given))
        assert run(gpu, case)["status"] in ("incorrect", "crash")


def test_the_levels_are_the_prefix_once_and_each_sequences_own_keys(gpu, wrappers):
    assert run(gpu, CASCADE)["status"] == "ok"
    said = wrappers[0].planned[-1]
    assert [x.array.tolist() for x in said["qo_indptr_arr"]] == [[0, 3], [0, 1, 2, 3]]
    assert [x.array.tolist() for x in said["paged_kv_indptr_arr"]] == [[0, 2], [0, 3, 4, 11]]
    assert [x.array.tolist() for x in said["paged_kv_last_page_len"]] == [[4], [1, 1, 1]]
    assert len(set(np.concatenate([x.array for x in said["paged_kv_indices_arr"]]))) == 2 + 11


@pytest.mark.parametrize(("changes", "said"), [
    ({"kv_dtype": "int8"}, "is compared over caches of q's dtype or float8_e4m3, got one of int8"),
    ({"sinks": True}, "with sinks at head dim 128 and a cache of q's dtype, got 64 and float16"),
    ({"sinks": True, "d": 128, "kv_dtype": "float8_e4m3"}, "got 128 and float8_e4m3; choose those"),
    ({"sinks": True, "softcap": 3.0}, "takes sinks or a softcap, got both"),
    ({**DENSE, "sinks": True, "page_size": None}, "takes sinks over pages alone; give prefill a page_size"),
    ({**APPEND, "kernel": "flashinfer_append", "kv_dtype": "float8_e4m3"}, "q's dtype, got one of float8_e4m3"),
    ({"dtype": "float32"}, "float16 and bfloat16, got float32"),
    ({**CASCADE, "prefix": 0}, "expected a prefix, the keys of its first level, got none; choose one"),
])
def test_what_it_does_not_compute_is_refused_before_memory_is_taken(gpu, wrappers, monkeypatch, changes, said):
    monkeypatch.setattr(inputs, "build", None)
    row = run(gpu, {**CASE, **changes})
    assert row["status"] == "unsupported" and said in row["error"], row["error"]
    assert not wrappers


def test_the_suites_ask_it():
    suites = {name: load_suite(name).gpu for name in ("kv-dtype", "shared-prefix")}
    asked = {name: {kernel for sweep in sweeps for kernel in sweep.kernels} for name, sweeps in suites.items()}
    assert asked["kv-dtype"] >= {"paged_stream", "flashinfer_decode"}
    assert asked["shared-prefix"] >= {"cascade", "flashinfer_cascade", "paged_stream", "flashinfer_decode"}
