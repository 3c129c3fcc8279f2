"""What cannot be read or written is named by every command, once, with its reason and what to do."""
from __future__ import annotations

import os

import pytest
from commands import call
from compared_rows import row

from experiments import doctor, store
from experiments.catalog import current_hashes


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """command(words): exit code, standard output and standard error, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words) -> tuple[int, str, str]:
        code, out, err = call(monkeypatch, capsys, *words)
        return code, " ".join(out.split()), err

    return run


@pytest.fixture
def half(tmp_path):
    """A run whose parquet was cut in half, with a torn line as its whole journal."""
    folder = tmp_path / "runs" / "half"
    folder.mkdir(parents=True)
    store.write_manifest(folder, {"run_id": "run-0", "title": "Made up"})
    whole = store.write_part(folder, [row("x")], {}).read_bytes()
    (folder / store.PART).write_bytes(whole[: len(whole) // 2])
    (folder / "journal-0.jsonl").write_text('{"case_id": "torn')
    return folder


ASKED = ("--model", "Llama-3.1-8B", "--card", "L40S", "--phase", "decode")


@pytest.mark.parametrize(
    "words",
    [("show", "runs"), ("diagnose", "runs"), ("export", "runs"), ("claims", "runs"), ("recommend", *ASKED)],
)
def test_a_run_cut_in_half_is_named_once_with_its_reason(command, half, words):
    code, _, err = command(*words)
    lines = err.splitlines()
    assert [line for line in lines if line.startswith("set aside runs/half/part.parquet: cannot be read (")]
    assert err.count("part.parquet") == 1 and "skipped 1 torn journal line\n" in err
    if words[0] in ("show", "diagnose", "export"):
        assert code == 2 and lines[-1].startswith(f"error: {words[0]}: runs holds no")
        assert lines[-1].endswith("; name a run that has rows")


def test_resume_says_what_it_takes_for_lost(half):
    told = []
    assert store.read_rows(half, told.append) == []
    (sentence,) = told
    assert sentence.startswith(f"{half}/part.parquet: cannot be read (")
    assert sentence.endswith("; cases without another row are run again")


def test_a_row_whose_source_has_changed_is_called_stale(command, tmp_path):
    fresh = current_hashes()["flash"].split("+")[0]
    rows = [row("x", source_hash=fresh, kernel="flash"), row("y", source_hash="0123456789ab", kernel="flash"),
            row("z", source_hash="0123456789ab", kernel="nobody knows it")]
    store.write_part(tmp_path, rows, {})
    _, out, _ = command("show", tmp_path)
    assert "3 of 3 cases: 3 ok stale: 1 row of flash, whose source has changed since" in out
    store.write_part(tmp_path, rows[:1], {})
    assert "stale" not in command("show", tmp_path)[1]


def test_a_run_that_has_only_begun_has_no_rows_and_is_no_mistake(command, tmp_path):
    store.write_manifest(tmp_path, {"run_id": "run-0", "cases": [{}, {}]})
    code, out, err = command("show", tmp_path)
    assert code == 0 and out == "0 of 2 cases: none has ended yet" and not err


def test_why_a_file_cannot_be_read_or_written_is_the_systems_word(monkeypatch, tmp_path):
    refused = PermissionError(13, "Failed to open local file '.part.parquet.7'. Detail: [errno 13] Denied")

    def refuse(*args, **options):
        raise refused

    path = store.write_part(tmp_path, [row("x")], {})
    monkeypatch.setattr("pyarrow.parquet.ParquetFile", refuse)
    with pytest.raises(store.StoreError, match=r"part.parquet: cannot be read \(Permission denied\)$"):
        store.read_part(path)
    with pytest.raises(store.StoreError) as caught:
        store.write_atomic(path, refuse)
    advice = f"make {tmp_path} writable, or name another folder"
    assert str(caught.value) == f"{path}: cannot be written (Permission denied); {advice}"


def test_doctor_says_that_no_run_can_be_kept_here(monkeypatch):
    assert doctor._disk()[1] is True
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    what, works, detail, remedy = doctor._disk()
    assert works is False and "cannot be written" in detail and "--out DIR" in remedy


def test_the_help_of_export_shows_how_a_head_names_its_unit(monkeypatch, capsys):
    _, out, _ = call(monkeypatch, capsys, "export", "--help")
    assert "'name [unit]'" in " ".join(out.replace("│", " ").split())


def test_doctor_knows_what_each_option_wants_installed():
    from experiments.environment import PACKAGES

    optional = {name for name, _ in doctor.OPTIONAL}
    assert {"ray", "cuda-bench"} <= optional <= set(PACKAGES)
