"""Claims one by one: the verdict on each flips with the rows, and arithmetic alone refutes what it must."""

from __future__ import annotations

import claims_rows as made
import pytest
from claims_rows import SMALL, chunks, decode, finding, ladder, prefill, row, verdicts

from experiments.capacity import budget
from experiments.claims import figures
from experiments.claims.findings import VERDICTS
from experiments.claims.judging import judge
from experiments.models import model
from experiments.suite import load_suite

CONFIRMED, REFUTED, DEPENDS, OPEN = VERDICTS


def test_claim_2_seventy_times_slower():
    assert verdicts(2, ladder(7000, 130))[:3] == [CONFIRMED] * 3
    assert verdicts(2, ladder(300, 170))[:2] == [REFUTED] * 2
    heavy = [one | {"measured_peak_pool_bytes": 4 * 10**9} for one in ladder(7000, 130)]
    assert verdicts(2, heavy)[2] == REFUTED
    assert finding(2, ladder(7000, 130)).verdict == CONFIRMED
    found = finding(2, ladder(300, 130))
    assert found.verdict == DEPENDS and "Chunks of 128" in found.sentence and "no, 3×" in found.sentence


def test_claim_3_chunk_and_tile():
    large = {"chunk": 512, "tile_m": 128, "tile_n": 128}

    def rungs(chunk_128: float, chunk_512: float, tiles: float) -> list[dict]:
        return [row("chunked_unfused", chunk_128, SMALL),
                row("chunked_unfused", chunk_512, SMALL | {"chunk": 512}),
                row("chunked_unfused", tiles, large)]

    assert verdicts(3, rungs(2000, 100, 50)) == [CONFIRMED, CONFIRMED]
    assert verdicts(3, rungs(200, 100, 95)) == [REFUTED, REFUTED]
    assert finding(3, rungs(200, 100, 50)).verdict == DEPENDS


def test_claim_5_query_chunks_side_by_side():
    def rungs(serial: float, grid: float) -> list[dict]:
        return [row("chunked_fused", serial, {"chunk": 512, "parallel": "serial"}),
                row("chunked_fused", grid, {"chunk": 512, "parallel": "grid"})]

    def streams(one: float, four: float) -> list[dict]:
        return [row("chunked_unfused", one, {"streams": 1}), row("chunked_unfused", four, {"streams": 4})]

    assert verdicts(5, rungs(150, 100) + streams(500, 100))[:2] == [CONFIRMED, CONFIRMED]
    assert verdicts(5, rungs(100, 100) + streams(120, 100))[:2] == [REFUTED, REFUTED]


def test_claim_7_inverted_u():
    assert verdicts(7, chunks(1, 2, 3, 4, 3.9, 2))[:4] == [CONFIRMED] * 4
    rising = verdicts(7, chunks(1, 2, 3, 4, 5, 6))
    assert rising[:2] == [REFUTED] * 2 and rising[3] == REFUTED
    assert verdicts(7, chunks(6, 1, 1, 1, 1, 1))[2] == REFUTED
    padded = [row("chunked_fused", 120, d=80), row("chunked_fused", 100, d=96)]
    assert verdicts(7, padded)[4] == CONFIRMED
    assert verdicts(7, [one | {"d": {80: 96, 96: 80}[one["d"]]} for one in padded])[4] == REFUTED


def test_claim_8_compute_use_by_the_devices_own_ceiling():
    def rungs(small: float, flash: float) -> list[dict]:
        top = row("mma", 1000, family="probe")  # 1000 TFLOP/s at 10¹² flops
        return [top, row("chunked_unfused", 1000 / small, SMALL), row("flash", 1000 / flash)]

    assert verdicts(8, rungs(0.1, 0.5))[:2] == [CONFIRMED, CONFIRMED]
    assert verdicts(8, rungs(0.5, 0.1))[:2] == [REFUTED, REFUTED]
    assert verdicts(8, rungs(0.1, 0.5)[1:])[:2] == [OPEN, OPEN]
    assert finding(8, rungs(0.1, 0.5)).parts[0].cases[0].value == pytest.approx(10)  # percent


