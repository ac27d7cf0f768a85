// One row of logits: its raw distribution, and the token drawn from the processed one.
//
// Rules of this file: written against the block primitives only (no thread index, barrier or shuffle), every branch
// is the same for all threads and depends on this row alone. Whether the short list or the whole row is worked on
// never changes a bit of the result, only the time.
#pragma once

#include "sampler_types.h"

#include "sampler_filters.cuh"

struct RawRow {
  const float* x;
  float largest, log_sum;  // of the raw logits; no log_sum where nobody asks
  bool scored;
  bool weighted;           // the buffer e holds the weights of x at temperature 1
  unsigned char error;
};

struct Drawn {
  int token, kept;
  float sampling_logprob;
  unsigned char error;
};

DEVICE float raw_logprob(const RawRow& raw, int token) {
  if (!raw.scored) return 0.0f;
  float value = raw.x[token] - raw.largest - raw.log_sum;
  return value > LOWEST_LOGPROB ? value : LOWEST_LOGPROB;
}

constexpr int PROBE = LANES / 2;  // how many of the best lanes the short list starts from

// Whether the draw will need the weight of every token of the row.
DEVICE bool needs_row_weights(const SamplingConstants& p) {
  if (p.flags & GREEDY) return false;
  if (p.flags & MIROSTAT) return true;
  return p.top_k > 0 ? p.top_k > PROBE : p.top_p < 1.0 || p.min_p == 0.0f;
}

template <class B>
PROGRAM void write_weights(B& b, const float* y, int n, float largest, float inverse_temperature, float* e) {
  b.each(n, [=](int i) {
    const float v = y[i];
    const float weight = exp_negative((v - largest) * inverse_temperature);
    e[i] = v > NEGATIVE_INFINITY ? weight : DROPPED;
  });
}

// The row as float32 (widened into the buffer if it is bfloat16), its largest logit and log-sum-exp. The weights are
// kept where the draw can use them as they are.
template <class B>
PROGRAM RawRow read_raw(B& b, const StepArgs& a, const SamplingConstants& p, RowBuffers buffers, int row) {
  const long long at = (long long)(row - a.row_begin) * a.vocabulary;
  const int n = a.vocabulary;
  RawRow raw;
  raw.x = (const float*)a.logits + at;
  if (a.bf16) {
    const unsigned short* narrow = (const unsigned short*)a.logits + at;
    float* wide = buffers.x;
    b.each(n, [=](int i) { wide[i] = bits_float((u32)narrow[i] << 16); });
    raw.x = wide;
  }
  const float* x = raw.x;
  const bool bad = b.lane_maxima(n, [=](int i) { return x[i]; });
  const float largest = b.kth_lane(1);
  raw.largest = largest;
  raw.log_sum = 0.0f;
  raw.scored = (p.flags & SCORED) != 0;
  raw.error = bad ? ERROR_NAN : largest == NEGATIVE_INFINITY ? ERROR_EMPTY : 0;
  raw.weighted = !raw.error && p.inverse_temperature == 1.0f && needs_row_weights(p);
  if (raw.error) return raw;
  if (raw.weighted) {
    const float* e = buffers.e;
    write_weights(b, x, n, largest, 1.0f, buffers.e);
    if (raw.scored) raw.log_sum = log_positive(b.sum(n, [=](int i) { return positive_part(e[i]); }));
  } else if (raw.scored) {
    raw.log_sum = log_positive(b.sum(n, [=](int i) { return exp_negative(x[i] - largest); }));
  }
  return raw;
}

// The best `wanted` tokens of the raw distribution, ties to the lowest id; -1 pads. Reads the lane maxima of x.
template <class B>
PROGRAM void write_top_logprobs(B& b, const RawRow& raw, int n, int wanted, int width, int* ids, float* logprobs) {
  const float* x = raw.x;
  int *list_id = b.s->id, listed = CANDIDATES + 1;
  float* list_y = b.s->y;
  if (wanted <= LANES / 2) {
    const float bound = b.kth_lane(wanted);
    listed = b.compact(n, CANDIDATES, [=](int i) { return x[i] >= bound && x[i] > NEGATIVE_INFINITY; },
                       [=](int i, int at) { list_id[at] = i, list_y[at] = x[i]; });
  }
  const bool shortened = listed <= CANDIDATES;
  const int length = shortened ? listed : n;
  u64 below = ~(u64)0;
  for (int rank = 0; rank < width; rank++) {
    u64 best = 0;
    if (rank < wanted && below)
      best = b.max_u64(length, [=](int j) {
        float v = shortened ? list_y[j] : x[j];
        u64 key = ((u64)ordered_key(v) << 32) | (u32)~(shortened ? list_id[j] : j);
        return v > NEGATIVE_INFINITY && key < below ? key : (u64)0;
      });
    b.once([=] {
      int id = best ? (int)~(u32)best : -1;
      ids[rank] = id;
      logprobs[rank] = best ? raw_logprob(raw, id) : LOWEST_LOGPROB;
    });
    below = best;
  }
}

