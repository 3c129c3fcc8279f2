// async: cp.async. A copy happens as late as is legal, when its own thread waits for its group, so that a
// missing wait reads NaN and a buffer filled too early overwrites what is still in use; or eagerly, when it
// is issued.
#pragma once
#include "warp.h"

namespace simt {

void copy_now(const Copy& copy);

/// Copies `source_bytes` bytes and fills the rest of `bytes` (4, 8 or 16) with zero. With 0 source bytes
/// g_from is not read.
SIMT_INLINE void cp_async(void* s_to, const void* g_from, int bytes, int source_bytes,
                          Site site = Site::here()) {
  if ((bytes != 4 && bytes != 8 && bytes != 16) || source_bytes < 0 || source_bytes > bytes) [[unlikely]]
    fail(site, "cp.async of %d bytes, %d of them read: expected 4, 8 or 16, and at most as many read", bytes,
         source_bytes);
  char* to = translate_shared(s_to, bytes, bytes, Touch::write, site);
  if (source_bytes) translate(g_from, source_bytes, bytes, Touch::read, site);
  machine.counters.bytes_loaded += source_bytes;
  machine.counters.bytes_async += source_bytes;
  Copy copy{to, reinterpret_cast<uint64_t>(g_from), bytes, source_bytes, site};
  if (machine.watched) [[unlikely]] {
    watch_copy(copy.from, shared_offset(s_to), source_bytes, site);
    watch_shared(shared_offset(s_to), bytes, Touch::copy, Access::shared_copy, site);
  }
  if (!machine.launch.copies_late) {
    copy_now(copy);
    if (!machine.launch.races) return;  // else it is not waited for yet
  }
  CopyQueue& queue = current->copies;
  if (queue.count == queue.capacity) [[unlikely]]
    grow(queue.items, queue.count, queue.capacity, 64);
  queue.items[queue.count++] = copy;
}

/// Closes the group of copies issued since the last commit.
void cp_async_commit(Site site = Site::here());

/// Waits until at most `allow` of this thread's groups are in flight.
void cp_async_wait(int allow, Site site = Site::here());

}  // namespace simt
