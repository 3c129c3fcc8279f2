// async: cp.async. A copy happens as late as is legal, when its own thread waits for its group, so that a
// missing wait reads NaN and a buffer filled too early overwrites what is still in use; or eagerly, when it
// is issued.
#pragma once
#include "warp.h"

namespace simt {

void copy_now(const Copy& copy);

/// Copies `source_bytes` bytes and fills the rest of `bytes` (4, 8 or 16) with zero. With 0 source bytes
/// g_from is not read.
SIMT_CALL void cp_async(void* s_to, const void* g_from, int bytes, int source_bytes,
                        Site site = Site::here());

/// Closes the group of copies issued since the last commit.
void cp_async_commit(Site site = Site::here());

/// Waits until at most `allow` of this thread's groups are in flight.
void cp_async_wait(int allow, Site site = Site::here());

}  // namespace simt
