// A run: consecutive rows of one sequence. SAMPLE draws while the draft agrees; SCORE reports forced tokens.
//
// Rules of this file: one block works on one run (SAMPLE) or on one row (SCORE). The slot, the draw's counter and
// mirostat's mu move forward token by token, so a verified draft gives the bits of single steps.
#pragma once

#include "sampler_row.cuh"

// The run that row k belongs to: the last r with run_start[r] <= k.
DEVICE int run_of(const StepArgs& a, int k) {
  int low = 0, high = a.runs;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (a.run_start[middle] <= k)
      low = middle;
    else
      high = middle;
  }
  return low;
}

template <class B>
PROGRAM void write_row(B& b, const StepArgs& a, int k, const Drawn& drawn, float logprob) {
  b.once([&] {
    a.token[k] = drawn.token;
    a.error[k] = drawn.error;
    a.logprob[k] = logprob;
    a.sampling_logprob[k] = drawn.sampling_logprob;
    a.kept[k] = drawn.kept;
  });
}

template <class B>
PROGRAM void write_nothing(B& b, const StepArgs& a, int k, unsigned char error) {
  write_row(b, a, k, Drawn{-1, 0, 0.0f, error}, 0.0f);
  const long long at = (long long)k * a.top_width;
  int* ids = a.top_ids + at;
  float* logprobs = a.top_logprobs + at;
  b.each(a.top_width, [=](int i) { ids[i] = -1, logprobs[i] = LOWEST_LOGPROB; });
}

// Raw part of a row: reads it and reports the alternatives. On error the row is written off.
template <class B>
PROGRAM RawRow open_row(B& b, const StepArgs& a, const SamplingConstants& p, RowBuffers buffers, int k) {
  RawRow raw = read_raw(b, a, p, buffers, k);
  if (raw.error)
    write_nothing(b, a, k, raw.error);
  else if (a.top_width)
    write_top_logprobs(b, raw, a.vocabulary, p.top_logprobs, a.top_width, a.top_ids + (long long)k * a.top_width,
                       a.top_logprobs + (long long)k * a.top_width);
  return raw;
}

// One more token in the slot's entries.
template <class B>
PROGRAM void count_token(B& b, Slot* slot, int token) {
  const int* ids = slot->ids;
  const int n = slot->n;
  const int at = b.first(n, [=](int i) { return ids[i] == token; });
  b.once([&] {
    if (at == n) slot->ids[at] = token, slot->marks[at] = 0, slot->bias[at] = 0.0f, slot->n = n + 1;
    slot->marks[at] += 2;
  });
}

template <class B>
PROGRAM Drawn take_token(B& b, const StepArgs& a, const SamplingConstants& p, const Slot* slot, const RawRow& raw,
                        RowBuffers buffers, int k, u32 draw, float mu) {
  if (a.row_forced[k] >= 0) return Drawn{a.row_forced[k], 1, 0.0f, 0};
  const u32* mask = a.row_mask[k] < 0 ? nullptr : a.masks + (long long)a.row_mask[k] * a.mask_words;
  const float* y = process(b, raw.x, a.vocabulary, mask, slot, &p, buffers.y);
  int* kept_ids = a.kept_at[k] < 0 ? nullptr : a.kept_ids + (long long)a.kept_at[k] * a.kept_width;
  return draw_row(b, y, a.vocabulary, p, mu, philox_u64(p.seed, draw, p.choice, 0, 0), buffers.e,
                  raw.weighted && y == raw.x, kept_ids);
}

template <class B>
PROGRAM void sample_run(B& b, const StepArgs& a, RowBuffers buffers, int r) {
  const SamplingConstants& p = a.params[r];
  Slot* slot = a.run_slot[r] < 0 ? nullptr : a.slots + a.run_slot[r];
  const int begin = a.run_start[r], end = a.run_start[r + 1];
  float mu = a.run_mu[r];
  int k = begin;
  for (bool going = true; going && k < end; k++) {
    const RawRow raw = open_row(b, a, p, buffers, k);
    going = false;
    if (raw.error) continue;
    const Drawn drawn = take_token(b, a, p, slot, raw, buffers, k, (u32)(a.run_draw[r] + k - begin), mu);
    if (drawn.error) {
      write_nothing(b, a, k, drawn.error);
      continue;
    }
    write_row(b, a, k, drawn, raw_logprob(raw, drawn.token));
    if (slot && (p.flags & COUNTS)) count_token(b, slot, drawn.token);
    // llama.cpp's mirostat v2: the observed surprise is that under the truncated, renormalised distribution.
    const bool observes = (p.flags & MIROSTAT) && !(p.flags & GREEDY) && a.row_forced[k] < 0;
    if (observes) mu = mu - p.mirostat_lr * (-drawn.sampling_logprob - p.mirostat_target);
    going = drawn.token == a.row_draft[k];
  }
  for (; k < end; k++) write_nothing(b, a, k, 0);
  b.once([&] { a.run_mu_after[r] = mu; });
}

template <class B>
PROGRAM void score_row(B& b, const StepArgs& a, RowBuffers buffers, int r, int k) {
  const RawRow raw = open_row(b, a, a.params[r], buffers, k);
  const int forced = a.row_forced[k];
  if (!raw.error) write_row(b, a, k, Drawn{forced, 1, 0.0f, 0}, raw_logprob(raw, forced));
}

// The work of row k: its whole run if it opens a SAMPLE run, itself in a SCORE run, else nothing.
template <class B>
PROGRAM void work_on_row(B& b, const StepArgs& a, RowBuffers buffers, int k) {
  const int r = run_of(a, k);
  if (a.run_kind[r] != RUN_SAMPLE)
    score_row(b, a, buffers, r, k);
  else if (k == a.run_start[r])
    sample_run(b, a, buffers, r);
}
