#include "async.h"

namespace simt {

void copy_now(const Copy& copy) {
  if (machine.block->held)
    read_held(copy.to, copy.from, copy.source_bytes);
  else if (copy.source_bytes)
    memcpy(copy.to, behind(copy.from), copy.source_bytes);
  memset(copy.to + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

void cp_async_commit(Site site) {
  if (machine.watched) [[unlikely]]
    watch_call(Access::copy_commit, site);
  CopyQueue& queue = current->copies;
  if (queue.groups == queue.group_capacity) [[unlikely]]
    grow(queue.group_ends, queue.groups, queue.group_capacity, 16);
  queue.group_ends[queue.groups++] = queue.count;
}

void cp_async_wait(int allow, Site site) {
  if (machine.watched) [[unlikely]]
    watch_call(Access::copy_wait, site);
  CopyQueue& queue = current->copies;
  int done = queue.groups - allow;
  if (done <= 0) return;
  int end = queue.group_ends[done - 1];
  for (int i = 0; i < end; ++i) {
    if (machine.launch.copies_late) copy_now(queue.items[i]);
    if (machine.launch.races)
      land_touch(queue.items[i].to - machine.shared, queue.items[i].bytes, Touch::copy);
  }
  queue.count -= end, queue.groups -= done;
  if (queue.count) memmove(queue.items, queue.items + end, queue.count * sizeof(Copy));
  for (int i = 0; i < queue.groups; ++i) queue.group_ends[i] = queue.group_ends[i + done] - end;
}

}  // namespace simt
