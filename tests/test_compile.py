"""The compile cache: what changes its key, what repairs it, who may race.

And every kernel for every architecture.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from own_cache import kernels_in, own_cache

from cuattn import compile as compiler
from cuattn import compilers, sources
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.shapes import (
    AppendShape,
    AttentionShape,
    CascadeShape,
    DecodeShape,
    PagesShape,
    ProbeShape,
)
from cuattn.paths import KERNELS

ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"]
REWRITTEN = re.compile(r"C75\d\d")  # ptxas serialises products, or ignores setmaxnreg
LOCAL = re.compile(r"[1-9]\d* bytes stack frame")
COLLECTIVES = Path(__file__).parent / "simt_kernels" / "collectives.cu"
PROBES = dict(THREADS=256, UNROLL=8, WIDTH=16, Element="bfloat16")


# Those of whose default shapes some want nearly all registers of a thread; other kernels never want more than at
# their largest head dim.
TIGHT = ("flash", "flash_hopper", "paged_stream")
PADDED = ("flash_hopper",)  # their tiles have whole panels of columns: a head dim between is the next multiple of 64
ALIKE = ("paged_gather", "paged_launches")  # they launch `paged` as it stands


def head_dims(row, arch, more):
    """A usual and the largest head dim, and where a kernel is tight those between; of the cards with little shared
    memory, whose plans are alike, sm_86 and sm_120 get the largest alone, and so do kernels that others are alike."""
    if row.name in ALIKE or arch in ("sm_86", "sm_120"):
        return (256,)
    if row.name.startswith("chunked") or not more:  # tiles of chunks depend on constants, not on the shape
        return (128, 256)
    if arch == "sm_90a" and row.name in TIGHT:
        return (64, 128, 256, 192) if row.name in PADDED else (64, 128, 256, 96, 136, 192)
    return (64, 128, 256)


def shapes(row, arch):
    """The shapes of the row's family whose plans differ.

    Two architectures, the oldest and Hopper, also get those whose code differs less: other head dims, float16,
    a single query.
    """
    more = arch in ("sm_80", "sm_90a")
    dims = head_dims(row, arch, more)
    if row.family == "prefill":
        for d in dims:
            yield AttentionShape(1, 8, 2, 4096, 4096, d, "bfloat16", True)
        if more and not row.name.startswith("chunked"):
            yield AttentionShape(1, 8, 2, 4096, 4096, 128, "float16")
            if row.name in TIGHT:
                yield AttentionShape(1, 8, 2, 4096, 4096, 80, "bfloat16", False)
                yield AttentionShape(1, 8, 2, 1, 4096, 128, "bfloat16")
            yield from featured(row, arch)
    elif row.family == "decode":
        yield from (DecodeShape(1, 8, 2, d, 16, 256, "bfloat16") for d in dims)
        if more:
            yield DecodeShape(512, 8, 2, 128, 16, 256, "float16")
            yield from decode_featured(row)
            if "team" in row.constants:  # 64 rows, of one query and of several
                yield from (DecodeShape(64, 64, 1, d, 16, 256, "bfloat16")
                            for d in dims if d <= 128 or arch == "sm_90a")
                yield DecodeShape(64, 32, 4, 128, 16, 256, "bfloat16", "int8", "pages", m=8)
        if "quantised" in row.features:
            yield DecodeShape(1, 8, 2, 256, 16, 256, "bfloat16", "float8_e4m3")
            if more:
                yield DecodeShape(1, 32, 2, 128, 16, 256, "float16", "int8", "pages")
    elif row.family == "mla":
        yield from (DecodeShape(64, h, 1, 576, 64, 64, "bfloat16") for h in (16, 20, 128))
        if more:
            yield DecodeShape(64, 128, 1, 576, 1, 4096, "float16")
    elif row.family == "cascade":  # few and many rows, of which tiles and warps differ
        yield from (CascadeShape(b, 8, 2, d, 16, ((1, 256),), None, "bfloat16") for d in dims for b in (8, 64))
        if more:
            yield from (CascadeShape(64, 8, 2, d, 1, ((1, 256),), None, "float16", 3) for d in (80, 192))
    elif row.family == "cache":
        yield AppendShape(4, 1, 8, 128, 16, "bfloat16", rotary=128)
        if more:
            yield AppendShape(4, 1, 8, 128, 16, "bfloat16", 32, 128, kv_dtype="float8_e4m3", scales="pages")
        if "rope" in row.features:
            yield from (AppendShape(4, 1, 8, d, 16, "float16", 32, rotary, interleaved)
                        for d, rotary, interleaved in ((128, 128, False), (256, 256, True), (80, 20, False)))
    elif row.family == "pages":
        yield from (PagesShape(100, page, 8, 128, width) for page, width in ((1, 2), (16, 2), (16, 1)))
    else:
        yield ProbeShape(1 << 20, 1 << 30, "bfloat16")


def featured(row, arch):
    """Shapes with all of `AttentionShape.features` that the row offers, and on Hopper with those alone that
    once spilled, at D64 with three warpgroups that multiply."""
    asked = {"window": (512, -1), "softcap": True, "sinks": True, "packed": (5000, 5000), "page_size": 16, "dv": 64}
    feature = {"packed": "varlen", "page_size": "paged"}
    offered = {name: value for name, value in asked.items() if feature.get(name, name) in row.features}
    for d in (64, 128, 256) if offered else ():
        yield AttentionShape(1, 8, 2, 4096, 4096, d, "bfloat16", True, **offered)
    if arch == "sm_90a":
        for name in ("softcap", "packed"):
            yield from (AttentionShape(1, 8, 2, 4096, 4096, d, "bfloat16", **{name: offered[name]})
                        for d in (96, 128) if name in offered and (d == 128 or row.name not in PADDED))
        pages = {name: offered[name] for name in ("packed", "page_size") if name in offered}
        yield from (AttentionShape(4, 8, 2, 16384, 16384, d, "bfloat16", **pages) for d in (64, 128) if pages)


def decode_featured(row):
    """Decode shapes with all that the row offers, of one query and of several."""
    if "queries" in row.features:
        for d, m in ((128, 1), (256, 3)):
            yield DecodeShape(1, 8, 2, d, 16, 256, "bfloat16", m=m, causal=m > 1, window=(512, -1),
                              softcap=True, sinks=True)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", list(ROWS))
def test_every_default_compiles_within_limits_and_without_spills(name, arch):
    row, device = ROWS[name], for_arch(arch)
    if not row.runs_on(arch):
        pytest.skip(f"its row lists {', '.join(row.archs)}")
    pytest.importorskip("cupy_backends", reason="NVRTC comes with CuPy, which is not installed here")
    for shape in shapes(row, arch):
        for launch in row.plan(shape, device, None).launches:
            assert launch.smem_bytes <= device.smem_per_block
            built = compiler.build(launch.file, launch.entry, launch.constants, arch)
            assert not built.spill_bytes or row.spills, f"{shape}: {built.spill_bytes} bytes spilled"
            log = (built.path.parent / "log.txt").read_text()
            assert not REWRITTEN.search(log), f"{shape}: {log}"
            assert not LOCAL.search(log) or row.spills, f"{shape}: an array in local memory: {log}"
            assert built.registers * launch.block <= device.registers_per_sm


# --- the key


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the kernels, and a cache of its own."""
    root, cache = tmp_path / "kernels with ä space", own_cache(tmp_path / "cache")
    shutil.copytree(KERNELS, root)
    monkeypatch.setattr(sources, "KERNELS", root)
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(cache))
    return root


