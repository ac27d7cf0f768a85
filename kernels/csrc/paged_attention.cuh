// Attention over a paged KV cache, in one fixed order.
//
// The contract: a query walks its own positions in partitions of step-independent length, counted from 0. Inside a
// partition an online softmax takes TILE positions at a time: scores add up over dimensions in order, the tile's weights
// add up in warp_sum's tree, values are added position by position. Partitions are folded in ascending order. Which
// rows share an item, and whether an item walks one partition or all, changes where a sum is kept, never its bits.
// Kept libraries were not it: torch's varlen attention has pages only with FlashAttention-3, none of them takes float32,
// and their splits follow the batch or the longest sequence.
// Nothing after a query's own position enters its sums, so what a recycled block still holds can never leak.
#pragma once

#include "transformer_math.cuh"

constexpr int TILE = WARP;  // positions; a lane each
constexpr int QUERIES = GROUP_ROWS * GROUP;
constexpr int PER_WARP = (QUERIES + WARPS - 1) / WARPS;
constexpr int DIMS = (HEAD_DIM + WARP - 1) / WARP;  // consecutive dimensions of the output that a lane keeps
constexpr int KEY_STRIDE = HEAD_DIM % 2 ? HEAD_DIM : HEAD_DIM + 1;  // odd: lanes read different banks
constexpr int VECTOR = HEAD_DIM * sizeof(Element) % 16 ? 1 : 16 / sizeof(Element);  // elements of one load of keys

// Consecutive rows of one sequence with consecutive positions, and the positions of them that are walked.
struct AttentionItem {
  int row, rows;
  int length;      // positions that the first row attends to; each following row one more
  int begin, end;  // walked positions, begin at a partition's start
  int table;       // where the sequence's block table starts
  int partial;     // entry of the first row's result where one partition is walked, or -1: all of them are
  int unused;
};

// A row whose partitions were walked by several items: entries first, first + stride, ...
struct FoldItem {
  int row, first, stride, parts;
};

struct AttentionStep {
  const AttentionItem* items;
  const FoldItem* folds;
  const int* tables;
  const int* counts;  // items, folds
  float* partials;    // entries of heads * (HEAD_DIM + 2): outputs, largest scores, sums of weights
  long long cache_places;
  int heads, kv_heads;
  int partition;  // positions, a multiple of TILE
  float scale;
};

// Consecutive elements, read at once where their number allows it.
template <int N>
struct alignas((N & (N - 1)) == 0 ? N * sizeof(Element) : sizeof(Element)) Pack {
  Element at[N];
};

// One query's softmax over some positions; of its output each lane keeps dimensions lane * DIMS and following.
struct Softmax {
  float largest, total, out[DIMS];
  DEVICE void start() {
    largest = NEGATIVE_INFINITY, total = 0.0f;
    UNROLLED for (int i = 0; i < DIMS; i++) out[i] = 0.0f;
  }
};

// Scales of what is there and of what comes, when the largest score becomes that of both.
struct Scales {
  float old, more;
};
DEVICE Scales rescale(float& largest, float other) {
  const float top = other > largest ? other : largest;
  const Scales scales{weight_of(largest - top), weight_of(other - top)};
  largest = top;
  return scales;
}

DEVICE void fold(Softmax& all, const Softmax& part) {
  if (part.total == 0.0f) return;  // nothing walked
  const Scales s = rescale(all.largest, part.largest);
  all.total = all.total * s.old + part.total * s.more;
  UNROLLED for (int i = 0; i < DIMS; i++) all.out[i] = all.out[i] * s.old + part.out[i] * s.more;
}

struct AttentionShared {
  alignas(16) float queries[QUERIES * HEAD_DIM];
  float keys[TILE * KEY_STRIDE];
  float weights[QUERIES * TILE];
};

// The walk of one item for one KV head, by a block. A warp owns the queries warp, warp + WARPS, ... of the item.
struct Walk {
  const AttentionStep& a;
  const AttentionItem& item;
  AttentionShared& shared;
  const Element* keys;  // of this KV head
  const Element* values;
  int kv_head, lane, warp;

