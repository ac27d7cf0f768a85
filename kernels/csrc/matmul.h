// Products of activation rows with packed weights: out = W x, in one order of arithmetic for any number of rows.
//
// The contract, for every back end and tile shape. Codes with rounded activations: a group's sum is an exact integer s;
// acc = fma(s, weight scale * activation scale, acc). Codes with float activations: a group's sum starts at 0 and takes
// its inputs in pairs, sum = fma(w_odd, x_odd, sum), sum = fma(w_even, x_even, sum); then acc = fma(sum, scale, acc).
// Both: with mins acc = fma(min, sum of the group's x, acc); groups ascend, acc starts at 0. Weights that are not codes:
// acc takes the pairs itself. So tiles may be cut in any way along rows and outputs, and along inputs at group borders.
#pragma once
#include "matmul_modes.h"

namespace offbook {

constexpr int kChunkRows = 64;  // rows that share one widening of the weights
constexpr int kWideBlocks = 4;  // blocks widened at once: they stay in the first-level cache
constexpr int kAhead = 3072;    // bytes of weights asked for in advance: without it a core streams a fifth as fast

// What one thread needs while it works on a panel.
struct PanelScratch {
  alignas(64) float acc[kChunkRows * 32];
  alignas(64) uint8_t wide[kWideBlocks * 4096];
};

// Whether the reader's codes come from the matrix itself: false once they are widened.
template <class Mode, class Reader>
constexpr bool kFromMemory = true;
template <class Mode, class Reader>
  requires requires { typename Mode::Wide; }
constexpr bool kFromMemory<Mode, Reader> = !std::is_same_v<Reader, typename Mode::Wide>;

// acc[r][s..] += R rows x C vectors of outputs over `groups` groups, the first being number `group0` of the panel.
// codes: of that first group's block; block_bytes: their distance.
template <class Mode, class Reader, int G, int R, int C>
__attribute__((noinline)) void tile_groups(const Scales& scales, int group0, int groups, const uint8_t* codes,
                                           int64_t block_bytes, int s, Rows<typename Mode::Activation> in, float* acc) {
  for (int g = 0; g < groups; g++) {
    typename Mode::Sum sum[R][C];
    for (auto& row : sum)
      for (auto& v : row) v = Mode::none();
    const int64_t g32 = static_cast<int64_t>(group0 + g) * G / 32;
    const uint8_t* at = codes + g * G / 32 * block_bytes + g * G % 32 / 8 * Reader::kOctetBytes;
    if (kFromMemory<Mode, Reader> && s == 0) prefetch_bytes(at + kAhead, static_cast<int>(block_bytes * G / 32));
    const auto* x = in.x + static_cast<int64_t>(group0 + g) * G;
#pragma GCC unroll 1
    for (int k = 0; k < G; k += 8, at += Reader::kOctetBytes)
      Mode::template octet<Reader, R, C>(sum, at, s, x + k, in.stride);
    const uint8_t* row = scales.row<G>(group0 + g);
    auto fold = [&](auto with_min) OFFBOOK_LAMBDA {
      unroll<C>([&](auto c) OFFBOOK_LAMBDA {
        const F16x d = scales.scale(row, s + c);
        const F16x low = with_min ? scales.min(row, d, s + c) : zero();
        unroll<R>([&](auto r) OFFBOOK_LAMBDA {
          float* to = acc + r * 32 + (s + c) * 16;
          F16x total = Mode::fold(sum[r][c], d, in.scales + r * in.groups + g32, load(to));
          if (with_min) total = fma(low, broadcast(in.sums + r * in.groups + g32), total);
          store(to, total);
        });
      });
    };
    if (scales.minimum)
      fold(std::true_type{});
    else
      fold(std::false_type{});
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
    if (kFromMemory<Mode, Reader> && s == 0) prefetch_bytes(codes + kAhead, static_cast<int>(block_bytes));
#pragma GCC unroll 1
    for (int q = 0; q < 4; q++, x += 8)
      Mode::template octet<Reader, R, C>(sum, codes + q * Reader::kOctetBytes, s, x, in.stride);
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(acc + r * 32 + (s + c) * 16, sum[r][c]);
}

// Row tiles over one span of blocks; codes: of block0, from the panel itself or widened.
template <class Mode, class Reader, int G>
void tile_rows(const Scales& scales, int block0, int blocks, const uint8_t* codes, int64_t block_bytes,
               Rows<typename Mode::Activation> in, int rows, float* acc) {
  const int tiles = (rows + Mode::kTile - 1) / Mode::kTile;
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
    unroll<Mode::kTile>([&](auto i) {
      if (n == i + 1) run(std::integral_constant<int, i + 1>{});
    });
    row += n;
  }
}

template <class Mode, class Reader, int G>
void panel_rows(const Matrix& m, const uint8_t* panel, Rows<typename Mode::Activation> in, int rows,
                PanelScratch& scratch) {
  const Scales scales(m, panel);
  std::memset(scratch.acc, 0, sizeof(float) * 32 * rows);
  if constexpr (requires { typename Mode::Wide; }) {
    if (rows >= Mode::kWidenFrom) {
      using Wide = typename Mode::Wide;
      constexpr int kBlocks = kWideBlocks * 4096 / Mode::kWideBytes;
      for (int b = 0; b < m.blocks; b += kBlocks) {
        const int n = b + kBlocks <= m.blocks ? kBlocks : m.blocks - b;
        uint8_t* to = scratch.wide;
        for (int i = 0; i < n; i++) {
          prefetch_bytes(panel + (b + i) * m.block_bytes + kAhead, static_cast<int>(m.block_bytes));
          for (int q = 0; q < 4; q++, to += Wide::kOctetBytes)
            Mode::template widen_octet<Reader>(panel + (b + i) * m.block_bytes + q * Reader::kOctetBytes, to);
        }
        tile_rows<Mode, Wide, G>(scales, b, n, scratch.wide, 4 * Wide::kOctetBytes, in, rows, scratch.acc);
      }
      return;
    }
  }
  tile_rows<Mode, Reader, G>(scales, 0, m.blocks, panel, m.block_bytes, in, rows, scratch.acc);
}

inline bool has_codes(const Matrix& m) { return m.kind == kCodes4 || m.kind == kCodes8; }

// scratch.acc[row][32] = the panel's outputs for rows (at most kChunkRows); m has codes.
template <class Mode>
void multiply_codes(const Matrix& m, int panel, Rows<typename Mode::Activation> in, int rows, PanelScratch& scratch) {
  const uint8_t* weights = m.data + static_cast<int64_t>(panel) * m.blocks * m.block_bytes;
  if (m.kind == kCodes4) return panel_rows<Mode, Codes4, 32>(m, weights, in, rows, scratch);
  if (m.group == 16) return panel_rows<Mode, Codes8, 16>(m, weights, in, rows, scratch);
  return panel_rows<Mode, Codes8, 32>(m, weights, in, rows, scratch);
}

// The same for the other kinds.
template <class Mode>
void multiply_numbers(const Matrix& m, int panel, Rows<typename Mode::Activation> in, int rows, PanelScratch& scratch) {
  const uint8_t* weights = m.data + static_cast<int64_t>(panel) * m.blocks * m.block_bytes;
  if (m.kind == kBf16) return panel_rows<Mode, WordsBf16, 0>(m, weights, in, rows, scratch);
  if (m.kind == kF16) return panel_rows<Mode, WordsF16, 0>(m, weights, in, rows, scratch);
  return panel_rows<Mode, WordsF32, 0>(m, weights, in, rows, scratch);
}

}  // namespace offbook
