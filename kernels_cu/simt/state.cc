#include "state.h"

#include <stdarg.h>
#include <stdio.h>

namespace simt {

const char* call_name(Access call) {
  return call == Access::ldmatrix   ? "ldmatrix"
         : call == Access::stmatrix ? "stmatrix"
         : call == Access::mma      ? "mma.sync"
         : call == Access::shuffle  ? "a shuffle"
         : call == Access::vote     ? "a ballot"
                                    : "__syncwarp";
}

void say(const char* format, ...) {
  char* text = machine.report->message;
  size_t used = strlen(text);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + used, sizeof machine.report->message - used, format, arguments);
  va_end(arguments);
}

void give_up() {
  machine.failed = true;
  simt_fiber_switch(&current->stack_pointer, machine.main_stack_pointer);
  abort();
}

uint3 thread_at(uint32_t i) {
  uint32_t x = machine.block_dim.x, y = machine.block_dim.y;
  return {i % x, i / x % y, i / (x * y)};
}

/// "; thread (x,y,z) of block (x,y,z) at file:line", the end of most messages.
static SIMT_COLD void say_where(Site site) {
  const uint3 &t = current->thread_idx, &b = machine.block->index;
  say("; thread (%u,%u,%u) of block (%u,%u,%u) at %s:%d", t.x, t.y, t.z, b.x, b.y, b.z, site.name(),
      site.line);
}

void fail(Site site, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  say("%s: %s", machine.launch.kernel, text);
  say_where(site);
  give_up();
}

void trap(const char* message, Site site) { fail(site, "%s", message); }

}  // namespace simt
