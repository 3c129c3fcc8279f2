"""Equal shares of one list of tiles, as decode/shares.cuh divides it on the device."""
from __future__ import annotations

from cuattn.kernels.base import WARP, Unsupported, ceil_div

MOST_PRODUCT = 2**31 - 1  # of tiles and groups: where a share begins is computed in 32 bits


def check_list(kernel: str, most: int, groups: int, tiles: str, instead: str) -> None:
    """Refuses a list of up to `most` tiles whose shares the kernels cannot compute."""
    if (most + 1) * (groups + 1) > MOST_PRODUCT:
        raise Unsupported(f"{kernel}: expected a batch and table of at most {MOST_PRODUCT // (groups + 1) - 1} "
                          f"{tiles}, got {most}; {instead}")


def stretches(
    lengths, keys: int, groups: int, most_parts: int, fewest: int = 1
) -> list[list[tuple[int, int, int, bool]]]:
    """What each group that has a share takes of sequences cut into tiles of so many keys.

    Of each stretch (sequence, first tile, tiles, whether it is the whole sequence). `most_parts`: groups for
    each sequence; `fewest`: tiles of a share.
    """
    work = [max(ceil_div(length, keys), 1) for length in lengths]
    total = sum(work)
    size = max(ceil_div(total, min(groups, most_parts * len(lengths))), fewest)
    taken, b, done = [], 0, 0
    for begin in range(0, total, size):
        left, share = min(size, total - begin), []
        while left:
            if done == work[b]:
                b, done = b + 1, 0
            count = min(work[b] - done, left)
            share.append((b, done, count, count == work[b]))
            left, done = left - count, done + count
        taken.append(share)
    return taken


def results(shares, rows: int, d: int, size: int) -> tuple[int, int]:
    """Bytes (loaded, stored) of what stretches leave of `rows` rows of O, d elements wide, and of their LSE.

    Of a whole sequence O in elements of `size` bytes. Else a part in float32, which merging reads once more, its LSE
    once for what a warp has of a row, and once a sequence the result.
    """
    loaded = stored = 0
    for _, done, _, whole in (stretch for share in shares for stretch in share):
        stored += rows * (d * (size if whole else 4) + 4)
        if not whole:
            loaded += rows * 4 * (d + ceil_div(d, 4 * WARP))
            stored += rows * (d * size + 4) if done == 0 else 0
    return loaded, stored


def lengths_read(shares, batch: int, groups: int, threads: int, walks: int = 2) -> int:
    """Bytes of lengths that blocks read, one of each of `groups` groups.

    `walks`: how often each thread goes from a share's first sequence to its last.
    """
    warps = threads // WARP
    read = groups * warps * batch  # summed by each warp
    for share in shares:
        first, last = share[0][0], share[-1][0]
        read += warps * min(batch, (first // WARP + 1) * WARP)  # up to the first sequence, 32 at a time
        read += walks * (last - first) * threads  # of each further one; two are for copies and products
    return 4 * read
