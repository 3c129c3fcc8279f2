// tma: how bulk copies are started and waited for (bulk.h says what they do).
#pragma once
#include "bulk.h"

namespace simt {

SIMT_COLD BulkCopy describe_tile(const TensorMap& map, const int* at, int rank, const void* shared,
                                 Site site);

/// The copy goes to the same place of these blocks of the cluster, and completes the mbarrier at the same
/// place.
SIMT_COLD void start_load(BulkCopy copy, const void* s_to, const void* s_bar, uint32_t ranks);
SIMT_COLD void start_store(BulkCopy copy, const void* s_from);

/// Loads the tile whose first element is at these coordinates, innermost first; what lies beyond the array is
/// zero.
template <int RANK> inline void tma_load(void* s_to, const TensorMap& map, const int (&at)[RANK], void* s_bar,
                                         Site site = Site::here()) {
  start_load(describe_tile(map, at, RANK, s_to, site), s_to, s_bar, 1u << machine.block->rank);
}
template <int RANK> inline void tma_load_multicast(void* s_to, const TensorMap& map, const int (&at)[RANK],
                                                   void* s_bar, uint32_t ranks, Site site = Site::here()) {
  if (!ranks) fail(site, "a bulk copy to no block of the cluster");
  start_load(describe_tile(map, at, RANK, s_to, site), s_to, s_bar, ranks);
}
/// Stores a tile; what lies beyond the array is not written.
template <int RANK> inline void tma_store(const TensorMap& map, const int (&at)[RANK], const void* s_from,
                                          Site site = Site::here()) {
  start_store(describe_tile(map, at, RANK, s_from, site), s_from);
}
void bulk_load(void* s_to, const void* g_from, int bytes, void* s_bar, Site site = Site::here());
void bulk_store(void* g_to, const void* s_from, int bytes, Site site = Site::here());

/// Closes the group of bulk stores issued since the last commit.
void bulk_commit(Site site = Site::here());
/// Waits until at most `allow` of this thread's groups of stores are under way.
void bulk_wait(int allow, Site site = Site::here());

}  // namespace simt
