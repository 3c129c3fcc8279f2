// tma: bulk copies between global and shared memory by the copy engine (sm_90). One thread starts one;
// bounds, strides and the swizzle are the tensor map's, which the launch passes as `const __grid_constant__
// TensorMap`.
//
// A load completes a phase of an mbarrier, to which its bytes must be announced: all of the tile's, whether
// in the array's bounds or not. A store belongs to a group of its thread, as a cp.async does. Coordinates
// come innermost dimension first; a tile in shared memory begins on a multiple of 128 bytes, a swizzled one
// that another reads by its pattern on a multiple of eight rows.
//
// Where a tile may lie, as seen on an H200 (the CPU machine reports what breaks a rule):
//   innermost coordinate  a multiple of 16 bytes, in loads and stores; else an illegal instruction
//   before the array      loads only; a store with a negative coordinate is an illegal instruction
//   past its end          loads and stores, in every dimension. But a store writes whole 16 bytes: where the
//                         array's rows are no multiple of 16 bytes, a tile across their end overwrites up to
//                         15 bytes of what follows; a load is right there
#pragma once
#include "prim/mbarrier.cuh"
#include "prim/proxy.cuh"

#if !defined(CUATTN_SIMT)
/// 128 bytes that cuTensorMapEncodeTiled wrote.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};
#endif

/// Fetches the map itself, so that the first copy need not wait for it. PTX prefetch.tensormap.
DEVICE void prefetch_map(const TensorMap& map) {
#if !defined(CUATTN_SIMT)
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

#if !defined(CUATTN_SIMT)
#define TMA_LOAD(dims, into, ...)                                                                           \
  asm volatile("cp.async.bulk.tensor." dims                                                                 \
               ".shared::cluster.global.tile.mbarrier::complete_tx::bytes" into::"r"(shared_address(s_to)), \
               "l"(&map), "r"(shared_address(&s_bar)), __VA_ARGS__                                          \
               : "memory")
#define TMA_STORE(dims, into, ...)                                                                 \
  asm volatile("cp.async.bulk.tensor." dims ".global.shared::cta.tile.bulk_group" into::"l"(&map), \
               "r"(shared_address(s_from)), __VA_ARGS__                                            \
               : "memory")
#endif

/// Starts to load the tile whose first element is at `at`; what lies beyond the array becomes zero. PTX
/// cp.async.bulk.tensor.
template <int RANK>
DEVICE void tma_load(void* s_to, const TensorMap& map, const int (&at)[RANK], Mbarrier& s_bar SITE) {
  static_assert(RANK >= 2 && RANK <= 5, "tensor maps have 2 to 5 dimensions");
#if defined(CUATTN_SIMT)
  simt::tma_load(s_to, map, at, &s_bar AT_SITE);
#else
  if constexpr (RANK == 2)
    TMA_LOAD("2d", " [%0], [%1, {%3, %4}], [%2];", "r"(at[0]), "r"(at[1]));
  else if constexpr (RANK == 3)
    TMA_LOAD("3d", " [%0], [%1, {%3, %4, %5}], [%2];", "r"(at[0]), "r"(at[1]), "r"(at[2]));
  else if constexpr (RANK == 4)
    TMA_LOAD("4d", " [%0], [%1, {%3, %4, %5, %6}], [%2];", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]));
  else
    TMA_LOAD("5d", " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
             "r"(at[4]));
#endif
}

/// The same into the same place of every block of the cluster whose bit is set in `ranks`, completing the
/// mbarrier at the same place. PTX cp.async.bulk.tensor.multicast::cluster.
template <int RANK> DEVICE void tma_load_multicast(void* s_to, const TensorMap& map, const int (&at)[RANK],
                                                   Mbarrier& s_bar, uint16_t ranks SITE) {
  static_assert(RANK >= 2 && RANK <= 5, "tensor maps have 2 to 5 dimensions");
#if defined(CUATTN_SIMT)
  simt::tma_load_multicast(s_to, map, at, &s_bar, ranks AT_SITE);
#else
  if constexpr (RANK == 2)
    TMA_LOAD("2d", ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;", "h"(ranks), "r"(at[0]), "r"(at[1]));
  else if constexpr (RANK == 3)
    TMA_LOAD("3d", ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;", "h"(ranks), "r"(at[0]),
             "r"(at[1]), "r"(at[2]));
  else if constexpr (RANK == 4)
    TMA_LOAD("4d", ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;", "h"(ranks), "r"(at[0]),
             "r"(at[1]), "r"(at[2]), "r"(at[3]));
  else
    TMA_LOAD("5d", ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;", "h"(ranks), "r"(at[0]),
             "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]));
#endif
}

/// Starts to store a tile; what lies beyond the array, whose rows are a multiple of 16 bytes, is not written.
/// Plain writes to the tile come before a fence_proxy_async and a barrier. PTX cp.async.bulk.tensor, to
/// global memory.
template <int RANK>
DEVICE void tma_store(const TensorMap& map, const int (&at)[RANK], const void* s_from SITE) {
  static_assert(RANK >= 2 && RANK <= 5, "tensor maps have 2 to 5 dimensions");
#if defined(CUATTN_SIMT)
  simt::tma_store(map, at, s_from AT_SITE);
#else
  if constexpr (RANK == 2)
    TMA_STORE("2d", " [%0, {%2, %3}], [%1];", "r"(at[0]), "r"(at[1]));
  else if constexpr (RANK == 3)
    TMA_STORE("3d", " [%0, {%2, %3, %4}], [%1];", "r"(at[0]), "r"(at[1]), "r"(at[2]));
  else if constexpr (RANK == 4)
    TMA_STORE("4d", " [%0, {%2, %3, %4, %5}], [%1];", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]));
  else
    TMA_STORE("5d", " [%0, {%2, %3, %4, %5, %6}], [%1];", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
              "r"(at[4]));
#endif
}

/// Starts to load `bytes` bytes; place and number are multiples of 16. PTX cp.async.bulk.
DEVICE void bulk_load(void* s_to, const void* g_from, int bytes, Mbarrier& s_bar SITE) {
#if defined(CUATTN_SIMT)
  simt::bulk_load(s_to, g_from, bytes, &s_bar AT_SITE);
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(s_to)),
      "l"(g_from), "r"(bytes), "r"(shared_address(&s_bar))
      : "memory");
#endif
}

/// Starts to store them. PTX cp.async.bulk, to global memory.
DEVICE void bulk_store(void* g_to, const void* s_from, int bytes SITE) {
#if defined(CUATTN_SIMT)
  simt::bulk_store(g_to, s_from, bytes AT_SITE);
#else
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(g_to),
               "r"(shared_address(s_from)), "r"(bytes)
               : "memory");
#endif
}

/// Closes the group of stores started since the last commit. PTX cp.async.bulk.commit_group.
DEVICE void bulk_commit(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::bulk_commit(ONLY_AT_SITE);
#else
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

/// Waits until at most PENDING of this thread's groups still read shared memory. PTX
/// cp.async.bulk.wait_group.read.
template <int PENDING> DEVICE void bulk_wait_read(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::bulk_wait(PENDING AT_SITE);
#else
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
#endif
}

/// Waits until at most PENDING of them are under way: what the others stored is in global memory. PTX
/// cp.async.bulk.wait_group.
template <int PENDING> DEVICE void bulk_wait(SITE_ONLY) {
#if defined(CUATTN_SIMT)
  simt::bulk_wait(PENDING AT_SITE);
#else
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

#undef TMA_LOAD
#undef TMA_STORE
