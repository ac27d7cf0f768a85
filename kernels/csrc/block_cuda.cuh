// The block primitives for a CUDA block of LANES threads (and, in tests, for LANES fibers on the host).
//
// Rules of this file: the same results, bit for bit, as block_lockstep.h. Every primitive is called by all threads,
// gives all of them the same answer, and ends with a barrier, so that what its lambdas wrote can be read. Barriers are
// written out where they stand: the fiber harness removes them one by one, by line, to prove that each is needed.
// Integer atomics only; full-warp operations only; no thread leaves early.
#pragma once

#include "block_math.cuh"
#include "block_scratch.h"

constexpr int WARP = 32;
constexpr int WARPS = LANES / WARP;
constexpr u32 FULL_WARP = 0xffffffffu;

// Ways to combine two values; types, not lambdas, so that each is compiled once.
struct Add {
  template <class T>
  DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <class T>
  DEVICE T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct Smaller {
  template <class T>
  DEVICE T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};

struct Block {
  Scratch* s;
  int t;  // this thread

  template <class F>
  DEVICE void once(F f) {
    if (t == 0) f();
    __syncthreads();
  }

  template <class F>
  DEVICE void each(int n, F f) {
    for (int i = t; i < n; i += LANES) f(i);
    __syncthreads();
  }

  // f(i, whether bit i of the packed mask is set)
  template <class F>
  DEVICE void each_masked(int n, const u32* mask, F f) {
    for (int i = t; i < n; i += LANES) f(i, ((mask[i >> 5] >> (i & 31)) & 1u) != 0);
    __syncthreads();
  }

  // One value of each thread combined over the fixed tree l, l + LANES / 2; l, l + LANES / 4; ... ; given to all.
  template <class T, class Op>
  PROGRAM T combine(T mine, Op op) {
    T* part = (T*)s->wide;
    part[t] = mine;
    for (int half = LANES / 2; half; half >>= 1) {
      __syncthreads();
      if (t < half) part[t] = op(part[t], part[t + half]);
    }
    __syncthreads();
    T all = part[0];
    __syncthreads();
    return all;
  }

  // Maximum of f over each strided lane, kept in the scratch; true when some f(i) is NaN or +infinity.
  template <class F>
  DEVICE bool lane_maxima(int n, F f) {
    float best = NEGATIVE_INFINITY;
    int bad = 0;
    for (int i = t; i < n; i += LANES) {
      float v = f(i);
      bad |= v < POSITIVE_INFINITY ? 0 : 1;
      best = v > best ? v : best;
    }
    s->lanes[t] = best;
    return __syncthreads_or(bad) != 0;
  }

  // The k-th largest lane maximum, k in 1..LANES: no more than the k-th largest element.
  PROGRAM float kth_lane(int k) {
    const float mine = s->lanes[t];
    if (k == 1) return combine(mine, Larger{});
    int rank = 0;
    for (int l = 0; l < LANES; l++) {
      const float other = s->lanes[l];
      rank += (other > mine || (other == mine && l < t)) ? 1 : 0;
    }
    if (rank == k - 1) s->word[0] = (int)float_bits(mine);
    __syncthreads();
    const float kth = bits_float((u32)s->word[0]);
    __syncthreads();
    return kth;
  }

  template <class F>
  DEVICE float sum(int n, F f) {
    float part = 0.0f;
    for (int i = t; i < n; i += LANES) part = part + f(i);
    return combine(part, Add{});
  }

  // Sum of mass(f(i)).
  template <class F>
  DEVICE u64 total_mass(int n, F f) {
    u64 part = 0;
    for (int i = t; i < n; i += LANES) part += mass(f(i));
    return combine(part, Add{});
  }

  template <class F>
  DEVICE u64 max_u64(int n, F f) {
    u64 best = 0;
    for (int i = t; i < n; i += LANES) {
      const u64 v = f(i);
      best = v > best ? v : best;
    }
    return combine(best, Larger{});
  }

  template <class P>
  DEVICE int count(int n, P p) {
    int part = 0;
    for (int i = t; i < n; i += LANES) part += p(i) ? 1 : 0;
    return combine(part, Add{});
  }

  // The first i where p holds, or n.
  template <class P>
  DEVICE int first(int n, P p) {
    int i = t;
    while (i < n && !p(i)) i += LANES;
    return combine(i < n ? i : n, Smaller{});
  }

