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

HeldStores* make_held();
void free_held(HeldStores* h);

inline int& bucket(HeldStores& h, uint64_t chunk) { return h.newest[(chunk * 0x9e3779b97f4a7c15ull) >> 52]; }
char* behind(uint64_t address);

SIMT_COLD void hold(uint64_t address, const void* data, size_t bytes);

/// Reads global memory as the running block sees it.
SIMT_COLD void read_held(void* to, uint64_t address, size_t bytes);

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

SIMT_COLD void publish_fenced();
SIMT_COLD void publish_all(Block& block);
/// An atomic works on memory itself, so what the block holds of its bytes goes there first.
SIMT_COLD void publish_bytes(uint64_t address);

}  // namespace simt