@pytest.fixture
def small_machine(project):
    """For what builds the CPU machine anew and runs no kernel: one file is all that is left of it."""
    (project / "simt/machine.cc").write_text('#include "simt/state.cc"\n')


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


def external(folder: Path, header: str, files: dict[str, str]) -> str:
    """A kernel outside the project with headers of its own; returns its path."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "mine.cu").write_text(f'#include {header}\nKERNEL(32, 1) mine(float* g_o) {{ VALUE; }}\n')
    return str(folder / "mine.cu")


def build_mine(file, target="cpu"):
    return compiler.build(file, "mine", {}, target)


def test_a_header_beside_its_includer_comes_before_one_of_the_project(project, tmp_path):
    """As for the compilers; this one is named like a header of the project that has no VALUE."""
    file = external(tmp_path / "mine", '"prim/mask.cuh"', {"prim/mask.cuh": "#define VALUE g_o[0] = 1.f"})
    first, hashed = build_mine(file), compiler.source_hash(file)
    edit(project / "prim/mask.cuh", "#pragma once", "#pragma once\nconstexpr int MORE = 1;")
    assert (build_mine(file).path, compiler.source_hash(file)) == (first.path, hashed)
    edit(tmp_path / "mine/prim/mask.cuh", "1.f", "2.f")
    assert build_mine(file).path != first.path and compiler.source_hash(file) != hashed


def test_a_header_that_appears_beside_its_includer_is_noticed(project, tmp_path):
    file = external(tmp_path / "mine", '"prim/mask.cuh"', {"value.cuh": ""})
    before = compiler.source_hash(file)
    (tmp_path / "mine/prim").mkdir()
    (tmp_path / "mine/prim/mask.cuh").write_text("#define VALUE\n")
    assert compiler.source_hash(file) != before


def test_headers_of_one_written_name_are_told_apart(project, tmp_path):
    """a/one.cuh and b/two.cuh each include the "util.cuh" beside it."""
    file = external(tmp_path / "mine", '"a/one.cuh"\n#include "b/two.cuh"', {
        "a/one.cuh": '#include "util.cuh"\n', "b/two.cuh": '#include "util.cuh"\n',
        "a/util.cuh": "#define VALUE g_o[0] = OTHER\n", "b/util.cuh": "#define OTHER 1.f\n"})
    paths = {build_mine(file).path}
    edit(tmp_path / "mine/a/util.cuh", "g_o[0]", "g_o[1]")
    paths.add(build_mine(file).path)
    edit(tmp_path / "mine/b/util.cuh", "1.f", "2.f")
    paths.add(build_mine(file).path)
    assert len(paths) == 3


@pytest.mark.parametrize("header", ["<prim/mask.cuh>", "<stddef.h>"])
def test_headers_that_no_quoted_include_reaches_are_part_of_the_key(project, small_machine, tmp_path, header):
    """In angle brackets, or at the head of every translation unit."""
    file = external(tmp_path / "mine", header + "\n#define VALUE g_o[0] = 1.f", {})
    first = build_mine(file)
    edit(project / ("prim/mask.cuh" if "mask" in header else "prim/num.cuh"), "#pragma once",
         "#pragma once\nconstexpr int MORE = 1;")
    assert build_mine(file).path != first.path


def test_how_constants_are_written_is_part_of_the_key(project, monkeypatch):
    """True and 1 are one constant to Python, and a bool and an int to the compiler."""
    first = build_probe()
    assert compiler.build("probe/probes.cu", "probe_empty", {**PROBES, "MORE": 1}, "cpu").path != \
        compiler.build("probe/probes.cu", "probe_empty", {**PROBES, "MORE": True}, "cpu").path
    write = compiler.unit
    monkeypatch.setattr(compiler, "unit", lambda *parts: write(*parts) + "// one more line\n")
    compiler._folders.clear()
    assert build_probe().path != first.path


def test_flags_of_the_compiler_command_are_part_of_the_key(project, small_machine, monkeypatch):
    paths, identities = set(), set()
    for flags in ("", " -DMORE=1", " -DMORE=2"):
        monkeypatch.setenv("CXX", "c++" + flags)
        compiler.host_compiler.cache_clear()
        identities.add(compiler.compiler_of("cpu")[1])
        paths.add(build_probe().path)
    compiler.host_compiler.cache_clear()
    assert len(identities) == len(paths) == 3


def test_the_working_directory_is_not_searched_for_headers(project, tmp_path, monkeypatch):
    pytest.importorskip("cupy_backends", reason="NVRTC comes with CuPy, which is not installed here")
    (tmp_path / "prim").mkdir()
    (tmp_path / "prim/num.cuh").write_text("#error of the working directory\n")
    monkeypatch.chdir(tmp_path)
    build_probe("cpu"), build_probe("sm_80")


def test_nvrtc_is_known_by_its_package_where_it_has_one():
    from importlib.metadata import PackageNotFoundError, version

    try:
        full = version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        pytest.skip("NVRTC is not a package here")
    major, minor = (int(x) for x in full.split(".")[:2])
    assert full in compilers.nvrtc_identity(major, minor)
    assert compilers.nvrtc_identity(major, minor + 1) == f"nvrtc {major}.{minor + 1}"


def test_a_repeated_build_reads_nothing_again(project, monkeypatch):
    """It looks at the files' times: an edit is noticed, and so is a changed binary."""
    first = build_probe()
    build_probe()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", None)
        patch.setattr(Path, "read_bytes", None)
        took = []
        for _ in range(20):
            start = time.perf_counter()
            assert build_probe() == first
            took.append(time.perf_counter() - start)
    assert min(took) < 1e-3
    edit(project / "prim/gmem.cuh", "return data + offset;", "return offset + data;")
    assert build_probe().path != first.path


