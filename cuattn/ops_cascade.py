"""Attention of a few new queries over a paged cache of which groups of sequences share keys."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuattn import contract, dispatch, pool
from cuattn.binding import Binding, Planned
from cuattn.kernels.shapes import CascadeShape, level_name
from cuattn.ops_decode import MOST_QUERIES

ARRAYS = {"offsets": "G + 1", "block_table": "G, max_pages", "seqlens": "G"}  # of a level


def plan_decode_cascade(q, k_cache, v_cache, levels: Sequence[tuple], *, causal: bool = True,
                        softmax_scale: float | None = None, kernel: str = "auto", constants: dict | None = None,
                        out=None) -> Planned:
    """Decode over a paged cache in levels, of which each group of sequences has the keys read once for it.

    As FlashInfer's `MultiLevelCascadeAttentionWrapper` (arXiv:2402.05099, Hydragen, is its idea). The keys of a
    sequence are those of its group in each level, one level behind the other. `run()` returns (o, lse) and
    follows offsets, tables and lengths as they change.

    Parameters
    ----------
    q, k_cache, v_cache, out
        As in `plan_decode`, of one type: no quantised caches.
    levels : sequence of (offsets, block_table, seqlens), int32 arrays
        offsets [G + 1] cuts the batch into G groups of neighbouring sequences, from 0 to B, of which some may be
        empty; block_table [G, max_pages] lists the pages of each group's keys in this level, seqlens [G] says how
        many they are, 0 included. Keys of a level need not fill its last page. In the last level, where G = B or
        offsets is None, each sequence is a group of its own: offsets is then not read.
    causal : bool
        Bottom-right aligned in the last level, which several queries need each sequence's own for, with their
        keys; those of other levels all queries see. Of one query nothing is hidden.
    softmax_scale, constants
        As in `plan_attention`; constants of a cascade.
    kernel
        A kernel of this kind; "auto" is cascade, which gives each sequence's own keys to paged_stream.

    Returns
    -------
    Planned
        Of o, like q, and lse, float32 [B, H, M]. A query that sees no key gives o = 0, lse = −inf. What a level
        adds is merged into q's type; a level without keys leaves it as it is, bit for bit.

    Raises
    ------
    ContractError, Unsupported, MachineUnavailable, CompileError
    """
    options = {"causal": causal, "softmax_scale": softmax_scale, "kernel": kernel, "constants": constants, "out": out}
    return _plan(q=q, k_cache=k_cache, v_cache=v_cache, **_named(q, levels), **options)


def decode_cascade(q, k_cache, v_cache, levels: Sequence[tuple], *, causal: bool = True,
                   softmax_scale: float | None = None, kernel: str = "auto", constants: dict | None = None,
                   out=None, return_lse: bool = False):
    """Attention of each sequence's last tokens over keys in levels. See `plan_decode_cascade`.

    Returns
    -------
    o, or (o, lse) with `return_lse`.
    """
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **_named(q, levels)}
    options = {"causal": causal, "softmax_scale": softmax_scale, "kernel": kernel}
    o, lse = dispatch.run(_plan, arrays, ("o", "lse"), options, constants, out)
    return (o, lse) if return_lse else o


def _named(q, levels) -> dict[str, Any]:
    """The levels' arrays by name, less the offsets that are not read."""
    contract.rank("q", q, "B, M, H, D")
    if not isinstance(levels, (tuple, list)) or not levels:
        raise contract.refuse("levels", "a sequence of (offsets, block_table, seqlens)", repr(levels)[:80],
                              "give at least one")
    named = {}
    for i, level in enumerate(levels):
        if not isinstance(level, (tuple, list)) or len(level) != len(ARRAYS):
            raise contract.refuse(f"levels[{i}]", "(offsets, block_table, seqlens)", repr(level)[:80], "give all three")
        given = dict(zip(ARRAYS, level))
        last = i == len(levels) - 1
        if given["offsets"] is None and not last:
            raise contract.refuse(level_name(i, "offsets"), f"an array ({ARRAYS['offsets']})", "None",
                                  "only the last level is of single sequences")
        for array, x in given.items():
            if x is not None:
                contract.rank(level_name(i, array), x, ARRAYS[array])
        if last and given["offsets"] is not None and tuple(given["offsets"].shape) == (q.shape[0] + 1,):
            given["offsets"] = None
        named |= {level_name(i, array): x for array, x in given.items() if x is not None}
    return named


