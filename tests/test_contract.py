"""What is refused, in one sentence each: argument, expected, got, what to do.

Nothing is computed silently wrong.
"""
from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn.kernels import ROWS


def refused(match: str, call, *args, kind=cuattn.ContractError, **options) -> None:
    with pytest.raises(kind, match=match) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)


@pytest.fixture
def qkv(randn):
    return randn(1, 4, 4, 64), randn(1, 6, 2, 64), randn(1, 6, 2, 64)


@pytest.fixture
def paged(randn):
    table, lengths = np.array([[1, 0]], np.int32), np.array([20], np.int32)
    return [randn(1, 1, 4, 64), randn(2, 16, 2, 64), randn(2, 16, 2, 64), table, lengths]


def test_ranks_and_shapes(qkv, randn):
    q, k, v = qkv
    refused(r"q: expected shape \(B, M, H, D\), got \(4, 4, 64\); reshape it", cuattn.attention, q[0], k, v)
    refused(r"k: expected shape \(B, N, HKV, D\)", cuattn.attention, q, k[0], v)
    refused("k.shape: expected .* as q", cuattn.attention, q, randn(1, 6, 2, 128), randn(1, 6, 2, 128))
    refused("k.shape: expected .* as q", cuattn.attention, q, randn(2, 6, 2, 64), randn(2, 6, 2, 64))
    refused("v.shape: expected .* as k has, got", cuattn.attention, q, k, v[:, :5])


@pytest.mark.parametrize("d", [4, 12, 111, 264])
def test_head_dims(randn, d):
    x = randn(1, 4, 2, d)
    refused(f"head dim: expected a multiple of 8 up to 256 for kernel 'flash', got {d}; pad",
            cuattn.attention, x, x, x)


def test_heads_that_do_not_divide(randn):
    q, k = randn(1, 4, 5, 64), randn(1, 4, 2, 64)
    refused("q: expected a number of heads that k's 2 divide, got 5; check", cuattn.attention, q, k, k)


def test_dtypes(qkv):
    q, k, v = qkv
    refused("q: expected dtype float16 or bfloat16, got float32; convert it first", cuattn.attention,
            *(x.astype("float32") for x in qkv))
    refused("k.dtype: expected float16 as q has, got bfloat16", cuattn.attention, q, k.astype("bfloat16"), v)


def test_what_is_no_array(qkv):
    q, k, v = qkv
    refused(r"k: expected an array \(B, N, HKV, D\), got list; make it", cuattn.attention, q, k.tolist(), v)
    refused("k: expected a NumPy array as q is, got Elsewhere; bring all arrays to one side",
            cuattn.attention, q, Elsewhere(k), v)
    refused("q: expected a NumPy, CuPy or CUDA PyTorch array, got Elsewhere; convert it", cuattn.attention,
            *(Elsewhere(x) for x in qkv))


class Elsewhere:
    """An array that lies where no kernel can reach it, as a PyTorch tensor on the host does."""

    def __init__(self, array):
        self.shape, self.is_cuda = array.shape, False


def test_layout(randn):
    """(B, H, N, D) given where (B, N, H, D) is meant: refused with both readings."""
    q = randn(1, 2, 300, 64)
    refused(r"layout: q of shape \(1, 2, 300, 64\) reads as \(B=1, M=2, H=300, D=64\), or as "
            r"\(B=1, H=2, M=300, D=64\); say layout='bshd' or layout='bhsd'", cuattn.attention, q, q, q)
    refused("layout: expected 'bshd' or 'bhsd', got 'sbhd'; choose one", cuattn.attention, q, q, q,
            layout="sbhd")
    assert cuattn.attention(q, q, q, layout="bhsd").shape == q.shape


@pytest.mark.parametrize("scale", [
    0, -1.0, float("nan"), float("inf"), "large", True, 1e-39, 3e38, 1e-50, 1e39,
])
def test_softmax_scale(qkv, scale):
    """Also what float64 can hold and float32, in which kernels use it, cannot."""
    refused("softmax_scale: expected a number from 7.9e-31 to 1.3e[+]30, got .*; leave it out",
            cuattn.attention, *qkv, softmax_scale=scale)


def test_strides(cpu, randn):
    wide = cpu.upload(randn(1, 6, 2, 65))
    refused("k: expected rows aligned to 16 bytes .*make a contiguous copy", cuattn.attention,
            cpu.upload(randn(1, 6, 2, 64)), wide[..., :64], wide[..., :64])
    refused("contiguous last dimension", cuattn.attention,
            *(cpu.upload(randn(1, 6, 64, 2)).swapaxes(2, 3),) * 3, kind=ValueError)