def test_a_file_of_the_project_has_one_hash_however_it_is_named():
    assert compiler.source_hash("probe/probes.cu") == compiler.source_hash(str(KERNELS / "probe/probes.cu"))


def test_constants_and_target_are_part_of_the_key(project):
    first = build_probe()
    other = compiler.build("probe/probes.cu", "probe_empty", {**PROBES, "UNROLL": 4}, "cpu")
    assert other.path != first.path and other.source_hash == first.source_hash


@pytest.mark.parametrize("file", ["state.h", "state.cc"])  # included by every kernel; linked into it
def test_the_machines_own_files_are_part_of_the_key_and_not_of_the_source_hash(project, small_machine, file):
    before, first = compiler.source_hash("probe/probes.cu"), build_probe()
    path = project / "simt" / file
    path.write_text(path.read_text() + "\nconstexpr int ONE_MORE_CONSTANT = 1;\n")
    assert compiler.source_hash("probe/probes.cu") == before
    assert build_probe().path != first.path


@pytest.mark.parametrize("level, inlined", [("2", True), ("g", False)])
def test_a_quick_build_links_what_others_inline(project, monkeypatch, level, inlined):
    compiled, run = [], compilers._run_host

    def noted(arguments):
        log = run(arguments)
        if "-c" in arguments:
            compiled.append(Path(arguments[-1]).read_bytes())
        return log

    monkeypatch.setattr(compilers, "_run_host", noted)
    monkeypatch.setenv("CUATTN_CPU_OPTIMIZE", level)
    compiler.build(str(COLLECTIVES), "shuffles", {"Element": "bfloat16"}, "cpu")
    [unit] = compiled  # the machine's object is there
    assert (b"open_rendezvous" in unit) == inlined  # called by bodies in simt/calls.h, and there alone


