// fiber: a stack and a way to leave it. One CUDA thread is one fiber; a switch saves the callee-saved
// registers only.
//
// NOTE: fibers of a launch never move to another OS thread: compilers cache addresses of thread-local data
// across calls.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

extern "C" void simt_fiber_boot();

#if defined(__APPLE__)
#define SIMT_SYMBOL(name) "_" name
#else
#define SIMT_SYMBOL(name) name
#endif

#if defined(__SANITIZE_ADDRESS__)
#include "sanitize.h"  // its simt_fiber_switch calls simt_fiber_jump
#define SIMT_SWITCH "simt_fiber_jump"
#define SIMT_SANITIZED(...) __VA_ARGS__
#else
extern "C" void simt_fiber_switch(void** save_stack_pointer, void* to_stack_pointer);
#define SIMT_SWITCH "simt_fiber_switch"
#define SIMT_SANITIZED(...)
#endif

// Weak, so that two units may be linked into one shared object.
#if defined(__APPLE__)
#define SIMT_FUNCTION(name) ".globl _" name "\n.weak_definition _" name "\n.p2align 4\n_" name ":\n"
#else
#define SIMT_FUNCTION(name) ".weak " name "\n.hidden " name "\n.p2align 4\n" name ":\n"
#endif

#if defined(__x86_64__)
asm(".text\n"
    SIMT_FUNCTION(SIMT_SWITCH)
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n"
    "movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
    // NOTE: a jump, not a return: a lane resumes from the call before the one that the lane before it waits
    // in, so a return would always be predicted wrong. For the same reason all that waits is inlined.
    "popq %rcx\n"
    "jmp *%rcx\n"
    SIMT_FUNCTION("simt_fiber_boot")
    SIMT_SANITIZED("call " SIMT_SYMBOL("simt_fiber_arrived") "\n")
    "movq %r12, %rdi\n"
    "call *%r13\n"
    "ud2\n");

namespace simt {
/// The stack pointer of a fiber that will call fn(argument) when first switched to. fn must not return.
inline void* fiber_start(char* stack_top, void (*fn)(void*), void* argument) {
  void** sp = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack_top) & ~uintptr_t(63));
  *--sp = nullptr, *--sp = nullptr;  // the ABI wants the stack 16-byte aligned at the call in simt_fiber_boot
  *--sp = reinterpret_cast<void*>(simt_fiber_boot);
  *--sp = nullptr, *--sp = nullptr;     // rbp, rbx
  *--sp = argument;                     // r12
  *--sp = reinterpret_cast<void*>(fn);  // r13
  *--sp = nullptr, *--sp = nullptr;     // r14, r15
  return sp;
}
}  // namespace simt

#elif defined(__aarch64__)
asm(".text\n"
    SIMT_FUNCTION(SIMT_SWITCH)
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
    "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n"
    "ret\n"
    SIMT_FUNCTION("simt_fiber_boot")
    SIMT_SANITIZED("bl " SIMT_SYMBOL("simt_fiber_arrived") "\n")
    "mov x0, x19\n"
    "blr x20\n"
    "brk #1\n");

namespace simt {
inline void* fiber_start(char* stack_top, void (*fn)(void*), void* argument) {
  uint64_t* sp = reinterpret_cast<uint64_t*>((reinterpret_cast<uintptr_t>(stack_top) & ~uintptr_t(63)) - 160);
  memset(sp, 0, 160);
  sp[0] = reinterpret_cast<uint64_t>(argument);          // x19
  sp[1] = reinterpret_cast<uint64_t>(fn);                // x20
  sp[11] = reinterpret_cast<uint64_t>(simt_fiber_boot);  // x30
  return sp;
}
}  // namespace simt
#else
#error "the SIMT machine runs on x86-64 and aarch64"
#endif

namespace simt {

/// Stacks for the threads of a block, each with a guard below it. Grows, never shrinks.
struct StackPool {
  static constexpr size_t STACK_BYTES = 256 * 1024 SIMT_SANITIZED(*4);  // red zones take room
  // Farther below the stack pointer than this no call goes without a probe (-fstack-clash-protection), so a
  // guard as large cannot be stepped over.
#if defined(__aarch64__)
  static constexpr size_t PROBED_BYTES = 65536;
#else
  static constexpr size_t PROBED_BYTES = 4096;
#endif
  char* base;
  size_t guard_bytes;
  int count;

  size_t stride() const { return STACK_BYTES + guard_bytes; }

  bool reserve(int threads, size_t page) {
    if (threads > count && !grow(threads, page)) return false;
    SIMT_SANITIZED(sanitized_stacks.set_fibers(base, count, STACK_BYTES, guard_bytes);)
    SIMT_SANITIZED(__asan_unpoison_memory_region(base, threads * stride());)  // abandoned with a launch
    return true;
  }
  bool grow(int threads, size_t page) {
    SIMT_SANITIZED(__asan_unpoison_memory_region(base, count * stride());)
    if (base) munmap(base, count * stride());
    guard_bytes = page > PROBED_BYTES ? page : PROBED_BYTES, count = 0;
    void* p = mmap(nullptr, threads * stride(), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base = p == MAP_FAILED ? nullptr : static_cast<char*>(p);
    if (!base) return false;
    for (int i = 0; i < threads; ++i)
      if (mprotect(base + i * stride(), guard_bytes, PROT_NONE) != 0) return false;
    count = threads;
    return true;
  }
  // NOTE: tops are staggered, since page-aligned stacks would all meet in the same sets of the L1 cache; by
  // no more than half a page, so that what a thread uses most stays in one page.
  char* top(int i) const { return base + (i + 1) * stride() - size_t(i % 32) * 64; }

  /// Index of the stack whose guard holds this address, or -1.
  int guard_of(uintptr_t address) const {
    uintptr_t offset = address - reinterpret_cast<uintptr_t>(base);
    if (!base || offset >= count * stride()) return -1;
    return offset % stride() < guard_bytes ? int(offset / stride()) : -1;
  }
};

}  // namespace simt
