// shadow: races in shared memory. Two accesses to a byte, one of them a write, must be ordered (clock.h); if
// they are not, the launch ends with both places and what is missing between them.
//
// Each 16 bytes of shared memory carry the accesses that a later one can still race with: the last write of
// every byte, and the reads since. What runs by itself is unordered with everything from its issue on, also
// with its own thread: a cp.async, and a bulk copy that reads shared memory, until that thread's wait; a bulk
// copy that fills it, and a wgmma, for all who do not know that it is over.
//
// The async proxy sees a plain write only past a proxy fence, so such a write is kept, even when everybody
// has met since, until one lies behind it.
#pragma once
#include "clock.h"

namespace simt {

/// Of what an access does to shared memory; from `write` on it writes. The bulk_ and wgmma_ ones go by the
/// async proxy.
enum class Touch : uint8_t { read, bulk_read, wgmma_read, write, atomic, copy, bulk_write };
constexpr bool writes(Touch t) { return t >= Touch::write; }
constexpr bool is_async(Touch t) {
  return t == Touch::bulk_read || t == Touch::wgmma_read || t == Touch::bulk_write;
}

struct Access16 {
  uint16_t bytes;  // which of the 16
  uint16_t warp;
  Touch touch;
  bool pending : 1;       // its thread has not waited for it
  bool met : 1;           // everybody has met since
  uint16_t counter;       // 1 + number of the one that says when it is over; 0: its thread's clock does
  uint32_t lanes, clock;  // clock: of its thread, or how much of the counter must be over
  Site site;
};
struct Chunk {
  Access16* items;
  int count, capacity;
  uint32_t epoch;
};
struct Shadow {
  Chunk* chunks;
  size_t count;
};

Shadow* make_shadow(size_t bytes);
void free_shadow(Shadow* s);
/// A new block has nothing behind it.
void clear_shadow(Shadow& s);

SIMT_COLD const char* touch_name(Touch touch);

/// Drops the bytes from an access; true if none is left.
inline bool covered(Access16& a, uint16_t bytes) { return (a.bytes &= ~bytes) == 0; }

/// One access of the running thread to 16 bytes of a block. `counter` and `count`: see Access16.
void touch_chunk(Block& block, size_t index, uint16_t bytes, Touch touch, Site site, int counter = 0,
                        uint32_t count = 0);

/// The running thread touches `bytes` bytes of shared memory at an offset.
SIMT_COLD void touch_shared(size_t offset, size_t bytes, Touch touch, Site site);
/// It starts what touches a block's shared memory until `count` of a counter is over.
SIMT_COLD void touch_counted(Block& block, size_t offset, size_t bytes, Touch touch, Site site, int counter,
                             uint32_t count);

/// The running thread has waited for what it had started on this place: from here on that is ordinary.
void land_touch(size_t offset, size_t bytes, Touch touch);

}  // namespace simt
