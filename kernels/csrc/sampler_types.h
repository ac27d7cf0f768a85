// What the host hands to the sampler. Mirrored field by field in sampler_layout.py.
//
// Rules of this file: plain data, largest fields first, no padding that is not written out.
#pragma once

// Bits of SamplingConstants::flags.
constexpr u32 GREEDY = 1;    // argmax of the processed logits
constexpr u32 MIROSTAT = 2;  // replaces the four filters
constexpr u32 ADJUSTS = 4;   // the slot's entries change the logits
constexpr u32 SCORED = 16;   // raw log-probabilities are wanted: a pass over the row that others are spared
constexpr u32 COUNTS = 8;    // taken tokens are added to the slot's entries

constexpr int RUN_SAMPLE = 0;
constexpr unsigned char ERROR_NAN = 1;
constexpr unsigned char ERROR_EMPTY = 2;
constexpr float LOWEST_LOGPROB = -9999.0f;

// SamplingParams as the device wants them: nothing here changes while a sequence lives.
struct SamplingConstants {
  u64 seed;
  double top_p;      // 1 = off
  double typical_p;  // 1 = off
  float inverse_temperature;
  float min_p;        // 0 = off
  float min_p_reach;  // a lower bound of (logit - largest) for tokens that min_p keeps
  float repetition;   // never 0
  float frequency;
  float presence;
  float mirostat_target;  // tau, nats
  float mirostat_lr;      // eta
  int top_k;              // 0 = off
  u32 choice;
  int top_logprobs;
  int kept_ids_max;
  u32 flags;
  u32 unused;
};

// The tokens of a sequence whose logits are changed: three arrays of `capacity` (the vocabulary), n in use.
struct Slot {
  int* ids;     // unique
  u32* marks;   // bit 0: in the prompt; the rest: how often in the output
  float* bias;  // logit_bias
  int n;
  int unused;
};

struct StepArgs {
  const void* logits;  // [row_end - row_begin, vocabulary]
  const u32* masks;    // [n, mask_words]
  const SamplingConstants* params;  // [R]
  const int* row_forced;            // [K]
  const int* row_draft;             // [K]
  const int* row_mask;              // [K]
  const int* run_start;             // [R + 1]
  const int* run_kind;              // [R]
  const int* run_slot;              // [R]
  const int* run_draw;              // [R]
  const float* run_mu;              // [R]
  Slot* slots;
  const int* kept_at;  // [K] row of kept_ids, or -1
  int* token;          // [K]
  unsigned char* error;
  float* logprob;
  float* sampling_logprob;
  int* kept;
  float* run_mu_after;  // [R]
  int* top_ids;         // [K, top_width]
  float* top_logprobs;  // [K, top_width]
  int* kept_ids;        // [n, kept_width]
  int vocabulary;
  int row_begin, row_end;
  int runs;
  int mask_words;
  int top_width;
  int kept_width;
  int bf16;  // logits are bfloat16, else float32
};

// Scratch rows in ordinary memory, one set for each block at work: widened, processed and exponentiated logits.
struct RowBuffers {
  float* x;
  float* y;
  float* e;
};
