// sanitize: what AddressSanitizer must know about fibers. Included only where it compiles
// (CUATTN_CPU_SANITIZE=address).
#pragma once
#include <stddef.h>
#include <stdint.h>

extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom_before, size_t* size_before);
void __asan_unpoison_memory_region(const volatile void* from, size_t size);
void __asan_set_error_report_callback(void (*)(const char* report));

/// The switch itself, in fiber.h.
void simt_fiber_jump(void** save_stack_pointer, void* to_stack_pointer);
}

namespace simt {

/// Where the stacks are: the fibers', and the one of the OS thread that runs them.
struct SanitizedStacks {
  const char* fibers;
  size_t count, stack_bytes, guard_bytes;
  const void* main;
  size_t main_bytes;

  void set_fibers(const char* base, size_t number, size_t bytes, size_t guard) {
    fibers = base, count = number, stack_bytes = bytes, guard_bytes = guard;
  }
  /// Index of the fiber whose stack holds this address; `count` or more if it is none's.
  size_t fiber_of(const void* p) const {
    return size_t(static_cast<const char*>(p) - fibers) / (stack_bytes + guard_bytes);
  }
  const char* bottom(size_t fiber) const {
    return fibers + fiber * (stack_bytes + guard_bytes) + guard_bytes;
  }
};
__attribute__((visibility("hidden"))) constinit inline SanitizedStacks sanitized_stacks{};

/// To be called first on a stack that has been switched to. `fake_stack` is null on a fresh one.
__attribute__((no_sanitize("address"))) inline void arrive_on_stack(void* fake_stack) {
  const void* before;
  size_t size;
  __sanitizer_finish_switch_fiber(fake_stack, &before, &size);
  SanitizedStacks& stacks = sanitized_stacks;
  if (stacks.fiber_of(before) >= stacks.count) stacks.main = before, stacks.main_bytes = size;
}

}  // namespace simt

// NOTE: not instrumented, or a fiber that is never resumed would leave its red zones behind.
__attribute__((noinline, no_sanitize("address"))) inline void simt_fiber_switch(void** save, void* to) {
  const simt::SanitizedStacks& stacks = simt::sanitized_stacks;
  const void* bottom = stacks.main;
  size_t size = stacks.main_bytes;
  if (size_t fiber = stacks.fiber_of(to); fiber < stacks.count)
    bottom = stacks.bottom(fiber), size = stacks.stack_bytes;
  void* fake_stack;
  __sanitizer_start_switch_fiber(&fake_stack, bottom, size);
  simt_fiber_jump(save, to);
  simt::arrive_on_stack(fake_stack);
}

/// Called by simt_fiber_boot, before the fiber's function. The fiber before it on this stack never returned
/// from its last calls, whose red zones are there still.
extern "C" __attribute__((weak, used, visibility("hidden"), no_sanitize("address"))) inline void
simt_fiber_arrived() {
  constexpr size_t LAST_CALLS = 16384;
  __asan_unpoison_memory_region(static_cast<char*>(__builtin_frame_address(0)) - LAST_CALLS, LAST_CALLS);
  simt::arrive_on_stack(nullptr);
}
