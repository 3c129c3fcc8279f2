// Orderings between threads of a block: planted races in shared memory, and the same with what was missing.
#include "prim/cp_async.cuh"
#include "prim/gmem.cuh"
#include "prim/mma.cuh"
#include "prim/smem.cuh"
#include "prim/warp.cuh"

struct Words {
  alignas(16) float word[256];
};

constexpr int THREADS = 64;

/// Thread t reads what thread t + by wrote.
template <class Between> DEVICE void pass_on(const float* g_in, float* g_out, int by, Between between) {
  Words& s = dynamic_smem<Words>();
  int t = threadIdx.x;
  store_shared(&s.word[t], load_global(g_in + t));                          // written
  between();
  store_global(g_out + t, load_shared(&s.word[(t + by) % int(blockDim.x)]));  // read
}
KERNEL(THREADS, 1) read_early(const float* g_in, float* g_out, int by) { pass_on(g_in, g_out, by, [] {}); }
KERNEL(THREADS, 1) read_after_block_sync(const float* g_in, float* g_out, int by) {
  pass_on(g_in, g_out, by, [] { block_sync(); });
}
KERNEL(THREADS, 1) read_after_warp_sync(const float* g_in, float* g_out, int by) {
  pass_on(g_in, g_out, by, [] { warp_sync(); });
}
KERNEL(THREADS, 1) read_after_half_warp_sync(const float* g_in, float* g_out, int by) {
  pass_on(g_in, g_out, by, [] { __syncwarp(lane_id() < 16 ? 0x0000ffffu : 0xffff0000u); });
}
KERNEL(THREADS, 1) read_after_shuffle(const float* g_in, float* g_out, int by) {
  pass_on(g_in, g_out, by, [] { shuffle(0, 0); });
}
/// Warps meet two by two.
KERNEL(128, 1) read_after_named_sync(const float* g_in, float* g_out, int by) {
  pass_on(g_in, g_out, by, [] { named_sync(1 + threadIdx.x / 64, 64); });
}
/// Barrier 1 joins warps 0 and 1, then barrier 2 warps 1 and 2: what warp 0 wrote has come to warp 2.
KERNEL(96, 1) read_after_a_chain(const float* g_in, float* g_out, int by) {
  pass_on(g_in, g_out, by, [] {
    if (warp_id() < 2) named_sync(1, 64);
    if (warp_id() > 0) named_sync(2, 64);
  });
}

/// All read the word of thread 0; thread 0 writes it again.
template <class Between> DEVICE void overwrite(float* g_out, Between between) {
  Words& s = dynamic_smem<Words>();
  if (threadIdx.x == 0) store_shared(&s.word[0], 1.f);
  block_sync();
  float seen = load_shared(&s.word[0]);  // readers
  between();
  if (threadIdx.x == 0) store_shared(&s.word[0], 2.f);  // overwritten
  store_global(g_out + threadIdx.x, seen);
}
KERNEL(THREADS, 1) overwrite_early(float* g_out) { overwrite(g_out, [] {}); }
KERNEL(THREADS, 1) overwrite_after_block_sync(float* g_out) { overwrite(g_out, [] { block_sync(); }); }

KERNEL(THREADS, 1) two_writers(float* g_out, int by) {
  Words& s = dynamic_smem<Words>();
  int t = threadIdx.x;
  store_shared(&s.word[t * by / 2], 1.f);  // writers
  block_sync();
  store_global(g_out + t, load_shared(&s.word[t * by / 2]));
}

/// Copies 16 bytes a thread; thread t reads the four words of thread t + by.
template <class Between> DEVICE void copy(const float* g_in, float* g_out, int by, Between between) {
  Words& s = dynamic_smem<Words>();
  int t = threadIdx.x;
  cp_async16(&s.word[4 * t], g_in + 4 * t, true);  // copied
  cp_async_commit();
  between();
  store_global(g_out + t, load_shared(&s.word[4 * ((t + by) % THREADS)]));  // used
  cp_async_wait<0>();
}
KERNEL(THREADS, 1) copy_used_early(const float* g_in, float* g_out, int by) { copy(g_in, g_out, by, [] {}); }
KERNEL(THREADS, 1) copy_used_after_wait(const float* g_in, float* g_out, int by) {
  copy(g_in, g_out, by, [] { cp_async_wait<0>(); });
}
KERNEL(THREADS, 1) copy_used_after_barrier(const float* g_in, float* g_out, int by) {
  copy(g_in, g_out, by, [] { block_sync(); });
}
KERNEL(THREADS, 1) copy_used_after_both(const float* g_in, float* g_out, int by) {
  copy(g_in, g_out, by, [] { cp_async_wait<0>(), block_sync(); });
}
/// A ring of one: the next copy takes the place of what others still read.
KERNEL(THREADS, 1) copy_over_readers(const float* g_in, float* g_out, int sync) {
  Words& s = dynamic_smem<Words>();
  int t = threadIdx.x;
  float sum = 0.f;
  for (int step = 0; step < 2; ++step) {
    cp_async16(&s.word[4 * t], g_in + 4 * t, true);  // refilled
    cp_async_commit();
    cp_async_wait<0>();
    block_sync();
    sum += load_shared(&s.word[4 * ((t + 32) % THREADS)]);  // still read
    if (sync) block_sync();
  }
  store_global(g_out + t, sum);
}

