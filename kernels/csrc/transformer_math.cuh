// What the transformer's kernels share: element types, sizes fixed when a model's kernels are compiled, warp sums.
//
// Rules of this file: as in block_math.cuh, the same bits under NVRTC and on the host: no contraction but the fused
// multiply-adds that are written out, no approximate function. Sums over a row have one fixed shape.
#pragma once

#include "block_math.cuh"

#if !defined(HEAD_DIM) || !defined(GROUP) || !defined(GROUP_ROWS) || !defined(BF16)
#error "compile with -DHEAD_DIM= -DGROUP= (query heads a KV head) -DGROUP_ROWS= (rows an item may have) -DBF16=0 or 1"
#endif

constexpr int THREADS = 128;  // of every block here
constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
constexpr u32 FULL_WARP = 0xffffffffu;
constexpr int BLOCK_TOKENS = 16;  // step.py
constexpr int HALF = HEAD_DIM / 2;

#if defined(__CUDACC__)
#define UNROLLED _Pragma("unroll")  // so that arrays of a thread stay in registers
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
#include <cmath>
#define UNROLLED
static DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif

#if BF16
typedef unsigned short Element;  // what products take and give, and what the KV cache holds
DEVICE float widen(Element e) { return bits_float((u32)e << 16); }
// To the nearest bfloat16, ties to even; NaN stays NaN.
DEVICE Element narrow(float f) {
  const u32 u = float_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (Element)((u >> 16) | 0x40u);
  return (Element)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
#else
typedef float Element;
DEVICE float widen(Element e) { return e; }
DEVICE Element narrow(float f) { return f; }
#endif

// Every lane gets the sum of all; the tree's pairs are l, l ^ 16; l, l ^ 8; ...
DEVICE float warp_sum(float mine) {
  for (int d = WARP / 2; d; d >>= 1) mine = mine + __shfl_xor_sync(FULL_WARP, mine, d);
  return mine;
}

DEVICE float warp_max(float mine) {
  for (int d = WARP / 2; d; d >>= 1) {
    const float other = __shfl_xor_sync(FULL_WARP, mine, d);
    mine = other > mine ? other : mine;
  }
  return mine;
}

// exp(x) for x <= 0; NaN stays NaN, which exp_negative would drop.
DEVICE float weight_of(float x) { return x <= 0.0f ? exp_negative(x) : x; }
