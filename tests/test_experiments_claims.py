"""Claims: the file, every predicate and kind of test, which rows judge and which must not, the command."""

from __future__ import annotations

import json
import math

import claims_rows as made
import pytest
from claims_rows import chunks, decode, finding, ladder, prefill, row, verdicts
from commands import call
from recorded_today import as_of_today

from cuattn.kernels import ROWS
from experiments import store
from experiments.claims import definition, figures, metrics, predicates, selecting
from experiments.claims.definition import load
from experiments.claims.findings import VERDICTS, of_cases, overall
from experiments.schema import BY_NAME
from experiments.suite import load_suite, suite_names
from experiments.words import UserError

CONFIRMED, REFUTED, DEPENDS, OPEN = VERDICTS


@pytest.fixture(scope="module")
def book():
    return load()


# The file

def test_every_claim_stands_once(book):
    assert sorted(book.claims) == list(range(1, 45))


def test_every_claim_names_who_answers_it(book):
    known = {*suite_names(), *definition.OTHER}
    for claim in book.claims.values():
        assert claim.answered_by and set(claim.answered_by) <= known, claim.number
        asks = set(claim.answered_by) - {definition.LATER}
        needs = asks - set(suite_names())
        assert not needs or claim.command, f"claim {claim.number}: {needs} without a command"


def test_suites_and_claims_agree_on_what_answers_what(book):
    for name in suite_names():
        for number in load_suite(name).claims:
            assert name in book.claims[number].answered_by, (name, number)


def test_every_claim_says_where_and_why(book):
    for claim in book.claims.values():
        assert all(place.strip()[0] in book.articles for place in claim.place.split(";")), claim.number
        assert claim.statement.endswith(".") and claim.reason.endswith("."), claim.number
        assert any(not part.side for part in claim.parts), claim.number


def test_filters_name_columns_and_constants_that_exist(book):
    constants = {name for kernel in ROWS.values() for name in kernel.constants}
    known = {*BY_NAME, *constants, *selecting.CONSTANT_OF, *selecting.NOT_COLUMNS}
    for claim in book.claims.values():
        for part in claim.parts:
            named = {*part.of, *part.to, *part.where, *part.same, *part.per, part.axis or "n"}
            named |= {name for name in part.multiple_of if isinstance(name, str)}
            assert named <= known, (claim.number, named - known)


def test_every_figure_can_be_computed(book):
    found = figures.values(book)
    assert found and all(math.isfinite(figure["value"]) and figure["formula"] for figure in found.values())
    json.dumps([[*place, figure] for place, figure in found.items()], allow_nan=False)


@pytest.mark.parametrize("change, said", [
    (('kind = "ratio"', 'kind = "ration"'), "is not a kind; did you mean 'ratio'"),
    (('metric = "measured_time_us"', 'metric = "measured_time"'), "is not a metric"),
    (("low = 2", "lower = 2"), "'lower' is not a key here"),
    (("low = 2\n", ""), "expected low or high"),
    (('pick = "min"', 'pick = "best"'), "pick expected min or max"),
    (("{ min = 2 }", "{ least = 2 }"), "'least' is not a key here"),
    (("number = 1", "number = 1\nnumber = 1"), "is not valid TOML"),
    (('says = "x"', 'says = "x"\nopen = "y"'), "either a kind or the word why it is open"),
    (('statement = "s."\n', ""), "has no statement"),
])
def test_a_mistake_in_the_file_is_one_sentence(tmp_path, change, said):
    text = BOOK.format(part='kind = "ratio"\nmetric = "measured_time_us"\n'
                            'of = { kernel = "flash", pick = "min" }\nto = { kernel = "standard" }\nwhere = { b = { min = 2 } }\nlow = 2')
    assert change[0] in text
    with pytest.raises(UserError) as error:
        written(tmp_path, text.replace(*change))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_number_that_stands_twice_is_refused(tmp_path):
    text = BOOK.format(part='open = "not yet"')
    with pytest.raises(UserError, match="claim 1 stands twice"):
        written(tmp_path, text + text.split("[articles.A]")[1].split("\n", 3)[3])


# Predicates

def test_within():
    assert all(predicates.within(*one) for one in ((2.0, 1, 2), (0.5, None, 1), (9.0, 1, None)))
    assert not predicates.within(2.1, 1, 2) and not predicates.within(0.9, 1, None)
    assert not any(predicates.within(math.nan, *bounds) for bounds in ((1, 2), (None, 1), (1, None)))


