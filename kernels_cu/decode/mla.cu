// mla: decode of multi-head latent attention over a paged cache (DeepSeek-V2, arXiv:2405.04434; as FlashMLA
// and FlashInfer's MLA define it, with the projections absorbed into q and into what follows o).
//
//   S = q · [c, r]ᵀ      O = softmax(σ S) c      c: 512 latent numbers a key, r: 64 rotated ones behind them
//
// All query heads share one row a key, and its first 512 numbers are the value: a row is copied once and
// multiplied twice. The keys of the batch are one list of tiles, of which groups of blocks take equal shares
// (shares.cuh); a sequence that several shares cut is merged by whoever is last.
//
// grid    (ceil(H / ROWS), groups), as many as are resident at once; the blocks of a group run side by side,
//         so that the second one finds the rows in L2
// block   8 warps and ROWS heads. Of a tile's S each warp has 16 heads and S_COLS keys, P goes through shared
//         memory, and of O each warp has all heads and 64 columns. Three block barriers a tile
// smem    Q, a ring of STAGES tiles that runs on from sequence to sequence, P, and the rows' states
// bytes   every row and its page number once for each ROWS heads; Q once for each stretch of a sequence; O and
//         LSE; of a sequence that is cut, every part written and read
#include "decode/shares.cuh"
#include "prim/acc.cuh"
#include "prim/mask.cuh"
#include "prim/paging.cuh"
#include "prim/softmax.cuh"
#include "prim/swizzled.cuh"
#include "prim/ticket.cuh"
#include "prim/tile.cuh"

constexpr int LATENT = 512, WIDTH = LATENT + 64, WARPS = 8, THREADS = WARPS * WARP, COLS = LATENT / WARPS;
constexpr int MOST_PARTS = 32;             // of a sequence, in the mean: one block merges them all
constexpr int MINE = KEYS / WARPS;         // rows of a tile that a warp copies
constexpr int FAIR = ROWS * KEYS / WARPS;  // elements of S for a warp where all have some
constexpr int S_COLS = FAIR > MMA_M * MMA_K ? FAIR / MMA_M : MMA_K, KEY_GROUPS = KEYS / S_COLS;
static_assert(KEYS % S_COLS == 0 && ROWS / MMA_M * KEY_GROUPS <= WARPS, "a warp has one piece of S, or none");
static_assert(KEYS % WARPS == 0 && MINE <= WARP, "a lane looks up the page of a key");

using QueryTile = SwizzledTile<Element, ROWS, WIDTH>;
using KeyTile = SwizzledTile<Element, KEYS, WIDTH>;
constexpr int ROOM = room_in(sizeof(KeyTile) / WARPS);  // for parts, where the last tile was
constexpr int APART = THREADS / (LATENT / 4), AT_ONCE = ROOM / 2 < 4 ? ROOM / 2 : 4;  // rows that a warp merges
static_assert(THREADS % (LATENT / 4) == 0 && AT_ONCE > 0, "a thread's columns are the same in every row");
using WeightTile = SwizzledTile<Element, ROWS, KEYS>;
using List = Shares<KEYS, MOST_PARTS>;

/// ROWS_ × COLS_ of a tile, from a row and column on.
template <class Tile, int ROWS_, int COLS_> struct Piece {
  static constexpr int ROWS = ROWS_, COLS = COLS_;
  Tile& tile;
  int row0, col0;

  METHOD auto* at(int row, int col) const { return tile.at(row0 + row, col0 + col); }
};

struct Smem {
  QueryTile q;
  KeyTile ring[STAGES];
  WeightTile p;
  float top[KEY_GROUPS][ROWS], sum[KEY_GROUPS][ROWS];  // of the keys of each group
  float rescale[ROWS];
  union {
    float m[ROWS];
    int last;  // whether this block merges the parts: m has been read by then
  };
};
static_assert(sizeof(Smem) == SMEM_BYTES, "the plan's shared memory must be this struct");

