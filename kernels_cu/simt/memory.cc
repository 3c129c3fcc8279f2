#include "memory.h"

namespace simt {

const Extent* nearest_extent(uint64_t address) {
  const Extent* best = nullptr;
  uint64_t best_distance = ~0ull;
  for (int i = 0; i < machine.launch.extent_count; ++i) {
    const Extent& e = machine.launch.extents[i];
    uint64_t distance = address < e.first ? e.first - address : address >= e.end ? address - e.end + 1 : 0;
    if (distance < best_distance) best = &e, best_distance = distance;
  }
  return best;
}

void fail_access(uint64_t address, size_t bytes, Touch touch, Site site) {
  const char* verb = touch_name(touch);
  if (address - machine.launch.window >= machine.launch.window_bytes)
    fail(site, "%s of %zu bytes of global memory at %#llx, which is not a device address", verb, bytes,
         static_cast<unsigned long long>(address));
  const Extent* e = nearest_extent(address);
  if (!e) fail(site, "%s of %zu bytes of global memory, but the launch has no array argument", verb, bytes);
  long long offset = static_cast<long long>(address - e->first),
            size = static_cast<long long>(e->end - e->first);
  if (offset >= 0 && offset + static_cast<long long>(bytes) <= size)
    fail(site, "misaligned %s of %zu bytes at byte %lld of %s (address %#llx)", verb, bytes, offset, e->name,
         static_cast<unsigned long long>(address));
  fail(site, "%s of %zu bytes at byte %lld of %s, which has %lld", verb, bytes, offset, e->name, size);
}

void find_extent(uint64_t address, size_t bytes, Touch touch, Site site) {
  for (int i = 0; i < machine.launch.extent_count; ++i) {
    const Extent& e = machine.launch.extents[i];
    if (address >= e.first && address <= e.end && e.end - address >= bytes) {
      recent_extent = e;
      return;
    }
  }
  fail_access(address, bytes, touch, site);
}

void fence(Site site) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (machine.watched) [[unlikely]]
    watch_fence(site, true);
  if (machine.launch.resident > 1) [[unlikely]]
    yield_block(false);
}

void fence_proxy_async(Site site) {
  if (machine.watched) [[unlikely]]
    watch_proxy_fence(site);
  if (machine.block->async) fence_mbarriers();
}

void fence_block(Site site) {
  if (machine.watched) [[unlikely]]
    watch_fence(site, false);
}

void fail_shared(const void* p, size_t bytes, size_t alignment, Touch touch,
                                        Site site) {
  long long offset = static_cast<long long>(shared_offset(p));
  if (reinterpret_cast<uintptr_t>(p) & (alignment - 1))
    fail(site, "misaligned %s of %zu bytes at byte %lld of shared memory", touch_name(touch), bytes, offset);
  if (reinterpret_cast<uint64_t>(p) - machine.launch.window < machine.launch.window_bytes)
    fail(site, "shared memory %s of %zu bytes, but the pointer is a global one", touch_name(touch), bytes);
  fail(site, "%s of %zu bytes at byte %lld of shared memory, which has %zu", touch_name(touch), bytes, offset,
       size_t(machine.launch.smem_bytes));
}

}  // namespace simt
