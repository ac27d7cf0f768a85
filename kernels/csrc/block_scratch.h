// Sizes that fix the shape of every reduction, and the working memory of one block (shared memory on a GPU).
//
// Rules of this file: LANES decides the bits of float sums, so it is one number for every build and machine.
#pragma once

constexpr int LANES = 512;        // strided lanes of a reduction; threads of a CUDA block
constexpr int CHUNK = 512;        // consecutive elements whose mass is summed together
constexpr int TABLE = 2048;       // histogram bins, and the most chunks: n <= TABLE * CHUNK = 2^20
// Length of the short list: what fits. It never changes a result, so it may differ between builds.
#if defined(OFFBOOK_LOCKSTEP)
constexpr int CANDIDATES = 8192;
#else
constexpr int CANDIDATES = 2048;
#endif

struct Scratch {
  u64 table[TABLE];    // bins or chunk masses
  u64 wide[LANES];     // reductions and scans between threads
  float lanes[LANES];  // lane maxima
  int id[CANDIDATES];  // the short list: ids ascending, their logits, their weights
  float y[CANDIDATES];
  float e[CANDIDATES];
  int word[4];  // one value told to all threads
};
