// operand: a matrix of wgmma in shared memory, as its 64-bit descriptor says it. prim/wgmma_desc.cuh explains
// layouts.
#pragma once
#include "swizzle.h"
#include "tensor.h"

namespace simt {

/// A decoded descriptor. The matrix has `lines` lines of eight rows, or columns for B, by 32 bytes along k;
/// or, major in those, 16 steps of k by `lines` chunks of 16 bytes.
struct Operand {
  uint64_t start, leading, stride, first_line;
  int width, lines;  // width: of the swizzle
  bool mn_major;

  int rows() const { return mn_major ? 16 : 8 * lines; }
  int chunks() const { return mn_major ? lines : 2; }
  /// Before the swizzle: chunk j of row i.
  SIMT_INLINE uint64_t linear(int i, int j) const {
    if (!mn_major)
      return width ? start + i / 8 * stride + i % 8 * width + j * 16
                   : start + i / 8 * stride + i % 8 * 16 + j * leading;
    int across = width / 16;
    return width ? start + j / across * leading + j % across * 16 + i / 8 * stride + i % 8 * width
                 : start + j * stride + i / 8 * leading + i % 8 * 16;
  }
  SIMT_INLINE uint64_t address(int i, int j) const { return swizzle(linear(i, j), width, first_line); }
};

/// The matrix a descriptor describes; with reserved bits set it describes none.
inline bool decode(uint64_t descriptor, int lines, bool mn_major, Operand& to) {
  constexpr int WIDTHS[] = {0, 128, 64, 32};
  auto field = [&](int bit) { return (descriptor >> bit & 0x3fff) << 4; };
  to = {field(0), field(16), field(32), descriptor >> 49 & 7, WIDTHS[descriptor >> 62], lines, mn_major};
  return !(descriptor & 0x3ff1c000c000c000ull);
}

/// A descriptor must describe a matrix that lies in shared memory. `which`: "A" or "B".
SIMT_COLD void check_operand(const Operand& o, uint64_t descriptor, bool valid, const char* which,
                             Site site) {
  if (!valid)
    fail(site,
         "the descriptor of %s, %#018llx, has bits set that have no meaning: build it by prim/wgmma_desc.cuh",
         which, static_cast<unsigned long long>(descriptor));
  for (int i = 0; i < o.rows(); ++i)
    for (int j = 0; j < o.chunks(); ++j)
      if (uint64_t at = o.address(i, j); at + 16 > machine.launch.smem_bytes)
        fail(site,
             "wgmma reads 16 bytes of %s at byte %llu of shared memory, which has %llu; its descriptor says "
             "start %llu, leading offset %llu, stride offset %llu, swizzle %d",
             which, (unsigned long long)at, (unsigned long long)machine.launch.smem_bytes,
             (unsigned long long)o.start, (unsigned long long)o.leading, (unsigned long long)o.stride,
             o.width);
}
/// The same, at little cost where all is well.
SIMT_INLINE Operand checked_operand(uint64_t descriptor, int lines, bool mn_major, const char* which,
                                    Site site) {
  Operand o;
  bool valid = decode(descriptor, lines, mn_major, o);
  // No address lies behind that of the last row and chunk by more than a line.
  uint64_t end = o.linear(o.rows() - 1, o.chunks() - 1) + 128 + 7 * o.width;
  if (!valid || end > machine.launch.smem_bytes) [[unlikely]]
    check_operand(o, descriptor, valid, which, site);
  return o;
}

inline const char* chunk_at(const Operand& o, int i, int j) { return machine.shared + o.address(i, j); }

/// Eight rows of 16 bytes, turned.
SIMT_INLINE void load_turned(const Operand& o, int i, int j, Half8 (&m)[8]) {
  for (int r = 0; r < 8; ++r) memcpy(m + r, chunk_at(o, i + r, j), 16);
  transpose(m);
}
inline void load_operand_a(TensorBuffer& t, const Operand& o) {
  for (int i = 0; i < 64 && !o.mn_major; ++i)
    for (int j = 0; j < 2; ++j) memcpy(t.raw_a[i] + 16 * j, chunk_at(o, i, j), 16);
  for (int j = 0; j < 16 && o.mn_major; ++j) {
    Half8 m[8];
    load_turned(o, j % 2 * 8, j / 2, m);
    for (int r = 0; r < 8; ++r) memcpy(t.raw_a[j / 2 * 8 + r] + j % 2 * 16, m + r, 16);
  }
}
inline void load_operand_b(TensorBuffer& t, const Operand& o, bool bytes) {
  int n = 8 * o.lines;
  if (bytes) {
    char* to = reinterpret_cast<char*>(t.raw_b);
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < 2; ++j) memcpy(to + 32 * i + 16 * j, chunk_at(o, i, j), 16);
  } else if (o.mn_major) {
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < o.lines; ++j) memcpy(t.raw_b[k] + 8 * j, chunk_at(o, k, j), 16);
  } else {
    for (int i = 0; i < n; i += 8)
      for (int j = 0; j < 2; ++j) {
        Half8 m[8];
        load_turned(o, i, j, m);
        for (int k = 0; k < 8; ++k) memcpy(t.raw_b[8 * j + k] + i, m + k, 16);
      }
  }
}

/// Calls use(address) for each 16 bytes that the tensor cores read.
template <class Use> inline void for_operand(const Operand& o, Use use) {
  for (int i = 0; i < o.rows(); ++i)
    for (int j = 0; j < o.chunks(); ++j) use(o.address(i, j));
}
/// Passes through the banks: eight rows of 16 bytes are one if they lie in eight groups of four banks.
inline int operand_passes(const Operand& o) {
  int passes = 0;
  for (int i = 0; i < o.rows(); i += 8)
    for (int j = 0; j < o.chunks(); ++j) {
      int load[8] = {}, most = 0;
      for (int r = 0; r < 8; ++r)
        if (int n = ++load[o.address(i + r, j) / 16 % 8]; n > most) most = n;
      passes += most;
    }
  return passes;
}

}  // namespace simt
