"""Explanations on the disk: written whole, read with suspicion."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.disk import StoreError
from experiments.explain import explaining, saved

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def document() -> dict:
    """What a small kernel did."""
    return explaining.explain(explaining.Request("append"))


def test_a_folder_of_something_else_is_left_alone(document, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="not empty and holds no explanation"):
        explaining.save(document, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    for _ in range(2):  # an explanation is replaced by a newer one
        explaining.save(document, tmp_path / "kept")


def changed(document: dict, *path, value) -> str:
    """The document as text with one value replaced."""
    copy = json.loads(json.dumps({"format": saved.FORMAT, "schema_version": 1, **document}))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(copy)


BROKEN = {
    "cut": (lambda d: changed(d, "kernel", value="x")[:500], "is not JSON"),
    "NaN": (lambda d: changed(d, "intensity", "flops_per_byte", value=float("nan")), "NaN is no number"),
    "something else": (lambda d: "[1, 2]", "is no explanation"),
    "newer": (lambda d: changed(d, "schema_version", value=9), "has schema version 9, and 1 is known"),
    "no version": (lambda d: changed(d, "schema_version", value=True), "has schema version True"),
    "a missing field": (lambda d: changed(d, "plan", "launches", 0, "grid", value=KeyError),
                        r"has no plan.launches\[0\].grid"),
    "another type": (lambda d: changed(d, "sites", 2, "bytes", value="many"),
                     r"sites\[2\].bytes is of type str"),
    "no list": (lambda d: changed(d, "sites", value={}), "sites is no list"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_document_is_a_sentence(document, tmp_path, how):
    text, sentence = BROKEN[how]
    path = tmp_path / saved.DOCUMENT
    path.write_text(text(document), encoding="utf-8")
    with pytest.raises(StoreError, match=sentence):
        saved.read(path)


def test_no_number_is_written_that_json_does_not_have():
    with pytest.raises(ValueError):
        saved.dumped({"a": [1.0, float("inf")]})


def test_documents_are_found_below_folders(document, tmp_path):
    for folder in ("b/explain-flash", "a", ".hidden"):
        explaining.save(document, tmp_path / folder)
    assert saved.find([tmp_path, tmp_path / "nowhere"]) == [
        tmp_path / "a" / saved.DOCUMENT, tmp_path / "b/explain-flash" / saved.DOCUMENT]


def test_reading_imports_no_kernel():
    code = ("import sys, experiments.explain.saved, experiments.explain.facts, "
            "experiments.explain.timelines; "
            "print([name for name in sys.modules if name.startswith('cuattn')])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
