// Attention of single rows over paged KV, in one fixed order.
//
// The contract: a row and KV head walk the sequence's blocks of 16 positions in ascending order with an online softmax.
// Scores: dimensions in pairs (odd fma, then even), pairs alternate between two sums that are added at the end.
// Weights p = 2^(score - max) are rounded as activations are; positions in pairs (odd, then even) add p V to the
// output. Nothing is read from positions after the row's own, so what a recycled block still holds can never leak.
#pragma once
#include "matmul.h"

namespace offbook {

constexpr int kTileQueries = 8;  // rows of one sequence that share a walk over its KV

// K: [dimension / 2][16 positions][2], V: [8 position pairs][dimension][2].
struct KvBf16 {
  using Element = uint16_t;
  static OFFBOOK_INLINE F16x k_even(const Element* k, int pair) { return WordsBf16::at<0>(words(k + pair * 32), 0); }
  static OFFBOOK_INLINE F16x k_odd(const Element* k, int pair) { return WordsBf16::at<1>(words(k + pair * 32), 0); }
  static OFFBOOK_INLINE F16x v_even(const Element* v, int dims, int pair, int d) {
    return WordsBf16::at<0>(words(v + (pair * dims + d) * 2), 0);
  }
  static OFFBOOK_INLINE F16x v_odd(const Element* v, int dims, int pair, int d) {
    return WordsBf16::at<1>(words(v + (pair * dims + d) * 2), 0);
  }
  static int k_index(int d, int position) { return d / 2 * 32 + position * 2 + d % 2; }
  static int v_index(int dims, int d, int position) { return (position / 2 * dims + d) * 2 + position % 2; }

 private:
  static OFFBOOK_INLINE const uint8_t* words(const Element* p) { return reinterpret_cast<const uint8_t*>(p); }
};

// K: [dimension][16 positions], V: [16 positions][dimension].
struct KvF32 {
  using Element = float;
  static OFFBOOK_INLINE F16x k_even(const Element* k, int pair) { return load(k + pair * 32); }
  static OFFBOOK_INLINE F16x k_odd(const Element* k, int pair) { return load(k + pair * 32 + 16); }
  static OFFBOOK_INLINE F16x v_even(const Element* v, int dims, int pair, int d) {
    return load(v + 2 * pair * dims + d);
  }
  static OFFBOOK_INLINE F16x v_odd(const Element* v, int dims, int pair, int d) {
    return load(v + (2 * pair + 1) * dims + d);
  }
  static int k_index(int d, int position) { return d * 16 + position; }
  static int v_index(int dims, int d, int position) { return position * dims + d; }
};

// Running softmax of one query head: largest score, 16 partial sums, output.
struct Softmax {
  float* at;
  static int64_t floats(int dims) { return 32 + dims; }
  float& max() const { return at[16]; }
  float* sum() const { return at; }
  float* out() const { return at + 32; }
  void start(int dims) const {
    std::memset(at, 0, sizeof(float) * floats(dims));
    max() = -1e30f;
  }
};

template <class Mode, class Kv, int H>
OFFBOOK_INLINE void block_scores(const typename Kv::Element* k, int dims, const typename Mode::Activation* q,
                                 F16x (&score)[H]) {
  F16x sum[2][H];
  for (int h = 0; h < H; h++) sum[0][h] = sum[1][h] = zero();
#pragma GCC unroll 1
  for (int pair = 0; pair < dims / 2; pair += 2) {
    unroll<2>([&](auto e) OFFBOOK_LAMBDA {
      const auto* x = q + 2 * (pair + e);
#if OFFBOOK_PAIR_DOT
      if constexpr (std::is_same_v<Mode, PairMode>) {
        const Pair w = load_pair(k + (pair + e) * 32);
        unroll<H>([&](auto h) OFFBOOK_LAMBDA {
          sum[e][h] = dot_pair(sum[e][h], w, pair_bits(broadcast_two(x + h * dims)));
        });
        return;
      } else
#endif
      {
        const F16x odd = Kv::k_odd(k, pair + e);
        unroll<H>([&](auto h) OFFBOOK_LAMBDA { sum[e][h] = fma(odd, broadcast(x + h * dims + 1), sum[e][h]); });
        const F16x even = Kv::k_even(k, pair + e);
        unroll<H>([&](auto h) OFFBOOK_LAMBDA { sum[e][h] = fma(even, broadcast(x + h * dims), sum[e][h]); });
      }
    });
  }
  for (int h = 0; h < H; h++) score[h] = add(sum[0][h], sum[1][h]);
}

// Folds a block's scores into the running softmax; weights[16] = this block's p, 0 where invalid.
template <bool kRound, class T>
OFFBOOK_INLINE void block_softmax(F16x score, int valid, int dims, Softmax state, T* weights) {
  const Mask seen = first_lanes(valid);
  const F16x masked = select(seen, score, set1(-1e30f));
  const float before = state.max(), highest = reduce_max(masked), now = highest > before ? highest : before;
  if (now != before) {
    const F16x shrink = exp2_lanes(set1(before - now));
    store(state.sum(), mul(load(state.sum()), shrink));
    for (int d = 0; d < dims; d += 16) store(state.out() + d, mul(load(state.out() + d), shrink));
    state.max() = now;
  }
  F16x p = select(seen, exp2_lanes(sub(masked, set1(now))), zero());
  if (kRound) p = round_bf16(p);
  store(state.sum(), add(load(state.sum()), p));
  store_activation(weights, p);
}

template <class Mode, class Kv, int H, int C>
OFFBOOK_INLINE void block_values(const typename Kv::Element* v, int dims, int d0, int valid,
                                 const typename Mode::Activation (&weights)[H][16], const Softmax* states) {
  F16x out[H][C];
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) out[h][c] = load(states[h].out() + d0 + 16 * c);
#if OFFBOOK_PAIR_DOT
  if constexpr (std::is_same_v<Mode, PairMode>) {
    for (int pair = 0; pair < (valid + 1) / 2; pair++) {
      const I16x keep = set1i(2 * pair + 1 < valid ? -1 : 0xffff);
      for (int c = 0; c < C; c++) {
        const Pair w = pair_bits(bit_and(loadi(v + (pair * dims + d0 + 16 * c) * 2), keep));
        for (int h = 0; h < H; h++) out[h][c] = dot_pair(out[h][c], w, pair_bits(broadcast_two(&weights[h][2 * pair])));
      }
    }
  } else
#endif
  {
#pragma GCC unroll 1
    for (int pair = 0; pair < (valid + 1) / 2; pair++) {
      if (2 * pair + 1 < valid) {
        for (int c = 0; c < C; c++) {
          const F16x odd = Kv::v_odd(v, dims, pair, d0 + 16 * c);
          unroll<H>([&](auto h)
                        OFFBOOK_LAMBDA { out[h][c] = fma(odd, broadcast(&weights[h][2 * pair + 1]), out[h][c]); });
        }
      } else {  // the odd position is not ours: what the pair product adds for it is +0
        for (int h = 0; h < H; h++)
          for (int c = 0; c < C; c++) out[h][c] = add(out[h][c], zero());
      }
      for (int c = 0; c < C; c++) {
        const F16x even = Kv::v_even(v, dims, pair, d0 + 16 * c);
        unroll<H>([&](auto h) OFFBOOK_LAMBDA { out[h][c] = fma(even, broadcast(&weights[h][2 * pair]), out[h][c]); });
      }
    }
  }
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) store(states[h].out() + d0 + 16 * c, out[h][c]);
}

