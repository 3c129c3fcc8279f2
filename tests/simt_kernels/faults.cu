// Planted faults: each kernel does one thing that kernels must not do.
#include "prim/cp_async.cuh"
#include "prim/gmem.cuh"
#include "prim/warp.cuh"

DEVICE float* floats() { return static_cast<float*>(simt::shared_base()); }

KERNEL(64, 1) no_barrier_before_read(const float* g_in, float* g_out) {
  int t = threadIdx.x;
  store_shared(floats() + t, load_global(g_in + t));
  store_global(g_out + t, load_shared(floats() + (t + 1) % 64));  // a barrier is missing before this line
}

KERNEL(64, 1) no_wait(const float* g_in, float* g_out) {
  int t = threadIdx.x;
  if (t < 16) cp_async16(floats() + 4 * t, g_in + 4 * t, true);
  cp_async_commit();
  block_sync();  // cp_async_wait<0>() is missing before this line
  store_global(g_out + t, load_shared(floats() + t));
  block_sync();
  cp_async_wait<0>();
}

KERNEL(64, 1) no_commit(const float* g_in, float* g_out) {
  int t = threadIdx.x;
  if (t < 16) cp_async16(floats() + 4 * t, g_in + 4 * t, true);  // cp_async_commit() is missing
  cp_async_wait<0>();                                            // so this waits for nothing
  block_sync();
  store_global(g_out + t, 0.f);
}

KERNEL(64, 1) no_barrier_before_overwrite(const float* g_in, float* g_out) {
  int t = threadIdx.x;
  float sum = 0.f;
  for (int i = 0; i < 2; ++i) {
    store_shared(floats() + t, load_global(g_in + 64 * i + t));
    block_sync();
    sum += load_shared(floats() + (t + 40) % 64);  // a barrier is missing after this line
  }
  store_global(g_out + t, sum);
}

KERNEL(64, 1) divergent(float* g_out) {
  if (threadIdx.x < 32)
    block_sync();  // one of two
  else
    block_sync();  // two of two
}

KERNEL(32, 1) half_warp_leaves(int* g_out) {
  if (lane_id() < 16) store_global(g_out + lane_id(), shuffle(lane_id(), 3));
}

KERNEL(32, 1) half_warp_waits(int* g_out) {
  if (lane_id() < 16) store_global(g_out + lane_id(), shuffle(lane_id(), 3));  // half of them come
  block_sync();  // the other half
}

KERNEL(32, 1) not_in_mask(int* g_out) { __ballot_sync(0x0000ffffu, true); }

KERNEL(32, 1) different_kinds(int* g_out) {
  const simt::Site one = simt::Site::here();  // as a helper would hand on its caller's
  if (lane_id() < 16) shuffle(1, 0, one);
  warp_sync(one);
}

KERNEL(64, 1) divergent_on_one_line(int* g_out) {
  threadIdx.x < 32 ? block_sync() : block_sync();  // two calls
}

KERNEL(32, 1) shuffle_from_outside(int* g_out) {
  if (lane_id() < 16) __shfl_sync(0x0000ffffu, 1, 20);
}

KERNEL(64, 1) barrier_counts(int* g_out) { named_sync(3, warp_id() ? 64 : 32 * 2 - 32 * (lane_id() % 2)); }

KERNEL(32, 1) read_past_end(const Vec16* g_in, Vec16* g_out, int at) {
  store_global(g_out + threadIdx.x, load_global(g_in + at + threadIdx.x));
}

KERNEL(32, 1) write_past_end(float* g_out, int at) { store_global(g_out + at - int(threadIdx.x), 1.f); }

KERNEL(32, 1) copy_past_end(const Vec16* g_in, Vec16* g_out, int at) {
  cp_async16(static_cast<Vec16*>(simt::shared_base()) + threadIdx.x, g_in + at, true);
}

KERNEL(32, 1) raw_read(const float* g_in, float* g_out) { store_global(g_out, g_in[5]); }

KERNEL(32, 1) raw_write(float* g_out) { g_out[7] = 1.f; }

KERNEL(32, 1) misaligned(const float* g_in, Vec16* g_out) {
  store_global(g_out, load_global(reinterpret_cast<const Vec16*>(g_in + 1)));
}

KERNEL(32, 1) shared_past_end(float* g_out) { store_global(g_out, load_shared(floats() + 2 * threadIdx.x)); }

KERNEL(32, 1) shared_misaligned(float* g_out) {
  store_shared(reinterpret_cast<Vec16*>(floats() + 1), Vec16{});
}

KERNEL(32, 1) raw_past_shared(float* g_out) {
  for (volatile float* s = floats();; ++s) *s = 1.f;
}

__attribute__((noinline)) int recurse(int n) {
  volatile int local[64];
  local[n % 64] = n;
  return n ? recurse(n - 1) + local[(n + 1) % 64] : 0;
}
KERNEL(32, 1) stack_overflow(int* g_out, int depth) { store_global(g_out + threadIdx.x, recurse(depth)); }

/// Frames of several pages, larger than a guard page.
__attribute__((noinline)) int recurse_wide(int n) {
  volatile int local[5000];
  local[0] = n;
  return n ? recurse_wide(n - 1) + local[0] : 0;
}
KERNEL(32, 1) wide_stack_overflow(int* g_out, int depth) {
  store_global(g_out + threadIdx.x, recurse_wide(depth));
}

KERNEL(32, 1) null_pointer(int* g_out, int* g_null) { *g_null = 1; }

KERNEL(32, 1) null_argument(int* g_out, int* g_null) { store_global(g_null, 1); }

KERNEL(32, 1) divide(int* g_out, int by) {
  store_global(g_out + threadIdx.x, 7 / (by + int(threadIdx.x) / 32));
}

KERNEL(32, 1) illegal(int* g_out) {
  if (threadIdx.x == 5) __builtin_trap();
}

KERNEL(32, 1) trapped(int* g_out) {
  if (threadIdx.x == 5) simt::trap("the table names page 9 of 4");
}

/// Block 0 waits for block 1.
KERNEL(32, 1) spin(int* g_flag) {
  if (blockIdx.x == 0)
    while (simt::atomic_add(g_flag, 0) == 0) {
    }
  else
    simt::atomic_exch(g_flag, 1);
}

/// Thread 0 waits for thread 40 of its own block, which is legal.
KERNEL(64, 1) spin_in_block(int* g_flag, int* g_out) {
  if (threadIdx.x == 0) {
    while (simt::atomic_add(g_flag, 0) == 0) {
    }
    store_global(g_out, 1);
  }
  if (threadIdx.x == 40) simt::atomic_exch(g_flag, 1);
}
