// The pieces of a step between the products: norms, rotary embedding, KV writes, attention of a tile of rows.
#pragma once
#include <cmath>

#include "step_inputs.h"

namespace offbook {

// 1 / rms of n_padded floats of which n count (the others are 0); n_padded is a multiple of 16.
inline float inverse_rms(const float* x, int n, int n_padded, float epsilon) {
  F16x sum[2] = {zero(), zero()};
  for (int i = 0; i < n_padded; i += 16) {
    const F16x v = load(x + i);
    sum[i / 16 % 2] = fma(v, v, sum[i / 16 % 2]);
  }
  return 1.0f / std::sqrt(reduce_add(add(sum[0], sum[1])) / static_cast<float>(n) + epsilon);
}

inline void rms_norm(const float* x, const float* weight, int n, int n_padded, float epsilon, float* out) {
  const F16x scale = set1(inverse_rms(x, n, n_padded, epsilon));
  for (int i = 0; i < n_padded; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// One head in place: optional norm, then the rotation of (i, i + dims / 2) by the position's angles.
inline void turn_head(float* x, const float* norm, const float* cosine, const float* sine, int dims, float epsilon) {
  if (norm) {
    const F16x scale = set1(inverse_rms(x, dims, dims, epsilon));
    for (int d = 0; d < dims; d += 16) store(x + d, mul(mul(load(x + d), scale), load(norm + d)));
  }
  const int half = dims / 2;
  for (int i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    const float bs = b * sine[i], as = a * sine[i];
    x[i] = __builtin_fmaf(a, cosine[i], -bs);
    x[i + half] = __builtin_fmaf(b, cosine[i], as);
  }
}

// Query, key and value of one KV head of one row: qkv -> q, and the position's place in the KV block.
template <class Config>
void prepare_head(const Model& model, const Layer& layer, float* q_row, float* k_row, float* v_row, int kv_head,
                  int position, typename Config::Mode::Activation* q_out, typename Config::Kv::Element* block) {
  using Kv = typename Config::Kv;
  const int dims = model.head_dim, repeats = model.heads / model.kv_heads, in_block = position % kBlockTokens;
  const float* cosine = model.rope_cos + static_cast<int64_t>(position) * (dims / 2);
  const float* sine = model.rope_sin + static_cast<int64_t>(position) * (dims / 2);
  for (int h = kv_head * repeats; h < (kv_head + 1) * repeats; h++) {
    float* x = q_row + h * dims;
    turn_head(x, layer.q_norm, cosine, sine, dims, model.norm_epsilon);
    for (int d = 0; d < dims; d += 16) store_activation(q_out + h * dims + d, activation<Config::kRound>(load(x + d)));
  }
  float* k = k_row + kv_head * dims;
  float* v = v_row + kv_head * dims;
  turn_head(k, layer.k_norm, cosine, sine, dims, model.norm_epsilon);
  alignas(64) typename Kv::Element lanes[16];
  auto* k_block = block;
  auto* v_block = block + kBlockTokens * dims;
  for (int d = 0; d < dims; d += 16) {
    store_activation(lanes, activation<Config::kRound>(load(k + d)));
    for (int i = 0; i < 16; i++) k_block[Kv::k_index(d + i, in_block)] = lanes[i];
    store_activation(lanes, activation<Config::kRound>(load(v + d)));
    for (int i = 0; i < 16; i++) v_block[Kv::v_index(dims, d + i, in_block)] = lanes[i];
  }
}

// Rows first..first+count-1 of one sequence (at most kTileQueries) against one KV head.
struct QueryTile {
  int first, count;
};

template <class Config>
class Attention {
 public:
  using Activation = typename Config::Mode::Activation;
  using Element = typename Config::Kv::Element;

  Attention(const Model& model, const Element* layer_kv, float* scratch)
      : model_(model), kv_(layer_kv), scratch_(scratch) {}

  static int64_t scratch_floats(const Model& m) {
    return 32 * m.head_dim + kTileQueries * (m.heads / m.kv_heads) * Softmax::floats(m.head_dim);
  }

  // q, out: rows of heads * head_dim from the tile's first row on, `stride` apart.
  void run(int kv_head, int count, const int32_t* positions, const int32_t* table, const Activation* q, float* out,
           int64_t stride) {
    const int dims = model_.head_dim, repeats = model_.heads / model_.kv_heads;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dims)) * kLog2E;
    Softmax states[kTileQueries][64];
    int last = 0;
    for (int r = 0; r < count; r++) {
      for (int h = 0; h < repeats; h++) {
        states[r][h].at = scratch_ + 32 * dims + (r * repeats + h) * Softmax::floats(dims);
        states[r][h].start(dims);
      }
      last = positions[r] > last ? positions[r] : last;
    }
    for (int b = 0; b <= last / kBlockTokens; b++) {
      const Element* block = block_of(table[b], kv_head);
      if (b + 2 <= last / kBlockTokens)
        prefetch_bytes_l2(block_of(table[b + 2], kv_head), 32 * dims * static_cast<int>(sizeof(Element)));
      const bool widen = count > 1 && sizeof(Element) == 2 && std::is_same_v<typename Config::Mode, FloatMode>;
      if constexpr (std::is_same_v<typename Config::Kv, KvBf16>)
        if (widen) widen_kv(block, dims, scratch_);
      for (int r = 0; r < count; r++) {
        const int left = positions[r] - b * kBlockTokens + 1, valid = left < kBlockTokens ? left : kBlockTokens;
        if (valid <= 0) continue;
        const Activation* rows = q + r * stride + static_cast<int64_t>(kv_head) * repeats * dims;
        if (widen)
          attend_wide(valid, scale, rows, states[r]);
        else
          attend_heads<typename Config::Mode, typename Config::Kv, Config::kRound>(
              block, block + kBlockTokens * dims, dims, valid, scale, repeats, rows, states[r]);
      }
    }
    for (int r = 0; r < count; r++)
      for (int h = 0; h < repeats; h++) finish(states[r][h], out + r * stride + (kv_head * repeats + h) * dims);
  }

 private:
  const Element* block_of(int32_t block, int kv_head) const {
    return kv_ + (static_cast<int64_t>(block) * model_.kv_heads + kv_head) * 2 * kBlockTokens * model_.head_dim;
  }
  void attend_wide(int valid, float scale, const Activation* q, const Softmax* states) {
    if constexpr (std::is_same_v<typename Config::Mode, FloatMode>)
      attend_heads<FloatMode, KvF32, Config::kRound>(scratch_, scratch_ + kBlockTokens * model_.head_dim,
                                                     model_.head_dim, valid, scale, model_.heads / model_.kv_heads, q,
                                                     states);
  }
  void finish(Softmax state, float* out) const {
    const F16x whole = set1(1.0f / reduce_add(load(state.sum())));
    for (int d = 0; d < model_.head_dim; d += 16)
      store(out + d, mul(load(state.out() + d), whole));
  }

  const Model& model_;
  const Element* kv_;
  float* scratch_;
};

}  // namespace offbook
