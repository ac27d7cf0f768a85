// How activations meet weights: as floats, as bf16 pairs, or as 16-bit integers with a scale a group (`WordMode`).
//
// A mode says what a row of activations holds, how many rows a tile takes, how eight inputs add to a tile's sums
// (`octet`) and how a group's sum joins the result (`fold`).
#pragma once
#include <cmath>

#include "matmul_format.h"

namespace offbook {

// Activations of some rows. scales, sums: [row][group of 32], each with `groups` floats a row; a mode without them
// ignores them, and sums are needed only where a matrix has mins.
template <class T>
struct Rows {
  const T* x;
  int64_t stride;
  const float *scales, *sums;
  int64_t groups;
  Rows from(int64_t row) const {
    return {x + row * stride, stride, scales + row * groups, sums + row * groups, groups};
  }
};

// Keeps one plain pointer a row: left alone, the compiler makes dozens of derived addresses and spills them.
template <class T>
OFFBOOK_INLINE const T* plain(const T* p) {
#if defined(__x86_64__)
  asm("" : "+r"(p));
#endif
  return p;
}

// Activations as floats: fused multiply-adds.
struct FloatMode {
  using Activation = float;
  using Sum = F16x;
  using Wide = WideF32;
  static constexpr int kWideBytes = 4096, kWidenFrom = 25, kTile = kTileRows;
  static constexpr int columns(int rows) { return rows * 2 + 3 > kVectors ? 1 : 2; }  // vectors of 16 outputs
  static OFFBOOK_INLINE Sum none() { return zero(); }
  static OFFBOOK_INLINE F16x fold(Sum sum, F16x scale, const float*, F16x acc) { return fma(sum, scale, acc); }

  template <class Reader, int R, int C>
  static OFFBOOK_INLINE void octet(Sum (&sum)[R][C], const uint8_t* codes, int s, const float* x, int64_t stride) {
    const float* row[R];
    unroll<R>([&](auto r) OFFBOOK_LAMBDA { row[r] = plain(x + r * stride); });
    unroll<8>([&](auto i) OFFBOOK_LAMBDA {
      constexpr int k = i ^ 1;
      F16x w[C];
      for (int c = 0; c < C; c++) w[c] = Reader::template at<k>(codes, s + c);
      unroll<R>([&](auto r) OFFBOOK_LAMBDA {
        const F16x v = broadcast(row[r] + k);
        for (int c = 0; c < C; c++) sum[r][c] = fma(w[c], v, sum[r][c]);
      });
    });
  }
  template <class Reader>
  static OFFBOOK_INLINE void widen_octet(const uint8_t* codes, uint8_t* to) {
    unroll<8>([&](auto k) OFFBOOK_LAMBDA {
      for (int s = 0; s < 2; s++)
        store(reinterpret_cast<float*>(to + k * 128 + s * 64), Reader::template at<k>(codes, s));
    });
  }
};

// Activations as 16-bit integers against integer codes: a group's sum is exact, whatever the order.
struct WordMode {
  using Activation = int16_t;
  using Sum = I16x;
  using Wide = Words16;
  static constexpr int kWideBytes = 2048, kWidenFrom = 25, kTile = kWordTileRows;
  static constexpr int columns(int rows) { return rows * 2 + 3 > kVectors ? 1 : 2; }
  static OFFBOOK_INLINE Sum none() { return set1i(0); }
  static OFFBOOK_INLINE F16x fold(Sum sum, F16x scale, const float* x_scale, F16x acc) {
    return fma(to_float(sum), mul(scale, broadcast(x_scale)), acc);
  }

  template <class Reader, int R, int C>
  static OFFBOOK_INLINE void octet(Sum (&sum)[R][C], const uint8_t* codes, int s, const int16_t* x, int64_t stride) {
    const int16_t* row[R];
    unroll<R>([&](auto r) OFFBOOK_LAMBDA { row[r] = plain(x + r * stride); });
    unroll<4>([&](auto p) OFFBOOK_LAMBDA {
      I16x w[C];
      for (int c = 0; c < C; c++) w[c] = Reader::template words<p>(codes, s + c);
      unroll<R>([&](auto r) OFFBOOK_LAMBDA {
        const I16x v = broadcast_two(row[r] + 2 * p);
        for (int c = 0; c < C; c++) sum[r][c] = dot_words(sum[r][c], w[c], v);
      });
    });
  }
  template <class Reader>
  static OFFBOOK_INLINE void widen_octet(const uint8_t* codes, uint8_t* to) {
    unroll<4>([&](auto p) OFFBOOK_LAMBDA {
      for (int s = 0; s < 2; s++) {
        const I16x w = Reader::template words<p>(codes, s);
        std::memcpy(to + p * 128 + s * 64, &w, 64);
      }
    });
  }
};

#if OFFBOOK_PAIR_DOT
// Activations in bf16 against weights that are not codes: the pair dot product where they are bf16, else floats.
struct PairMode {
  using Activation = uint16_t;
  using Sum = F16x;
  static constexpr int kTile = kTileRows;
  static constexpr int columns(int) { return 2; }

  template <class Reader, int R, int C>
  static OFFBOOK_INLINE void octet(Sum (&sum)[R][C], const uint8_t* codes, int s, const uint16_t* x, int64_t stride) {
    if constexpr (std::is_same_v<Reader, WordsBf16>) {
      unroll<4>([&](auto p) OFFBOOK_LAMBDA {
        Pair w[C];
        for (int c = 0; c < C; c++) w[c] = Reader::template pair<p>(codes, s + c);
        unroll<R>([&](auto r) OFFBOOK_LAMBDA {
          const Pair v = pair_bits(broadcast_two(x + r * stride + 2 * p));
          for (int c = 0; c < C; c++) sum[r][c] = dot_pair(sum[r][c], w[c], v);
        });
      });
    } else {
      unroll<8>([&](auto i) OFFBOOK_LAMBDA {
        constexpr int k = i ^ 1;
        unroll<R>([&](auto r) OFFBOOK_LAMBDA {
          const F16x v = from_bits(set1i(static_cast<int32_t>(static_cast<uint32_t>(x[r * stride + k]) << 16)));
          for (int c = 0; c < C; c++) sum[r][c] = fma(Reader::template at<k>(codes, s + c), v, sum[r][c]);
        });
      });
    }
  }
};
#endif

// 32 floats -> 16-bit integers times one scale: scale = the largest magnitude / 32767, so half a step is 2^-16 of it;
// *sum = what the integers stand for, added up (exact but for one rounding). A NaN or an infinity makes the scale NaN.
OFFBOOK_INLINE void words_of(const float* x, int16_t* to, float* scale, float* sum) {
  const F16x a = load(x), b = load(x + 16);
  const float top = reduce_max(maximum(absolute(a), absolute(b)));
  const float all = reduce_add(add(absolute(a), absolute(b))), poison = all - all;  // 0, or NaN
  if (poison != 0.0f || top < kTiny) {
    std::memset(to, 0, 32 * sizeof(int16_t));
    *scale = *sum = poison;
    return;
  }
  const F16x inverse = set1(32767.0f / top);
  const I16x ia = to_integer(mul(a, inverse)), ib = to_integer(mul(b, inverse));
  store_words(to, ia);
  store_words(to + 16, ib);
  *scale = top / 32767.0f;
  *sum = reduce_add(to_float(add(ia, ib))) * *scale;
}

}  // namespace offbook
