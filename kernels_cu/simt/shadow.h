// shadow: races in shared memory. Two accesses to a byte, one of them a write, must be ordered (clock.h); if
// they are not, the launch ends with both places and what is missing between them.
//
// Each 16 bytes of shared memory carry the accesses that a later one can still race with: the last write of
// every byte, and the reads since. A cp.async belongs to its thread and is unordered with everything from its
// issue to its wait, also with the thread's own accesses.
#pragma once
#include "clock.h"

namespace simt {

/// Of what an access does to shared memory. NOTE: the async proxy (bulk copies, wgmma) will be two more.
enum class Touch : uint8_t { read, write, atomic, copy };

struct Access16 {
  uint16_t bytes;  // which of the 16
  uint16_t warp;
  Touch touch;
  bool pending;  // a cp.async that has not been waited for
  uint32_t lanes, clock;
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

inline Shadow* make_shadow(size_t bytes) {
  Shadow* s = static_cast<Shadow*>(zeroed(sizeof(Shadow)));
  s->count = (bytes + 15) / 16;
  s->chunks = static_cast<Chunk*>(zeroed(s->count * sizeof(Chunk)));
  return s;
}
inline void free_shadow(Shadow* s) {
  if (!s) return;
  for (size_t i = 0; i < s->count; ++i) free(s->chunks[i].items);
  free(s->chunks), free(s);
}
/// A new block has nothing behind it.
inline void clear_shadow(Shadow& s) {
  for (size_t i = 0; i < s.count; ++i) s.chunks[i].count = 0;
}

SIMT_COLD const char* touch_name(Touch touch) {
  return touch == Touch::read ? "read" : touch == Touch::atomic ? "atomic access" : "write";
}

[[noreturn]] SIMT_COLD void report_race(const Access16& before, uint32_t lanes, size_t chunk, uint16_t bytes,
                                        Touch touch, Site site) {
  int lane = __builtin_ctz(lanes), other = before.warp * LANES + lane, me = thread_number();
  uint32_t both = before.bytes & bytes;
  size_t first = chunk * 16 + __builtin_ctz(both), last = chunk * 16 + 31 - __builtin_clz(both);
  const uint3 &t = current->thread_idx, &u = thread_at(other), &b = machine.block->index;
  machine.report->race = 1;
  say("%s: race in shared memory, bytes %zu to %zu: %s%s by thread (%u,%u,%u) at %s:%d and %s%s by thread "
      "(%u,%u,%u) at %s:%d",
      machine.launch.kernel, first, last, touch == Touch::copy ? "cp.async " : "", touch_name(touch), t.x,
      t.y, t.z, site.name(), site.line, before.touch == Touch::copy ? "cp.async " : "",
      touch_name(before.touch), u.x, u.y, u.z, before.site.name(), before.site.line);
  say(" of block (%u,%u,%u); missing: ", b.x, b.y, b.z);
  const char* barrier = before.warp == me / LANES ? "a __syncwarp or a barrier" : "a barrier that both reach";
  if (before.pending && other == me)
    say("the wait of that thread for its copy (cp_async_wait), in between");
  else if (before.pending)
    say("the wait of that thread for its copy (cp_async_wait), and %s after it", barrier);
  else
    say("%s, in between", barrier);
  give_up();
}

/// Drops the bytes from an access; true if none is left.
inline bool covered(Access16& a, uint16_t bytes) { return (a.bytes &= ~bytes) == 0; }

inline void touch_chunk(size_t index, uint16_t bytes, Touch touch, Site site) {
  Clocks& clocks = *machine.block->clocks;
  Chunk& chunk = machine.block->shadow->chunks[index];
  int me = thread_number(), warp = me / LANES;
  uint32_t bit = 1u << me % LANES, clock = clocks.own[me];
  bool writes = touch != Touch::read;
  if (chunk.epoch != clocks.epoch) {
    int kept = 0;
    for (int i = 0; i < chunk.count; ++i)
      if (chunk.items[i].pending) chunk.items[kept++] = chunk.items[i];
    chunk.count = kept, chunk.epoch = clocks.epoch;
  }
  int kept = 0;
  bool merged = false;
  for (int i = 0; i < chunk.count; ++i) {
    Access16 a = chunk.items[i];
    bool drop = false;
    if (a.bytes & bytes) {
      bool conflict =
          (writes || a.touch != Touch::read) && !(touch == Touch::atomic && a.touch == Touch::atomic);
      if (a.pending) report_race(a, a.lanes, index, bytes, touch, site);
      if (conflict) {
        if (uint32_t unordered = a.lanes & ~ordered_lanes(clocks, me, a.warp, a.clock)) [[unlikely]]
          report_race(a, unordered, index, bytes, touch, site);
        if (writes) drop = covered(a, bytes);  // whoever comes after this write comes after that access
      } else if (touch == a.touch && a.warp == warp) {
        if (a.clock == clock && a.bytes == bytes && a.site == site)
          a.lanes |= bit, merged = true;
        else if (!(a.lanes & ~ordered_lanes(clocks, me, warp, a.clock)))
          drop = covered(a, bytes);  // whoever comes after this access comes after that one
      }
    }
    if (!drop) chunk.items[kept++] = a;
  }
  chunk.count = kept;
  if (merged) return;
  grow(chunk.items, chunk.count, chunk.capacity, 4);
  chunk.items[chunk.count++] = {bytes, uint16_t(warp), touch, touch == Touch::copy, bit, clock, site};
}

/// The running thread touches `bytes` bytes of shared memory at an offset.
SIMT_COLD void touch_shared(size_t offset, size_t bytes, Touch touch, Site site) {
  for_chunks(offset, bytes,
             [&](uint64_t chunk, uint16_t mask, uint64_t) { touch_chunk(chunk, mask, touch, site); });
}

/// The running thread has waited for its copy to this place: from here on it is an ordinary write.
inline void land_copy(size_t offset, size_t bytes) {
  int me = thread_number();
  Chunk& chunk = machine.block->shadow->chunks[offset / 16];
  uint16_t mask = uint16_t(((1u << bytes) - 1) << offset % 16);
  for (int i = 0; i < chunk.count; ++i) {
    Access16& a = chunk.items[i];
    if (a.pending && a.bytes == mask) a.pending = false, a.clock = machine.block->clocks->own[me];
  }
}

}  // namespace simt
