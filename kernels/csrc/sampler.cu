// The sampler as a CUDA kernel: one block a row that has work, blocks striding over the rows of a step.
//
// Rules of this file: everything about the step is read from device memory (one StepArgs), so that a captured graph
// can be replayed with other contents. buffers holds 3 * vocabulary floats for each block of the grid.
#include "block_cuda.cuh"

#include "sampler_run.cuh"

extern "C" __global__ void __launch_bounds__(LANES) offbook_sample(const StepArgs* args, float* buffers) {
  __shared__ Scratch scratch;
  const StepArgs& a = *args;
  const long long n = a.vocabulary;
  float* own = buffers + (long long)blockIdx.x * 3 * n;
  Block block{&scratch, (int)threadIdx.x};
  for (int k = a.row_begin + (int)blockIdx.x; k < a.row_end; k += (int)gridDim.x)
    work_on_row(block, a, RowBuffers{own, own + n, own + 2 * n}, k);
}
