"""The compile cache: what changes its key, what repairs it, who may race.

And every kernel for every architecture.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuattn import compile as compiler
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.base import AppendShape, AttentionShape, DecodeShape, ProbeShape
from cuattn.paths import KERNELS

ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"]
PROBES = dict(THREADS=256, UNROLL=8, Element="bfloat16")


def shapes(row):
    """The shapes of the row's family whose plans differ.

    One of them in float16, which compiles like bfloat16.
    """
    if row.family == "prefill":
        yield from (AttentionShape(1, 8, 2, 4096, 4096, d, "bfloat16", d != 80) for d in (64, 80, 128, 256))
        yield AttentionShape(1, 8, 2, 4096, 4096, 128, "float16")
        yield AttentionShape(1, 8, 2, 1, 4096, 128, "bfloat16")
    elif row.family == "decode":
        yield from (DecodeShape(1, 8, 2, d, 16, 256, "bfloat16") for d in (64, 128, 256))
        yield DecodeShape(512, 8, 2, 128, 16, 256, "float16")
    elif row.family == "cache":
        yield AppendShape(4, 1, 8, 128, 16, "bfloat16")
    else:
        yield ProbeShape(1 << 20, 1 << 30, "bfloat16")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", list(ROWS))
def test_every_default_compiles_within_limits_and_without_spills(name, arch):
    row, device = ROWS[name], for_arch(arch)
    if not row.runs_on(arch):
        pytest.skip(f"its row lists {', '.join(row.archs)}")
    pytest.importorskip("cupy_backends", reason="NVRTC comes with CuPy, which is not installed here")
    for shape in shapes(row):
        for launch in row.plan(shape, device, None).launches:
            assert launch.smem_bytes <= device.smem_per_block
            built = compiler.build(launch.file, launch.entry, launch.constants, arch)
            assert not built.spill_bytes or row.spills, f"{shape}: {built.spill_bytes} bytes spilled"
            assert built.registers * launch.block <= device.registers_per_sm


# --- the key


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the kernels, and a cache of its own."""
    root = tmp_path / "kernels with ä space"
    shutil.copytree(KERNELS, root)
    monkeypatch.setattr(compiler, "KERNELS", root)
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "cache"))
    return root


def folders(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "cache").iterdir())


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def build_probe(target="cpu"):
    return compiler.build("probe/probes.cu", "probe_empty", PROBES, target)


def test_editing_a_header_changes_the_key_and_editing_a_comment_does_not(project):
    first, source = build_probe(), compiler.source_hash("probe/probes.cu")
    edit(project / "prim/gmem.cuh", "// gmem: global memory.", "// gmem: memory of the whole device.")
    assert build_probe().path == first.path
    assert compiler.source_hash("probe/probes.cu") == source
    edit(project / "prim/gmem.cuh", "return data + offset;", "return offset + data;")
    assert build_probe().path != first.path
    assert compiler.source_hash("probe/probes.cu") != source


def test_constants_and_target_are_part_of_the_key(project):
    first = build_probe()
    other = compiler.build("probe/probes.cu", "probe_empty", {**PROBES, "UNROLL": 4}, "cpu")
    assert other.path != first.path and other.source_hash == first.source_hash


def test_the_machines_own_headers_are_no_part_of_the_source_hash(project):
    before, first = compiler.source_hash("probe/probes.cu"), build_probe()
    header = next((project / "simt").glob("*.h"))
    header.write_text(header.read_text() + "\nconstexpr int ONE_MORE_CONSTANT = 1;\n")
    assert compiler.source_hash("probe/probes.cu") == before
    assert build_probe().path != first.path


def test_an_entry_can_be_read(project, tmp_path):
    built = build_probe()
    assert re.fullmatch(r"probes\.[0-9a-f]{12}", built.path.parent.name)
    assert "constexpr int UNROLL = 8;" in (built.path.parent / "unit.cu").read_text()
    assert {"unit.cu", "kernel.so", "log.txt", "entry.json"} <= {p.name for p in built.path.parent.iterdir()}
    assert folders(tmp_path) == [built.path.parent.name]  # nothing temporary is left


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "record"])
def test_a_damaged_entry_is_built_again(project, damage):
    path = build_probe().path
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "missing":
        path.unlink()
    else:
        (path.parent / "entry.json").write_text("{")
    again = build_probe()
    assert again.path == path and len(path.read_bytes()) == len(whole)


def test_two_processes_race_on_a_cold_cache(tmp_path):
    script = ("from cuattn import compile as c; "
              f"print(c.build('probe/probes.cu', 'probe_empty', {PROBES!r}, 'cpu').path)")
    env = {**os.environ, "CUATTN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(KERNELS.parent)}
    racers = [subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
              for _ in range(2)]
    paths = {racer.communicate()[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0] and len(paths) == 1
    assert len(folders(tmp_path)) == 1


def test_errors_are_one_sentence(project):
    edit(project / "probe/probes.cu", "uint32_t seen = 0;", "uint32_t seen = nothing;")
    with pytest.raises(compiler.CompileError, match="refused the source: .*nothing") as error:
        build_probe()
    assert "\n" not in str(error.value)
    with pytest.raises(compiler.CompileError, match="does not exist; check the kernel's row"):
        compiler.build("probe/absent.cu", "absent", {}, "cpu")


def test_an_unknown_entry_is_named(project):
    with pytest.raises(compiler.CompileError,
                       match="entry: expected a kernel of probe/probes.cu .*got 'absent'"):
        compiler.build("probe/probes.cu", "absent", PROBES, "cpu")


def test_without_a_compiler_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ziglang", None)
    compiler.host_compiler.cache_clear()
    try:
        with pytest.raises(compiler.CompilerMissing, match="apt install g\\+\\+.*pip install ziglang"):
            compiler.host_compiler()
    finally:
        compiler.host_compiler.cache_clear()


def test_the_ladder_in_the_readme_is_todays():
    from cuattn.kernels.__main__ import updated

    text = (KERNELS / "README.md").read_text(encoding="utf-8")
    assert updated(text) == text, "run: python -m cuattn.kernels"
