// append_rope: `append` with rotary position embedding: each K row is turned by its position on its way.
//
//   (x, y) ← (x cos − y sin, y cos + x sin)        of pair i < ROTARY / 2 of a row, cos and sin at [p, i]
//   cache[table[b, p / PAGE], p % PAGE, :, :] = row        with p = lengths[b] + t; of V as it came
//
// Into a cache of bytes goes row / scale, rounded (rows.cuh).
//
// Pair i is the elements i and i + ROTARY / 2 or, with INTERLEAVED, 2i and 2i + 1; those from ROTARY on stay
// as they are. append_rope_q turns the token's queries as well.
//
// grid    (T, B)
// block   one new token; a warp turns one head after another, and keeps the angles: a lane those of its units
// bytes   every new row read once and written once, the token's angles once a warp, one length and one page
//         number a thread; where scales are arrays, one of K a lane and head, one of V a thread and step
#include "cache/rows.cuh"
#include "prim/paging.cuh"
#include "prim/warp.cuh"

constexpr int THREADS = WARP * WARPS, CHUNKS = HEAD_DIM / 8;
constexpr int UNITS = ROTARY / 4;             // of two pairs of elements, turned by neighbouring angles
constexpr int STEPS = ceil_div(UNITS, WARP);  // units a lane has

/// Cosines and sines of both angles of a lane's units.
struct Turn {
  Pair cos[STEPS], sin[STEPS];
};

DEVICE Turn load_turn(const View<const float, 2>& g_cos, const View<const float, 2>& g_sin, int position) {
  Turn turn;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int unit = lane_id() + WARP * step;
    if (unit >= UNITS) break;
    turn.cos[step] = load_pair(g_cos.at(position) + 2 * unit);
    turn.sin[step] = load_pair(g_sin.at(position) + 2 * unit);
  }
  return turn;
}

DEVICE Pair turned(float x, float y, float cos, float sin) {
  return Pair{x * cos - y * sin, y * cos + x * sin};
}

/// A head's row turned by the warp, as a cache of T takes it: in float32, rounded once.
template <class T> DEVICE void turn_row(const Element* from, Cell<T>* to, const Turn& turn, float scale) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int unit = lane_id() + WARP * step;
    if (unit >= UNITS) break;
    const int first = INTERLEAVED ? 4 * unit : 2 * unit;
    const int second = INTERLEAVED ? first + 2 : first + ROTARY / 2;
    const Pair a = load_pair(from + first), b = load_pair(from + second);
    const Pair cos = turn.cos[step], sin = turn.sin[step];
    if (INTERLEAVED) {
      const Pair p = turned(a.a, a.b, cos.a, sin.a), q = turned(b.a, b.b, cos.b, sin.b);
      store_two<T>(to + first, p.a, p.b, scale);
      store_two<T>(to + second, q.a, q.b, scale);
    } else {
      const Pair p = turned(a.a, b.a, cos.a, sin.a), q = turned(a.b, b.b, cos.b, sin.b);
      store_two<T>(to + first, p.a, q.a, scale);
      store_two<T>(to + second, p.b, q.b, scale);
    }
  }
  for (int col = ROTARY + 2 * lane_id(); col < HEAD_DIM; col += 2 * WARP)
    copy_two<T>(to + col, from + col, scale);
}

DEVICE void append_token(const View<const Element, 4>& g_k_new, const View<const Element, 4>& g_v_new,
                         const View<Cell<Stored>, 4>& g_k, const View<Cell<Stored>, 4>& g_v,
                         const View<const int, 2>& g_table, int position, const Turn& turn,
                         const Scales& scales) {
  const int t = blockIdx.x, b = blockIdx.y, page = page_of<PAGE_SIZE>(g_table.at(b), position);
  for (int i = threadIdx.x; i < HKV * CHUNKS; i += THREADS) {
    const int hkv = i / CHUNKS, col = i % CHUNKS * 8;
    copy_eight<Stored>(row_in_page<PAGE_SIZE>(g_v, page, position, hkv) + col, g_v_new.at(b, t, hkv) + col,
                       scales.of_v<SCALES>(page, hkv, HKV));
  }
  for (int hkv = warp_id(); hkv < HKV; hkv += WARPS)
    turn_row<Stored>(g_k_new.at(b, t, hkv), row_in_page<PAGE_SIZE>(g_k, page, position, hkv), turn,
                     scales.of_k<SCALES>(page, hkv, HKV));
}

KERNEL(THREADS, 1)
append_rope(const View<const Element, 4> g_k_new, const View<const Element, 4> g_v_new,
            const View<Cell<Stored>, 4> g_k, const View<Cell<Stored>, 4> g_v,
            const View<const int, 2> g_table, const int* g_lengths, const View<const float, 2> g_cos,
            const View<const float, 2> g_sin, const float* g_k_scale, const float* g_v_scale, float k_scale,
            float v_scale) {
  const Scales scales{g_k_scale, g_v_scale, k_scale, v_scale};
  const int position = load_global(g_lengths + blockIdx.y) + blockIdx.x;
  append_token(g_k_new, g_v_new, g_k, g_v, g_table, position, load_turn(g_cos, g_sin, position), scales);
}

KERNEL(THREADS, 1)
append_rope_q(const View<const Element, 4> g_k_new, const View<const Element, 4> g_v_new,
              const View<Cell<Stored>, 4> g_k, const View<Cell<Stored>, 4> g_v,
              const View<const int, 2> g_table, const int* g_lengths, const View<const float, 2> g_cos,
              const View<const float, 2> g_sin, const View<const Element, 4> g_q,
              const View<Element, 4> g_q_turned, const float* g_k_scale, const float* g_v_scale, float k_scale,
              float v_scale) {
  const Scales scales{g_k_scale, g_v_scale, k_scale, v_scale};
  const int t = blockIdx.x, b = blockIdx.y, position = load_global(g_lengths + b) + t;
  const Turn turn = load_turn(g_cos, g_sin, position);
  for (int h = warp_id(); h < H; h += WARPS)
    turn_row<Element>(g_q.at(b, t, h), g_q_turned.at(b, t, h), turn, 1.f);
  append_token(g_k_new, g_v_new, g_k, g_v, g_table, position, turn, scales);
}
