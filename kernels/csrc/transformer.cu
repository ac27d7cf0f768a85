// A transformer's step between the matrix products, as CUDA kernels of THREADS threads a block.
//
// Rules of this file: addresses of a step are the same in every step and what changes is read from device memory, so
// that a captured graph can be replayed with other contents. Kernels of rows have a block a row; attend and fold have
// any number of blocks, which stride over the items.
#include "paged_attention.cuh"
#include "transformer_rows.cuh"

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

KERNEL offbook_embed(const int* token_ids, const Element* embedding, float* x, int n) {
  embed_row(token_ids, embedding, x, n);
}

KERNEL offbook_norm(const int* picks, float* x, const Element* delta, const float* weight, Element* out, int n,
                    float eps) {
  norm_row(picks, x, delta, weight, out, n, eps);
}

KERNEL offbook_rotate(const Rotation* rotation, const int* positions, const int* places, const Element* qkv, float* q,
                      Element* keys, Element* values) {
  rotate_row(*rotation, positions, places, qkv, q, keys, values);
}

KERNEL offbook_attend(const AttentionStep* step, const float* q, const Element* keys, const Element* values,
                      Element* out) {
  attend(*step, q, keys, values, out);
}

KERNEL offbook_fold(const AttentionStep* step, Element* out) { fold_rows(*step, out); }

KERNEL offbook_gate(const Element* gate_up, Element* out, int n) { gate_row(gate_up, out, n); }
