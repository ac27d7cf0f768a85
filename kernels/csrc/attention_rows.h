// Attention of some rows of one sequence, a partition of its positions at a time: over attention.h's blocks.
//
// Rules of this file: rows share the walk over the KV and nothing else. Three passes over a partition (scores, weights,
// values) keep each inner loop free of the others' waits.
#pragma once
#include <algorithm>
#include <cmath>

#include "step_inputs.h"

namespace offbook {

// At most kTileQueries rows of one sequence, `stride` apart in q and out.
template <class Activation>
struct QueryRows {
  int count;
  const int32_t *positions, *table;
  const Activation* q;
  float* out;
  int64_t stride;
};

template <class Config>
class Attention {
 public:
  using Mode = typename Config::Mode;
  using Kv = typename Config::Kv;
  using Activation = typename Mode::Activation;
  using Element = typename Kv::Element;
  using Queries = QueryRows<Activation>;

  Attention(const Model& model, const Element* layer_kv, int kv_head, const Queries& rows, float* scratch)
      : dims_(model.head_dim),
        repeats_(model.heads / model.kv_heads),
        kv_heads_(model.kv_heads),
        head_block_(kBlockTokens * dims_),
        scale_(1.0f / std::sqrt(static_cast<float>(dims_)) * kLog2E),
        kv_head_(kv_head),
        kv_(layer_kv),
        rows_(rows),
        wide_(scratch),
        scores_(wide_ + kBlocksAtOnce * 16 * dims_),
        weights_(reinterpret_cast<Activation*>(scores_ + kTileQueries * repeats_ * kPartition)),
        parts_(scores_ + 2 * kTileQueries * repeats_ * kPartition),
        last_(*std::max_element(rows.positions, rows.positions + rows.count)) {}

  static int64_t scratch_floats(const Model& m) {
    const int64_t heads = kTileQueries * (m.heads / m.kv_heads);
    return kBlocksAtOnce * 16 * m.head_dim + heads * (2 * kPartition + 2 * Partial::floats(m.head_dim));
  }

  // All partitions of the rows.
  void run() {
    const int heads = rows_.count * repeats_;
    const Partial part{parts_, dims_}, total = part.head(heads);
    for (int h = 0; h < heads; h++) total.head(h).start();
    for (int p = 0; p <= last_ / kPartition; p++) {
      partition(p, part);
      add(p, part, total);
    }
    finish(total);
  }

  // part.head(row * heads of the KV head + head), for the rows that see partition p.
  void partition(int p, Partial part) {
    first_ = p * (kPartition / 16);
    blocks_ = std::min(kPartition / 16, last_ / 16 + 1 - first_);
    constexpr bool kWidens = std::is_same_v<Kv, KvBf16> && std::is_same_v<Mode, FloatMode>;
    if constexpr (kWidens)
      if (rows_.count > 1) return passes<KvWide>(part);
    passes<Kv>(part);
  }

  // Merges partitions, partition p being parts.head(p * rows * heads).
  void combine(int partitions, Partial parts) {
    const int heads = rows_.count * repeats_;
    const Partial total{parts_, dims_};
    for (int h = 0; h < heads; h++) total.head(h).start();
    for (int p = 0; p < partitions; p++) add(p, parts.head(int64_t{p} * heads), total);
    finish(total);
  }

 private:
  void add(int p, Partial part, Partial total) {
    for (int r = 0; r < rows_.count; r++)
      for (int h = r * repeats_; rows_.positions[r] >= p * kPartition && h < (r + 1) * repeats_; h++)
        merge(total.head(h), part.head(h));
  }

  void finish(Partial total) {
    for (int r = 0; r < rows_.count; r++)
      for (int h = 0; h < repeats_; h++) {
        const Partial from = total.head(r * repeats_ + h);
        float* to = rows_.out + r * rows_.stride + (kv_head_ * repeats_ + h) * dims_;
        const F16x whole = set1(1.0f / reduce_add(load(from.sum())));
        for (int d = 0; d < dims_; d += 16) store(to + d, mul(load(from.out() + d), whole));
      }
  }

