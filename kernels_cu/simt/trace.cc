#include "trace.h"

namespace simt {

void free_traffic(Traffic* t) {
  if (!t) return;
  for (WarpTraffic& w : t->warp) {
    for (int i = 0; i < w.capacity; ++i) free(w.visits[i].open);
    free(w.visits), free(w.open_sites);
  }
  free(t);
}

int find_site(Site site, Access access) {
  Trace& trace = *machine.launch.trace;
  static constinit uint16_t recent[256]{};
  uint16_t& guess = recent[(site.line * 31u + site.column * 7u + unsigned(access)) % 256];
  auto fits = [&](int i) {
    const SiteRow& row = trace.sites[i];
    return row.line == site.line && row.column == int(site.column) && row.access == int(access) &&
           (row.file == site.file || !strcmp(row.file, site.file));
  };
  int known = trace.site_count < trace.site_capacity ? trace.site_count : trace.site_capacity;
  if (guess < known && fits(guess)) return guess;
  for (int i = 0; i < known; ++i)
    if (fits(i)) return guess = uint16_t(i);
  if (trace.site_count++ >= trace.site_capacity) return -1;
  trace.sites[known] = {site.file, site.line, int(site.column), int(access), 0, 0, 0, 0, 0, 0, 0, ~0ull, 0};
  return guess = uint16_t(known);
}

/// Counts how many of `n` values differ.
static int distinct(const uint64_t* values, int n) {
  int count = 0;
  for (int i = 0; i < n; ++i) {
    bool seen = false;
    for (int j = i - 1; j >= 0 && !seen; --j) seen = values[j] == values[i];
    count += !seen;
  }
  return count;
}

/// The passes that `count` lanes from `first` on need: each of the 32 banks gives one word a pass.
static int bank_passes(const Instruction& in, int first, int count) {
  uint64_t words[LANES * 4];
  int n = 0;
  for (int lane = first; lane < first + count; ++lane)
    if (in.lanes >> lane & 1)
      for (uint64_t w = in.address[lane] / 4;
           w <= (in.address[lane] + in.bytes[lane] - 1) / 4 && n < LANES * 4; ++w)
        words[n++] = w;
  int load[32] = {}, most = 0;
  for (int i = 0; i < n; ++i) {
    bool seen = false;
    for (int j = 0; j < i && !seen; ++j) seen = words[j] == words[i];
    if (!seen && ++load[words[i] % 32] > most) most = load[words[i] % 32];
  }
  return most;
}

/// A whole instruction is there: its sectors or passes.
static SIMT_COLD void count_instruction(SiteRow& row, const Instruction& in) {
  ++row.instructions;
  int widest = 0;
  uint64_t sectors[LANES * 2];
  int n = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    if (!(in.lanes >> lane & 1)) continue;
    ++row.lanes;
    row.bytes += in.bytes[lane];
    if (in.bytes[lane] > widest) widest = in.bytes[lane];
    if (!in.bytes[lane]) continue;
    if (is_shared(Access(row.access))) {
      if (in.address[lane] < row.first) row.first = in.address[lane];
      if (in.address[lane] + in.bytes[lane] > row.end) row.end = in.address[lane] + in.bytes[lane];
    } else {
      sectors[n++] = in.address[lane] / 32;
      if (uint64_t last = (in.address[lane] + in.bytes[lane] - 1) / 32; last != sectors[n - 1])
        sectors[n++] = last;
    }
  }
  if (is_global(Access(row.access))) row.sectors += distinct(sectors, n);
  if (!is_shared(Access(row.access)) || !widest) return;
  // A pass serves 128 bytes: whole warps of 4 bytes a lane, halves of 8, quarters of 16.
  int parts = widest <= 4 ? 1 : widest <= 8 ? 2 : 4, count = LANES / parts;
  for (int part = 0; part < parts; ++part)
    if (int passes = bank_passes(in, part * count, count))
      row.wavefronts += passes, row.conflicts += passes - 1;
}