RUNGS = {rung.name: rung for rung in load_suite("ladder").rungs}
DIAGNOSED = {"modelled_flops": 10**12, "modelled_peak_bytes": 10**9, "modelled_scratch_bytes": 0,
             "measured_empty_us": 1.0, "modelled_launches": 1, "measured_sm_busy": 0.9}
PROBES = [row("mma", 1000, family="probe", modelled_flops=10**12),  # 1000 TFLOP/s and 4000 GB/s
          row("read", 1000, family="probe", modelled_bytes_loaded=4 * 10**9, modelled_flops=None)]
SYMPTOMS = {"score-traffic": {"modelled_scratch_bytes": 9 * 10**8, "modelled_peak_bytes": 10**9, "m": 4096,
                              "n": 4096, "b": 1},
            "launches": {"modelled_launches": 1000}, "parallelism": {"measured_sm_busy": 0.1}}


def climbed(name: str, us: float = 2000.0, symptom: str = "", **values) -> dict:
    """A row of that rung with the symptom of a fault; without one it computes half of what it could."""
    rung = RUNGS[name]
    us = 6000.0 if symptom == "parallelism" else us
    values = DIAGNOSED | SYMPTOMS.get(symptom, {}) | values
    return row(rung.kernel, us, rung.constants, rung=name) | values


def named(*rows: dict) -> list[str]:
    """The verdicts of the parts of claim 8 that ask `diagnose`."""
    return verdicts(8, [*PROBES, *rows])[2:]


@pytest.mark.parametrize("name, symptom", [
    ("0", "score-traffic"), ("2a", "launches"), ("3", "launches"), ("4", "parallelism")])
def test_claim_8_each_rungs_fault_is_named(name, symptom):
    others = {"0": "launches", "2a": "", "3": "", "4": "launches"}
    assert named(climbed(name, symptom=symptom)) == [CONFIRMED, OPEN]
    assert named(climbed(name, symptom=others[name])) == [REFUTED, OPEN]


def test_claim_8_rungs_without_a_fault():
    flash = climbed("7"), climbed("8", 1200)
    assert named(climbed("6"), *flash) == [CONFIRMED, CONFIRMED]
    assert named(climbed("6", symptom="launches"), *flash) == [REFUTED, CONFIRMED]
    assert named(climbed("6"), flash[0], climbed("8", symptom="launches")) == [CONFIRMED, REFUTED]
    assert named(climbed("6"), climbed("7", 10_000)) == [CONFIRMED, REFUTED]  # starved, if by nothing known


def test_claim_8_says_what_is_measured_and_what_is_inferred():
    small = climbed("1", symptom="parallelism", n=8192, m=8192)
    found = finding(8, [*PROBES, small, climbed("7")])
    hows = [part.how for part in found.parts]
    assert hows == [("measured",), ("measured",), ("inferred",), ("inferred",)]
    assert found.how == ("measured", "inferred")
    cases = [case for part in found.parts[2:] for case in part.cases]
    assert {sample.how for case in cases for sample in case.samples} == {"inferred"}


def test_claim_8_is_a_share_of_the_rungs_at_a_shape():
    both = climbed("2a", symptom="launches"), climbed("6", symptom="launches")
    found = finding(8, [*PROBES, *both]).parts[2]
    assert found.verdict == REFUTED and [case.value for case in found.cases] == [50]
    assert "50 %" in found.sentence and len(found.cases[0].samples) == 2
    elsewhere = climbed("2a", symptom="launches", b=4)
    assert named(*both, elsewhere)[0] == DEPENDS


