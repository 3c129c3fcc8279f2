"""cascade: decode of sequences that share keys (decode/cascade.cu), each one's own by paged_stream."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cuattn.kernels import paged_stream, shares
from cuattn.kernels.base import (
    ELEMENT_BYTES,
    MAX_THREADS,
    MMA_ROWS,
    WARP,
    Cost,
    Launch,
    Plan,
    Row,
    Unsupported,
    ceil_div,
    check_grid,
    resolve,
    round_up,
)
from cuattn.kernels.shapes import CascadeShape, level_name

FILE = "decode/cascade.cu"
MERGERS, ROOM = 4, 8  # warps of a merging block, each with a row; parts on their way to one; the kernel's own
# (rows, keys, warps): of many rows a warp's products take long enough for one block a multiprocessor.
MANY, FEW = ((128, 64, 8), (128, 32, 8)), ((64, 64, 4), (64, 32, 4), (32, 32, 2), (16, 32, 1))


@dataclass(frozen=True)
class CascadePlan(Plan):
    """With the plan of the sequences' own keys, whose launches come first."""

    own: Plan | None = None


@dataclass(frozen=True)
class Part:
    """What a share does of an item: of a group and one of its tiles of rows, `tiles` tiles of keys from one on."""

    group: int
    row_tile: int
    tile: int
    tiles: int


def smem_bytes(d: int, rows: int, keys: int, stages: int) -> int:
    """sizeof(Smem): Q, and the ring of K and V."""
    width = round_up(d, MMA_ROWS)
    return 2 * width * rows + stages * 2 * round_up(2 * width * keys, 128)


