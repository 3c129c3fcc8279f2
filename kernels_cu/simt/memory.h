// memory: global memory behind device addresses, shared memory, atomics. Every access is checked; global ones
// are counted.
//
// A device address lies in a window that is reserved and never mapped. Only `translate` turns it into the
// address of the memory behind it, so a kernel that dereferences one itself faults instead of going uncounted
// (see fault.h).
#pragma once
#include "block.h"
#include "traits.h"

namespace simt {

/// The argument whose memory lies nearest to an address; null if the launch has none.
SIMT_COLD const Extent* nearest_extent(uint64_t address);

[[noreturn]] SIMT_COLD void fail_access(uint64_t address, size_t bytes, Touch touch, Site site);

__attribute__((visibility("hidden"))) constinit inline Extent recent_extent{};  // of the last access

SIMT_COLD void find_extent(uint64_t address, size_t bytes, Touch touch, Site site);

/// Checks an access to global memory and returns where the bytes really are.
SIMT_CALL char* translate(const void* pointer, size_t bytes, size_t alignment, Touch touch, Site site);

/// A power-of-two access must be aligned to its size, as on the device.
template <class T> constexpr size_t alignment_of() {
  return sizeof(T) & (sizeof(T) - 1) ? alignof(T) : sizeof(T);
}

SIMT_CALL void load_global_bytes(void* to, const void* p, size_t bytes, size_t alignment, Site site);
SIMT_CALL void store_global_bytes(void* p, const void* from, size_t bytes, size_t alignment, Site site);

template <class T> SIMT_INLINE T load_global(const T* p, Site site = Site::here()) {
  plain<T> v;
  load_global_bytes(&v, p, sizeof(T), alignment_of<T>(), site);
  return v;
}

template <class T> SIMT_INLINE void store_global(T* p, same<T> v, Site site = Site::here()) {
  store_global_bytes(p, &v, sizeof(T), alignment_of<T>(), site);
}

/// __threadfence. Blocks in other processes see the arena too.
void fence(Site site = Site::here());
/// fence.proxy.async: what the thread has written to shared memory becomes visible to wgmma and bulk copies.
SIMT_COLD void fence_mbarriers();  // in mbarrier.cc
void fence_proxy_async(Site site = Site::here());
/// __threadfence_block.
void fence_block(Site site = Site::here());

// ---- shared memory

// NOTE: a kernel sees its shared memory in a window that is reserved and never mapped, so that it reaches the
// bytes only through these functions.

/// The block's shared memory, 1024-byte aligned and full of NaN when the block starts.
SIMT_INLINE void* shared_base() { return machine.shared_window; }

SIMT_INLINE uint64_t shared_offset(const void* p) {
  return static_cast<uint64_t>(static_cast<const char*>(p) - machine.shared_window);
}

[[noreturn]] SIMT_COLD void fail_shared(const void* p, size_t bytes, size_t alignment, Touch touch,
                                        Site site);
/// Checks an access to shared memory and returns where the bytes really are.
SIMT_CALL char* translate_shared(const void* p, size_t bytes, size_t alignment, Touch touch, Site site);

SIMT_CALL void load_shared_bytes(void* to, const void* p, size_t bytes, size_t alignment, Site site);
SIMT_CALL void store_shared_bytes(void* p, const void* from, size_t bytes, size_t alignment, Site site);
template <class T> SIMT_INLINE T load_shared(const T* p, Site site = Site::here()) {
  plain<T> v;
  load_shared_bytes(&v, p, sizeof(T), alignment_of<T>(), site);
  return v;
}
template <class T> SIMT_INLINE void store_shared(T* p, same<T> v, Site site = Site::here()) {
  store_shared_bytes(p, &v, sizeof(T), alignment_of<T>(), site);
}

// ---- atomics, on global or shared memory

SIMT_CALL void* atomic_target(void* p, size_t bytes, Site site);

/// Replaces *p by next(*p) and returns what was there. Atomic among processes, since blocks may run in
/// several.
template <class T, class Next> SIMT_INLINE T atomic_update(T* p, Next next, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics take 4 or 8 bytes");
  T* target = static_cast<T*>(atomic_target(p, sizeof(T), site));
  T before, after;
  __atomic_load(target, &before, __ATOMIC_SEQ_CST);
  do after = next(before);
  while (!__atomic_compare_exchange(target, &before, &after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  if (machine.launch.resident > 1) [[unlikely]]
    yield_block(false);
  return before;
}

template <class T> inline T atomic_add(T* p, same<T> v, Site site = Site::here()) {
  return atomic_update(p, [v](T old) { return T(old + v); }, site);
}
template <class T> inline T atomic_max(T* p, same<T> v, Site site = Site::here()) {
  return atomic_update(p, [v](T old) { return old < v ? v : old; }, site);
}
template <class T> inline T atomic_min(T* p, same<T> v, Site site = Site::here()) {
  return atomic_update(p, [v](T old) { return v < old ? v : old; }, site);
}
template <class T> inline T atomic_exch(T* p, same<T> v, Site site = Site::here()) {
  return atomic_update(p, [v](T) { return v; }, site);
}
template <class T> inline T atomic_cas(T* p, same<T> expected, same<T> v,
                                       Site site = Site::here()) {
  return atomic_update(p, [=](T old) { return memcmp(&old, &expected, sizeof(T)) == 0 ? v : old; }, site);
}

}  // namespace simt