  DEVICE int queries() const { return item.rows * GROUP; }
  DEVICE int length_of(int query) const { return item.length + query / GROUP; }
  DEVICE int head_of(int query) const { return kv_head * GROUP + query % GROUP; }
  // Where the vector of the first position of a block starts.
  DEVICE long long block_start(int position) const {
    return (long long)a.tables[item.table + position / BLOCK_TOKENS] * BLOCK_TOKENS * HEAD_DIM;
  }

  DEVICE void load_queries(const float* q) const {
    for (int i = threadIdx.x; i < queries() * HEAD_DIM; i += THREADS) {
      const int query = i / HEAD_DIM;
      const long long row = item.row + query / GROUP;
      shared.queries[i] = q[(row * a.heads + head_of(query)) * HEAD_DIM + i % HEAD_DIM] * a.scale;
    }
  }

  DEVICE void load_keys(int base, int end) const {
    constexpr int EACH = HEAD_DIM / VECTOR;
    for (int i = threadIdx.x; i < TILE * EACH; i += THREADS) {
      const int j = i / EACH, d = i % EACH * VECTOR;
      if (base + j >= end) return;
      const Element* from = keys + block_start(base + j) + j % BLOCK_TOKENS * HEAD_DIM + d;
      const Pack<VECTOR> loaded = *(const Pack<VECTOR>*)from;
      UNROLLED for (int e = 0; e < VECTOR; e++) shared.keys[j * KEY_STRIDE + d + e] = widen(loaded.at[e]);
    }
  }

  // Scores of this lane's position with all queries of the warp, then the tile's weights into shared memory.
  DEVICE void score(int base, Softmax (&soft)[PER_WARP]) const {
    const float* key = shared.keys + lane * KEY_STRIDE;
    float scores[PER_WARP];
    UNROLLED for (int i = 0; i < PER_WARP; i++) scores[i] = 0.0f;
    for (int d = 0; d < HEAD_DIM; d++) {
      const float value = key[d];
      UNROLLED for (int i = 0; i < PER_WARP; i++) {
        const int query = warp + i * WARPS;
        if (query < queries()) scores[i] = fused(shared.queries[query * HEAD_DIM + d], value, scores[i]);
      }
    }
    UNROLLED for (int i = 0; i < PER_WARP; i++) {
      const int query = warp + i * WARPS;
      if (query >= queries() || length_of(query) <= base) continue;
      const bool seen = base + lane < length_of(query);
      const float largest = warp_max(seen ? scores[i] : NEGATIVE_INFINITY);
      const float old = soft[i].largest, top = largest > old ? largest : old;
      const float scale = weight_of(old - top), weight = seen ? weight_of(scores[i] - top) : 0.0f;
      soft[i].largest = top;
      soft[i].total = soft[i].total * scale + warp_sum(weight);
      UNROLLED for (int k = 0; k < DIMS; k++) soft[i].out[k] = soft[i].out[k] * scale;
      shared.weights[query * TILE + lane] = weight;
    }
    __syncwarp();
  }

  DEVICE void load_value(const Element* from, float (&value)[DIMS]) const {
    if constexpr (HEAD_DIM % WARP == 0) {
      const Pack<DIMS> loaded = *(const Pack<DIMS>*)(from + lane * DIMS);
      UNROLLED for (int k = 0; k < DIMS; k++) value[k] = widen(loaded.at[k]);
    } else {
      UNROLLED for (int k = 0; k < DIMS; k++) {
        const int d = lane * DIMS + k;
        value[k] = d < HEAD_DIM ? widen(from[d]) : 0.0f;
      }
    }
  }

  // Adds the values of positions base to end, of one block.
  DEVICE void add_values(int base, int end, Softmax (&soft)[PER_WARP]) const {
    const Element* block = values + block_start(base);
    const float* weights = shared.weights + base % TILE;
    for (int j = 0; j < BLOCK_TOKENS && base + j < end; j++) {
      float value[DIMS];
      load_value(block + j * HEAD_DIM, value);
      UNROLLED for (int i = 0; i < PER_WARP; i++) {
        const int query = warp + i * WARPS;
        if (query >= queries() || length_of(query) <= base + j) continue;
        const float weight = weights[query * TILE + j];
        UNROLLED for (int k = 0; k < DIMS; k++) soft[i].out[k] = fused(weight, value[k], soft[i].out[k]);
      }
    }
  }

