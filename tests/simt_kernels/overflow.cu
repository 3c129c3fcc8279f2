// Faults of a thread's own memory, which the machine does not check: AddressSanitizer does.
#include "prim/gmem.cuh"
#include "prim/warp.cuh"

constexpr int TABLE[4] = {1, 2, 3, 5};

KERNEL(64, 1) past_local_array(int* g_out, int size) {
  volatile int local[4] = {};
  for (int i = 0; i < size; ++i) local[i] = i;  // past its end where size is more than 4
  store_global(g_out + threadIdx.x, local[3]);
}

KERNEL(64, 1) past_table(int* g_out, int size) {
  block_sync();
  int at = size - 1 + int(threadIdx.x) % 2;
  store_global(g_out + threadIdx.x, TABLE[at]);  // past the table where size is 4
}
