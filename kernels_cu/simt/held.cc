#include "held.h"

namespace simt {

HeldStores* make_held() {
  HeldStores* h = static_cast<HeldStores*>(zeroed(sizeof(HeldStores)));
  memset(h->newest, 0xff, sizeof h->newest);
  return h;
}

void free_held(HeldStores* h) {
  if (h) free(h->items), free(h);
}

char* behind(uint64_t address) {
  return reinterpret_cast<char*>(address + machine.launch.window_to_memory);
}

void hold(uint64_t address, const void* data, size_t bytes) {
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

void read_held(void* to, uint64_t address, size_t bytes) {
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

void publish_fenced() {
  HeldStores& h = *machine.block->held;
  Clocks& clocks = *machine.block->clocks;
  int me = clock_number();
  publish(h, [&](const HeldStore& s) {
    return s.epoch != clocks.epoch || is_ordered(clocks, me, s.thread, s.clock);
  });
}

void publish_all(Block& block) {
  if (block.held) publish(*block.held, [](const HeldStore&) { return true; });
}

void publish_bytes(uint64_t address) {
  publish(*machine.block->held, [&](const HeldStore& s) { return s.chunk == address / 16; });
}

}  // namespace simt