def _shape_of_block(shape: CascadeShape, device, chosen) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages): the tile of many rows where groups have them, then the largest that fits.

    A warp holds 16 rows of S and O in registers, which beyond a width of 128 have no room for 64 keys.
    """
    stages, most_keys = chosen["stages"], 64 if shape.d <= 128 else 32
    mean = shape.b * shape.rows / max(min((groups for groups, _ in shape.levels), default=1), 1)
    for rows, keys, warps in (*MANY, *FEW) if mean > FEW[0][0] else FEW:
        rows, keys, warps = chosen["rows"] or rows, chosen["keys"] or min(keys, most_keys), chosen["warps"] or warps
        if smem_bytes(shape.d, rows, keys, stages) <= device.smem_per_block:
            break
    else:
        raise Unsupported(f"cascade: {rows} rows and {stages} stages of {keys} keys at head dim {shape.d} do not fit "
                          f"the {device.smem_per_block} bytes of shared memory of {device.name}; choose fewer")
    if stages < 2 or WARP * warps > MAX_THREADS:
        raise Unsupported(f"cascade: needs 1 to 32 warps and at least 2 stages, got warps={warps}, "
                          f"stages={stages}; change them")
    if rows % (MMA_ROWS * warps) or keys % MMA_ROWS or keys % warps or keys > WARP * warps:
        raise Unsupported("cascade: rows must be a multiple of 16·warps, and keys of 16 and of warps and at most "
                          f"32·warps, got rows={rows}, keys={keys}, warps={warps}; change them")
    return rows, keys, warps, stages


def plan(shape: CascadeShape, device, overrides=None) -> CascadePlan:
    """Each sequence's own keys first; then for each level its parts, and their merge with what is there."""
    chosen = resolve(ROW.constants, overrides)
    own = None if shape.own is None else paged_stream.plan(shape.decode, device)
    rows, keys, warps, stages = _shape_of_block(shape, device, chosen)
    smem = smem_bytes(shape.d, rows, keys, stages)
    per_sm = 2 if rows <= FEW[0][0] and 2 * (smem + 1024) <= device.smem_per_sm else 1
    most = chosen["shares"] or max(per_sm * device.sms // max(shape.hkv, 1), 1)
    check_grid("cascade", "shares", most)
    check_grid("cascade", "KV heads", shape.hkv)
    compiled = {"BLOCK_M": rows, "KEYS": keys, "WARPS": warps, "STAGES": stages, "HEAD_DIM": shape.d,
                "GROUP": max(shape.group, 1), "M": shape.m, "PAGE_SIZE": shape.page_size, "Element": shape.dtype,
                "BLOCKS_PER_SM": per_sm, "SMEM_BYTES": smem}
    all_rows, launches, places = shape.b * shape.rows, list(own.launches) if own else [], 0
    for groups, pages in shape.levels:
        items = ceil_div(all_rows, rows) + groups
        shares.check_list("cascade", items * max(ceil_div(pages * shape.page_size, keys), 1), most,
                          f"tiles of {rows} rows × {keys} keys", "split the call")
        launches += [
            Launch(FILE, "cascade", (shape.hkv, most if all_rows else 0, 1), WARP * warps, smem, compiled),
            Launch(FILE, "cascade_merge", (ceil_div(all_rows, MERGERS), shape.hkv, 1), WARP * MERGERS,
                   MERGERS * ROOM * 16 * WARP, compiled),
        ]
        places = max(places, most + items)
    scratch = {**(own.scratch if own else {}),
               "level_part": ((places * shape.hkv, rows, shape.d), "float32"),
               "level_part_lse": ((places * shape.hkv, rows), "float32")}
    tunables = {"rows": rows, "keys": keys, "warps": warps, "stages": stages, "shares": most}
    return CascadePlan(tuple(launches), tunables, scratch, zeroed=own.zeroed if own else frozenset(), own=own)


@dataclass(frozen=True)
class _Level:
    """A level's groups, in the kernel's units, and the list that they make."""

    groups: list[tuple[int, int]]  # (rows, keys)
    rows: int  # of a tile
    keys: int
    most: int  # shares

    def row_tiles(self, g: int) -> int:
        return ceil_div(self.groups[g][0], self.rows)

    def key_tiles(self, g: int) -> int:
        return max(ceil_div(self.groups[g][1], self.keys), 1)

    def rows_of(self, part: Part) -> int:
        return min(self.groups[part.group][0] - part.row_tile * self.rows, self.rows)

    def keys_of(self, part: Part) -> int:
        first = part.tile * self.keys
        return max(min(self.groups[part.group][1] - first, part.tiles * self.keys), 0)

    def parts(self) -> Iterator[list[Part]]:
        """Of each share that has tiles."""
        items = [(g, row_tile) for g in range(len(self.groups)) for row_tile in range(self.row_tiles(g))]
        total = sum(self.key_tiles(g) for g, _ in items)
        count, at, tile = min(self.most, total), 0, 0
        for share in range(count):
            left, found = (share + 1) * total // count - share * total // count, []
            while left:
                g, row_tile = items[at]
                tiles = min(self.key_tiles(g) - tile, left)
                found.append(Part(g, row_tile, tile, tiles))
                left, tile = left - tiles, tile + tiles
                if tile == self.key_tiles(g):
                    at, tile = at + 1, 0
            yield found


def _look(groups: int, found: int) -> int:
    """Bytes of groups that a warp reads which sums them all and then finds one, 32 at a time."""
    return 12 * (groups + min(groups, (found // WARP + 1) * WARP))


def _level_cost(shape: CascadeShape, plan: Plan, level: _Level, carry: bool) -> tuple[int, int]:
    """(loaded, stored) by a level's two launches, of one KV head."""
    size, warps, groups = ELEMENT_BYTES[shape.dtype], plan.constants["warps"], len(level.groups)
    loaded, stored, parts_of = 0, 0, {}
    shares_ = list(level.parts())
    loaded += 12 * warps * groups * (level.most - len(shares_))
    for parts in shares_:
        first, last = parts[0].group, parts[-1].group
        loaded += warps * (_look(groups, first) + WARP * 12 * (last - first))
        for part in parts:
            rows = level.rows_of(part)
            loaded += rows * shape.d * size + level.keys_of(part) * (2 * shape.d * size + 4)
            stored += rows * (4 * shape.d + 4)
            parts_of[part.group, part.row_tile] = parts_of.get((part.group, part.row_tile), 0) + 1
    for (g, row_tile), count in parts_of.items():
        rows, keys = level.rows_of(Part(g, row_tile, 0, 0)), level.groups[g][1]
        empty = carry and not keys  # which shows when a lane has merged its first columns
        columns = min(shape.d, 4 * WARP) if empty else shape.d
        loaded += rows * (_look(groups, g) + 4 * carry + count * 4 * (ceil_div(columns, 4 * WARP) + columns))
        stored += 0 if empty else rows * (shape.d * size + 4)
    return loaded, stored


def _levels(shape: CascadeShape, plan: Plan, lengths) -> Iterator[tuple[list[int], list[int], _Level]]:
    """(offsets, keys, the list they make) of each level that is shared."""
    constants = plan.constants
    for i in range(len(shape.levels) if shape.b * shape.rows else 0):
        offsets, keys = lengths[2 * i : 2 * i + 2]
        rows = [(end - begin) * shape.rows for begin, end in pairwise(offsets)]
        level = _Level(list(zip(rows, keys)), constants["rows"], constants["keys"], constants["shares"])
        yield offsets, keys, level


def cost(shape: CascadeShape, plan: CascadePlan, lengths) -> Cost:
    """K and V of a group once for each tile of its rows; Q, O and LSE of each part; every part read once more.

    `lengths`: of each level its offsets and its groups' keys, then the keys of each sequence's own.
    """
    loaded, stored, flops, held = 0, 0, 0, [0] * shape.b  # `held`: queries whose O is not empty yet
    if plan.own:
        mine = paged_stream.cost(shape.decode, plan.own, lengths[-1])
        loaded, stored, flops = mine.bytes_loaded, mine.bytes_stored, mine.flops
        held = [min(shape.m, n) if shape.causal else shape.m * (n > 0) for n in lengths[-1]]
    row = shape.h * shape.d * ELEMENT_BYTES[shape.dtype]
    for i, (offsets, keys, level) in enumerate(_levels(shape, plan, lengths)):
        more_loaded, more_stored = _level_cost(shape, plan, level, i > 0 or plan.own is not None)
        loaded, stored = loaded + shape.hkv * more_loaded, stored + shape.hkv * more_stored
        for n, (begin, end) in zip(keys, pairwise(offsets)):
            flops += 4 * shape.h * shape.d * shape.m * (end - begin) * n
            if n:
                loaded += sum(held[begin:end]) * row
                held[begin:end] = [shape.m] * (end - begin)
    return Cost(flops, loaded, stored, plan.launch_count, plan.scratch_bytes)


def arguments(shape: CascadeShape, plan: CascadePlan, t) -> list:
    bound, arrays = [], ("offsets", "block_table", "seqlens")
    if plan.own:
        table, seqlens = (t[level_name(len(shape.levels), array)] for array in arrays[1:])
        mine = {"block_table": table, "cache_seqlens": seqlens, "softcap": 0.0}
        bound += paged_stream.arguments(shape.decode, plan.own, {**t, **mine})
    left = [("part", t["level_part"]), ("part_lse", t["level_part_lse"])]
    for i, (groups, _) in enumerate(shape.levels):
        offsets, table, seqlens = ((array, t[level_name(i, array)]) for array in arrays)
        count = ("GROUPS", np.int32(groups))
        bound.append([("q", t["q"]), ("k_cache", t["k_cache"]), ("v_cache", t["v_cache"]), offsets, table, seqlens,
                      *left, count, ("sigma", np.float32(t["softmax_scale"]))])
        bound.append([*left, offsets, seqlens, ("o", t["o"]), ("lse", t["lse"]), count,
                      ("SHARES", np.int32(plan.constants["shares"])), ("ROWS", np.int32(shape.b * shape.rows)),
                      ("carry", np.int32(i > 0 or plan.own is not None))])
    return bound


ROW = Row(
    name="cascade", family="cascade", file=FILE, archs=("sm_80+",), dtypes=("float16", "bfloat16"),
    head_dims=range(8, 257, 8), features=frozenset({"gqa", "lse", "paged", "queries"}),
    constants={"rows": None, "keys": None, "warps": None, "stages": 2, "shares": None},
    choices={"rows": (64, 128), "keys": (32, 64), "warps": (4, 8), "stages": (2, 3)},
    teaches="What sequences share is read once for all of them: their queries become the rows of one tile, and "
            "decode's product of a vector and a matrix one of two matrices.",
    plan=plan, cost=cost, arguments=arguments,
)
