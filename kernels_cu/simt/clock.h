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
//
// Two things more travel the same ways. The async proxy (bulk copies, wgmma) sees a thread's plain writes up
// to a proxy fence on their way to whoever starts it; where a file uses it, each thread has a second entry
// for that clock. And what runs by itself is ordered before those who know that it is over: a bulk copy ends
// with a phase of its mbarrier, a wgmma when its warpgroup has waited. Each such counter (an mbarrier's
// phases, a warpgroup's products) has an entry: how much of it is known to be over.
#pragma once
#include "state.h"

namespace simt {

/// What was known at some place where threads meet: a barrier, or an address that atomics touch.
struct Known {
  uint32_t epoch;
  uint32_t* clock;  // of each thread; all zero if the epoch is over
};
struct SyncAddress {
  uint64_t key;  // the address and 1; 0 where nothing is
  Known known;
};

constexpr int MAX_COUNTERS = 128;  // of a block, or of the blocks of a cluster together

struct Clocks {
  int threads;        // of the block, or of all blocks of its cluster
  bool proxies;       // second entries are kept
  int first_counter;  // entries before those of counters
  int width;          // entries in use
  int counters;
  uint32_t counter_name[MAX_COUNTERS];  // an mbarrier's place in shared memory; a warpgroup's number
  uint32_t epoch;
  uint32_t* own;
  uint32_t* common;  // of each entry: what everybody knows since all have last met
  Known *row, *fenced,
      *heard;               // of each thread: what it knows; knew at its last fence; atomics told it since
  Known *barrier, scratch;  // barrier: BARRIERS of each block
  int blocks;
  SyncAddress* addresses;  // a table that is searched from an address's hash on
  int address_count, address_capacity;
};

SIMT_COLD void* zeroed(size_t bytes);
/// Doubles an array that is full.
template <class T, class Int> SIMT_COLD void grow(T*& items, Int count, Int& capacity, Int least) {
  if (count < capacity) return;
  capacity = capacity ? 2 * capacity : least;
  items = static_cast<T*>(realloc(static_cast<void*>(items), size_t(capacity) * sizeof(T)));
  if (!items) abort();
}

/// Calls use(chunk, which of its 16 bytes, address of the first of them) for each 16 bytes that an access
/// touches.
template <class Use> inline void for_chunks(uint64_t address, size_t bytes, Use use) {
  for (uint64_t at = address, end = address + bytes; at < end;) {
    uint64_t in = at % 16, n = 16 - in < end - at ? 16 - in : end - at;
    use(at / 16, uint16_t(((1u << n) - 1) << in), at);
    at += n;
  }
}

/// Entries of a Known that may come into use.
inline size_t most_entries(const Clocks& c) { return size_t(c.first_counter) + MAX_COUNTERS; }

Clocks* make_clocks(int warps, int blocks, bool proxies);
void free_clocks(Clocks* c);

/// The clocks of a place in this epoch.
uint32_t* now(Clocks& c, Known& k);
void join(Clocks& c, Known& into, Known& from);

/// All that thread t knows and did becomes known at a place.
void release(Clocks& c, int t, Known& place);
inline void acquire(Clocks& c, int t, Known& place) { join(c, c.row[t], place); }

/// All threads have met.
void meet_all(Clocks& c);
/// New blocks begin, which have no counters yet.
void start_clocks(Clocks& c);

/// These lanes of a warp have met in __syncwarp.
void meet_lanes(Clocks& c, int warp, uint32_t lanes);

/// The lanes of a warp whose accesses up to `clock` are ordered before what thread t does now.
uint32_t ordered_lanes(Clocks& c, int t, int warp, uint32_t clock);
bool is_ordered(Clocks& c, int t, int before, uint32_t clock);

// ---- the async proxy

/// Thread t's proxy fence: what it knows of plain writes, the async proxy sees too if t starts it.
void clock_proxy_fence(Clocks& c, int t);
/// The lanes of a warp whose plain writes up to `clock` the async proxy sees when thread t starts it.
uint32_t proxied_lanes(Clocks& c, int t, int warp, uint32_t clock);
/// The same for whoever starts it, as far as everybody knows.
uint32_t commonly_proxied_lanes(Clocks& c, int warp, uint32_t clock);

/// A new counter's number.
int new_counter(Clocks& c, uint32_t name);
/// How much of a counter thread t knows to be over.
uint32_t known_count(Clocks& c, int t, int counter);
void learn_count(Clocks& c, int t, int counter, uint32_t over);

// ---- fences and atomics: a fence before an atomic publishes, a fence after one takes in what it saw

void clock_fence(Clocks& c, int t);
SIMT_COLD void clock_atomic(Clocks& c, int t, uint64_t address);

}  // namespace simt
