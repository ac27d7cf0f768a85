// Sixteen float lanes (F16x), sixteen 32-bit integer lanes (I16x): the only vector words that the kernels speak.
//
// Rules of this file and its back ends: every operation gives the same bits on every back end (IEEE, round to nearest
// even, denormals flushed by FlushDenormals); a back end holds nothing but one-line wrappers; what can be composed is
// composed here, once.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define OFFBOOK_INLINE inline __attribute__((always_inline))
#define OFFBOOK_LAMBDA __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "vec_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vec_avx2.h"
#else
#include "vec_scalar.h"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace offbook {

// Calls f(integral_constant<int, 0>) ... f(integral_constant<int, N - 1>), unrolled.
template <class F, int... I>
OFFBOOK_INLINE void unroll_list(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
OFFBOOK_INLINE void unroll(F&& f) {
  unroll_list(f, std::make_integer_sequence<int, N>{});
}

// Denormals are zero in this thread while the object lives: what the bf16 dot instruction does anyway, so all do it.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (1ull << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

OFFBOOK_INLINE void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

OFFBOOK_INLINE void prefetch_bytes(const void* begin, int bytes) {
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(begin) + at, 0, 3);
}
OFFBOOK_INLINE void prefetch_bytes_l2(const void* begin, int bytes) {
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(begin) + at, 0, 2);
}

// Two neighbouring 16-bit numbers in every lane.
template <class T>
OFFBOOK_INLINE I16x broadcast_two(const T* two) {
  static_assert(sizeof(T) == 2);
  int32_t both;
  std::memcpy(&both, two, 4);
  return set1i(both);
}

// The upper 16 bits of each lane.
OFFBOOK_INLINE void store_high_halves(uint16_t* p, F16x x) {
  store_words(reinterpret_cast<int16_t*>(p), shift_right<16>(bits(x)));
}

// Activations below this are zero, so that what becomes of the others stays far from denormals.
constexpr float kTiny = 0x1p-100f;

OFFBOOK_INLINE F16x flush_tiny(F16x x) { return select(less(absolute(x), set1(kTiny)), zero(), x); }

// The nearest bf16 (ties to even) as a float; NaN stays NaN.
OFFBOOK_INLINE F16x round_bf16(F16x x) {
  const I16x u = bits(x);
  const I16x up = add(add(u, set1i(0x7fff)), bit_and(shift_right<16>(u), set1i(1)));
  return select(unordered(x), x, from_bits(bit_and(up, set1i(static_cast<int32_t>(0xffff0000u)))));
}

// 2^x for any x: relative error about 2e-7 (degree 6 on [-1/2, 1/2]); 0 below -125, 2^127 above 127, NaN stays NaN.
OFFBOOK_INLINE F16x exp2_lanes(F16x x) {
  const F16x magic = set1(12582912.0f);  // adding it leaves the nearest integer in the low bits
  const F16x clamped = minimum(set1(127.0f), maximum(set1(-125.0f), x));
  const F16x shifted = add(clamped, magic);
  const F16x f = sub(clamped, sub(shifted, magic));
  F16x p = set1(1.5353362e-4f);
  p = fma(p, f, set1(1.3398874e-3f));
  p = fma(p, f, set1(9.6184373e-3f));
  p = fma(p, f, set1(5.5503324e-2f));
  p = fma(p, f, set1(2.4022648e-1f));
  p = fma(p, f, set1(6.9314720e-1f));
  p = fma(p, f, set1(1.0f));
  const F16x scaled = from_bits(add(bits(p), shift_left<23>(bits(shifted))));
  return select(less(x, set1(-125.0f)), zero(), scaled);
}

constexpr float kLog2E = 1.44269504f;

// x / (1 + e^-x)
OFFBOOK_INLINE F16x silu(F16x x) { return div(x, add(set1(1.0f), exp2_lanes(mul(x, set1(-kLog2E))))); }

// A row of activations holds floats; how exact they are is the configuration's choice (Bf16: rounded to bf16).
template <bool kRound>
OFFBOOK_INLINE F16x activation(F16x x) {
  return flush_tiny(kRound ? round_bf16(x) : x);
}

OFFBOOK_INLINE void store_activation(float* to, F16x x) { store(to, x); }
OFFBOOK_INLINE void store_activation(uint16_t* to, F16x x) { store_high_halves(to, x); }

}  // namespace offbook
