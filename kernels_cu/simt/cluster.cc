#include "cluster.h"

namespace simt {

void make_cluster(Block& block) {
  int blocks = machine.launch.cluster, threads = block.warps * LANES;
  if (block.rank) {
    block.cluster = (&block)[-1].cluster;
    return;
  }
  ClusterBarrier* c = block.cluster = static_cast<ClusterBarrier*>(zeroed(sizeof(ClusterBarrier)));
  c->blocks = blocks;
  c->phases = static_cast<uint32_t*>(zeroed(blocks * threads * sizeof(uint32_t)));
  c->sites = static_cast<Site*>(zeroed(blocks * threads * sizeof(Site)));
  c->waiting_slots = static_cast<uint32_t*>(zeroed(blocks * block.warps * sizeof(uint32_t)));
}

void free_cluster(Block& block) {
  ClusterBarrier* c = block.cluster;
  if (!c || block.rank) return;
  free(c->phases), free(c->sites), free(c->waiting_slots), free(c->arriving.clock), free(c->over.clock),
      free(c);
}

static int live_in_cluster(const Block& block) {
  int live = 0;
  for (int rank = 0; rank < machine.launch.cluster; ++rank) live += (&block - block.rank)[rank].live;
  return live;
}

/// Begins the next phase, if all have arrived.
static void finish_cluster_phase(Block& block) {
  ClusterBarrier& c = *block.cluster;
  if (!c.arrived || c.arrived < live_in_cluster(block)) return;
  ++machine.counters.barriers;
  ++c.phase, c.arrived = 0;
  Known released = c.arriving;
  c.arriving = c.over, c.over = released;
  c.arriving.epoch = 0;
  for (int w = 0; w < c.blocks * block.warps; ++w) {
    (&block - block.rank)[w / block.warps].warp[w % block.warps].ready |= c.waiting_slots[w];
    c.waiting_slots[w] = 0;
  }
}

void cluster_arrive(Site site) {
  Block& block = *machine.block;
  if (machine.watched) [[unlikely]]
    watch_call(Access::cluster_barrier, site);
  if (!block.cluster) make_cluster(block);  // a cluster of one
  ClusterBarrier& c = *block.cluster;
  int me = clock_number();
  if (c.phases[me])
    fail(site, "a second arrival at the cluster's barrier, without a wait since the one at %s:%d",
         c.sites[me].name(), c.sites[me].line);
  c.phases[me] = c.phase + 1, c.sites[me] = site;
  if (block.clocks) release(*block.clocks, me, c.arriving);
  if (block.held) publish_fenced();
  ++c.arrived;
  finish_cluster_phase(block);
}

void cluster_wait(Site site) {
  Block& block = *machine.block;
  if (machine.watched) [[unlikely]]
    watch_call(Access::cluster_barrier, site);
  int me = clock_number();
  if (!block.cluster || !block.cluster->phases[me])
    fail(site, "a wait at the cluster's barrier, at which this thread has not arrived");
  ClusterBarrier& c = *block.cluster;
  if (c.phases[me] > c.phase) {
    Warp* warp = current->warp;
    c.waiting_slots[block.rank * block.warps + int(warp - block.warp)] |= current->slot_bit;
    c.sites[me] = site;
    warp->ready &= ~current->slot_bit;
    wait();
  }
  c.phases[me] = 0;
  if (block.clocks) acquire(*block.clocks, me, c.over);
}

void finish_in_cluster() {
  Block& block = *machine.block;
  block.cluster->phases[clock_number()] = 0;
  finish_cluster_phase(block);
}

void say_cluster_waits(const Block& block, const Warp& warp) {
  if (!block.cluster) return;
  const ClusterBarrier& c = *block.cluster;
  uint32_t lanes = 0;
  const Site* site = nullptr;
  for (uint32_t slots = c.waiting_slots[block.rank * block.warps + int(&warp - block.warp)]; slots;
       slots &= slots - 1) {
    int lane = warp.slots[__builtin_ctz(slots)].lane;
    lanes |= 1u << lane;
    site = c.sites + (block.rank * block.warps + warp.id) * LANES + lane;
  }
  if (lanes)
    say("\n  warp %d, lanes %08x wait at %s:%d in the cluster's barrier, which has %d of %d threads", warp.id,
        lanes, site->name(), site->line, c.arrived, live_in_cluster(block));
}

Block& block_of_rank(uint32_t rank, Site site) {
  Block& block = *machine.block;
  if (rank >= uint32_t(machine.launch.cluster))
    fail(site, "block %u of the cluster, which has %d", rank, machine.launch.cluster);
  Block& other = (&block - block.rank)[rank];
  if (!other.live) fail(site, "block %u of the cluster has left, and its shared memory with it", rank);
  return other;
}

void mbarrier_arrive_remote(void* s_bar, uint32_t rank, Site site) {
  Block& block = block_of_rank(rank, site);
  Mbarrier& bar = find_mbarrier(block, s_bar, site);
  if (machine.watched) [[unlikely]]
    watch_mbarrier(block, bar, Access::mbarrier_arrive, site);
  arrive_at(block, bar, site);
}

}  // namespace simt
