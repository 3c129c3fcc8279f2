"""What is particular to `paged_launches`: what each launch sees, lengths by page, and what is the same as fused."""
from __future__ import annotations

import numpy as np
import pytest
from test_decode import Cache, make_cache, run

import cuattn
from cuattn import compile as compiler
from cuattn.binding import repeatable
from cuattn.cpu import check_schedules
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.base import MOST_LAUNCHES, Unsupported
from cuattn.kernels.shapes import DecodeShape
from cuattn.machine import Tensor

KERNEL = "paged_launches"
CARD = for_arch("sm_90a")
PAGE = {"launch": "page"}


def plan(shape: DecodeShape, **constants):
    return ROWS[KERNEL].plan(shape, CARD, constants)


def planned(machine, q, cache: Cache, **options):
    arrays = (machine.upload(x) for x in (q, cache.k, cache.v, cache.table, cache.lengths))
    return cuattn.plan_decode(*arrays, kernel=KERNEL, **options)


def test_by_request_each_has_the_bits_of_the_fused_launch(machine, rng, randn):
    cache, q = make_cache(rng, [100, 0, 257], 16, 2, 64), randn(3, 1, 4, 64)
    _, o, lse = run(machine, KERNEL, q, cache)
    _, o_fused, lse_fused = run(machine, "paged", q, cache, constants={"splits": 1})
    assert (o == o_fused).all() and (lse == lse_fused).all()


# --- by page


@pytest.mark.parametrize("page, group, hkv, d, dtype", [
    (1, 4, 2, 64, "float16"), (16, 3, 1, 64, "bfloat16"), (96, 32, 1, 40, "float16"),
])
def test_by_page(machine, rng, randn, page, group, hkv, d, dtype):
    """Lengths on and beside page boundaries, NaN in whatever is not used, page numbers that nobody may read."""
    lengths = sorted({max(0, at + off) for at in (0, 2 * page) for off in (-1, 0, 1)} | {3})
    cache = make_cache(rng, lengths, page, hkv, d, dtype)
    run(machine, KERNEL, randn(len(lengths), 1, hkv * group, d, dtype=dtype), cache, constants=PAGE)


def test_by_page_from_an_interleaved_pool(machine, rng, randn):
    cache, q = make_cache(rng, [50, 33], 16, 2, 64), randn(2, 1, 4, 64)
    pool = machine.empty((len(cache.k), 2, 2, 16, 64), "float16")
    k, v = (pool[:, i].transpose(0, 2, 1, 3) for i in range(2))
    k[...], v[...] = machine.upload(cache.k), machine.upload(cache.v)
    rest = (machine.upload(x) for x in (cache.table, cache.lengths))
    p = cuattn.plan_decode(machine.upload(q), k, v, *rest, kernel=KERNEL, constants=PAGE)
    p.run()
    machine.synchronize()
    o, lse = (machine.download(x) for x in p.outputs)
    cuattn.compare.check_decode(q, cache.k, cache.v, cache.table, cache.lengths, o, lse).raise_if_bad()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
@pytest.mark.parametrize("h, hkv", [(4, 2), (0, 2), (0, 0)])
def test_by_page_of_nothing(machine, rng, lengths, h, hkv):
    cache, q = make_cache(rng, lengths, 16, hkv, 64), np.ones((len(lengths), 1, h, 64), "float16")
    for table in (cache.table, cache.table[:, :0]):
        _, o, lse = run(machine, KERNEL, q, Cache(cache.k, cache.v, table, cache.lengths), constants=PAGE)
        assert (o == 0).all() and np.isneginf(lse).all() and lse.shape == (len(lengths), h, 1)


def test_by_page_lengths_may_grow(machine, rng, randn):
    cache, q = make_cache(rng, [100, 60], 16, 2, 64), randn(2, 1, 4, 64)
    p = planned(machine, q, cache, constants=PAGE)
    lengths = p.tensors["cache_seqlens"].array
    for now in ([7, 60], [99, 0]):
        lengths[...] = machine.upload(np.array(now, np.int32))
        p.run()
        machine.synchronize()
        pages = machine.download(p.tensors["page_lengths"].array).reshape(2, -1)
        assert (pages == np.clip(np.array(now)[:, None] - 16 * np.arange(pages.shape[1]), 0, 16)).all()
        o, lse = (machine.download(x) for x in p.outputs)
        cuattn.compare.check_decode(q, cache.k, cache.v, cache.table, np.array(now), o, lse).raise_if_bad()


def test_lengths_of_pages_past_2_to_the_31(machine):
    """Slots of a table whose keys no int counts are behind every end."""
    made = plan(DecodeShape(2, 4, 2, 64, 1 << 20, 4096, "float16"), **PAGE)
    launch, slots = made.launches[0], 2 * 4096
    pages, lengths = machine.empty((slots,), "int32"), machine.upload(np.array([5, (3 << 20) + 7], np.int32))
    built = compiler.build(launch.file, launch.entry, launch.constants, machine.device.arch)
    arguments = [("lengths", machine.tensor(lengths)), ("pages", machine.tensor(pages))]
    machine.launch(built, launch.grid, launch.block, 0,
                   arguments + [(name, np.int32(n)) for name, n in (("SLOTS", slots), ("MAX_PAGES", 4096),
                                                                    ("PAGE_SIZE", 1 << 20))])
    machine.synchronize()
    pages = machine.download(pages).reshape(2, 4096)
    assert pages[0].tolist() == [5] + [0] * 4095
    assert pages[1].tolist() == [1 << 20] * 3 + [7] + [0] * 4092