def test_out(qkv, randn):
    refused("out: expected .* as the result has", cuattn.attention, *qkv, out=randn(1, 5, 4, 64))
    refused("out: expected .* as the result has", cuattn.attention, *qkv,
            out=randn(1, 4, 4, 64, dtype="bfloat16"))
    refused("out: expected an array of q's kind, ndarray, got Elsewhere; give one beside q",
            cuattn.attention, *qkv, out=Elsewhere(qkv[0]))
    fixed = np.empty_like(qkv[0])
    fixed.flags.writeable = False
    refused("out: expected an array that may be written, got a read-only one", cuattn.attention, *qkv, out=fixed)
    out = np.empty_like(qkv[0])
    assert cuattn.attention(*qkv, out=out) is out
    np.testing.assert_array_equal(out, cuattn.attention(*qkv))


def test_out_lies_apart_from_the_inputs_and_from_itself(cpu, randn):
    q, k = cpu.upload(randn(1, 6, 2, 64)), cpu.upload(randn(1, 6, 2, 64))
    refused("out: expected memory apart from k, got memory that overlaps it; give it", cuattn.attention,
            q, k, k, out=k)
    refused("out: expected memory apart from q", cuattn.attention, q, k, k, out=q)
    one = cpu.empty((1, 1, 2, 64), "float16")
    refused("out: expected an array whose elements do not overlap, got strides", cuattn.attention, q, k, k,
            out=np.lib.stride_tricks.as_strided(one, (1, 6, 2, 64), (0, 0, 128, 2)))


def unstepped(cpu, shape, dtype="float16") -> np.ndarray:
    """An empty array of the machine whose strides are zero, as CuPy makes them."""
    return np.lib.stride_tricks.as_strided(cpu.empty(shape, dtype), shape, (0,) * len(shape))


@pytest.mark.parametrize("kernel", [name for name, row in ROWS.items() if row.family == "prefill"])
@pytest.mark.parametrize("b, m, n, h", [(0, 5, 6, 2), (1, 0, 6, 2), (1, 5, 0, 2), (1, 5, 6, 0)])
def test_an_array_without_elements_may_have_any_strides(cpu, kernel, b, m, n, h):
    """None of its elements overlap, are apart or out of line."""
    q, k, out = (cpu.empty((b, length, h, 64), "float16") if b * length * h else
                 unstepped(cpu, (b, length, h, 64)) for length in (m, n, m))
    q[...] = k[...] = 1
    o, lse = cuattn.attention(q, k, k, out=out, kernel=kernel, return_lse=True)
    assert o is out and o.shape == q.shape and not o.any() and np.isneginf(lse).all()


def test_a_paged_cache_without_elements_may_have_any_strides(cpu):
    cache, lengths = unstepped(cpu, (3, 16, 0, 64)), cpu.upload(np.array([0, 20], np.int32))
    table = cpu.upload(np.array([[0, 1], [1, 2]], np.int32))
    rows = unstepped(cpu, (2, 1, 0, 64))
    assert cuattn.decode(rows, cache, cache, table, lengths, out=rows.copy()).shape == rows.shape
    cuattn.append_kv(rows, rows, cache, cache, table, lengths)
    cache, rows = cpu.upload(np.ones((3, 16, 2, 64), "float16")), unstepped(cpu, (0, 1, 2, 64))
    table, lengths = unstepped(cpu, (0, 5), "int32"), unstepped(cpu, (0,), "int32")
    assert cuattn.decode(rows, cache, cache, table, lengths).shape == rows.shape
    cuattn.append_kv(rows, rows, cache, cache, table, lengths)
    assert (cache == 1).all()


def test_merged_states_without_elements_may_have_any_strides(cpu):
    o, lse = unstepped(cpu, (0, 3, 2, 64)), unstepped(cpu, (0, 2, 3), "float32")
    assert [x.shape for x in cuattn.merge_states(o, lse, o, lse)] == [o.shape, lse.shape]


def test_out_may_be_a_strided_view(cpu, randn):
    q, k, v = randn(1, 6, 2, 64), randn(1, 9, 2, 64), randn(1, 9, 2, 64)
    whole = cpu.empty((1, 6, 3, 2, 64), "float16")
    out = cuattn.attention(*(cpu.upload(x) for x in (q, k, v)), out=whole[:, :, 1])
    np.testing.assert_array_equal(out, cuattn.attention(q, k, v))
    assert np.isnan(whole[:, :, 0]).all() and np.isnan(whole[:, :, 2]).all()


