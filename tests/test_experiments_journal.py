"""Journals: a line that is cut off or is no row is counted, and costs nothing else."""
from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rows import make_run, row

from experiments import schema, store


def test_a_torn_journal_line_is_counted_and_costs_nothing_else(tmp_path):
    run = make_run(tmp_path / "run", [row("a"), row("b")], part=False)
    path = run / "journal-0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"run_id": "run", "case_id": "c", "att')
    assert store.read_runs(run).torn_lines == 1
    journal = store.Journal(path)  # the runner resumes after the kill
    journal.append(row("c"))
    journal.close()
    loaded = store.read_runs(run)
    assert loaded.frame.case_id.tolist() == ["a", "b", "c"] and loaded.torn_lines == 1


def test_a_journal_cut_anywhere_loses_only_the_line_that_was_cut(tmp_path):
    run = make_run(tmp_path / "run", [row("a", error="ä"), row("b", error="実験")], part=False)
    path = run / "journal-0.jsonl"
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        whole = data[: cut + 1].count(b"\n")  # a line that lacks its newline alone is whole
        torn = int(cut > 0 and data[cut - 1 : cut] != b"\n" and data[cut : cut + 1] != b"\n")
        rows, found, bad = store.read_journals(run)
        assert ([r["case_id"] for r in rows], found, bad) == (["a", "b"][:whole], torn, [])
        journal = store.Journal(path)
        journal.append(row("c"))
        journal.close()
        rows, found, _ = store.read_journals(run)
        assert [r["case_id"] for r in rows] == [*["a", "b"][:whole], "c"] and found == torn


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1]",
        b"3",
        b"{}",
        b'{"case_id": "x", "attempt": "1", "status": "ok"}',
        b"\xff\xfe",
        b'{"case_id": "x", "attempt": 1}',
        b'{"case_id": "x", "attempt": 1, "status": "ok", "started_at": "soon"}',
        b'{"case_id": "x", "attempt": 1, "status": "ok", "max_err": "big"}',
        b"[" * 100000,
        b'{"case_id": "x", "attempt": 1, "status": "ok", "tokens": 9223372036854775808}',
        b'{"case_id": "x", "attempt": 1, "status": "ok", "max_err": 1%s}' % (b"0" * 400),
        b'{"case_id": "x", "attempt": 1, "status": "ok", "error": "\\ud800"}',
        b'{"case_id": "x", "attempt": 1, "status": "ok", "started_at": "0001-01-01T00:00:00+14:00"}',
        b'{"case_id": "x", "attempt": 1, "status": "ok", "schema_version": "new"}',
    ],
)
def test_a_line_that_is_no_row_is_counted(tmp_path, line):
    run = make_run(tmp_path / "run", [row("a")], part=False)
    with open(run / "journal-1.jsonl", "wb") as handle:
        handle.write(line + b"\n")
    loaded = store.read_runs(run)
    assert loaded.frame.case_id.tolist() == ["a"] and loaded.torn_lines == 1


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("2026-03-01T00:00+00:00"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=4,
)


LINES = st.lists(st.dictionaries(st.sampled_from([*schema.NAMES, "schema_version"]), ANYTHING, max_size=4))


@settings(deadline=None, max_examples=60)
@given(lines=LINES)
def test_no_line_of_json_can_stop_a_reader(lines, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    good = {"attempt": 1, "status": "ok"}
    texts = [json.dumps({"case_id": f"{i}", **good, **line}) for i, line in enumerate(lines)]
    (run / "journal-0.jsonl").write_text("\n".join([*texts, json.dumps({"case_id": "good", **good})]))
    loaded = store.read_runs(run)
    assert "good" in loaded.frame.case_id.tolist()
    rows, torn, _ = store.read_journals(run)
    assert len(rows) + torn <= len(lines) + 1
    assert store.to_table(rows).num_rows == len(rows)


def test_a_line_with_columns_of_the_future_is_a_row(tmp_path):
    run = make_run(tmp_path / "run", [], part=False)
    (run / "journal-0.jsonl").write_text('{"case_id": "x", "attempt": 1, "status": "ok", "new_column": 3}\n')
    assert store.read_runs(run).frame.case_id.tolist() == ["x"]