  template <class View>
  void passes(Partial part) {
    for (int b = 0; b < blocks_; b += kBlocksAtOnce) {
      if (b + kBlocksAtOnce <= blocks_)
        scores<View, kBlocksAtOnce>(b);
      else
        for (int i = b; i < blocks_; i++) scores<View, 1>(i);
    }
    for (int r = 0; r < rows_.count; r++) {
      const int valid = std::min(kPartition, rows_.positions[r] + 1 - first_ * 16);
      for (int h = r * repeats_; valid > 0 && h < (r + 1) * repeats_; h++) {
        part.head(h).start();
        partition_weights<Config::kRound>(scores_ + h * kPartition, valid, weights_ + h * kPartition, part.head(h));
      }
    }
    for (int b = 0; b < blocks_; b++) values<View>(b, part);
  }

  template <class View, int B>
  void scores(int b) {
    const typename View::Element *k[B], *ahead[B];
    for (int i = 0; i < B; i++) {
      if constexpr (View::kFromMemory) {
        k[i] = chunk(b + i);
        ahead[i] = chunk(b + i + kAheadBlocks);
      } else {
        prefetch_bytes_l2(chunk(b + i + kAheadBlocks), 16 * dims_ * int{sizeof(Element)});
        widen_k(chunk(b + i), dims_, wide_ + i * 16 * dims_);
        k[i] = ahead[i] = wide_ + i * 16 * dims_;
      }
    }
    for (int r = 0; r < rows_.count; r++)
      if (rows_.positions[r] >= (first_ + b) * 16)
        some_heads(repeats_, [&](int h, auto n) OFFBOOK_LAMBDA {
          block_scores<Mode, View, n, B>(k, dims_, scale_, queries(r, h), ahead,
                                         scores_ + (r * repeats_ + h) * kPartition + 16 * b);
        });
  }

  template <class View>
  void values(int b, Partial part) {
    const typename View::Element *v, *ahead;
    if constexpr (View::kFromMemory) {
      v = chunk(blocks_ + b);
      ahead = chunk(blocks_ + b + kAheadBlocks);
    } else {
      prefetch_bytes_l2(chunk(blocks_ + b + kAheadBlocks), 16 * dims_ * int{sizeof(Element)});
      widen_v(chunk(blocks_ + b), dims_, wide_);
      v = ahead = wide_;
    }
    for (int r = 0; r < rows_.count; r++) {
      const int valid = std::min(16, rows_.positions[r] + 1 - (first_ + b) * 16);
      if (valid > 0)
        some_heads(repeats_, [&](int h, auto n) OFFBOOK_LAMBDA {
          block_values<Mode, View, n>(v, dims_, valid, weights_ + (r * repeats_ + h) * kPartition + 16 * b, ahead,
                                      part.head(r * repeats_ + h));
        });
    }
  }

  // What the passes read, in order: K of the partition's blocks, their V, K of the next partition; then the last again.
  const Element* chunk(int i) const {
    const bool values = i >= blocks_ && i < 2 * blocks_;
    const int number = std::min(first_ + (i < blocks_ ? i : i - blocks_), last_ / 16);
    return kv_ + (int64_t{rows_.table[number]} * kv_heads_ + kv_head_) * 2 * head_block_ + (values ? head_block_ : 0);
  }

  const Activation* queries(int row, int head) const {
    return rows_.q + row * rows_.stride + (int64_t{kv_head_} * repeats_ + head) * dims_;
  }

  static constexpr int kAheadBlocks = 4;
  const int dims_, repeats_, kv_heads_, head_block_;
  const float scale_;
  const int kv_head_;
  const Element* kv_;
  const Queries rows_;
  float *wide_, *scores_;
  Activation* weights_;
  float* parts_;
  const int last_;
  int first_ = 0, blocks_ = 0;
};

}  // namespace offbook