/// Puts the running lane's access into its warp's instruction.
static SIMT_COLD void add_lane(Site site, Access access, uint64_t address, int bytes) {
  int index = find_site(site, access);
  if (index < 0) return;
  Warp& warp = *current->warp;
  WarpTraffic& traffic = warp_traffic(warp);
  while (index >= traffic.capacity) {
    int before = traffic.capacity;
    grow(traffic.visits, before, traffic.capacity, 32);
    memset(static_cast<void*>(traffic.visits + before), 0, (traffic.capacity - before) * sizeof(Visits));
  }
  Visits& v = traffic.visits[index];
  int lane = current->lane, at = int(v.visit[lane]++);
  if (!v.count) {
    grow(traffic.open_sites, traffic.open_count, traffic.open_capacity, 16);
    traffic.open_sites[traffic.open_count++] = index;
  }
  while (at >= v.count) {
    grow(v.open, v.count, v.capacity, 4);
    v.open[v.count++].lanes = 0;
  }
  Instruction& in = v.open[at];
  in.lanes |= 1u << lane;
  in.address[lane] = address, in.bytes[lane] = uint8_t(bytes);
}

void close_instructions(Warp& warp) {
  WarpTraffic& traffic = warp_traffic(warp);
  for (int i = 0; i < traffic.open_count; ++i) {
    int index = traffic.open_sites[i];
    Visits& v = traffic.visits[index];
    for (int j = 0; j < v.count; ++j) count_instruction(machine.launch.trace->sites[index], v.open[j]);
    v.count = 0;
    memset(v.visit, 0, sizeof v.visit);
  }
  traffic.open_count = 0;
}

void trace_lane(Site site, Access access, uint64_t address, int bytes) {
  add_lane(site, access, address, bytes);
  StepRow& step = warp_traffic(*current->warp).step;
  if (access == Access::global_load) step.bytes_loaded += bytes;
  if (access == Access::global_copy) step.bytes_copied += bytes;
  if (access == Access::global_store) step.bytes_stored += bytes;
  if (access == Access::shared_load || access == Access::ldmatrix) step.shared_loaded += bytes;
  if (access == Access::shared_store || access == Access::stmatrix || access == Access::shared_copy)
    step.shared_stored += bytes;
}

void trace_bulk(Site site, Access access, uint64_t bytes, uint64_t sectors, uint64_t first,
                          uint64_t shared_bytes) {
  StepRow& step = warp_traffic(*current->warp).step;
  (access == Access::bulk_load ? step.bytes_copied : step.bytes_stored) += bytes;
  (access == Access::bulk_load ? step.shared_stored : step.shared_loaded) += shared_bytes;
  int index = find_site(site, access);
  if (index < 0) return;
  SiteRow& row = machine.launch.trace->sites[index];
  ++row.instructions, ++row.lanes;
  row.bytes += bytes, row.sectors += sectors;
  if (first < row.first) row.first = first;
  if (first + shared_bytes > row.end) row.end = first + shared_bytes;
}

void trace_meeting(Warp& warp, Site site, Access access, uint32_t lanes) {
  if (!(warp.live & ~lanes)) close_instructions(warp);
  if (access == Access::ldmatrix || access == Access::stmatrix) return;  // addresses came lane by lane
  int index = find_site(site, access);
  if (index < 0) return;
  SiteRow& row = machine.launch.trace->sites[index];
  ++row.instructions, row.lanes += __builtin_popcount(lanes);
  StepRow& step = warp_traffic(warp).step;
  if (access == Access::mma) ++step.mma;
  if (access == Access::shuffle || access == Access::vote) ++step.shuffles;
}

void end_step(Warp& warp, Site site, Access by) {
  Trace& trace = *machine.launch.trace;
  StepRow& step = warp_traffic(warp).step;
  if (machine.block->linear == trace.block && trace.step_count++ < trace.step_capacity) {
    StepRow& row = trace.steps[trace.step_count - 1] = step;
    row.warp = warp.id, row.ended_by = int(by), row.file = site.file, row.line = site.line;
  }
  step = {.step = step.step + 1};
}

}  // namespace simt
