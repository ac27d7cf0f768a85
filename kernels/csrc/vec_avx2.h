// AVX2 + FMA + F16C: sixteen lanes are two 256-bit registers.
#pragma once
#include <immintrin.h>

namespace offbook {

constexpr const char* kVectorName = "AVX2";
#define OFFBOOK_PAIR_DOT 0

constexpr int kVectors = 8;      // how many F16x the registers hold
constexpr int kTileRows = 6;     // rows of a product whose sums live in registers at once
constexpr int kWordTileRows = 6;  // the same for 16-bit words
constexpr int kHeadsAtOnce = 3;  // query heads whose scores do

struct F16x {
  __m256 a, b;
};
struct I16x {
  __m256i a, b;
};
struct Mask {
  __m256 a, b;
};

OFFBOOK_INLINE F16x zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
OFFBOOK_INLINE F16x set1(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
OFFBOOK_INLINE F16x broadcast(const float* p) {
  const __m256 v = _mm256_broadcast_ss(p);
  return {v, v};
}
OFFBOOK_INLINE F16x load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OFFBOOK_INLINE void store(float* p, F16x x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
OFFBOOK_INLINE F16x add(F16x x, F16x y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
OFFBOOK_INLINE F16x sub(F16x x, F16x y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
OFFBOOK_INLINE F16x mul(F16x x, F16x y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
OFFBOOK_INLINE F16x div(F16x x, F16x y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
// x * y + z, rounded once
OFFBOOK_INLINE F16x fma(F16x x, F16x y, F16x z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
// x > y ? x : y, so NaN in y stays
OFFBOOK_INLINE F16x maximum(F16x x, F16x y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
// x < y ? x : y, so NaN in y stays
OFFBOOK_INLINE F16x minimum(F16x x, F16x y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

OFFBOOK_INLINE I16x loadi(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
OFFBOOK_INLINE I16x set1i(int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
OFFBOOK_INLINE I16x add(I16x x, I16x y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
OFFBOOK_INLINE I16x bit_and(I16x x, I16x y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
template <int N>
OFFBOOK_INLINE I16x shift_left(I16x x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
OFFBOOK_INLINE I16x shift_right(I16x x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
OFFBOOK_INLINE I16x shift_signed(I16x x) {
  return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
// the same for 32 lanes of 16 bits
template <int N>
OFFBOOK_INLINE I16x shift_words_left(I16x x) {
  return {_mm256_slli_epi16(x.a, N), _mm256_slli_epi16(x.b, N)};
}
template <int N>
OFFBOOK_INLINE I16x shift_words_right(I16x x) {
  return {_mm256_srli_epi16(x.a, N), _mm256_srli_epi16(x.b, N)};
}
template <int N>
OFFBOOK_INLINE I16x shift_words_signed(I16x x) {
  return {_mm256_srai_epi16(x.a, N), _mm256_srai_epi16(x.b, N)};
}
// acc + x.low * y.low + x.high * y.high, halves of a lane as signed 16-bit numbers
OFFBOOK_INLINE I16x dot_words(I16x acc, I16x x, I16x y) {
  return add(acc, {_mm256_madd_epi16(x.a, y.a), _mm256_madd_epi16(x.b, y.b)});
}
OFFBOOK_INLINE F16x to_float(I16x x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
// the nearest integer, ties to even
OFFBOOK_INLINE I16x to_integer(F16x x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
// the lower 16 bits of each lane
OFFBOOK_INLINE void store_words(int16_t* p, I16x x) {
  const I16x u = bit_and(x, set1i(0xffff));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(u.a, u.b), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
OFFBOOK_INLINE F16x from_bits(I16x x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
OFFBOOK_INLINE I16x bits(F16x x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }

OFFBOOK_INLINE Mask less(F16x x, F16x y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
OFFBOOK_INLINE Mask unordered(F16x x) {
  return {_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)};
}
OFFBOOK_INLINE F16x select(Mask m, F16x x, F16x y) {
  return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)};
}
OFFBOOK_INLINE Mask first_lanes(int n) {
  const __m256i v = _mm256_set1_epi32(n);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(v, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(v, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)))};
}
OFFBOOK_INLINE F16x absolute(F16x x) { return from_bits(bit_and(bits(x), set1i(0x7fffffff))); }

OFFBOOK_INLINE F16x load_f16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}

// lane i + lane i+8, then i+4, i+2, i+1
OFFBOOK_INLINE float reduce_add(F16x x) {
  const __m256 a = _mm256_add_ps(x.a, x.b);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
OFFBOOK_INLINE float reduce_max(F16x x) {
  const __m256 a = _mm256_max_ps(x.a, x.b);
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

}  // namespace offbook
