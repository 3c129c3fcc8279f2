"""How busy multiprocessors are: kernels that stamp when their warps begin and end, and what the stamps say."""
from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from test_prefill import run

import cuattn
from cuattn import busy, sources
from cuattn import compile as compiler
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.shapes import AttentionShape
from cuattn.paths import KERNELS


def stamps(*busy_ns: int, first: int = 1000, last: int = 2000) -> np.ndarray:
    """`busy_sms` after a run."""
    times = np.zeros((busy.MOST_SMS + 1, 4), np.uint64)
    times[: len(busy_ns), 1] = busy_ns
    times[-1, :2] = first, last
    return times


def test_the_share_is_of_all_multiprocessors_and_the_whole_time():
    assert busy.share([stamps(1000, 1000, 500)], 4) == 0.625
    assert busy.share([stamps(1000)], 132) == pytest.approx(1 / 132)
    never = stamps(first=np.iinfo(np.uint64).max, last=0)
    assert busy.share([stamps(1000, 1000), never], 2) == 1
    assert np.isnan(busy.share([never], 2))


def test_of_several_binaries_the_times_add_up():
    """One after the other with a gap between them; and together, when both are there."""
    apart = [stamps(1000, 1000), stamps(1000, 1000, first=3000, last=4000)]
    assert busy.share(apart, 2) == pytest.approx(2 / 3)
    assert busy.share([stamps(1000), stamps(1000)], 1) == 1


def test_every_entry_begins_with_the_statement_and_lines_stay():
    for path in sorted(KERNELS.rglob("*.cu")):
        text = path.read_text(encoding="utf-8")
        changed = sources.begun_with(text, "const Busy busy_now;")
        assert changed.count("\n") == text.count("\n") and changed.replace(" const Busy busy_now;", "") == text
        bodies = re.findall(r"^KERNEL\([^)]*\)\s*\w+\([^{]*\{ const Busy busy_now;", changed, re.M)
        assert len(bodies) == changed.count("busy_now") == len(re.findall(r"^KERNEL\(", text, re.M)) > 0


def test_a_parenthesis_or_brace_in_a_comment_is_none():
    text = 'KERNEL(32, 1)\nf(int a /* ) { */, // {\n  int b) {  // one\n  g("{");\n}\n'
    assert sources.begun_with(text, "x;") == text.replace("int b) {", "int b) { x;")


class PlayedGpu:
    """The CPU machine under a GPU's name, whose kernels leave one multiprocessor busy for 300 of 1000 ns."""

    name = "gpu"

    def __init__(self, cpu):
        self._cpu, self.begun, self.paths = cpu, [], []

    def __getattr__(self, name):
        return getattr(self._cpu, name)

    def module_array(self, path, name, shape, dtype):
        assert (name, shape, dtype) == ("busy_sms", (busy.MOST_SMS + 1, 4), "uint64")
        self.paths.append(path)
        return SimpleNamespace(set=lambda times: self.begun.append(times.copy()))

    def download(self, array):
        return stamps(300) if self.begun else stamps(999)


def test_a_stamped_kernel_is_another_binary_of_the_same_source(cpu, randn):
    """It computes the same; on the CPU machine it stamps nothing."""
    q, k, v = randn(1, 40, 2, 64), randn(1, 70, 1, 64), randn(1, 70, 1, 64)
    p, o, _ = run(cpu, "chunked_unfused", q, k, v, constants={"chunk": 64, "tile_m": 32, "tile_n": 32})
    cpu.poison(p.outputs[0])
    for launch, args in zip(p.plan.launches, p.arguments):
        plain, stamped = (compiler.build(launch.file, launch.entry, launch.constants, "cpu", stamped=stamped)
                          for stamped in (False, True))
        assert plain.path != stamped.path and plain.source_hash == stamped.source_hash
        cpu.launch(stamped, launch.grid, launch.block, launch.smem_bytes, args)
    assert (cpu.download(p.outputs[0]).view("u2") == o.view("u2")).all()
    with pytest.raises(ValueError, match="the CPU machine, which has no SMs"):
        busy.sm_busy(p)
    p.machine = played = PlayedGpu(cpu)
    assert busy.sm_busy(p) == 300 / (cpu.device.sms * 1000)
    assert played.paths == [str(stamped.path)]  # one binary, in which every entry counts
    assert (played.begun[0] == stamps(first=2**64 - 1, last=0)).all()


@pytest.mark.parametrize("kernel", ["standard", "chunked_fused"])
def test_stamped_kernels_compile_for_a_gpu(kernel):
    pytest.importorskip("cupy_backends", reason="NVRTC comes with CuPy, which is not installed here")
    plan = ROWS[kernel].plan(AttentionShape(1, 8, 2, 4096, 4096, 128, "float16"), for_arch("sm_90a"))
    for launch in {id(launch.constants): launch for launch in plan.launches}.values():
        built = compiler.build(launch.file, launch.entry, launch.constants, "sm_90a", stamped=True)
        assert b"busy_sms" in built.path.read_bytes() and not built.spill_bytes
        assert b"busy_sms" not in compiler.build(*_plain(launch)).path.read_bytes()


def _plain(launch):
    return launch.file, launch.entry, launch.constants, "sm_90a"


@pytest.mark.gpu
def test_one_block_keeps_one_multiprocessor_busy_and_many_keep_all(randn):
    machine = cuattn.open_machine("gpu")
    q, k = machine.upload(randn(1, 16, 1, 64)), machine.upload(randn(1, 4096, 1, 64))
    few = cuattn.plan_attention(q, k, k, kernel="flash")
    assert busy.sm_busy(few) == pytest.approx(1 / machine.device.sms, rel=0.5)
    q = machine.upload(randn(4, 8192, 16, 64))
    many = cuattn.plan_attention(q, q, q, kernel="flash")
    assert busy.sm_busy(many) > 0.9 and busy.sm_busy(many, graph=True) > 0.9
