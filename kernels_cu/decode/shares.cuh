// shares: the keys of a batch as one list of tiles, and of it equal shares for groups of blocks (Stream-K,
// Osama et al. 2023), by lengths that lie on the device; and the parts of a sequence that several shares cut.
//
//   share of group g = tiles [g S, (g + 1) S)     S = ⌈T / G⌉ of T tiles over G groups
//
// NOTE: the last groups may have none. Cutting finer would end no earlier, for somebody has S in any case, and
// leave more parts.
#pragma once
#include "prim/cp_async.cuh"
#include "prim/gmem.cuh"
#include "prim/scan.cuh"
#include "prim/softmax.cuh"

/// A tile: of which sequence, and which of its own.
template <int KEYS> struct Place {
  int b, tile, length, first;  // `first`: the sequence's first key in the list

  /// Of so many keys. NOTE: without any there is one all the same, which leaves 0 and −∞.
  static METHOD int tiles_of(int keys) { return max(ceil_div(keys, KEYS), 1); }
  METHOD int tiles() const { return tiles_of(length - first); }
  METHOD int first_key() const { return first + tile * KEYS; }
};

/// Where a sequence's keys begin in the list: all of them are in it.
struct FromFirstKey {
  METHOD int operator()(int) const { return 0; }
};

/// The list, and the groups' shares of it. All lanes of a warp make one, and ask it, together.
template <int KEYS, int MOST_PARTS, class Start = FromFirstKey> struct Shares {
  using At = Place<KEYS>;
  const int* g_lengths;
  int batch, total, share;
  Start start;

  /// Over at most `most` groups, and MOST_PARTS for each sequence, each with at least `fewest` tiles.
  METHOD Shares(const int* g_lengths, int batch, int most, int fewest = 1, Start start = {} SITE)
      : g_lengths(g_lengths), batch(batch), start(start) {
    int mine = 0;
#pragma unroll 4
    for (int b = lane_id(); b < batch; b += WARP) mine += tiles_of(load_global(g_lengths + b AT_SITE));
    total = warp_sum(mine AT_SITE);
    share = max(ceil_div(total, min(most, MOST_PARTS * batch)), fewest);
  }
  METHOD int tiles_of(int length) const { return At::tiles_of(length - start(length)); }

  METHOD bool has_share(int group) const { return group * share < total; }
  /// Where a group's share begins, and that of the one before ends.
  METHOD int begin(int group) const { return min(group * share, total); }
  /// The group in whose share a tile is.
  METHOD int group_of(int tile) const { return tile / share; }

  METHOD int length(int b SITE) const { return b < batch ? load_global(g_lengths + b AT_SITE) : 0; }

  /// Where a tile of the list is.
  METHOD At find(int tile SITE) const {
    for (int first = 0, before = 0;; first += WARP) {
      const int b = first + lane_id(), n = length(b AT_SITE), mine = b < batch ? tiles_of(n) : 0;
      const int upto = before + warp_prefix(mine AT_SITE);
      const int lane = warp_sum(upto <= tile AT_SITE);  // so many sequences of these end before it
      if (lane < WARP) {
        const int found = shuffle(n, lane AT_SITE);
        return {first + lane, tile - shuffle(upto - mine, lane AT_SITE), found, start(found)};
      }
      before = shuffle(upto, WARP - 1 AT_SITE);
    }
  }
  /// `count` tiles on, at most to the next sequence.
  METHOD void skip(At& at, int count SITE) const {
    at.tile += count;
    if (at.tile < at.tiles()) return;
    at.tile = 0;
    at.length = length(++at.b AT_SITE);
    at.first = start(at.length);
  }
};

/// How many parts a warp has room for in so many bytes.
constexpr int room_in(int bytes) { return bytes / (16 * WARP) < WARP ? bytes / (16 * WARP) : WARP; }

struct alignas(16) Quad {
  float x[4];

  METHOD void add(const Quad& other, float weight) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] += other.x[e] * weight;
  }
  METHOD void scale(float factor) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] *= factor;
  }
};

