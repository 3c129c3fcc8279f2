"""Suites: what is refused and in which words, and which cases come out."""

from __future__ import annotations

import copy
import json
import tomllib

import pytest

from cuattn.devices import CARDS
from experiments import estimate
from experiments.catalog import catalog
from experiments.costs import describe
from experiments.lengths import batches, read_lengths
from experiments.models import model, models
from experiments.suite import DTYPES, SCORES, SUITES, load_suite, parse_suite, suite_names
from experiments.sweep import Options, case_id, cases_of, within, work
from experiments.words import UserError

SMALL = {
    "title": "t",
    "question": "q?",
    "claims": [1],
    "cpu": {"prefill": {"kernels": ["standard", "flash"], "h": 2, "hkv": 1, "d": 64, "n": [16, 32]}},
}


def changed(path: str, value) -> dict:
    """SMALL with one key set; a dotted path; None removes it."""
    raw = copy.deepcopy(SMALL)
    *outer, last = path.split(".")
    table = raw
    for key in outer:
        table = table.setdefault(key, {})
    if value is None:
        del table[last]
    else:
        table[last] = value
    return raw


def cases(raw=SMALL, machine="cpu", options=Options()):
    return cases_of(parse_suite("small", raw, "small.toml"), machine, catalog(), options)


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("qestion", "x", "did you mean 'question'?"),
        ("title", None, "has no title"),
        ("title", 3, "expected a string, got 3"),
        ("claims", ["one"], "expected an integer"),
        ("cpu.prefill.kernals", ["flash"], "did you mean 'kernels'?"),
        ("cpu.prefill.kernels", [], "names no kernels"),
        ("cpu.prefill.n", "long", "n expected an integer, got 'long'"),
        ("cpu.prefill.n", [True], "n expected an integer, got True"),
        ("cpu.prefill.n", [-1], "at least 0"),
        ("cpu.prefill.d", [], "empty list"),
        ("cpu.prefill.dtype", "fp16", "expected one of float16"),
        ("cpu.prefill.causal", 1, "expected true or false"),
        ("cpu.prefill.key_order", ["plain"], "expected one of mixed, rising, falling, got 'plain'"),
        ("cpu.prefill.sinks", False, "sinks expected one of True, got False"),
        ("cpu.prefill.softcap", 0, "softcap expected at least 1, got 0"),
        ("cpu.prefill.softcap", "30", "softcap expected a number, got '30'"),
        ("cpu.prefill.window", -1, "window expected at least 0"),
        ("cpu.prefill.model", "Llama-3.1-8B", "both model and h"),
        ("cpu.prefill.limits", {"max_token": 3}, "did you mean 'max_tokens'?"),
        ("cpu.prefill.limits", {"max_kv_gb": "1"}, "expected a number"),
        ("cpu.prefill.constants", {"paged": [{}]}, "'paged' is not a key here"),
        ("cpu.prefill", 3, "named tables"),
        ("cpu", None, "has no sweep"),
        ("repeat", {"timeout": 3}, "did you mean 'timeout_s'?"),
        ("repeat", {"timeout_s": 0}, "positive"),
        ("repeat", {"sm_busy": 1}, "sm_busy expected true or false, got 1"),
    ],
)
def test_a_bad_suite_is_refused_in_one_sentence(path, value, words):
    with pytest.raises(UserError) as caught:
        parse_suite("small", changed(path, value), "small.toml")
    assert words in str(caught.value)
    assert str(caught.value).startswith("small.toml: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("cpu.prefill.kernels", ["flush"], "did you mean 'flash'?"),
        ("cpu.prefill.kernels", ["flash", "paged"], "mixes kernels of the families decode, prefill"),
        ("cpu.prefill.page_size", 16, "has pages without layout = thd and a page_size"),
        ("cpu.prefill", {"kernels": ["flash"], "h": 2, "hkv": 1, "d": 64, "n": 64, "layout": "thd", "page_order": "sorted"},
         "has pages without layout = thd and a page_size"),
        ("cpu.prefill.window", 8, "has a window without causal = true"),
        ("cpu.prefill", {"kernels": ["flash"], "h": 2, "hkv": 1, "d": 64, "n": 64, "layout": "thd", "key_order": "rising"},
         "has key_order with layout = thd"),
        ("cpu.decode", {"kernels": ["append"], "window": 8}, "window means nothing for cache"),
        ("cpu.decode", {"kernels": ["paged"], "key_order": "rising"}, "key_order means nothing for decode"),
        ("cpu.prefill.n", None, "does not say n"),
        ("cpu.prefill.hkv", None, "does not say hkv"),
        ("cpu.prefill.limits", {"max_tokens": 1}, "has no case on the cpu machine with its limits"),
    ],
)
def test_a_suite_that_makes_no_sense_is_refused(path, value, words):
    with pytest.raises(UserError, match="small") as caught:
        cases(changed(path, value))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "options, words",
    [
        (Options(only="flahs"), "did you mean 'flash'?"),
        (Options(only="paged"), "--only paged"),
        (Options(limit=0), "at least 1"),
        (Options(batch=3), "--batch"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        cases(options=options)


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UserError, match="did you mean 'quick'"):
        load_suite("quik")
    with pytest.raises(UserError, match="is not a file"):
        load_suite("/nowhere/x.toml")
    with pytest.raises(UserError, match="did you mean 'Llama-3.1-8B'"):
        model("Llama-3.1-8b")
    with pytest.raises(UserError, match="has no case on the gpu machine with its tables"):
        cases(machine="gpu")


def test_a_file_that_is_not_toml(tmp_path):
    path = tmp_path / "eigene süß.toml"
    path.write_text("title = ")
    with pytest.raises(UserError, match="not valid TOML"):
        load_suite(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not valid TOML"):
        load_suite(str(path))


def test_the_cross_product_and_its_ids():
    found = cases()
    assert [(c.params["n"], c.params["kernel"]) for c in found] == [
        (16, "standard"),
        (16, "flash"),
        (32, "standard"),
        (32, "flash"),
    ]
    assert all(c.params["m"] == c.params["n"] for c in found)
    assert len({c.case_id for c in found}) == 4
    # An id names a case for ever: runs of last year are compared by it.
    assert case_id({"kernel": "flash", "n": 16}) == case_id({"n": 16, "kernel": "flash"}) == "3334cc873666"


def test_an_order_of_keys_is_part_of_a_case_only_where_one_is_asked_for():
    assert all("key_order" not in case.params for case in cases())
    found = cases(changed("cpu.prefill.key_order", ["mixed", "rising"]))
    assert [case.params["key_order"] for case in found[::2]] == ["mixed", "rising"] * 2
    assert not {case.case_id for case in found} & {case.case_id for case in cases()}


@pytest.mark.parametrize("causal", [True, [False, True]])
def test_an_order_of_keys_under_a_causal_mask_is_refused(causal):
    raw = changed("cpu.prefill.key_order", "rising")
    raw["cpu"]["prefill"]["causal"] = causal
    with pytest.raises(UserError, match="^small: cpu.prefill: has key_order with causal = true, [^.]*$"):
        cases(raw)


def test_constants_belong_to_their_kernel_and_duplicates_vanish():
    raw = changed("cpu.prefill.constants", {"standard": [{}, {"head_group": 1}, {}]})
    found = cases(raw)
    assert [c.params.get("constants") for c in found if c.params["n"] == 16] == [
        None,
        '{"head_group": 1}',
        None,
    ]


def test_limits():
    point = {
        "kernel": "flash",
        "family": "prefill",
        "model": "Llama-3-8B",
        "b": 2,
        "h": 32,
        "hkv": 8,
        "d": 128,
        "m": 8192,
        "n": 8192,
        "dtype": "bfloat16",
        "tokens": 16384,
        "max_len": 8192,
    }
    assert within(
        point, {"max_tokens": 16384, "within_context": True, "max_kv_gb": 0.07, "max_scores_gb": 8.6}
    )
    assert not within(point, {"max_tokens": 16383})
    assert within(point, {"min_tokens": 16384}) and not within(point, {"min_tokens": 16385})
    assert not within(point, {"max_kv_gb": 0.06})
    assert not within(point, {"max_scores_gb": 8.5})
    assert not within({**point, "max_len": 8193}, {"within_context": True})


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
@pytest.mark.parametrize("name", suite_names())
def test_every_suite_of_the_project_plans(name, machine):
    suite = load_suite(name)
    found = estimate.with_estimates(cases_of(suite, machine, catalog()), machine, suite.repeat)
    assert found and all(c.estimate_s > 0 for c in found)
    assert len({c.case_id for c in found}) == len(found)
    if machine == "cpu":
        assert sum(c.estimate_s for c in found) < 60
        assert max(c.params.get("max_len", 0) for c in found) <= 2048


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
@pytest.mark.parametrize("family", [
    {"kernels": ["standard", "flash", "chunked_fused"], "h": 2, "hkv": 1, "d": [64, 512], "n": 64},
    {"kernels": ["paged", "paged_gather"], "h": 3, "hkv": 2, "d": 64, "n": 64},
    {"kernels": ["mla"], "h": 2, "hkv": 1, "d": [576, 64], "n": 64},
    {"kernels": ["cascade"], "h": 3, "hkv": 2, "d": 64, "n": 64, "prefix": [0, 32]},
    {"kernels": ["copy_pages"], "h": 2, "hkv": 2, "d": 64, "n": 64, "page_size": [16, 64]},
])  # fmt: skip
def test_what_a_kernel_does_not_take_is_planned_nonetheless(family, machine):
    sweep = {**family, "dtype": list(DTYPES)}
    suite = parse_suite("s", {"title": "t", "question": "q", machine: {"all": sweep}}, "s.toml")
    found = estimate.with_estimates(cases_of(suite, machine, catalog()), machine, suite.repeat)
    assert len(found) >= 8 and all(c.estimate_s > 0 for c in found)


def test_the_suites_of_the_project_are_complete():
    assert {"quick", "memory", "page-size", "paged-ladder", "ceilings", "peers", "ladder", "block-size",
            "precision", "layout", "crossover", "scaling", "roofline"} <= set(suite_names())
    for path in SUITES.glob("*.toml"):
        claims = tomllib.loads(path.read_text(encoding="utf-8"))["claims"]
        # No article speaks of other libraries, nor of latents, quantised caches, shared prefixes or features.
        assert set(claims) <= set(range(1, 45))
        assert claims or path.stem in ("peers", "decode-batch", "gqa", "mla", "kv-dtype", "shared-prefix",
                                       "decode-features", "prefill-features", "cache-writes")


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_every_rung_of_the_paged_ladder_is_there_at_each_point(machine):
    """And a page is 16 tokens, or as long as the sequence."""
    points = {}
    for case in cases_of(load_suite("paged-ladder"), machine, catalog()):
        p = case.params
        page = {16: "pages", p["n"]: "one page"}.get(p.get("page_size"), p.get("page_size"))
        points.setdefault((p["b"], p["n"], p["mode"]), []).append((p["kernel"], p.get("constants"), page))
    one, whole = '{"splits": 1}', None
    rungs = [("flash", None, None), *(("paged", constants, "one page") for constants in (one, whole)),
             *(("paged_gather", constants, "pages") for constants in (one, whole)),
             *(("paged_launches", json.dumps({"launch": each}), "pages") for each in ("request", "page")),
             *(("paged", constants, "pages") for constants in (one, whole)), ("paged_stream", None, "pages")]
    assert len(points) == (2 * 8 if machine == "gpu" else 4)
    for (b, n, _), found in points.items():
        smaller_and_larger = [found.pop() for _ in range(3)] if (machine, b, n) == ("gpu", 16, 4096) else []
        assert found == rungs
        assert sorted(page for *_, page in smaller_and_larger) in ([], [8, 32, 64])


def test_features_are_axes_of_their_own_and_a_plain_case_knows_nothing_of_them():
    """A cap is one number however a suite spells it, and what is modelled of a peer counts what is seen alone."""
    decode = [case.params for case in cases_of(load_suite("decode-features"), "gpu", catalog())]
    assert {p["m"] for p in decode} == {1, 2, 4, 8} and len(decode) == 3 * 2 * 10
    asked = [tuple(name for name in SCORES if name in p) for p in decode]
    assert set(asked) == {(), ("window",), ("softcap",), ("sinks",), ("window", "softcap"), ("window", "sinks"), SCORES}
    assert all(p.get("softcap", 30.0) == 30.0 and isinstance(p.get("softcap", 30.0), float) for p in decode)
    for p in decode:
        own, _ = work({**p, "kernel": "paged_stream"})
        row = describe(p, catalog()[p["kernel"]], CARDS["H200"])
        assert row["modelled_flops"] == own == 4 * 32 * 128 * p["b"] * sum(
            min(p.get("window", 5000) + 1, 4096 - p["m"] + 1 + i) for i in range(p["m"]))


def test_prefill_is_packed_over_pages_or_neither():
    prefill = [case.params for case in cases_of(load_suite("prefill-features"), "gpu", catalog())]
    places = {(p["layout"], p.get("page_size"), p.get("page_order")) for p in prefill}
    assert places == {("bshd", None, None), ("thd", None, None), ("thd", 16, "shuffled"), ("thd", 64, "shuffled")}
    assert all(p["causal"] and p["b"] * p["n"] == 16384 for p in prefill)
    assert {p["kernel"] for p in prefill} == {"flash_hopper", "fa3", "flashinfer"}
    for p in prefill:
        row = describe(p, catalog()[p["kernel"]], CARDS["H200"])
        assert row["modelled_flops"] == work(p)[0]


def test_models_have_shapes_and_sources():
    found = models()
    assert len(found) == 57
    for one in found.values():
        assert one.q_heads % one.kv_heads == 0 and one.layers > 0 and one.source
    assert (
        found["Llama-3.1-8B"].q_heads,
        found["Llama-3.1-8B"].kv_heads,
        found["Llama-3.1-8B"].head_dim,
    ) == (32, 8, 128)


# --- lengths

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
MOONCAKE = '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n' * 2


@pytest.mark.parametrize(
    "text, expected",
    [
        (AZURE, [418, 505]),
        (AZURE.replace("\n", "\r\n"), [418, 505]),
        ("\ufeff" + AZURE, [418, 505]),
        (MOONCAKE, [7258, 7258]),
        ("5\n0\n\n7\n", [5, 0, 7]),
        ("length\n5\n", [5]),
    ],
)
def test_lengths_of_every_kind_of_file(tmp_path, text, expected):
    path = tmp_path / "längen log.txt"
    path.write_text(text, encoding="utf-8", newline="")
    assert read_lengths(path) == expected


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"a,b\n1,2\n", "has the columns a, b"),
        (AZURE[:40].encode() + b"\n", "has a header and no rows"),
        (AZURE.encode() + b"2023,12\n", "line 4: expected a length"),
        (b"5\nfive\n", "line 2: expected a length"),
        (b"5\n-1\n", "line 2"),
        (b"5\n1.5\n", "line 2"),
        (b"12.5\n13\n", "line 1: expected a length"),
        (b"5\n99999999999\n", "line 2"),
        (b"name\n", "holds no number"),
        (b'{"timestamp": 0, "input_le', "is not JSON"),
        (b'{"a": 1}\n', "has no input_length"),
        (b'{"input_length": true, "output_length": 1}\n', "expected a length"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
    ],
)
def test_other_files_are_refused(tmp_path, content, words):
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(UserError, match="--lengths: ") as caught:
        read_lengths(path)
    assert words in str(caught.value)


def test_a_missing_log_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_lengths(tmp_path / "nothing")


def test_batches():
    assert batches([1, 2, 3, 4, 5], 2, 9) == [[1, 2], [3, 4]]
    assert batches([1, 2, 3, 4, 5], 2, 1) == [[1, 2]]
    assert batches([1, 2], 64, 4) == [[1, 2]]
    with pytest.raises(UserError, match="--batch"):
        batches([1], 0, 1)


def test_a_request_log_makes_ragged_cases(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(AZURE)
    found = cases_of(load_suite("page-size"), "cpu", catalog(), Options(lengths=str(path), batch=2))
    assert {(c.params["b"], c.params["tokens"], c.params["max_len"]) for c in found} == {(2, 923, 505)}
    assert all(c.params["lengths"] == [418, 505] and "n" not in c.params for c in found)
    assert {c.params["lengths_source"] for c in found} == {"log.csv"}
    with pytest.raises(UserError, match="has no case"):
        cases(options=Options(lengths=str(path)))
