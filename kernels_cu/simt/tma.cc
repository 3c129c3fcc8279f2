#include "tma.h"

namespace simt {

/// Checks a copy's global side and returns the bytes it requests there.
static SIMT_COLD uint32_t check_global(const BulkCopy& copy, Touch touch, uint64_t& sectors) {
  uint32_t requested = 0;
  uint64_t last = ~0ull;
  for_rows(copy, [&](uint32_t, uint64_t address, int, int bytes) {
    if (!bytes) return;
    translate(reinterpret_cast<const void*>(address), size_t(bytes), 1, touch, copy.site);
    requested += uint32_t(bytes);
    uint64_t from = address / 32, to = (address + bytes - 1) / 32;
    sectors += to - from + (from != last);
    last = to;
  });
  return requested;
}

/// Refuses a tile that begins where the copy engine takes none.
static SIMT_COLD void check_start(const BulkCopy& copy) {
  int size = copy.map.itemsize, step = 16 / size;
  if (copy.at[0] % step)
    fail(copy.site,
         "a bulk copy of a tile whose coordinate 0, the innermost, is %d: expected a multiple of %d, which "
         "is 16 bytes in elements of %d; hardware ends in an illegal instruction",
         copy.at[0], step, size);
}

/// Refuses a tile that the copy engine does not store, or of which it would write more than the array has.
static SIMT_COLD void check_stored_tile(const BulkCopy& copy) {
  const TensorMap& map = copy.map;
  bool inside = true;
  for (int i = 0; i < map.rank; ++i) {
    if (copy.at[i] < 0)
      fail(copy.site,
           "a bulk store of a tile whose coordinate %d, 0 being the innermost, is %d: expected 0 or more, "
           "since only loads may begin before the array; hardware ends in an illegal instruction",
           i, copy.at[i]);
    inside = inside && uint32_t(copy.at[i]) < map.size[i];
  }
  uint64_t row = uint64_t(map.size[0]) * map.itemsize, part = row % 16;
  if (inside && part && uint32_t(copy.at[0]) + map.box[0] > map.size[0])
    fail(copy.site,
         "a bulk store of a tile would overwrite %d bytes past the array's last column, since hardware "
         "writes whole 16 bytes: expected rows of a multiple of 16 bytes where a tile crosses their end, got "
         "%llu bytes (%u elements)",
         int(16 - part), static_cast<unsigned long long>(row), map.size[0]);
}

BulkCopy describe_tile(const TensorMap& map, const int* at, int rank, const void* shared,
                                 Site site) {
  if (!map.rank) fail(site, "a bulk copy of a tile of an empty array");
  if (map.rank != rank)
    fail(site, "a bulk copy by %d coordinates, but its tensor map has %d dimensions", rank, int(map.rank));
  BulkCopy copy{.map = map,
                .shared = uint32_t(shared_offset(shared)),
                .bytes = tile_bytes(map),
                .thread = clock_number(),
                .site = site};
  for (int i = 0; i < rank; ++i) copy.at[i] = at[i];
  check_start(copy);
  return copy;
}

static SIMT_COLD BulkCopy describe_bytes(const void* global, const void* shared, int bytes, Site site) {
  if (bytes < 16 || bytes % 16 || reinterpret_cast<uint64_t>(global) % 16)
    fail(site, "a bulk copy of %d bytes, %d past a multiple of 16 in global memory: expected multiples of 16",
         bytes, int(reinterpret_cast<uint64_t>(global) % 16));
  return {.global = reinterpret_cast<uint64_t>(global),
          .shared = uint32_t(shared_offset(shared)),
          .bytes = uint32_t(bytes),
          .thread = clock_number(),
          .site = site};
}

void start_load(BulkCopy copy, const void* s_to, const void* s_bar, uint32_t ranks) {
  Site site = copy.site;
  translate_shared(s_to, copy.bytes, copy.map.rank ? 128 : 16, Touch::bulk_write, site);
  uint64_t sectors = 0;
  uint32_t requested = check_global(copy, Touch::read, sectors);
  machine.counters.bytes_loaded += requested;
  machine.counters.bytes_async += requested;
  if (traced()) trace_bulk(site, Access::bulk_load, requested, sectors, copy.shared, copy.bytes);
  for (; ranks; ranks &= ranks - 1) {
    Block& block = block_of_rank(uint32_t(__builtin_ctz(ranks)), site);
    Mbarrier& bar = find_mbarrier(block, s_bar, site);
    if (!bar.fenced)
      fail(site,
           "a bulk copy that completes %s, of which the async proxy does not know: "
           "missing: fence_mbarrier_init() after its initialisation",
           MbarrierName(bar).text);
    copy.mbarrier = &bar, copy.phase = bar.phase;
    bar.copied = bar.phase + 1, bar.copy = site;
    if (block.shadow) {
      touch_chunk(block, bar.offset / 16, uint16_t(0xff << bar.offset % 16), Touch::atomic, site);
      touch_counted(block, copy.shared, copy.bytes, Touch::bulk_write, site, bar.counter, bar.phase + 1);
    }
    if (!machine.launch.copies_late) {
      load_now(block, copy);
      complete_load(block, copy);
      continue;
    }
    memset(block.shared + copy.shared, 0xff, copy.bytes);
    Async& async = *block.async;
    grow(async.loads, async.load_count, async.load_capacity, 16);
    async.loads[async.load_count++] = copy;
  }
}

void start_store(BulkCopy copy, const void* s_from) {
  Site site = copy.site;
  check_stored_tile(copy);
  translate_shared(s_from, copy.bytes, copy.map.rank ? 128 : 16, Touch::bulk_read, site);
  uint64_t sectors = 0;
  uint32_t requested = check_global(copy, Touch::write, sectors);
  machine.counters.bytes_stored += requested;
  if (traced()) trace_bulk(site, Access::bulk_store, requested, sectors, copy.shared, copy.bytes);
  if (machine.block->shadow) touch_shared(copy.shared, copy.bytes, Touch::bulk_read, site);
  if (!machine.launch.copies_late) store_now(copy);
  Async& async = make_async(*machine.block);
  copy.group = async.groups[thread_number()] + 1;
  grow(async.stores, async.store_count, async.store_capacity, 16);
  async.stores[async.store_count++] = copy;
}

void bulk_load(void* s_to, const void* g_from, int bytes, void* s_bar, Site site) {
  start_load(describe_bytes(g_from, s_to, bytes, site), s_to, s_bar, 1u << machine.block->rank);
}

void bulk_store(void* g_to, const void* s_from, int bytes, Site site) {
  start_store(describe_bytes(g_to, s_from, bytes, site), s_from);
}

void bulk_commit(Site site) {
  if (machine.watched) [[unlikely]]
    watch_call(Access::bulk_commit, site);
  ++make_async(*machine.block).groups[thread_number()];
}

void bulk_wait(int allow, Site site) {
  if (machine.watched) [[unlikely]]
    watch_call(Access::bulk_wait, site);
  Async& async = make_async(*machine.block);
  int64_t over = int64_t(async.groups[thread_number()]) - allow;
  int kept = 0;
  for (int i = 0; i < async.store_count; ++i) {
    BulkCopy copy = async.stores[i];
    if (copy.thread != clock_number() || copy.group > over) {
      async.stores[kept++] = copy;
      continue;
    }
    if (machine.launch.copies_late) store_now(copy);
    if (machine.block->shadow) land_touch(copy.shared, copy.bytes, Touch::bulk_read);
  }
  async.store_count = kept;
}

}  // namespace simt
