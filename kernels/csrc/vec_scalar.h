// Plain C++: any machine, and the oracle for the other back ends.
#pragma once
#include <cmath>

namespace offbook {

constexpr const char* kVectorName = "scalar";
#define OFFBOOK_PAIR_DOT 0

constexpr int kVectors = 8;      // how many F16x the registers hold
constexpr int kTileRows = 1;     // rows of a product whose sums live in registers at once
constexpr int kWordTileRows = 1;  // the same for 16-bit words
constexpr int kHeadsAtOnce = 1;  // query heads whose scores do

struct F16x {
  float a[16];
};
struct I16x {
  uint32_t a[16];
};
struct Mask {
  bool a[16];
};

template <class To, class F>
To lanes(F&& f) {
  To out;
#pragma GCC unroll 1
  for (int i = 0; i < 16; i++) out.a[i] = f(i);
  return out;
}
OFFBOOK_INLINE uint32_t word_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
OFFBOOK_INLINE float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

OFFBOOK_INLINE F16x set1(float x) {
  return lanes<F16x>([&](int) { return x; });
}
OFFBOOK_INLINE F16x zero() { return set1(0.0f); }
OFFBOOK_INLINE F16x broadcast(const float* p) { return set1(*p); }
OFFBOOK_INLINE F16x load(const float* p) {
  return lanes<F16x>([&](int i) { return p[i]; });
}
OFFBOOK_INLINE void store(float* p, F16x x) { std::memcpy(p, x.a, 64); }
OFFBOOK_INLINE F16x add(F16x x, F16x y) {
  return lanes<F16x>([&](int i) { return x.a[i] + y.a[i]; });
}
OFFBOOK_INLINE F16x sub(F16x x, F16x y) {
  return lanes<F16x>([&](int i) { return x.a[i] - y.a[i]; });
}
OFFBOOK_INLINE F16x mul(F16x x, F16x y) {
  return lanes<F16x>([&](int i) { return x.a[i] * y.a[i]; });
}
OFFBOOK_INLINE F16x div(F16x x, F16x y) {
  return lanes<F16x>([&](int i) { return x.a[i] / y.a[i]; });
}
// x * y + z, rounded once
inline F16x fma(F16x x, F16x y, F16x z) {
  return lanes<F16x>([&](int i) { return std::fma(x.a[i], y.a[i], z.a[i]); });
}
// x > y ? x : y, so NaN in y stays
OFFBOOK_INLINE F16x maximum(F16x x, F16x y) {
  return lanes<F16x>([&](int i) { return x.a[i] > y.a[i] ? x.a[i] : y.a[i]; });
}
// x < y ? x : y, so NaN in y stays
OFFBOOK_INLINE F16x minimum(F16x x, F16x y) {
  return lanes<F16x>([&](int i) { return x.a[i] < y.a[i] ? x.a[i] : y.a[i]; });
}

OFFBOOK_INLINE I16x loadi(const void* p) {
  I16x out;
  std::memcpy(out.a, p, 64);
  return out;
}
OFFBOOK_INLINE I16x set1i(int32_t x) {
  return lanes<I16x>([&](int) { return static_cast<uint32_t>(x); });
}
OFFBOOK_INLINE I16x add(I16x x, I16x y) {
  return lanes<I16x>([&](int i) { return x.a[i] + y.a[i]; });
}
OFFBOOK_INLINE I16x bit_and(I16x x, I16x y) {
  return lanes<I16x>([&](int i) { return x.a[i] & y.a[i]; });
}
template <int N>
OFFBOOK_INLINE I16x shift_left(I16x x) {
  return lanes<I16x>([&](int i) { return x.a[i] << N; });
}
template <int N>
OFFBOOK_INLINE I16x shift_right(I16x x) {
  return lanes<I16x>([&](int i) { return x.a[i] >> N; });
}
template <int N>
OFFBOOK_INLINE I16x shift_signed(I16x x) {
  return lanes<I16x>([&](int i) { return static_cast<uint32_t>(static_cast<int32_t>(x.a[i]) >> N); });
}
// the same for 32 lanes of 16 bits
OFFBOOK_INLINE uint32_t both_halves(uint32_t low, uint32_t high) { return (low & 0xffffu) | high << 16; }
template <int N>
OFFBOOK_INLINE I16x shift_words_left(I16x x) {
  return lanes<I16x>([&](int i) { return both_halves(x.a[i] << N, x.a[i] >> 16 << N); });
}
template <int N>
OFFBOOK_INLINE I16x shift_words_right(I16x x) {
  return lanes<I16x>([&](int i) { return both_halves((x.a[i] & 0xffffu) >> N, x.a[i] >> 16 >> N); });
}
OFFBOOK_INLINE int32_t low_half(uint32_t u) { return static_cast<int16_t>(u); }
OFFBOOK_INLINE int32_t high_half(uint32_t u) { return static_cast<int16_t>(u >> 16); }
template <int N>
OFFBOOK_INLINE I16x shift_words_signed(I16x x) {
  return lanes<I16x>([&](int i) {
    return both_halves(static_cast<uint32_t>(low_half(x.a[i]) >> N), static_cast<uint32_t>(high_half(x.a[i]) >> N));
  });
}
// acc + x.low * y.low + x.high * y.high, halves of a lane as signed 16-bit numbers
OFFBOOK_INLINE I16x dot_words(I16x acc, I16x x, I16x y) {
  return lanes<I16x>([&](int i) {
    const int32_t low = low_half(x.a[i]) * low_half(y.a[i]), high = high_half(x.a[i]) * high_half(y.a[i]);
    return acc.a[i] + static_cast<uint32_t>(low) + static_cast<uint32_t>(high);
  });
}
OFFBOOK_INLINE F16x to_float(I16x x) {
  return lanes<F16x>([&](int i) { return static_cast<float>(static_cast<int32_t>(x.a[i])); });
}
// the nearest integer, ties to even
OFFBOOK_INLINE I16x to_integer(F16x x) {
  return lanes<I16x>([&](int i) { return static_cast<uint32_t>(static_cast<int32_t>(std::nearbyintf(x.a[i]))); });
}
// the lower 16 bits of each lane
OFFBOOK_INLINE void store_words(int16_t* p, I16x x) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<int16_t>(x.a[i]);
}
OFFBOOK_INLINE F16x from_bits(I16x x) {
  return lanes<F16x>([&](int i) { return float_of(x.a[i]); });
}
OFFBOOK_INLINE I16x bits(F16x x) {
  return lanes<I16x>([&](int i) { return word_of(x.a[i]); });
}

