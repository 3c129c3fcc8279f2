// flight: accumulators while tensor cores work on them, and the work itself.
#pragma once
#include "operand.h"

namespace simt {

// NOTE: a signalling NaN, so that arithmetic on it leaves another one.
constexpr uint32_t UNDER_WAY = 0x7fa5a5a5u;

// ---- accumulators: two rows of a plane for each thread

struct OwnRows {
  float* row[2];
  OwnRows(Flight& f) {
    int i = thread_number() % WARPGROUP, lane = i % LANES, stride = plane_stride(f.n);
    float* plane = f.sums + lane % 4 * WGMMA_M * stride;
    row[0] = plane + (i / LANES * 16 + lane / 4) * stride, row[1] = row[0] + 8 * stride;
  }
};
inline void take_sums(Flight& f, const float* d) {
  OwnRows to(f);
  for (int t = 0; t < f.n / 8; ++t)
    for (int half = 0; half < 2; ++half) memcpy(to.row[half] + 2 * t, d + 4 * t + 2 * half, 8);
}
inline void give_sums(Flight& f, float* d) {
  OwnRows from(f);
  for (int t = 0; t < f.n / 8; ++t)
    for (int half = 0; half < 2; ++half) memcpy(d + 4 * t + 2 * half, from.row[half] + 2 * t, 8);
}
inline void hide_sums(float* d, int n) {
  for (int i = 0; i < n / 2; ++i) memcpy(d + i, &UNDER_WAY, 4);
}
inline bool sums_are_hidden(const float* d, int n) {
  uint32_t other = 0;
  for (int i = 0; i < n / 2; ++i) {
    uint32_t word;
    memcpy(&word, d + i, 4);
    other |= word ^ UNDER_WAY;
  }
  return !other;
}

/// Finds the flight that the accumulators are in, or opens one; returns its number.
SIMT_COLD int find_flight(Warpgroup& w, int n, const float* d, bool& chained, Site site) {
  int unused = -1, me = thread_number() % WARPGROUP;
  chained = false;
  for (int i = Warpgroup::FLIGHTS; i-- > 0;) {
    Flight& f = w.flight[i];
    if (!f.used)
      unused = i;
    else if (f.d[me] == d && f.last >= own_part(w).returned) {
      const Wgmma& before = op_number(w, f.last);
      if (f.n != n)
        fail(site,
             "wgmma of m64n%d on accumulators of the m64n%d at %s:%d, which is under way: wait for it first",
             n, f.n, before.site.name(), before.site.line);
      chained = true;
      return i;
    }
  }
  if (unused < 0)
    fail(site, "more than %d sets of accumulators under way in a warpgroup", Warpgroup::FLIGHTS);
  Flight& f = w.flight[unused];
  if (!f.sums) f.sums = static_cast<float*>(zeroed(4 * WGMMA_M * plane_stride(WGMMA_MAX_N) * sizeof(float)));
  f.used = true, f.n = n, f.returned = 0, f.last = ~0u;
  return unused;
}

// ---- what the tensor cores do

SIMT_COLD void compute(Warpgroup& w, Wgmma& op) {
  static TensorBuffer buffer;
  const WgmmaCall& call = op.call;
  Flight& f = w.flight[op.flight];
  Element element = Element(call.element);
  if (call.a_in_registers) {
    for (int t = 0; t < WARPGROUP; ++t)
      for (int i = 0; i < 4; ++i)
        memcpy(buffer.raw_a[t / LANES * 16 + t % LANES / 4 + i % 2 * 8] + i / 2 * 16 + t % 4 * 4, &op.a[t][i],
               4);
  } else {
    load_operand_a(buffer, checked_operand(call.a, 8, call.a_mn_major, "A", op.site));
  }
  load_operand_b(buffer, checked_operand(call.b, call.n / 8, call.b_mn_major, "B", op.site),
                 element == Element::e4m3);
  if (!call.accumulate) memset(f.sums, 0, 4 * WGMMA_M * plane_stride(f.n) * sizeof(float));
  wgmma_function(f.sums, buffer, f.n, element);
}

}  // namespace simt
