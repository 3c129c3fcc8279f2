"""wgmma, warpgroups and stmatrix: against NumPy on both machines; planted faults on the CPU machine."""
from __future__ import annotations

import re
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from simt_launch import KERNELS, line_of

from cuattn.compile import CompilerMissing, build
from cuattn.cpu import CpuMachine, check_schedules
from cuattn.machine import DeviceError, RaceError
from cuattn.wgmma_shapes import HEADER, SHAPES, header

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16),
          "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}
SCHEDULES = [{"order": order, "seed": seed, "async_copies": copies} for (order, seed), copies in product(
    [("forward", 0), ("reverse", 0), ("shuffle", 1), ("shuffle", 2)], ("late", "eager"))]

@pytest.fixture(scope="module")
def cpu_machine():
    made = CpuMachine(workers=1, races=True)
    yield made
    made.close()


def launch(machine, file, entry, block, smem, constants, **args):
    """One block, on either machine. Arrays become flat tensors, ints int32; the rest stays."""
    if machine.name == "gpu" and machine.device.arch != "sm_90a":
        pytest.skip(f"wgmma needs sm_90a, and this GPU is {machine.device.arch}")
    built = build(str(KERNELS / file), entry, constants, machine.device.arch)
    bound = [(name, np.int32(v) if type(v) is int else machine.tensor(v.reshape(-1))
              if hasattr(v, "reshape") and v.ndim else v) for name, v in args.items()]
    machine.launch(built, (1, 1, 1), block, smem, bound)
    machine.synchronize()


# --- one product, in every layout


def layout(start, leading, stride, first_line=0):
    """A `Layout` of wgmma.cu."""
    fields = np.dtype([(name, np.int32) for name in ("start", "leading", "stride", "first_line")])
    return np.array((start, leading, stride, first_line), fields)[()]


