"""Attention of a few new queries over a paged cache, and over one of latents."""
from __future__ import annotations

from cuattn import contract, dispatch, pool
from cuattn.binding import Binding, Planned
from cuattn.kernels import mla
from cuattn.kernels.shapes import DecodeShape

MOST_QUERIES = 8  # a sequence that decode takes


def plan_decode(q, k_cache, v_cache, block_table, cache_seqlens, *, causal: bool = True,
                softmax_scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
                softcap: float = 0.0, sinks=None, k_scale=None, v_scale=None, kv_dtype: str | None = None,
                kernel: str = "auto", constants: dict | None = None, out=None) -> Planned:
    """Decode over a paged cache, bound to its arrays.

    `run()` returns (o, lse) and follows lengths as they grow.

    Parameters
    ----------
    q : array, [B, M, H, D]
        The last M tokens of each sequence, whose keys the cache holds already: 1, or up to 8 that speculative
        decoding verifies together; float16 or bfloat16.
    k_cache, v_cache : array, [num_pages, page_size, HKV, D]
        Any page size; views of an interleaved pool are taken as they are. Of q's dtype or quantised, float8_e4m3fn
        (`ml_dtypes`, PyTorch) or int8: then the head dim is a multiple of 32.
    block_table : int32 array, [B, max_pages]
        Pages of each sequence, in order; entries behind its last page may hold anything.
    cache_seqlens : int32 array, [B]
        Keys of each sequence, those of its queries included. Values on a GPU are checked with CUATTN_CHECK=1
        only.
    causal : bool
        Bottom-right aligned: query m sees keys up to m + N − M, of N, and so none where a sequence is shorter
        than M − m. False shows all queries all keys, as flash-attention's `flash_attn_with_kvcache` does
        unless it is told otherwise; of one query nothing is hidden either way.
    window_size : (int, int)
        As in `plan_attention`. Keys before the first query's window are not read.
    softcap, sinks
        As in `plan_attention`.
    k_scale, v_scale : float, or float32 array [HKV] or [num_pages, HKV], optional
        What each number of a quantised cache is times, 1 by default: of the whole cache, of a KV head, or of
        its part in a page.
    kv_dtype : {"float8_e4m3", "int8"}, optional
        What a cache given as uint8 holds, as CuPy has no e4m3.
    softmax_scale, kernel, constants, out
        As in `plan_attention`; decode kernels. "auto" is paged_stream on a GPU, whose parts of a sequence
        depend on the lengths of all, and elsewhere or with constants paged: give it `splits` where a row's
        bits must not depend on the batch. A quantised cache paged_stream takes alone. A call of paged_stream
        that is not planned beforehand clears its counters first.

    Returns
    -------
    Planned
        Of o, like q, and lse, float32 [B, H, M]. A query that sees no key gives o = 0, lse = −inf, or its
        head's sink.

    Raises
    ------
    ContractError, Unsupported, MachineUnavailable, CompileError
    """
    dispatch.check_options(causal, constants, kernel)
    row = dispatch.choose(kernel, "decode", dispatch.DECODE[-1])
    contract.rank("q", q, "B, M, H, D")
    pool.check_ranks(k_cache, v_cache, block_table)
    numbers, scales = contract.kv_scales(k_scale, v_scale)
    binding = dispatch.bound(sinks, q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table,
                             cache_seqlens=cache_seqlens, **scales)
    t = binding.tensors
    (b, m, h, d), (_, page_size, hkv, _) = t["q"].shape, t["k_cache"].shape
    if not 1 <= m <= MOST_QUERIES:
        raise contract.refuse("q", f"1 to {MOST_QUERIES} queries a sequence, (B, M, H, D)", tuple(q.shape),
                              "use attention_varlen for more")
    contract.dtype("q", t["q"], row.dtypes)
    stored, kind = pool.quantised(t, "q", kv_dtype, numbers)
    pages = t["block_table"].shape[1]
    causal, window = contract.window(window_size, bool(causal), m, pages * page_size)
    scalars = {"softmax_scale": contract.scale(softmax_scale, d), "softcap": contract.softcap(softcap), **numbers}
    shape = DecodeShape(b, h, hkv, d, page_size, pages, t["q"].dtype, stored, kind, m, causal and m > 1, window,
                        scalars["softcap"] > 0, sinks is not None)
    names = dispatch.offering(dispatch.DECODE, shape.features) if kernel == "auto" else (row.name,)
    row = dispatch.choose(kernel, "decode", names[-1])
    contract.same("k_cache head dim", t["k_cache"].shape[3], "q", d)
    contract.same("block_table rows", t["block_table"].shape[0], "q", b)
    contract.heads(h, hkv)
    contract.head_dim(d, row)
    if sinks is not None:
        contract.sinks(t["sinks"], h)
    contract.grid(b, h)
    dispatch.check_features(row, h, hkv, features=shape.features)
    contract.vectors("q", t["q"])
    pool.check_cache(binding)
    inputs = dict(t)
    o = binding.output("o", (b, m, h, d), t["q"].dtype, out)
    dispatch.check_out(t["o"], inputs)
    lse = binding.output("lse", (b, h, m), "float32")
    return dispatch.planned_by_first((row.name,) if constants else names, binding, shape, constants, (o, lse), scalars,
                                     lengths=binding.source("cache_seqlens"))