@pytest.mark.parametrize("change", [
    {"m": 64}, {"suite": "memory"}, {"device": "A100"}, {"rung": None}, {"kernel": "paged_gather"},
    {"modelled_flops": 10**9, "modelled_peak_bytes": 10**6}, {"machine": "cpu"}, {"status": "oom"},
])
def test_claim_8_is_not_judged_by_what_is_no_rung_or_cannot_be_diagnosed(change):
    assert named(climbed("2a", symptom="launches", **change))[0] == OPEN


def test_claim_8_stale_rows_are_neither_judged_nor_ceilings():
    rows = [*PROBES, climbed("2a", symptom="launches")]
    today = {"chunked_unfused": made.HASH, "mma": made.HASH, "read": made.HASH}
    assert finding(8, rows, today).parts[2].verdict == CONFIRMED
    for kernel in today:
        assert finding(8, rows, {**today, kernel: "f" * 12}).parts[2].verdict == OPEN


def test_claim_9_scores_by_columns():
    def rungs(column: float, by_row: float) -> list[dict]:
        moved = {"modelled_bytes_loaded": 10**9, "modelled_bytes_stored": 10**9}
        both = ("chunked_unfused", {}), ("chunked_fused", {"scores": "global"})
        return [row(kernel, us, {**given, "layout": layout}, **moved) for kernel, given in both
                for layout, us in (("column", column), ("row", by_row))]

    assert verdicts(9, rungs(200, 100)) == [CONFIRMED] * 3 + [OPEN]
    assert verdicts(9, rungs(100, 100)) == [REFUTED] * 3 + [OPEN]
    hows = [part.how for part in finding(9, rungs(200, 100)).parts[:3]]
    assert hows == [("measured",), ("measured",), ("modelled",)]


def test_claim_9_narrow_loads_at_equal_bytes():
    def loads(narrow: float) -> list[dict]:
        return [row("words", us * size / 2**26, {"width": width}, family="probe", bytes=size)
                for size in (2**26, 2**30) for width, us in ((2, narrow), (8, 110), (16, 100))]

    assert verdicts(9, loads(200))[3] == CONFIRMED and verdicts(9, loads(100))[3] == REFUTED
    found = finding(9, loads(200))
    assert [case.value for case in found.parts[3].cases] == [2, 2] and found.verdict == OPEN
    assert ["67.1 MB" in case.label for case in found.parts[3].cases] == [True, False]


def test_claim_15_launches():
    def rungs(request: float, fused: float, launches: int) -> list[dict]:
        return [decode("paged_launches", request, {"launch": "request"}, modelled_launches=launches),
                decode("paged", fused, {"splits": 1}, modelled_launches=1)]

    assert verdicts(15, rungs(700, 10, 16))[:2] == [CONFIRMED, CONFIRMED]
    assert verdicts(15, rungs(50, 10, 4))[:2] == [REFUTED, REFUTED]
    assert finding(15, [one | {"b": 4} for one in rungs(700, 10, 16)]).verdict == OPEN


def test_claim_18_shuffled_pages():
    def pages(shuffled: float) -> list[dict]:
        both = ("sorted", 10), ("shuffled", shuffled)
        return [decode("paged", us, page_order=order) for order, us in both]

    assert verdicts(18, pages(20))[0] == CONFIRMED
    found = finding(18, pages(10.1))
    assert found.verdict == REFUTED and "The article is wrong" in found.sentence


def test_claim_22_quadratic():
    def growth(power: float) -> list[dict]:
        return [prefill("flash", (n / 1024) ** power, n) for n in (1024, 2048, 4096, 8192)]

    assert finding(22, growth(2)).verdict == CONFIRMED
    assert finding(22, growth(1)).verdict == REFUTED
    assert finding(22, growth(2)[:3]).verdict == OPEN
    for grown, verdict in ((80, CONFIRMED), (5, REFUTED)):
        assert verdicts(22, [prefill("flash", 10, 100), prefill("flash", 10 * grown, 1000)])[1] == verdict


