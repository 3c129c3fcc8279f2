"""wgmma, warpgroups and stmatrix against NumPy on both machines, what is counted of them, and their PTX."""
from __future__ import annotations

import re

import numpy as np
import pytest
from simt_launch import KERNELS
from wgmma_model import (
    DTYPES,
    attention_inputs,
    e4m3_bound,
    fragments,
    launch,
    lay_out,
    layout,
    layout_of,
    on_tensor_cores,
    specialised,
    sum_of_times,
    summed,
    tile_constants,
)

from cuattn.compile import CompilerMissing, build
from cuattn.cpu import CpuMachine, check_schedules
from cuattn.wgmma_shapes import HEADER, SHAPES, header

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


@pytest.fixture(scope="module")
def cpu_machine():
    made = CpuMachine(workers=1, races=True)
    yield made
    made.close()


# --- one product, in every layout


def operands(rng, element, n):
    """a, b and c of one product."""
    dtype, depth = DTYPES[element], 32 // DTYPES[element].itemsize
    a = rng.standard_normal((64, depth)).astype(np.float32).astype(dtype)
    b = rng.standard_normal((depth, n)).astype(np.float32).astype(dtype)
    return a, b, rng.standard_normal((64, n)).astype(np.float32)


@pytest.mark.parametrize("element, n, width_a, a_mn, width_b, b_mn", CASES)
def test_layouts(machine, rng, element, n, width_a, a_mn, width_b, b_mn):
    a, b, c = operands(rng, element, n)
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
        elif element == "float8_e4m3":
            exact = a.astype(np.float64) @ b.astype(np.float64) + c * add
            assert not (np.abs(got - exact) > e4m3_bound(a, b, c * add)).any() and not np.isnan(got).any()
        else:
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n, from_an_h200", [
    (48, {(0, 0): 4.869140625, (0, 3): 0.958984375, (0, 4): -1.6611328125, (0, 5): -0.3404541015625,
          (0, 7): 1.419677734375}),
    (32, {(0, 1): -9.3173828125, (0, 2): 6.0712890625, (0, 3): 17.966796875, (0, 4): 1.148681640625,
          (0, 5): -8.6298828125}),
])
def test_the_sum_of_tensor_cores_in_e4m3(rng, n, from_an_h200):
    """The model has the bits of the hardware where these are known, and keeps the bound derived from it."""
    a, b, c = operands(rng, "float8_e4m3", n)
    for start in (c, c * 0, c * 1000, c * np.float32(1e-6)):
        model, exact = on_tensor_cores(a, b, start), a.astype(np.float64) @ b.astype(np.float64) + start
        error, bound = np.abs(model - exact), e4m3_bound(a, b, start)
        assert (error <= bound).all() and (error > bound / 4).any()
    model = on_tensor_cores(a, b, c)
    assert {at: model[at] for at in from_an_h200} == from_an_h200


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


def test_warp_specialised_attention(machine, rng):
    args, expected, sigma2 = attention_inputs(machine, rng)
    with machine.counting() as counted:
        specialised(machine, args, sigma2)
    assert not np.abs(machine.download(args["g_o"]).astype(np.float64) - expected).max() > 4e-3
    if machine.name == "cpu":
        assert counted.wgmma == 2 * 3 * (8 + 4) and counted.bytes_loaded == (128 + 2 * 192) * 256
        check_schedules(machine, lambda: specialised(machine, args, sigma2), {"g_o": args["g_o"]})


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