/// Starts a warp's copies of its share of a tile's rows: in lane i the address of the i-th, and `there` of them
/// are to be read. NOTE: unrolled whole, the places in shared memory are kept in registers that O wants.
template <class Tile> DEVICE void copy_rows(Tile& s, int64_t mine, int there) {
  constexpr int COUNT = Tile::ROWS / WARPS, CHUNKS = WIDTH / 8;
#pragma unroll 3
  for (int i = 0; i < ceil_div(COUNT * CHUNKS, WARP); ++i) {
    const int chunk = i * WARP + lane_id(), row = chunk / CHUNKS, col = chunk % CHUNKS * 8;
    const Element* from = reinterpret_cast<const Element*>(shuffle(mine, row));
    if (COUNT * CHUNKS % WARP != 0 && row >= COUNT) continue;
    cp_async16(s.at(warp_id() * COUNT + row, col), from + col, row < there);
  }
}

/// A warp's copies of its rows of each tile, which run ahead of the products from sequence to sequence.
struct Loader {
  const View<const Element, 4>& g_kv;
  const View<const int, 2>& g_table;
  const List& list;
  Place<KEYS> at;
  int left;  // tiles of the share not yet begun
  int page;  // in lane i that of the next tile's i-th key of this warp

  METHOD Loader(const View<const Element, 4>& g_kv, const View<const int, 2>& g_table, const List& list,
                Place<KEYS> at, int left)
      : g_kv(g_kv), g_table(g_table), list(list), at(at), left(left), page(fetch_page()) {}
  METHOD int first_key() const { return at.first_key() + warp_id() * MINE; }
  METHOD int fetch_page() const {
    const int key = first_key() + lane_id();
    return lane_id() < MINE && key < at.length ? page_of<PAGE_SIZE>(g_table.at(at.b), key) : 0;
  }
  /// Starts the next tile and looks up the pages of the one behind, so that no copy waits for them.
  METHOD void start_loading(KeyTile& s) {
    if (left-- <= 0) return;
    // Each lane places the row of its own key, and tells the lanes that copy it.
    const int64_t mine = int64_t(row_in_page<PAGE_SIZE>(g_kv, page, first_key() + lane_id(), 0));
    const int there = at.length - first_key();
    if (left > 0) {
      list.skip(at, 1);
      page = fetch_page();
    }
    copy_rows(s, mine, there);
  }
};

/// A warp's piece of S, and the states of its 16 rows: m is the rows', l of the keys that it has seen itself.
struct Scores {
  Accumulator<MMA_M, S_COLS> r_s;
  SoftmaxRow state[2];

  static METHOD bool has_piece() { return row0() < ROWS; }
  static METHOD int row0() { return warp_id() / KEY_GROUPS * MMA_M; }
  static METHOD int key_group() { return warp_id() % KEY_GROUPS; }
  static METHOD int row(int half) { return row0() + Accumulator<MMA_M, S_COLS>::row(0, half); }

