// swizzle: where 16 bytes of a tile lie in shared memory, so that eight rows of a column lie in eight bank groups.
//
// A pattern of `width` bytes (32, 64 or 128; 16 and 0 mean none) exclusive-ors the place of a 16-byte chunk in
// its row with the number of the 128-byte line it lies in. Tensor copies and wgmma apply it to addresses, not to
// offsets in a tile: the pattern repeats every 8 · width bytes, and a tile that begins elsewhere says so.
#pragma once
#include "state.h"

namespace simt {

constexpr bool is_swizzle(int width) {
  return width == 0 || width == 16 || width == 32 || width == 64 || width == 128;
}

/// The address where the bytes lie that would be at `address` without a swizzle. `first_line`: what the lines
/// are counted from (bits 7…9 of the pattern's begin), 0 for a pattern that begins on a multiple of its period.
SIMT_INLINE constexpr uint64_t swizzle(uint64_t address, int width, uint64_t first_line = 0) {
  uint64_t chunks = width > 16 ? uint64_t(width) / 16 - 1 : 0;
  return address ^ (((address >> 7) - first_line & chunks) << 4);
}

}  // namespace simt
