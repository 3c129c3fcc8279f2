// calls: the bodies of what most kernels call. A kernel inlines them; one that is built quickly has only their
// declarations, and is linked with those in machine.cc's object.
#pragma once
#include "async.h"
#include "mma.h"

namespace simt {

// ---- block.h

SIMT_CALL void wait() {
  if (--machine.slice == 0) [[unlikely]]
    look_up();
  Fiber* next = next_in_warp(current->warp, current->slot_bit);
  if (!next) [[unlikely]] {
    next = next_in_block(current->warp);
    if (!next) next = next_after_all();
    if (next == current) return;
  }
  run(next);
}

SIMT_CALL void step() {
  if (--machine.slice == 0) [[unlikely]] {
    look_up();
    Warp* warp = current->warp;
    uint32_t later = warp->ready & ~((current->slot_bit << 1) - 1u);
    Fiber* next = later ? warp->slots + __builtin_ctz(later) : next_in_block(warp);
    if (next && next != current) run(next);
  }
}

SIMT_CALL void complete(Barrier& barrier, bool running_waits) {
  if (machine.watched) [[unlikely]]
    watch_barrier(barrier, running_waits);
  for (int w = 0; w < machine.block->warps; ++w) {
    machine.block->warp[w].ready |= barrier.waiting_slots[w];
    barrier.waiting_slots[w] = 0;
  }
  barrier.arrived = 0;
  ++machine.counters.barriers;
}

SIMT_CALL void arrive(Barrier& barrier, int expected, bool only_arrive, Site site) {
  if (!barrier.arrived || !only_arrive) barrier.site = site;
  barrier.expected = expected;
  if (machine.watched) [[unlikely]]
    watch_arrival(barrier, site);
  if (++barrier.arrived == (expected ? expected : machine.block->live))
    return complete(barrier, !only_arrive);
  if (only_arrive) return;
  Warp* warp = current->warp;
  barrier.waiting_slots[warp - machine.block->warp] |= current->slot_bit;
  warp->ready &= ~current->slot_bit;
  wait();
}

SIMT_CALL void block_barrier(Site site) {
  Barrier& barrier = machine.block->barrier[0];
  if (barrier.arrived && !(barrier.site == site)) [[unlikely]]
    fail(site, "divergent __syncthreads: %d threads wait in the one at %s:%d while another is reached",
         barrier.arrived, barrier.site.name(), barrier.site.line);
  arrive(barrier, 0, false, site);
}

// ---- memory.h

SIMT_CALL char* translate(const void* pointer, size_t bytes, size_t alignment, Touch touch, Site site) {
  uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (address & (alignment - 1)) [[unlikely]]
    fail_access(address, bytes, touch, site);
  if (address < recent_extent.first || address + bytes > recent_extent.end) [[unlikely]]
    find_extent(address, bytes, touch, site);
  return reinterpret_cast<char*>(address + machine.launch.window_to_memory);
}

SIMT_CALL void load_global_bytes(void* to, const void* p, size_t bytes, size_t alignment, Site site) {
  const char* from = translate(p, bytes, alignment, Touch::read, site);
  machine.counters.bytes_loaded += bytes;
  step();
  if (machine.watched) [[unlikely]]
    watch_load(to, from, reinterpret_cast<uint64_t>(p), bytes, site);
  else
    memcpy(to, from, bytes);
}

SIMT_CALL void store_global_bytes(void* p, const void* from, size_t bytes, size_t alignment, Site site) {
  char* to = translate(p, bytes, alignment, Touch::write, site);
  machine.counters.bytes_stored += bytes;
  if (machine.watched) [[unlikely]]
    watch_store(to, from, reinterpret_cast<uint64_t>(p), bytes, site);
  else
    memcpy(to, from, bytes);
}

SIMT_CALL char* translate_shared(const void* p, size_t bytes, size_t alignment, Touch touch, Site site) {
  uint64_t offset = shared_offset(p);
  if (offset + bytes > machine.launch.smem_bytes || offset > machine.launch.smem_bytes ||
      (offset & (alignment - 1))) [[unlikely]]
    fail_shared(p, bytes, alignment, touch, site);
  return machine.shared + offset;
}

SIMT_CALL void load_shared_bytes(void* to, const void* p, size_t bytes, size_t alignment, Site site) {
  const char* from = translate_shared(p, bytes, alignment, Touch::read, site);
  if (machine.watched) [[unlikely]]
    watch_shared(shared_offset(p), bytes, Touch::read, Access::shared_load, site);
  memcpy(to, from, bytes);
}

SIMT_CALL void store_shared_bytes(void* p, const void* from, size_t bytes, size_t alignment, Site site) {
  char* to = translate_shared(p, bytes, alignment, Touch::write, site);
  if (machine.watched) [[unlikely]]
    watch_shared(shared_offset(p), bytes, Touch::write, Access::shared_store, site);
  memcpy(to, from, bytes);
}

SIMT_CALL void* atomic_target(void* p, size_t bytes, Site site) {
  step();
  if (shared_offset(p) < machine.launch.smem_bytes) {
    char* target = translate_shared(p, bytes, bytes, Touch::atomic, site);
    if (machine.watched) [[unlikely]]
      watch_shared_atomic(shared_offset(p), bytes, site);
    return target;
  }
  ++machine.counters.atomics;
  char* target = translate(p, bytes, bytes, Touch::atomic, site);
  if (machine.watched) [[unlikely]]
    watch_global_atomic(reinterpret_cast<uint64_t>(p), bytes, site);
  return target;
}

// ---- warp.h

SIMT_CALL Rendezvous& find_rendezvous(Warp& warp, uint32_t mask, Access kind, Site site) {
  for (int i = 0; i < warp.open; ++i) {
    Rendezvous& r = warp.rendezvous[i];
    if (r.mask != mask || !(r.site == site)) continue;
    if (r.kind != kind) [[unlikely]]
      fail(site, "%s meets %s of other lanes of its warp (mask %08x)", call_name(kind), call_name(r.kind),
           mask);
    if (!(mask >> current->lane & 1)) [[unlikely]]
      fail(site, "%s with mask %08x, which does not name the calling lane %d", call_name(kind), mask,
           current->lane);
    return r;
  }
  return open_rendezvous(warp, mask, kind, site);
}

SIMT_CALL void shfl_bytes(unsigned mask, void* result, const void* value, size_t bytes, int source_lane,
                          Site site) {
  struct Shuffle {
    void* result;
    const void* value;
    int source;
  } mine{result, value, source_lane & (LANES - 1)};
  if (!(mask >> mine.source & 1)) [[unlikely]]
    fail(site, "shuffle from lane %d, which is not in the mask %08x", mine.source, mask);
  meet(
      mask, Access::shuffle, &mine,
      [bytes](void** lanes, uint32_t all) {
        ++machine.counters.collectives;
        for (uint32_t left = all; left; left &= left - 1) {
          Shuffle& to = *static_cast<Shuffle*>(lanes[__builtin_ctz(left)]);
          memcpy(to.result, static_cast<Shuffle*>(lanes[to.source])->value, bytes);
        }
      },
      site);
}

SIMT_CALL unsigned ballot(unsigned mask, bool predicate, Site site) {
  unsigned vote = predicate;
  meet(
      mask, Access::vote, &vote,
      [](void** lanes, uint32_t all) {
        ++machine.counters.collectives;
        uint32_t votes = 0;
        for (uint32_t left = all; left; left &= left - 1) {
          int lane = __builtin_ctz(left);
          votes |= *static_cast<unsigned*>(lanes[lane]) << lane;
        }
        for (uint32_t left = all; left; left &= left - 1)
          *static_cast<unsigned*>(lanes[__builtin_ctz(left)]) = votes;
      },
      site);
  return vote;
}

SIMT_CALL void syncwarp(unsigned mask, Site site) {
  meet(mask, Access::warp_barrier, nullptr, [](void**, uint32_t) { ++machine.counters.collectives; }, site);
}

// ---- async.h

SIMT_CALL void cp_async(void* s_to, const void* g_from, int bytes, int source_bytes,
                        Site site) {
  if ((bytes != 4 && bytes != 8 && bytes != 16) || source_bytes < 0 || source_bytes > bytes) [[unlikely]]
    fail(site, "cp.async of %d bytes, %d of them read: expected 4, 8 or 16, and at most as many read", bytes,
         source_bytes);
  char* to = translate_shared(s_to, bytes, bytes, Touch::write, site);
  if (source_bytes) translate(g_from, source_bytes, bytes, Touch::read, site);
  machine.counters.bytes_loaded += source_bytes;
  machine.counters.bytes_async += source_bytes;
  Copy copy{to, reinterpret_cast<uint64_t>(g_from), bytes, source_bytes, site};
  if (machine.watched) [[unlikely]] {
    watch_copy(copy.from, shared_offset(s_to), source_bytes, site);
    watch_shared(shared_offset(s_to), bytes, Touch::copy, Access::shared_copy, site);
  }
  if (!machine.launch.copies_late) {
    copy_now(copy);
    if (!machine.launch.races) return;  // else it is not waited for yet
  }
  CopyQueue& queue = current->copies;
  if (queue.count == queue.capacity) [[unlikely]]
    grow(queue.items, queue.count, queue.capacity, 64);
  queue.items[queue.count++] = copy;
}

// ---- mma.h

SIMT_CALL void ldmatrix(uint32_t* r, int count, bool trans, const void* s_row, Site site) {
  if (count != 1 && count != 2 && count != 4) [[unlikely]]
    fail(site, "ldmatrix of %d matrices: expected 1, 2 or 4", count);
  int lane = current->lane;
  MmaBuffer& buffer = current->warp->mma;
  if (lane < 8 * count) {
    buffer.row[lane] = translate_shared(s_row, 16, 16, Touch::read, site);
    if (machine.watched) [[unlikely]]
      watch_shared(shared_offset(s_row), 16, Touch::read, Access::ldmatrix, site);
  }
  meet(ALL, Access::ldmatrix, nullptr, [&](void**, uint32_t) { ldmatrix_all(buffer, count, trans); }, site);
  for (int i = 0; i < count; ++i) r[i] = buffer.matrix[i][lane];
}

SIMT_CALL void stmatrix(const uint32_t* r, int count, bool trans, void* s_row, Site site) {
  int lane = current->lane;
  MmaBuffer& buffer = current->warp->mma;
  if (lane < 8 * count) {
    buffer.row[lane] = translate_shared(s_row, 16, 16, Touch::write, site);
    if (machine.watched) [[unlikely]]
      watch_shared(shared_offset(s_row), 16, Touch::write, Access::stmatrix, site);
  }
  for (int i = 0; i < count; ++i) buffer.matrix[i][lane] = r[i];
  meet(ALL, Access::stmatrix, nullptr, [&](void**, uint32_t) { stmatrix_all(buffer, count, trans); }, site);
}

SIMT_CALL void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16,
                            Site site) {
  int lane = current->lane;
  MmaBuffer& buffer = current->warp->mma;
  for (int i = 0; i < 4; ++i) buffer.a[i][lane] = a[i];
  for (int i = 0; i < 2; ++i) buffer.b[i * 4 + lane % 4][lane / 4] = b[i];
  for (int i = 0; i < 4; ++i) buffer.d[i / 2][lane * 2 + i % 2] = d[i];
  meet(
      ALL, Access::mma, nullptr,
      [&](void**, uint32_t) {
        ++machine.counters.mma;
        mma_functions[bf16](buffer);
      },
      site);
  for (int i = 0; i < 4; ++i) d[i] = buffer.d[i / 2][lane * 2 + i % 2];
}

}  // namespace simt