  /// S of a tile, and its largest score of each row to s.top.
  METHOD void multiply(Smem& s, const KeyTile& tile, int key0, int length) {
    const int first = key_group() * S_COLS;
    r_s.clear();
    multiply_abt<Element>(r_s, s.q, row0(), Piece<const KeyTile, S_COLS, WIDTH>{tile, first, 0});
    if (key0 + first + S_COLS > length) mask_scores(r_s, false, 0, key0 + first, 0, length);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < r_s.N_TILES; ++n)
        top = fmaxf(top, fmaxf(r_s.tile[0][n][2 * half], r_s.tile[0][n][2 * half + 1]));
      top = quad_max(top);
      if (lane_id() % 4 == 0) store_shared(&s.top[key_group()][row(half)], top);
    }
  }
  /// Weights of a tile to s.p, and what O is to be rescaled by.
  METHOD void weigh(Smem& s, float sigma2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY;
#pragma unroll
      for (int group = 0; group < KEY_GROUPS; ++group)
        top = fmaxf(top, load_shared(&s.top[group][row(half)]));
      const float rescale = state[half].raise(top, sigma2);
      if (key_group() == 0 && lane_id() % 4 == 0) store_shared(&s.rescale[row(half)], rescale);
#pragma unroll
      for (int n = 0; n < r_s.N_TILES; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          r_s.tile[0][n][e] = state[half].weight(r_s.tile[0][n][e], sigma2);
          state[half].l += r_s.tile[0][n][e];
        }
    }
    Piece<WeightTile, MMA_M, S_COLS> p{s.p, row0(), key_group() * S_COLS};
    store_accumulator<Element>(p, 0, r_s);
  }
  /// The rows' states, where a stretch ends, to s.m and s.sum.
  METHOD void leave(Smem& s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float l = quad_sum(state[half].l);
      if (lane_id() % 4 == 0) {
        store_shared(&s.sum[key_group()][row(half)], l);
        if (key_group() == 0) store_shared(&s.m[row(half)], state[half].m);
      }
      state[half] = SoftmaxRow();
    }
  }
};

using Output = Accumulator<ROWS, COLS>;

/// o += P V, what o holds brought to the rows' new maxima before.
DEVICE void accumulate(const Smem& s, const KeyTile& tile, Output& r_o) {
#pragma unroll
  for (int m = 0; m < r_o.M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float rescale = load_shared(&s.rescale[r_o.row(m, half)]);
#pragma unroll
      for (int n = 0; n < r_o.N_TILES; ++n)
        r_o.tile[m][n][2 * half] *= rescale, r_o.tile[m][n][2 * half + 1] *= rescale;
    }
  // NOTE: a step at a time. Unrolled, ptxas fetches so many fragments ahead that O of 64 heads spills.
#pragma unroll 1
  for (int k = 0; k < KEYS; k += MMA_K) {
    uint32_t a[Output::M_TILES][4];
#pragma unroll
    for (int m = 0; m < r_o.M_TILES; ++m) load_a(a[m], s.p, m * MMA_M, k);
    multiply_step<Element>(r_o, a, [&](uint32_t (&b)[2][2], int n) {
      load_b_cols(b, tile, k, warp_id() * COLS + n);
    });
  }
}

/// What a row has seen, of all groups of keys.
DEVICE SoftmaxRow state_of(const Smem& s, int row) {
  SoftmaxRow whole(load_shared(&s.m[row]), 0.f);
#pragma unroll
  for (int group = 0; group < KEY_GROUPS; ++group) whole.l += load_shared(&s.sum[group][row]);
  return whole;
}

/// Writes O / l and LSE of `rows` rows, `stride` apart and neighbours.
template <class T>
DEVICE void store_output(const Smem& s, Output& r_o, T* g_o, int64_t stride, float* g_lse, int rows,
                         float sigma) {
#pragma unroll
  for (int m = 0; m < r_o.M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = state_of(s, r_o.row(m, half)).inverse_sum();
#pragma unroll
      for (int n = 0; n < r_o.N_TILES; ++n)
        r_o.tile[m][n][2 * half] *= inverse, r_o.tile[m][n][2 * half + 1] *= inverse;
    }
  store_rows<T>(g_o + warp_id() * COLS, stride, r_o, rows, COLS);
  if (threadIdx.x < rows) store_global(g_lse + threadIdx.x, state_of(s, threadIdx.x).lse(sigma));
}

/// Whether all parts are there now that this block's is, and visible to it.
DEVICE bool comes_last(Smem& s, int* g_ticket, int count) {
  block_sync();
  if (threadIdx.x == 0) {
    store_shared(&s.last, int(take_ticket(g_ticket, count)));
  }
  block_sync();
  return load_shared(&s.last);
}

