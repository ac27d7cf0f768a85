// Products of activation rows with packed weights: out = W x, in one order of arithmetic for any number of rows.
//
// The contract, for every back end and tile shape. With scales: a group's sum starts at 0 and takes its inputs in
// pairs, sum = fma(w_odd, x_odd, sum), sum = fma(w_even, x_even, sum); then acc = fma(sum, scale, acc), and with mins
// acc = fma(min, sum of the group's x, acc); groups ascend, acc starts at 0. Without scales acc takes the pairs itself.
// So tiles may be cut in any way along rows and outputs, and along inputs at group borders.
#pragma once
#include "matmul_format.h"

namespace offbook {

constexpr int kChunkRows = 64;  // rows that share one widening of the weights
constexpr int kWideBlocks = 4;  // blocks widened at once: they stay in the first-level cache
constexpr int kAhead = 3072;    // bytes of weights asked for in advance: without it a core streams a fifth as fast

// Activations of some rows; sums[row][group of 32] is needed where a matrix has mins.
template <class T>
struct Rows {
  const T* x;
  int64_t stride;
  const float* sums;
  int64_t sums_stride;
  Rows from(int64_t row) const { return {x + row * stride, stride, sums + row * sums_stride, sums_stride}; }
};

// What one thread needs while it works on a panel.
struct PanelScratch {
  alignas(64) float acc[kChunkRows * 32];
  alignas(64) uint8_t wide[kWideBlocks * 4096];
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
  using Wide = WordsF32;
  static constexpr int columns(int rows) { return rows * 2 + 3 > kVectors ? 1 : 2; }  // vectors of 16 outputs
  static constexpr int widen_from(int32_t) { return 25; }

