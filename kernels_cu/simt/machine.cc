// machine: all of the machine that is the same for every kernel. It is built once, as one unit, and linked
// into each kernel, whose own unit sees only the headers. wgmma.cc is one by itself: few kernels need it.
#define SIMT_CALL inline __attribute__((always_inline, used))  // quick builds link them
#include "calls.h"

#include "state.cc"
#include "clock.cc"
#include "shadow.cc"
#include "held.cc"
#include "trace.cc"
#include "watch.cc"
#include "warpgroup.cc"
#include "block.cc"
#include "memory.cc"
#include "warp.cc"
#include "async.cc"
#include "mma.cc"
#include "mbarrier.cc"
#include "cluster.cc"
#include "bulk.cc"
#include "tma.cc"
#include "warpgroup_calls.cc"
#include "launch.cc"
