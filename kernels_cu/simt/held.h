// held: global stores that other blocks cannot see yet. With several blocks in flight a store stays with its
// block until a __threadfence orders it, or the block ends; so a block that forgot the fence is caught
// reading what was there before.
//
// A fence of thread t publishes what t stored and what is ordered before t (clock.h), as on the device.
#pragma once
#include "clock.h"

namespace simt {

struct HeldStore {
  uint64_t chunk;     // address / 16
  uint16_t bytes;     // which of the 16
  int thread, older;  // older: the one before it in the same bucket
  uint32_t epoch, clock;
  char data[16];
};
struct HeldStores {
  static constexpr int BUCKETS = 1 << 12;
  HeldStore* items;  // in program order
  int count, capacity;
  int newest[BUCKETS];  // index into items, or -1
};

inline HeldStores* make_held() {
  HeldStores* h = static_cast<HeldStores*>(zeroed(sizeof(HeldStores)));
  memset(h->newest, 0xff, sizeof h->newest);
  return h;
}
inline void free_held(HeldStores* h) {
  if (h) free(h->items), free(h);
}

inline int& bucket(HeldStores& h, uint64_t chunk) { return h.newest[(chunk * 0x9e3779b97f4a7c15ull) >> 52]; }
inline char* behind(uint64_t address) {
  return reinterpret_cast<char*>(address + machine.launch.window_to_memory);
}

SIMT_COLD void hold(uint64_t address, const void* data, size_t bytes) {
  HeldStores& h = *machine.block->held;
  Clocks& clocks = *machine.block->clocks;
  int me = clock_number();
  for_chunks(address, bytes, [&](uint64_t chunk, uint16_t mask, uint64_t at) {
    grow(h.items, h.count, h.capacity, 64);
    int& newest = bucket(h, chunk);
    HeldStore& s = h.items[h.count];
    s = {chunk, mask, me, newest, clocks.epoch, clocks.own[me], {}};
    memcpy(s.data + at % 16, static_cast<const char*>(data) + (at - address), __builtin_popcount(mask));
    newest = h.count++;
  });
}

/// Reads global memory as the running block sees it.
SIMT_COLD void read_held(void* to, uint64_t address, size_t bytes) {
  memcpy(to, behind(address), bytes);
  HeldStores& h = *machine.block->held;
  for_chunks(address, bytes, [&](uint64_t chunk, uint16_t wanted, uint64_t) {
    for (int i = bucket(h, chunk); i >= 0 && wanted; i = h.items[i].older) {
      const HeldStore& s = h.items[i];
      if (s.chunk != chunk) continue;
      for (uint32_t left = s.bytes & wanted; left; left &= left - 1) {
        int b = __builtin_ctz(left);
        static_cast<char*>(to)[chunk * 16 + b - address] = s.data[b];
      }
      wanted &= ~s.bytes;
    }
  });
}

/// Makes held stores visible that `which` picks. NOTE: what an earlier store still holds of the same bytes is
/// forgotten, or it would overwrite the later one one day.
template <class Which> inline void publish(HeldStores& h, Which which) {
  for (int i = 0; i < h.count; ++i) {
    HeldStore& s = h.items[i];
    if (!which(s)) continue;
    for (uint32_t left = s.bytes; left; left &= left - 1)
      behind(s.chunk * 16)[__builtin_ctz(left)] = s.data[__builtin_ctz(left)];
    for (int j = s.older; j >= 0; j = h.items[j].older)
      if (h.items[j].chunk == s.chunk) h.items[j].bytes &= ~s.bytes;
    s.bytes = 0;
  }
  int kept = 0;
  memset(h.newest, 0xff, sizeof h.newest);
  for (int i = 0; i < h.count; ++i) {
    if (!h.items[i].bytes) continue;
    HeldStore& s = h.items[kept] = h.items[i];
    s.older = bucket(h, s.chunk);
    bucket(h, s.chunk) = kept++;
  }
  h.count = kept;
}

SIMT_COLD void publish_fenced() {
  HeldStores& h = *machine.block->held;
  Clocks& clocks = *machine.block->clocks;
  int me = clock_number();
  publish(h, [&](const HeldStore& s) {
    return s.epoch != clocks.epoch || is_ordered(clocks, me, s.thread, s.clock);
  });
}
SIMT_COLD void publish_all(Block& block) {
  if (block.held) publish(*block.held, [](const HeldStore&) { return true; });
}
/// An atomic works on memory itself, so what the block holds of its bytes goes there first.
SIMT_COLD void publish_bytes(uint64_t address) {
  publish(*machine.block->held, [&](const HeldStore& s) { return s.chunk == address / 16; });
}

}  // namespace simt
