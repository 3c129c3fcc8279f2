"""`explain`: what one run on the CPU machine did, by call site, and what becomes of a user's mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from experiments.catalog import catalog
from experiments.explain import asking, explaining, facts, printing, saved, timelines
from experiments.explain.explaining import Request
from experiments.words import UserError

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ("flash", "standard", "paged", "mla", "cascade", "append", "append_rope", "copy_pages",
           "copy", "read", "words", "mma", "empty")
MINE = """
import dataclasses
from pathlib import Path
from cuattn.kernels.base import Cost, Launch, Plan
from cuattn.kernels.flash import ROW as FLASH

def plan(shape, device, overrides=None):
    return Plan((Launch(str(Path(__file__).with_name("mine.cu")), "mine", (1, 1, 1), 32, 4096, {}),), {})

ROW = dataclasses.replace(FLASH, name="mine", file="mine.cu", constants={}, plan=plan,
                          arguments=lambda shape, plan, t: [[("lse", t["lse"])]],
                          cost=lambda shape, plan, lengths=None: Cost(1, 8, 128, 1))
"""


def command(*words) -> subprocess.CompletedProcess:
    """`python -m experiments explain …`, its output as one piece."""
    done = subprocess.run([sys.executable, "-m", "experiments", "explain", *map(str, words)], cwd=ROOT,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    assert "Traceback" not in done.stdout, done.stdout
    return done


@pytest.fixture(scope="module")
def documents() -> dict[str, dict]:
    """Every kernel explained at its default shape."""
    return {name: explaining.explain(Request(name)) for name in KERNELS}


@pytest.mark.parametrize("name", KERNELS)
def test_counts_equal_closed_forms_and_call_sites_add_up(documents, name):
    document = documents[name]
    assert explaining.holds(document) and all(row["equal"] for row in document["totals"])
    counted = {row["what"]: row["counted"] for row in document["totals"]}
    for what, accesses in (("bytes_loaded", facts.LOADS), ("bytes_stored", facts.STORES)):
        assert sum(s["bytes"] for s in document["sites"] if s["access"] in accesses) == counted[what]
    products = sum(s["instructions"] for s in document["sites"] if s["access"] == "mma")
    assert products == document["counters"]["mma"]


@pytest.mark.parametrize("name", KERNELS)
def test_a_document_is_read_back_as_it_was_written(documents, tmp_path, name):
    paths = explaining.save(documents[name], tmp_path / "new" / name)
    read = saved.read(paths[0])
    assert read == json.loads(json.dumps(read))
    assert read["command"].endswith(f"--out {tmp_path}/new/{name}")
    kept = {key: value for key, value in read.items() if key not in ("format", "schema_version", "command")}
    assert kept == json.loads(json.dumps({key: documents[name][key] for key in kept}))
    assert "vegaEmbed" in paths[1].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", KERNELS)
def test_every_call_site_has_its_line_and_every_word_its_meaning(documents, name):
    document = documents[name]
    glossary = document["glossary"]
    for site in document["sites"]:
        assert facts.source_line(document, site)
        assert site["access"] in glossary["accesses"]
    assert set(facts.SUMMED) <= set(glossary["columns"])
    assert set(timelines.QUANTITIES) == set(glossary["steps"])
    assert set(document["counters"]) == set(glossary["counters"])


@pytest.mark.parametrize("name", KERNELS)
def test_the_text_says_it_all(documents, name):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))
    printing.show(console, documents[name])
    text = console.export_text()
    assert "What it requested is what its cost says, to the byte." in text and "The result is right." in text
    for site in facts.merged(documents[name]["sites"], facts.GLOBAL):
        assert facts.place(site) in text and f"{site['bytes']:,}" in text


def sites_of(document, indices) -> set[str]:
    return {facts.source_line(document, document["sites"][i]) for i in indices}


def test_shared_memory_names_who_writes_and_reads_each_member(documents):
    document = documents["flash"]
    (part,) = document["shared"]
    q, k, v = part["members"]
    assert (part["struct"], part["bytes"]) == ("Smem", q["size"] + k["size"] + v["size"])
    for member, product in ((k, "multiply_abt"), (v, "multiply_ab<Element>(r_o, r_s")):
        assert all("start_loading" in line for line in sites_of(document, member["written_by"]))
        (read,) = sites_of(document, member["read_by"])
        assert read.startswith(product)
    assert any("store_accumulator" in line for line in sites_of(document, q["written_by"]))


def test_a_union_is_named_and_a_launch_without_shared_memory_says_so(documents):
    paged, combine = documents["paged"]["shared"]
    assert any("ring and state share bytes" in line for line in facts.notes(paged))
    assert combine["why"] == "it uses no shared memory" and combine["struct"] is None


def test_the_timeline_follows_the_loop(documents):
    steps = explaining.explain(Request("flash", "M=128,N=1024"))["timeline"]["steps"]
    (group,) = timelines.groups(steps)
    assert group.warps == (0, 1, 2, 3)
    loop = max(group.folds, key=lambda fold: fold.times)
    assert loop.times == 1024 // 64 - 1 and loop.pattern[0]["ended_by"] == "block barrier"
    assert any(f"×{loop.times}: copied" in line for line in timelines.lines(steps))


def test_another_block_is_another_timeline():
    shape = "M=256,N=256,H=2"
    first, last = (explaining.explain(Request("flash", shape, causal=True, block=block)) for block in (0, 3))
    steps = [len(document["timeline"]["steps"]) for document in (first, last)]
    assert steps[0] > steps[1]  # with a causal mask the longest tiles start first
    assert "--block 3" in last["command"] and "--causal" in last["command"]
    assert first["sites"] == last["sites"]


def test_launches_that_do_the_same_are_told_once():
    document = explaining.explain(Request("standard", "N=64", constants=("head_group=1", "score=input")))
    assert len(document["plan"]["launches"]) == 12
    assert document["constants"] == {"head_group": 1, "score": "input"}
    groups = timelines.groups(document["timeline"]["steps"])
    assert {group.launches for group in groups} == {(0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11)}
    assert len(document["timeline"]["chart"]["vconcat"]) == 3


@pytest.mark.parametrize("name, shape", [("flash", "M=0"), ("flash", "B=0"), ("flash", "M=3,N=0"),
                                         ("paged", "B=1,N=0"), ("copy", "n=0")])
def test_nothing_to_do_is_explained_too(name, shape, tmp_path):
    document = explaining.explain(Request(name, shape))
    assert explaining.holds(document)
    explaining.save(document, tmp_path)
    assert saved.read(tmp_path / saved.DOCUMENT)["kernel"] == name


STEP = st.fixed_dictionaries({
    **{name: st.sampled_from([0, 64]) for name in timelines.QUANTITIES},
    "ended_by": st.sampled_from(["block barrier", "exit"]),
    "file": st.just("x.cu"),
    "line": st.integers(1, 2),
})


@given(st.lists(STEP, max_size=30))
def test_folded_steps_unfold_to_what_they_were(steps):
    folds = timelines.folded(steps)
    assert [step for fold in folds for step in fold.pattern * fold.times] == steps
    assert [fold.first for fold in folds] == [sum(len(f.pattern) * f.times for f in folds[:i])
                                              for i in range(len(folds))]


def test_loops_with_several_barriers_fold():
    step = {**dict.fromkeys(timelines.QUANTITIES, 0), "ended_by": "block barrier", "file": "x.cu"}
    two = [{**step, "line": 1}, {**step, "line": 2}]
    folds = timelines.folded([*two * 7, {**step, "line": 3}])
    assert [(len(fold.pattern), fold.times, timelines.numbered(fold)) for fold in folds] == [
        (2, 7, "steps 0 to 13"), (1, 1, "step 14")]


@pytest.mark.parametrize("thing, which, said", [
    ("warp", (2,), "warp 2"), ("warp", (0, 1, 2), "warps 0 to 2"), ("warp", (0, 1), "warps 0 and 1"),
    ("launch", (0, 3, 6), "launches 0, 3 and 6"),
])
def test_numbers_read_well(thing, which, said):
    assert timelines.named(thing, which) == said


def test_letters_left_out_take_sensible_values():
    flash, append = (catalog()[name] for name in ("flash", "append"))
    assert asking.letters_of(flash, "") == {"B": 1, "M": 128, "N": 256, "H": 4, "HKV": 2, "D": 64}
    given = asking.letters_of(flash, "n=32, H=3")
    assert given == {"B": 1, "M": 32, "N": 32, "H": 3, "HKV": 1, "D": 64}
    assert asking.letters_of(append, "PAGE=4")["page"] == 4


@pytest.mark.parametrize("seconds", [0.2, 60.4, 61.0])
def test_the_wait_that_is_proposed_is_long_enough(monkeypatch, seconds):
    monkeypatch.setattr(asking, "seconds_for", lambda params: seconds)
    monkeypatch.setattr(asking, "array_bytes", lambda params: 1)
    with pytest.raises(UserError) as refused:
        asking.check_size({}, seconds / 2)
    asking.check_size({}, float(str(refused.value).split("--wait ")[1]))


MISTAKES = {
    "unknown kernel": (Request("flsh"), "did you mean 'flash'"),
    "a library's": (Request("torch_math"), "name one of the project's"),
    "no pair": (Request("flash", "M128"), "expected pairs such as HKV=2,D=64, got 'M128'"),
    "unknown letter": (Request("paged", "M=3"), "'M' means nothing for decode kernels, which take B, N, H"),
    "twice": (Request("flash", "M=3,m=4"), "M is given twice"),
    "negative": (Request("flash", "M=-1"), "expected an integer of at least 0, got '-1'"),
    "no heads": (Request("flash", "H=0"), "expected an integer of at least 1, got '0'"),
    "dtype": (Request("flash", dtype="float32"), "'float32' is not one of flash's"),
    "mask": (Request("paged", causal=True), "mean nothing for decode kernels"),
    "constant": (Request("flash", constants=("blockn=64",)), "did you mean 'block_n'"),
    "no value": (Request("flash", constants=("block_n",)), "expected NAME=VALUE"),
    "odd value": (Request("flash", constants=("block_n=7",)), "^flash: block_m must be a multiple"),
    "head dim": (Request("flash", "D=65"), "expected a multiple of 8 up to 256"),
    "block": (Request("flash", block=4), "expected 0 to 3, the blocks of the largest launch, got 4"),
    "long": (Request("flash", "N=65536"), r"about 3 h on the CPU machine \(estimated\).*--wait \d+$"),
    "long probe": (Request("mma", "n=1000000000"), r"\(estimated\)"),
    "large": (Request("paged", "N=100000000"), "its arrays take .* GB"),
    "no module": (Request("mine", paths=("nowhere.py",)), "nowhere.py is not a file"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_one_sentence(what):
    request, sentence = MISTAKES[what]
    with pytest.raises(UserError, match=sentence) as raised:
        explaining.explain(request)
    assert "\n" not in str(raised.value)


def mine(folder: Path, body: str) -> Path:
    """A kernel from outside: one warp, its row, and a body of its own."""
    (folder / "mine.cu").write_text('#include "prim/gmem.cuh"\n#include "prim/smem.cuh"\n'
                                    "struct Smem { float x[1024]; };\n"
                                    f"KERNEL(32, 1) mine(const View<float, 3> g_lse) {{\n{body}\n}}\n")
    (folder / "mine.py").write_text(MINE)
    return folder / "mine.py"


def test_a_kernel_from_outside_that_is_wrong_is_shown_and_fails(tmp_path):
    path = mine(tmp_path, "  store_global(g_lse.at(0, 0) + threadIdx.x, 1.f);")
    done = command("mine", "--kernel", path, "--shape", "M=32,N=16,H=1", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "What it requested is NOT what its cost says" in done.stdout
    assert "The result is WRONG" in done.stdout
    document = saved.read(tmp_path / "out" / saved.DOCUMENT)
    assert [(row["what"], row["equal"]) for row in document["totals"]] == [
        ("launches", True), ("bytes_loaded", False), ("bytes_stored", True)]
    assert document["files"][str(tmp_path / "mine.cu")].startswith("#include")
    (site,) = document["sites"]
    assert (site["line"], site["bytes"], site["sectors"]) == (5, 128, 4)
    assert document["shared"][0]["why"].startswith("its members cannot be told: mine takes 4096 bytes")
    assert "its members cannot be told" in done.stdout


def test_a_kernel_that_does_what_it_must_not_is_a_sentence(tmp_path):
    path = mine(tmp_path, "  store_global(g_lse.at(0, 0) + (1ll << 40), 1.f);")
    done = command("mine", "--kernel", path, "--shape", "M=32,N=16,H=1")
    assert done.returncode == 1 and "mine.cu:5" in done.stdout and len(done.stdout.splitlines()) == 1


def test_bank_conflicts_are_told_of_the_line_that_has_them(tmp_path):
    """A column of a 32 × 32 tile of float32 lies in one bank; a row lies in all of them."""
    path = mine(tmp_path, "Smem& s = dynamic_smem<Smem>();\nstore_shared(&s.x[32 * threadIdx.x], 1.f);\n"
                          "if (threadIdx.x < 31) store_shared(&s.x[threadIdx.x + 1], 1.f);")
    command("mine", "--kernel", path, "--shape", "M=32,N=16,H=1", "--out", tmp_path / "out")
    document = saved.read(tmp_path / "out" / saved.DOCUMENT)
    sites = facts.merged(document["sites"], facts.SHARED)
    told = [(site["line"], site["wavefronts"], site["conflicts"]) for site in sites]
    assert told == [(6, 32, 31), (7, 1, 0)]
    (member,) = document["shared"][0]["members"]
    assert (member["name"], member["count"], member["size"]) == ("x", 1024, 4096)
    assert member["written_by"] == [0, 1] and member["read_by"] == []


def test_a_race_is_found_and_leaves_no_explanation(tmp_path):
    path = mine(tmp_path, "Smem& s = dynamic_smem<Smem>();\nstore_shared(&s.x[threadIdx.x], 1.f);\n"
                          "store_global(g_lse.at(0, 0) + threadIdx.x, load_shared(&s.x[31 - threadIdx.x]));")
    done = command("mine", "--kernel", path, "--shape", "M=32,N=16,H=1", "--out", tmp_path / "out")
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    for words in ("race in shared memory", "mine.cu:6", "mine.cu:7"):
        assert words in done.stdout


@pytest.mark.parametrize("races", [True, False])
def test_the_machine_looks_for_races_afterwards_as_it_did_before(cpu, monkeypatch, races):
    monkeypatch.setattr(cpu, "races", races)
    document = explaining.explain(Request("flash", "M=16,N=16"))
    assert cpu.races is races
    assert "No race in shared memory was found" in facts.sentences(document)[-1]


def test_the_command_prints_and_saves_only_where_asked(tmp_path):
    done = command("append")
    assert done.returncode == 0
    last = done.stdout.splitlines()[-1]
    assert last.startswith("To keep it for the dashboard: python -m experiments explain append --shape B=2")
    done = command("append", "--out", tmp_path / "kept")
    assert [line for line in done.stdout.splitlines() if line.startswith("Saved: ")] == [
        f"Saved: {tmp_path / 'kept' / name}" for name in (saved.DOCUMENT, saved.TIMELINE)]
    done = command("append", "--shape", "Z=1")
    assert done.returncode == 2 and done.stdout.startswith("error: --shape: 'Z' means nothing")