def test_equal_bits_by_page_under_every_schedule(cpu, rng, randn):
    cache = make_cache(rng, [40, 65, 0], 32, 1, 64)
    p = planned(cpu, randn(3, 1, 4, 64), cache, constants=PAGE)
    o, lse = p.outputs
    check_schedules(cpu, p.run, {"o": o, "lse": lse})


# --- what is launched


REQUEST = {name: lambda x, b, page, i: x[b : b + 1]
           for name in ("q", "block_table", "cache_seqlens", "o", "lse")}
BY_PAGE = {
    "q": REQUEST["q"],
    "block_table": lambda x, b, page, i: x[b : b + 1, page : page + 1],
    "page_lengths": lambda x, b, page, i: x[i : i + 1],
    "part": lambda x, b, page, i: x[b : b + 1, page : page + 1],
    "part_lse": lambda x, b, page, i: x[b : b + 1, :, page : page + 1],
}


@pytest.mark.parametrize("constants, parts", [({}, REQUEST), (PAGE, BY_PAGE)], ids=["request", "page"])
def test_a_launch_reaches_its_own_part_of_each_array(cpu, rng, randn, constants, parts):
    """Of the batch's arrays one sequence, of the table and the partial results one page; of the caches all."""
    cache, q = make_cache(rng, [30, 50], 16, 2, 64), randn(2, 1, 4, 64)
    p = planned(cpu, q, cache, constants=constants)
    attending = [dict(args) for args in p.arguments if "sigma" in dict(args)]
    per = cache.table.shape[1] if constants else 1
    assert len(attending) == 2 * per
    for i, args in enumerate(attending):
        tensors = {name: x for name, x in args.items() if isinstance(x, Tensor)}
        assert set(tensors) == {"k_cache", "v_cache", *parts}
        assert all(tensors[name] is p.tensors[name] for name in ("k_cache", "v_cache"))
        for name, part in parts.items():
            expected = cpu.tensor(part(p.tensors[name].array, *divmod(i, per), i))
            got = tensors[name]
            assert (got.address, got.shape, got.extent) == (expected.address, expected.shape, expected.extent)
    assert not repeatable(p)  # parts of arrays: a later call is planned anew


def test_launches_by_page_are_those_of_the_table_and_not_of_the_lengths():
    shape = DecodeShape(16, 32, 8, 128, 16, 256, "bfloat16")
    request, page = plan(shape), plan(shape, **PAGE)
    assert (request.launch_count, page.launch_count) == (16, 16 * 256 + 2)
    assert len({id(launch) for launch in page.launches}) == 3
    fused = ROWS["paged"].plan(shape, CARD, {"splits": 1})
    for lengths in ([4096] * 16, [1] * 16):
        whole, by_request, by_page = (ROWS[name].cost(shape, p, lengths) for name, p in (
            ("paged", fused), (KERNEL, request), (KERNEL, page)))
        assert (by_request.bytes_loaded, by_request.bytes_stored) == (whole.bytes_loaded, whole.bytes_stored)
        threads = 32 * page.constants["warps"]
        again = 16 * 255 * (8 * threads * 4 + 32 * 128 * 2)  # the length and Q, for every page but one
        lengths_of_pages = 16 * 256 * 4
        merge = 16 * 256 * 32 * 64 * 4 + sum(-(-n // 16) for n in lengths) * 32 * 64 * 8
        assert by_page.bytes_loaded == whole.bytes_loaded + again + lengths_of_pages + merge
        assert by_page.bytes_stored == (16 * 256 * 32 * (128 * 4 + 4) + lengths_of_pages + whole.bytes_stored)
        assert by_page.flops == whole.flops


def test_what_nobody_waits_for_is_refused():
    shape = DecodeShape(512, 4, 2, 64, 4, 1024, "float16")
    assert plan(shape).launch_count == 512
    with pytest.raises(Unsupported, match=f"paged_launches: expected at most {MOST_LAUNCHES} launches, got 524290 "
                                          "with pages of 4; choose larger pages"):
        plan(shape, **PAGE)
    with pytest.raises(Unsupported, match=f"at most {MOST_LAUNCHES} launches, got 524289 for the batch; split it"):
        plan(DecodeShape(MOST_LAUNCHES + 1, 4, 2, 64, 16, 4, "float16"))
    with pytest.raises(Unsupported, match="launch must be 'request' or 'page', got 'token'; choose one"):
        plan(shape, launch="token")
    with pytest.raises(Unsupported, match="'splits' is not a tunable of this kernel .*launch, stages, warps"):
        plan(shape, splits=2)