def test_a_kernel_reads_few_headers_of_the_system():
    """<utility> and <type_traits> alone take longer than all of simt/; every build would read them."""
    reached = [Path(path) for path in compiler.sources("decode/mla_hopper.cu").seen if path.endswith((".h", ".cuh"))]
    read = {name for path in reached if path.is_file()
            for name in re.findall(r"#include <(.+)>", path.read_text()) if path.name != "fault.h"}
    assert read == {"source_location", "stddef.h", "stdint.h", "stdlib.h", "string.h", "sys/mman.h"}


def test_an_entry_can_be_read(project, tmp_path):
    built = build_probe()
    assert re.fullmatch(r"probes\.[0-9a-f]{12}", built.path.parent.name)
    assert "constexpr int UNROLL = 8;" in (built.path.parent / "unit.cu").read_text()
    assert {"unit.cu", "kernel.so", "log.txt", "entry.json"} <= {p.name for p in built.path.parent.iterdir()}
    assert kernels_in(tmp_path / "cache") == [built.path.parent.name]  # nothing temporary is left


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "record", *compiler.RECORD])
def test_a_damaged_entry_is_built_again(project, damage):
    build_probe()
    path = build_probe().path  # read from the cache, and so known to be whole
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "missing":
        path.unlink()
    elif damage == "record":
        (path.parent / "entry.json").write_text("{")
    else:
        record = json.loads((path.parent / "entry.json").read_text())
        del record[damage]
        (path.parent / "entry.json").write_text(json.dumps(record))
    again = build_probe()
    assert again.path == path and len(path.read_bytes()) == len(whole)


def test_an_entry_serves_every_user_of_a_shared_cache(project):
    before = os.umask(0o027)
    try:
        folder = build_probe().path.parent
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_a_cache_that_cannot_be_written_is_one_sentence(project, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(compiler.CompileError, match="a folder that can be written.*set CUATTN_CACHE"):
        build_probe()


def test_a_cache_in_the_temporary_folder_must_be_ones_own(tmp_path, monkeypatch):
    monkeypatch.delenv("CUATTN_CACHE_DIR", raising=False)
    (tmp_path / "home").write_text("")  # no folder can be made below it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = compiler.cache_folder()
    assert folder.parent == tmp_path and compiler.cache_folder() == folder
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(compiler.CompileError, match="to be a folder of yours, got another user's; set"):
        compiler.cache_folder()
    folder.unlink()
    uid = os.getuid()
    folder.mkdir()
    monkeypatch.setattr(compiler.os, "getuid", lambda: uid + 1)
    folder.rename(folder.with_name(f"cuattn-cache-{uid + 1}"))
    with pytest.raises(compiler.CompileError, match="to be a folder of yours"):
        compiler.cache_folder()


def test_two_processes_race_on_a_cold_cache(tmp_path):
    script = ("from cuattn import compile as c; "
              f"print(c.build('probe/probes.cu', 'probe_empty', {PROBES!r}, 'cpu').path)")
    env = {**os.environ, "CUATTN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(KERNELS.parent)}
    racers = [subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
              for _ in range(2)]
    paths = {racer.communicate()[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0] and len(paths) == 1
    assert len(kernels_in(tmp_path / "cache")) == 1 and len(list((tmp_path / "cache").iterdir())) == 2


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
