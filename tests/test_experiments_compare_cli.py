"""The commands compare and gate over stored runs: tables, sentences, exit codes."""

from __future__ import annotations

import pytest
from commands import call
from compared_rows import cpu_row, row

from experiments import store
from experiments.ab.cli import fraction
from experiments.words import UserError


@pytest.fixture
def runs(tmp_path):
    """runs(rows of A, rows of B): the folders of two runs."""

    def write(*sides):
        for side, rows in enumerate(sides):
            manifest = {"run_id": f"run-{side}", "title": "Made up"}
            folder = tmp_path / "ab"[side] / "quick"  # both are called quick, as in two checkouts
            folder.mkdir(parents=True)
            store.write_manifest(folder, manifest)
            store.write_part(folder, rows, manifest)
            yield folder

    return lambda *sides: tuple(write(*sides))


@pytest.fixture
def command(monkeypatch, capsys):
    """command(words): exit code and what was printed."""

    def run(*words) -> tuple[int, str]:
        code, out, err = call(monkeypatch, capsys, *words)
        return code, out + err

    return run


def test_compare_prints_the_table_the_reasons_and_the_sums(runs, command):
    a, b = runs(
        [row("x", 100), row("gone"), row("y", 50)],
        [row("x", 110, 1), row("y", None, 1, status="oom", error="no room for [9] GB")],
    )
    code, out = command("compare", a, b)
    assert code == 0 and f"A: {a}" in out and f"B: {b}" in out
    assert "b 1 n 1024 d 64" in out  # the shape of what was left out
    assert "slower" in out and "only in A" in out and "oom in B" in out and "no room for [9] GB" in out
    assert "0 faster, 1 slower, 0 same, 0 undecided" in out and "over 1 of 3 cases (33.3 %)" in out
    swapped = command("compare", b, a)
    assert swapped[0] == 0 and "1 faster, 0 slower" in swapped[1]


@pytest.mark.parametrize("limit", ["2%", "0.02", " 2.0 % "])
@pytest.mark.parametrize(
    "b_us, options, code, words",
    [
        (100, [], 0, "gate passed: no slowdown beyond 2 % found in 1 case."),
        (110, [], 1, "gate failed: slower by more than 2 %: 1 of 1 case."),
        (102, [], 0, "gate passed: no slowdown beyond 2 % found in 1 case; a slowdown beyond 2 % not ruled"),
        (102, ["--strict"], 1, "gate failed: a slowdown beyond 2 % not ruled out: 1 of 1 case."),
    ],
)
def test_the_gates_exit_code(runs, command, limit, b_us, options, code, words):
    got, out = command("gate", *runs([row("x")], [row("x", b_us, 1)]), "--max-slowdown", limit, *options)
    assert got == code and words in out and out.count("gate ") == 1


def test_a_wider_limit_lets_a_slowdown_pass(runs, command):
    folders = runs([row("x")], [row("x", 110, 1)])
    assert command("gate", *folders)[0] == 1 and command("gate", *folders, "--max-slowdown", "15%")[0] == 0


@pytest.mark.parametrize(
    "a, b, words",
    [
        ([row("x")], [row("y", side=1)], "no case in common"),
        ([row("x")], [row("x", side=1, device="L4")], "A ran on H200 and B on L4"),
        ([cpu_row("x", 9)], [cpu_row("x", 10, 1)], "On the CPU machine, which models no time: 1 case"),
        ([row("x", None)], [row("x", None, 1)], "No case has a right and timed result on both sides"),
    ],
)
def test_nothing_to_compare_is_no_success(runs, command, a, b, words):
    folders = runs(a, b)
    code, out = command("gate", *folders)
    assert code == 1 and words in out and "gate failed: no case could be compared." in out
    code, out = command("compare", *folders)
    assert words in out and code == (0 if a[0]["machine"] == "cpu" else 1)
    assert "faster" not in out and "Geometric" not in out


def test_counted_numbers_that_differ_are_shown(runs, command):
    code, out = command("compare", *runs([cpu_row("x", 1000)], [cpu_row("x", 1500, 1)]))
    assert code == 0 and "differ in 1 of them" in out
    assert "bytes loaded" in out and "1,500" in out and "1.500" in out


def test_unreadable_files_are_named_and_the_rest_compared(runs, command):
    a, b = runs([row("x")], [row("x", side=1)])
    (a / "broken.parquet").write_bytes(b"PAR1")
    (b / "journal-0.jsonl").write_text('{"case_id": "torn')
    code, out = command("compare", a, b)
    assert code == 0 and "set aside" in out and "broken.parquet" in out and "1 torn journal line" in out


def test_one_run_is_not_compared_with_itself(runs, command, tmp_path):
    a, b = runs([row("x")], [row("x", side=1)])
    for words, sentence in (
        ((a, a), "are the same"),
        ((tmp_path, b), "both hold run run-1"),  # a folder of runs, and one of them
        ((a, a / "part.parquet"), "both hold run run-0"),
    ):
        for name in ("compare", "gate"):
            code, out = command(name, *words)
            assert code == 2 and sentence in out and out.count("\n") == 1


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["compare"], "expected two runs, as in compare RUN_A RUN_B, or two kernels"),
        (["compare", "A"], "expected two runs"),
        (["compare", "nowhere", "A"], "RUN_A: nowhere does not exist"),
        (["compare", "A", "flash:block_n=32"], "RUN_B: flash:block_n=32 is a kernel and no run"),
        (["compare", "A", "empty"], "RUN_B: empty holds no row"),
        (["gate", "A", "hole.parquet"], "CANDIDATE: hole.parquet holds nothing that can be read"),
        (["compare", "A", "quick-7"], "did you mean runs/quick-7?"),
        (["compare", "A", "A", "--margin", "2"], "above 0 and below 100%, got '2'; did you mean 2%?"),
        (["gate", "A", "A", "--max-slowdown", "fast"], "--max-slowdown: expected 2% or 0.02"),
        (["gate", "A", "A", "--confidence", "5%"], "--confidence: expected 95% or 0.95, above 50%"),
        (["compare", "A", "A", "--a", "flash"], "got stored runs and --a"),
        (["compare", "A", "A", "--limit", "3"], "got stored runs and --limit"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_and_exit_code_2(command, monkeypatch, tmp_path, words, sentence):
    monkeypatch.chdir(tmp_path)
    store.write_part(tmp_path, [row("x")], {})
    (tmp_path / "A").mkdir()
    (tmp_path / "part.parquet").rename(tmp_path / "A" / "part.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "hole.parquet").write_bytes(b"")
    (tmp_path / "runs" / "quick-7").mkdir(parents=True)
    code, out = command(*words)
    errors = [line for line in out.splitlines() if not line.startswith("set aside")]
    assert code == 2 and len(errors) == 1 and errors[0].startswith("error: ") and sentence in errors[0]


@pytest.mark.parametrize(
    "text, value", [("2%", 0.02), ("0.02", 0.02), ("2 %", 0.02), ("12.5%", 0.125), ("0.5%", 0.005)]
)
def test_percent_and_fraction(text, value):
    assert fraction("--margin", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["0", "0%", "-1%", "100%", "1", "nan", "inf", "%", "", "2%%", "two"])
def test_what_is_neither(text):
    with pytest.raises(UserError, match="^--margin: expected 2% or 0.02"):
        fraction("--margin", text)
