// Known traffic: each entry makes one kind of access whose sectors, passes and conflicts can be told by hand.
#include "prim/cp_async.cuh"
#include "prim/gmem.cuh"
#include "prim/mma.cuh"
#include "prim/smem.cuh"
#include "prim/warp.cuh"

struct Bytes {
  alignas(16) uint8_t byte[32768];
};

/// Lane t loads T number `first + t * stride`, if t < lanes.
template <class T> DEVICE void load(const T* g_in, int first, int stride, int lanes) {
  int t = threadIdx.x;
  if (t < lanes) load_global(g_in + first + t * stride);
}
KERNEL(64, 1) load4(const float* g_in, int first, int stride, int lanes) { load(g_in, first, stride, lanes); }
KERNEL(64, 1) load16(const Vec16* g_in, int first, int stride, int lanes) { load(g_in, first, stride, lanes); }

/// The same in shared memory, written first by the same threads.
template <class T> DEVICE void share(int first, int stride) {
  auto* s = reinterpret_cast<T*>(dynamic_smem<Bytes>().byte);
  store_shared(s + first + int(threadIdx.x) * stride, T{});
  block_sync();
  load_shared(s + first + int(threadIdx.x) * stride);
}
KERNEL(64, 1) share2(int first, int stride) { share<uint16_t>(first, stride); }
KERNEL(64, 1) share4(int first, int stride) { share<float>(first, stride); }
KERNEL(64, 1) share8(int first, int stride) { share<Pair>(first, stride); }
KERNEL(64, 1) share16(int first, int stride) { share<Vec16>(first, stride); }

/// One ldmatrix.x4 of rows that lie `stride` bytes apart.
KERNEL(32, 1) matrix(int stride) {
  uint8_t* s = dynamic_smem<Bytes>().byte + lane_id() * stride;
  store_shared(reinterpret_cast<Vec16*>(s), Vec16{});
  warp_sync();
  uint32_t r[4];
  ldmatrix_x4(r, s);
}

/// One cp.async a lane, valid in the first `lanes`, into rows of 8 chunks of 16 bytes that begin at `first` and
/// lie `stride` bytes apart; chunk c of a row goes to place c ^ `swap`.
KERNEL(32, 1) copy16(const Vec16* g_in, int lanes, int first, int stride, int swap) {
  const int to = first + lane_id() / 8 * stride + (lane_id() % 8 ^ swap) * 16;
  cp_async16(dynamic_smem<Bytes>().byte + to, g_in + lane_id(), lane_id() < lanes);
  cp_async_commit();
  cp_async_wait<0>();
}

/// Lane t loads `t % 4` numbers before all meet, then all load one more: 3 instructions, then 1, at one call site.
KERNEL(32, 1) uneven(const float* g_in) {
  auto one = [&](int i) { load_global(g_in + i * 32 + int(threadIdx.x)); };
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < (round ? 1 : int(threadIdx.x) % 4); ++i) one(i);
    warp_sync();
  }
}

/// All lanes add to one word.
KERNEL(64, 1) count(int* g_count) { atomicAdd(g_count, 1); }