def test_equals():
    assert predicates.equals(104.9, 100, 0.05) and not predicates.equals(105.1, 100, 0.05)
    assert not predicates.equals(math.nan, 100, 0.05)


def test_exponent_finds_the_power():
    xs = [100, 300, 1000, 5000]
    for power in (0, 1, 2, 2.5):
        assert predicates.exponent(xs, [7 * x**power for x in xs]) == pytest.approx(power)


def test_best_at_and_inside():
    assert predicates.best_at([1, 2, 3], [5, 9, 7]) == 2 and predicates.best_at([1, 2], [4, 4]) == 1
    assert predicates.inside(2, [1, 2, 3]) and not predicates.inside(1, [1, 2, 3])
    assert predicates.multiple(256, (64, 128)) and not predicates.multiple(192, (64, 128))


def test_monotone():
    assert predicates.monotone([1, 1.5, 2], "up", 0.5, 0) and predicates.monotone([2, 1.5, 1], "down", 0.5, 0)
    assert not predicates.monotone([1, 1.5, 2], "down", 0.5, 0)
    assert not predicates.monotone([1, 2, 1.9, 3], "up", 0.5, 0.01)
    assert predicates.monotone([1, 2, 1.9, 3], "up", 0.5, 0.1)
    assert not predicates.monotone([1, 1.2], "up", 0.5, 0)
    assert not predicates.monotone([1, math.nan], "up", 0, 0)


def test_verdicts_of_cases_and_parts():
    assert [of_cases(c) for c in ([], [True], [False], [True, False])] == [OPEN, CONFIRMED, REFUTED, DEPENDS]
    assert overall([CONFIRMED, OPEN]) == CONFIRMED and overall([CONFIRMED, REFUTED]) == DEPENDS
    assert overall([OPEN]) == OPEN and overall([]) == OPEN


# Every kind, on a claim of its own

BOOK = """
[articles.A]
title = "t"
original = "o"

[[claim]]
number = 1
statement = "s."
place = "A 1"
answered_by = ["quick"]
reason = "r."

[[claim.part]]
says = "x"
{part}
"""


def written(folder, text: str):
    path = folder / "claims.toml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def curve(*ys: float) -> list[dict]:
    return [prefill("flash", y, 1024 * 2**i) for i, y in enumerate(ys)]


RATIO = 'kind = "ratio"\nmetric = "measured_time_us"\nof = {kernel = "standard"}\nto = {kernel = "flash"}\n'
VALUE = 'kind = "value"\nmetric = "measured_time_us"\nof = {kernel = "flash"}\n'
EQUALS = 'kind = "equals"\nmetric = "measured_peak_pool_bytes"\nof = {kernel = "flash"}\n'
OVER_N = 'metric = "measured_time_us"\nof = {kernel = "flash"}\naxis = "n"\n'
OVER_CHUNKS = ('kind = "optimum"\nmetric = "measured_tflops"\n'
               'of = {kernel = "chunked_fused"}\naxis = "chunk"\n')
