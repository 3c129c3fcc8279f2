"""The flow of one case, a GPU played by the CPU machine: what is timed and checked, what a row may say."""

from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn.compile import CompileError
from cuattn.kernels.base import QUANTISED as QUANTISED_TYPES
from cuattn.machine import DeviceError
from cuattn.quantise import numbers
from experiments import case, environment, inputs, subjects
from experiments.catalog import catalog
from experiments.schema import PERFORMANCE
from experiments.suite import KV_DTYPES, Repeat

PREFILL = {
    "kernel": "flash",
    "family": "prefill",
    "b": 1,
    "h": 2,
    "hkv": 1,
    "m": 16,
    "n": 24,
    "d": 64,
    "tokens": 24,
    "max_len": 24,
    "dtype": "bfloat16",
    "causal": True,
    "layout": "bshd",
    "cache_mode": "cold",
    "mode": "launch",
    "seed": 3,
}
DECODE = {
    "kernel": "paged",
    "family": "decode",
    "b": 3,
    "h": 2,
    "hkv": 1,
    "m": 1,
    "d": 64,
    "lengths": [5, 0, 33],
    "tokens": 38,
    "max_len": 33,
    "dtype": "float16",
    "page_size": 4,
    "page_order": "shuffled",
    "cache_mode": "cold",
    "mode": "launch",
    "seed": 3,
}
MLA = {**DECODE, "kernel": "mla", "family": "mla", "h": 20, "d": 576}
SHARED = {**DECODE, "lengths": [17, 9, 33], "tokens": 59, "prefix": 8}
CASCADE = {**SHARED, "kernel": "cascade", "family": "cascade"}
APPEND = {**DECODE, "kernel": "append", "family": "cache", "m": 2}
QUANTISED = {**DECODE, "kernel": "paged_stream", "kv_dtype": "float8_e4m3"}
PAGES = {**DECODE, "kernel": "copy_pages", "family": "pages"}
FEATURES = {**DECODE, "kernel": "paged_stream", "m": 4, "window": 3, "softcap": 2.0, "sinks": True}
PACKED = {**PREFILL, "layout": "thd", "b": 3, "tokens": 72, "window": 3, "softcap": 2.0, "sinks": True}
PAGED_PREFILL = {**PACKED, "page_size": 16, "page_order": "shuffled"}
PROBE = {
    "kernel": "read",
    "family": "probe",
    "bytes": 4096,
    "dtype": "bfloat16",
    "cache_mode": "cold",
    "mode": "launch",
    "seed": 0,
}
QUICK = Repeat(min_samples=2, max_samples=3, timeout_s=0.05)


class Event:
    def record(self):
        pass


class PlayedGpu:
    """The CPU machine under a GPU's name, with a clock that always says 10 µs."""

    name = "gpu"

    def __init__(self, cpu):
        self._cpu = cpu
        self.clock = [1000.0]
        self.looks = 0

    def __getattr__(self, name):
        return getattr(self._cpu, name)

    def counting(self):
        from contextlib import nullcontext

        return nullcontext()

    def event(self):
        return Event()

    def elapsed_us(self, start, stop):
        return 10.0

    def flush_l2(self):
        pass

    def hold(self, *args):
        pass

    def sm_clock_mhz(self):
        self.looks += 1
        return self.clock[min(self.looks, len(self.clock)) - 1]

    def reset_peak(self, limit=None):
        pass

    def lift_limit(self):
        pass

    def peak_pool_bytes(self):
        return self._cpu.arena.used

    def used_bytes(self):
        return 1 << 30


@pytest.fixture
def gpu(cpu, monkeypatch):
    monkeypatch.setattr(
        environment, "sensors", lambda: {"measured_power_w": 500.0, "measured_throttle_reasons": ""}
    )
    return PlayedGpu(cpu)


def run(machine, params, repeat=QUICK, **phases):
    return case.run_case(machine, params, repeat, catalog(), phases.get("phase", lambda name: None))


def test_a_suites_rest_reaches_the_timer(gpu, monkeypatch):
    held = []
    monkeypatch.setattr(PlayedGpu, "hold", lambda self, us: held.append(us))
    paced = Repeat(min_samples=2, max_samples=3, timeout_s=0.05, rest_us=4321.0)
    assert run(gpu, PREFILL, paced)["status"] == "ok"
    assert 4321.0 in held
    held.clear()
    assert run(gpu, PREFILL)["status"] == "ok" and 4321.0 not in held