def lay_out(image, lines, at, width, mn_major):
    """Writes a matrix of bytes into the image: lines of 32 bytes along k, or 16 lines of k."""
    line, byte = np.indices(lines.shape)
    if mn_major and width:
        to = byte // width * at["leading"] + line // 8 * at["stride"] + line % 8 * width + byte % width
    elif mn_major:
        to = byte // 16 * at["stride"] + line // 8 * at["leading"] + line % 8 * 16 + byte % 16
    elif width:
        to = line // 8 * at["stride"] + line % 8 * width + byte
    else:
        to = line // 8 * at["stride"] + byte // 16 * at["leading"] + line % 8 * 16 + byte % 16
    to = to + at["start"]
    if width:
        to ^= ((to >> 7) - at["first_line"] & width // 16 - 1) << 4
    assert len(np.unique(to)) == to.size
    image[to] = lines


def layout_of(width, mn_major, lines, base, step=0, first_line=0):
    """One as kernels use: an operand of 8·`lines` rows or columns, as part of a tile with more of both."""
    if mn_major:
        return layout(base, 32 * width, 8 * width, first_line) if width else layout(base, 128 * lines, 128)
    return layout(base + step, 16, 16 * width, first_line) if width else layout(base, 128 * lines, 128)


CASES = [  # element, n, A's swizzle and whether it is MN-major (None: in registers), B's
    ("bfloat16", 8, 0, False, 0, True),
    ("float16", 24, 32, False, 128, True),
    ("bfloat16", 64, 64, False, 64, True),
    ("float16", 128, 128, False, 128, False),
    ("bfloat16", 40, 0, True, 0, False),
    ("float16", 80, 32, True, 32, False),
    ("bfloat16", 96, 64, True, 64, False),
    ("float16", 256, 128, True, 32, True),
    ("bfloat16", 176, None, False, 128, True),
    ("float16", 16, None, False, 128, False),
    ("float8_e4m3", 32, 128, False, 64, False),
    ("float8_e4m3", 48, None, False, 0, False),
]


def fragments(a):
    """A (64 × 32 bytes) as each thread of the warpgroup holds it: 4 words."""
    thread, i = np.indices((128, 4))
    row, k = thread // 32 * 16 + thread % 32 // 4 + i % 2 * 8, thread % 4 * 4 + i // 2 * 16
    words = a.view(np.uint8).reshape(64, 32)
    return np.stack([words[row, k + byte] for byte in range(4)], -1).copy().view(np.uint32)[..., 0]


def summed(a, b, start):
    """a b + start in float32, along k: the CPU machine's own sum, since each product is exact."""
    d = start.copy()
    for k in range(a.shape[1]):
        d += a[:, k, None].astype(np.float32) * b[None, k].astype(np.float32)
    return d


@pytest.mark.parametrize("element, n, width_a, a_mn, width_b, b_mn", CASES)
def test_layouts(machine, rng, element, n, width_a, a_mn, width_b, b_mn):
    dtype, depth = DTYPES[element], 32 // DTYPES[element].itemsize
    a = rng.standard_normal((64, depth)).astype(np.float32).astype(dtype)
    b = rng.standard_normal((depth, n)).astype(np.float32).astype(dtype)
    c = rng.standard_normal((64, n)).astype(np.float32)
    image = np.zeros(1 << 16, np.uint8)
    at_a = layout_of(width_a or 0, a_mn, 8, 0, step=32 if (width_a or 0) > 32 else 0)
    at_b = layout_of(width_b, b_mn, n // 8, 1 << 15)
    if width_a is not None:
        lines = np.ascontiguousarray(a.T if a_mn else a).view(np.uint8).reshape(16 if a_mn else 64, -1)
        lay_out(image, lines, at_a, width_a, a_mn)
    lines = np.ascontiguousarray(b if b_mn else b.T).view(np.uint8).reshape(16 if b_mn else n, -1)
    lay_out(image, lines, at_b, width_b, b_mn)
    constants = {"N": n, "WIDTH_A": width_a or 0, "A_MN": a_mn, "WIDTH_B": width_b, "B_MN": b_mn,
                 "FROM_REGISTERS": width_a is None, "IMAGE_BYTES": image.size,
                 "E4M3": element == "float8_e4m3",
                 "Element": "bfloat16" if element == "bfloat16" else "float16"}
    for add in (1, 0):
        d = machine.empty((64, n), np.float32)
        launch(machine, "wgmma.cu", "product", 128, image.size, constants, g_image=machine.upload(image),
               g_a=machine.upload(fragments(a)), g_c=machine.upload(c), g_d=d, a=at_a, b=at_b, add=add)
        got, expected = machine.download(d), summed(a, b, c * add)
        if machine.name == "cpu":
            np.testing.assert_array_equal(got, expected)
        else:
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_pattern_that_begins_elsewhere(machine, rng):
    a, b = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((64, 16), (16, 64)))
    image = np.zeros(1 << 15, np.uint8)
    at_a, at_b = layout(256, 16, 1024, 2), layout(16384 + 512 + 32, 16, 1024, 4)
    lay_out(image, a.view(np.uint8).reshape(64, 32), at_a, 128, False)
    lay_out(image, np.ascontiguousarray(b.T).view(np.uint8).reshape(64, 32), at_b, 128, False)
    constants = {"N": 64, "WIDTH_A": 128, "A_MN": False, "WIDTH_B": 128, "B_MN": False, "E4M3": False,
                 "FROM_REGISTERS": False, "IMAGE_BYTES": image.size, "Element": "float16"}
    c, d = machine.upload(np.zeros((64, 64), np.float32)), machine.empty((64, 64), np.float32)
    launch(machine, "wgmma.cu", "product", 128, image.size, constants, g_image=machine.upload(image),
           g_a=machine.upload(fragments(a)), g_c=c, g_d=d, a=at_a, b=at_b, add=0)
    np.testing.assert_array_equal(machine.download(d), a.astype(np.float32) @ b.astype(np.float32))


# --- whole tiles


def tile_constants(element, rows, cols, depth, width):
    return {"Element": element, "ROWS": rows, "COLS": cols, "DEPTH": depth, "WIDTH": width}


def sum_of_times(a, b, times):
    d = np.zeros((len(a), len(b)), np.float32)
    for _ in range(times):
        d = summed(a, b.T, d)
    return d


@pytest.mark.parametrize("element, width", [("bfloat16", 128), ("float16", 64), ("float16", 32)])
def test_tiles(machine, rng, element, width):
    dtype = DTYPES[element]
    a, b = (rng.standard_normal((n, 128)).astype(dtype) for n in (128, 96))
    d = machine.empty((128, 96), np.float32)
    for times in (1, 9):  # 9 · 16 products are more than a warpgroup may have under way
        launch(machine, "wgmma_tiles.cu", "gemm", 128, (128 + 96) * 256,
               tile_constants(element, 128, 96, 128, width), g_a=machine.upload(a), g_b=machine.upload(b), g_d=d,
               times=times)
        expected = sum_of_times(a, b, times)
        if machine.name == "cpu":
            np.testing.assert_array_equal(d, expected)
        else:
            np.testing.assert_allclose(machine.download(d), expected, rtol=1e-5, atol=1e-3)


def attended(q, k, v, sigma):
    s = q.astype(np.float64) @ k.T.astype(np.float64) * sigma
    p = np.exp(s - s.max(1, keepdims=True))
    return p @ v.astype(np.float64) / p.sum(1, keepdims=True)


def attention_inputs(machine, rng):
    """Three tiles of 64 keys or two of 96, and what each kernel is launched with."""
    q, k, v = (rng.standard_normal((n, 128)).astype(DTYPES["bfloat16"]) for n in (128, 192, 192))
    args = {"g_q": machine.upload(q), "g_k": machine.upload(k), "g_v": machine.upload(v),
            "g_o": machine.empty((128, 128), "bfloat16")}
    return args, attended(q, k, v, 128 ** -0.5), np.float32(128 ** -0.5 * np.log2(np.e))


@pytest.mark.parametrize("entry, tiles", [("attention", 1), ("overlapped", 2)])
def test_attention(machine, rng, entry, tiles):
    args, expected, sigma2 = attention_inputs(machine, rng)
    more = {"tiles": 2, "sigma2": sigma2} if entry == "attention" else {"sigma2": sigma2}

    def run():
        launch(machine, "wgmma_tiles.cu", entry, 256, (128 + 2 * tiles * 96) * 256,
               tile_constants("bfloat16", 128, 96, 128, 128), **args, **more)

    run()
    assert not np.abs(machine.download(args["g_o"]).astype(np.float64) - expected).max() > 4e-3
    if machine.name == "cpu":
        check_schedules(machine, run, {"g_o": args["g_o"]})


def specialised(machine, args, sigma2, fault=0):
    """Launches the warp-specialised kernel on what `attention_inputs` gives."""
    constants = {"Element": "bfloat16", "DEPTH": 128, "COLS": 64, "FAULT": fault}
    maps = {name[2:]: machine.tensor_map(args[name], (rows, 64), 128)
            for name, rows in (("g_q", 128), ("g_k", 64), ("g_v", 64))}
    launch(machine, "specialised.cu", "attention", 384, (128 + 4 * 64) * 256 + 1024, constants, **maps,
           g_o=args["g_o"], tiles=3, sigma2=sigma2)


def test_warp_specialised_attention(machine, rng):
    args, expected, sigma2 = attention_inputs(machine, rng)
    with machine.counting() as counted:
        specialised(machine, args, sigma2)
    assert not np.abs(machine.download(args["g_o"]).astype(np.float64) - expected).max() > 4e-3
    if machine.name == "cpu":
        assert counted.wgmma == 2 * 3 * (8 + 4) and counted.bytes_loaded == (128 + 2 * 192) * 256
        check_schedules(machine, lambda: specialised(machine, args, sigma2), {"g_o": args["g_o"]})


@pytest.mark.parametrize("fault", [1, 2])  # no wait for the stage; the stage given back before wgmma_wait
def test_faults_between_copies_and_products(cpu, rng, fault):
    args, _, sigma2 = attention_inputs(cpu, rng)
    wanted = {line_of("specialised.cu", f"// {what} a stage of K") for what in ("reads", "fills")}
    for schedule in SCHEDULES:
        with cpu.schedule(**schedule), pytest.raises(RaceError) as caught:
            specialised(cpu, args, sigma2, fault)
        text = str(caught.value)
        assert {int(n) for n in re.findall(r"specialised\.cu:(\d+)", text)} == wanted and "wgmma's read" in text, text


def test_what_is_counted(cpu_machine, rng):
    a, b = (cpu_machine.upload(np.ones((n, 128), np.float16)) for n in (128, 96))
    d = cpu_machine.empty((128, 96), np.float32)
    constants = tile_constants("float16", 128, 96, 128, 32)
    with cpu_machine.counting() as counted, cpu_machine.tracing() as traced:
        launch(cpu_machine, "wgmma_tiles.cu", "gemm", 128, (128 + 96) * 256, constants, g_a=a, g_b=b, g_d=d,
               times=1)
    assert (counted.wgmma, counted.mma) == (2 * 8, 0)
    (site,) = [s for s in traced.sites if s.access == "wgmma"]
    assert (site.instructions, site.lanes) == (4 * 16, 128 * 16)
    assert site.bytes == 16 * (64 + 96) * 32 and (site.first, site.end) == (0, (128 + 96) * 256)
    assert (site.wavefronts, site.conflicts) == (site.bytes // 128, 0)
    assert sum(step.mma for step in traced.steps) == 4 * 16
    assert {"wgmma fence", "wgmma commit", "wgmma wait", "proxy fence"} <= {s.access for s in traced.sites}


# --- stmatrix, elect, registers


def test_stmatrix(machine, rng):
    matrices = rng.integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    held = machine.upload(matrices.reshape(4, 32, 2).copy().view(np.uint32).reshape(-1))
    out = machine.upload(np.zeros((6, 32, 8), np.uint16))
    launch(machine, "warpgroup.cu", "all_of_them", 32, 512, {}, g_in=held, g_out=out)
    got = machine.download(out).reshape(6, 4, 8, 8)
    for i, count in enumerate((1, 2, 4)):
        np.testing.assert_array_equal(got[2 * i, :count], matrices[:count])
        np.testing.assert_array_equal(got[2 * i + 1, :count], matrices[:count].transpose(0, 2, 1))
        assert not got[2 * i:2 * i + 2, count:].any()


def test_one_lane_is_elected(machine):
    out = machine.upload(np.zeros((3, 4), np.int32))
    launch(machine, "warpgroup.cu", "elected", 128, 0, {}, g_count=out)
    got = machine.download(out)
    assert (got > 0).all() and (got == got[0]).all()


def test_registers(machine):
    out = machine.empty(384, np.int32)

    def run():
        launch(machine, "warpgroup.cu", "registers", 384, 0, {}, g_out=out)

    run()
    np.testing.assert_array_equal(machine.download(out), np.arange(384))
    if machine.name == "cpu":
        check_schedules(machine, run, {"out": out})


# --- planted faults


def fault_kernel(machine, entry, block=128, smem=16384, constants=None, **args):
    launch(machine, "wgmma_faults.cu", entry, block, smem,
           {"SWIZZLE": 128, "WITH_BARRIER": False, **(constants or {})}, **args)


def line(text):
    return line_of("wgmma_faults.cu", text)


def report(machine, entry, schedules=SCHEDULES, error=DeviceError, block=128, out="g_d", **constants):
    """What every schedule says; all must say it with the same lines."""
    said = set()
    array = machine.empty(4096, np.float32 if out == "g_d" else np.int32)
    for schedule in schedules:
        with machine.schedule(**schedule), pytest.raises(error) as caught:
            fault_kernel(machine, entry, block, constants=constants, **{out: array})
        text = str(caught.value)
        lines = tuple(sorted({int(n) for n in re.findall(r"wgmma_faults\.cu:(\d+)", text)}))
        said.add((lines, re.sub(r"\(\d+,\d+,\d+\)|bytes \d+ to \d+|\b\d+ of 128|\d+ threads", "", text)))
    assert len({lines for lines, _ in said}) == 1, said
    return said.pop()[0], text


@pytest.mark.parametrize("entry, missing", [
    ("no_proxy_fence", "fence_proxy_async() after that write"),
    ("proxy_fence_too_late", "fence_proxy_async() after that write"),
    ("no_barrier", "a barrier that both reach"),
])
def test_what_the_tensor_cores_do_not_see(cpu_machine, entry, missing):
    lines, text = report(cpu_machine, entry, error=RaceError)
    assert lines == (line(f"// written, {entry}"), line(f"// read, {entry}")), text
    assert "wgmma" in text and (entry == "no_barrier" or f"missing: {missing}" in text), text


def test_a_stage_that_is_filled_early(cpu_machine):
    lines, text = report(cpu_machine, "overwritten_before_the_wait", error=RaceError)
    assert lines == (line("// reads the stage"), line("// refills it early")) and "wgmma_wait" in text, text
    lines, text = report(cpu_machine, "refilled_by_others", error=RaceError, block=256)
    assert lines == (line("// reads for the others"), line("// refills for the others")), text
    for schedule in SCHEDULES:
        with cpu_machine.schedule(**schedule):
            fault_kernel(cpu_machine, "refilled_by_others", 256, constants={"WITH_BARRIER": True},
                         g_d=cpu_machine.empty(4096, np.float32))


@pytest.mark.parametrize("entry, columns", [
    ("no_wait", slice(None)), ("too_few_waited_for", slice(32, None)),
])
def test_accumulators_before_the_wait_are_nan(cpu_machine, entry, columns):
    d = cpu_machine.empty((64, 64), np.float32)
    for schedule in SCHEDULES:
        with cpu_machine.schedule(**schedule):
            fault_kernel(cpu_machine, entry, g_d=d)
        assert np.isnan(d[:, columns]).all() and np.isnan(d).sum() == d[:, columns].size


def test_a_wrong_swizzle_gives_wrong_numbers(cpu_machine):
    place = np.arange(64 * 64)
    a, b = (place % 7).reshape(64, 64), (place % 5).reshape(64, 64)
    for swizzle in (128, 64, 32):
        d = cpu_machine.empty((64, 64), np.float32)
        fault_kernel(cpu_machine, "wrong_swizzle", constants={"SWIZZLE": swizzle}, g_d=d)
        assert (d == a @ b.T).all() == (swizzle == 128)


@pytest.mark.parametrize("entry, marks, sentence", [
    ("never_waited_for", ["// issued, never waited for"], "was never waited for"),
    ("not_committed", ["// issued, not committed"], "was never waited for"),
    ("other_descriptor", ["// one lane's"], "divergent wgmma: .* with another descriptor of B"),
    ("no_wgmma_fence", ["// not fenced"], "wgmma without a wgmma_fence before it"),
    ("out_of_bounds", ["// 64 columns from 32 of 64 on"], "wgmma reads 16 bytes of B at byte"),
    ("fragments_not_named", ["// fragments not named", "  wgmma_fence(acc);\n  wgmma_ab<"],
     "fragments of A that"),
    ("written_after_wgmma_fence", ["// changed too late", "  wgmma_fence(acc);\n  acc.tile[0][3]"],
     "accumulators that"),
    ("no_second_wgmma_fence", ["// not fenced again", "  wgmma_wait<0>(acc);\n}\n\nKERNEL(128, 1) no_proxy"],
     "wgmma without a wgmma_fence since the wgmma_wait"),
    ("other_shape_under_way", ["// 64 columns wide", "// 32 wide"], "wait for it first"),
    ("divergent", ["// two warps", "// the other two"], "divergent wgmma: .* with another call site"),
    ("other_groups", ["// one lane's group"], "divergent wgmma_commit: 1 wgmmas precede it|divergent wgmma_commit: 2"),
])
def test_misuse(cpu_machine, entry, marks, sentence):
    text_of_file = (KERNELS / "wgmma_faults.cu").read_text()
    wanted = sorted(text_of_file[:text_of_file.index(mark)].count("\n") + 1 if "\n" in mark else line(mark)
                    for mark in marks)
    lines, text = report(cpu_machine, entry)
    assert re.search(sentence, text) and list(lines) == wanted, (text, wanted)


@pytest.mark.parametrize("entry, mark, sentence", [
    ("a_changed", "// takes fragments", "the fragments of A of this wgmma changed before its wait"),
    ("accumulators_scaled", "// issued, then scaled",
     "the accumulators of this wgmma were written before its wait"),
])
def test_registers_that_change_under_way(cpu_machine, entry, mark, sentence):
    lines, text = report(cpu_machine, entry)
    assert sentence in text and lines == (line(mark),), text


def test_warps_may_wait_apart(cpu_machine):
    d = cpu_machine.empty((64, 64), np.float32)
    for schedule in SCHEDULES:
        with cpu_machine.schedule(**schedule):
            fault_kernel(cpu_machine, "warps_wait_apart", g_d=d)
        assert (d == 64).all()


def test_warpgroups_that_do_not_meet(cpu_machine):
    out, place = cpu_machine.empty(4096, np.float32), rf" at wgmma_faults.cu:{line('// three warps')}\b"
    exited = "a thread exited without the wgmma that .* of its warpgroup have reached.*"
    waits = "96 of 128 threads wait at .* in wgmma_wait; 96 of them have reached the wgmma"
    for schedule in SCHEDULES:
        with cpu_machine.schedule(**schedule):
            with pytest.raises(DeviceError, match=f"({exited}|{waits}){place}"):
                fault_kernel(cpu_machine, "a_warp_is_missing", g_d=out)
            with pytest.raises(DeviceError, match=waits):
                fault_kernel(cpu_machine, "a_warp_waits_elsewhere", g_d=out)
    with pytest.raises(DeviceError, match="the block's 96 threads hold only part of its warpgroup"):
        fault_kernel(cpu_machine, "not_whole", 96, g_d=out)


@pytest.mark.parametrize("entry, block, sentence", [
    ("too_many_registers", 384,
     "in setmaxnreg for 240 registers a thread: it has 168, and 8192 of the block's 65536"),
    ("odd_registers", 128, "setmaxnreg.dec to 100 registers: expected a multiple of 8 from 24 to 256"),
    ("wrong_way", 384, "setmaxnreg.dec to 240 registers, but a thread of warpgroup . has 168"),
    ("half_a_warpgroup", 128, "a thread exited while .* wait for it in setmaxnreg|wait at .* in setmaxnreg"),
])
def test_registers_that_are_not_there(cpu_machine, entry, block, sentence):
    for schedule in SCHEDULES:
        with cpu_machine.schedule(**schedule), pytest.raises(DeviceError, match=sentence):
            fault_kernel(cpu_machine, entry, block, g_out=cpu_machine.empty(384, np.int32))


# --- the header and its PTX


def test_the_header_is_what_its_generator_writes():
    text = HEADER.read_text(encoding="utf-8")
    assert header(text) == text
    assert max(len(written) for written in text.splitlines()) <= 110


#: What ptxas says where it serialises products, waits for them itself or ignores setmaxnreg (C7508, C7510, C7517).
REWRITTEN = re.compile(r"\(C75\d\d\)|serialized|injected|ignored")


def ptx_log(file, entry, constants):
    try:
        built = build(str(KERNELS / file), entry, constants, "sm_90a")
    except CompilerMissing as error:
        pytest.skip(str(error))
    return built, (built.path.parent / "log.txt").read_text()


@pytest.mark.parametrize("n", SHAPES)
def test_every_shape_assembles(n):
    built, log = ptx_log("wgmma_shapes.cu", "forms", {"N": n})
    assert built.spill_bytes == 0 and "arning" not in log and not REWRITTEN.search(log), log


@pytest.mark.parametrize("file, entry, constants", [
    ("wgmma_tiles.cu", "gemm", tile_constants("float16", 64, 256, 64, 128)),
    ("wgmma_tiles.cu", "attention", tile_constants("bfloat16", 64, 128, 128, 128)),
    ("wgmma_tiles.cu", "overlapped", tile_constants("bfloat16", 64, 96, 128, 128)),
    ("warpgroup.cu", "all_of_them", {}),
    ("warpgroup.cu", "registers", {}),
    ("specialised.cu", "attention", {"Element": "bfloat16", "DEPTH": 128, "COLS": 128, "FAULT": 0}),
])
def test_kernels_assemble_without_serialised_products(file, entry, constants):
    built, log = ptx_log(file, entry, constants)
    assert built.spill_bytes == 0 and not REWRITTEN.search(log), log
