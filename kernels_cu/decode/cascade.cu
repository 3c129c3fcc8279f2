// cascade: decode of sequences that share keys, which are read once for a group of them (Hydragen, Juravsky et
// al. 2024; the shared levels of FlashInfer's MultiLevelCascadeAttentionWrapper).
//
//   S = Q Kᵀ      O = softmax(σ S) V      K, V: keys that all sequences of a group see
//
// A group's rows are its sequences × M queries × the GROUP heads of a KV head. Each BLOCK_M of them against all
// keys of their group are an item, and the key tiles of all items are one list, of which blocks take equal
// shares whatever the lengths (Stream-K, Osama et al. 2023). What a share does of an item is a part.
//
//   cascade         a part's O / l and LSE
//   cascade_merge   LSE = ln Σ_p e^{LSE_p}      O = Σ_p e^{LSE_p − LSE} O_p      p: parts, and with `carry` what
//                   O and LSE hold of other keys of the same queries
//
// grid    (HKV, shares), as many as are resident at once; then (ceil(rows / MERGERS), HKV)
// block   WARPS warps; a warp owns BLOCK_M / WARPS rows and, of these, whole rows of S and O in registers.
//         Of the merge a warp owns a row
// smem    Q, and STAGES tiles of K and V: the next ones land while one is multiplied. Of the merge ROOM parts a warp
// bytes   K, V and page numbers once an item and KV head; Q and a part's O and LSE once a part, the latter read
//         once more; O and LSE once
#include "decode/shares.cuh"
#include "prim/acc.cuh"
#include "prim/mask.cuh"
#include "prim/paging.cuh"
#include "prim/scan.cuh"
#include "prim/softmax.cuh"
#include "prim/swizzled.cuh"
#include "prim/tile.cuh"

constexpr int D_PAD = round_up(HEAD_DIM, MMA_K), THREADS = WARPS * WARP, WARP_M = BLOCK_M / WARPS;
constexpr int MINE = KEYS / WARPS;    // rows of a tile that a warp copies
constexpr int OWN = M * GROUP;        // rows of a sequence
constexpr int MERGERS = 4, ROOM = 8;  // warps of a merging block; parts on their way to one
static_assert(KEYS % WARPS == 0 && MINE <= WARP, "a lane looks up the page of a key");

using QueryTile = SwizzledTile<Element, BLOCK_M, D_PAD>;
using KeyTile = SwizzledTile<Element, KEYS, D_PAD>;
struct Stage {
  KeyTile k, v;
};
struct Smem {
  QueryTile q;
  Stage ring[STAGES];
};
static_assert(sizeof(Smem) == SMEM_BYTES, "the plan's shared memory must be this struct");

/// Neighbouring rows of the batch, and how many keys they share.
struct Group {
  int first, rows, length;

  METHOD int row_tiles() const { return ceil_div(rows, BLOCK_M); }
  /// NOTE: without keys there is one all the same, which leaves 0 and −∞.
  METHOD int key_tiles() const { return max(ceil_div(length, KEYS), 1); }
  METHOD int tiles() const { return row_tiles() * key_tiles(); }
};

/// A group in the list, where its tiles begin there.
struct Found {
  int index, begin;
  Group group;
};

/// The list, and the shares of it. All lanes of a warp make one, and ask it, together.
struct List {
  const int *g_offsets, *g_lengths;
  int groups, total, shares;

  METHOD List(const int* g_offsets, const int* g_lengths, int groups, int most)
      : g_offsets(g_offsets), g_lengths(g_lengths), groups(groups) {
    int mine = 0;
    for (int g = lane_id(); g < groups; g += WARP) mine += group(g).tiles();
    total = warp_sum(mine);
    shares = min(most, total);
  }
  /// Where a share begins. NOTE: the plan sees to it that these products fit 32 bits.
  METHOD int begin(int share) const { return share * total / shares; }
  METHOD int share_of(int tile) const { return ((tile + 1) * shares - 1) / total; }

  /// NOTE: behind the last one there are groups without rows, as there may be among them.
  METHOD Group group(int g) const {
    if (g >= groups) return {0x7fffffff, 0, 0};
    const int b = load_global(g_offsets + g), end = load_global(g_offsets + g + 1);
    return {b * OWN, (end - b) * OWN, load_global(g_lengths + g)};
  }

  /// The first group that is not before what is looked for: is_before(group, where its tiles end).
  template <class F> METHOD Found find(F is_before) const {
    for (int first = 0, before = 0;; first += WARP) {
      const Group mine = group(first + lane_id());
      const int end = before + warp_prefix(mine.tiles());
      const int lane = warp_sum(is_before(mine, end));
      if (lane < WARP)
        return {first + lane, shuffle(end - mine.tiles(), lane),
                {shuffle(mine.first, lane), shuffle(mine.rows, lane), shuffle(mine.length, lane)}};
      before = shuffle(end, WARP - 1);
    }
  }
};

