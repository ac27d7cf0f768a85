// AVX-512 (F, BW, DQ, VL): sixteen lanes are one register; with AVX512_BF16 also the bf16 pair dot product.
#pragma once
#include <immintrin.h>

namespace offbook {

#if defined(__AVX512BF16__)
constexpr const char* kVectorName = "AVX-512 BF16";
#define OFFBOOK_PAIR_DOT 1
#elif defined(__AVX512VNNI__)
constexpr const char* kVectorName = "AVX-512 VNNI";
#define OFFBOOK_PAIR_DOT 0
#else
constexpr const char* kVectorName = "AVX-512";
#define OFFBOOK_PAIR_DOT 0
#endif

constexpr int kVectors = 32;     // how many F16x the registers hold
constexpr int kTileRows = 6;     // rows of a product whose sums live in registers at once
constexpr int kWordTileRows = 8;  // the same for 16-bit words
constexpr int kHeadsAtOnce = 3;  // query heads whose scores do

struct F16x {
  __m512 a;
};
struct I16x {
  __m512i a;
};
using Mask = __mmask16;

OFFBOOK_INLINE F16x zero() { return {_mm512_setzero_ps()}; }
OFFBOOK_INLINE F16x set1(float x) { return {_mm512_set1_ps(x)}; }
OFFBOOK_INLINE F16x broadcast(const float* p) { return {_mm512_set1_ps(*p)}; }
OFFBOOK_INLINE F16x load(const float* p) { return {_mm512_loadu_ps(p)}; }
OFFBOOK_INLINE void store(float* p, F16x x) { _mm512_storeu_ps(p, x.a); }
OFFBOOK_INLINE F16x add(F16x x, F16x y) { return {_mm512_add_ps(x.a, y.a)}; }
OFFBOOK_INLINE F16x sub(F16x x, F16x y) { return {_mm512_sub_ps(x.a, y.a)}; }
OFFBOOK_INLINE F16x mul(F16x x, F16x y) { return {_mm512_mul_ps(x.a, y.a)}; }
OFFBOOK_INLINE F16x div(F16x x, F16x y) { return {_mm512_div_ps(x.a, y.a)}; }
// x * y + z, rounded once
OFFBOOK_INLINE F16x fma(F16x x, F16x y, F16x z) { return {_mm512_fmadd_ps(x.a, y.a, z.a)}; }
// x > y ? x : y, so NaN in y stays
OFFBOOK_INLINE F16x maximum(F16x x, F16x y) { return {_mm512_max_ps(x.a, y.a)}; }
// x < y ? x : y, so NaN in y stays
OFFBOOK_INLINE F16x minimum(F16x x, F16x y) { return {_mm512_min_ps(x.a, y.a)}; }

OFFBOOK_INLINE I16x loadi(const void* p) { return {_mm512_loadu_si512(p)}; }
OFFBOOK_INLINE I16x set1i(int32_t x) { return {_mm512_set1_epi32(x)}; }
OFFBOOK_INLINE I16x add(I16x x, I16x y) { return {_mm512_add_epi32(x.a, y.a)}; }
OFFBOOK_INLINE I16x bit_and(I16x x, I16x y) { return {_mm512_and_si512(x.a, y.a)}; }
OFFBOOK_INLINE I16x bit_or(I16x x, I16x y) { return {_mm512_or_si512(x.a, y.a)}; }
template <int N>
OFFBOOK_INLINE I16x shift_left(I16x x) {
  return {_mm512_slli_epi32(x.a, N)};
}
template <int N>
OFFBOOK_INLINE I16x shift_right(I16x x) {
  return {_mm512_srli_epi32(x.a, N)};
}
template <int N>
OFFBOOK_INLINE I16x shift_signed(I16x x) {
  return {_mm512_srai_epi32(x.a, N)};
}
// the same for 32 lanes of 16 bits
template <int N>
OFFBOOK_INLINE I16x shift_words_left(I16x x) {
  return {_mm512_slli_epi16(x.a, N)};
}
template <int N>
OFFBOOK_INLINE I16x shift_words_right(I16x x) {
  return {_mm512_srli_epi16(x.a, N)};
}
template <int N>
OFFBOOK_INLINE I16x shift_words_signed(I16x x) {
  return {_mm512_srai_epi16(x.a, N)};
}
// acc + x.low * y.low + x.high * y.high, halves of a lane as signed 16-bit numbers
OFFBOOK_INLINE I16x dot_words(I16x acc, I16x x, I16x y) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpwssd_epi32(acc.a, x.a, y.a)};
#else
  return {_mm512_add_epi32(acc.a, _mm512_madd_epi16(x.a, y.a))};
#endif
}
OFFBOOK_INLINE F16x to_float(I16x x) { return {_mm512_cvtepi32_ps(x.a)}; }
// the nearest integer, ties to even
OFFBOOK_INLINE I16x to_integer(F16x x) { return {_mm512_cvtps_epi32(x.a)}; }
// the lower 16 bits of each lane
OFFBOOK_INLINE void store_words(int16_t* p, I16x x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.a));
}
OFFBOOK_INLINE F16x from_bits(I16x x) { return {_mm512_castsi512_ps(x.a)}; }
OFFBOOK_INLINE I16x bits(F16x x) { return {_mm512_castps_si512(x.a)}; }

OFFBOOK_INLINE Mask less(F16x x, F16x y) { return _mm512_cmp_ps_mask(x.a, y.a, _CMP_LT_OQ); }
OFFBOOK_INLINE Mask unordered(F16x x) { return _mm512_cmp_ps_mask(x.a, x.a, _CMP_UNORD_Q); }
OFFBOOK_INLINE F16x select(Mask m, F16x x, F16x y) { return {_mm512_mask_blend_ps(m, y.a, x.a)}; }
OFFBOOK_INLINE Mask first_lanes(int n) { return static_cast<Mask>((1u << n) - 1); }
OFFBOOK_INLINE F16x absolute(F16x x) { return from_bits(bit_and(bits(x), set1i(0x7fffffff))); }

OFFBOOK_INLINE F16x load_f16(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}

// lane i + lane i+8, then i+4, i+2, i+1
OFFBOOK_INLINE float reduce_add(F16x x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x.a), _mm512_extractf32x8_ps(x.a, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
OFFBOOK_INLINE float reduce_max(F16x x) {
  const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x.a), _mm512_extractf32x8_ps(x.a, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

#if OFFBOOK_PAIR_DOT
// Sixteen outputs x two inputs in bf16: lane i holds (even, odd) of output i.
struct Pair {
  __m512bh a;
};
OFFBOOK_INLINE Pair pair_bits(I16x x) { return {(__m512bh)x.a}; }
OFFBOOK_INLINE Pair load_pair(const void* p) { return pair_bits(loadi(p)); }
// acc = fma(odd, odd, acc); acc = fma(even, even, acc)
OFFBOOK_INLINE F16x dot_pair(F16x acc, Pair x, Pair y) { return {_mm512_dpbf16_ps(acc.a, x.a, y.a)}; }
#endif

}  // namespace offbook
