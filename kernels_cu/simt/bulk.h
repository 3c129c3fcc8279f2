// bulk: copies by the copy engine (sm_90) between global and shared memory, under way: tiles of an array that
// a tensor map describes, and plain ranges of bytes.
//
// A copy to shared memory completes a phase of an mbarrier. It happens when it is issued (eager), or when no
// thread of the block can go on without it (late); until then its place holds NaN. A copy to global memory
// belongs to a group of its thread, and happens when that waits for it, or when it is issued. Both go by the
// async proxy.
#pragma once
#include "cluster.h"
#include "swizzle.h"

/// What a copy knows of an array, innermost dimension first; mirrored by cuattn/tensor_map.py. NOTE: not in
/// namespace simt, as Site is not.
struct alignas(64) TensorMap {
  uint64_t base;
  uint64_t stride[4];  // bytes; of all dimensions but the innermost
  uint32_t size[5];
  uint16_t box[5];  // elements of a tile
  uint8_t rank;     // 0: the array is empty
  uint8_t itemsize;
  uint8_t swizzle;  // bytes: 0, 32, 64 or 128
  uint8_t unused[55];
};
static_assert(sizeof(TensorMap) == 128);

namespace simt {

struct BulkCopy {
  TensorMap map;  // of rank 0: `bytes` bytes at `global`
  int at[5];
  uint64_t global;
  uint32_t shared, bytes;  // offset in shared memory; what it fills or reads there
  Mbarrier* mbarrier;
  uint32_t phase, group;  // of the mbarrier, when issued; 1 + number of the thread's group
  int thread;             // its number in its cluster
  Site site;
};

inline int row_bytes(const TensorMap& map) { return map.box[0] * map.itemsize; }
inline uint32_t tile_bytes(const TensorMap& map) {
  uint32_t bytes = map.itemsize;
  for (int i = 0; i < map.rank; ++i) bytes *= map.box[i];
  return bytes;
}

/// Calls row(offset in the tile, address, first byte, bytes) for each of its rows: of its `row_bytes` those
/// from the first on lie in the array, at `address`; the rest beyond its bounds.
template <class Row> inline void for_rows(const BulkCopy& copy, Row row) {
  const TensorMap& map = copy.map;
  if (!map.rank) return row(0u, copy.global, 0, int(copy.bytes));
  int64_t first = copy.at[0] < 0 ? -int64_t(copy.at[0]) : 0, end = int64_t(map.size[0]) - copy.at[0];
  if (end > map.box[0]) end = map.box[0];
  int width = row_bytes(map), rows = int(tile_bytes(map)) / width;
  for (int r = 0; r < rows; ++r) {
    int64_t address = int64_t(map.base) + (copy.at[0] + first) * map.itemsize;
    bool inside = first < end;
    for (int i = 1, left = r; i < map.rank; left /= map.box[i], ++i) {
      int64_t x = int64_t(copy.at[i]) + left % map.box[i];
      inside = inside && x >= 0 && x < int64_t(map.size[i]);
      address += x * int64_t(map.stride[i - 1]);
    }
    row(uint32_t(r * width), uint64_t(address), int(first) * map.itemsize,
        inside ? int(end - first) * map.itemsize : 0);
  }
}
/// Calls piece(place in shared memory, where in the row, bytes) for the pieces in which a row lies there.
template <class Piece> inline void for_pieces(const BulkCopy& copy, uint32_t offset, Piece piece) {
  if (!copy.map.rank || !copy.map.swizzle)
    return piece(copy.shared + offset, 0, copy.map.rank ? row_bytes(copy.map) : int(copy.bytes));
  for (int i = 0; i < row_bytes(copy.map); i += 16)
    piece(uint32_t(swizzle(copy.shared + offset + i, copy.map.swizzle)), i, 16);
}

inline void load_now(Block& block, const BulkCopy& copy) {
  for_rows(copy, [&](uint32_t offset, uint64_t address, int first, int bytes) {
    if (!copy.map.rank) return void(memcpy(block.shared + copy.shared, behind(address), size_t(bytes)));
    char row[2048];
    memset(row, 0, size_t(row_bytes(copy.map)));
    if (bytes) memcpy(row + first, behind(address), size_t(bytes));
    for_pieces(copy, offset,
               [&](uint32_t to, int at, int n) { memcpy(block.shared + to, row + at, size_t(n)); });
  });
}
inline void store_now(const BulkCopy& copy) {
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

// ---- what is under way

SIMT_COLD void free_async(Async* async) {
  if (!async) return;
  for (Mbarrier& bar : async->mbarrier) free(bar.arriving.clock), free(bar.over.clock);
  free(async->loads), free(async->stores), free(async->groups), free(async);
}
/// A new block has none.
SIMT_COLD void clear_async(Async& async) {
  async.mbarriers = async.load_count = async.store_count = 0;
  memset(async.groups, 0, machine.block_dim.x * machine.block_dim.y * machine.block_dim.z * sizeof(uint32_t));
}

/// A load is done: its bytes have come to its mbarrier, in the phase in which it was issued.
inline void complete_load(Block& block, const BulkCopy& copy) {
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
SIMT_COLD bool land_late_loads(Block& block) {
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
SIMT_COLD int64_t bytes_under_way(const Block& block, const Mbarrier& bar) {
  int64_t bytes = 0;
  for (int i = 0; i < block.async->load_count; ++i)
    if (block.async->loads[i].mbarrier == &bar) bytes += block.async->loads[i].bytes;
  return bytes;
}
SIMT_COLD void check_copies_at_exit() {
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
