"""Capacity: the articles' sums done right, each kernel's scratch as its plan has it, units never mixed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cuattn.devices import CARDS
from cuattn.kernels import ROWS
from experiments import cli, store
from experiments.capacity import batches, budget
from experiments.capacity.batches import largest_that, needs, notes
from experiments.capacity.budget import Question, figures, kv_bytes, largest_chunk, left, utilisation
from experiments.catalog import current_hashes
from experiments.models import by_numbers, changed, model, models
from experiments.quantities import gb
from experiments.words import UserError

RECORDED = store.RECORDED / "h200"
GB = 10**9


def value(question: Question, name: str) -> float:
    """The figure of that name."""
    return next(f.value for f in figures(question) if f.name == name)


def need(question: Question, name: str) -> batches.Need:
    return next(n for n in needs(question, [ROWS[name.split()[0]]]) if n.name == name)


def run(*arguments: str) -> str:
    """What the command prints."""
    result = CliRunner().invoke(cli.app, ["capacity", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


CACHES = [(64, 4096, 10.7), (64, 32768, 85.9), (8, 4096, 1.34), (8, 32768, 10.7)]


@pytest.mark.parametrize("kv_heads, tokens, expected", CACHES)
def test_claim_24_the_cache_of_a_70b_model(kv_heads, tokens, expected):
    llama = by_numbers(layers=80, q_heads=64, kv_heads=kv_heads, head_dim=128)
    size = kv_bytes(llama, "float16", tokens)
    assert size == 2 * 80 * kv_heads * 128 * tokens * 2
    assert gb(size) == f"{expected} GB"
    question = Question(llama, tokens, "float16")
    assert value(question, "KV cache, one sequence") == size
    assert value(question, "saved by sharing KV heads") == (87.5 if kv_heads == 8 else 0)


def test_claim_13_the_budget_and_the_ratio():
    assert left(24 * GB, 14 * GB, 4 * GB) == 6 * GB
    seven = by_numbers(layers=32, q_heads=32, head_dim=128, params=7 * GB)
    question = Question(seven, 4096, "float16", memory=24 * GB, reserve=4 * GB, chunk=512)
    assert value(question, "weights") == 14 * GB
    assert value(question, "left for attention") == 6 * GB - kv_bytes(seven, "float16", 4096)
    assert value(question, "memory ratio of chunking") == 8


def test_claim_36_the_largest_chunk_with_heads_and_batch_counted():
    assert largest_chunk(6 * GB, 8192, "float16") == 366_210
    assert largest_chunk(6 * GB, 8192, "float16", 8 * 32) == 1430
    assert largest_chunk(-1, 8192, "float16") == 0
    seven = by_numbers(layers=32, q_heads=32, head_dim=128, params=7 * GB)
    whole = Question(seven, 8192, "float16", memory=24 * GB + 8 * kv_bytes(seven, "float16", 8192), batch=8,
                     reserve=4 * GB)
    assert value(whole, "left for attention") == 6 * GB
    assert value(whole, "largest chunk by memory") == 1430


def test_claim_42_where_attention_outweighs_the_projections():
    whole = by_numbers(layers=32, q_heads=32, head_dim=128, hidden=4096)
    assert value(Question(whole, 4096), "attention outweighs its projections from N") == 8192 == 2 * 4096
    for one in (whole, model("Llama-3.1-8B"), model("Qwen3-0.6B")):
        n, wide = budget.projections_crossing(one), one.q_heads * one.head_dim
        projections = 2 * one.hidden * (2 * wide + 2 * one.kv_heads * one.head_dim)
        assert 4 * n * wide == pytest.approx(projections)
    llama = model("Llama-3.1-8B")
    assert budget.projections_crossing(llama) == 5120
    assert 4 * budget.weights_crossing(llama) * 32 * 128 * 32 == pytest.approx(2 * llama.params)


def test_claim_25_the_example_and_its_pages():
    assert utilisation((500, 1000, 200), 4096) == pytest.approx(0.138, abs=5e-4)
    question = Question(model("Llama-2-7b-hf"), 4096, lengths=(500, 1000, 200))
    assert value(question, "contiguous cache in use") == pytest.approx(13.8, abs=0.05)
    assert value(question, "paged cache in use") == pytest.approx(100 * 1700 / (512 + 1008 + 208))
    assert budget.batch_kv_bytes(question, 3) == kv_bytes(question.model, "bfloat16", 512 + 1008 + 208)
    assert budget.batch_kv_bytes(question, 3, paged=False) == kv_bytes(question.model, "bfloat16", 3 * 4096)


def test_claim_1_the_scores():
    question = Question(model("Llama-2-7b-hf"), 8192, "float16")
    assert value(question, "scores, one head") == 128 * (1 << 20)
    assert value(question, "scores, one layer") == 32 * 128 * (1 << 20)
    assert value(question, "scores, in chunks of 512") == 32 * 8 * (1 << 20)


def test_a_partly_filled_page_counts_whole():
    question = Question(model("Llama-3.1-8B"), 100, page=16, batch=3)
    assert value(question, "KV cache, one sequence") == kv_bytes(question.model, "bfloat16", 112)
    assert value(question, "KV cache, batch 3") == kv_bytes(question.model, "bfloat16", 336)


@pytest.mark.parametrize("suite", ["memory", "page-size", "quick"])
def test_scratch_is_what_the_recorded_rows_had(suite):
    frame = store.read_runs(RECORDED / suite).frame
    frame = frame[~store.stale(frame, current_hashes())]
    frame = frame[frame["kernel"].isin(list(ROWS)) & frame["modelled_scratch_bytes"].notna()]
    frame = frame[frame["constants"].isna() | frame["constants"].eq('{"head_group": 8}')]
    seen = frame.drop_duplicates(["kernel", "model", "b", "n", "constants", "page_size"]).to_dict("records")
    assert len(seen) > 15
    for row in seen:
        page = {"page": row["page_size"]} if row["family"] == "decode" else {}
        card, batch = CARDS["H200"], row["b"]
        shape = Question(model(row["model"]), row["n"], row["dtype"], device=card, batch=batch, **page)
        name = row["kernel"] + (" head_group=8" if isinstance(row["constants"], str) else "")
        assert need(shape, name).scratch == row["modelled_scratch_bytes"], row


@pytest.mark.parametrize("name, card", [("Llama-3.1-8B", "H200"), ("gpt2", "L4"), ("Gemma-2-9b", "A100-40")])
@pytest.mark.parametrize("context, lengths", [(4096, ()), (32768, ()), (32768, (500, 1000, 200))])
def test_the_largest_batch_fits_and_one_more_does_not(name, card, context, lengths):
    device = CARDS[card]
    question = Question(model(name), context, device=device, memory=device.memory_bytes, lengths=lengths)
    reached = 0
    for found in needs(question, ROWS.values()):
        if not ROWS[found.name.split()[0]].runs_on(device.arch):
            assert found.refusal.startswith("needs ") and found.largest is None
            continue
        assert not found.refusal
        most = found.largest
        if most:
            assert need(replace(question, batch=most), found.name).total <= device.memory_bytes
            reached += 1
        if most < batches.MOST_SEQUENCES:
            assert need(replace(question, batch=most + 1), found.name).total > device.memory_bytes
        assert found.family == "decode" or found.largest_contiguous <= most
    assert reached


@given(st.integers(0, 500), st.integers(0, 500))
def test_the_search_agrees_with_trying_all(limit, upper):
    expected = max((b for b in range(1, upper + 1) if b <= limit), default=0)
    assert largest_that(lambda batch: batch <= limit, upper) == expected


def test_standard_does_not_fit_where_it_ran_out_of_memory():
    device = CARDS["H200"]
    question = Question(model("Llama-3.1-8B"), 32768, device=device, memory=device.memory_bytes)
    assert need(question, "standard").largest == 0
    assert need(question, "standard head_group=8").largest >= 1
    assert need(question, "flash").largest > need(question, "standard head_group=8").largest


def test_prefilling_a_few_at_once_takes_their_scratch_alone():
    question = Question(model("Llama-3.1-8B"), 2048, batch=8)
    few = replace(question, prefill_batch=2)
    assert need(question, "standard").scratch == 4 * need(few, "standard").scratch
    assert need(question, "paged").scratch == need(few, "paged").scratch


def test_without_a_card_the_most_scratch_of_any_counts():
    question = Question(model("Llama-3.1-8B"), 32768)
    able = batches.able()
    assert "T4" not in {card.name for card in able}
    each = [need(replace(question, device=card), "paged").scratch for card in able]
    assert need(question, "paged").scratch == max(each) > min(each)
    assert need(question, "paged").largest is None
    assert batches.smallest_card(25 * 10**9).memory_bytes == 24 << 30
    assert batches.smallest_card(10**13) is None


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"device": CARDS["T4"]}, "T4 is sm_75"),
        ({"dtype": "float32"}, "not float32"),
        ({"model": by_numbers(layers=1, q_heads=2, head_dim=264)}, "head dim 264"),
        ({"model": by_numbers(layers=1, q_heads=2, head_dim=64, v_head_dim=32)}, "V rows of 32"),
        ({"model": model("DeepSeek-V3")}, "latent"),
    ],
)
def test_what_a_kernel_cannot_run_is_said(changes, words):
    for found in needs(replace(Question(model("gpt2"), 64), **changes), ROWS.values()):
        assert words in found.refusal and found.total == 0 and found.largest is None


def test_latent_and_windowed_caches():
    assert kv_bytes(model("DeepSeek-V3"), "bfloat16", 1) == 70272
    gemma = model("Gemma-2-9b")
    assert kv_bytes(gemma, "bfloat16", 1) == 344064
    wide = Question(gemma, 8192)
    assert value(wide, "one sequence, were only windows kept") == 344064 // 42 * (21 * 8192 + 21 * 4096)
    assert budget.windowed_kv_bytes(gemma, "bfloat16", 1000) == kv_bytes(gemma, "bfloat16", 1000)
    assert any("21 of 42 layers" in note for note in notes(wide))
    assert any("more than the 8,192" in note for note in notes(Question(gemma, 8193)))


def test_weights_in_few_bits():
    llama = model("Llama-3.1-8B")
    sizes = [value(Question(llama, 64, weights_dtype=t), "weights") for t in ("bfloat16", "int8", "int4")]
    assert sizes == [2 * llama.params, llama.params, llama.params / 2]
    assert any("scales" in note for note in notes(Question(llama, 64, weights_dtype="int4")))
    small = CARDS["L4"]
    big = Question(model("Llama-3.1-70B"), 4096, device=small, memory=small.memory_bytes)
    assert any("exceed the card" in note for note in notes(big))
    assert {n.largest for n in needs(big, ROWS.values()) if not n.refusal} == {0}


def test_parameters_are_near_what_the_names_say():
    known = 0
    for one in models().values():
        said = re.search(r"-(\d+(?:\.\d+)?)([bm])(?![a-z])", one.name.lower())
        if one.params and said and "x" not in one.name:
            known += 1
            assert one.params == pytest.approx(float(said[1]) * {"b": 1e9, "m": 1e6}[said[2]], rel=0.31)
        assert 0 <= one.windowed_layers <= one.layers
        assert bool(one.windowed_layers) <= (one.sliding_window is not None)
    assert known > 30
    assert model("Llama-3.1-8B").params == 8_030_261_248


def test_numbers_of_ones_own():
    llama = changed(model("Llama-2-70b-hf"), kv_heads=64)
    assert kv_bytes(llama, "float16", 4096) == 10_737_418_240
    assert llama.params is None and "kv heads 64" in llama.name
    assert changed(model("falcon-40b"), params=41 * GB).params == 41 * GB
    assert changed(model("gpt2"), params=None) == model("gpt2")
    assert changed(model("Gemma-2-9b"), layers=10).windowed_layers == 0
    for refused in (
        lambda: changed(model("Kimi-K2"), q_heads=4),
        lambda: changed(model("gpt2"), kv_heads=5),
        lambda: by_numbers(layers=1, q_heads=8, kv_heads=3, head_dim=64),
        lambda: Question(model("MiMo-V2-Flash"), 4096),
        lambda: Question(model("falcon-40b"), 4096, memory=GB),
        lambda: Question(model("gpt2"), 4096, "fp16"),
        lambda: Question(model("gpt2"), 4096, lengths=(4097,)),
    ):
        with pytest.raises(UserError):
            refused()
    unknown = Question(model("falcon-40b"), 4096)
    kept = kv_bytes(unknown.model, "bfloat16", 4096) + budget.RESERVE
    assert value(unknown, "needed, without the weights") == kept


def test_the_command_shows_every_number_with_its_formula():
    printed = run("--model", "Llama-3.1-8B", "--card", "h200", "--context", "32K", "--batch", "4",
                  "--reserve", "2GB", "--lengths", "500,1000,200")
    for words in ("modelled", "2·D", "N²·size", "8,030,261,248 × 2 B", "141 GiB", "largest batch", "1.73 %",
                  "head_group=8", "GB is 10⁹"):
        assert words in printed
    bare = run("--layers", "80", "--heads", "64", "--head-dim", "128", "--dtype", "float16")
    assert "10.7 GB" in bare and "without the weights" in bare and "largest batch" not in bare
    assert "smallest card" in run("--model", "gpt2", "--context", "1024")


def test_a_kernel_of_ones_own_is_counted(tmp_path):
    module = tmp_path / "mine.py"
    module.write_text(
        "import dataclasses\n"
        "from cuattn.kernels.flash import ROW as FLASH\n"
        "def plan(shape, device, overrides=None):\n"
        "    made = FLASH.plan(shape, device, None)\n"
        "    return dataclasses.replace(made, scratch={'mine': ((shape.b, shape.h, 1000), 'float32')})\n"
        "ROW = dataclasses.replace(FLASH, name='mine', constants={}, plan=plan)\n"
    )
    try:
        printed = run("--model", "gpt2", "--batch", "2", "--kernel", str(module))
    finally:
        ROWS.pop("mine", None)
    assert "mine: 2 × 12 × 1,000 float32" in printed and gb(2 * 12 * 1000 * 4) in printed


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--model Llama-3.1-8", "did you mean 'Llama-3.1-8B'?"),
        ("--model gpt2 --card H201", "did you mean 'H200'?"),
        ("--model gpt2 --card cpu", "'cpu' is not a GPU of"),
        ("--model gpt2 --memory 24", "with its unit"),
        ("--model gpt2 --batch 0", "expected 1 to 4096"),
        ("--model gpt2 --lengths 1,x", "a request log"),
        ("--layers 4", "neither --model nor --heads, --head-dim"),
        ("--model falcon-40b --card H200", "add --params"),
        ("--model MiMo-V2-Flash", "layers of MiMo-V2-Flash differ"),
        ("--layers 4 --heads 0 --head-dim 64", "--heads: expected 1"),
    ],
)
def test_mistakes_get_one_sentence(arguments, words):
    with pytest.raises(UserError, match=re.escape(words)):
        run(*arguments.split())