@pytest.mark.parametrize(
    "params",
    [
        PREFILL,
        {**PREFILL, "layout": "bhsd"},
        {**PREFILL, "kernel": "standard", "constants": '{"score": "input"}'},
        DECODE,
        MLA,
        SHARED,
        CASCADE,
        APPEND,
        {**APPEND, "kernel": "append_rope"},
        PAGES,
        PROBE,
        {**PROBE, "kernel": "words", "constants": '{"width": 2}'},
        {**PROBE, "kernel": "copy"},
        {**PROBE, "kernel": "mma", "flops": 10**6},
        {**PROBE, "kernel": "empty"},
        QUANTISED,
        {**QUANTISED, "kv_dtype": "int8"},
        {**APPEND, "kernel": "append_rope", "kv_dtype": "float8_e4m3"},
        FEATURES,
        {**DECODE, "kernel": "paged_stream", "window": 0},
        {**DECODE, "m": 8},
        {**PREFILL, "window": 5, "sinks": True},
        PACKED,
        {**PACKED, "kernel": "flash_hopper"},
        PAGED_PREFILL,
        {**PAGED_PREFILL, "kernel": "flash_hopper", "constants": '{"block_n": 16}'},
    ],
    ids=lambda p: f"{p['kernel']}-{p.get('layout', '')}{p.get('kv_dtype', '')}",
)
def test_counted_equals_modelled_for_every_kernel(cpu, params):
    row = run(cpu, params)
    assert row["status"] == "ok", row.get("error")
    for name in ("launches", "bytes_loaded", "bytes_stored"):
        assert row[f"counted_{name}"] == row[f"modelled_{name}"]
    assert not any(row.get(name) for name in PERFORMANCE) and row["emulation_s"] > 0
    for name in ("lse_err", "lse_tolerance"):
        assert (row[name] is None) == (params["family"] in ("cache", "pages", "probe"))


@pytest.mark.parametrize("params", [PREFILL, DECODE, MLA, SHARED, {**APPEND, "page_order": "sorted"},
                                    {**APPEND, "kernel": "append_rope"}, PAGES, QUANTISED,
                                    {**APPEND, "kv_dtype": "int8"}, FEATURES, PACKED, PAGED_PREFILL])
def test_the_closed_form_of_memory_is_what_is_allocated(cpu, params):
    row = run(cpu, params)
    arrays = inputs.build(cpu, params)
    outputs = subjects.make(cpu, params, catalog()[params["kernel"]], lambda arrays: None).planned.outputs
    outputs = () if params["family"] in ("cache", "pages") else outputs
    together = inputs.nbytes(arrays) + sum(x.nbytes for x in outputs) + row["modelled_scratch_bytes"]
    assert row["modelled_peak_bytes"] == together


def test_a_quantised_cache_is_filled_by_its_scale_and_takes_half(cpu):
    """Its numbers are as normal as those of another one, and what cannot read it says so."""
    plain, arrays = (inputs.build(cpu, {**DECODE, **more}) for more in ({}, {"kv_dtype": "float8_e4m3"}))
    assert arrays["k_cache"].dtype == np.uint8 and 2 * arrays["k_cache"].nbytes == plain["k_cache"].nbytes
    scales = inputs.quantised(QUANTISED)
    values = numbers(arrays["v_cache"], "float8_e4m3") * scales["v_scale"]
    assert abs(values.std() - 1) < 0.05 and 3 < np.abs(values).max() < 6
    assert inputs.quantised(DECODE) == {} and tuple(inputs.KV_SCALES) == KV_DTYPES == QUANTISED_TYPES
    row = run(cpu, {**DECODE, "kv_dtype": "int8"})
    assert row["status"] == "unsupported" and row["error"] == (
        "kv_dtype: expected none for kernel 'paged', got int8; choose another kernel")


@pytest.mark.parametrize(("params", "column"), [
    (FEATURES, "window"), (FEATURES, "softcap"), (FEATURES, "sinks"), (PACKED, "window"), (PAGED_PREFILL, "softcap"),
    (PAGED_PREFILL, "sinks"), ({**PREFILL, "sinks": True}, "sinks"), ({**PREFILL, "softcap": 2.0}, "softcap"),
])
def test_what_a_case_asks_of_its_scores_is_computed_and_judged(cpu, monkeypatch, params, column):
    """A kernel that left it out would be incorrect."""
    plain = {name: value for name, value in params.items() if name != column}
    for name in ("plan_decode", "plan_attention", "plan_attention_varlen"):
        original = getattr(cuattn, name)

        def forgets(*arrays, original=original, **options):
            gone = {"window": ("window_size", (-1, -1)), "softcap": ("softcap", 0.0), "sinks": ("sinks", None)}
            return original(*arrays, **{**options, gone[column][0]: gone[column][1]})

        monkeypatch.setattr(subjects.cuattn, name, forgets)
    assert run(cpu, params)["status"] == "incorrect"
    assert run(cpu, plain)["status"] == "ok"