OFFBOOK_INLINE Mask less(F16x x, F16x y) {
  return lanes<Mask>([&](int i) { return x.a[i] < y.a[i]; });
}
OFFBOOK_INLINE Mask unordered(F16x x) {
  return lanes<Mask>([&](int i) { return x.a[i] != x.a[i]; });
}
OFFBOOK_INLINE F16x select(Mask m, F16x x, F16x y) {
  return lanes<F16x>([&](int i) { return m.a[i] ? x.a[i] : y.a[i]; });
}
OFFBOOK_INLINE Mask first_lanes(int n) {
  return lanes<Mask>([&](int i) { return i < n; });
}
OFFBOOK_INLINE F16x absolute(F16x x) { return from_bits(bit_and(bits(x), set1i(0x7fffffff))); }

OFFBOOK_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa << 13));
  if (exponent) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float small = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -small : small;
}
OFFBOOK_INLINE F16x load_f16(const void* p) {
  uint16_t h[16];
  std::memcpy(h, p, 32);
  return lanes<F16x>([&](int i) { return half_to_float(h[i]); });
}

// lane i + lane i+8, then i+4, i+2, i+1
OFFBOOK_INLINE float reduce_add(F16x x) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x.a[i] = x.a[i] + x.a[i + half];
  return x.a[0];
}
OFFBOOK_INLINE float reduce_max(F16x x) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x.a[i] = x.a[i] > x.a[i + half] ? x.a[i] : x.a[i + half];
  return x.a[0];
}

}  // namespace offbook
