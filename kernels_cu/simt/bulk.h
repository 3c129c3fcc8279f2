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
uint32_t tile_bytes(const TensorMap& map);

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

void load_now(Block& block, const BulkCopy& copy);
void store_now(const BulkCopy& copy);

// ---- what is under way

SIMT_COLD void free_async(Async* async);
/// A new block has none.
SIMT_COLD void clear_async(Async& async);

/// A load is done: its bytes have come to its mbarrier, in the phase in which it was issued.
void complete_load(Block& block, const BulkCopy& copy);

}  // namespace simt
