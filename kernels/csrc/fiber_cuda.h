// The CUDA words that the kernels use, on fibers. Include before any .cuh file.
#pragma once

#include "fiber.h"

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

#define __syncthreads() ((void)fiber::barrier(__LINE__))
#define __syncthreads_or(p) fiber::barrier(__LINE__, (p) != 0)
#define __ballot_sync(mask, p) ((unsigned)fiber::exchange(__LINE__, (p) ? 1 : 0, -1))
#define __syncwarp() fiber::warp_barrier(__LINE__)
#define __shfl_xor_sync(mask, value, d) fiber::shuffle(__LINE__, value, (fiber::lane() ^ (int)(d)) - fiber::lane())
#define __shfl_up_sync(mask, value, d) fiber::shuffle(__LINE__, value, -(int)(d))
#define __shfl_down_sync(mask, value, d) fiber::shuffle(__LINE__, value, (int)(d))

namespace fiber {

inline int lane() { return machine->current % WARP_LANES; }

// The value of the lane `offset` further on; a lane beyond the warp's ends gives its own.
template <class T>
inline T shuffle(int line, T value, int offset) {
  static_assert(sizeof(T) <= 8);
  const int source = lane() + offset;
  uint64_t sent = 0;
  memcpy(&sent, &value, sizeof value);
  sent = exchange(line, sent, source < 0 || source >= WARP_LANES ? lane() : source);
  memcpy(&value, &sent, sizeof value);
  return value;
}

struct Coordinate {
  unsigned (*read)();
  operator unsigned() const { return read(); }
};
struct Coordinates {
  Coordinate x;
};

}  // namespace fiber

static const fiber::Coordinates threadIdx{{[] { return (unsigned)fiber::machine->current; }}};
static const fiber::Coordinates blockIdx{{[] { return fiber::machine->block; }}};
static const fiber::Coordinates gridDim{{[] { return fiber::machine->grid; }}};

inline int __popc(unsigned x) { return __builtin_popcount(x); }

template <class T>
inline T atomicAdd(T* p, T v) {
  const T old = *p;
  *p = old + v;
  return old;
}
