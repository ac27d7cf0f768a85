// Attention of single rows over paged KV, in one fixed order.
//
// The contract: a row and query head take the sequence's positions in partitions of kPartition, counted from 0. In a
// partition, scores: dimensions in pairs (odd fma, then even), pairs alternate between two sums that are added at the
// end. Weights p = 2^(score - the partition's largest) are rounded as activations are; lane i of 16 sums the weights of
// positions i, i + 16...; positions in pairs (odd, then even) add p V to the output. Partitions are merged in ascending
// order (`merge`). Nothing is read from positions after the row's own, so what a recycled block still holds can never
// leak. Who computes a partition, and beside which other rows, shows in no bit.
#pragma once
#include "matmul.h"

namespace offbook {

constexpr int kPartition = 256;
constexpr int kTileQueries = 8;                        // rows of one sequence that share a walk over its KV
constexpr int kBlocksAtOnce = kVectors >= 32 ? 2 : 1;  // blocks whose scores are summed side by side
constexpr int kColumns = kVectors >= 32 ? 4 : 2;       // vectors of the output that are

// K: [dimension / 2][16 positions][2], V: [8 position pairs][dimension][2].
struct KvBf16 {
  using Element = uint16_t;
  static constexpr bool kFromMemory = true;
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
  static constexpr bool kFromMemory = true;
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

// A bf16 block widened for several rows, in the first-level cache: nothing to ask memory for.
struct KvWide : KvF32 {
  static constexpr bool kFromMemory = false;
};

// What a partition, or several merged ones, leave of one query head: 16 partial sums of weights, output, largest score.
struct Partial {
  float* at;
  int dims;
  static int64_t floats(int dims) { return 32 + dims; }
  float* sum() const { return at; }
  float* out() const { return at + 16; }
  float& max() const { return at[16 + dims]; }
  Partial head(int64_t h) const { return {at + h * floats(dims), dims}; }
  void start() const {
    std::memset(at, 0, sizeof(float) * floats(dims));
    max() = -1e30f;
  }
};

// total = total and part, which comes after it.
inline void merge(Partial total, Partial part) {
  const float before = total.max(), highest = part.max(), now = highest > before ? highest : before;
  const F16x old = exp2_lanes(set1(before - now)), more = exp2_lanes(set1(highest - now));
  for (int i = 0; i < 16 + total.dims; i += 16)
    store(total.at + i, fma(load(part.at + i), more, mul(load(total.at + i), old)));
  total.max() = now;
}

// score[h] of B blocks for H query heads.
template <class Mode, class Kv, int H, int B>
OFFBOOK_INLINE void pair_scores(const typename Kv::Element* const (&k)[B], int dims, const typename Mode::Activation* q,
                                const typename Kv::Element* const (&ahead)[B], F16x (&score)[B][H]) {
  F16x sum[2][B][H];
  for (auto& half : sum)
    for (auto& block : half)
      for (auto& v : block) v = zero();
#pragma GCC unroll 1
  for (int pair = 0; pair < dims / 2; pair += 2) {
    unroll<2>([&](auto e) OFFBOOK_LAMBDA {
      const auto* x = q + 2 * (pair + e);
      for (int b = 0; Kv::kFromMemory && b < B; b++)
        prefetch_bytes_l2(ahead[b] + (pair + e) * 32, 32 * int{sizeof(*ahead[b])});
#if OFFBOOK_PAIR_DOT
      if constexpr (std::is_same_v<Mode, PairMode>) {
        unroll<H>([&](auto h) OFFBOOK_LAMBDA {
          const Pair two = pair_bits(broadcast_two(x + h * dims));
          unroll<B>([&](auto b) OFFBOOK_LAMBDA {
            sum[e][b][h] = dot_pair(sum[e][b][h], load_pair(k[b] + (pair + e) * 32), two);
          });
        });
        return;
      } else
#endif
      {
        F16x odd[B], even[B];
        for (int b = 0; b < B; b++) odd[b] = Kv::k_odd(k[b], pair + e), even[b] = Kv::k_even(k[b], pair + e);
        unroll<H>([&](auto h) OFFBOOK_LAMBDA {
          const F16x two = broadcast(x + h * dims + 1);
          for (int b = 0; b < B; b++) sum[e][b][h] = fma(odd[b], two, sum[e][b][h]);
        });
        unroll<H>([&](auto h) OFFBOOK_LAMBDA {
          const F16x one = broadcast(x + h * dims);
          for (int b = 0; b < B; b++) sum[e][b][h] = fma(even[b], one, sum[e][b][h]);
        });
      }
    });
  }
  for (int b = 0; b < B; b++)
    for (int h = 0; h < H; h++) score[b][h] = add(sum[0][b][h], sum[1][b][h]);
}

// to[head][kPartition] of B blocks, for H query heads of one row.
template <class Mode, class Kv, int H, int B>
__attribute__((noinline)) void block_scores(const typename Kv::Element* const (&k)[B], int dims, float scale,
                                            const typename Mode::Activation* q,
                                            const typename Kv::Element* const (&ahead)[B], float* to) {
  F16x score[B][H];
  pair_scores<Mode, Kv, H, B>(k, dims, q, ahead, score);
  for (int b = 0; b < B; b++)
    for (int h = 0; h < H; h++) store(to + h * kPartition + 16 * b, mul(score[b][h], set1(scale)));
}

// One head's scores -> weights, their sums and the largest; valid: how many positions of the partition the row may see.
template <bool kRound, class T>
void partition_weights(const float* scores, int valid, T* weights, Partial part) {
  F16x top = set1(-1e30f);
  for (int i = 0; i < valid; i += 16) {
    const Mask seen = first_lanes(valid - i < 16 ? valid - i : 16);
    top = maximum(top, select(seen, load(scores + i), set1(-1e30f)));
  }
  const float highest = reduce_max(top);
  F16x sum = zero();
  for (int i = 0; i < valid; i += 16) {
    const Mask seen = first_lanes(valid - i < 16 ? valid - i : 16);
    F16x p = select(seen, exp2_lanes(sub(load(scores + i), set1(highest))), zero());
    if (kRound) p = round_bf16(p);
    sum = add(sum, p);
    store_activation(weights + i, p);
  }
  store(part.sum(), sum);
  part.max() = highest;
}

// out += a pair of positions as floats, the odd one only where it is the row's: else the pair product adds +0 for it.
template <class Kv, int H, int C>
OFFBOOK_INLINE void float_columns(const typename Kv::Element* v, int dims, int d0, int pair, bool both,
                                  const float* weights, F16x (&out)[H][C]) {
  const float* w = weights + 2 * pair;
  if (both) {
    unroll<C>([&](auto c) OFFBOOK_LAMBDA {
      const F16x odd = Kv::v_odd(v, dims, pair, d0 + 16 * c);
      unroll<H>([&](auto h) OFFBOOK_LAMBDA { out[h][c] = fma(odd, broadcast(w + h * kPartition + 1), out[h][c]); });
    });
  } else {
    for (int h = 0; h < H; h++)
      for (int c = 0; c < C; c++) out[h][c] = add(out[h][c], zero());
  }
  unroll<C>([&](auto c) OFFBOOK_LAMBDA {
    const F16x even = Kv::v_even(v, dims, pair, d0 + 16 * c);
    unroll<H>([&](auto h) OFFBOOK_LAMBDA { out[h][c] = fma(even, broadcast(w + h * kPartition), out[h][c]); });
  });
}

// C vectors of the outputs, from dimension d0 on, of H heads += weights times values of one block; valid: 1..16.
template <class Mode, class Kv, int H, int C>
OFFBOOK_INLINE void block_columns(const typename Kv::Element* v, int dims, int d0, int valid,
                                  const typename Mode::Activation* weights, const typename Kv::Element* ahead,
                                  Partial part) {
  F16x out[H][C];
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) out[h][c] = load(part.head(h).out() + d0 + 16 * c);
#pragma GCC unroll 1
  for (int pair = 0; pair < (valid + 1) / 2; pair++) {
    if (Kv::kFromMemory) prefetch_bytes_l2(ahead + 2 * (pair * dims + d0), 32 * C * int{sizeof(*ahead)});
#if OFFBOOK_PAIR_DOT
    if constexpr (std::is_same_v<Mode, PairMode>) {
      const I16x keep = set1i(2 * pair + 1 < valid ? -1 : 0xffff);
      for (int c = 0; c < C; c++) {
        const Pair w = pair_bits(bit_and(loadi(v + (pair * dims + d0 + 16 * c) * 2), keep));
        unroll<H>([&](auto h) OFFBOOK_LAMBDA {
          out[h][c] = dot_pair(out[h][c], w, pair_bits(broadcast_two(weights + h * kPartition + 2 * pair)));
        });
      }
      continue;
    }
#endif
    if constexpr (std::is_same_v<Mode, FloatMode>)
      float_columns<Kv, H, C>(v, dims, d0, pair, 2 * pair + 1 < valid, weights, out);
  }
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) store(part.head(h).out() + d0 + 16 * c, out[h][c]);
}

