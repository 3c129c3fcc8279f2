// paged_launches: decode as a host loop over requests or pages, each a launch of paged.cu that sees one
// sequence, or one page of one. Nothing else differs from one launch for the batch.
//
//   by request   B launches, each attends to a sequence
//   by page      page_lengths, below; B · max_pages launches, each attends to a page and leaves O and LSE of it;
//                one launch of combine.cu merges them
//
// A host that launches by page knows the width of the table and not the lengths, which grow on the device.
// This file holds what that takes: how many of a page's slots are its sequence's keys, so that a launch for a
// page behind the end finds none.
//
//   page_lengths[b, p] = min(max(lengths[b] − p · PAGE_SIZE, 0), PAGE_SIZE)
//
// grid    one thread a slot of the block table
// bytes   for each slot its sequence's length read, and its own written
#include "prim/gmem.cuh"

constexpr int THREADS = 256;

KERNEL(THREADS, 1)
page_lengths(const int* g_lengths, int* g_page_lengths, int SLOTS, int MAX_PAGES, int PAGE_SIZE) {
  const int slot = blockIdx.x * THREADS + threadIdx.x;
  if (slot >= SLOTS) return;
  const int64_t left = load_global(g_lengths + slot / MAX_PAGES) - int64_t(slot % MAX_PAGES) * PAGE_SIZE;
  store_global(g_page_lengths + slot, left < 0 ? 0 : left < PAGE_SIZE ? int(left) : PAGE_SIZE);
}
