#include "shadow.h"

namespace simt {

Shadow* make_shadow(size_t bytes) {
  Shadow* s = static_cast<Shadow*>(zeroed(sizeof(Shadow)));
  s->count = (bytes + 15) / 16;
  s->chunks = static_cast<Chunk*>(zeroed(s->count * sizeof(Chunk)));
  return s;
}

void free_shadow(Shadow* s) {
  if (!s) return;
  for (size_t i = 0; i < s->count; ++i) free(s->chunks[i].items);
  free(s->chunks), free(s);
}

void clear_shadow(Shadow& s) {
  for (size_t i = 0; i < s.count; ++i) s.chunks[i].count = 0;
}

const char* touch_name(Touch touch) {
  return touch == Touch::atomic ? "atomic access" : writes(touch) ? "write" : "read";
}

static SIMT_COLD void say_touch(Touch touch, int thread, Site site) {
  int per_block = machine.block->warps * LANES;
  uint3 t = thread_at(thread % per_block);
  const char* who = touch == Touch::copy         ? "cp.async "
                    : touch == Touch::wgmma_read ? "wgmma's "
                                                 : "bulk copy's ";
  say("%s%s by thread (%u,%u,%u)", touch == Touch::copy || is_async(touch) ? who : "", touch_name(touch), t.x,
      t.y, t.z);
  if (thread / per_block != machine.block->rank) say(" of block %d of the cluster", thread / per_block);
  say(" at %s:%d", site.name(), site.line);
}

/// What would have ordered an access and a later one of the running thread.
static SIMT_COLD void say_missing(const Access16& before, int other) {
  int me = clock_number();
  const char* barrier = before.warp == me / LANES ? "a __syncwarp or a barrier" : "a barrier that both reach";
  uint32_t name = before.counter ? machine.block->clocks->counter_name[before.counter - 1] : 0;
  if (before.touch == Touch::wgmma_read)
    say("the wait of warpgroup %u for its product (wgmma_wait), and a barrier after it for others", name);
  else if (before.counter)
    say("a wait for phase %u of the mbarrier at byte %u, which that copy completes", before.clock - 1, name);
  else if (before.pending)
    say("the wait of that thread for its copy (%s), %s%s%s",
        before.touch == Touch::copy ? "cp_async_wait" : "bulk_wait_read", other == me ? "in between" : "and ",
        other == me ? "" : barrier, other == me ? "" : " after it");
  else
    say("%s, in between", barrier);
}

[[noreturn]] static SIMT_COLD void report_race(const Access16& before, uint32_t lanes, size_t chunk,
                                               uint16_t bytes, Touch touch, Site site, bool proxy = false) {
  int other = before.warp * LANES + __builtin_ctz(lanes);
  uint32_t both = before.bytes & bytes;
  size_t first = chunk * 16 + __builtin_ctz(both), last = chunk * 16 + 31 - __builtin_clz(both);
  const uint3& b = machine.block->index;
  machine.report->race = 1;
  say("%s: race in shared memory, bytes %zu to %zu: ", machine.launch.kernel, first, last);
  say_touch(touch, clock_number(), site);
  say(" and ");
  say_touch(before.touch, other, before.site);
  say(" of block (%u,%u,%u); missing: ", b.x, b.y, b.z);
  if (proxy)
    say("fence_proxy_async() after that write and before the barrier behind it, for the async proxy does not "
        "see plain writes");
  else
    say_missing(before, other);
  give_up();
}

/// Whether an access can still race with a later one although everybody has met since.
static bool outlives_meeting(Clocks& clocks, Access16& a) {
  if (a.pending) return true;
  if (a.counter) return clocks.common[clocks.first_counter + a.counter - 1] < a.clock;
  if (!clocks.proxies || !writes(a.touch)) return false;
  a.met = true;
  return (a.lanes &= ~commonly_proxied_lanes(clocks, a.warp, a.clock)) != 0;
}

/// The lanes of an access that are not ordered before what the running thread does now.
static uint32_t unordered_lanes(Clocks& clocks, const Access16& a) {
  int me = clock_number();
  if (a.pending) return a.lanes;
  if (a.counter) return known_count(clocks, me, a.counter - 1) < a.clock ? a.lanes : 0;
  return a.met ? 0 : a.lanes & ~ordered_lanes(clocks, me, a.warp, a.clock);
}

void touch_chunk(Block& block, size_t index, uint16_t bytes, Touch touch, Site site, int counter,
                        uint32_t count) {
  Clocks& clocks = *block.clocks;
  Chunk& chunk = block.shadow->chunks[index];
  int me = clock_number(), warp = me / LANES;
  uint32_t bit = 1u << me % LANES, clock = clocks.own[me];
  if (chunk.epoch != clocks.epoch) {
    int kept = 0;
    for (int i = 0; i < chunk.count; ++i)
      if (outlives_meeting(clocks, chunk.items[i])) chunk.items[kept++] = chunk.items[i];
    chunk.count = kept, chunk.epoch = clocks.epoch;
  }
  int kept = 0;
  bool merged = false;
  for (int i = 0; i < chunk.count; ++i) {
    Access16 a = chunk.items[i];
    bool drop = false;
    if (a.bytes & bytes) {
      bool conflict =
          (writes(touch) || writes(a.touch)) && !(touch == Touch::atomic && a.touch == Touch::atomic);
      if (conflict) {
        if (uint32_t unordered = unordered_lanes(clocks, a)) [[unlikely]]
          report_race(a, unordered, index, bytes, touch, site);
        if (is_async(touch) && writes(a.touch) && !a.counter)
          if (uint32_t unseen = a.lanes & ~proxied_lanes(clocks, me, a.warp, a.clock)) [[unlikely]]
            report_race(a, unseen, index, bytes, touch, site, true);
        // Whoever comes after this write comes after that access. An atomic is no such write to other
        // atomics.
        if (writes(touch) && touch != Touch::atomic) drop = covered(a, bytes);
      } else if (touch == a.touch && a.warp == warp && !a.pending) {
        if (a.clock == clock && a.bytes == bytes && a.site == site && !is_async(touch))
          a.lanes |= bit, merged = true;
        else if (!unordered_lanes(clocks, a))
          drop = covered(a, bytes);  // whoever comes after this access comes after that one
      }
    }
    if (!drop) chunk.items[kept++] = a;
  }
  chunk.count = kept;
  if (merged) return;
  grow(chunk.items, chunk.count, chunk.capacity, 4);
  bool pending = touch == Touch::copy || touch == Touch::bulk_read;
  chunk.items[chunk.count++] = {bytes, uint16_t(warp),          touch, pending, false, uint16_t(counter),
                                bit,   counter ? count : clock, site};
}

void touch_shared(size_t offset, size_t bytes, Touch touch, Site site) {
  for_chunks(offset, bytes, [&](uint64_t chunk, uint16_t mask, uint64_t) {
    touch_chunk(*machine.block, chunk, mask, touch, site);
  });
}

void touch_counted(Block& block, size_t offset, size_t bytes, Touch touch, Site site, int counter,
                             uint32_t count) {
  for_chunks(offset, bytes, [&](uint64_t chunk, uint16_t mask, uint64_t) {
    touch_chunk(block, chunk, mask, touch, site, counter + 1, count);
  });
}

void land_touch(size_t offset, size_t bytes, Touch touch) {
  int me = clock_number();
  for_chunks(offset, bytes, [&](uint64_t index, uint16_t mask, uint64_t) {
    Chunk& chunk = machine.block->shadow->chunks[index];
    for (int i = 0; i < chunk.count; ++i) {
      Access16& a = chunk.items[i];
      if (!a.pending || a.touch != touch || a.bytes != mask || a.warp != me / LANES ||
          !(a.lanes >> me % LANES & 1))
        continue;
      a.pending = a.met = false, a.clock = machine.block->clocks->own[me];
      return;
    }
  });
}

}  // namespace simt