def _plan(*, causal, softmax_scale, kernel, constants=None, out=None, **arrays) -> Planned:
    """`plan_decode_cascade` of arrays by name."""
    dispatch.check_options(causal, constants, kernel)
    row = dispatch.choose(kernel, "cascade", "cascade")
    pool.check_ranks_of_pool(k_cache=arrays["k_cache"], v_cache=arrays["v_cache"])
    binding = Binding(**arrays)
    t = binding.tensors
    (b, m, h, d), (_, page_size, hkv, _) = t["q"].shape, t["k_cache"].shape
    if not 1 <= m <= MOST_QUERIES:
        raise contract.refuse("q", f"1 to {MOST_QUERIES} queries a sequence, (B, M, H, D)", t["q"].shape,
                              "split the call")
    contract.dtype("q", t["q"], row.dtypes)
    contract.same("k_cache.dtype", t["k_cache"].dtype, "q", t["q"].dtype)
    contract.same("k_cache head dim", t["k_cache"].shape[3], "q", d)
    contract.heads(h, hkv)
    contract.head_dim(d, row)
    contract.grid(b, h)
    contract.vectors("q", t["q"])
    pool.check_pool(t)
    shared, own = _check_levels(binding, b)
    hides = bool(causal) and m > 1
    if hides and own is None:
        raise contract.refuse("levels", "a last one of each sequence's own keys, for several causal queries",
                              f"{len(shared)} of groups", "add it, or give causal=False")
    shape = CascadeShape(b, h, hkv, d, page_size, shared, own, t["q"].dtype, m, hides)
    inputs = dict(t)
    o = binding.output("o", (b, m, h, d), t["q"].dtype, out)
    dispatch.check_out(t["o"], inputs)
    lse = binding.output("lse", (b, h, m), "float32")
    names = [level_name(i, array) for i in range(len(shared)) for array in ("offsets", "seqlens")]
    names += [] if own is None else [level_name(len(shared), "seqlens")]
    return binding.planned(row, shape, constants, (o, lse), {"softmax_scale": contract.scale(softmax_scale, d)},
                           lengths=tuple(binding.source(name) for name in names))


def _check_levels(binding: Binding, b: int) -> tuple[tuple[tuple[int, int], ...], int | None]:
    """The groups and pages of each level that is shared, and the pages of each sequence's own."""
    t, shared, own, i = binding.tensors, [], None, 0
    while (table := level_name(i, "block_table")) in t:
        (groups, pages), offsets = t[table].shape, level_name(i, "offsets")
        pool.check_table(binding, "k_cache", table=table, lengths=level_name(i, "seqlens"))
        if offsets in t:
            _check_offsets(binding, offsets, groups, b)
            shared.append((groups, pages))
        else:
            contract.same(f"{table} rows", groups, "q", b)
            own = pages
        i += 1
    return tuple(shared), own


def _check_offsets(binding: Binding, name: str, groups: int, b: int) -> None:
    t = binding.tensors[name]
    contract.dtype(name, t, ("int32",))
    contract.contiguous(name, t)
    if not groups:
        raise contract.refuse(name, "at least one group", groups, "leave the level out")
    contract.same(f"{name}.shape", t.shape, "the rows of its block_table and one more", (groups + 1,))
    if dispatch.checks_values(binding):
        contract.cuts(name, binding.values(name), b)