/// Writes four neighbours of a row, of whichever type.
template <class T> DEVICE void store_quad(T* p, const Quad& q SITE) {
  if constexpr (sizeof(T) == sizeof(float))
    store_global(reinterpret_cast<Quad*>(p), q AT_SITE);
  else
    store_pair(p, q.x[0], q.x[1] AT_SITE), store_pair(p + 2, q.x[2], q.x[3] AT_SITE);
}

/// Parts of one result, in the order of its keys: their places are `step` apart, the first's `shift` further on.
struct Parts {
  const View<float, 3>& g_o;
  const View<float, 2>& g_lse;
  int base, step, shift, count;

  METHOD int place(int part) const { return base + part * step + (part == 0 ? shift : 0); }

  /// O of four columns of a row, and its LSE, by a warp whose lanes have the same row; `there`: whether the lane
  /// has columns.
  template <int ROOM> METHOD Quad merged(Quad* s_room, int row, int col, bool there, float& lse SITE) const {
    Quad o[1];
    float of_row[1];
    merge<ROOM>(o, of_row, s_room, row, 0, 1, col, there AT_SITE);
    lse = of_row[0];
    return o[0];
  }
  /// The same of up to R rows, `apart` from each other, of which there are `rows`: what one waits for, the others wait
  /// for too. NOTE: the parts go to shared memory, where the warp has ROOM × WARP places, all on their way at once: in
  /// registers, each would need a test of its own, and all of them take longer than the parts do.
  template <int ROOM, int R>
  METHOD void merge(Quad (&o)[R], float (&lse)[R], Quad* s_room, int row, int apart, int rows, int col,
                    bool there SITE) const {
    constexpr int AHEAD = ROOM / R, NEXT = AHEAD * WARP;  // parts of a row; where the next one's are
    static_assert(0 < AHEAD && AHEAD <= WARP, "a lane looks after the state of a part");
    const int64_t next_row = apart * g_o.stride[1];
    SoftmaxRow whole[R];
    float weight[R];
    s_room += lane_id();
#pragma unroll
    for (int r = 0; r < R; ++r) o[r] = {};
#pragma unroll 1
    for (int begin = 0; begin < count; begin += AHEAD) {
      const int here = min(count - begin, AHEAD);
      const float* from = g_o.at(base + begin * step, row) + col;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        weight[r] = -INFINITY;
        if (r < rows && lane_id() < here)
          weight[r] = load_global(g_lse.at(place(begin + lane_id())) + row + r * apart AT_SITE);
        cp_async16(s_room + r * NEXT, (begin == 0 ? from + shift * g_o.stride[0] : from) + r * next_row,
                   there && r < rows AT_SITE);
      }
#pragma unroll 4
      for (int i = 1; i < here; ++i) {
        from += step * g_o.stride[0];
#pragma unroll
        for (int r = 0; r < R; ++r)
          cp_async16(s_room + r * NEXT + i * WARP, from + r * next_row, there && r < rows AT_SITE);
      }
      cp_async_commit(ONLY_AT_SITE);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        o[r].scale(whole[r].raise(warp_max(weight[r] AT_SITE), LOG2_E));
        weight[r] = whole[r].weight(weight[r], LOG2_E);
      }
      cp_async_wait<0>(ONLY_AT_SITE);
#pragma unroll 4
      for (int i = 0; i < here; ++i)
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const float of_part = shuffle(weight[r], i AT_SITE);
          whole[r].l += of_part;
          o[r].add(load_shared(s_room + r * NEXT + i * WARP AT_SITE), of_part);
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) o[r].scale(whole[r].inverse_sum()), lse[r] = whole[r].lse(1.f);
  }
};

/// What the groups from `first` to `last` leave of a sequence. Of each unit a group has two places, one for the
/// rest of a sequence and one for the start of another.
DEVICE Parts parts_of_groups(const View<float, 3>& g_o, const View<float, 2>& g_lse, int unit, int units, int first,
                             int last) {
  return {g_o, g_lse, 2 * (first * units + unit), 2 * units, 1, last - first + 1};
}