/// An item: its rows, in the batch.
struct Item {
  int group, first, count;

  METHOD Item(const Found& found, int row_tile)
      : group(found.index), first(found.group.first + row_tile * BLOCK_M),
        count(min(found.group.rows - row_tile * BLOCK_M, BLOCK_M)) {}
  /// Where a share's part of it lies. NOTE: from each part of the list to the next this grows.
  METHOD int place(int share) const { return share + group + first / BLOCK_M; }
};

/// Where a row of Q or O begins.
template <class T> DEVICE T* row_at(const View<T, 4>& g, int row, int hkv) {
  return g.at(row / OWN, row / GROUP % M, hkv * GROUP + row % GROUP);
}

DEVICE void load_q(QueryTile& s, const View<const Element, 4>& g_q, const Item& item, int hkv) {
  using W = Walk<THREADS, D_PAD>;
  const W walk(threadIdx.x);
  if (walk.rests()) return;
#pragma unroll 1
  for (int row = walk.row; row < BLOCK_M; row += W::ROW_STEP)
    cp_async16(s.at(row, walk.col), row_at(g_q, item.first + row, hkv) + walk.col,
               row < item.count && walk.col < HEAD_DIM);
}

/// A warp's copies of its rows of each tile of a group's keys.
struct Loader {
  const View<const Element, 4>&g_k, &g_v;
  const int* g_pages;
  int hkv, length, tile, end;  // the next tile, and one past the last
  int page;                    // in lane i that of the next tile's i-th key of this warp

  METHOD Loader(const View<const Element, 4>& g_k, const View<const Element, 4>& g_v, const int* g_pages, int hkv,
                int length, int tile, int end)
      : g_k(g_k), g_v(g_v), g_pages(g_pages), hkv(hkv), length(length), tile(tile), end(end), page(fetch_page()) {}
  METHOD int first_key() const { return tile * KEYS + warp_id() * MINE; }
  METHOD int fetch_page() const {
    const int key = first_key() + lane_id();
    return lane_id() < MINE && tile < end && key < length ? page_of<PAGE_SIZE>(g_pages, key) : 0;
  }
  /// Starts the next tile and looks up the pages of the one behind, so that no copy waits for them.
  METHOD void start_loading(Stage& s) {
    if (tile >= end) return;
    // Each lane places the row of its own key, and tells the lanes that copy it.
    const int key = first_key() + lane_id(), there = length - first_key();
    const int64_t k_row = int64_t(row_in_page<PAGE_SIZE>(g_k, page, key, hkv)),
                  v_row = int64_t(row_in_page<PAGE_SIZE>(g_v, page, key, hkv));
    ++tile;
    page = fetch_page();
    constexpr int CHUNKS = D_PAD / 8;
#pragma unroll 2
    for (int i = 0; i < ceil_div(MINE * CHUNKS, WARP); ++i) {
      const int chunk = i * WARP + lane_id(), row = chunk / CHUNKS, col = chunk % CHUNKS * 8;
      const Element *k = reinterpret_cast<const Element*>(shuffle(k_row, row % WARP)),
                    *v = reinterpret_cast<const Element*>(shuffle(v_row, row % WARP));
      if (MINE * CHUNKS % WARP != 0 && row >= MINE) continue;
      const bool valid = row < there && col < HEAD_DIM;
      cp_async16(s.k.at(warp_id() * MINE + row, col), k + col, valid);
      cp_async16(s.v.at(warp_id() * MINE + row, col), v + col, valid);
    }
  }
};