def test_kernels_and_constants(qkv):
    ours = ", ".join(sorted(name for name, row in ROWS.items() if row.family == "prefill"))
    refused(f"kernel: 'flahs' is not a prefill kernel; choose one of {ours}", cuattn.attention, *qkv,
            kernel="flahs", kind=ValueError)
    refused("kernel: 'paged' is not a prefill kernel", cuattn.attention, *qkv, kernel="paged",
            kind=ValueError)
    refused("constants: 'block_k' is not a tunable of this kernel", cuattn.attention, *qkv,
            constants={"block_k": 3}, kind=cuattn.Unsupported)
    refused(r"block_m must be a multiple of 16·warps", cuattn.attention, *qkv, constants={"block_m": 40},
            kind=cuattn.Unsupported)
    cuattn.attention(*qkv, constants={"block_m": 64})
    for odd in (64.0, True, "64", [64], 0, -64):
        refused("block_m", cuattn.attention, *qkv, constants={"block_m": odd}, kind=cuattn.Unsupported)
    refused("need .* bytes of shared memory, cpu grants", cuattn.attention, *qkv, constants={"block_n": 1024},
            kind=cuattn.Unsupported)


def test_options_of_another_type(qkv):
    refused("causal: expected True or False, got 'no'; name one", cuattn.attention, *qkv, causal="no")
    refused("causal: expected True or False, got ndarray", cuattn.attention, *qkv, causal=np.ones((2, 2)))
    refused("constants: expected a dict of tunables, got list", cuattn.attention, *qkv, constants=[1])
    refused("kernel: expected a kernel's name, got list; name one", cuattn.attention, *qkv, kernel=["flash"])


def test_page_tables_and_lengths(paged):
    q, k, v, table, lengths = paged
    refused(r"cache_seqlens\[0\]: expected 0 to 32, what 2 pages of 16 hold, got 33", cuattn.decode,
            q, k, v, table, lengths + 13)
    refused(r"cache_seqlens\[0\]: expected 0 to 32, .*got -1", cuattn.decode, q, k, v, table, lengths * 0 - 1)
    bad = np.array([[1, 2]], np.int32)
    refused(r"block_table\[0, 1\]: expected a page number below 2, got 2; mend the table", cuattn.decode,
            q, k, v, bad, lengths)
    bad = np.array([[-1, 0]], np.int32)
    refused(r"block_table\[0, 0\]: expected a page number below 2, got -1", cuattn.decode,
            q, k, v, bad, lengths)
    unused = np.array([[1, 0, 2147480000, -1]], np.int32)
    np.testing.assert_array_equal(cuattn.decode(q, k, v, unused, lengths), cuattn.decode(*paged))


def test_lengths_near_the_end_of_int32(paged, randn):
    """A length whose sum with the new rows wraps is still too long."""
    _, k, v, table, _ = paged
    row = randn(1, 1, 2, 64)
    refused(r"cache_seqlens\[0\]: expected 0 to 31, .*got 2147483647", cuattn.append_kv,
            row, row, k, v, table, np.array([2**31 - 1], np.int32))


def test_two_sequences_may_not_append_to_one_page(paged, randn):
    _, k, v, _, _ = paged
    rows, table = randn(2, 1, 2, 64), np.array([[0], [0]], np.int32)
    refused(r"block_table\[1, 0\]: expected a page that no other sequence appends to, got 0, which sequence 0 "
            "appends to as well; copy the page first", cuattn.append_kv,
            rows, rows, k, v, table, np.zeros(2, np.int32))


@pytest.mark.parametrize("d", [4, 12, 111, 264])
def test_head_dims_of_the_paged_operations(randn, d):
    table, lengths = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    cache, row = randn(1, 16, 2, d), randn(1, 1, 2, d)
    refused(f"head dim: expected a multiple of 8 up to 256 for kernel 'paged', got {d}", cuattn.decode,
            row, cache, cache, table, lengths)
    refused(f"head dim: expected a multiple of 8 up to 256 for kernel 'append', got {d}", cuattn.append_kv,
            row, row, cache, cache, table, lengths)


def test_head_counts_of_decode(paged, randn):
    refused("q: expected a number of heads that k's 2 divide, got 5", cuattn.decode,
            randn(1, 1, 5, 64), *paged[1:])


def test_cost_before_the_first_run(paged):
    """It knows the caller's lengths, not the copy that is not made yet."""
    p = cuattn.plan_decode(*paged)
    before = p.cost()
    p.run()
    assert before == p.cost() and before.flops == 4 * 4 * 20 * 64


