// warpgroup: what the 128 threads of four neighbouring warps share: products under way, registers, and calls
// in which all of them meet. The calls are in wgmma.h.
#pragma once
#include "watch.h"

namespace simt {

constexpr int WARPGROUP = 4 * LANES, MAX_WARPGROUPS = MAX_WARPS / 4;
constexpr int REGISTERS = 65536;  // of a multiprocessor

/// Registers as a call names them: accumulators or fragments of A, where they lie on a thread's stack.
struct Registers {
  const void* at;
  size_t bytes;
};

/// What the 16-byte chunks of an operand hold. An operand's row is 32 bytes along k.
enum class Element : int { f16, bf16, e4m3 };

/// What all threads of a warpgroup must agree on in one wgmma.
struct WgmmaCall {
  uint64_t a, b;  // descriptors
  int n;
  int element;  // simt::Element
  bool a_in_registers, a_mn_major, b_mn_major, accumulate;
  bool operator==(const WgmmaCall&) const = default;
};

/// One wgmma, from the first thread that reaches it until all have waited for it.
struct Wgmma {
  WgmmaCall call;
  Site site;
  int arrived, returned, flight;
  uint3 first;            // the thread that came first
  bool chained, knowing;  // its accumulators were under way already; `known` is of this wgmma
  uint32_t (*a)[4];       // fragments of each thread as they came, and where they lie
  const uint32_t** a_at;
  uint8_t in_warp[4];  // lanes that have come
  uint32_t* known;     // what all four warps knew of others, for races (clock.h)
};

/// Accumulators that tensor cores work on; threads find poison in their place.
struct Flight {
  float* sums;  // see tensor.h
  int n, returned;
  uint32_t last;  // the newest wgmma that adds to them
  bool used;
  float* d[WARPGROUP];
};

/// One thread's part in its warpgroup's products. Numbers count from the block's start.
struct WgmmaThread {
  uint32_t issued, committed, returned;  // wgmmas, groups, wgmmas waited for
  bool fenced;                           // since it last waited
  Site fence, wait;
  Registers named[16];  // by the last fence, and what they held
  int named_count;
  char* held;
  size_t held_bytes, held_capacity;
};

struct WarpgroupMeeting {
  int arrived, value;
  Access kind;
  Site site;
  Warp* warp[4];
  uint32_t waiting_slots[4];
};

struct Warpgroup {
  static constexpr int OPS = 128, FLIGHTS = 16;
  int registers, wants;  // of a thread; what setmaxnreg waits for
  uint32_t opened, completed, groups;
  uint32_t* group_end;
  int group_capacity;
  int counter;  // in the clocks: how many products are over; -1: none yet
  WarpgroupMeeting meeting;
  Wgmma op[OPS];  // by number, round and round
  Flight flight[FLIGHTS];
  WgmmaThread thread[WARPGROUP];
};
struct Warpgroups {
  int free_registers;
  Warpgroup group[MAX_WARPGROUPS];
};

inline Wgmma& op_number(Warpgroup& w, uint32_t number) { return w.op[number % Warpgroup::OPS]; }
inline WgmmaThread& own_part(Warpgroup& w) { return w.thread[thread_number() % WARPGROUP]; }

/// A new block begins: nothing is under way. Memory is kept.
void start_warpgroups(Block& block);
void free_warpgroups(Warpgroups* all);

SIMT_COLD const char* warpgroup_call(Access kind);

/// The part of a deadlock report about warpgroups.
SIMT_COLD void say_warpgroups(const Block& block);

/// The running thread returns from the kernel: nothing of its warpgroup may miss it.
SIMT_COLD void leave_warpgroup();

}  // namespace simt
