"""Equal shares of one list of tiles, as paged_stream.cu and decode/shares.cuh divide it on the device."""
from __future__ import annotations

from cuattn.kernels.base import WARP, Unsupported, ceil_div

MOST_PRODUCT = 2**31 - 1  # of tiles and groups: the kernels divide in 32 bits


def check_list(kernel: str, most: int, groups: int, tiles: str, instead: str) -> None:
    """Refuses a list of up to `most` tiles whose shares the kernels cannot compute."""
    if (most + 1) * (groups + 1) > MOST_PRODUCT:
        raise Unsupported(f"{kernel}: expected a batch and table of at most {MOST_PRODUCT // (groups + 1) - 1} "
                          f"{tiles}, got {most}; {instead}")


def stretches(lengths, keys: int, groups: int, most_parts: int) -> list[list[tuple[int, int, int, bool]]]:
    """What each group takes of sequences cut into tiles of so many keys.

    Of each stretch (sequence, first tile, tiles, whether it is the whole sequence). `most_parts`: groups for
    each sequence.
    """
    work = [max(ceil_div(length, keys), 1) for length in lengths]
    total = sum(work)
    groups = min(groups, total, most_parts * len(lengths))
    shares, at, b, done = [], 0, 0, 0
    for group in range(groups):
        end, share = (group + 1) * total // groups, []
        while at < end:
            if done == work[b]:
                b, done = b + 1, 0
            count = min(work[b] - done, end - at)
            share.append((b, done, count, count == work[b]))
            at, done = at + count, done + count
        shares.append(share)
    return shares


def results(shares, rows: int, d: int, size: int) -> tuple[int, int]:
    """Bytes (loaded, stored) of what stretches leave of `rows` rows of O, d elements wide, and of their LSE.

    Of a whole sequence O in elements of `size` bytes. Else a part in float32, which merging reads once more, an LSE
    for each four columns, and once a sequence the result.
    """
    loaded = stored = 0
    for _, done, _, whole in (stretch for share in shares for stretch in share):
        stored += rows * (d * (size if whole else 4) + 4)
        if not whole:
            loaded += rows * (d * 4 + d // 4 * 4)
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
