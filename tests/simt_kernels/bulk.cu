// Bulk copies and mbarriers as a kernel uses them; on both machines.
#include "prim/cluster.cuh"
#include "prim/gmem.cuh"
#include "prim/tma.cuh"
#include "prim/warp.cuh"

struct Bytes {
  alignas(1024) uint8_t byte[65536];
  Mbarrier full;
};

struct At {
  int x[5];
};
DEVICE void load_at(void* s_to, const TensorMap& map, int rank, const At& at, Mbarrier& s_full SITE) {
  const int *x = at.x;
  if (rank == 2)
    tma_load(s_to, map, {x[0], x[1]}, s_full AT_SITE);
  else if (rank == 3)
    tma_load(s_to, map, {x[0], x[1], x[2]}, s_full AT_SITE);
  else if (rank == 4)
    tma_load(s_to, map, {x[0], x[1], x[2], x[3]}, s_full AT_SITE);
  else
    tma_load(s_to, map, {x[0], x[1], x[2], x[3], x[4]}, s_full AT_SITE);
}
DEVICE void store_at(const TensorMap& map, int rank, const At& at, const void* s_from SITE) {
  const int *x = at.x;
  if (rank == 2)
    tma_store(map, {x[0], x[1]}, s_from AT_SITE);
  else if (rank == 3)
    tma_store(map, {x[0], x[1], x[2]}, s_from AT_SITE);
  else if (rank == 4)
    tma_store(map, {x[0], x[1], x[2], x[3]}, s_from AT_SITE);
  else
    tma_store(map, {x[0], x[1], x[2], x[3], x[4]}, s_from AT_SITE);
}
DEVICE void make_full(Bytes& s SITE) {
  if (threadIdx.x == 0) {
    mbarrier_init(s.full, 1 AT_SITE);
    fence_mbarrier_init(ONLY_AT_SITE);
  }
  block_sync(ONLY_AT_SITE);
}
DEVICE Vec16* words(Bytes& s) { return reinterpret_cast<Vec16*>(s.byte); }

/// The bytes of one tile, as they lie in shared memory.
KERNEL(128, 1)
load_tile(const __grid_constant__ TensorMap map, int rank, int x0, int x1, int x2, int x3, int x4, int bytes,
          Vec16* g_out) {
  Bytes& s = dynamic_smem<Bytes>();
  make_full(s);
  if (threadIdx.x == 0) {
    prefetch_map(map);
    mbarrier_arrive_expect_tx(s.full, bytes);
    load_at(s.byte, map, rank, At{{x0, x1, x2, x3, x4}}, s.full);
  }
  mbarrier_wait(s.full, 0);
  for (int i = threadIdx.x; i < bytes / 16; i += 128) store_global(g_out + i, load_shared(words(s) + i));
}