  // emit(i, position) for every i where p holds, in order, for the first `limit`; returns how many hold (some number
  // above limit where there are more).
  template <class P, class E>
  DEVICE int compact(int n, int limit, P p, E emit) {
    int* in_warp = (int*)s->wide;
    const int lane = t & (WARP - 1), warp = t / WARP;
    int found = 0;
    for (int base = 0; base < n && found <= limit; base += LANES) {
      const int i = base + t;
      const bool holds = i < n && p(i);
      const u32 votes = __ballot_sync(FULL_WARP, holds);
      if (lane == 0) in_warp[warp] = __popc(votes);
      __syncthreads();
      int before = found + __popc(votes & ((1u << lane) - 1u));
      for (int w = 0; w < WARPS; w++) {
        if (w < warp) before += in_warp[w];
        found += in_warp[w];
      }
      if (holds && before < limit) emit(i, before);
      __syncthreads();
    }
    return found;
  }

  // table[b] = sum of mass(f(i)) over the i with bin(i) == b; bin(i) < 0 skips i.
  template <class N, class F>
  DEVICE void histogram(int n, int bins, N bin, F f) {
    u64* table = s->table;
    for (int b = t; b < bins; b += LANES) table[b] = 0;
    __syncthreads();
    for (int i = t; i < n; i += LANES) {
      const int b = bin(i);
      if (b >= 0) atomicAdd(&table[b], mass(f(i)));
    }
    __syncthreads();
  }

  // Sum of `mine` over the threads before this one.
  PROGRAM u64 sum_before(u64 mine) {
    const int lane = t & (WARP - 1), warp = t / WARP;
    u64 running = mine;
    for (int d = 1; d < WARP; d <<= 1) {
      const u64 other = __shfl_up_sync(FULL_WARP, running, d);
      if (lane >= d) running += other;
    }
    if (lane == WARP - 1) s->wide[warp] = running;
    __syncthreads();
    u64 before = running - mine;
    for (int w = 0; w < warp; w++) before += s->wide[w];
    __syncthreads();
    return before;
  }

  // The first i in 0..n-1 (n <= TABLE) where the running sum of value reaches need; *before is the sum up to i - 1.
  // Some i must reach it, and need >= 1.
  template <class F>
  DEVICE int crossing(int n, F value, u64 need, u64* before) {
    const int each = (n + LANES - 1) / LANES, begin = t * each;
    u64 mine = 0;
    for (int i = begin; i < begin + each && i < n; i++) mine += value(i);
    u64 running = sum_before(mine);
    if (running < need && running + mine >= need) {
      int i = begin;
      for (u64 v = value(i); running + v < need; v = value(i)) running += v, i++;
      s->word[0] = i;
      s->wide[0] = running;
    }
    __syncthreads();
    const int at = s->word[0];
    *before = s->wide[0];
    __syncthreads();
    return at;
  }

  // Mass of f over each CHUNK of consecutive elements into the table, a warp a chunk; returns the whole sum.
  template <class F>
  DEVICE u64 chunk_masses(int n, F f) {
    const int lane = t & (WARP - 1);
    u64 whole = 0;
    for (int c = t / WARP; c * CHUNK < n; c += WARPS) {
      const int begin = c * CHUNK, end = begin + CHUNK < n ? begin + CHUNK : n;
      u64 part = 0;
      for (int i = begin + lane; i < end; i += WARP) part += mass(f(i));
      for (int d = WARP / 2; d; d >>= 1) part += __shfl_down_sync(FULL_WARP, part, d);
      if (lane == 0) {
        s->table[c] = part;
        whole += part;
      }
    }
    return combine(whole, Add{});
  }

  // After chunk_masses(n, f): the first i where the running mass of f reaches need.
  template <class F>
  DEVICE int find_in_chunks(int n, F f, u64 need) {
    const u64* table = s->table;
    u64 before;
    const int base = CHUNK * crossing((n + CHUNK - 1) / CHUNK, [=](int c) { return table[c]; }, need, &before);
    const int end = n - base < CHUNK ? n - base : CHUNK;
    return base + crossing(end, [=](int j) { return mass(f(base + j)); }, need - before, &before);
  }
};
