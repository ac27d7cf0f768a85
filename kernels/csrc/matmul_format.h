// How the weights of a block (32 outputs x 32 inputs) turn into numbers.
//
// A block is [codes][scales][mins]. Codes come in words of 32 bits, one word an output, 16 outputs a vector:
//   4-bit: word of 8 inputs k..k+7, nibble i = input k + 2 i (i < 4), nibble 4 + i = input k + 2 i + 1;
//   8-bit (two's complement): word of inputs k, k+2, k+1, k+3 (so that each 16-bit half shifts to a pair);
//   bf16: word of 2 inputs, the even one low;   f16: [input][32 outputs];   f32: [input][32 outputs].
//   16-bit words (codes widened for many rows; never stored): [pair of inputs][32 outputs], the even one low.
// A reader gives, for input k of an octet and half s of the 32 outputs, the exact value as floats (`at`), or inputs 2 p
// and 2 p + 1 as 16-bit integers (`words`) or in bf16 (`pair`, where there is a pair dot product).
#pragma once
#include "step.h"
#include "vec.h"

namespace offbook {

struct Codes4 {
  static constexpr int kOctetBytes = 128;  // 8 inputs x 32 outputs
  static constexpr int nibble(int k) { return k / 2 + 4 * (k & 1); }
  template <int K>
  static OFFBOOK_INLINE F16x at(const uint8_t* octet, int s) {
    constexpr int n = nibble(K);
    const I16x v = loadi(octet + 64 * s);
    if constexpr (n == 7) return to_float(shift_right<28>(v));
    return to_float(bit_and(shift_right<4 * n>(v), set1i(15)));
  }
  template <int P>
  static OFFBOOK_INLINE I16x words(const uint8_t* octet, int s) {
    const I16x v = loadi(octet + 64 * s);
    if constexpr (P == 3) return shift_words_right<12>(v);
    return bit_and(P ? shift_words_right<4 * P>(v) : v, set1i(0x000f000f));
  }
};

struct Codes8 {
  static constexpr int kOctetBytes = 256;
  template <int K>
  static OFFBOOK_INLINE F16x at(const uint8_t* octet, int s) {
    constexpr int byte = K % 4 == 1 ? 2 : K % 4 == 2 ? 1 : K % 4;
    const I16x v = loadi(octet + K / 4 * 128 + 64 * s);
    return to_float(shift_signed<24>(byte == 3 ? v : shift_left<24 - 8 * byte>(v)));
  }
  template <int P>
  static OFFBOOK_INLINE I16x words(const uint8_t* octet, int s) {
    const I16x v = loadi(octet + P / 2 * 128 + 64 * s);
    return shift_words_signed<8>(P % 2 ? v : shift_words_left<8>(v));
  }
};

struct Words16 {
  static constexpr int kOctetBytes = 512;
  template <int P>
  static OFFBOOK_INLINE I16x words(const uint8_t* octet, int s) {
    return loadi(octet + P * 128 + 64 * s);
  }
};

struct WordsBf16 {
  static constexpr int kOctetBytes = 512;
  template <int K>
  static OFFBOOK_INLINE F16x at(const uint8_t* octet, int s) {
    const I16x v = loadi(octet + K / 2 * 128 + 64 * s);
    return from_bits(K % 2 ? bit_and(v, set1i(static_cast<int32_t>(0xffff0000u))) : shift_left<16>(v));
  }
#if OFFBOOK_PAIR_DOT
  template <int P>
  static OFFBOOK_INLINE Pair pair(const uint8_t* octet, int s) {
    return load_pair(octet + P * 128 + 64 * s);
  }
#endif
};

struct WordsF16 {
  static constexpr int kOctetBytes = 512;
  template <int K>
  static OFFBOOK_INLINE F16x at(const uint8_t* octet, int s) {
    return load_f16(octet + K * 64 + 32 * s);
  }
};

struct WordsF32 {
  static constexpr int kOctetBytes = 1024;
  template <int K>
  static OFFBOOK_INLINE F16x at(const uint8_t* octet, int s) {
    return load(reinterpret_cast<const float*>(octet + K * 128 + 64 * s));
  }
};

// Any kind widened to f32, in the first-level cache: nothing to ask memory for.
struct WideF32 : WordsF32 {};

// Calls f(Reader{}) with the reader of `kind`.
template <class F>
OFFBOOK_INLINE void with_reader(int32_t kind, F&& f) {
  switch (kind) {
    case kCodes4:
      return f(Codes4{});
    case kCodes8:
      return f(Codes8{});
    case kBf16:
      return f(WordsBf16{});
    case kF16:
      return f(WordsF16{});
    default:
      return f(WordsF32{});
  }
}

// The scales of one panel: row g holds the 32 outputs' scales of group g.
struct Scales {
  const uint8_t* first;  // of group 0
  int64_t block_bytes;
  int32_t bytes, minimum;

  Scales(const Matrix& m, const uint8_t* panel)
      : first(panel + (m.kind == kCodes4 ? 512 : 1024)),
        block_bytes(m.block_bytes),
        bytes(m.scale_bytes),
        minimum(m.minimum) {}

  template <int G>
  const uint8_t* row(int64_t group) const {
    static_assert(G == 32 || G == 16);
    return G == 32 ? first + group * block_bytes : first + (group >> 1) * block_bytes + (group & 1) * 32 * bytes;
  }
  OFFBOOK_INLINE F16x vector(const uint8_t* row, int s) const {
    return bytes == 2 ? load_f16(row + 32 * s) : load(reinterpret_cast<const float*>(row + 64 * s));
  }
  OFFBOOK_INLINE F16x scale(const uint8_t* row, int s) const { return vector(row, s); }
  OFFBOOK_INLINE F16x min(const uint8_t* row, F16x scale, int s) const {
    return minimum == kMinusEight ? mul(scale, set1(-8.0f)) : vector(row + 32 * bytes, s);
  }
};

// One row of a matrix as floats: code * scale, plus the min in one rounding. `out` has 32 * blocks floats.
inline void dense_row(const Matrix& m, int64_t row, float* out) {
  const uint8_t* panel = m.data + row / 32 * m.blocks * m.block_bytes;
  const int lane = static_cast<int>(row % 32), s = lane / 16;
  const Scales scales(m, panel);
  with_reader(m.kind, [&](auto reader) {
    using Reader = decltype(reader);
    for (int64_t k = 0; k < 32 * static_cast<int64_t>(m.blocks); k += 8) {
      const uint8_t* octet = panel + k / 32 * m.block_bytes + k % 32 / 8 * Reader::kOctetBytes;
      float d[16], low[16] = {};
      if (m.group) {
        const uint8_t* scale_row = m.group == 32 ? scales.row<32>(k / 32) : scales.row<16>(k / 16);
        const F16x scale = scales.scale(scale_row, s);
        store(d, scale);
        if (m.minimum) store(low, scales.min(scale_row, scale, s));
      }
      unroll<8>([&](auto i) OFFBOOK_LAMBDA {
        float value[16];
        store(value, Reader::template at<i>(octet, s));
        out[k + i] = m.group ? __builtin_fmaf(value[lane % 16], d[lane % 16], low[lane % 16]) : value[lane % 16];
      });
    }
  });
}

}  // namespace offbook