def test_sinks_are_numbers_that_bfloat16_holds(cpu):
    sinks = inputs.build(cpu, FEATURES)["sinks"]
    assert sinks.dtype == np.float32 and sinks.shape == (2,) and sinks.any()
    assert (sinks.astype(ml_dtypes.bfloat16).astype(np.float32) == sinks).all()
    without = inputs.build(cpu, {**FEATURES, "sinks": None})
    assert "sinks" not in without and (without["q"] == inputs.build(cpu, FEATURES)["q"]).all()


@pytest.mark.parametrize(("params", "said"), [
    ({**PREFILL, "kernel": "standard", "softcap": 2.0},
     "softcap: kernel 'standard' does not offer softcap; choose another kernel"),
    ({**PACKED, "kernel": "standard", "window": None, "softcap": None, "sinks": None},
     "varlen: kernel 'standard' does not offer cu_seqlens_q; choose another kernel"),
    ({**DECODE, "kernel": "paged_gather", "m": 2},
     "queries: kernel 'paged_gather' does not offer several queries a sequence; choose another kernel"),
    ({**DECODE, "m": 9}, "1 to 8 queries a sequence"),
])
def test_what_a_kernel_does_not_offer_is_unsupported(cpu, params, said):
    row = run(cpu, params)
    assert row["status"] == "unsupported" and said in row["error"]


def test_another_timer_is_asked_where_the_run_says_so(gpu, monkeypatch):
    repeat, events = replace(QUICK, timer="nvbench"), case.timing.measure
    monkeypatch.setattr(case.timing, "measure", None)
    with monkeypatch.context() as patch:
        patch.setattr(case.timing_nvbench, "measure", events)
        assert run(gpu, PREFILL, repeat=repeat)["measured_time_us"] == 10.0
    warm = run(gpu, {**PREFILL, "cache_mode": "warm"}, repeat=repeat)
    assert warm["status"] == "unsupported" and "NVBench samples with a cold cache only" in warm["error"]


def test_a_gpu_row_has_its_time_its_memory_and_its_derived_rates(gpu):
    phases = []
    row = run(gpu, PREFILL, phase=phases.append)
    assert row["status"] == "ok" and phases == ["build", "run"]
    assert (
        row["measured_time_us"] == 10.0
        and row["measured_empty_us"] == 10.0
        and row["measured_n_samples"] >= 1
    )
    assert row["measured_tflops"] == pytest.approx(row["modelled_flops"] / 10e6)
    assert row["measured_tokens_per_s"] == pytest.approx(24 / 10e-6)
    moved = row["modelled_bytes_loaded"] + row["modelled_bytes_stored"]
    assert row["modelled_gbps"] == pytest.approx(moved / 10e3)
    assert row["measured_peak_pool_bytes"] >= row["modelled_peak_bytes"] and row["measured_power_w"] == 500.0
    assert "counted_launches" not in row and row["check"] == "full"


@pytest.mark.parametrize("mode", ["launch", "graph"])
def test_how_busy_it_is_comes_from_a_run_of_its_own(gpu, monkeypatch, mode):
    """Only where it is asked for; a kernel that cannot be built so keeps its time."""
    stamped = []
    monkeypatch.setattr(subjects.busy, "sm_busy", lambda planned, graph: stamped.append(graph) or 0.25)
    monkeypatch.setattr(PlayedGpu, "capture", lambda self, fn: fn, raising=False)
    params, asked = {**PREFILL, "mode": mode}, replace(QUICK, sm_busy=True)
    assert "measured_sm_busy" not in run(gpu, params) and not stamped
    row = run(gpu, params, asked)
    assert row["status"] == "ok" and row["measured_sm_busy"] == 0.25 and stamped == [mode == "graph"]

    def refused(planned, graph):
        raise CompileError("no")

    monkeypatch.setattr(subjects.busy, "sm_busy", refused)
    row = run(gpu, params, asked)
    assert row["status"] == "ok" and row["measured_sm_busy"] is None and row["measured_time_us"] == 10.0


