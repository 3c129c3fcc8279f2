// clock: which accesses of a block's threads are ordered, as vector clocks (Mattern 1989; FastTrack, Flanagan
// & Freund 2009).
//
// A thread stamps what it does with its own clock, which ticks whenever others may come to know of it. Thread
// t knows u up to the clock that reached it through barriers, __syncwarp, and fences around atomics; an
// access of u with a later stamp is not ordered before t. Shuffles and votes order no memory, on the device
// too.
//
// When all threads of a block meet, everything before is ordered for everybody: the epoch moves on, and what
// is known of each other starts from nothing.
#pragma once
#include "state.h"

namespace simt {

/// What was known at some place where threads meet: a barrier, or an address that atomics touch.
struct Known {
  uint32_t epoch;
  uint32_t* clock;  // of each thread; all zero if the epoch is over
};
struct SyncAddress {
  uint64_t address;
  Known known;
};

struct Clocks {
  int threads;
  uint32_t epoch;
  uint32_t* own;
  Known *row, *fenced,
      *heard;  // of each thread: what it knows; knew at its last fence; atomics told it since
  Known barrier[BARRIERS], scratch;
  SyncAddress* addresses;
  int address_count, address_capacity;
};

SIMT_COLD void* zeroed(size_t bytes) {
  void* p = calloc(1, bytes ? bytes : 1);
  if (!p) abort();
  return p;
}
/// Doubles an array that is full.
template <class T, class Int> SIMT_COLD void grow(T*& items, Int count, Int& capacity, Int least) {
  if (count < capacity) return;
  capacity = capacity ? 2 * capacity : least;
  items = static_cast<T*>(realloc(static_cast<void*>(items), size_t(capacity) * sizeof(T)));
  if (!items) abort();
}

/// Calls use(chunk, which of its 16 bytes, address of the first of them) for each 16 bytes that an access touches.
template <class Use> inline void for_chunks(uint64_t address, size_t bytes, Use use) {
  for (uint64_t at = address, end = address + bytes; at < end;) {
    uint64_t in = at % 16, n = 16 - in < end - at ? 16 - in : end - at;
    use(at / 16, uint16_t(((1u << n) - 1) << in), at);
    at += n;
  }
}

inline Clocks* make_clocks(int warps) {
  int threads = warps * LANES;
  Clocks* c = static_cast<Clocks*>(zeroed(sizeof(Clocks)));
  c->threads = threads, c->epoch = 1;
  c->own = static_cast<uint32_t*>(zeroed(threads * sizeof(uint32_t)));
  for (Known** known : {&c->row, &c->fenced, &c->heard})
    *known = static_cast<Known*>(zeroed(threads * sizeof(Known)));
  for (int t = 0; t < threads; ++t) c->own[t] = 1;
  return c;
}
inline void free_clocks(Clocks* c) {
  if (!c) return;
  for (Known* known : {c->row, c->fenced, c->heard}) {
    for (int t = 0; t < c->threads; ++t) free(known[t].clock);
    free(known);
  }
  for (Known& k : c->barrier) free(k.clock);
  free(c->scratch.clock);
  for (int i = 0; i < c->address_count; ++i) free(c->addresses[i].known.clock);
  free(c->addresses), free(c->own), free(c);
}

/// The clocks of a place in this epoch.
inline uint32_t* now(Clocks& c, Known& k) {
  if (!k.clock)
    k.clock = static_cast<uint32_t*>(zeroed(c.threads * sizeof(uint32_t)));
  else if (k.epoch != c.epoch)
    memset(k.clock, 0, c.threads * sizeof(uint32_t));
  k.epoch = c.epoch;
  return k.clock;
}
inline void join(Clocks& c, Known& into, Known& from) {
  if (!from.clock || from.epoch != c.epoch) return;
  uint32_t* a = now(c, into);
  const uint32_t* b = from.clock;
  for (int t = 0; t < c.threads; ++t) a[t] = a[t] > b[t] ? a[t] : b[t];
}

/// All that thread t knows and did becomes known at a place.
inline void release(Clocks& c, int t, Known& place) {
  join(c, place, c.row[t]);
  uint32_t* at = now(c, place);
  if (at[t] < c.own[t]) at[t] = c.own[t];
  ++c.own[t];
}
inline void acquire(Clocks& c, int t, Known& place) { join(c, c.row[t], place); }

/// All threads of the block have met.
inline void meet_all(Clocks& c) { ++c.epoch; }

/// These lanes of a warp have met in __syncwarp.
inline void meet_lanes(Clocks& c, int warp, uint32_t lanes) {
  c.scratch.epoch = 0;
  for (uint32_t left = lanes; left; left &= left - 1)
    release(c, warp * LANES + __builtin_ctz(left), c.scratch);
  for (uint32_t left = lanes; left; left &= left - 1)
    acquire(c, warp * LANES + __builtin_ctz(left), c.scratch);
}

/// The lanes of a warp whose accesses up to `clock` are ordered before what thread t does now.
inline uint32_t ordered_lanes(Clocks& c, int t, int warp, uint32_t clock) {
  uint32_t lanes = warp == t / LANES ? 1u << t % LANES : 0u;
  const Known& row = c.row[t];
  if (!row.clock || row.epoch != c.epoch) return lanes;
  for (int lane = 0; lane < LANES; ++lane) lanes |= uint32_t(row.clock[warp * LANES + lane] >= clock) << lane;
  return lanes;
}
inline bool is_ordered(Clocks& c, int t, int before, uint32_t clock) {
  return ordered_lanes(c, t, before / LANES, clock) >> before % LANES & 1;
}

// ---- fences and atomics: a fence before an atomic publishes, a fence after one takes in what it saw

inline void clock_fence(Clocks& c, int t) {
  join(c, c.row[t], c.heard[t]);
  now(c, c.fenced[t]);
  memset(c.fenced[t].clock, 0, c.threads * sizeof(uint32_t));
  release(c, t, c.fenced[t]);
}
SIMT_COLD void clock_atomic(Clocks& c, int t, uint64_t address) {
  int i = 0;
  while (i < c.address_count && c.addresses[i].address != address) ++i;
  if (i == c.address_count) {
    grow(c.addresses, c.address_count, c.address_capacity, 8);
    c.addresses[c.address_count++] = {address, {}};
  }
  Known& place = c.addresses[i].known;
  join(c, c.heard[t], place);
  join(c, place, c.fenced[t]);
}

}  // namespace simt
