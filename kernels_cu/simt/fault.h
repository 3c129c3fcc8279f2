// fault: turns a memory fault in a kernel into a sentence. The process ends with it; the memory behind device
// addresses belongs to the parent and survives.
//
// Everything the handler does is async-signal-safe: it formats by hand, writes and exits, on a stack of its
// own.
#pragma once
#include <signal.h>

#include "memory.h"

// NOTE: declared here, because <unistd.h> would take names like `read` away from kernels.
extern "C" ssize_t write(int, const void*, size_t);

namespace simt {

struct FaultText {
  char bytes[1024] = {};
  size_t size = 5;  // room for the frame: a byte that says "fault", then the length

  FaultText& operator<<(const char* text) {
    while (*text && size < sizeof bytes) bytes[size++] = *text++;
    return *this;
  }
  FaultText& up_to(const char* end, const char* text) {
    for (size_t n = strlen(end); *text && strncmp(text, end, n) && size < sizeof bytes; ++text)
      bytes[size++] = *text;
    return *this;
  }
  FaultText& number(uint64_t value, unsigned base = 10) {
    char digits[24];
    int n = 0;
    do digits[n++] = "0123456789abcdef"[value % base];
    while (value /= base);
    if (base == 16) *this << "0x";
    while (n && size < sizeof bytes) bytes[size++] = digits[--n];
    return *this;
  }
  FaultText& signed_number(int64_t value) {
    if (value < 0) *this << "-";
    return number(value < 0 ? uint64_t(-value) : uint64_t(value));
  }
  FaultText& coordinates(const uint3& p) {
    *this << "(";
    number(p.x) << ",";
    number(p.y) << ",";
    return number(p.z) << ")";
  }
  /// As the frame cpu_child.py's parent reads, or as plain text on stderr.
  void send(int fd) {
    uint32_t length = uint32_t(size - 5);
    bytes[0] = 2;
    memcpy(bytes + 1, &length, 4);
    const char* from = fd < 0 ? bytes + 5 : bytes;
    size_t left = fd < 0 ? length : size;
    while (left) {
      ssize_t n = write(fd < 0 ? 2 : fd, from, left);
      if (n <= 0) break;
      from += n, left -= size_t(n);
    }
  }
};

inline void describe_fault(FaultText& text, int signal, uintptr_t address) {
  const Launch& launch = machine.launch;
  uintptr_t in_shared = address - reinterpret_cast<uintptr_t>(machine.shared_window);
  if (signal == SIGFPE) {
    text << "integer division by zero";
  } else if (signal == SIGILL || signal == SIGTRAP) {
    text << "an illegal instruction (an unreachable statement reached, or code built for another CPU)";
  } else if (address - launch.window < launch.window_bytes) {
    text << "raw dereference of device memory";
    if (const Extent* e = nearest_extent(address)) {
      text << ", byte ";
      text.signed_number(int64_t(address - e->first)) << " of " << e->name << ", which has ";
      text.number(e->end - e->first);
    }
    text << "; use the functions of prim/gmem.cuh";
  } else if (launch.resources->stacks.guard_of(address) >= 0) {
    text << "stack overflow: the thread's local arrays and calls need more than ";
    text.number(StackPool::STACK_BYTES) << " bytes";
  } else if (in_shared < SHARED_WINDOW_BYTES) {
    text << "raw dereference of shared memory, byte ";
    text.number(in_shared) << " of ";
    text.number(launch.smem_bytes) << "; use the functions of prim/smem.cuh";
  } else if (signal == SIGBUS) {
    text << "the system has no memory left for the machine's arrays (SIGBUS at ";
    text.number(address, 16) << ")";
  } else if (address < 65536) {
    text << "dereference of a null pointer (address ";
    text.number(address, 16) << ")";
  } else {
    text << "dereference of a wild pointer (address ";
    text.number(address, 16) << ")";
  }
}

inline void say_who(FaultText& text) {
  if (!current) return;
  text << "; thread ";
  text.coordinates(current->thread_idx) << " of block ";
  text.coordinates(machine.block->index);
}

inline void on_fault(int signal, siginfo_t* info, void*) {
  static constinit FaultText text{};
  text << machine.launch.kernel << ": ";
  describe_fault(text, signal, reinterpret_cast<uintptr_t>(info->si_addr));
  say_who(text);
  text.send(machine.launch.fault_fd);
  _Exit(128 + signal);
}

#if defined(__SANITIZE_ADDRESS__)
/// AddressSanitizer's report as a sentence: what it found, of which access, where. It ends the process then.
inline void on_sanitizer_report(const char* report) {
  static constinit FaultText text{};
  text << machine.launch.kernel << ": ";
  if (const char* what = strstr(report, "AddressSanitizer: ")) {
    text.up_to(" on ", what);
    if (const char* access = strchr(what, '\n')) {
      (text << ", ").up_to(" at ", access + 1);
      const char* frame = strstr(access, " in ");
      while (frame && !strncmp(frame, " in __", 6)) frame = strstr(frame + 1, " in ");  // memcpy and its like
      if (frame) text.up_to("\n", frame);
    }
  }
  say_who(text);
  text.send(machine.launch.fault_fd);
}
#endif

/// Handles faults while it lives.
struct FaultHandler {
  static constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
  static constexpr int COUNT = sizeof SIGNALS / sizeof *SIGNALS;
  struct sigaction before[COUNT];
  stack_t stack_before;

  FaultHandler() {
    static char stack[65536];
    stack_t own{};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, &stack_before);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &action, before + i);
    SIMT_SANITIZED(__asan_set_error_report_callback(on_sanitizer_report);)
  }
  ~FaultHandler() {
    for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], before + i, nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

}  // namespace simt
