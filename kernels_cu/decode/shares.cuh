// shares: the keys of a batch as one list of tiles, and of it equal shares for groups of blocks (Stream-K,
// Osama et al. 2023), by lengths that lie on the device; and the parts of a sequence that several shares cut.
//
//   share of group g = tiles [⌊g T / G⌋, ⌊(g + 1) T / G⌋)     of T tiles over G groups
//
// NOTE: paged_stream.cu has a text of its own for this, of which it was measured.
#pragma once
#include "prim/gmem.cuh"
#include "prim/scan.cuh"
#include "prim/softmax.cuh"

/// A tile: of which sequence, and which of its own.
template <int KEYS> struct Place {
  int b, tile, length;

  /// Of a sequence. NOTE: without keys there is one all the same, which leaves 0 and −∞.
  static METHOD int tiles_of(int length) { return max(ceil_div(length, KEYS), 1); }
  METHOD int tiles() const { return tiles_of(length); }
  METHOD int first_key() const { return tile * KEYS; }
};

/// The list, and the groups' shares of it. All lanes of a warp make one, and ask it, together.
template <int KEYS, int MOST_PARTS> struct Shares {
  using At = Place<KEYS>;
  const int* g_lengths;
  int batch, total, groups;

  /// Over at most `most` groups, and MOST_PARTS for each sequence.
  METHOD Shares(const int* g_lengths, int batch, int most SITE) : g_lengths(g_lengths), batch(batch) {
    int mine = 0;
#pragma unroll 4
    for (int b = lane_id(); b < batch; b += WARP) mine += At::tiles_of(load_global(g_lengths + b AT_SITE));
    total = warp_sum(mine AT_SITE);
    groups = min(min(most, total), MOST_PARTS * batch);
  }
  /// Where a group's share begins. NOTE: the plan sees to it that these products fit 32 bits.
  METHOD int begin(int group) const { return group * total / groups; }
  /// The group in whose share a tile is.
  METHOD int group_of(int tile) const { return ((tile + 1) * groups - 1) / total; }

  METHOD int length(int b SITE) const { return b < batch ? load_global(g_lengths + b AT_SITE) : 0; }

  /// Where a tile of the list is.
  METHOD At find(int tile SITE) const {
    for (int first = 0, before = 0;; first += WARP) {
      const int b = first + lane_id(), n = length(b AT_SITE), mine = b < batch ? At::tiles_of(n) : 0;
      const int upto = before + warp_prefix(mine AT_SITE);
      const int lane = warp_sum(upto <= tile AT_SITE);  // so many sequences of these end before it
      if (lane < WARP)
        return {first + lane, tile - shuffle(upto - mine, lane AT_SITE), shuffle(n, lane AT_SITE)};
      before = shuffle(upto, WARP - 1 AT_SITE);
    }
  }
  /// `count` tiles on, at most to the next sequence.
  METHOD void skip(At& at, int count SITE) const {
    at.tile += count;
    if (at.tile < at.tiles()) return;
    at.tile = 0;
    at.length = length(++at.b AT_SITE);
  }
};

struct alignas(16) Quad {
  float x[4];
};

/// The parts of one sequence that the groups from `first` to `last` leave, in the order of its keys. Of each
/// unit a group has two places, one for the rest of a sequence and one for the start of another.
struct Parts {
  const View<float, 3>& g_o;
  const View<float, 2>& g_lse;
  int unit, units, first, last;

  METHOD int count() const { return last - first + 1; }
  METHOD int place(int group, bool start) const { return 2 * (group * units + unit) + start; }

  /// O of four columns of a row, and its LSE. NOTE: AHEAD parts are on their way at a time, there or not.
  template <int AHEAD> METHOD Quad merged(int row, int col, float& lse SITE) const {
    SoftmaxRow whole;
    Quad o{};
#pragma unroll 1
    for (int group = first; group <= last; group += AHEAD) {
      Quad part[AHEAD];
      float part_lse[AHEAD], top = -INFINITY;
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int p = place(group + i, group + i == first);
        const bool there = group + i <= last;
        part[i] = there ? load_global(reinterpret_cast<const Quad*>(g_o.at(p, row) + col) AT_SITE) : Quad{};
        part_lse[i] = there ? load_global(g_lse.at(p) + row AT_SITE) : -INFINITY;
        top = fmaxf(top, part_lse[i]);
      }
      const float rescale = whole.raise(top, LOG2_E);
#pragma unroll
      for (int e = 0; e < 4; ++e) o.x[e] *= rescale;
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const float weight = whole.weight(part_lse[i], LOG2_E);
        whole.l += weight;
#pragma unroll
        for (int e = 0; e < 4; ++e) o.x[e] += part[i].x[e] * weight;
      }
    }
    const float inverse = whole.inverse_sum();
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[e] *= inverse;
    lse = whole.lse(1.f);
    return o;
  }
};