// H query heads of one row against one block; valid: how many of its positions the row may see (1..16).
template <class Mode, class Kv, bool kRound, int H>
__attribute__((noinline)) void attend_block(const typename Kv::Element* k, const typename Kv::Element* v, int dims,
                                            int valid, float scale, const typename Mode::Activation* q,
                                            const Softmax* states) {
  F16x score[H];
  block_scores<Mode, Kv, H>(k, dims, q, score);
  alignas(64) typename Mode::Activation weights[H][16];
  unroll<H>([&](auto h) OFFBOOK_LAMBDA {
    block_softmax<kRound>(mul(score[h], set1(scale)), valid, dims, states[h], weights[h]);
  });
  int d = 0;
  for (; d + 32 <= dims; d += 32) block_values<Mode, Kv, H, 2>(v, dims, d, valid, weights, states);
  if (d < dims) block_values<Mode, Kv, H, 1>(v, dims, d, valid, weights, states);
}

// All query heads of one KV head, kHeadsAtOnce at a time; q: their rows of `dims`, one after another.
template <class Mode, class Kv, bool kRound>
void attend_heads(const typename Kv::Element* k, const typename Kv::Element* v, int dims, int valid, float scale,
                  int heads, const typename Mode::Activation* q, const Softmax* states) {
  for (int h = 0; h < heads; h += kHeadsAtOnce) {
    const auto* rows = q + static_cast<int64_t>(h) * dims;
    auto run = [&](auto n) { attend_block<Mode, Kv, kRound, n>(k, v, dims, valid, scale, rows, states + h); };
    unroll<kHeadsAtOnce>([&](auto i) {
      constexpr int n = i + 1;
      if (heads - h == n || (n == kHeadsAtOnce && heads - h > n)) run(std::integral_constant<int, n>{});
    });
  }
}

// A bf16 block (K then V) as floats, in the layout of KvF32.
inline void widen_kv(const uint16_t* block, int dims, float* to) {
  const uint16_t* v = block + 16 * dims;
  for (int pair = 0; pair < dims / 2; pair++) {
    store(to + pair * 32, KvBf16::k_even(block, pair));
    store(to + pair * 32 + 16, KvBf16::k_odd(block, pair));
  }
  to += 16 * dims;
  for (int pair = 0; pair < 8; pair++)
    for (int d = 0; d < dims; d += 16) {
      store(to + 2 * pair * dims + d, KvBf16::v_even(v, dims, pair, d));
      store(to + (2 * pair + 1) * dims + d, KvBf16::v_odd(v, dims, pair, d));
    }
}

}  // namespace offbook
