"""Bulk copies: every tile is NumPy's, on both machines; what is wrong with one is said with its place."""
from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from bulk_model import (
    BOXES,
    LOADED,
    SCHEDULES,
    SHAPES,
    SMEM,
    in_shared,
    line_marks,
    load_tile,
    numbers,
    requested,
    run,
    store_tile,
    stored,
    tile_of_bytes,
)
from simt_launch import KERNELS

from cuattn import tensor_map
from cuattn.compile import build
from cuattn.cpu import CpuMachine, check_schedules
from cuattn.machine import DeviceError, RaceError

TYPES = (np.dtype(np.uint16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.uint8))


@pytest.fixture(scope="module")
def own():
    """A CPU machine of these tests, with one process."""
    made = CpuMachine(workers=1, races=True)
    yield made
    made.close()


def on_16_bytes(at, itemsize: int) -> tuple[int, ...]:
    """A place, moved down to where a tile may begin: the innermost coordinate on a multiple of 16 bytes."""
    return (*at[:-1], at[-1] - at[-1] % (16 // itemsize))


def corners(shape, box, rng) -> list[tuple[int, ...]]:
    """Places of tiles, in the array's order: the first, outside, across each edge, anywhere."""
    before = tuple(-(n // 2) for n in box)
    anywhere = tuple(int(rng.integers(-n, size)) for size, n in zip(shape, box))
    behind = (*(size - n // 2 - 1 for size, n in zip(shape[:-1], box)), shape[-1] - box[-1] // 2)
    return [(0,) * len(shape), tuple(size + 3 for size in shape), before, anywhere, behind]


def cases(rank: int, swizzle: int, rng, cut: int):
    """(memory, box, place) for a rank and a swizzle; the array is the memory but for `cut` columns."""
    for i, dtype in enumerate(TYPES):
        shape = SHAPES[rank]
        box = (*BOXES[rank], (swizzle or 96) // dtype.itemsize)
        places = corners((*shape[:-1], shape[-1] - cut), box, rng)
        array = numbers(rng, shape, dtype)
        for at in places[i:]:
            yield array, box, on_16_bytes(at, dtype.itemsize)


# ---- both machines


@pytest.mark.parametrize("swizzle", tensor_map.SWIZZLES)
@pytest.mark.parametrize("rank", SHAPES)
def test_prim_loads(machine, rng, rank, swizzle):
    """Also of arrays that end within 16 bytes."""
    for memory, box, at in cases(rank, swizzle, rng, cut=3):
        array = memory[..., :-3]
        expected = in_shared(array, at, box, swizzle)
        mapped = machine.tensor_map(machine.upload(memory)[..., :-3], box, swizzle)
        assert mapped.tile_bytes == expected.size
        with machine.counting() as counted:
            loaded = load_tile(machine, mapped, at)
        np.testing.assert_array_equal(loaded, expected, err_msg=f"{array.dtype} {box} at {at}")
        if counted:
            wanted = requested(array, at, box)
            assert (counted.bytes_loaded, counted.bytes_async) == (wanted, wanted)


@pytest.mark.parametrize("swizzle", tensor_map.SWIZZLES)
@pytest.mark.parametrize("rank", SHAPES)
def test_prim_stores(machine, rng, rank, swizzle):
    """Past the end of every dimension; never before its beginning, which no store may."""
    for memory, box, at in cases(rank, swizzle, rng, cut=16):
        array, at = memory[..., :-16], tuple(map(abs, at))
        shared = tile_of_bytes(rng, box, array.itemsize)
        whole = machine.upload(memory)
        with machine.counting() as counted:
            store_tile(machine, machine.tensor_map(whole[..., :-16], box, swizzle), at, shared)
        expected = memory.copy()
        expected[..., :-16] = stored(array, shared, at, box, swizzle)
        np.testing.assert_array_equal(machine.download(whole).view(np.uint8), expected.view(np.uint8),
                                      err_msg=f"{array.dtype} {box} at {at}")
        if counted:
            assert counted.bytes_stored == requested(array, at, box)


def test_prim_arrays_of_any_strides(machine, rng):
    """Transposed, sliced, and with dimensions of one element."""
    whole = machine.upload(numbers(rng, (6, 40, 5, 64), np.uint16))
    at, box = (0, 1, 0, -8), (1, 3, 4, 64)
    for array in (whole.transpose(0, 2, 1, 3), whole[1:5:2, 3:31], whole[:1, :, :1], whole[..., 8:48]):
        loaded = load_tile(machine, machine.tensor_map(array, box, 128), at)
        np.testing.assert_array_equal(loaded, in_shared(machine.download(array), at, box, 128))


@pytest.mark.parametrize("size", [16, 4096, 65536])
def test_prim_plain_bytes(machine, rng, size):
    data = rng.integers(0, 255, size).astype(np.uint8)
    out = machine.empty(size, np.uint8)
    with machine.counting() as counted:
        run(machine, "copy_bytes", 1, 128, SMEM, {"g_in": machine.upload(data), "g_out": out, "bytes": size})
    np.testing.assert_array_equal(machine.download(out), data)
    assert not counted or (counted.bytes_loaded, counted.bytes_stored) == (size, size)


def test_prim_store_steps(machine):
    out = machine.empty((5 * 8, 64), np.uint16)
    run(machine, "store_steps", 1, 128, 2048,
        {"map": machine.tensor_map(out, (8, 64)), "steps": 5, "fault": 0})
    expected = (np.arange(5)[:, None] * 1000 + np.arange(512)).astype(np.uint16)
    np.testing.assert_array_equal(machine.download(out).reshape(5, 512), expected)


def column_sums(x: np.ndarray, blocks: int, tiles: int) -> np.ndarray:
    """What the threads of `multicast` add up, (blocks of one cluster each, 64)."""
    out = np.zeros((blocks, 64), np.uint32)
    for b in range(blocks):
        for n in range(tiles):
            tile = in_shared(x, ((b * tiles + n) * 8, 0), (8, 64), 128).view(np.uint16).reshape(8, 64)
            for row in tile.astype(np.uint32):
                out[b] = out[b] * np.uint32(31) + row
    return out


@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_prim_multicast(machine, rng, cluster):
    tiles, clusters = 5, 3
    x = rng.integers(0, 60000, (clusters * tiles * 8, 64)).astype(np.uint16)
    out = machine.empty((clusters, cluster, 64), np.uint32)
    with machine.counting() as counted:
        run(machine, "multicast", clusters * cluster, 64, 2048 + 64,
            {"map": machine.tensor_map(machine.upload(x), (8, 64), 128), "g_out": out, "tiles": tiles,
             "fault": 0}, cluster)
    expected = column_sums(x, clusters, tiles)
    np.testing.assert_array_equal(machine.download(out), np.repeat(expected[:, None], cluster, 1))
    if counted:  # the bytes are read once, whoever gets them
        assert (counted.bytes_loaded, counted.blocks) == (x.nbytes, clusters * cluster)


# ---- every schedule


def test_schedules(own, rng):
    x = own.upload(rng.integers(0, 60000, (3 * 5 * 8, 64)).astype(np.uint16))
    sums, rows = own.empty((6, 64), np.uint32), own.empty((5 * 8, 64), np.uint16)
    loads, stores = own.tensor_map(x, (8, 64), 128), own.tensor_map(rows, (8, 64))

    def both():
        run(own, "multicast", 6, 64, 2048 + 64, {"map": loads, "g_out": sums, "tiles": 5, "fault": 0}, 2)
        run(own, "store_steps", 1, 128, 2048, {"map": stores, "steps": 5, "fault": 0})

    check_schedules(own, both, {"sums": sums, "rows": rows})


def failures(own, launch, kind=DeviceError) -> list[str]:
    """The message under every schedule."""
    texts = []
    for schedule in SCHEDULES:
        with own.schedule(**schedule), pytest.raises(kind) as caught:
            launch()
        texts.append(str(caught.value))
    return texts


STORE_FAULTS = {
    1: (RaceError, "missing: fence_proxy_async() after that write", ["sent", "written"]),
    2: (RaceError, "missing: ", ["sent", "written"]),
    3: (RaceError, "missing: the wait of that thread for its copy (bulk_wait_read), ", ["sent", "written"]),
    4: (RaceError, "missing: the wait of that thread for its copy (bulk_wait_read), ", ["sent", "written"]),
    5: (DeviceError, "the bulk store issued here was never waited for: commit its group, and wait", ["sent"]),
}


@pytest.mark.parametrize("fault", STORE_FAULTS)
def test_faults_of_stores(own, fault):
    kind, text, marks = STORE_FAULTS[fault]
    mapped = own.tensor_map(own.empty((5 * 8, 64), np.uint16), (8, 64))

    def launch():
        run(own, "store_steps", 1, 128, 2048, {"map": mapped, "steps": 5, "fault": fault})

    for said in failures(own, launch, kind):
        assert text in said, said
        assert sorted(map(int, re.findall(r"bulk\.cu:(\d+)", said))) == sorted(line_marks(*marks)), said


def test_a_fence_of_the_thread_that_stores_orders_too(own):
    mapped = own.tensor_map(own.empty((5 * 8, 64), np.uint16), (8, 64))
    run(own, "store_steps", 1, 128, 2048, {"map": mapped, "steps": 5, "fault": 6})


CLUSTER_FAULTS = {
    1: "deadlock in block (",
    2: "nobody waited for the bulk copy issued here|without their being announced",
    3: "of shared memory of the other block is not initialised (yet)",
    4: "which lacks 1 of 1 arrivals, with 1024 bytes that nobody announced",
}


@pytest.mark.parametrize("fault", CLUSTER_FAULTS)
def test_faults_of_clusters(own, rng, fault):
    mapped = own.tensor_map(own.upload(rng.integers(0, 9, (80, 64)).astype(np.uint16)), (8, 64), 128)
    out = own.empty((4, 64), np.uint32)

    def launch():
        run(own, "multicast", 4, 64, 2048 + 64, {"map": mapped, "g_out": out, "tiles": 5, "fault": fault}, 2)

    for said in failures(own, launch):
        assert any(text in said for text in CLUSTER_FAULTS[fault].split("|")), said
        assert "bulk.cu:" in said
    if fault == 1:
        assert "lacks 64 of 128 arrivals" in said and "of its cluster:" in said


def test_a_wrong_swizzle_gives_wrong_values(own, rng):
    array = numbers(rng, (16, 64), np.uint16)
    source, out = own.upload(array), own.empty((128, 16), np.uint8)
    for swizzle, row in ((64, 32), (32, 16), (0, 64)):
        run(own, "load_tile", 1, 128, SMEM,
            {"map": own.tensor_map(source, (16, row), swizzle), "rank": 2, "x0": 0, "x1": 0, "x2": 0, "x3": 0,
             "x4": 0, "bytes": 16 * row * 2, "g_out": out})
        taken = in_shared(array, (0, 0), (16, 64), 128)[:16 * row * 2 // 16]
        assert (out[:len(taken)] != taken).any()


# ---- one sentence each


def test_misuse_of_copies(own, rng):
    x = own.upload(rng.integers(0, 9, (40, 64)).astype(np.uint16))
    out = own.empty((512, 16), np.uint8)
    args = {"rank": 2, "x0": 0, "x1": 0, "x2": 0, "x3": 0, "x4": 0, "bytes": 1024, "g_out": out}
    for mapped, changes, text in (
        (own.tensor_map(x, (8, 64)), {"rank": 3}, "a bulk copy by 3 coordinates, but its tensor map has 2"),
        (own.tensor_map(own.empty((0, 64), np.uint16), (8, 64)), {}, "a bulk copy of a tile of an empty"),
    ):
        with pytest.raises(DeviceError) as caught:
            run(own, "load_tile", 1, 128, SMEM, {"map": mapped, **args, **changes})
        assert text in str(caught.value)
        assert str(caught.value).endswith(f"thread (0,0,0) of block (0,0,0) at bulk.cu:{LOADED}")
    with pytest.raises(DeviceError, match="a bulk copy of 24 bytes, 0 past a multiple of 16 in global mem"):
        run(own, "copy_bytes", 1, 128, SMEM, {"g_in": x, "g_out": out, "bytes": 24})
    with pytest.raises(DeviceError, match="read of 8192 bytes at byte 0 of g_in, which has 5120"):
        run(own, "copy_bytes", 1, 128, SMEM, {"g_in": x, "g_out": out, "bytes": 8192})


@pytest.mark.parametrize("shape, box, swizzle, text", [
    ((64,), (64,), 0, "array: expected 2 to 5 dimensions, got shape (64,); reshape it"),
    ((8, 64), (8,), 0, "box: expected 1 to 256 elements in each of 2 dimensions, got (8,); change it"),
    ((8, 64), (257, 64), 0, "box: expected 1 to 256 elements in each of 2 dimensions, got (257, 64)"),
    ((8, 64), (8, 12), 0, "box: expected a multiple of 16 bytes in the last dimension, got 12 elements of 2"),
    ((8, 64), (8, 64), 64, "box: expected the swizzle's 64 bytes in the last dimension, got 64 elements of"),
    ((8, 64), (8, 64), 100, "swizzle: expected 0, 32, 64 or 128 bytes, got 100; choose one"),
    ((8, 60), (8, 32), 64, "array: expected strides of positive multiples of 16 bytes, less than 2⁴⁰, got"),
])
def test_maps_that_are_refused(own, shape, box, swizzle, text):
    with pytest.raises(ValueError, match=re.escape("tensor map: " + text)):
        own.tensor_map(own.empty(shape, np.uint16), box, swizzle)


def test_arrays_that_are_refused(own):
    array = own.empty((8, 128), np.uint16)
    with pytest.raises(ValueError, match="expected a first element on a multiple of 16 bytes"):
        own.tensor_map(array[:, 4:68], (8, 64))
    with pytest.raises(ValueError, match="strides of positive multiples of 16 bytes.*got -256 bytes"):
        own.tensor_map(array[::-1, :64], (8, 64))


@pytest.mark.parametrize("cluster, grid, text", [
    (9, 18, "cluster: expected 1 to 8 blocks, got 9"),
    (2, 5, "cluster: expected a divisor of the grid's 5 blocks along x, got 2"),
])
def test_clusters_that_are_refused(own, cluster, grid, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        run(own, "multicast", grid, 64, 4096, {}, cluster)


def test_counted_by_call_site(own, rng):
    x = own.upload(numbers(rng, (40, 64), np.uint16))
    with own.tracing() as traced:
        run(own, "load_tile", 1, 128, SMEM,
            {"map": own.tensor_map(x, (8, 64), 128), "rank": 2, "x0": 8, "x1": 36, "x2": 0, "x3": 0, "x4": 0,
             "bytes": 1024, "g_out": own.empty((64, 16), np.uint8)})
    (load,) = [site for site in traced.sites if site.access == "bulk load"]
    assert (load.instructions, load.lanes, load.bytes) == (1, 1, 4 * 112)
    assert (load.sectors, load.first, load.end) == (4 * 4, 0, 1024)
    waits = [site for site in traced.sites if site.access == "mbarrier wait"]
    assert [(site.instructions, site.lanes) for site in waits] == [(4, 128)]
    assert sum(step.bytes_copied for step in traced.steps) == 4 * 112


def test_assembles_for_hopper():
    pytest.importorskip("cupy_backends", reason="NVRTC comes with CuPy, which is not installed here")
    built = build(str(KERNELS / "bulk.cu"), "ring", {}, "sm_90a")
    log = (built.path.parent / "log.txt").read_text()
    assert built.spill_bytes == 0 and "warning" not in log.lower(), log
