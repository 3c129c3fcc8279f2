// paging: where a logical row of a sequence lies in a paged cache.
//
// A cache is (num_pages, page_size, HKV, D), any strides; `block_table` row b lists the pages of sequence b.
// Entries behind a sequence's last page may hold anything: they are never read.
#pragma once
#include "prim/gmem.cuh"

/// Page of sequence row `key`.
template <int PAGE> DEVICE int page_of(const int* g_table_row, int key SITE) {
  return load_global(g_table_row + key / PAGE AT_SITE);
}

/// First element of row `key`, which lies in page `page`.
template <int PAGE, class T> DEVICE T* row_in_page(const View<T, 4>& cache, int page, int key, int hkv) {
  return cache.at(page, key % PAGE, hkv);
}
