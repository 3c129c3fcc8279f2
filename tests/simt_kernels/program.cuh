// program: what random programs (tests/simt_programs.py) are made of, whether executed or compiled.
#pragma once
#include "prim/gmem.cuh"
#include "prim/smem.cuh"
#include "prim/warp.cuh"

constexpr int REGISTERS = 8, SHARED_BYTES = 2048, WARPS = 4;

/// In the order of OPS in simt_programs.py; those up to LESS are arithmetic.
enum Op : uint32_t {
  ADD, SUB, MUL, AND, OR, XOR, SHL, SHR, MIN, MAX, LESS,
  CONSTANT, THREAD, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, BALLOT, ANY, ALL,
  LOAD, GATHER, STORE, WARP_SYNC, BLOCK_SYNC, SYNCTHREADS, EXIT,
};

struct Instruction {
  uint32_t op, to, a, b, immediate, width;
  uint32_t mask[WARPS];  // the lanes that take part
};

/// A thread's numbers; their index wraps.
struct Registers {
  uint32_t value[REGISTERS];
  METHOD uint32_t& operator[](uint32_t i) { return value[i % REGISTERS]; }
  METHOD uint64_t wide(uint32_t i) { return (*this)[i] | uint64_t((*this)[i + 1]) << 32; }
  METHOD void set_wide(uint32_t i, uint64_t v) {
    (*this)[i] = uint32_t(v), (*this)[i + 1] = uint32_t(v >> 32);
  }
};

DEVICE uint32_t arithmetic(uint32_t op, uint32_t a, uint32_t b) {
  switch (op) {
    case ADD: return a + b;
    case SUB: return a - b;
    case MUL: return a * b;
    case AND: return a & b;
    case OR: return a | b;
    case XOR: return a ^ b;
    case SHL: return a << b % 32;
    case SHR: return a >> b % 32;
    case MIN: return uint32_t(min(int(a), int(b)));
    case MAX: return uint32_t(max(int(a), int(b)));
    default: return a < b;
  }
}

DEVICE uint32_t mask_of(const uint32_t (&masks)[WARPS]) { return masks[warp_id()]; }
DEVICE bool takes_part(uint32_t mask) { return mask >> lane_id() & 1; }

/// Lane number n of a mask, counted round and round.
DEVICE int lane_of(uint32_t mask, uint32_t n) {
  for (n %= uint32_t(__popc(mask)); n; --n) mask &= mask - 1;
  return __ffs(int(mask)) - 1;
}

/// The thread's own slot among those of `width` bytes: no two threads share one.
DEVICE uint32_t own_slot(uint32_t immediate, uint32_t width) {
  return (threadIdx.x * (2 * (immediate & 255) + 1) + (immediate >> 8)) % (SHARED_BYTES / width);
}

DEVICE void load_slot(Registers& r, uint32_t to, uint32_t slot, uint32_t width SITE) {
  const unsigned char* p = &dynamic_smem<unsigned char>() + slot * width;
  if (width == 1) {
    r[to] = load_shared(p AT_SITE);
  } else if (width == 2) {
    r[to] = load_shared(reinterpret_cast<const uint16_t*>(p) AT_SITE);
  } else if (width == 4) {
    r[to] = load_shared(reinterpret_cast<const uint32_t*>(p) AT_SITE);
  } else if (width == 8) {
    r.set_wide(to, load_shared(reinterpret_cast<const uint64_t*>(p) AT_SITE));
  } else {
    Vec16 v = load_shared(reinterpret_cast<const Vec16*>(p) AT_SITE);
    for (int i = 0; i < 4; ++i) r[to + i] = v.word[i];
  }
}

DEVICE void store_slot(Registers& r, uint32_t a, uint32_t slot, uint32_t width SITE) {
  unsigned char* p = &dynamic_smem<unsigned char>() + slot * width;
  if (width == 1) {
    store_shared(p, static_cast<unsigned char>(r[a]) AT_SITE);
  } else if (width == 2) {
    store_shared(reinterpret_cast<uint16_t*>(p), uint16_t(r[a]) AT_SITE);
  } else if (width == 4) {
    store_shared(reinterpret_cast<uint32_t*>(p), r[a] AT_SITE);
  } else if (width == 8) {
    store_shared(reinterpret_cast<uint64_t*>(p), r.wide(a) AT_SITE);
  } else {
    store_shared(reinterpret_cast<Vec16*>(p), Vec16{{r[a], r[a + 1], r[a + 2], r[a + 3]}} AT_SITE);
  }
}

DEVICE void start(Registers& r, const uint32_t* g_in) {
  for (int i = 0; i < REGISTERS; ++i) r[i] = load_global(g_in + threadIdx.x * REGISTERS + i);
}
DEVICE void leave(Registers& r, uint32_t* g_out) {
  for (int i = 0; i < REGISTERS; ++i) store_global(g_out + threadIdx.x * REGISTERS + i, r[i]);
}
/// The threads that are left write out their share of shared memory.
DEVICE void finish(Registers& r, uint32_t* g_out, uint32_t* g_shared) {
  block_sync();
  const uint32_t* s = &dynamic_smem<uint32_t>();
  for (int i = threadIdx.x; i < SHARED_BYTES / 4; i += blockDim.x)
    store_global(g_shared + i, load_shared(s + i));
  leave(r, g_out);
}