KERNEL(THREADS, BLOCKS_PER_SM)
cascade(const View<const Element, 4> g_q, const View<const Element, 4> g_k, const View<const Element, 4> g_v,
        const int* g_offsets, const View<const int, 2> g_table, const int* g_lengths,
        const View<float, 3> g_part, const View<float, 2> g_part_lse, int GROUPS, float sigma) {
  Smem& s = dynamic_smem<Smem>();
  const int hkv = blockIdx.x, share = blockIdx.y, warp_row = warp_id() * WARP_M;
  const List list(g_offsets, g_lengths, GROUPS, gridDim.y);
  if (share >= list.shares) return;
  int now = list.begin(share);
  const int end = list.begin(share + 1);
  Found at = list.find([now](const Group&, int end) { return end <= now; });
  int row_tile = (now - at.begin) / at.group.key_tiles(), tile = (now - at.begin) % at.group.key_tiles();

  const float sigma2 = sigma * LOG2_E;
#pragma unroll 1
  while (true) {  // a part
    const Item item(at, row_tile);
    const int count = min(at.group.key_tiles() - tile, end - now);
    Loader loader(g_k, g_v, g_table.at(at.index), hkv, at.group.length, tile, tile + count);
    load_q(s.q, g_q, item, hkv);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      loader.start_loading(s.ring[i]);
      cp_async_commit();
    }
    Accumulator<WARP_M, D_PAD> r_o;
    Softmax<WARP_M> softmax;
    r_o.clear();
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      cp_async_wait<STAGES - 2>();
      block_sync();  // the tile is here for all, and the one before is used up
      loader.start_loading(s.ring[(i + STAGES - 1) % STAGES]);
      cp_async_commit();
      if (warp_row >= item.count) continue;

      const Stage& stage = s.ring[i % STAGES];
      const int key0 = (tile + i) * KEYS;
      Accumulator<WARP_M, KEYS> r_s;
      r_s.clear();
      multiply_abt<Element>(r_s, s.q, warp_row, stage.k);
      if (key0 + KEYS > at.group.length) mask_scores(r_s, false, 0, key0, 0, at.group.length);
      softmax.update(r_s, r_o, sigma2);
      multiply_ab<Element>(r_o, r_s, stage.v);
    }

    softmax.finish();
    softmax.normalise(r_o);
    const int place = item.place(share) * gridDim.x + hkv, rows = item.count - warp_row;
    store_rows<float>(g_part.at(place, warp_row), HEAD_DIM, r_o, rows, HEAD_DIM);
#pragma unroll
    for (int m = 0; m < WARP_M / MMA_M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = r_o.row(m, half);
        if (row < rows && lane_id() % 4 == 0)
          store_global(g_part_lse.at(place) + warp_row + row, softmax.row[m][half].lse(sigma));
      }

    now += count;
    if (now >= end) break;
    tile = 0;
    if (++row_tile >= at.group.row_tiles()) {
      row_tile = 0;
      do at.group = list.group(++at.index);
      while (at.group.rows == 0);
    }
    block_sync();  // all have left Q and the tiles
  }
}

struct MergeSmem {
  Quad room[MERGERS][ROOM * WARP];
};

KERNEL(MERGERS* WARP, 1)
cascade_merge(const View<float, 3> g_part, const View<float, 2> g_part_lse, const int* g_offsets,
              const int* g_lengths, const View<Element, 4> g_o, const View<float, 3> g_lse, int GROUPS, int SHARES,
              int ROWS, int carry) {
  const int row = blockIdx.x * MERGERS + warp_id(), hkv = blockIdx.y, hkvs = gridDim.y;
  if (row >= ROWS) return;
  Quad* room = dynamic_smem<MergeSmem>().room[warp_id()];
  const List list(g_offsets, g_lengths, GROUPS, SHARES);
  const Found at = list.find([row](const Group& group, int) { return group.first + group.rows <= row; });
  const int row_tile = (row - at.group.first) / BLOCK_M, tiles = at.group.key_tiles();
  const Item item(at, row_tile);
  const int begin = at.begin + row_tile * tiles, first = list.share_of(begin);
  const Parts parts{g_part, g_part_lse, item.place(first) * hkvs + hkv, hkvs, 0,
                    list.share_of(begin + tiles - 1) - first + 1};

  Element* to = row_at(g_o, row, hkv);
  float* lse = g_lse.at(row / OWN, hkv * GROUP + row % GROUP) + row / GROUP % M;
  const float held = shuffle(carry && lane_id() == 0 ? load_global(lse) : -INFINITY, 0);
#pragma unroll 1
  for (int col0 = 0; col0 < HEAD_DIM; col0 += WARP * 4) {
    const int col = col0 + lane_id() * 4;
    const bool there = col < HEAD_DIM;
    SoftmaxRow whole(-INFINITY, 1.f);
    Quad o = parts.merged<ROOM>(room, row - item.first, col, there, whole.m);
    if (carry && whole.m == -INFINITY) return;  // what is there stays, bit for bit
    const SoftmaxRow::Factors factors = whole.merge({held, 1.f}, LOG2_E);
    o.scale(factors.mine);
    if (there && held > -INFINITY) {
      const Pair a = load_pair(to + col), b = load_pair(to + col + 2);
      o.add({a.a, a.b, b.a, b.b}, factors.theirs);
    }
    o.scale(whole.inverse_sum());
    if (there) store_quad(to + col, o);
    if (col == 0) store_global(lse, whole.lse(1.f));
  }
}
