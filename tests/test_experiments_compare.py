"""Stored runs against each other: what is paired, what is left out and why, and when the gate is shut."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pyarrow as pa
import pytest
from compared_rows import START, cpu_row, row

from experiments import schema, store
from experiments.ab import comparison, tables
from experiments.ab.gate import judge
from experiments.ab.statistics import SAME, SLOWER, UNDECIDED


def compared(a: list[dict], b: list[dict], margin: float = 0.02) -> comparison.Comparison:
    return comparison.compare(*(store._to_frame([_table(rows)]) for rows in (a, b)), margin, 0.95)


def _table(rows: list[dict]):
    table = pa.Table.from_pylist(rows, schema=schema.ARROW)
    return table.append_column("run_path", pa.array(["."] * len(rows), pa.string()))


# --- pairing


def test_cases_are_paired_and_judged_by_their_samples():
    made = compared([row("x", 100), row("y", 50)], [row("y", 50, 1), row("x", 110, 1)])
    assert [(case.case_id, case.verdict) for case in made.compared] == [("x", SLOWER), ("y", SAME)]
    [x, y] = made.compared
    assert x.interval.ratio == pytest.approx(1.1, rel=0.01)
    assert x.interval.low < x.interval.ratio < x.interval.high
    assert x.a_us == pytest.approx(100, rel=0.01) and x.b_us == pytest.approx(110, rel=0.01)
    assert made.geometric_mean == pytest.approx((x.interval.ratio * y.interval.ratio) ** 0.5)
    assert made.excluded == [] and made.cases == 2


def test_the_samples_decide_and_not_the_stored_median():
    made = compared([row("x", 100)], [row("x", 100, 1, measured_time_us=500.0)])
    assert made.compared[0].verdict == SAME


EXCLUSIONS = {
    "only in A": (row("x"), None, ""),
    "only in B": (None, row("x", side=1), ""),
    "incorrect in B": (row("x"), row("x", None, 1, status="incorrect", error="O differs"), "O differs"),
    "throttled in A, oom in B": (
        row("x", status="throttled", error="a"), row("x", None, 1, status="oom", error="b"), "a · b",
    ),
    "interrupted in A": (row("x", None, status="interrupted"), row("x", side=1), ""),
    "other device": (row("x"), row("x", side=1, device="L4"), "H200 in A, L4 in B"),
    "no samples in A": (row("x", None), row("x", side=1), ""),
    "no samples in A and B": (row("x", None), row("x", None, 1, measured_samples_us=[]), ""),
    "a sample that is no time in B": (row("x"), row("x", None, 1, measured_samples_us=[1.0, 0.0]), ""),
}  # fmt: skip


@pytest.mark.parametrize("reason", EXCLUSIONS)
def test_whatever_is_left_out_says_why(reason):
    a, b, detail = EXCLUSIONS[reason]
    made = compared([a or row("other", 3)] + [row("z")], [b or row("other", 3, 1)] + [row("z", side=1)])
    [left_out] = [case for case in made.excluded if case.case_id == "x"]
    assert (left_out.reason, left_out.detail) == (reason, detail)
    assert [case.case_id for case in made.compared] == ["z"]
    assert made.geometric_mean == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("status", schema.STATUSES[1:])
def test_every_status_but_ok_is_left_out_by_name(status):
    made = compared([row("x")], [row("x", None, 1, status=status, error="why")])
    assert [case.reason for case in made.excluded] == [f"{status} in B"] and not made.compared
    assert made.excluded[0].broken == (status not in ("throttled", "interrupted"))


def test_averages_are_over_the_intersection_and_say_what_they_cover():
    a = [row("x", 100), row("only", 1), row("bad", 100)]
    b = [row("x", 200, 1), row("new", 9000, 1), row("bad", None, 1, status="oom")]
    made = compared(a, b)
    assert made.geometric_mean == pytest.approx(2, rel=0.01) and made.cases == 4 and len(made.compared) == 1


def test_the_newest_row_of_a_case_counts_and_the_older_are_named():
    """Two runs of one suite on one side, in whatever order they are read."""
    old = row("x", 100, run_id="monday")
    new = row("x", 200, run_id="tuesday", started_at=START + timedelta(days=1))
    for rows in ([old, new], [new, old]):
        made = compared(rows, [row("x", 200, 1)])
        assert made.compared[0].verdict == SAME and made.cases == 1
        [older] = made.older
        assert (older.reason, older.detail) == ("older row of the same case in A", "run monday")


def test_five_samples_are_too_few():
    made = compared(*([row("x", None, measured_samples_us=[us] * 5)] for us in (100.0, 200.0)))
    assert made.compared[0].verdict == UNDECIDED and made.compared[0].interval.ratio == pytest.approx(2)


def test_notes_tell_what_else_differs():
    same = compared([row("x")], [row("x", side=1)])
    assert same.notes == ["The kernels' sources are the same on both sides."]
    more = {"source_hash": "ba9876543210", "device_uuid": "GPU-2", "measured_sm_clock_mhz": 1900.0}
    made = compared([row("x"), row("y")], [row("x", side=1, **more), row("y", side=1)])
    source, card, clock = made.notes
    assert source == "The kernel's source differs in 1 of 2 cases." and "two cards of one kind" in card
    assert "1 of 2 cases" in clock and "-4.0%" in clock
    peers = compared([row("x", source_hash=None)], [row("x", side=1, source_hash=None)])
    assert peers.notes == []
    assert compared([row("x")], [row("x", device="L4")]).notes == [
        "A ran on H200 and B on L4: times of different devices are not compared."
    ]


def test_a_shape_in_words_names_what_is_unusual():
    usual = {"n": 64, "layout": "bshd", "key_order": None, "page_order": "sorted"}
    assert tables.shape_words(usual) == "n 64"
    assert tables.shape_words({**usual, "key_order": "rising"}) == "n 64 keys rising"
    asked = {"window": 1024, "softcap": 30.0, "sinks": True}
    assert tables.shape_words({**usual, **asked}) == "n 64 window 1024 softcap 30 sinks"
    assert tables.shape_words({**usual, **dict.fromkeys(asked)}) == "n 64"


def test_runs_of_the_cpu_machine_are_compared_by_what_they_count():
    a = [cpu_row("x", 1000), cpu_row("y", 1000)]
    made = compared(a, [cpu_row("x", 1000, 1), cpu_row("y", 1500, 1, counted_mma=4)])
    assert [case.changed for case in made.counted] == [
        {}, {"counted_bytes_loaded": (1000, 1500), "counted_mma": (None, 4)},
    ]  # fmt: skip
    assert made.compared == made.excluded == [] and np.isnan(made.geometric_mean)


# --- the gate


def test_what_shuts_the_gate_and_what_only_strict_minds():
    same, slow = [row("x"), row("y")], [row("x", side=1), row("y", 110, 1)]
    assert judge(compared(same, [row("x", side=1), row("y", side=1)]), "2 %").passed(strict=True)
    assert judge(compared(same, slow), "2 %").failures == ("slower by more than 2 %: 1 of 2 cases",)
    faster = judge(compared([row("x", 110)], [row("x", side=1)]), "2 %")
    assert faster.passed(strict=True)
    for b, words in (
        (row("y", None, 1, status="incorrect"), "incorrect in CANDIDATE: 1 case"),
        (row("new", None, 1, status="incorrect"), "incorrect in CANDIDATE: 1 case"),
        (row("y", None, 1, status="crash"), "ok in BASE and failed in CANDIDATE: 1 case"),
    ):
        assert judge(compared(same, [row("x", side=1), b]), "2 %").failures == (words,)
    for b in ([], [row("y", None, 1, status="throttled")], [row("y", side=1, device="L4")]):
        found = judge(compared(same, [row("x", side=1), *b]), "2 %")
        assert found.failures == () and found.doubts == ("ok in BASE and not compared: 1 case",)
        assert found.passed(strict=False) and not found.passed(strict=True)
    new = judge(compared([row("x")], [row("x", side=1), row("new", side=1)]), "2 %")
    assert new.passed(strict=True)


def test_an_undecided_case_is_a_doubt_only_where_it_may_be_slower():
    def found(*ends):
        wide = row("x", None, 1, measured_samples_us=list(np.linspace(*ends, 10)))
        made = compared([row("x")], [wide])
        assert made.compared[0].verdict == UNDECIDED
        return judge(made, "2 %")

    assert found(95, 115).doubts == ("a slowdown beyond 2 % not ruled out: 1 of 1 case",)
    assert found(90, 101).passed(strict=True)