def test_paged_shapes_and_dtypes(paged, randn):
    q, k, v, table, lengths = paged
    for m in (0, 9):
        refused(rf"q: expected 1 to 8 queries a sequence, \(B, M, H, D\), got \(1, {m}, 4, 64\); use attention_",
                cuattn.decode, randn(1, m, 4, 64), k, v, table, lengths)
    refused("block_table: expected dtype int32, got int64; convert it first", cuattn.decode,
            q, k, v, table.astype("int64"), lengths)
    refused("cache_seqlens: expected dtype int32, got int64", cuattn.decode,
            q, k, v, table, lengths.astype("int64"))
    refused("block_table rows: expected 1 as q has, got 2", cuattn.decode,
            q, k, v, np.vstack([table, table]), lengths)
    refused("v_cache.shape: expected .* as k_cache has", cuattn.decode, q, k, v[:, :8], table, lengths)
    refused("k_cache head dim: expected 64 as q has, got 128", cuattn.decode,
            q, randn(2, 16, 2, 128), randn(2, 16, 2, 128), table, lengths)
    refused("cache_seqlens.shape: expected", cuattn.decode, q, k, v, table, np.array([20, 3], np.int32))


@pytest.mark.gpu
def test_values_on_a_gpu_are_checked_on_request(paged, monkeypatch):
    machine = cuattn.open_machine("gpu")
    paged[4] = paged[4] + np.int32(13)
    on_gpu = [machine.upload(x) for x in paged]
    monkeypatch.setenv("CUATTN_CHECK", "1")
    refused(r"cache_seqlens\[0\]: expected 0 to 32", cuattn.decode, *on_gpu)


@pytest.mark.gpu
def test_arrays_of_two_sides(qkv):
    machine = cuattn.open_machine("gpu")
    q, k, v = qkv
    refused("k: expected a NumPy array as q is, got ndarray; bring all arrays to one side",
            cuattn.attention, q, machine.upload(k), v)


@pytest.mark.gpu
def test_a_repeated_call_sees_its_own_arrays(qkv):
    """Calls of one signature share their launches, not their results."""
    machine = cuattn.open_machine("gpu")
    first = [machine.upload(x) for x in qkv]
    second = [machine.upload(x[:, ::-1].copy()) for x in qkv]
    outs = [cuattn.attention(*arrays) for arrays in (first, second, first)]
    machine.synchronize()
    a, b, c = (machine.download(o) for o in outs)
    np.testing.assert_array_equal(a, c)
    np.testing.assert_allclose(a[:, ::-1].astype(float), b.astype(float), atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [20, 2000])
def test_a_repeated_decode_sees_its_own_cache(randn, tokens):
    """With and without partial results in between."""
    machine = cuattn.open_machine("gpu")
    pages = -(-tokens // 16)
    table, lengths = np.arange(pages, dtype=np.int32)[None], np.array([tokens], np.int32)
    for _ in range(3):
        arrays = [randn(1, 1, 4, 64), randn(pages, 16, 2, 64), randn(pages, 16, 2, 64), table, lengths]
        o, lse = cuattn.decode(*(machine.upload(x) for x in arrays), return_lse=True)
        machine.synchronize()
        cuattn.compare.check_decode(*arrays, machine.download(o), machine.download(lse)).raise_if_bad()


@pytest.mark.gpu
def test_options_between_like_calls(qkv):
    """Arrays alike, options not: nothing of the one call serves the other."""
    machine = cuattn.open_machine("gpu")
    arrays = [machine.upload(x) for x in qkv]
    causal, scaled, other = {"causal": True}, {"softmax_scale": 0.5}, {"kernel": "standard"}
    for options in ({}, causal, scaled, other, causal, {}):
        o, lse = cuattn.attention(*arrays, return_lse=True, **options)
        machine.synchronize()
        judged = {name: value for name, value in options.items() if name != "kernel"}
        cuattn.compare.check_attention(*qkv, machine.download(o), machine.download(lse), rounding="weights",
                                       **judged).raise_if_bad()


@pytest.mark.gpu
def test_pytorch_tensors_that_want_gradients(qkv):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensors = [torch.from_numpy(x).cuda().requires_grad_() for x in qkv]
    refused("q: expected a tensor without gradient, .*detach it", cuattn.attention, *tensors)
    with torch.no_grad():
        assert cuattn.attention(*tensors).is_cuda


@pytest.mark.gpu
def test_pytorch_tensors_and_streams(qkv):
    """Results come as tensors, in order on PyTorch's current stream."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensors = [torch.from_numpy(x).cuda() for x in qkv]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        o = cuattn.attention(*(2 * t for t in tensors), softmax_scale=0.03125)
        doubled = 2 * o
    stream.synchronize()
    expected, _ = cuattn.reference.attention(2 * qkv[0], 2 * qkv[1], 2 * qkv[2], softmax_scale=0.03125)
    np.testing.assert_allclose(doubled.cpu().numpy().astype(float), 2 * expected, atol=2e-2)
