// Arithmetic that gives the same bits on every machine: integers, ordered keys, own exp and log, Philox.
//
// Rules of this file: no library function whose rounding may differ between compilers, no contraction (the builds
// turn it off), no float<->int conversion inside exp (it would stop vectorisation). Compiles under NVRTC (which has no
// host headers), nvcc and any C++20 host compiler.
#pragma once

#if defined(__CUDACC__)
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
#define PROGRAM __device__ __noinline__
DEVICE u32 float_bits(float f) { return __float_as_uint(f); }
DEVICE float bits_float(u32 u) { return __uint_as_float(u); }
DEVICE u64 multiply_high(u64 a, u64 b) { return __umul64hi(a, b); }
#else
#include <cstdint>
#include <cstring>
typedef uint32_t u32;
typedef uint64_t u64;
#define DEVICE inline __attribute__((always_inline))
#define PROGRAM __attribute__((noinline))
static DEVICE u32 float_bits(float f) {
  u32 u;
  memcpy(&u, &f, 4);
  return u;
}
static DEVICE float bits_float(u32 u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static DEVICE u64 multiply_high(u64 a, u64 b) { return (u64)(((unsigned __int128)a * b) >> 64); }
#endif

#define NEGATIVE_INFINITY (bits_float(0xff800000u))
#define POSITIVE_INFINITY (bits_float(0x7f800000u))
constexpr float LARGEST_FLOAT = 3.402823466e38f;

// value or 0, without a branch (which would stop vectorisation).
static DEVICE u32 only_if(bool condition, u32 value) { return value & (0u - (u32)condition); }

// Ordered key: a < b as floats exactly when key(a) < key(b) as integers (NaN excluded; -0 sorts just below +0).
constexpr u32 KEY_OF_NEGATIVE_INFINITY = 0x007fffffu;
static DEVICE u32 ordered_key(float f) {
  u32 u = float_bits(f + 0.0f);  // + 0 makes -0 and +0 one key, so that they tie by id
  return u ^ ((u32)((int)u >> 31) | 0x80000000u);
}

// exp(x) for x in [-inf, 0]; 0 below -87. Cody-Waite reduction and Cephes' polynomial, within 2 ulp. The sum with
// 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits, with no conversion instruction.
static DEVICE float exp_negative(float x) {
  float clamped = x < -87.0f ? -87.0f : x;
  float shifted = clamped * 1.44269504f + 12582912.0f;
  u32 power = float_bits(shifted);
  float k = shifted - 12582912.0f;
  float r = clamped - k * 0.693359375f;
  r = r + k * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r;
  p = p + 1.0f;
  float value = p * bits_float((power + 127u) << 23);
  u32 keep = 0u - (u32)(x >= -87.0f);
  return bits_float(float_bits(value) & keep);
}

// log(x) for normal x > 0: Cephes' logf, within 1 ulp.
static DEVICE float log_positive(float x) {
  u32 u = float_bits(x);
  int exponent = (int)(u >> 23) - 127;
  float m = bits_float((u & 0x7fffffu) | 0x3f800000u);
  bool high = m > 1.41421356f;
  m = high ? m * 0.5f : m;
  exponent += high ? 1 : 0;
  float f = m - 1.0f, z = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  float y = p * z * f;
  y = y + (float)exponent * -2.12194440e-4f;
  y = y - 0.5f * z;
  float out = f + y;
  return out + (float)exponent * 0.693359375f;
}

// Fixed-point mass: e in [0, 1] in units of 2^-40, rounded down; negative e (a dropped token) has none. Integer sums do
// not depend on their order. 2^20 tokens of weight 1 make 2^60. Lighter than 2^-40 of the best token is no mass at all.
constexpr float MASS_ONE = 1099511627776.0f;  // 2^40
constexpr float MASS_UNIT = 1.0f / 1099511627776.0f;
static DEVICE float positive_part(float e) {  // no branch: one would stop vectorisation
  return bits_float(float_bits(e) & ~(u32)((int)float_bits(e) >> 31));
}
static DEVICE u64 mass(float e) {
#if defined(__CUDACC__)
  return __float2ull_rz(positive_part(e) * MASS_ONE);
#else
  return (u64)(long long)(positive_part(e) * MASS_ONE);
#endif
}

// Natural logarithm of a mass, in units of the weight of the most likely token.
static DEVICE float log_mass(u64 total) { return log_positive((float)total * MASS_UNIT); }

// Philox4x32-10 (Salmon et al., 2011): the first 64 of the 128 bits at (key, counter).
static DEVICE u64 philox_u64(u64 key, u32 c0, u32 c1, u32 c2, u32 c3) {
  u32 k0 = (u32)key, k1 = (u32)(key >> 32);
  for (int round = 0; round < 10; round++) {
    u64 a = (u64)0xD2511F53u * c0, b = (u64)0xCD9E8D57u * c2;
    c0 = (u32)(b >> 32) ^ c1 ^ k0;
    c1 = (u32)b;
    c2 = (u32)(a >> 32) ^ c3 ^ k1;
    c3 = (u32)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return ((u64)c0 << 32) | c1;
}
