// The sampler as a host library: the row programs on the lockstep primitives, rows over a thread pool.
#include "block_lockstep.h"

#include <memory>

#include "sampler_run.cuh"

namespace {

// Working memory of one thread; grows to the largest vocabulary it has met.
struct Workplace {
  Scratch scratch;
  std::unique_ptr<float[]> rows;
  int vocabulary = 0;

  RowBuffers buffers(int n) {
    if (n > vocabulary) {
      rows.reset(new float[3 * (size_t)n]);
      vocabulary = n;
    }
    return RowBuffers{rows.get(), rows.get() + vocabulary, rows.get() + 2 * (size_t)vocabulary};
  }
};

void work_on_range(void* context, int begin, int end) {
  static thread_local std::unique_ptr<Workplace> place;
  if (!place) place = std::make_unique<Workplace>();
  const StepArgs& a = *(const StepArgs*)context;
  RowBuffers buffers = place->buffers(a.vocabulary);
  Block block{&place->scratch};
  for (int k = begin; k < end; k++) work_on_row(block, a, buffers, a.row_begin + k);
}

}  // namespace

extern "C" {

using ParallelFor = void (*)(int n, void (*body)(void* context, int begin, int end), void* context);

// Rows row_begin..row_end of the step; parallel_for may be null (serial). Cannot fail: errors are bits in the result.
__attribute__((visibility("default"))) void offbook_sample(const StepArgs* args, ParallelFor parallel_for) {
  const int n = args->row_end - args->row_begin;
  if (parallel_for && n > 1)
    parallel_for(n, work_on_range, (void*)args);
  else
    work_on_range((void*)args, 0, n);
}

// Known-answer access for tests: exp_negative, log_positive, mass, philox_u64.
__attribute__((visibility("default"))) void offbook_math(const float* x, int n, float* exponential, float* logarithm,
                                                         u64* masses) {
  for (int i = 0; i < n; i++) {
    exponential[i] = exp_negative(x[i]);
    logarithm[i] = log_positive(-x[i]);
    masses[i] = mass(exponential[i]);
  }
}

__attribute__((visibility("default"))) u64 offbook_philox(u64 key, u32 c0, u32 c1, u32 c2, u32 c3) {
  return philox_u64(key, c0, c1, c2, c3);
}
}