def test_claim_26_flash_over_standard():
    def ratios(*times: float) -> list[dict]:
        pairs = zip((1024, 4096, 16384), times)
        return [prefill(kernel, us, n) for n, ratio in pairs
                for kernel, us in (("flash", 100), ("standard", 100 * ratio))]

    assert verdicts(26, ratios(1.7, 2.5, 3.5))[:4] == [CONFIRMED] * 4
    assert verdicts(26, ratios(4, 5, 6))[:4] == [CONFIRMED, REFUTED, REFUTED, REFUTED]
    assert finding(26, ratios(1.1, 1.1, 1.1)).verdict == REFUTED
    assert finding(26, ratios(4, 5, 6)).sentence == "1.5 to 2 times at 1K: no, 4×"  # what speaks against it


def test_claim_33_traffic():
    def growth(power: float) -> list[dict]:
        return [prefill("flash", None, n, machine="cpu", device="cpu", counted_bytes_loaded=int(n**power),
                        counted_bytes_stored=n) for n in (128, 256, 512, 1024)]

    found = finding(33, growth(2))
    assert found.verdict == REFUTED and found.how == ("counted",) and "wrong about traffic" in found.sentence
    assert finding(33, growth(1)).verdict == CONFIRMED


def test_claim_39_chunks_in_order_of_magnitude():
    def orders(sums: str, rising: float, falling: float, n: int = 8192) -> list[dict]:
        """Errors in either order, as shares of that in mixed order at N 8192."""
        errors = {"mixed": (8192, 1.0), "rising": (n, rising), "falling": (n, falling)}
        return [prefill("chunked_fused", None, n, {"chunk": 128, "accumulate": sums}, key_order=order,
                        max_err=share / 1000) for order, (n, share) in errors.items()]

    assert verdicts(39, orders("bfloat16", 0.5, 0.8))[2:] == [CONFIRMED, CONFIRMED, OPEN]
    assert verdicts(39, orders("bfloat16", 0.5, 1.0))[2:4] == [CONFIRMED, REFUTED]
    assert verdicts(39, orders("bfloat16", 0.95, 0.8))[2:4] == [REFUTED, CONFIRMED]
    assert verdicts(39, orders("float16", 0.5, 0.8))[2:] == [OPEN, OPEN, CONFIRMED]
    assert verdicts(39, orders("float16", 1.0, 2.0))[4] == REFUTED
    assert verdicts(39, orders("bfloat16", 0.5, 0.5, n=4096))[2:] == [OPEN] * 3


def test_graded_keys_answer_nothing_but_what_asks_for_their_order():
    """Claims 6 and 39 compare sums over plain keys: those of unequal weight are another input."""
    rows = [row("chunked_fused", us, {"chunk": 512, "accumulate": sums}, key_order="mixed", max_err=err)
            for sums, us, err in (("float32", 100, 1e-4), ("bfloat16", 50, 1e-4), ("float16", 50, 1e-4))]
    assert set(verdicts(39, rows)) == set(verdicts(6, rows)) == {OPEN}
    plain = [one | {"key_order": None} for one in rows]
    assert verdicts(39, plain)[:2] == [CONFIRMED] * 2 and verdicts(6, plain) != verdicts(6, rows)


def test_arithmetic_alone_says_where_the_articles_are_wrong():
    book = made.the_book()
    found = {one.claim.number: one for one in judge(book, made.frame([]), {}, figures.values(book), {})}
    assert found[13].verdict == found[32].verdict == CONFIRMED
    for number in (24, 36, 42):
        assert found[number].verdict == REFUTED and found[number].how == ("modelled",)
        assert "article" in found[number].sentence and "wrong" in found[number].sentence
    assert "10.7 GB, not 53.7 GB" in found[24].sentence and "1,430 tokens" in found[36].sentence
    assert [part.verdict for part in found[24].parts[:3]] == [REFUTED, REFUTED, CONFIRMED]
    seventy = model("Llama-2-70b-hf")  # what the model has, and the article does not count with: 8 KV heads
    assert budget.kv_bytes(seventy, "float16", 4096) == pytest.approx(1.34e9, rel=0.01)
