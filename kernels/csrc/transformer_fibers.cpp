// The CUDA kernels of transformer.cu on host fibers, for tests.
#include "fiber_cuda.h"

#include <string_view>
#include <utility>

#include "transformer.cu"

template <class... A, size_t... I>
static std::function<void()> bound(void (*kernel)(A...), void** values, std::index_sequence<I...>) {
  return [=] { kernel(*(A*)values[I]...); };
}
template <class... A>
static std::function<void()> with_arguments(void (*kernel)(A...), void** values) {
  return bound(kernel, values, std::index_sequence_for<A...>{});
}

// Launches kernel `name` with the arguments at `values` (pointers to each) as `grid` blocks under the given schedule;
// barriers of skip_line are left out (0 = none). Returns "" or the harness's complaint.
extern "C" __attribute__((visibility("default"))) const char* offbook_launch_on_fibers(const char* name, void** values,
                                                                                       int grid, int schedule,
                                                                                       int skip_line) {
  const std::string_view wanted = name;
  std::function<void()> body;
  if (wanted == "offbook_embed") body = with_arguments(offbook_embed, values);
  if (wanted == "offbook_norm") body = with_arguments(offbook_norm, values);
  if (wanted == "offbook_rotate") body = with_arguments(offbook_rotate, values);
  if (wanted == "offbook_attend") body = with_arguments(offbook_attend, values);
  if (wanted == "offbook_fold") body = with_arguments(offbook_fold, values);
  if (wanted == "offbook_gate") body = with_arguments(offbook_gate, values);
  if (!body) return "no such kernel";
  return fiber::launch((unsigned)grid, THREADS, schedule, fiber::Fault{skip_line, 0}, body);
}