/// The other way: bytes as they lie in shared memory become a tile.
KERNEL(128, 1)
store_tile(const __grid_constant__ TensorMap map, int rank, int x0, int x1, int x2, int x3, int x4, int bytes,
           const Vec16* g_in) {
  Bytes& s = dynamic_smem<Bytes>();
  for (int i = threadIdx.x; i < bytes / 16; i += 128) store_shared(words(s) + i, load_global(g_in + i));
  fence_proxy_async();
  block_sync();
  if (threadIdx.x == 0) {
    store_at(map, rank, At{{x0, x1, x2, x3, x4}}, s.byte);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

/// Plain bytes, through shared memory and back.
KERNEL(128, 1) copy_bytes(const uint8_t* g_in, uint8_t* g_out, int bytes) {
  Bytes& s = dynamic_smem<Bytes>();
  make_full(s);
  if (threadIdx.x) return;
  mbarrier_arrive_expect_tx(s.full, bytes);
  bulk_load(s.byte, g_in, bytes, s.full);
  mbarrier_wait(s.full, 0);
  bulk_store(g_out, s.byte, bytes);
  bulk_commit();
  bulk_wait<0>();
}

/// Tiles of 8 rows of 64 elements, of (batch, row, head, column) arrays.
KERNEL(32, 1)
copy_tiles(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to) {
  struct Tile {
    alignas(1024) uint16_t element[8 * 64];
    Mbarrier full;
  };
  Tile& s = dynamic_smem<Tile>();
  if (threadIdx.x) return;
  const int row = blockIdx.x * 8, head = blockIdx.y, batch = blockIdx.z;
  mbarrier_init(s.full, 1);
  fence_mbarrier_init();
  mbarrier_arrive_expect_tx(s.full, sizeof s.element);
  tma_load(s.element, from, {0, head, row, batch}, s.full);
  mbarrier_wait(s.full, 0);
  tma_store(to, {0, head, row, batch}, s.element);
  bulk_commit();
  bulk_wait_read<0>();
}

// ---- a ring of stages: a warp produces, two consume

constexpr int STAGES = 3, ROWS = 8, COLS = 64, CONSUMERS = 64;

struct Ring {
  alignas(1024) uint16_t tile[STAGES][ROWS * COLS];
  Mbarrier full[STAGES], empty[STAGES];
};
/// What is left out or wrong.
enum Fault : int {
  NONE, TOO_FEW, TOO_MANY, NO_EXPECT, NO_FULL_WAIT, NO_EMPTY_WAIT, NO_ARRIVAL, TWO_ARRIVALS, WRONG_PARITY,
  UNFENCED, UNORDERED_INIT, EXTRA_TILE,
};

DEVICE void produce(Ring& s, const TensorMap& map, int tiles, int fault SITE) {
  for (int n = 0; n < tiles; ++n) {
    const int stage = n % STAGES, use = n / STAGES;
    if (fault != NO_EMPTY_WAIT) mbarrier_wait(s.empty[stage], (use + 1) % 2 AT_SITE);
    const int bytes = sizeof s.tile[0] + (fault == TOO_FEW ? -512 : fault == TOO_MANY ? 512 : 0);
    if (fault == NO_EXPECT)
      mbarrier_arrive(s.full[stage] AT_SITE);
    else
      mbarrier_arrive_expect_tx(s.full[stage], bytes AT_SITE);
    tma_load(s.tile[stage], map, {0, n * ROWS}, s.full[stage]);  // produced
  }
}
/// Each consumer adds up its column.
DEVICE uint32_t consume(Ring& s, int tiles, int fault) {
  uint32_t sum = 0;
  for (int n = 0; n < tiles; ++n) {
    const int stage = n % STAGES, use = n / STAGES, t = int(threadIdx.x) - WARP;
    if (fault != NO_FULL_WAIT) mbarrier_wait(s.full[stage], (use + (fault == WRONG_PARITY)) % 2);  // full
    for (int row = 0; row < ROWS; ++row) {
      const int column = t ^ row << 3;  // the 128-byte pattern, a row
      sum = sum * 31 + load_shared(&s.tile[stage][row * COLS + column]);  // consumed
    }
    if (fault != NO_ARRIVAL || t) mbarrier_arrive(s.empty[stage]);  // given back
    if (fault == TWO_ARRIVALS && t == 5) mbarrier_arrive(s.empty[stage]);  // once more
  }
  return sum;
}
KERNEL(WARP + CONSUMERS, 1)
ring(const __grid_constant__ TensorMap map, uint32_t* g_out, int tiles, int fault) {
  Ring& s = dynamic_smem<Ring>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(s.full[i], 1);
      mbarrier_init(s.empty[i], CONSUMERS);  // empty begins
    }
    if (fault != UNFENCED) fence_mbarrier_init();
  }
  if (fault != UNORDERED_INIT) block_sync();
  if (warp_id() == 0) {
    if (lane_id() == 0) produce(s, map, tiles + (fault == EXTRA_TILE), fault);
  } else {
    store_global(g_out + threadIdx.x - WARP, consume(s, tiles, fault));
  }
}