def decode(q, k_cache, v_cache, block_table, cache_seqlens, *, causal: bool = True,
           softmax_scale: float | None = None, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
           sinks=None, k_scale=None, v_scale=None, kv_dtype: str | None = None, kernel: str = "auto",
           constants: dict | None = None, out=None, return_lse: bool = False):
    """Attention of each sequence's last tokens over a paged cache. See `plan_decode`.

    Returns
    -------
    o, or (o, lse) with `return_lse`.
    """
    numbers, scales = contract.kv_scales(k_scale, v_scale)
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table,
              "cache_seqlens": cache_seqlens, **scales, **({} if sinks is None else {"sinks": sinks})}
    options = {"causal": causal, "softmax_scale": softmax_scale, "window_size": window_size,
               "softcap": softcap, "kernel": kernel, "kv_dtype": kv_dtype, **numbers}
    o, lse = dispatch.run(plan_decode, arrays, ("o", "lse"), options, constants, out)
    return (o, lse) if return_lse else o


def plan_decode_mla(q, kv_cache, block_table, cache_seqlens, *, softmax_scale: float, kernel: str = "auto",
                    constants: dict | None = None, out=None) -> Planned:
    """Decode of multi-head latent attention over a paged cache, bound to its arrays.

    All query heads attend to one row a key, whose first 512 elements are its value too (DeepSeek-V2,
    arXiv:2405.04434, section 2.1, with the projections absorbed): what FlashMLA's `flash_mla_with_kvcache`
    and FlashInfer's `BatchMLAPagedAttentionWrapper` compute. `run()` returns (o, lse) and follows lengths as
    they grow.

    Parameters
    ----------
    q : array, [B, 1, H, 576]
        One new query a sequence, 512 elements for the latent and 64 with RoPE; float16 or bfloat16. Any H: 16
        to 128 are usual.
    kv_cache : array, [num_pages, page_size, 1, 576]
        Latents of 512 elements and 64 rotated ones behind them. Any page size.
    block_table, cache_seqlens, out
        As in `plan_decode`.
    softmax_scale : float
        The model's, of the head dim before absorption: 1/sqrt(192) for DeepSeek-V2 and -V3 without the factor
        of a longer context. It does not follow from 576, so there is no default.
    kernel, constants
        A kernel of this kind; "auto" is mla_hopper on sm_90a, else, and where constants are given, mla. It is mla
        too for pages of 64, 128, … keys in a cache whose strides are not all positive, which bulk copies do not
        reach. Their parts of a sequence depend on the lengths of all.

    Returns
    -------
    Planned
        Of o, q's dtype [B, 1, H, 512], and lse, float32 [B, H, 1], natural.

    Raises
    ------
    ContractError, Unsupported, MachineUnavailable, CompileError
    """
    dispatch.check_options(False, constants, kernel)
    row = dispatch.choose(kernel, "mla", dispatch.MLA[-1])
    contract.rank("q", q, "B, 1, H, D")
    contract.rank("kv_cache", kv_cache, "num_pages, page_size, 1, D")
    contract.rank("block_table", block_table, "B, max_pages")
    binding = Binding(q=q, kv_cache=kv_cache, block_table=block_table, cache_seqlens=cache_seqlens)
    t = binding.tensors
    b, m, h, d = t["q"].shape
    page_size, heads = t["kv_cache"].shape[1:3]
    if m != 1:
        raise contract.refuse("q", "one query a sequence, (B, 1, H, D)", tuple(q.shape), "split the call")
    if d != mla.WIDTH:
        parts = f"{mla.LATENT} of the latent and {mla.ROPE} of RoPE"
        raise contract.refuse("q", f"a head dim of {mla.WIDTH}, {parts}", d,
                              "absorb the key's projection into q first")
    if heads != 1:
        raise contract.refuse("kv_cache", "one latent head for all of q's, (num_pages, page_size, 1, D)",
                              heads, "use decode for several")
    contract.dtype("q", t["q"], row.dtypes)
    contract.same("kv_cache.dtype", t["kv_cache"].dtype, "q", t["q"].dtype)
    contract.same("kv_cache head dim", t["kv_cache"].shape[3], "q", d)
    contract.same("block_table rows", t["block_table"].shape[0], "q", b)
    contract.grid(b, h)
    contract.page_size("kv_cache", t["kv_cache"])
    for name in ("q", "kv_cache"):
        contract.vectors(name, t[name])
    pool.check_table(binding, "kv_cache")
    scalars = {"softmax_scale": contract.scale(softmax_scale, None)}
    inputs = dict(t)
    o = binding.output("o", (b, 1, h, mla.LATENT), t["q"].dtype, out)
    dispatch.check_out(t["o"], inputs)
    lse = binding.output("lse", (b, h, 1), "float32")
    shape = DecodeShape(b, h, 1, d, page_size, t["block_table"].shape[1], t["q"].dtype)
    names = dispatch.MLA if kernel == "auto" and not constants else (row.name,)
    return dispatch.planned_by_first(names, binding, shape, constants, (o, lse), scalars,
                                     lengths=binding.source("cache_seqlens"))


def decode_mla(q, kv_cache, block_table, cache_seqlens, *, softmax_scale: float, kernel: str = "auto",
               constants: dict | None = None, out=None, return_lse: bool = False):
    """Latent attention of one new query a sequence over a paged cache. See `plan_decode_mla`.

    Returns
    -------
    o, or (o, lse) with `return_lse`.
    """
    arrays = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "cache_seqlens": cache_seqlens}
    options = {"softmax_scale": softmax_scale, "kernel": kernel}
    o, lse = dispatch.run(plan_decode_mla, arrays, ("o", "lse"), options, constants, out)
    return (o, lse) if return_lse else o
