"""docs/learn.md and a section of the README do what they show, and the test would notice if they did not."""
from __future__ import annotations

import os
import re

import pytest
from dashboard_pages import opener
from lesson import ROOT, Reader, Wrong, blocks, matches

LESSON = ROOT / "docs" / "learn.md"


def test_every_block_does_what_it_shows(tmp_path):
    before = sorted(os.listdir(ROOT))
    with Reader(tmp_path) as reader:
        reader.play(LESSON.read_text(encoding="utf-8"))
    assert sorted(os.listdir(ROOT)) == before


def test_the_readmes_own_kernel_runs_and_its_row_is_on_the_dashboard(tmp_path, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## Bring your own kernel\n")[2].partition("\n## ")[0]
    assert [block.kind for block in blocks(section)] == ["cuda", "python", "console"]
    with Reader(tmp_path) as reader:
        reader.play(section)
    app = opener(tmp_path, monkeypatch)("overview", runs=tmp_path / "lab" / "runs")
    said = [chart.proto.alt for chart in app.get("vega_lite_chart")]
    assert any("2 of 2 cases agree to the byte" in words for words in said), said
    assert any("rowwise" in table.value.to_string() for table in app.dataframe)


def test_every_kind_of_block_is_there():
    found = blocks(LESSON.read_text(encoding="utf-8"))
    assert {block.kind for block in found} >= {"console", "python", "text", "cuda"}
    assert any(block.file.startswith("kernels_cu/") for block in found)


def _anchors(path) -> set[str]:
    """What GitHub makes of the headings."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", ["docs/learn.md", "README.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), link
        assert not anchor or anchor in _anchors(path), link
    assert page != "README.md" or "docs/learn.md" in links


# --- the test's own test


@pytest.mark.parametrize("shown, printed, equal", [
    ("a\nb", "a\nb\n", True),
    ("a  \nb\n\n", "a\nb   ", True),
    ("a\nb", "a\nb\nc", False),
    ("a", "", False),
    ("", "a", False),
    ("x … z", "x y z", True),
    ("x … z", "x\ny z", False),
    ("(…) 1.5", "(7) 1x5", False),
    ("…", "", True),
    ("a\n…\nd", "a\nb\nc\nd", True),
    ("a\n…\nd", "a\nd", True),
    ("a\n…\nd", "a\nb\nc", False),
    ("…\nd\n…", "c\nd\ne", True),
    ("…\nd\n…", "c\nxd\ne", False),
])
def test_dots_stand_for_anything_and_nothing_else_does(shown, printed, equal):
    assert matches(shown, printed) is equal


@pytest.mark.parametrize("lesson, message", [
    ("```console\n$ echo 3\n4\n```", r"line 2: the command prints something else\n--- shown\n(.*\n)*-4\n\+3"),
    ("\n```console\n$ true\n$ echo x; exit 3\nx\n```", "line 4: the command ends with exit code 3"),
    ("```console\nls\n```", "line 2: a console block begins with"),
    ("\n```python\nprint(3)\n```\n```text\n4\n```", r"line 2: the Python block prints .*\n(.*\n)*\+3"),
    ("```python\nprint(3)\n```", "line 1: the Python block prints"),
    ("```python\n1 / 0\n```", r"line 1: (.*\n)*\+ZeroDivisionError"),
    ("```python\nfor i in []:\n    i\ni = 3\n```", r"line 1: (.*\n)*\+SyntaxError"),
    ("```python\nx = (3,\n```", "line 1: Python waits for more"),
    ("```python\nimport os\nos._exit(4)\n```", "line 1: the Python session ended, exit code 4"),
    ("```text\n4\n```", "line 1: no reader would know what to do with 'text'"),
    ("```sh\nls\n```", "line 1: no reader would know what to do with 'sh'"),
    ("```python\nx = 3", "line 1: the block has no end"),
    ("```cuda kernels_cu/absent.cu\nx\n```", "line 1: there is no kernels_cu/absent.cu"),
    ("```cuda kernels_cu/prefill/flash.cu\nsoftmax.finish()\n```", "line 1: these lines do not stand in"),
], ids=["output", "exit code", "no prompt", "printed", "not shown", "exception", "no empty line",
        "unfinished", "session", "text alone", "unknown", "no end", "no file", "quotation"])
def test_a_lesson_that_is_wrong_is_told_where(tmp_path, lesson, message):
    with Reader(tmp_path) as reader, pytest.raises(Wrong, match=message):
        reader.play(lesson)


def test_a_lesson_that_is_right(tmp_path):
    with Reader(tmp_path) as reader:
        reader.play(
            "```text lab/deep/x.py\nprint('hello')\n```\n"
            "```console\n$ .venv/bin/python lab/deep/x.py\nhello\n$ ls lab\ndeep\n```\n"
            "```python\nimport cuattn\nfor i in range(2):\n    i\n\nx = 7\n```\n```text\n0\n1\n```\n"
            "```python\nx\nopen('lab/deep/x.py').read()\n```\n```text\n7\n\"print…\n```\n"
            "```cuda kernels_cu/prefill/flash.cu\n  softmax.finish();\n  softmax.normalise(r_o);\n```\n"
        )
    assert (tmp_path / "lab/deep/x.py").is_file() and not (ROOT / "lab/deep").exists()