// One changed logit: bias, repetition (prompt and output), frequency and presence (output). Finite stays finite.
DEVICE float adjusted(float x, float bias, u32 marks, const SamplingConstants& p) {
  const u32 drawn = marks >> 1;
  float v = x + bias;
  if (marks) v = v > 0.0f ? v / p.repetition : v * p.repetition;
  v = v - p.frequency * (float)(int)drawn;
  v = v - (drawn ? p.presence : 0.0f);
  if (x == NEGATIVE_INFINITY) return x;
  v = v < LARGEST_FLOAT ? v : LARGEST_FLOAT;
  return v > -LARGEST_FLOAT ? v : -LARGEST_FLOAT;
}

// Mask and slot applied to the raw logits. Returns x itself, lane maxima untouched, where there is nothing to apply.
template <class B>
PROGRAM const float* process(B& b, const float* x, int n, const u32* mask, const Slot* slot, const SamplingConstants* p,
                            float* y) {
  const bool adjusts = slot && (p->flags & ADJUSTS) && slot->n > 0;
  if (!mask && !adjusts) return x;
  if (mask)
    b.each_masked(n, mask, [=](int i, bool allowed) { y[i] = allowed ? x[i] : NEGATIVE_INFINITY; });
  else
    b.each(n, [=](int i) { y[i] = x[i]; });
  if (adjusts) {
    const int* ids = slot->ids;
    const u32* marks = slot->marks;
    const float* bias = slot->bias;
    const SamplingConstants constants = *p;
    b.each(slot->n, [=](int i) {
      const int id = ids[i];
      if (!mask || ((mask[id >> 5] >> (id & 31)) & 1u)) y[id] = adjusted(x[id], bias[i], marks[i], constants);
    });
  }
  b.lane_maxima(n, [=](int i) { return y[i]; });
  return y;
}

// Inverse CDF, in id order, over the tokens that are left: the same draw whatever list they are in.
template <class B>
PROGRAM Drawn draw_from(B& b, TokenList t, float largest, float inverse_temperature, u64 random) {
  const float* e = t.e;
  auto weight = [=](int j) { return e[j]; };
  const u64 total = b.chunk_masses(t.n, weight);
  const int j = b.find_in_chunks(t.n, weight, multiply_high(random, total) + 1);
  Drawn out;
  out.error = 0;
  out.token = t.id ? t.id[j] : j;
  out.kept = b.count(t.n, [=](int i) { return e[i] >= 0.0f; });
  out.sampling_logprob = (t.y[j] - largest) * inverse_temperature - log_mass(total);
  return out;
}

template <class B>
PROGRAM void write_kept_ids(B& b, TokenList t, int limit, int* out) {
  const float* e = t.e;
  const int* id = t.id;
  b.compact(t.n, limit, [=](int j) { return e[j] >= 0.0f; }, [=](int j, int at) { out[at] = id ? id[j] : j; });
}

// Tokens with y >= bound and their weights: a short list if they fit, else the whole row.
template <class B>
PROGRAM TokenList list_above(B& b, TokenList row, float bound, float largest, float inverse_temperature, bool weighted) {
  int* list_id = b.s->id;
  float* list_y = b.s->y;
  const float* y = row.y;
  int listed = CANDIDATES + 1;
  if (bound > NEGATIVE_INFINITY || row.n <= CANDIDATES)
    listed = b.compact(row.n, CANDIDATES, [=](int i) { return (y[i] >= bound) & (y[i] > NEGATIVE_INFINITY); },
                       [=](int i, int at) { list_id[at] = i, list_y[at] = y[i]; });
  const bool fits = listed <= CANDIDATES;
  const TokenList t = fits ? TokenList{listed, list_id, list_y, b.s->e} : row;
  if (fits || !weighted) write_weights(b, t.y, t.n, largest, inverse_temperature, t.e);
  return t;
}