MONOTONE = 'kind = "monotone"\ndirection = "up"\ngain = 0.5\n'
KINDS = {
    "ratio": (RATIO + "low = 2", [row("standard", 300), row("flash", 100)],
              [row("standard", 100), row("flash", 300)]),
    "value": (VALUE + "high = 200", [row("flash", 100)], [row("flash", 300)]),
    "share": ('kind = "share"\nmetric = "sm_busy"\nof = {n = 8192}\nlow = 50\nunit = "%"',
              [row("flash", measured_sm_busy=0.3), row("standard", measured_sm_busy=0.8)],
              [row("flash", measured_sm_busy=0.3), row("standard", measured_sm_busy=0.6)]),
    "equals, a number": (EQUALS + 'expected = 8\ntolerance = 0.1\nunit = "GB"',
                         [row("flash", measured_peak_pool_bytes=8_100_000_000)],
                         [row("flash", measured_peak_pool_bytes=9_000_000_000)]),
    "equals, a metric": (EQUALS + 'expected = "modelled_peak_bytes"\ntolerance = 0.1',
                         [row("flash", measured_peak_pool_bytes=10, modelled_peak_bytes=10)],
                         [row("flash", measured_peak_pool_bytes=10, modelled_peak_bytes=20)]),
    "exponent": ('kind = "exponent"\n' + OVER_N + "low = 1.8\nhigh = 2.2", curve(1, 4, 16), curve(1, 2, 4)),
    "optimum, among": (OVER_CHUNKS + "among = [128]", chunks(1, 3, 2), chunks(1, 2, 3)),
    "optimum, inside": (OVER_CHUNKS + "inside = true", chunks(1, 3, 2), chunks(3, 2, 1)),
    "optimum, multiple": (OVER_CHUNKS + 'multiple_of = [64, "d"]', chunks(1, 3, 2), chunks(3, 2, 1)),
    "monotone": (MONOTONE + OVER_N, curve(1, 2, 3), curve(3, 2, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_flips_with_its_data(tmp_path, kind):
    part, good, bad = KINDS[kind]
    own = written(tmp_path, BOOK.format(part=part))
    assert verdicts(1, good, book=own) == [CONFIRMED]
    assert verdicts(1, bad, book=own) == [REFUTED]
    elsewhere = [one | {"device": "A100"} for one in bad]
    assert verdicts(1, good + elsewhere, book=own) == [DEPENDS]
    assert verdicts(1, [], book=own) == [OPEN]


def test_too_few_points_are_no_curve(tmp_path):
    own = written(tmp_path, BOOK.format(part=KINDS["exponent"][0]))
    assert verdicts(1, curve(1, 4), book=own) == [OPEN]


def test_a_multiple_says_nothing_where_all_are(tmp_path):
    own = written(tmp_path, BOOK.format(part=KINDS["optimum, multiple"][0]))
    assert verdicts(1, chunks(1, 3, 2, d=64), book=own) == [OPEN]


def test_the_best_of_a_sides_own_rows_is_no_comparison(tmp_path):
    part = ('kind = "ratio"\nmetric = "measured_time_us"\nof = {page_size = 16}\n'
            'to = {page_size = {min = 1}, pick = "min"}\nwhere = {kernel = "paged"}\nhigh = 1.1')
    own = written(tmp_path, BOOK.format(part=part))
    assert verdicts(1, [decode("paged", 10)], book=own) == [OPEN]
    assert verdicts(1, [decode("paged", 10), decode("paged", 11, page_size=8)], book=own) == [CONFIRMED]


# Which rows pair

PAIR = RATIO.replace('"standard"', '"chunked_fused", chunk = 512').replace(
    '"flash"', '"chunked_fused", chunk = 128') + "low = 2"


@pytest.mark.parametrize("other, verdict", [
    ({}, CONFIRMED), ({"b": 4}, OPEN), ({"device": "A100"}, OPEN), ({"dtype": "bfloat16"}, OPEN),
    ({"causal": True}, OPEN), ({"mode": "graph"}, OPEN), ({"cache_mode": "warm"}, OPEN),
    ({"layout": "bhsd"}, OPEN),
])
def test_only_equal_shapes_pair(tmp_path, other, verdict):
    own = written(tmp_path, BOOK.format(part=PAIR))
    pair = [row("chunked_fused", 300, {"chunk": 512}), row("chunked_fused", 100, {"chunk": 128}, **other)]
    assert verdicts(1, pair, book=own) == [verdict]


@pytest.mark.parametrize("constants, verdict", [
    ({"chunk": 128}, CONFIRMED), ({"chunk": 128, "accumulate": "float32"}, OPEN),
    ({"chunk": 128, "accumulate": "input"}, CONFIRMED), ({"chunk": 128, "accumulate": "float16"}, CONFIRMED),
])
def test_variants_differ_in_what_a_side_names_alone(tmp_path, constants, verdict):
    own = written(tmp_path, BOOK.format(part=PAIR))
    pair = [row("chunked_fused", 300, {"chunk": 512}), row("chunked_fused", 100, constants)]
    assert verdicts(1, pair, book=own) == [verdict]


@pytest.mark.parametrize("column, other", [("mode", "graph"), ("cache_mode", "warm"), ("layout", "bhsd"),
                                           ("lengths_source", "trace.csv"), ("key_order", "mixed"), ("window", 64),
                                           ("softcap", 30.0), ("sinks", True)])
def test_what_is_unusual_must_be_asked_for(tmp_path, column, other):
    rows = [one | {column: other} for one in KINDS["ratio"][1]]
    part = KINDS["ratio"][0]
    assert verdicts(1, rows, book=written(tmp_path, BOOK.format(part=part))) == [OPEN]
    asked = written(tmp_path, BOOK.format(part=f'{part}\nwhere = {{{column} = {json.dumps(other)}}}'))
    assert verdicts(1, rows, book=asked) == [CONFIRMED]


def test_a_case_is_labelled_with_its_order_of_keys(tmp_path):
    rows = [one | {"key_order": "rising"} for one in KINDS["ratio"][1]]
    own = written(tmp_path, BOOK.format(part=KINDS["ratio"][0] + '\nwhere = {key_order = "rising"}'))
    assert finding(1, rows, book=own).parts[0].cases[0].label.endswith(" keys rising")


def test_the_best_is_taken_of_alike_variants(tmp_path):
    """Of one kernel each set of other constants has its own best; of two kernels the best of all counts."""
    rows = [row("chunked_fused", us, {"chunk": chunk, "accumulate": of}) for us, chunk, of in
            ((100, 64, "float16"), (300, 128, "float16"), (90, 64, "float32"), (100, 128, "float32"))]
    part = PAIR.replace("chunk = 512", "chunk = 128").replace("chunk = 128}\nlow", "chunk = {min = 64}, "
                                                              'pick = "min"}\nlow')
    own = written(tmp_path, BOOK.format(part=part.replace('kernel = "chunked_fused", ', "")))
    assert sorted(case.value for case in finding(1, rows, book=own).parts[0].cases) == [
        pytest.approx(10 / 9), pytest.approx(3)]
    cross = written(tmp_path, BOOK.format(part=KINDS["ratio"][0].replace(
        '"standard"', '"chunked_fused", pick = "min"')))
    cases = finding(1, [*rows, row("flash", 45)], book=cross).parts[0].cases
    assert [case.value for case in cases] == [2]


def test_the_newest_of_equal_rows_counts(tmp_path):
    own = written(tmp_path, BOOK.format(part=KINDS["value"][0]))
    old, new = row("flash", 300), row("flash", 100)
    assert verdicts(1, [new, old], book=own) == [CONFIRMED]
    assert len(finding(1, [old, new], book=own).parts[0].cases) == 1


# What must not judge

@pytest.mark.parametrize("change, why", [
    ({"status": "incorrect"}, "ended incorrect"), ({"status": "oom"}, "ended oom"),
    ({"status": "throttled"}, "ended throttled"), ({"source_hash": None}, "no source hash"),
    ({"source_hash": "ffffffffffff"}, "stale"), ({"machine": "cpu", "device": "cpu"}, "it has no time"),
    ({"measured_time_us": None}, "without the value"),
])
def test_such_a_row_judges_nothing_and_is_listed(tmp_path, change, why):
    own = written(tmp_path, BOOK.format(part=KINDS["ratio"][0]))
    pair = [row("standard", 300, **change), row("flash", 100)]
    found = finding(1, pair, {"standard": made.HASH, "flash": made.HASH}, own)
    assert found.verdict == OPEN and not found.parts[0].cases
    aside = found.parts[0].aside
    assert len(aside) == 1 and why in aside[0].why and aside[0].rows == (("run-1", pair[0]["case_id"]),)
    assert len(found.stale) == (why == "stale")


def test_counts_judge_from_either_machine(tmp_path):
    part = KINDS["ratio"][0].replace("measured_time_us", "requested_bytes")
    own = written(tmp_path, BOOK.format(part=part))

    def pair(**columns):
        return [row(kernel, None, **{name: value * times for name, value in columns.items()}, **where)
                for kernel, times in (("standard", 3), ("flash", 1))]

    where = {"machine": "cpu", "device": "cpu"}
    counted = pair(counted_bytes_loaded=100, counted_bytes_stored=10)
    where = {}
    modelled = pair(modelled_bytes_loaded=100, modelled_bytes_stored=10)
    for rows, how in ((counted, ("counted",)), (modelled, ("modelled",))):
        found = finding(1, rows, book=own)
        assert found.verdict == CONFIRMED and found.how == how
    assert finding(1, counted, book=own).devices == ("CPU machine",)
    both = [a | {name: value for name, value in b.items() if name.startswith("counted")}
            for a, b in zip(modelled, counted)]
    assert finding(1, both, book=own).how == ("counted",)


def test_every_case_names_its_rows(tmp_path):
    own = written(tmp_path, BOOK.format(part=KINDS["ratio"][0]))
    rows = KINDS["ratio"][1]
    case = finding(1, rows, book=own).parts[0].cases[0]
    assert [(s.run, s.case, s.value, s.how) for s in case.samples] == [
        ("run-1", rows[0]["case_id"], 300, "measured"), ("run-1", rows[1]["case_id"], 100, "measured")]
    assert case.value == 3 and "H200" in case.label and "N8192" in case.label


def test_while_its_heart_is_not_tested_neither_is_the_claim(tmp_path):
    part = 'open = "not yet"\n\n[[claim.part]]\nsays = "y"\n' + KINDS["value"][0]
    found = finding(1, [row("flash", 100)], book=written(tmp_path, BOOK.format(part=part)))
    assert [part.verdict for part in found.parts] == [OPEN, CONFIRMED] and found.verdict == OPEN


def test_ceilings_give_shares():
    rows = [row("read", 1, family="probe", modelled_bytes_loaded=4_000_000, modelled_flops=None),
            row("flash", 2, modelled_bytes_loaded=4_000_000, modelled_bytes_stored=0)]
    beside = metrics.Beside.of(made.frame(rows), {})
    assert beside.read_gbps("H200") == pytest.approx(4000) and beside.read_gbps("A100") is None
    assert metrics.value_of(rows[1], "bytes_share", beside) == (pytest.approx(0.5), "modelled")
    assert metrics.value_of(rows[1], "modelled_gbps", beside) == (pytest.approx(2000), "modelled")
    assert metrics.value_of(rows[1], "measured_tflops", beside)[1] == "measured"
    assert metrics.value_of(rows[1] | {"machine": "cpu"}, "modelled_gbps", beside) is None
    assert metrics.value_of(rows[1] | {"device": "A100"}, "bytes_share", beside) is None
    assert metrics.value_of(rows[1], "run_minutes", beside) == (pytest.approx(2 / 60), "measured")


# The command

@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = ladder(7000, 130)
    store.write_part(folder, rows, {"run_id": "run-1"})
    return folder


@pytest.fixture
def today(monkeypatch):
    """The made-up rows' kernels have not changed."""
    from experiments.claims import cli

    monkeypatch.setattr(cli, "current_hashes", lambda: {})


def test_the_table_has_every_claim(monkeypatch, capsys, run, today):
    code, out, _ = call(monkeypatch, capsys, "claims", run)
    assert code == 0 and all(f" {number}  " in out for number in range(1, 45))
    assert "confirmed" in out and "refuted" in out and "From 1 run" in out


def test_one_claim_in_full(monkeypatch, capsys, run, today):
    code, out, _ = call(monkeypatch, capsys, "claims", run, "--claim", 2)
    assert code == 0 and "70×" in out and "run-1" in out and "case-" in out and "the memory and speed" in out


def test_what_diagnose_names_is_called_inferred(monkeypatch, capsys, tmp_path):
    runs = as_of_today(tmp_path, "ladder", "ceilings")
    _, out, _ = call(monkeypatch, capsys, "claims", *runs, "--claim", 8)
    assert "measured, inferred, " in " ".join(out.split())
    _, _, asked = out.partition("Of the rungs before flash, all")
    assert "inferred" in asked and " measured " not in asked
    told = json.loads(call(monkeypatch, capsys, "claims", *runs, "--claim", 8, "--json")[1])["claims"][0]
    assert told["how"] == ["measured", "inferred"]
    assert [part["how"] for part in told["parts"]] == [["measured"]] * 2 + [["inferred"]] * 2


def test_json_holds_the_same(monkeypatch, capsys, run, today):
    code, out, _ = call(monkeypatch, capsys, "claims", run, "--json")
    told = json.loads(out)["claims"]
    assert code == 0 and [one["number"] for one in told] == list(range(1, 45))
    two = told[1]
    assert two["verdict"] in VERDICTS and two["parts"][0]["cases"][0]["rows"][0]["run"] == "run-1"
    assert two["parts"][0]["cases"][0]["value"] == pytest.approx(70)


def test_stale_rows_are_counted_under_the_table(monkeypatch, capsys, run):
    code, out, _ = call(monkeypatch, capsys, "claims", run)
    assert code == 0 and "3 rows stale" in out
    told = json.loads(call(monkeypatch, capsys, "claims", run, "--claim", 2, "--json")[1])["claims"][0]
    assert told["verdict"] == OPEN and not any(part["cases"] for part in told["parts"][:3])


@pytest.mark.parametrize("words, said", [
    (("--claim", 0), "--claim: expected 1 to 44, got 0"), (("nowhere",), "claims: nowhere does not exist"),
])
def test_mistakes_are_one_sentence(monkeypatch, capsys, words, said):
    code, out, err = call(monkeypatch, capsys, "claims", *words)
    assert code == 2 and said in err and not out
