#include "bulk.h"

namespace simt {

uint32_t tile_bytes(const TensorMap& map) {
  uint32_t bytes = map.itemsize;
  for (int i = 0; i < map.rank; ++i) bytes *= map.box[i];
  return bytes;
}

void load_now(Block& block, const BulkCopy& copy) {
  for_rows(copy, [&](uint32_t offset, uint64_t address, int first, int bytes) {
    if (!copy.map.rank) return void(memcpy(block.shared + copy.shared, behind(address), size_t(bytes)));
    char row[2048];
    memset(row, 0, size_t(row_bytes(copy.map)));
    if (bytes) memcpy(row + first, behind(address), size_t(bytes));
    for_pieces(copy, offset,
               [&](uint32_t to, int at, int n) { memcpy(block.shared + to, row + at, size_t(n)); });
  });
}

void store_now(const BulkCopy& copy) {
  auto store = [](uint64_t address, const char* from, int bytes) {
    if (machine.block->held) return hold(address, from, size_t(bytes));
    memcpy(behind(address), from, size_t(bytes));
  };
  for_rows(copy, [&](uint32_t offset, uint64_t address, int first, int bytes) {
    if (!bytes) return;
    if (!copy.map.rank) return store(address, machine.shared + copy.shared, bytes);
    char row[2048];
    for_pieces(copy, offset,
               [&](uint32_t from, int at, int n) { memcpy(row + at, machine.shared + from, size_t(n)); });
    store(address, row + first, bytes);
  });
}

void free_async(Async* async) {
  if (!async) return;
  for (Mbarrier& bar : async->mbarrier) free(bar.arriving.clock), free(bar.over.clock);
  free(async->loads), free(async->stores), free(async->groups), free(async);
}

void clear_async(Async& async) {
  async.mbarriers = async.load_count = async.store_count = 0;
  memset(async.groups, 0, machine.block_dim.x * machine.block_dim.y * machine.block_dim.z * sizeof(uint32_t));
}

void complete_load(Block& block, const BulkCopy& copy) {
  Mbarrier& bar = *copy.mbarrier;
  if (bar.phase != copy.phase)
    fail(copy.site,
         "the bulk copy issued here belongs to phase %u of %s, which ended without it: "
         "too few bytes were announced",
         copy.phase, MbarrierName(bar).text);
  count_bytes(bar, -int64_t(copy.bytes));
  if (!bar.pending && bar.bytes < 0) fail_surplus(bar, copy.site);
  finish_phase(block, bar, copy.site);
}

/// Late copies happen for the first mbarrier that somebody waits for and that lacks bytes alone; false if
/// none does.
bool land_late_loads(Block& block) {
  Async* async = block.async;
  if (!async || !async->load_count) return false;
  int first = 0;
  auto awaited = [](const BulkCopy& copy) { return !copy.mbarrier->pending && has_waiters(*copy.mbarrier); };
  while (first < async->load_count && !awaited(async->loads[first])) ++first;
  if (first == async->load_count) return false;
  Mbarrier* bar = async->loads[first].mbarrier;
  int kept = 0, count = async->load_count;
  for (int i = 0; i < count; ++i) {
    BulkCopy copy = async->loads[i];
    if (copy.mbarrier != bar) {
      async->loads[kept++] = copy;
      continue;
    }
    load_now(block, copy);
    complete_load(block, copy);
  }
  async->load_count = kept;
  return true;
}

int64_t bytes_under_way(const Block& block, const Mbarrier& bar) {
  int64_t bytes = 0;
  for (int i = 0; i < block.async->load_count; ++i)
    if (block.async->loads[i].mbarrier == &bar) bytes += block.async->loads[i].bytes;
  return bytes;
}

void check_copies_at_exit() {
  Async& async = *machine.block->async;
  for (int i = 0; i < async.store_count; ++i)
    if (async.stores[i].thread == clock_number())
      fail(async.stores[i].site,
           "the bulk store issued here was never waited for: commit its group, and wait "
           "(bulk_wait_read) before the thread ends");
  if (!machine.block->live && async.load_count)
    fail(async.loads[0].site, "nobody waited for the bulk copy issued here, which completes phase %u of %s",
         async.loads[0].phase, MbarrierName(*async.loads[0].mbarrier).text);
}

}  // namespace simt