// Where the first filter may start: every token it can keep is in the list.
struct FirstList {
  TokenList list;
  u64 need;     // top_p without top_k: mass to reach
  float reach;  // mirostat: (y - largest) / temperature of the least likely token to keep
};

// `weighted`: the weights of the whole row are in row.e.
template <class B>
PROGRAM FirstList first_list(B& b, TokenList row, float largest, const SamplingConstants& p, float mu, bool weighted) {
  const float it = p.inverse_temperature;
  const float slack = 0.001f + (largest < 0.0f ? -largest : largest) * 1e-6f;  // the bound rounds; the filter decides
  FirstList first{row, 0, 0.0f};
  float bound = NEGATIVE_INFINITY;
  if (p.flags & MIROSTAT) {
    first.reach = log_mass(alive_mass(b, row)) - mu;
    bound = largest + (first.reach < 0.0f ? first.reach : 0.0f) / it - slack;
  } else if (p.top_k > 0) {
    if (p.top_k <= PROBE) bound = b.kth_lane(p.top_k);
  } else if (p.top_p < 1.0) {
    first.need = share_of(p.top_p, alive_mass(b, row));
    first.list = list_above(b, row, b.kth_lane(PROBE), largest, it, weighted);
    if (alive_mass(b, first.list) < first.need) first.list = row;
    return first;
  } else if (p.min_p > 0.0f) {
    bound = largest + p.min_p_reach - slack;
  } else {
    return first;
  }
  first.list = list_above(b, row, bound, largest, it, weighted);
  return first;
}

template <class B>
PROGRAM void filter(B& b, const FirstList& first, float largest, const SamplingConstants& p) {
  const TokenList t = first.list;
  if (p.flags & MIROSTAT) {
    if (first.reach > 0.0f) return keep_top_k(b, t, 1);
    const float *y = t.y, it = p.inverse_temperature, reach = first.reach;
    float* e = t.e;
    b.each(t.n, [=](int j) { e[j] = (y[j] - largest) * it >= reach ? e[j] : DROPPED; });
    return;
  }
  if (p.top_k > 0) keep_top_k(b, t, p.top_k);
  if (p.top_p < 1.0) keep_top_mass(b, t, first.need ? first.need : share_of(p.top_p, alive_mass(b, t)));
  if (p.min_p > 0.0f) keep_min_p(b, t, p.min_p);
  if (p.typical_p < 1.0) keep_typical(b, t, largest, p.inverse_temperature, p.typical_p);
}

// Draws one token from the processed logits y (lane maxima in the scratch). `weighted`: e holds the weights already.
// kept_ids: where to list the survivors, or null.
template <class B>
PROGRAM Drawn draw_row(B& b, const float* y, int n, const SamplingConstants& p, float mu, u64 random, float* e,
                       bool weighted, int* kept_ids) {
  const float largest = b.kth_lane(1);
  if (largest == NEGATIVE_INFINITY) return Drawn{-1, 0, 0.0f, ERROR_EMPTY};
  Drawn out{-1, 1, 0.0f, 0};
  if (p.flags & GREEDY) {
    const int token = b.first(n, [=](int i) { return y[i] == largest; });
    out.token = token;
    if (kept_ids) b.once([=] { kept_ids[0] = token; });
    return out;
  }
  const bool needed = needs_row_weights(p);
  if (needed && !weighted) write_weights(b, y, n, largest, p.inverse_temperature, e);
  const FirstList first = first_list(b, TokenList{n, nullptr, y, e}, largest, p, mu, needed);
  filter(b, first, largest, p);
  out = draw_from(b, first.list, largest, p.inverse_temperature, random);
  if (kept_ids && out.kept <= p.kept_ids_max) write_kept_ids(b, first.list, p.kept_ids_max, kept_ids);
  if (out.kept == 1 || out.sampling_logprob > 0.0f) out.sampling_logprob = 0.0f;
  if (out.sampling_logprob < LOWEST_LOGPROB) out.sampling_logprob = LOWEST_LOGPROB;
  return out;
}
