"""copy_pages on every machine: page sizes, widths, strides, pools, exact counts, equal bits, refusals."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn import contract
from cuattn.binding import repeatable
from cuattn.cpu import check_schedules
from cuattn.devices import for_arch
from cuattn.kernels import ROWS
from cuattn.kernels.base import Unsupported
from cuattn.kernels.shapes import PagesShape

CARD = for_arch("sm_90a")
WIDTHS = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "bfloat16": ml_dtypes.bfloat16}


def pool(rng, pages, page, hkv, d, dtype="float16"):
    """K and V of random bits, so that NaN and infinities are among them."""
    dtype = np.dtype(WIDTHS.get(dtype, dtype))
    return [rng.integers(0, 256, (pages, page, hkv, d * dtype.itemsize), np.uint8).view(dtype) for _ in "kv"]


def pairs(*lists) -> list[np.ndarray]:
    return [np.array(pages, np.int32) for pages in lists]


def copied(machine, before, src, dst, out=()):
    """The caches written, on the host; they are judged and counted."""
    arrays = [machine.upload(x) for x in (*before, src, dst)]
    to = {name: machine.upload(x) for name, x in zip(("k_out", "v_out"), out)}
    p = cuattn.plan_copy_pages(*arrays, **to)
    with machine.counting() as counted:
        written = p.run()
    machine.synchronize()
    after = [machine.download(x) for x in written]
    given = dict(zip(("k_out", "v_out"), out))
    cuattn.compare.check_copy_pages(*before, src, dst, *after, **given).raise_if_bad()
    for source, original in zip(arrays if out else (), before):
        assert machine.download(source).tobytes() == original.tobytes()
    if counted is not None:
        cost = p.cost()
        assert (counted.bytes_loaded, counted.bytes_stored) == (cost.bytes_loaded, cost.bytes_stored)
        assert counted.launches == cost.launches
    return after


@pytest.mark.parametrize("page, hkv, d, dtype", [
    (1, 1, 8, "float16"), (16, 8, 128, "bfloat16"), (3, 5, 80, "float16"), (17, 1, 64, "float32"),
    (16, 2, 128, "float8_e4m3fn"), (5, 3, 16, "uint8"), (33, 2, 576, "bfloat16"), (2, 1, 6, "float64"),
])
def test_pages_and_widths(machine, rng, page, hkv, d, dtype):
    """Of some pages none, of one several copies, and a page that is copied onto itself."""
    if machine.name == "gpu" and dtype in WIDTHS:
        pytest.skip("CuPy has no arrays of this type; the kernel sees widths alone")
    src, dst = pairs([0, 7, 7, 2, 4, 11], [12, 3, 1, 9, 4, 6])
    copied(machine, pool(rng, 13, page, hkv, d, dtype), src, dst)


def test_more_pairs_than_a_block_takes(machine, rng):
    """A block takes 256 pages of one word; of 300 pairs the second block has 44."""
    order = rng.permutation(700)
    copied(machine, pool(rng, 700, 1, 1, 8), *pairs(order[:300], order[300:600]))


@pytest.mark.parametrize("page, hkv, d", [(1, 1, 8), (16, 2, 64), (16, 8, 128)])
def test_to_another_pool_and_back(machine, rng, page, hkv, d):
    """As a swap does: the numbers of pages mean other pages there, so a number may be on both sides."""
    here, there = pool(rng, 9, page, hkv, d), pool(rng, 4, page, hkv, d)
    src, dst = pairs([8, 1, 3], [1, 3, 0])
    swapped = copied(machine, here, src, dst, there)
    back = copied(machine, swapped, dst, src, pool(rng, 9, page, hkv, d))
    for cache, original in zip(back, here):
        assert cache[src].tobytes() == original[src].tobytes()


def test_strided_pools(machine, rng):
    """K and V interleaved as (num_pages, 2, HKV, page_size, D), to pages backwards with gaps between rows."""
    k, v = pool(rng, 6, 16, 2, 64)
    interleaved = machine.empty((6, 2, 2, 16, 64), "float16")
    views = [interleaved[:, i].transpose(0, 2, 1, 3) for i in range(2)]
    wide = [machine.empty((8, 16, 3, 72), "float16") for _ in "kv"]
    out = [x[::-2, :, :2, :64] for x in wide]
    for view, x in zip(views, (k, v)):
        view[...] = machine.upload(x)
    src, dst = pairs([5, 0, 2], [0, 3, 1])
    before = [machine.download(x) for x in out]
    cuattn.copy_pages(*views, machine.upload(src), machine.upload(dst), k_out=out[0], v_out=out[1])
    machine.synchronize()
    after = [machine.download(x) for x in out]
    cuattn.compare.check_copy_pages(k, v, src, dst, *after, k_out=before[0], v_out=before[1]).raise_if_bad()
    for x in wide:  # nothing between the pages, the heads and the rows
        rest = machine.download(x)
        rest[::-2, :, :2, :64] = np.nan
        assert np.isnan(rest).all()
    cuattn.copy_pages(*views, machine.upload(src), machine.upload(np.array([1, 4, 3], np.int32)))
    machine.synchronize()
    for view, x in zip(views, (k, v)):
        assert machine.download(view)[[1, 4, 3]].tobytes() == x[src].tobytes()


@pytest.mark.parametrize("page, hkv, d", [(1, 1, 40), (16, 2, 40), (16, 8, 128)])
def test_nothing_outside_the_pages_is_written(machine, rng, page, hkv, d):
    margin, size = 512, 4 * page * hkv * d
    seas = [machine.empty((size + 2 * margin,), "float16") for _ in "kv"]
    out = [sea[margin : margin + size].reshape(4, page, hkv, d) for sea in seas]
    here = [np.ones((5, page, hkv, d), "float16") for _ in "kv"]
    arrays = [machine.upload(x) for x in (*here, *pairs([0, 4], [3, 0]))]
    cuattn.copy_pages(*arrays, k_out=out[0], v_out=out[1])
    machine.synchronize()
    for sea in seas:
        sea = machine.download(sea)
        pages = sea[margin:-margin].reshape(4, -1)
        assert np.isnan(sea[:margin]).all() and np.isnan(sea[-margin:]).all()
        assert np.isnan(pages[1:3]).all() and (pages[[0, 3]] == 1).all()


@pytest.mark.parametrize("page, hkv, d", [(1, 1, 8), (7, 3, 40), (16, 8, 128)])
def test_equal_bits_under_every_schedule(cpu, rng, page, hkv, d):
    here = [cpu.upload(x) for x in pool(rng, 9, page, hkv, d)]
    out = [cpu.empty((8, page, hkv, d), "float16") for _ in "kv"]
    lists = [cpu.upload(x) for x in pairs([0, 8, 3, 3, 5], [7, 0, 2, 5, 1])]
    p = cuattn.plan_copy_pages(*here, *lists, k_out=out[0], v_out=out[1])
    check_schedules(cpu, p.run, dict(zip(("k_out", "v_out"), out)))


def test_nothing_to_copy(machine, rng):
    none = pairs([], [])
    before = pool(rng, 3, 16, 1, 64)
    after = copied(machine, before, *none)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(before, after))
    copied(machine, pool(rng, 0, 16, 1, 64), *none)
    for hkv, d in ((0, 64), (2, 0)):
        copied(machine, pool(rng, 3, 16, hkv, d), *pairs([0, 1], [2, 1]))


def test_plain_arrays_are_written_in_place(rng):
    """Caches that do not live in the CPU machine are copied back; those that are only read are not."""
    caches, (src, dst) = pool(rng, 3, 16, 1, 64), pairs([2], [0])
    first = [x[2].tobytes() for x in caches]
    assert cuattn.copy_pages(*caches, src, dst) is None
    assert [x[0].tobytes() for x in caches] == first
    out = pool(rng, 2, 16, 1, 64)
    for x in caches:
        x.flags.writeable = False
    cuattn.copy_pages(*caches, src, pairs([1])[0], k_out=out[0], v_out=out[1])
    assert [x[1].tobytes() for x in out] == first


def test_a_fork_that_writes(machine, rng):
    """Two sequences share pages until one appends: it gets a copy of the page it writes to."""
    before, (src, dst) = pool(rng, 4, 4, 2, 16), pairs([1], [3])
    caches = [machine.upload(x) for x in before]
    cuattn.copy_pages(*caches, machine.upload(src), machine.upload(dst))
    new = [machine.upload(rng.standard_normal((1, 1, 2, 16)).astype("float16")) for _ in "kv"]
    table, lengths = (machine.upload(np.array(x, np.int32)) for x in ([[0, 3]], [6]))
    cuattn.append_kv(*new, *caches, table, lengths)
    machine.synchronize()
    for cache, x, row in zip(caches, before, new):
        after = machine.download(cache)
        assert after[:3].tobytes() == x[:3].tobytes() and (after[3, 2] == machine.download(row)[0, 0]).all()
        assert after[3, [0, 1, 3]].tobytes() == x[1, [0, 1, 3]].tobytes()


def test_page_numbers_past_65536(machine, rng):
    """Pages of 16 × 8 × 128 elements: page 131,072 starts at element 2³¹."""
    shape, sparse = (131080, 16, 8, 128), {"poison": False} if machine.name == "cpu" else {}
    make = machine.empty if sparse else machine.xp.empty
    caches = [make(shape, "float16", **sparse) for _ in "kv"]
    row = rng.standard_normal((2, 128)).astype("float16")
    for cache, x in zip(caches, row):
        cache[65536, 15, 7] = machine.upload(x)
    cuattn.copy_pages(*caches, *(machine.upload(x) for x in pairs([65536], [131079])))
    machine.synchronize()
    for cache, x in zip(caches, row):
        assert (machine.download(cache[131079, 15, 7]) == x).all()


# --- plans


@given(st.integers(0, 1000), st.integers(1, 300), st.integers(0, 9), st.integers(1, 80),
       st.sampled_from([1, 2, 4, 8]))
def test_every_word_has_one_thread(n, page, hkv, words, width):
    shape = PagesShape(n, page, hkv, words * 16 // width, width)
    launch, = ROWS["copy_pages"].plan(shape, CARD).launches
    c, (blocks, slices, _) = launch.constants, launch.grid
    assert c["PAIRS"] * c["LANES"] <= launch.block and n <= blocks * c["PAIRS"] < n + c["PAIRS"]
    share, size = c["LANES"] * c["STEPS"], page * hkv * words
    assert size <= slices * share < size + share
    cost = ROWS["copy_pages"].cost(shape, ROWS["copy_pages"].plan(shape, CARD))
    assert cost.bytes_stored == 2 * n * size * 16 and cost.launches == (n > 0 and hkv > 0)


def test_the_numbers_of_pages_are_a_sixteenth_of_what_is_read_at_most_in_pages_of_64_words():
    for page in (8, 16, 32, 256):
        shape = PagesShape(100, page, 8, 128, 2)
        cost = ROWS["copy_pages"].cost(shape, ROWS["copy_pages"].plan(shape, CARD))
        assert cost.bytes_loaded <= 17 / 16 * cost.bytes_stored


def test_a_page_beyond_any_grid_is_refused():
    with pytest.raises(Unsupported, match="expected at most 65535 slices of 16384 bytes a page, got 65536"):
        ROWS["copy_pages"].plan(PagesShape(1, 131072, 8, 128, 8), CARD)


def test_a_copy_within_a_pool_can_be_repeated(cpu, rng):
    p = cuattn.plan_copy_pages(*(cpu.upload(x) for x in (*pool(rng, 3, 16, 1, 64), *pairs([0], [1]))))
    assert repeatable(p) and not p.made


# --- the contract


@pytest.fixture
def call(rng):
    """copy_pages of a small pool with some arguments changed; must be refused in the words given."""

    def refused(match, **changes):
        k, v = pool(rng, 4, 16, 2, 64)
        src, dst = pairs([0, 1], [2, 3])
        with pytest.raises(cuattn.ContractError, match=match) as error:
            cuattn.copy_pages(**{"k_cache": k, "v_cache": v, "src": src, "dst": dst, **changes})
        assert "\n" not in str(error.value)

    return refused


@pytest.mark.parametrize("src, dst, words", [
    ([0, 4], [2, 3], r"src\[1\]: expected a page number from 0 to 3, got 4; mend the list"),
    ([0, 1], [2, -1], r"dst\[1\]: expected a page number from 0 to 3, got -1; mend the list"),
    ([0, 1, 0], [3, 2, 3], r"dst\[2\]: expected a page that is no other pair's destination, got 3, "
                           r"which is dst\[0\] as well; keep one of the pairs"),
    ([0, 2], [2, 3], r"src\[1\]: expected a page that is no other pair's destination, got 2, "
                     r"which is dst\[0\]; copy in two calls"),
    ([3, 2], [2, 3], r"src\[0\]: expected a page .*, got 3, which is dst\[1\]; copy in two calls"),
])
def test_lists_that_are_refused(call, src, dst, words):
    src, dst = pairs(src, dst)
    call(words, src=src, dst=dst)


@given(st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 6)), max_size=5), st.booleans())
def test_lists_are_refused_where_the_order_of_the_pairs_shows(chosen, within):
    src, dst = (np.array([pair[i] for pair in chosen], np.int32) for i in range(2))
    good = all(0 <= s < 6 and 0 <= d < 6 for s, d in chosen) and len(set(dst.tolist())) == len(dst)
    good &= not within or not any(s == d and i != j for i, s in enumerate(src) for j, d in enumerate(dst))
    try:
        contract.page_pairs(6, 6, src, dst, within)
        assert good
    except cuattn.ContractError:
        assert not good


def test_shapes_and_types_that_are_refused(call, rng):
    other = pool(rng, 4, 16, 2, 32)
    call("src: expected dtype int32, got int64", src=np.array([0, 1]))
    call(r"dst.shape: expected \(2,\) as src has, got \(3,\)", dst=pairs([1, 2, 3])[0])
    call(r"src: expected shape \(n\), got \(1, 2\)", src=pairs([[0, 1]])[0])
    call("v_cache.shape: expected .* as k_cache has", v_cache=other[1])
    whole = pool(rng, 4, 16, 2, 64, "int16")
    call("v_cache.dtype: expected float16 as k_cache has, got int16", v_cache=whole[1])
    call("k_out: expected a cache beside v_out, got None; give both or neither", v_out=other[1])
    call(r"k_out.shape without its pages: expected \(16, 2, 64\) as k_cache", k_out=other[0], v_out=other[1])
    call("v_out.shape: expected .* as k_out has, got ", k_out=pool(rng, 4, 16, 2, 64)[0],
         v_out=pool(rng, 3, 16, 2, 64)[1])
    call("k_out.dtype: expected float16 as k_cache has, got int16", k_out=whole[0], v_out=whole[1])
    for d, dtype, step in ((12, "float16", 8), (8, "uint8", 16), (1, "float64", 2)):
        k, v = pool(rng, 4, 16, 2, d, dtype)
        call(f"head dim: expected a multiple of {step}, rows of whole 16-byte words, got {d}; pad the cache",
             k_cache=k, v_cache=v)
    k, v = pool(rng, 4, 16, 2, 4, "complex128")
    call("k_cache: expected elements of 1, 2, 4 or 8 bytes, got complex128; view it as another type",
         k_cache=k, v_cache=v)
    k, v = pool(rng, 4, 0, 2, 64)
    call("k_cache: expected a page size of at least 1, got 0", k_cache=k, v_cache=v)


def test_pools_that_overlap_are_refused(cpu, call, rng):
    k, v, src, dst = (cpu.upload(x) for x in (*pool(rng, 8, 16, 2, 64), *pairs([0, 1], [2, 3])))
    inside = {"src": src, "dst": dst}
    call("k_out: expected memory apart from k_cache", k_cache=k[:4], v_cache=v[:4], k_out=k[3:7], v_out=v[4:],
         **inside)
    call("v_out: expected memory apart from v_cache", k_cache=k[:4], v_cache=v[:4], k_out=k[4:], v_out=v[:4],
         **inside)
    call("v_out: expected memory apart from k_out, got the same memory", k_cache=k[:4], v_cache=v[:4],
         k_out=k[4:], v_out=k[4:], **inside)
    call("k_cache: expected an array whose elements do not overlap", v_cache=v[:4], **inside,
         k_cache=np.lib.stride_tricks.as_strided(k, (4, 16, 2, 64), (0, 256, 128, 2)))


def test_another_kernel_is_not_taken(rng):
    k, v = pool(rng, 4, 16, 2, 64)
    with pytest.raises(ValueError, match="kernel: 'append' is not a pages kernel; choose one of copy_pages"):
        cuattn.plan_copy_pages(k, v, *pairs([0], [1]), kernel="append")


@pytest.mark.gpu
def test_values_on_a_gpu_are_checked_on_request(rng, monkeypatch):
    machine = cuattn.open_machine("gpu")
    arrays = [machine.upload(x) for x in (*pool(rng, 4, 16, 2, 64), *pairs([0, 1], [2, 4]))]
    monkeypatch.setenv("CUATTN_CHECK", "1")
    with pytest.raises(cuattn.ContractError, match=r"dst\[1\]: expected a page number from 0 to 3"):
        cuattn.copy_pages(*arrays)
