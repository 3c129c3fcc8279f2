// The CPU machine's child process in C++, for a system that has no Python: cuattn/cpu_child.py says what it
// reads and answers. Kernels come as shared objects, arrays lie in the parent's file.
#include <dlfcn.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "simt/state.h"

namespace {

/// As much of JSON as requests hold: objects, lists, numbers without fractions, strings without escapes.
struct Value {
  std::string text;  // of a string or a number
  std::vector<Value> items;
  std::vector<std::pair<std::string, Value>> fields;

  uint64_t number() const {
    return strtoull(text.c_str(), nullptr, 10);
  }
  /// The field of that name; empty where the request has none.
  const Value& operator[](const char* name) const {
    static const Value none{"0", {}, {}};
    for (const auto& field : fields)
      if (field.first == name) return field.second;
    return none;
  }
};

struct Parser {
  const char* at;

  char next() {
    while (*at == ' ' || *at == ',' || *at == ':') ++at;
    return *at;
  }
  std::string string() {
    const char* first = ++at;
    while (*at && *at != '"') ++at;
    return std::string(first, at++);
  }
  Value value() {
    Value v;
    char kind = next();
    if (kind == '"') {
      v.text = string();
    } else if (kind == '[') {
      for (++at; next() != ']';) v.items.push_back(value());
      ++at;
    } else if (kind == '{') {
      for (++at; next() != '}';) {
        std::string name = string();
        v.fields.emplace_back(name, value());
      }
      ++at;
    } else {
      while (*at && !strchr(",]} ", *at)) v.text += *at++;
    }
    return v;
  }
};

bool read_exactly(void* to, size_t size) {
  for (char* p = static_cast<char*>(to); size;) {
    ssize_t n = read(0, p, size);
    if (n <= 0) return false;
    p += n, size -= size_t(n);
  }
  return true;
}

int reply_fd;

void send(char kind, const void* payload, size_t size) {
  uint32_t length = uint32_t(size);
  std::string data(1, kind);
  data.append(reinterpret_cast<char*>(&length), 4).append(static_cast<const char*>(payload), size);
  for (size_t done = 0; done < data.size();) {
    ssize_t n = write(reply_fd, data.data() + done, data.size() - done);
    if (n <= 0) _exit(1);
    done += size_t(n);
  }
}
void send_error(const std::string& text, char kind = 1) { send(kind, text.data(), text.size()); }

struct Memory {
  uint64_t window, bytes;
  char* base;
};

int order_of(const std::string& name) { return name == "reverse" ? 1 : name == "shuffle" ? 2 : 0; }

/// A launch as the request describes it. Fields that requests do not name stay zero.
simt::Launch describe(const Value& request, const Memory& memory) {
  static simt::Resources resources{};
  simt::Launch launch{};
  launch.kernel = request["entry"].text.c_str();
  for (int i = 0; i < 3; ++i) {
    launch.grid[i] = uint32_t(request["grid"].items[i].number());
    launch.block[i] = uint32_t(request["block"].items[i].number());
  }
  launch.smem_bytes = request["smem_bytes"].number();
  launch.order = order_of(request["order"].text);
  launch.seed = request["seed"].number();
  launch.copies_late = int32_t(request["copies_late"].number());
  launch.worker = int32_t(request["worker"].number());
  launch.workers = int32_t(request["workers"].number());
  launch.step_limit = request["step_limit"].number();
  launch.resident = int32_t(request["resident"].number());
  launch.races = int32_t(request["races"].number());
  launch.cluster = int32_t(request["cluster"].number());
  launch.fault_fd = reply_fd;
  launch.window = memory.window;
  launch.window_bytes = memory.bytes;
  launch.window_to_memory = reinterpret_cast<int64_t>(memory.base) - int64_t(memory.window);
  launch.resources = &resources;
  return launch;
}

void answer(const Value& request, const Memory& memory) {
  if (request["trace"].text != "null") return send_error("this child process does not trace");
  std::string entry = "simt_launch_" + request["entry"].text;
  void* library = dlopen(request["path"].text.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return send_error(dlerror());
  using Entry = int (*)(const simt::Launch*, void**, simt::Report*);
  auto run = reinterpret_cast<Entry>(dlsym(library, entry.c_str()));
  if (!run) return send_error(dlerror());

  struct alignas(64) Argument {
    char bytes[256];
  };
  const std::vector<Value>& given = request["args"].items;
  std::vector<Argument> arguments(given.size());
  std::vector<void*> pointers(given.size() + 1);
  std::vector<uint32_t> sizes(given.size() + 1);
  for (size_t i = 0; i < given.size(); ++i) {
    sizes[i] = uint32_t(given[i].text.size() / 2);
    if (sizes[i] > sizeof(Argument)) return send_error("an argument of more than 256 bytes");
    for (uint32_t j = 0; j < sizes[i]; ++j)
      arguments[i].bytes[j] = char(strtoul(given[i].text.substr(2 * j, 2).c_str(), nullptr, 16));
    pointers[i] = &arguments[i];
  }
  std::vector<simt::Extent> extents;
  for (const Value& e : request["extents"].items)
    extents.push_back({e.items[1].number(), e.items[2].number(), e.items[0].text.c_str()});

  simt::Launch launch = describe(request, memory);
  launch.extents = extents.data(), launch.extent_count = int32_t(extents.size());
  launch.argument_bytes = sizes.data(), launch.argument_count = int32_t(given.size());
  static simt::Report report;
  report = {};
  if (run(&launch, pointers.data(), &report)) return send_error(report.message, report.race ? 3 : 1);
  send(0, &report.counters, sizeof report.counters);
}

}  // namespace

/// driver FD SIZE WINDOW PARENT
int main(int count, char** words) {
  if (count < 5) return 2;
  signal(SIGINT, SIG_IGN);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  reply_fd = dup(1);
  dup2(2, 1);
  Memory memory{strtoull(words[3], nullptr, 10), strtoull(words[2], nullptr, 10), nullptr};
  void* base = mmap(nullptr, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(words[1]), 0);
  void* window = mmap(reinterpret_cast<void*>(memory.window), memory.bytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED || reinterpret_cast<uint64_t>(window) != memory.window)
    return send_error("cannot map the arena, or its address is taken"), 1;
  memory.base = static_cast<char*>(base);
  send(0, nullptr, 0);
  for (uint32_t size; read_exactly(&size, 4);) {
    std::string body(size, 0);
    if (!read_exactly(body.data(), size)) return 0;
    answer(Parser{body.c_str()}.value(), memory);
  }
}
