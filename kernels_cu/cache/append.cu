// append: writes the K and V rows of new tokens into the pages of a paged cache.
//
//   cache[table[b, p / PAGE], p % PAGE, :, :] = new[b, t, :, :]        with p = lengths[b] + t
//
// Into a cache of bytes goes new / scale, rounded (rows.cuh).
//
// grid    (T, B)
// block   one new token: HKV · D elements of K and of V, 16 bytes a thread and step
// bytes   every new row read once and written once, one length and one page number a thread; where scales are
//         arrays, two a thread and step
#include "cache/rows.cuh"
#include "prim/paging.cuh"

constexpr int THREADS = 128, CHUNKS = HEAD_DIM / 8;

KERNEL(THREADS, 1)
append(const View<const Element, 4> g_k_new, const View<const Element, 4> g_v_new,
       const View<Cell<Stored>, 4> g_k, const View<Cell<Stored>, 4> g_v, const View<const int, 2> g_table,
       const int* g_lengths, const float* g_k_scale, const float* g_v_scale, float k_scale, float v_scale) {
  const Scales scales{g_k_scale, g_v_scale, k_scale, v_scale};
  const int t = blockIdx.x, b = blockIdx.y, position = load_global(g_lengths + b) + t;
  const int page = page_of<PAGE_SIZE>(g_table.at(b), position);
  for (int i = threadIdx.x; i < HKV * CHUNKS; i += THREADS) {
    const int hkv = i / CHUNKS, col = i % CHUNKS * 8;
    auto copy = [&](const View<const Element, 4>& from, const View<Cell<Stored>, 4>& to, float scale) {
      copy_eight<Stored>(row_in_page<PAGE_SIZE>(to, page, position, hkv) + col, from.at(b, t, hkv) + col,
                         scale);
    };
    copy(g_k_new, g_k, scales.of_k<SCALES>(page, hkv, HKV));
    copy(g_v_new, g_v, scales.of_v<SCALES>(page, hkv, HKV));
  }
}