  template <class Reader, int R, int C>
  static OFFBOOK_INLINE void octet(F16x (&sum)[R][C], const uint8_t* codes, int s, const float* x, int64_t stride) {
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

#if OFFBOOK_PAIR_DOT
// Activations in bf16: the pair dot product where the weights are exact in bf16, else floats.
struct PairMode {
  using Activation = uint16_t;
  using Wide = WordsBf16;
  static constexpr int columns(int) { return 2; }
  static constexpr int widen_from(int32_t kind) { return kind == kCodes8 ? 25 : 1 << 30; }

  template <class Reader, int R, int C>
  static OFFBOOK_INLINE void octet(F16x (&sum)[R][C], const uint8_t* codes, int s, const uint16_t* x, int64_t stride) {
    if constexpr (requires { Reader::template pair<0>(codes, s); }) {
      unroll<4>([&](auto p) OFFBOOK_LAMBDA {
        Pair w[C];
        for (int c = 0; c < C; c++) w[c] = Reader::template pair<p>(codes, s + c);
        unroll<R>([&](auto r) OFFBOOK_LAMBDA {
          const Pair v = broadcast_pair(x + r * stride + 2 * p);
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
  template <class Reader>
  static OFFBOOK_INLINE void widen_octet(const uint8_t* codes, uint8_t* to) {
    if constexpr (requires { Reader::template pair<0>(codes, 0); }) {
      unroll<4>([&](auto p) OFFBOOK_LAMBDA {
        for (int s = 0; s < 2; s++) {
          const Pair w = Reader::template pair<p>(codes, s);
          std::memcpy(to + p * 128 + s * 64, &w, 64);
        }
      });
    }
  }
};
#endif

// acc[r][s..] += R rows x C vectors of outputs over `groups` groups, the first being number `group0` of the panel.
// codes: of that first group's block; block_bytes: their distance.
template <class Mode, class Reader, int G, int R, int C>
__attribute__((noinline)) void tile_groups(const Scales& scales, int group0, int groups, const uint8_t* codes,
                                           int64_t block_bytes, int s, Rows<typename Mode::Activation> in, float* acc) {
  for (int g = 0; g < groups; g++) {
    F16x sum[R][C];
    for (auto& row : sum)
      for (auto& v : row) v = zero();
    const uint8_t* at = codes + g * G / 32 * block_bytes + g * G % 32 / 8 * Reader::kOctetBytes;
    if (!std::is_same_v<Reader, typename Mode::Wide> && s == 0)
      prefetch_bytes(at + kAhead, static_cast<int>(block_bytes * G / 32));
    const auto* x = in.x + static_cast<int64_t>(group0 + g) * G;
#pragma GCC unroll 1
    for (int k = 0; k < G; k += 8, at += Reader::kOctetBytes)
      Mode::template octet<Reader, R, C>(sum, at, s, x + k, in.stride);
    const uint8_t* row = scales.row<G>(group0 + g);
    for (int c = 0; c < C; c++) {
      const F16x d = scales.scale(row, s + c);
      const F16x low = scales.minimum ? scales.min(row, d, s + c) : zero();
      for (int r = 0; r < R; r++) {
        float* to = acc + r * 32 + (s + c) * 16;
        F16x total = fma(sum[r][c], d, load(to));
        if (scales.minimum) total = fma(low, broadcast(in.sums + r * in.sums_stride + group0 + g), total);
        store(to, total);
      }
    }
  }
}

// The same without scales: `blocks` blocks, the first being number `block0`.
template <class Mode, class Reader, int R, int C>
__attribute__((noinline)) void tile_plain(int block0, int blocks, const uint8_t* codes, int64_t block_bytes, int s,
                                          Rows<typename Mode::Activation> in, float* acc) {
  F16x sum[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sum[r][c] = load(acc + r * 32 + (s + c) * 16);
  const auto* x = in.x + static_cast<int64_t>(block0) * 32;
  for (int b = 0; b < blocks; b++, codes += block_bytes) {
    if (s == 0) prefetch_bytes(codes + kAhead, static_cast<int>(block_bytes));
#pragma GCC unroll 1
    for (int q = 0; q < 4; q++, x += 8)
      Mode::template octet<Reader, R, C>(sum, codes + q * Reader::kOctetBytes, s, x, in.stride);
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(acc + r * 32 + (s + c) * 16, sum[r][c]);
}

// One row, any grouped codes: two groups at once so that eight chains hide the latency; factors of the raw codes go to
// x.
template <class Reader, int G, int N>
OFFBOOK_INLINE void one_row_groups(const Scales& scales, int group, const uint8_t* codes, int64_t distance,
                                   const float* x, const float* sums, F16x (&acc)[2]) {
  F16x sum[N][2];
  for (auto& row : sum) row[0] = row[1] = zero();
#pragma GCC unroll 1
  for (int k = 0; k < G; k += 8, codes += Reader::kOctetBytes) {
    unroll<8>([&](auto i) OFFBOOK_LAMBDA {
      constexpr int input = i ^ 1;
      unroll<N>([&](auto n) OFFBOOK_LAMBDA {
        const F16x v = mul(broadcast(x + n * G + k + input), set1(Reader::template factor<input>()));
        for (int s = 0; s < 2; s++) sum[n][s] = fma(Reader::template raw<input>(codes + n * distance, s), v, sum[n][s]);
      });
    });
  }
  for (int n = 0; n < N; n++) {
    const uint8_t* row = scales.row<G>(group + n);
    for (int s = 0; s < 2; s++) {
      const F16x d = scales.scale(row, s);
      acc[s] = fma(sum[n][s], d, acc[s]);
      if (scales.minimum) acc[s] = fma(scales.min(row, d, s), broadcast(sums + group + n), acc[s]);
    }
  }
}
template <class Reader, int G>
__attribute__((noinline)) void one_row(const Matrix& m, const uint8_t* panel, Rows<float> in, float* out) {
  const Scales scales(m, panel);
  const int64_t block = m.block_bytes, distance = G == 32 ? block : G / 8 * Reader::kOctetBytes;
  const int groups = m.blocks * (32 / G);
  F16x acc[2] = {zero(), zero()};
  int g = 0;
  for (; g + 2 <= groups; g += 2) {
    const uint8_t* codes = panel + g * G / 32 * block;
    prefetch_bytes(codes + kAhead, static_cast<int>(2 * block * G / 32));
    one_row_groups<Reader, G, 2>(scales, g, codes, distance, in.x + g * G, in.sums, acc);
  }
  if (g < groups)
    one_row_groups<Reader, G, 1>(scales, g, panel + g * G / 32 * block, distance, in.x + g * G, in.sums, acc);
  store(out, acc[0]);
  store(out + 16, acc[1]);
}

// Row tiles over one span of blocks; codes: of block0, from the panel itself or widened.
template <class Mode, class Reader, int G>
void tile_rows(const Scales& scales, int block0, int blocks, const uint8_t* codes, int64_t block_bytes,
               Rows<typename Mode::Activation> in, int rows, float* acc) {
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  int row = 0;
  for (int t = 0; t < tiles; t++) {
    const int n = rows / tiles + (t < rows % tiles);
    auto run = [&](auto r) {
      constexpr int R = r, C = Mode::columns(R);
      for (int s = 0; s < 2; s += C) {
        if constexpr (G == 0)
          tile_plain<Mode, Reader, R, C>(block0, blocks, codes, block_bytes, s, in.from(row), acc + row * 32);
        else
          tile_groups<Mode, Reader, G, R, C>(scales, block0 * (32 / G), blocks * (32 / G), codes, block_bytes, s,
                                             in.from(row), acc + row * 32);
      }
    };
    unroll<kTileRows>([&](auto i) {
      if (n == i + 1) run(std::integral_constant<int, i + 1>{});
    });
    row += n;
  }
}

template <class Mode, class Reader, int G>
void panel_rows(const Matrix& m, const uint8_t* panel, Rows<typename Mode::Activation> in, int rows,
                PanelScratch& scratch) {
  if constexpr (G != 0 && std::is_same_v<Mode, FloatMode>) {
    if (rows == 1) return one_row<Reader, G>(m, panel, in, scratch.acc);
  }
  const Scales scales(m, panel);
  std::memset(scratch.acc, 0, sizeof(float) * 32 * rows);
  if (rows < Mode::widen_from(m.kind))
    return tile_rows<Mode, Reader, G>(scales, 0, m.blocks, panel, m.block_bytes, in, rows, scratch.acc);
  using Wide = typename Mode::Wide;
  for (int b = 0; b < m.blocks; b += kWideBlocks) {
    const int n = b + kWideBlocks <= m.blocks ? kWideBlocks : m.blocks - b;
    uint8_t* to = scratch.wide;
    for (int i = 0; i < n; i++) {
      prefetch_bytes(panel + (b + i) * m.block_bytes + kAhead, static_cast<int>(m.block_bytes));
      for (int q = 0; q < 4; q++, to += Wide::kOctetBytes)
        Mode::template widen_octet<Reader>(panel + (b + i) * m.block_bytes + q * Reader::kOctetBytes, to);
    }
    tile_rows<Mode, Wide, G>(scales, b, n, scratch.wide, 4 * Wide::kOctetBytes, in, rows, scratch.acc);
  }
}

// scratch.acc[row][32] = the panel's outputs for rows (at most kChunkRows).
template <class Mode>
void multiply_panel(const Matrix& m, int panel, Rows<typename Mode::Activation> in, int rows, PanelScratch& scratch) {
  const uint8_t* weights = m.data + static_cast<int64_t>(panel) * m.blocks * m.block_bytes;
  if (m.kind == kCodes4) return panel_rows<Mode, Codes4, 32>(m, weights, in, rows, scratch);
  if (m.kind == kCodes8 && m.group == 16) return panel_rows<Mode, Codes8, 16>(m, weights, in, rows, scratch);
  if (m.kind == kCodes8) return panel_rows<Mode, Codes8, 32>(m, weights, in, rows, scratch);
  if (m.kind == kBf16) return panel_rows<Mode, WordsBf16, 0>(m, weights, in, rows, scratch);
  if (m.kind == kF16) return panel_rows<Mode, WordsF16, 0>(m, weights, in, rows, scratch);
  return panel_rows<Mode, WordsF32, 0>(m, weights, in, rows, scratch);
}

}  // namespace offbook
