// Executes a program from global memory: one build runs them all. An instruction of a kind is one call site
// for every program, so different masks meet there at once.
#include "program.cuh"

DEVICE void exchange(Registers& r, const Instruction& i, uint32_t mask) {
  if (i.op == SHUFFLE) {
    int source = lane_of(mask, r[i.b] + i.immediate);
    if (i.width == 8)
      r.set_wide(i.to, __shfl_sync(mask, r.wide(i.a), source));
    else
      r[i.to] = __shfl_sync(mask, r[i.a], source);
  } else if (i.op == SHUFFLE_XOR) {
    r[i.to] = __shfl_xor_sync(mask, r[i.a], int(i.immediate));
  } else if (i.op == SHUFFLE_UP) {
    r[i.to] = __shfl_up_sync(mask, r[i.a], int(i.immediate));
  } else if (i.op == SHUFFLE_DOWN) {
    r[i.to] = __shfl_down_sync(mask, r[i.a], int(i.immediate));
  } else if (i.op == BALLOT) {
    r[i.to] = __ballot_sync(mask, r[i.a] < r[i.b]);
  } else if (i.op == ANY) {
    r[i.to] = __any_sync(mask, r[i.a] < r[i.b]);
  } else {
    r[i.to] = __all_sync(mask, r[i.a] < r[i.b]);
  }
}

KERNEL(WARPS * WARP, 1)
interpreter(const Instruction* g_code, int length, const uint32_t* g_in, uint32_t* g_out,
            uint32_t* g_shared) {
  Registers r;
  start(r, g_in);
  for (int pc = 0; pc < length; ++pc) {
    const Instruction i = load_global(g_code + pc);
    const uint32_t mask = mask_of(i.mask);
    if (!takes_part(mask)) continue;
    switch (i.op) {
      case CONSTANT: r[i.to] = i.immediate; break;
      case THREAD: r[i.to] = threadIdx.x; break;
      case LOAD: load_slot(r, i.to, own_slot(i.immediate, i.width), i.width); break;
      case GATHER: load_slot(r, i.to, r[i.b] % (SHARED_BYTES / i.width), i.width); break;
      case STORE: store_slot(r, i.a, own_slot(i.immediate, i.width), i.width); break;
      case WARP_SYNC: __syncwarp(mask); break;
      case BLOCK_SYNC: block_sync(); break;
      case SYNCTHREADS: __syncthreads(); break;
      case EXIT: return leave(r, g_out);
      default:
        if (i.op <= LESS)
          r[i.to] = arithmetic(i.op, r[i.a], r[i.b]);
        else
          exchange(r, i, mask);
    }
  }
  finish(r, g_out, g_shared);
}
