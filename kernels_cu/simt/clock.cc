#include "clock.h"

#include <initializer_list>

namespace simt {

void* zeroed(size_t bytes) {
  void* p = calloc(1, bytes ? bytes : 1);
  if (!p) abort();
  return p;
}

Clocks* make_clocks(int warps, int blocks, bool proxies) {
  int threads = blocks * warps * LANES;
  Clocks* c = static_cast<Clocks*>(zeroed(sizeof(Clocks)));
  c->threads = threads, c->blocks = blocks, c->epoch = 1, c->proxies = proxies;
  c->first_counter = c->width = proxies ? 2 * threads : threads;
  c->common = static_cast<uint32_t*>(zeroed(most_entries(*c) * sizeof(uint32_t)));
  c->barrier = static_cast<Known*>(zeroed(blocks * BARRIERS * sizeof(Known)));
  c->own = static_cast<uint32_t*>(zeroed(threads * sizeof(uint32_t)));
  for (Known** known : {&c->row, &c->fenced, &c->heard})
    *known = static_cast<Known*>(zeroed(threads * sizeof(Known)));
  for (int t = 0; t < threads; ++t) c->own[t] = 1;
  return c;
}

void free_clocks(Clocks* c) {
  if (!c) return;
  for (Known* known : {c->row, c->fenced, c->heard}) {
    for (int t = 0; t < c->threads; ++t) free(known[t].clock);
    free(known);
  }
  for (int i = 0; i < c->blocks * BARRIERS; ++i) free(c->barrier[i].clock);
  free(c->scratch.clock);
  for (int i = 0; i < c->address_capacity; ++i) free(c->addresses[i].known.clock);
  free(c->addresses), free(c->barrier), free(c->common), free(c->own), free(c);
}

uint32_t* now(Clocks& c, Known& k) {
  if (!k.clock)
    k.clock = static_cast<uint32_t*>(zeroed(most_entries(c) * sizeof(uint32_t)));
  else if (k.epoch != c.epoch)
    memset(k.clock, 0, c.width * sizeof(uint32_t));
  k.epoch = c.epoch;
  return k.clock;
}

void join(Clocks& c, Known& into, Known& from) {
  if (!from.clock || from.epoch != c.epoch) return;
  uint32_t* a = now(c, into);
  const uint32_t* b = from.clock;
  for (int i = 0; i < c.width; ++i) a[i] = a[i] > b[i] ? a[i] : b[i];
}

void release(Clocks& c, int t, Known& place) {
  join(c, place, c.row[t]);
  uint32_t* at = now(c, place);
  if (at[t] < c.own[t]) at[t] = c.own[t];
  ++c.own[t];
}

/// What one entry of a thread says, with what everybody knows.
static uint32_t known_entry(Clocks& c, int t, int entry) {
  const Known& row = c.row[t];
  uint32_t own = row.clock && row.epoch == c.epoch ? row.clock[entry] : 0;
  return own > c.common[entry] ? own : c.common[entry];
}

static SIMT_COLD void keep_common(Clocks& c) {
  for (int t = 0; t < c.threads; ++t)
    for (int i = c.threads; i < c.width; ++i) c.common[i] = known_entry(c, t, i);
  for (int t = 0; c.proxies && t < c.threads; ++t) c.common[t] = c.own[t]++;
}

void meet_all(Clocks& c) {
  if (c.width > c.threads) [[unlikely]]
    keep_common(c);
  ++c.epoch;
}

void start_clocks(Clocks& c) {
  meet_all(c);
  c.counters = 0;
  memset(c.common + c.first_counter, 0, (c.width - c.first_counter) * sizeof(uint32_t));
}

void meet_lanes(Clocks& c, int warp, uint32_t lanes) {
  c.scratch.epoch = 0;
  for (uint32_t left = lanes; left; left &= left - 1)
    release(c, warp * LANES + __builtin_ctz(left), c.scratch);
  for (uint32_t left = lanes; left; left &= left - 1)
    acquire(c, warp * LANES + __builtin_ctz(left), c.scratch);
}

uint32_t ordered_lanes(Clocks& c, int t, int warp, uint32_t clock) {
  uint32_t lanes = warp == t / LANES ? 1u << t % LANES : 0u;
  const Known& row = c.row[t];
  if (!row.clock || row.epoch != c.epoch) return lanes;
  for (int lane = 0; lane < LANES; ++lane) lanes |= uint32_t(row.clock[warp * LANES + lane] >= clock) << lane;
  return lanes;
}

bool is_ordered(Clocks& c, int t, int before, uint32_t clock) {
  return ordered_lanes(c, t, before / LANES, clock) >> before % LANES & 1;
}

void clock_proxy_fence(Clocks& c, int t) {
  if (!c.proxies) return;
  uint32_t* row = now(c, c.row[t]);
  for (int u = 0; u < c.threads; ++u) {
    uint32_t clock = row[u] > c.common[u] ? row[u] : c.common[u];
    if (row[c.threads + u] < clock) row[c.threads + u] = clock;
  }
  row[c.threads + t] = c.own[t]++;
}

uint32_t proxied_lanes(Clocks& c, int t, int warp, uint32_t clock) {
  uint32_t lanes = 0;
  for (int lane = 0; lane < LANES; ++lane)
    lanes |= uint32_t(known_entry(c, t, c.threads + warp * LANES + lane) >= clock) << lane;
  return lanes;
}

uint32_t commonly_proxied_lanes(Clocks& c, int warp, uint32_t clock) {
  uint32_t lanes = 0;
  for (int lane = 0; lane < LANES; ++lane)
    lanes |= uint32_t(c.common[c.threads + warp * LANES + lane] >= clock) << lane;
  return lanes;
}

int new_counter(Clocks& c, uint32_t name) {
  c.counter_name[c.counters] = name;
  if (c.first_counter + c.counters == c.width) ++c.width;
  return c.counters++;
}

uint32_t known_count(Clocks& c, int t, int counter) {
  return known_entry(c, t, c.first_counter + counter);
}

void learn_count(Clocks& c, int t, int counter, uint32_t over) {
  uint32_t& entry = now(c, c.row[t])[c.first_counter + counter];
  if (entry < over) entry = over;
}

void clock_fence(Clocks& c, int t) {
  join(c, c.row[t], c.heard[t]);
  now(c, c.fenced[t]);
  memset(c.fenced[t].clock, 0, c.width * sizeof(uint32_t));
  release(c, t, c.fenced[t]);
}

/// Where an address is, or would be, among those that atomics have touched. There is room.
static SyncAddress& address_slot(Clocks& c, uint64_t key) {
  const uint64_t mask = uint64_t(c.address_capacity) - 1;
  uint64_t at = (key >> 2) * 0x9e3779b97f4a7c15u >> 32 & mask;
  while (c.addresses[at].key && c.addresses[at].key != key) at = (at + 1) & mask;
  return c.addresses[at];
}

static SIMT_COLD void grow_addresses(Clocks& c) {
  SyncAddress* before = c.addresses;
  const int many = c.address_capacity;
  c.address_capacity = many ? 2 * many : 64;
  c.addresses = static_cast<SyncAddress*>(zeroed(size_t(c.address_capacity) * sizeof(SyncAddress)));
  for (int i = 0; i < many; ++i)
    if (before[i].key) address_slot(c, before[i].key) = before[i];
  free(before);
}

void clock_atomic(Clocks& c, int t, uint64_t address) {
  if (2 * c.address_count >= c.address_capacity) grow_addresses(c);
  SyncAddress& slot = address_slot(c, address + 1);
  if (!slot.key) slot.key = address + 1, ++c.address_count;
  Known& place = slot.known;
  join(c, c.heard[t], place);
  join(c, place, c.fenced[t]);
}

}  // namespace simt
