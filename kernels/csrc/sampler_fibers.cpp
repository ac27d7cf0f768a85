// The CUDA kernel of sampler.cu on host fibers, for tests.
#include "fiber_cuda.h"

#include "sampler.cu"

// As offbook_sample of sampler.cpp, with `grid` blocks under the given schedule; barriers of skip_line are left out and
// those of diverge_line are left out by some threads (0 = none). Returns "" or the harness's complaint.
extern "C" __attribute__((visibility("default"))) const char* offbook_sample_on_fibers(const StepArgs* args,
                                                                                       float* buffers, int grid,
                                                                                       int schedule, int skip_line,
                                                                                       int diverge_line) {
  return fiber::launch((unsigned)grid, LANES, schedule, fiber::Fault{skip_line, diverge_line},
                       [=] { offbook_sample(args, buffers); });
}

// Primitives one directly after another, which the row programs never do: what each thread was told, 5 numbers a thread.
static void probe(const float* x, int n, u64* told) {
  __shared__ Scratch scratch;
  Block b{&scratch, (int)threadIdx.x};
  int* word = &scratch.word[1];
  b.once([=] { *word = 0; });
  b.lane_maxima(n, [=](int i) { return x[i]; });
  u64* mine = told + 5 * b.t;
  mine[0] = float_bits(b.kth_lane(3));
  mine[1] = float_bits(b.kth_lane(LANES - 1));
  u64 before;
  mine[2] = (u64)b.crossing(n, [](int i) { return (u64)i; }, 40, &before) << 32 | before;
  mine[3] = (u64)b.crossing(n, [](int) { return (u64)2; }, 2 * (u64)n, &before) << 32 | before;
  b.once([=] { *word = n; });
  mine[4] = (u64)*word;
}

extern "C" __attribute__((visibility("default"))) const char* offbook_probe_on_fibers(const float* x, int n, u64* told,
                                                                                      int schedule, int skip_line) {
  return fiber::launch(1, LANES, schedule, fiber::Fault{skip_line, 0}, [=] { probe(x, n, told); });
}
