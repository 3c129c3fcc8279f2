"""FlashAttention-3 as a peer: which of its functions a case calls, with what, and what this build of it lacks."""
from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from inspect import signature
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from played_torch import Tensor, play_gpu
from test_experiments_case import DECODE, PREFILL, run

from cuattn import reference
from experiments import inputs

CASE = {**DECODE, "kernel": "fa3_decode", "h": 4, "hkv": 2, "lengths": [17, 9, 33], "tokens": 59}
DENSE = {**PREFILL, "kernel": "fa3", "h": 4, "hkv": 2}
PACKED = {**DENSE, "layout": "thd", "b": 3, "tokens": 72}
PAGES = {**PACKED, "page_size": 8, "page_order": "shuffled"}


def _answer(o, lse, dtype) -> tuple[Tensor, Tensor]:
    return Tensor(o.astype(dtype)), Tensor(lse.astype(np.float32))


def _scores(window_size, softcap, sinks) -> dict:
    assert sinks is None or sinks.array.dtype == ml_dtypes.bfloat16
    return {"window_size": window_size, "softcap": softcap,
            "sinks": None if sinks is None else sinks.array.astype(np.float64)}


def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, return_attn_probs=False, sinks=None):
    assert return_attn_probs
    wide = (x.array.astype(np.float64) for x in (q, k, v))
    o, lse = reference.attention(*wide, causal=causal, **_scores(window_size, softcap, sinks))
    return *_answer(o, lse, q.array.dtype), None


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False,
                           window_size=(-1, -1), softcap=0.0, return_attn_probs=False, sinks=None):
    for ends, most in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert np.diff(ends.array).max() == most and return_attn_probs
    wide = (x.array.astype(np.float64) for x in (q, k, v))
    return _answer(*reference.attention_varlen(*wide, cu_seqlens_q.array, cu_seqlens_k.array, causal,
                                               **_scores(window_size, softcap, sinks)), q.array.dtype)


def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, page_table=None, cu_seqlens_q=None,
                            max_seqlen_q=None, causal=False, window_size=(-1, -1), softcap=0.0,
                            return_softmax_lse=False, sinks=None):
    assert (page_table.array >= 0).all() and return_softmax_lse and (cu_seqlens_q is None) == (q.ndim == 4)
    scores, o, lse = _scores(window_size, softcap, sinks), [], []
    for i, (pages, n) in enumerate(zip(page_table.array, cache_seqlens.array)):
        mine = slice(i, i + 1) if q.ndim == 4 else (None, slice(*cu_seqlens_q.array[i : i + 2]))
        k, v = (reference.gather(x.array, pages, int(n)).astype(np.float64)[None] for x in (k_cache, v_cache))
        one, each = reference.attention(q.array[mine].astype(np.float64), k, v, causal=causal, **scores)
        o, lse = [*o, one[0]], [*lse, each[0]]
    join = np.stack if q.ndim == 4 else np.concatenate
    return _answer(join(o), np.stack(lse) if q.ndim == 4 else np.concatenate(lse, -1), q.array.dtype)


@pytest.fixture
def library(monkeypatch) -> ModuleType:
    """The module, of a build that takes all."""
    module = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    module.called = []

    def recorded(function):
        def call(*args, **options):
            module.called.append((function.__name__, options))
            return function(*args, **options)

        call.__signature__ = signature(function)
        return call

    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(module, function.__name__, recorded(function))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.delitem(sys.modules, "flash_attn_config", raising=False)
    return module


@pytest.fixture
def gpu(cpu, monkeypatch, library):
    return play_gpu(cpu, monkeypatch)


@pytest.mark.parametrize(("params", "function"), [
    (DENSE, "flash_attn_func"), ({**DENSE, "causal": False, "layout": "bhsd"}, "flash_attn_func"),
    ({**DENSE, "window": 5, "softcap": 2.0, "sinks": True}, "flash_attn_func"),
    (PACKED, "flash_attn_varlen_func"), ({**PACKED, "window": 3, "sinks": True}, "flash_attn_varlen_func"),
    (PAGES, "flash_attn_with_kvcache"), ({**PAGES, "window": 3, "softcap": 2.0}, "flash_attn_with_kvcache"),
    (CASE, "flash_attn_with_kvcache"), ({**CASE, "m": 4}, "flash_attn_with_kvcache"),
    ({**CASE, "m": 8, "window": 3, "softcap": 2.0, "sinks": True}, "flash_attn_with_kvcache"),
], ids=lambda x: "" if isinstance(x, str) else "-".join(map(str, x.values())))
def test_a_case_is_asked_as_it_is_and_judged(gpu, library, params, function):
    row = run(gpu, params)
    assert row["status"] == "ok", row["error"]
    assert {name for name, _ in library.called} == {function}
    assert (row["lse_err"] is None) == bool(params.get("sinks"))  # which counts them, or does not
    said = library.called[-1][1]
    assert said["causal"] == params.get("causal", True)
    assert {"window_size", "softcap", "sinks"} & set(said) == {
        {"window": "window_size"}.get(name, name) for name in ("window", "softcap", "sinks") if name in params}


def test_what_a_build_lacks_is_named(gpu, library, monkeypatch):
    monkeypatch.setattr(inputs, "build", None)
    config = ModuleType("flash_attn_config")
    config.__spec__ = ModuleSpec("flash_attn_config", None)
    config.CONFIG = {"build_flags": {"FLASHATTENTION_DISABLE_SOFTCAP": True}}
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    row = run(gpu, {**CASE, "softcap": 2.0})
    assert row["status"] == "unsupported" and "was built without softcap; install one with it" in row["error"]
    library.flash_attn_func = lambda q, k, v: None
    row = run(gpu, {**CASE, "sinks": True})
    assert row["status"] == "unsupported" and "takes no sinks; install one that does" in row["error"]