KERNEL(THREADS, 1)
mla(const View<const Element, 4> g_q, const View<const Element, 4> g_kv, const View<const int, 2> g_table,
    const int* g_lengths, const View<Element, 4> g_o, const View<float, 3> g_lse, const View<float, 3> g_part,
    const View<float, 2> g_part_lse, int* g_tickets, float sigma, int BATCH, int HEADS) {
  Smem& s = dynamic_smem<Smem>();
  const int unit = blockIdx.x, group = blockIdx.y, h0 = unit * ROWS, rows = min(HEADS - h0, ROWS);
  const List list(g_lengths, BATCH, gridDim.y);
  if (!list.has_share(group)) return;
  int now = list.begin(group);
  const int end = list.begin(group + 1);
  Place<KEYS> at = list.find(now);
  Loader loader(g_kv, g_table, list, at, end - now);

  auto load_q = [&](int b) {
    const int row0 = warp_id() * (ROWS / WARPS);
    copy_rows(s.q, int64_t(g_q.at(b, 0, h0 + row0 + lane_id())), rows - row0);
  };
  load_q(at.b);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    loader.start_loading(s.ring[i]);
    cp_async_commit();
  }

  const float sigma2 = sigma * LOG2_E;
  Scores scores;
  int t = 0;
#pragma unroll 1
  while (now < end) {  // a stretch of one sequence
    const int count = min(at.tiles() - at.tile, end - now);
    const bool more = now + count < end;
    Output r_o;
    r_o.clear();
#pragma unroll 1
    for (int i = 0; i < count; ++i, ++t) {
      if (i == 0)
        cp_async_wait<0>();  // Q too, which was asked for last
      else
        cp_async_wait<STAGES - 2>();
      block_sync();  // the tile is here for all, and the one before is used up
      loader.start_loading(s.ring[(t + STAGES - 1) % STAGES]);
      cp_async_commit();

      const KeyTile& tile = s.ring[t % STAGES];
      if (scores.has_piece()) scores.multiply(s, tile, (at.tile + i) * KEYS, at.length);
      block_sync();
      if (i + 1 == count && more) {
        load_q(at.b + 1);
        cp_async_commit();
      }
      if (scores.has_piece()) {
        scores.weigh(s, sigma2);
        if (i + 1 == count) scores.leave(s);
      }
      block_sync();
      accumulate(s, tile, r_o);
    }

    if (count == at.tiles()) {
      store_output(s, r_o, g_o.at(at.b, 0, h0), g_o.stride[2], g_lse.at(at.b, h0), rows, sigma);
    } else {
      const int begin = now - at.tile;  // the sequence's first tile in the list
      const int first = list.group_of(begin), last = list.group_of(begin + at.tiles() - 1);
      const Parts parts = parts_of_groups(g_part, g_part_lse, unit, gridDim.x, first, last);
      const int mine = parts.place(group - first);
      store_output(s, r_o, g_part.at(mine), LATENT, g_part_lse.at(mine), rows, sigma);
      if (comes_last(s, g_tickets + at.b * gridDim.x + unit, parts.count)) {
        Quad* room = reinterpret_cast<Quad*>(&s.ring[(t + STAGES - 1) % STAGES]) + warp_id() * (ROOM * WARP);
        const int col = threadIdx.x % (LATENT / 4) * 4;
#pragma unroll 1
        for (int row0 = threadIdx.x / (LATENT / 4); row0 < rows; row0 += AT_ONCE * APART) {
          Quad o[AT_ONCE];
          float lse[AT_ONCE];
          parts.merge<ROOM>(o, lse, room, row0, APART, min(ceil_div(rows - row0, APART), AT_ONCE), col, true);
#pragma unroll
          for (int row = row0, r = 0; r < AT_ONCE && row < rows; ++r, row += APART) {
            store_quad(g_o.at(at.b, 0, h0 + row) + col, o[r]);
            if (col == 0) store_global(g_lse.at(at.b, h0 + row), lse[r]);
          }
        }
      }
    }
    now += count;
    if (more) list.skip(at, count);
  }
}
