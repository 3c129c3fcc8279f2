"""Shards: together they are the whole, no case is in two, and each run says which it is."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_runner import SUITE, Forks

from experiments import cli, requests, store
from experiments.catalog import catalog
from experiments.shards import Shard, parse_shard, select
from experiments.suite import load_suite, suite_names
from experiments.sweep import Case, Options, cases_of
from experiments.words import UserError

IDS = st.sets(st.text("0123456789abcdef", min_size=12, max_size=12), min_size=1, max_size=60)


@given(IDS, st.integers(1, 60), st.randoms())
def test_the_union_is_the_whole_and_no_two_share_a_case(ids, of, rng):
    cases = [Case(identity, {}) for identity in sorted(ids)]
    rng.shuffle(cases)
    of = min(of, len(cases))
    parts = [select(cases, Shard(i, of)) for i in range(1, of + 1)]
    together = [case.case_id for part in parts for case in part]
    assert sorted(together) == sorted(ids) and len(set(together)) == len(together)
    assert {len(part) for part in parts} <= {len(cases) // of, -(-len(cases) // of)}
    assert all(part == [case for case in cases if case in part] for part in parts)  # in the suite's order
    rng.shuffle(cases)
    again = [select(cases, Shard(i, of)) for i in range(1, of + 1)]
    assert [set(c.case_id for c in x) for x in parts] == [set(c.case_id for c in x) for x in again]


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
@pytest.mark.parametrize("name", suite_names())
def test_every_suite_can_be_cut(name, machine):
    suite, known = load_suite(name), catalog()
    whole = cases_of(suite, machine, known)
    of = min(len(whole), 5)
    parts = [cases_of(suite, machine, known, Options(shard=f"{i}/{of}")) for i in range(1, of + 1)]
    together = [case for part in parts for case in part]
    assert sorted(c.case_id for c in together) == sorted(c.case_id for c in whole)
    limited = [cases_of(suite, machine, known, Options(limit=of, shard=f"{i}/{of}")) for i in range(1, of + 1)]
    assert sorted(c.case_id for [c] in limited) == sorted(c.case_id for c in whole[:of])


@pytest.mark.parametrize("text, words", [
    ("", "expected I/N, such as 1/4"), ("3", "expected I/N, such as"), ("1/2/3", "expected I/N, such as"),
    ("a/b", "expected I/N, such as"), ("-1/2", "expected I/N, such as"), ("1.0/2", "expected I/N, such as"),
    ("٣/٤", "expected I/N, such as"), ("0/4", "I from 1 to N"), ("5/4", "I from 1 to N"), ("1/0", "I from 1"),
])
def test_what_is_no_shard(text, words):
    with pytest.raises(UserError) as caught:
        parse_shard(text)
    sentence = str(caught.value)
    assert sentence.startswith("--shard: ") and words in sentence and f"'{text}'" in sentence
    assert "\n" not in sentence


def test_more_shards_than_cases():
    cases = [Case(str(i), {}) for i in range(3)]
    assert [len(select(cases, Shard(i, 5))) for i in (1, 2, 3)] == [1, 1, 1]
    with pytest.raises(UserError, match="--shard: 4/5 has no case, for there are 3"):
        select(cases, Shard(4, 5))


def test_a_mistaken_shard_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["experiments", "run", "quick", "--shard", "5/4"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.startswith("error: --shard: ") and err.count("\n") == 1


def test_the_command_says_it_again():
    request = requests.Request("quick", "cpu", options=Options(shard="2/3", limit=9), jobs=2)
    assert requests.command_line(request) == "run quick --machine cpu --limit 9 --shard 2/3 --jobs 2"


def test_three_shards_at_once_are_one_run_to_a_reader(tmp_path):
    suite = tmp_path / "stub.toml"
    suite.write_text(SUITE)
    forks = Forks(tmp_path / "log")
    runs = [tmp_path / "runs" / f"part {i}" for i in (1, 2, 3)]
    words = ("run", suite, "--machine", "cpu", "--jobs", "2")
    forks.begin(*([*words, "--shard", f"{i}/3", "--out", run] for i, run in enumerate(runs, 1)))
    assert forks.statuses() == [0, 0, 0], forks.log.read_text()
    planned = requests.plan(requests.Request(str(suite), "cpu"))[2]
    frame = store.read_runs(tmp_path / "runs", attempts="all").frame
    assert sorted(frame.case_id) == sorted(case.case_id for case in planned)
    assert set(frame.status) == {"ok"} and frame.run_id.nunique() == 3
    for i, run in enumerate(runs, 1):
        manifest = store.read_manifest(run)
        assert manifest["shard"] == {"index": i, "of": 3, "cases": 8}
        assert manifest["run_id"].startswith(f"stub-{i}of3-") and manifest["request"]["shard"] == f"{i}/3"
        assert len(manifest["cases"]) in (2, 3)
    assert "Stub, shard 2/3" in forks.log.read_text()
    # A shard that was interrupted is resumed as that shard.
    for path in runs[1].glob("journal-*.jsonl"):
        path.unlink()
    (runs[1] / store.PART).unlink()
    assert forks.run("resume", runs[1]) == 0
    again = store.read_runs(tmp_path / "runs").frame
    assert sorted(again.case_id) == sorted(frame.case_id)
    forks.close()