/// Warp 0 fills, warp 1 drains, in three steps with named barriers of their own; `full` and `empty` may be left
/// out.
KERNEL(THREADS, 1) ring(const float* g_in, float* g_out, int full, int empty) {
  Words& s = dynamic_smem<Words>();
  int lane = lane_id();
  float sum = 0.f;
  for (int step = 0; step < 3; ++step) {
    if (warp_id() == 0) {
      if (step && empty) named_sync(3 + step, 64);
      store_shared(&s.word[lane], load_global(g_in + lane));  // filled
      if (full) named_arrive(1 + step, 64);
    } else {
      if (full) named_sync(1 + step, 64);
      sum += load_shared(&s.word[31 - lane]);  // drained
      if (step < 2 && empty) named_arrive(4 + step, 64);
    }
  }
  if (warp_id() == 1) store_global(g_out + lane, sum);
}

/// Neighbours of 1, 2, 4 and 8 bytes inside 16 do not touch each other.
KERNEL(THREADS, 1) neighbours(float* g_out) {
  Words& s = dynamic_smem<Words>();
  int t = threadIdx.x;
  auto* bytes = reinterpret_cast<uint8_t*>(&s.word[0]);
  store_shared(bytes + t, uint8_t(t));
  store_shared(reinterpret_cast<uint16_t*>(bytes + 64) + t, uint16_t(t));
  store_shared(reinterpret_cast<uint32_t*>(bytes + 192) + t, uint32_t(t));
  block_sync();
  float sum = 0.f;
  for (int i = 0; i < 28; ++i) sum += float(load_shared(&s.word[i % 4] + (t + i) % 24) == 0.f);
  store_global(g_out + t, sum);
}

/// Threads of both warps count together; then all read the sum.
KERNEL(THREADS, 1) count_together(int* g_out, int sync) {
  struct Count {
    int value;
  };
  Count& s = dynamic_smem<Count>();
  if (threadIdx.x == 0) store_shared(&s.value, 0);
  block_sync();
  atomicAdd(&s.value, 1);  // counted
  if (sync) block_sync();
  store_global(g_out + threadIdx.x, load_shared(&s.value));  // read plainly
}

/// Warp 0 hands a value to warp 1 by a flag in shared memory.
KERNEL(THREADS, 1) flag(int* g_out, int fences) {
  struct Mail {
    int value, flag;
  };
  Mail& s = dynamic_smem<Mail>();
  if (threadIdx.x == 0) store_shared(&s.flag, 0);
  block_sync();
  if (threadIdx.x == 0) {
    store_shared(&s.value, 7);  // posted
    if (fences) __threadfence_block();
    atomicExch(&s.flag, 1);
  } else if (threadIdx.x == 32) {
    while (!atomicAdd(&s.flag, 0)) {}
    if (fences) __threadfence_block();
    store_global(g_out, load_shared(&s.value));  // fetched
  }
}

/// Odd threads leave; the rest go on with barriers.
KERNEL(THREADS, 1) early_exit(float* g_out) {
  Words& s = dynamic_smem<Words>();
  int t = threadIdx.x;
  store_shared(&s.word[t], float(t));
  if (t % 2) return;
  block_sync();
  store_global(g_out + t, load_shared(&s.word[t + 1]));
}

// ---- between blocks: the last to arrive adds up what all have left

/// `fence`: 0 none, 1 by every thread before the barrier, 2 by one thread after it. `reread`: the last arriver
/// reads its own part back, in its place; otherwise it begins with the one it still has.
KERNEL(THREADS, 1)
last_arriver(const float* g_in, float* g_parts, int* g_count, float* g_out, int fence, int reread) {
  struct Last {
    int is;
  };
  Last& s = dynamic_smem<Last>();
  int t = threadIdx.x, blocks = gridDim.x, block = blockIdx.x;
  float part = load_global(g_in + block * THREADS + t);
  store_global(g_parts + block * THREADS + t, part);
  if (fence == 1) __threadfence();
  block_sync();
  if (t == 0) {
    if (fence == 2) __threadfence();
    store_shared(&s.is, int(atomicAdd(g_count, 1) == blocks - 1));
    if (fence) __threadfence();
  }
  block_sync();
  if (!load_shared(&s.is)) return;
  float sum = reread ? 0.f : part;
  for (int b = 0; b < blocks; ++b)
    if (reread || b != block) sum += load_global(g_parts + b * THREADS + t);
  store_global(g_out + t, sum);
}

/// Block 0 waits for block 1, which must be in flight.
KERNEL(32, 1) wait_for_other_block(int* g_flag, int* g_out) {
  if (threadIdx.x) return;
  if (blockIdx.x == 1) {
    store_global(g_out, 5);
    __threadfence();
    atomicExch(g_flag, 1);
  } else if (blockIdx.x == 0) {
    while (!atomicAdd(g_flag, 0)) {}
    __threadfence();
    store_global(g_out + 1, load_global(g_out) + 1);
  }
}
