// launch: the entry of a generated shared object, from its arguments to its report.
#pragma once
#include "async.h"
#include "mma.h"
#include "tma.h"

namespace simt {

/// Whether as many arguments came as the kernel takes, each of its size. NOTE: a GPU would not notice.
bool arguments_fit(const Launch& launch, const uint32_t* wanted, int count, Report& report);

/// Runs this process's blocks; 0 when all went well.
int run_grid(const Launch& launch, Report& report);

template <class... Parameters> struct Call {
  void (*kernel)(Parameters...);
  void** arguments;

  struct Run {
    Run(void (*kernel)(Parameters...), plain<Parameters>&... values) { kernel(values...); }
  };
  static void run(void* self) {
    const Call& call = *static_cast<Call*>(self);
    int next = 0;  // NOTE: within braces arguments are evaluated in their order
    Run{call.kernel, *static_cast<plain<Parameters>*>(call.arguments[next++])...};
  }
};

template <class... Parameters>
int launch(void (*kernel)(Parameters...), const Launch* request, void** arguments, Report* report) {
  const uint32_t wanted[] = {uint32_t(sizeof(plain<Parameters>))..., 0};
  if (!arguments_fit(*request, wanted, int(sizeof...(Parameters)), *report)) return 1;
  Call<Parameters...> call{kernel, arguments};
  machine.entry = Call<Parameters...>::run;
  machine.entry_arguments = &call;
  return run_grid(*request, *report);
}

}  // namespace simt

/// Makes a kernel callable from outside: 0 when all went well, else the report holds a message.
#define SIMT_EXPORT(kernel)                                                   \
  extern "C" __attribute__((visibility("default"))) int simt_launch_##kernel( \
      const simt::Launch* request, void** arguments, simt::Report* report) {  \
    return simt::launch(kernel, request, arguments, report);                  \
  }