template <class Mode, class Kv, int H>
__attribute__((noinline)) void block_values(const typename Kv::Element* v, int dims, int valid,
                                            const typename Mode::Activation* weights,
                                            const typename Kv::Element* ahead, Partial part) {
  int d = 0;
  for (; d + 16 * kColumns <= dims; d += 16 * kColumns)
    block_columns<Mode, Kv, H, kColumns>(v, dims, d, valid, weights, ahead, part);
  for (; d < dims; d += 16) block_columns<Mode, Kv, H, 1>(v, dims, d, valid, weights, ahead, part);
}

// Calls run(first head, integral_constant of how many) for `heads` heads, kHeadsAtOnce at a time.
template <class F>
OFFBOOK_INLINE void some_heads(int heads, F&& run) {
  for (int h = 0; h < heads; h += kHeadsAtOnce)
    unroll<kHeadsAtOnce>([&](auto i) OFFBOOK_LAMBDA {
      constexpr int n = i + 1;
      if (heads - h == n || (n == kHeadsAtOnce && heads - h > n)) run(h, std::integral_constant<int, n>{});
    });
}

// bf16 K or V of a block as floats, in the layout of KvF32.
inline void widen_k(const uint16_t* k, int dims, float* to) {
  for (int pair = 0; pair < dims / 2; pair++) {
    store(to + pair * 32, KvBf16::k_even(k, pair));
    store(to + pair * 32 + 16, KvBf16::k_odd(k, pair));
  }
}
inline void widen_v(const uint16_t* v, int dims, float* to) {
  for (int pair = 0; pair < 8; pair++)
    for (int d = 0; d < dims; d += 16) {
      store(to + 2 * pair * dims + d, KvBf16::v_even(v, dims, pair, d));
      store(to + (2 * pair + 1) * dims + d, KvBf16::v_odd(v, dims, pair, d));
    }
}

}  // namespace offbook
