// The C interface of the CPU device: plain structs that Python fills (kernels/cpu_layout.py mirrors them field by
// field) and the functions it calls. No model's constants live in C++: sizes and pointers come from here.
#pragma once
#include <cstdint>

namespace offbook {

enum Kind : int32_t { kCodes4 = 0, kCodes8 = 1, kBf16 = 2, kF16 = 3, kF32 = 4 };
enum Minimum : int32_t { kNone = 0, kStored = 1, kMinusEight = 2 };  // kMinusEight: the min is -8 scale (Q4_0)

// A weight matrix in panels of 32 outputs: [panels][blocks][block_bytes], a block is 32 outputs x 32 inputs.
struct Matrix {
  const uint8_t* data;
  int32_t kind, group, scale_bytes, minimum;  // group: inputs a scale covers (32 or 16; 0 = no scales)
  int32_t panels, blocks;
  int64_t block_bytes;
};

struct Layer {
  Matrix q, k, v, o, gate_up, down;  // gate_up: panels of 16 gate outputs and the same 16 up outputs
  const float *attention_norm, *ffn_norm;
  const float *q_bias, *k_bias, *v_bias;  // null = none; padded to the panels
  const float *q_norm, *k_norm;           // null = none; [head_dim]
};

struct Model {
  int32_t n_layers, hidden, hidden_padded, heads, kv_heads, head_dim, ffn_padded, vocabulary;
  int32_t bf16;  // activations and KV: 1 = bf16, 0 = float32
  float norm_epsilon;
  const Layer* layers;
  Matrix embedding, head;
  const float* output_norm;
  const float *rope_cos, *rope_sin;  // [positions][head_dim / 2]
  uint8_t* kv;                       // [n_layers][kv_blocks][kv_heads][K then V of 16 positions]
  int64_t kv_blocks;
};

struct Batch {
  int32_t rows, table_width, copies, logit_rows;
  const int32_t *tokens, *positions, *row_sequence, *block_tables, *copy_pairs, *logit_row;
};

constexpr int kBlockTokens = 16;

}  // namespace offbook