  DEVICE void walk_partition(int begin, int end, Softmax (&soft)[PER_WARP]) const {
    UNROLLED for (int i = 0; i < PER_WARP; i++) soft[i].start();
    for (int base = begin; base < end; base += TILE) {
      __syncthreads();  // the last tile's keys have been read
      load_keys(base, end);
      __syncthreads();
      score(base, soft);
      add_values(base, end, soft);
      if (base + BLOCK_TOKENS < end) add_values(base + BLOCK_TOKENS, end, soft);
    }
  }

  DEVICE void store_partial(int query, const Softmax& soft) const {
    float* entry = a.partials + (long long)(item.partial + query / GROUP) * a.heads * (HEAD_DIM + 2);
    const int head = head_of(query);
    UNROLLED for (int k = 0; k < DIMS; k++)
      if (lane * DIMS + k < HEAD_DIM) entry[head * HEAD_DIM + lane * DIMS + k] = soft.out[k];
    if (lane == 0) {
      entry[a.heads * HEAD_DIM + head] = soft.largest;
      entry[a.heads * (HEAD_DIM + 1) + head] = soft.total;
    }
  }

  DEVICE void store(int query, const Softmax& soft, Element* out) const {
    Element* to = out + ((long long)(item.row + query / GROUP) * a.heads + head_of(query)) * HEAD_DIM;
    UNROLLED for (int k = 0; k < DIMS; k++)
      if (lane * DIMS + k < HEAD_DIM) to[lane * DIMS + k] = narrow(soft.out[k] / soft.total);
  }

  DEVICE void run(const float* q, Element* out) const {
    load_queries(q);
    Softmax all[PER_WARP], part[PER_WARP];
    UNROLLED for (int i = 0; i < PER_WARP; i++) all[i].start();
    for (int begin = item.begin; begin < item.end; begin += a.partition) {
      walk_partition(begin, item.end - begin < a.partition ? item.end : begin + a.partition, part);
      UNROLLED for (int i = 0; i < PER_WARP; i++) fold(all[i], part[i]);
    }
    UNROLLED for (int i = 0; i < PER_WARP; i++) {
      const int query = warp + i * WARPS;
      if (query >= queries()) continue;
      if (item.partial >= 0)
        store_partial(query, part[i]);
      else
        store(query, all[i], out);
    }
    __syncthreads();  // the queries have been read; the next item may come
  }
};

DEVICE void attend(const AttentionStep& a, const float* q, const Element* keys, const Element* values, Element* out) {
  __shared__ AttentionShared shared;
  const int work = a.counts[0] * a.kv_heads;
  for (int w = blockIdx.x; w < work; w += gridDim.x) {
    const int head = w % a.kv_heads;
    const long long at = head * a.cache_places * HEAD_DIM;
    Walk{a, a.items[w / a.kv_heads], shared, keys + at, values + at, head, (int)threadIdx.x % WARP,
         (int)threadIdx.x / WARP}
        .run(q, out);
  }
}

// Folds the partitions of rows that were split; a thread folds single dimensions, with the arithmetic of fold().
DEVICE void fold_rows(const AttentionStep& a, Element* out) {
  const int size = a.heads * HEAD_DIM, entry_size = size + 2 * a.heads;
  for (int f = blockIdx.x; f < a.counts[1]; f += gridDim.x) {
    const FoldItem item = a.folds[f];
    for (int i = threadIdx.x; i < size; i += THREADS) {
      float largest = NEGATIVE_INFINITY, total = 0.0f, sum = 0.0f;
      for (int p = 0; p < item.parts; p++) {
        const float* entry = a.partials + (long long)(item.first + p * item.stride) * entry_size;
        const float more = entry[size + a.heads + i / HEAD_DIM];
        if (more == 0.0f) continue;
        const Scales s = rescale(largest, entry[size + i / HEAD_DIM]);
        total = total * s.old + more * s.more;
        sum = sum * s.old + entry[i] * s.more;
      }
      out[(long long)item.row * size + i] = narrow(sum / total);
    }
  }
}