@pytest.mark.parametrize("wrong_from", [1, 4])
def test_a_wrong_result_before_or_after_timing_costs_the_row_its_numbers(gpu, monkeypatch, wrong_from):
    honest, calls = subjects._Ours.run, []

    def spoil(self):
        honest(self)
        calls.append(1)
        if len(calls) >= wrong_from:
            self.planned.outputs[0][...] = 7

    monkeypatch.setattr(subjects._Ours, "run", spoil)
    row = run(gpu, PREFILL)
    assert row["status"] == "incorrect" and "exceeds" in row["error"]
    assert not any(row.get(name) for name in PERFORMANCE)


def test_stale_outputs_do_not_pass(gpu, monkeypatch):
    honest, calls = subjects._Ours.run, []

    def lazy(self):
        calls.append(1)
        if len(calls) <= 2:  # right until it was checked, then it does nothing
            honest(self)

    monkeypatch.setattr(subjects._Ours, "run", lazy)
    row = run(gpu, PREFILL)
    assert row["status"] == "incorrect" and row.get("measured_time_us") is None


def test_a_clock_that_moves_makes_a_throttled_row_that_keeps_its_numbers(gpu, monkeypatch):
    gpu.clock = [900.0, 1000.0]
    row = run(gpu, PREFILL)
    assert row["status"] == "throttled" and "900" in row["error"] and row["measured_time_us"] == 10.0
    gpu.looks = 0
    monkeypatch.setattr(environment, "sensors", lambda: {"measured_throttle_reasons": "power_cap"})
    assert run(gpu, PREFILL)["status"] == "ok"
    monkeypatch.setattr(environment, "sensors", lambda: {"measured_throttle_reasons": "power_cap,hw_thermal"})
    assert run(gpu, PREFILL)["status"] == "throttled"


def test_a_case_without_room_still_says_what_it_would_take(cpu, monkeypatch):
    def full(*args):
        raise MemoryError("nothing left")

    monkeypatch.setattr(inputs, "build", full)
    row = run(cpu, {**PREFILL, "kernel": "standard", "m": 1 << 15, "n": 1 << 15, "h": 32, "hkv": 8, "d": 128})
    assert row["status"] == "oom" and row["modelled_scratch_bytes"] == 32 * (1 << 30) * 6


def test_memory_that_runs_out_in_the_check_is_not_blamed_on_the_kernel(cpu, monkeypatch):
    def full(self):
        raise MemoryError("nothing left")

    monkeypatch.setattr(subjects.Prefill, "verdict", full)
    row = run(cpu, PREFILL)
    assert row["status"] == "oom" and "while checking" in row["error"]


@pytest.mark.parametrize("name, words", [("torch_flash", "CPU machine")])
def test_a_peer_that_is_not_here_is_unsupported(cpu, name, words):
    row = run(cpu, {**PREFILL, "kernel": name})
    assert row["status"] == "unsupported" and words in row["error"] and row["modelled_flops"] > 0


@pytest.mark.parametrize("change, words", [
    ({"dtype": "float8_e4m3"}, "dtype: expected float16 or bfloat16 for kernel 'flash', got float8_e4m3"),
    ({"dtype": "float32"}, "for kernel 'flash', got float32"),
    ({"d": 512}, "head dim: expected a multiple of 8 up to 256 for kernel 'flash', got 512"),
    ({"h": 3, "hkv": 2}, "q: expected a number of heads that k's 2 divide, got 3"),
])  # fmt: skip
def test_what_a_kernel_does_not_take_is_unsupported_and_no_crash(cpu, change, words):
    row = run(cpu, {**PREFILL, "kernel": "flash", **change})
    assert row["status"] == "unsupported" and words in row["error"]


def test_a_peer_refuses_what_it_computes_otherwise(gpu):
    row = run(gpu, {**PREFILL, "kernel": "torch_flash"})
    assert row["status"] == "unsupported"


@pytest.mark.parametrize(
    "error, status",
    [
        (MemoryError("x"), "oom"),
        (type("OutOfMemoryError", (RuntimeError,), {})("x"), "oom"),
        (type("CUDARuntimeError", (RuntimeError,), {})("cudaErrorMemoryAllocation: out of memory"), "oom"),
        (type("CUDARuntimeError", (RuntimeError,), {})("cudaErrorIllegalAddress"), "cuda_error"),
        (RuntimeError("CUDA error: misaligned address"), "cuda_error"),
        (DeviceError("fault"), "cuda_error"),
        (type("CompileError", (RuntimeError,), {})("a\nb"), "compile_error"),
        (KeyError("x"), "crash"),
        (type("Unsupported", (ValueError,), {})(""), "unsupported"),
        (cuattn.ContractError("head dim: expected less"), "unsupported"),
    ],
)
def test_errors_become_statuses_and_one_line(error, status):
    got, message = case.classify(error)
    assert got == status and message and "\n" not in message


