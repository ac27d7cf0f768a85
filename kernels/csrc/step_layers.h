// The pieces of a step between the products: norms, rotary embedding, KV writes.
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

}  // namespace offbook
