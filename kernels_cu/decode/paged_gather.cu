// paged_gather: copies the pages of a cache into one flat piece a sequence, for a decode that knows no pages.
//
//   flat[b, p, :, :] = cache[table[b, p / PAGE], p % PAGE, :, :]        for p < lengths[b], of K and of V
//
// The flat pieces are a cache of one page a sequence: the first block of sequence b writes its table, b, and
// paged.cu attends over it.
//
// grid    (ceil(longest / TOKENS), B), with the longest that the table can name; blocks behind a sequence's
//         end return
// block   TOKENS tokens: their page numbers first, then 16 bytes of K and of V a thread and step; six blocks
//         a multiprocessor keep 48 KB in flight
// smem    the page numbers
// bytes   every K and V row read once and written once, its page number; one length a thread, one number of a
//         flat piece a sequence
#include "prim/paging.cuh"
#include "prim/smem.cuh"
#include "prim/warp.cuh"

constexpr int THREADS = 256, TOKENS = 16, CHUNKS = HEAD_DIM / 8;

struct Smem {
  int page[TOKENS];
};
static_assert(sizeof(Smem) == SMEM_BYTES, "the plan's shared memory must be this struct");

KERNEL(THREADS, 6)
paged_gather(const View<const Element, 4> g_k, const View<const Element, 4> g_v,
             const View<const int, 2> g_table, const int* g_lengths, const View<Element, 4> g_flat_k,
             const View<Element, 4> g_flat_v, const View<int, 2> g_flat_table) {
  Smem& s = dynamic_smem<Smem>();
  const int b = blockIdx.y, first = blockIdx.x * TOKENS,
            tokens = min(load_global(g_lengths + b) - first, TOKENS);
  if (first == 0 && threadIdx.x == 0) store_global(g_flat_table.at(b), b);
  if (tokens <= 0) return;

  if (threadIdx.x < tokens) {
    int page = page_of<PAGE_SIZE>(g_table.at(b), first + threadIdx.x);
    store_shared(&s.page[threadIdx.x], page);
  }
  block_sync();
  for (int i = threadIdx.x; i < tokens * HKV * CHUNKS; i += THREADS) {
    const int token = i / (HKV * CHUNKS), hkv = i / CHUNKS % HKV, col = i % CHUNKS * 8;
    const int page = load_shared(&s.page[token]), key = first + token;
    auto load = [&](const View<const Element, 4>& from) {
      auto row = row_in_page<PAGE_SIZE>(from, page, key, hkv);
      return load_global_streaming(reinterpret_cast<const Vec16*>(row + col));
    };
    auto store = [&](const View<Element, 4>& to, const Vec16& word) {
      store_global(reinterpret_cast<Vec16*>(to.at(b, key, hkv) + col), word);
    };
    const Vec16 k = load(g_k), v = load(g_v);  // NOTE: both before either store, so that both are in flight
    store(g_flat_k, k);
    store(g_flat_v, v);
  }
}