# --- inputs


def test_page_tables():
    table, total = inputs.page_table([5, 0, 8, 1], 4, "sorted", 0)
    assert table.tolist() == [[0, 1], [-1, -1], [2, 3], [4, -1]] and total == 5 and table.dtype == np.int32
    shuffled, total = inputs.page_table([40, 0, 80], 4, "shuffled", 0)
    used = shuffled[shuffled >= 0]
    assert sorted(used) == list(range(30)) and used.tolist() != sorted(used)
    assert inputs.page_table([], 4, "sorted", 0)[0].shape == (0, 1)
    assert inputs.page_table([0], 4, "sorted", 0)[1] == 1
    table, total = inputs.page_table([9, 8, 15], 4, "sorted", 0, shared=2)
    assert table.tolist() == [[0, 1, 2, -1], [0, 1, -1, -1], [0, 1, 3, 4]] and total == 5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inputs_are_normal_and_seeded(cpu, dtype, monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK", 1000)
    first, again, other = (
        inputs.build(cpu, {**PREFILL, "dtype": dtype, "n": 64, "seed": s}) for s in (1, 1, 2)
    )
    assert first["k"].dtype == np.dtype(getattr(ml_dtypes, dtype, dtype)) and first["k"].shape == (
        1,
        64,
        1,
        64,
    )
    assert (first["k"] == again["k"]).all() and not (first["k"] == other["k"]).all()
    values = np.asarray(first["k"], np.float32)
    assert np.isfinite(values).all() and abs(values.mean()) < 0.1 and abs(values.std() - 1) < 0.1


ORDERS = ("mixed", "rising", "falling")
GRADED = {**PREFILL, "kernel": "chunked_fused", "m": 24, "n": 96, "hkv": 2, "causal": False}


def pairs(arrays, layout: str = "bshd") -> list[tuple[bytes, bytes]]:
    """Every key with its value, of each head; in their order."""
    k, v = (x.transpose(0, 2, 1, 3) if layout == "bhsd" else x for x in (arrays["k"], arrays["v"]))
    return [(k[:, j].tobytes(), v[:, j].tobytes()) for j in range(k.shape[1])]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_orders_hold_the_same_pairs_of_key_and_value(cpu, dtype, layout):
    shape = {**GRADED, "dtype": dtype, "layout": layout}
    plain, *graded = (inputs.build(cpu, {**shape, **order}) for order in
                      ({}, *({"key_order": name} for name in ORDERS)))
    mixed, rising, falling = (pairs(one, layout) for one in graded)
    assert len(set(mixed)) == 96 and set(mixed) == set(rising) and rising == falling[::-1] != mixed
    assert all((one["q"] == plain["q"]).all() for one in graded) and (graded[0]["v"] == plain["v"]).all()
    axis = 2 if layout == "bhsd" else 1
    sizes = np.abs(np.asarray(graded[1]["k"], np.float32)).mean(axis=tuple(i for i in range(4) if i != axis))
    assert sizes[:24].mean() < sizes[24:48].mean() < sizes[48:72].mean() < sizes[72:].mean()
    factors = np.asarray(graded[0]["k"], np.float32) / np.asarray(plain["k"], np.float32)
    one = np.moveaxis(factors, axis, 0).reshape(96, -1)
    assert (one.std(axis=1) < 0.01).all() and 0 <= one.min() and 2 < one.max() < 3.02


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype, accumulate", [("float16", "bfloat16"), ("bfloat16", "float16"),
                                               ("float16", "float32")])
def test_sums_in_every_order_of_chunks_are_right(cpu, dtype, accumulate, order):
    constants = json.dumps({"chunk": 16, "accumulate": accumulate})
    row = run(cpu, {**GRADED, "dtype": dtype, "key_order": order, "constants": constants})
    assert row["status"] == "ok" and 0 < row["max_err"] <= row["tolerance"], row.get("error")


def test_sums_in_bfloat16_are_best_from_the_least_chunk_up(cpu):
    """What orders are there to show: by rounding alone, 64 chunks rising are nearer to float64."""
    constants = json.dumps({"chunk": 16, "accumulate": "bfloat16"})
    shape = {**GRADED, "dtype": "float16", "m": 64, "n": 1024, "constants": constants}
    errors = {order: run(cpu, {**shape, "key_order": order})["max_err"] for order in ("mixed", "rising")}
    assert errors["rising"] < errors["mixed"]