/// Two warps take the tiles in turn, so each waits for every second phase; named barriers hand the turn over.
KERNEL(3 * WARP, 1)
turns(const __grid_constant__ TensorMap map, uint32_t* g_out, int tiles, int ordered) {
  Ring& s = dynamic_smem<Ring>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(s.full[i], 1);
      mbarrier_init(s.empty[i], 1);
    }
    fence_mbarrier_init();
  }
  block_sync();
  if (warp_id() == 0) {
    if (lane_id() == 0) produce(s, map, tiles, NONE);
    return;
  }
  const int me = warp_id() - 1;
  if (ordered && me) named_arrive(1, 2 * WARP);
  uint32_t sum = 0;
  for (int n = me; n < tiles; n += 2) {
    const int stage = n % STAGES, use = n / STAGES;
    if (ordered) named_sync(1 + me, 2 * WARP);
    if (lane_id() == 0) mbarrier_wait(s.full[stage], use % 2);  // its turn
    warp_sync();
    if (ordered && n + 1 < tiles) named_arrive(2 - me, 2 * WARP);
    for (int i = lane_id(); i < ROWS * COLS; i += WARP) sum = sum * 31 + load_shared(&s.tile[stage][i]);
    warp_sync();
    if (lane_id() == 0) mbarrier_arrive(s.empty[stage]);
  }
  store_global(g_out + threadIdx.x - WARP, sum);
}

// ---- stores: each step writes a tile and sends it away, from two places in turn

enum StoreFault : int {
  STORE_RIGHT, NO_PROXY_FENCE, NO_BARRIER, NO_READ_WAIT, NO_COMMIT, NO_LAST_WAIT, LATE_FENCE,
};

KERNEL(128, 1) store_steps(const __grid_constant__ TensorMap map, int steps, int fault) {
  struct Tiles {
    alignas(1024) uint16_t tile[2][ROWS * COLS];
  };
  Tiles& s = dynamic_smem<Tiles>();
  const int t = threadIdx.x;
  for (int step = 0; step < steps; ++step) {
    uint16_t* s_tile = s.tile[step % 2];
    if (t == 0 && fault != NO_READ_WAIT) bulk_wait_read<1>();
    block_sync();
    for (int i = t; i < ROWS * COLS; i += 128)
      store_shared(s_tile + i, uint16_t(step * 1000 + i));  // written
    if (fault != NO_PROXY_FENCE && fault != LATE_FENCE) fence_proxy_async();
    if (fault != NO_BARRIER) block_sync();
    if (fault == LATE_FENCE && t == 0) fence_proxy_async();
    if (t == 0) {
      tma_store(map, {0, step * ROWS}, s_tile);  // sent
      if (fault != NO_COMMIT) bulk_commit();
    }
  }
  if (t == 0 && fault != NO_LAST_WAIT) bulk_wait_read<0>();
}

// ---- clusters: the first block's copies fill the same stage of all; all give it back to the first

enum ClusterFault : int { CLUSTER_RIGHT, NO_REMOTE_ARRIVAL, LEAVES_EARLY, NO_CLUSTER_SYNC, NO_PEER_EXPECT };

struct Shared {
  alignas(1024) uint16_t tile[2][ROWS * COLS];
  Mbarrier full[2], empty[2];
};
KERNEL(64, 1)
multicast(const __grid_constant__ TensorMap map, uint32_t* g_out, int tiles, int fault) {
  Shared& s = dynamic_smem<Shared>();
  const int t = threadIdx.x, blocks = cluster_size(), rank = cluster_rank();
  if (t == 0) {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(s.full[i], 1);
      mbarrier_init(s.empty[i], 64 * blocks);
    }
    fence_mbarrier_init();
  }
  if (fault == NO_CLUSTER_SYNC)
    block_sync();
  else
    cluster_sync();
  uint32_t sum = 0;
  for (int n = 0; n < tiles; ++n) {
    const int stage = n % 2, use = n / 2;
    if (t == 0) {
      if (fault != NO_PEER_EXPECT || rank == 0) mbarrier_arrive_expect_tx(s.full[stage], sizeof s.tile[0]);
      if (rank == 0) {
        mbarrier_wait(s.empty[stage], (use + 1) % 2);
        const int row = (int(blockIdx.x) / blocks * tiles + n) * ROWS;
        tma_load_multicast(s.tile[stage], map, {0, row}, s.full[stage], uint16_t((1 << blocks) - 1));  // cast
      }
    }
    mbarrier_wait(s.full[stage], use % 2);
    for (int i = t; i < ROWS * COLS; i += 64) sum = sum * 31 + load_shared(&s.tile[stage][i]);  // taken
    if (fault != NO_REMOTE_ARRIVAL || rank != 1) mbarrier_arrive_remote(s.empty[stage], 0);
    if (fault == LEAVES_EARLY && rank == 1) break;
  }
  store_global(g_out + blockIdx.x * 64 + t, sum);
  if (fault != LEAVES_EARLY) cluster_sync();
}

