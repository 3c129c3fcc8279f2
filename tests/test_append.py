"""append_kv on every machine: page boundaries, empty sequences, strided pools, exact counts."""
from __future__ import annotations

import numpy as np
import pytest

import cuattn


def filled(rng, pages, page, hkv, d, dtype="float16"):
    return [rng.standard_normal((pages, page, hkv, d)).astype(dtype) for _ in range(2)]


@pytest.mark.parametrize("page, hkv, d, dtype, lengths, count", [
    (16, 2, 64, "float16", [0, 15, 16, 30], 1), (1, 1, 8, "bfloat16", [0, 3], 3),
    (3, 5, 128, "float16", [2, 3, 4], 7),
])
def test_append(machine, rng, randn, page, hkv, d, dtype, lengths, count):
    b, width = len(lengths), max(-(-(n + count) // page) for n in lengths)
    table = rng.permutation(b * width).astype(np.int32).reshape(b, width)
    before = filled(rng, b * width, page, hkv, d, dtype)
    k, v = randn(b, count, hkv, d, dtype=dtype), randn(b, count, hkv, d, dtype=dtype)
    lengths = np.array(lengths, np.int32)
    caches = [machine.upload(x) for x in before]
    p = cuattn.plan_append(machine.upload(k), machine.upload(v), *caches, machine.upload(table),
                           machine.upload(lengths))
    with machine.counting() as counted:
        p.run()
    machine.synchronize()
    after = [machine.download(x) for x in caches]
    cuattn.compare.check_append(k, v, *before, table, lengths, *after).raise_if_bad()
    if counted is not None:
        cost = p.cost()
        assert (counted.bytes_loaded, counted.bytes_stored) == (cost.bytes_loaded, cost.bytes_stored)


def test_nothing_to_append(machine, rng):
    before = filled(rng, 2, 16, 1, 64)
    caches = [machine.upload(x) for x in before]
    table, lengths = machine.upload(np.zeros((1, 2), np.int32)), machine.upload(np.array([5], np.int32))
    nothing = machine.upload(np.zeros((1, 0, 1, 64), "float16"))
    cuattn.append_kv(nothing, nothing, *caches, table, lengths)
    for x, y in zip(before, caches):
        assert (x == machine.download(y)).all()


def test_plain_arrays_are_written_in_place(rng, randn):
    """Caches that do not live in the CPU machine are copied back."""
    caches = filled(rng, 2, 16, 1, 64)
    k, v = randn(1, 1, 1, 64), randn(1, 1, 1, 64)
    cuattn.append_kv(k, v, *caches, np.array([[1, 0]], np.int32), np.array([17], np.int32))
    assert (caches[0][0, 1] == k[0, 0]).all() and (caches[1][0, 1] == v[0, 0]).all()


def test_no_room_is_refused(randn):
    k = randn(1, 4, 1, 64)
    caches = [np.zeros((2, 4, 1, 64), "float16") for _ in range(2)]
    with pytest.raises(cuattn.ContractError,
                       match=r"cache_seqlens\[0\]: expected 0 to 4, .*got 5; widen block_table"):
        cuattn.append_kv(k, k, *caches, np.array([[1, 0]], np.int32), np.array([5], np.int32))


def test_page_numbers_past_65536(machine, randn):
    """Pages of 16 × 8 × 128 elements: page 131,072 starts at element 2³¹."""
    shape, sparse = (131080, 16, 8, 128), {"poison": False} if machine.name == "cpu" else {}
    make = machine.empty if sparse else machine.xp.empty
    caches = [make(shape, "float16", **sparse) for _ in range(2)]
    table, lengths = np.array([[65536, 131079]], np.int32), np.array([15], np.int32)
    k, v = randn(1, 2, 8, 128), randn(1, 2, 8, 128)
    k_new, v_new, table, lengths = (machine.upload(x) for x in (k, v, table, lengths))
    cuattn.append_kv(k_new, v_new, *caches, table, lengths)
    machine.synchronize()
    for cache, rows in zip(caches, (k, v)):
        assert (machine.download(cache[65536, 15]) == rows[0, 0]).all()
        assert (machine.download(cache[131079, 0]) == rows[0, 1]).all()
