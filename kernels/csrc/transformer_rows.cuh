// The parts of a layer that work on one row each: embedding, RMSNorm, rotary embedding, the MLP's gate.
//
// Rules of this file: a block works on one row and reads no other; float32 inside, Element at the products' sides.
#pragma once

#include "transformer_math.cuh"

// x[row] = embedding[token of the row]
DEVICE void embed_row(const int* token_ids, const Element* embedding, float* x, int n) {
  const long long row = blockIdx.x;
  const Element* from = embedding + (long long)token_ids[row] * n;
  for (int i = threadIdx.x; i < n; i += THREADS) x[row * n + i] = widen(from[i]);
}

// RMSNorm (https://arxiv.org/abs/1910.07467) of x + delta into out. Without picks, row r of all three, and x becomes
// x + delta; with picks, out[r] is made from row picks[r] and x stays. No delta: null.
DEVICE void norm_row(const int* picks, float* x, const Element* delta, const float* weight, Element* out, int n,
                     float eps) {
  __shared__ float part[WARPS];
  const long long row = picks ? picks[blockIdx.x] : (int)blockIdx.x;
  float* from = x + row * n;
  const Element* add = delta ? delta + row * n : nullptr;
  Element* to = out + (long long)blockIdx.x * n;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const float value = add ? from[i] + widen(add[i]) : from[i];
    if (add && !picks) from[i] = value;
    squares = fused(value, value, squares);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = squares;
  __syncthreads();
  const float mean = ((part[0] + part[1]) + (part[2] + part[3])) / (float)n;
  const float scale = 1.0f / sqrtf(mean + eps);
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const float value = add && picks ? from[i] + widen(add[i]) : from[i];
    to[i] = narrow(value * scale * weight[i]);
  }
}

struct Rotation {
  const float* cosines;  // [context, HALF]
  const float* sines;
  const float* bias;    // [(heads + 2 * kv_heads) * HEAD_DIM], or null
  const float* q_norm;  // [HEAD_DIM], or null
  const float* k_norm;
  long long cache_places;  // places of the cache a head has
  int heads, kv_heads;
  float eps;
  int unused;
};

// One row's projections [heads + 2 * kv_heads][HEAD_DIM] -> rotated queries, and its key and value into the cache.
// A place is block * BLOCK_TOKENS + offset. Half-split layout (https://arxiv.org/abs/2104.09864): pairs are
// (i, i + HALF). A warp works on one head at a time.
DEVICE void rotate_row(const Rotation& a, const int* positions, const int* places, const Element* qkv, float* q,
                       Element* keys, Element* values) {
  const long long row = blockIdx.x;
  const int lane = threadIdx.x % WARP, all = a.heads + 2 * a.kv_heads;
  const Element* from = qkv + row * all * HEAD_DIM;
  const float* cosines = a.cosines + (long long)positions[row] * HALF;
  const float* sines = a.sines + (long long)positions[row] * HALF;
  for (int h = threadIdx.x / WARP; h < all; h += WARPS) {
    const bool is_q = h < a.heads, is_v = h >= a.heads + a.kv_heads;
    const float* norm = is_q ? a.q_norm : is_v ? nullptr : a.k_norm;
    const int kv = h - a.heads - (is_v ? a.kv_heads : 0);
    const long long at = (kv * a.cache_places + places[row]) * HEAD_DIM;
    auto input = [&](int d) {
      const float value = widen(from[h * HEAD_DIM + d]);
      return a.bias ? value + a.bias[h * HEAD_DIM + d] : value;
    };
    float scale = 1.0f;
    if (norm) {
      float squares = 0.0f;
      for (int d = lane; d < HEAD_DIM; d += WARP) squares = fused(input(d), input(d), squares);
      scale = 1.0f / sqrtf(warp_sum(squares) / (float)HEAD_DIM + a.eps);
    }
    for (int i = lane; i < HALF; i += WARP) {
      float low = input(i), high = input(i + HALF);
      if (norm) low = low * scale * norm[i], high = high * scale * norm[i + HALF];
      if (is_v) {
        values[at + i] = narrow(low), values[at + i + HALF] = narrow(high);
        continue;
      }
      const float first = low * cosines[i] - high * sines[i], second = high * cosines[i] + low * sines[i];
      if (is_q) {
        float* to = q + (row * a.heads + h) * HEAD_DIM;
        to[i] = first, to[i + HALF] = second;
      } else {
        keys[at + i] = narrow(first), keys[at + i + HALF] = narrow(second);
      }
    }
  }
}

// out[row] = silu(gate) * up of a row [gate | up] (https://arxiv.org/abs/2002.05202)
DEVICE void gate_row(const Element* gate_up, Element* out, int n) {
  const long long row = blockIdx.x;
  const Element* from = gate_up + 2 * row * n;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const float gate = widen(from[i]);
    const float small = exp_negative(gate < 0.0f ? gate : -gate);
    const float sigmoid = (gate < 0.0f ? small : 1.0f) / (1.0f + small);
    out[row * n + i] = narrow(gate * sigmoid * widen(from[i + n]));
  }
}