// ---- what nobody must do

enum Misuse : int {
  NOT_INITIALISED, INITIALISED_TWICE, FOR_NO_ARRIVALS, ARRIVED_TWICE, TOO_MUCH_ANNOUNCED, PARITY_OF_TWO,
  MISALIGNED, PAST_THE_END, NOBODY_WAITS, LEFT_WITH_BYTES, BARRIER_OVERWRITTEN,
};

KERNEL(32, 1) misuse(const __grid_constant__ TensorMap map, int kind) {
  Bytes& s = dynamic_smem<Bytes>();
  if (threadIdx.x) return;
  // NOTE: the number of the only block, for a 0 that the compiler sees makes the ptxas of NVRTC 13.0 crash.
  if (kind == FOR_NO_ARRIVALS) mbarrier_init(s.full, blockIdx.x);  // for none
  if (kind != NOT_INITIALISED) mbarrier_init(s.full, 1);
  fence_mbarrier_init();
  if (kind == INITIALISED_TWICE) mbarrier_init(s.full, 1);  // again
  if (kind == TOO_MUCH_ANNOUNCED) mbarrier_expect_tx(s.full, 1 << 20);  // too much
  if (kind == PARITY_OF_TWO) mbarrier_wait(s.full, 2);  // of two
  if (kind == LEFT_WITH_BYTES) {
    mbarrier_expect_tx(s.full, 64);
    return;
  }
  mbarrier_arrive_expect_tx(s.full, ROWS * COLS * 2);  // arrived
  if (kind == ARRIVED_TWICE) mbarrier_arrive(s.full);  // twice
  void* s_to = s.byte + (kind == MISALIGNED ? 64 : kind == PAST_THE_END ? 65536 - 512 + 128 : 0);
  tma_load(s_to, map, {0, 0}, s.full);  // copied
  if (kind == BARRIER_OVERWRITTEN) store_shared(&s.full.state, uint64_t(0));  // overwritten
  if (kind != NOBODY_WAITS) mbarrier_wait(s.full, 0);
}

/// Thread 0 goes through two phases alone; thread 32 waits for the first, before, in between or after.
KERNEL(64, 1) miss_a_phase(int sync) {
  Bytes& s = dynamic_smem<Bytes>();
  make_full(s);
  if (threadIdx.x == 0)
    for (int phase = 0; phase < 2; ++phase) {
      mbarrier_arrive(s.full);
      mbarrier_wait(s.full, phase);
    }
  if (sync) block_sync();
  if (threadIdx.x == 32) mbarrier_wait(s.full, 0);  // missed
}

/// Thread t of the second warp reads what thread t of the first wrote, by way of an mbarrier.
KERNEL(64, 1) hand_over(const uint32_t* g_in, uint32_t* g_out, int arrive_early) {
  Bytes& s = dynamic_smem<Bytes>();
  uint32_t* s_word = reinterpret_cast<uint32_t*>(s.byte);
  if (threadIdx.x == 0) mbarrier_init(s.full, WARP);
  block_sync();
  if (warp_id() == 0) {
    if (arrive_early) mbarrier_arrive(s.full);
    store_shared(s_word + lane_id(), load_global(g_in + lane_id()));  // handed
    if (!arrive_early) mbarrier_arrive(s.full);
  } else {
    mbarrier_wait(s.full, 0);
    store_global(g_out + lane_id(), load_shared(s_word + 31 - lane_id()));  // taken over
  }
}
