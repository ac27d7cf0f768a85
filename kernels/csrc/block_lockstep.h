// The block primitives as plain loops over lanes, in the shape that host compilers turn into SIMD.
//
// Rules of this file: the same results, bit for bit, as block_cuda.cuh. Float sums keep LANES strided partial sums and
// the same tree; everything else is exact. Lambdas must capture by value, or the loops do not vectorise.
#pragma once

#include <algorithm>

#define OFFBOOK_LOCKSTEP
#include "block_math.cuh"
#include "block_scratch.h"

struct Block {
  Scratch* s;

  template <class F>
  DEVICE void once(F f) {
    f();
  }

  template <class F>
  DEVICE void each(int n, F f) {
#pragma GCC ivdep
    for (int i = 0; i < n; i++) f(i);
  }

  // f(i, whether bit i of the packed mask is set)
  template <class F>
  DEVICE void each_masked(int n, const u32* mask, F f) {
    int full = n / 32 * 32;
    for (int base = 0; base < full; base += 32) {
      const u32 word = mask[base >> 5];
#pragma GCC ivdep
      for (int j = 0; j < 32; j++) f(base + j, ((word >> j) & 1u) != 0);
    }
    for (int i = full; i < n; i++) f(i, ((mask[i >> 5] >> (i & 31)) & 1u) != 0);
  }

  // Maximum of f over each strided lane, kept in the scratch; true when some f(i) is NaN or +infinity.
  template <class F>
  DEVICE bool lane_maxima(int n, F f) {
    float best[LANES];
    u32 bad[LANES];
    for (int l = 0; l < LANES; l++) best[l] = NEGATIVE_INFINITY, bad[l] = 0;
    int full = n / LANES * LANES;
    for (int base = 0; base < full; base += LANES)
      for (int l = 0; l < LANES; l++) {
        float v = f(base + l);
        bad[l] |= v < POSITIVE_INFINITY ? 0u : 1u;
        best[l] = v > best[l] ? v : best[l];
      }
    u32 any = 0;
    for (int i = full; i < n; i++) {
      float v = f(i);
      any |= v < POSITIVE_INFINITY ? 0u : 1u;
      best[i - full] = v > best[i - full] ? v : best[i - full];
    }
    for (int l = 0; l < LANES; l++) any |= bad[l], s->lanes[l] = best[l];
    return any != 0;
  }

  // The k-th largest lane maximum, k in 1..LANES: no more than the k-th largest element.
  DEVICE float kth_lane(int k) {
    float copy[LANES];
    if (k == 1) {
      for (int l = 0; l < LANES; l++) copy[l] = s->lanes[l];
      for (int half = LANES / 2; half; half >>= 1)
        for (int l = 0; l < half; l++) copy[l] = copy[l] > copy[l + half] ? copy[l] : copy[l + half];
      return copy[0];
    }
    std::copy(s->lanes, s->lanes + LANES, copy);
    std::nth_element(copy, copy + k - 1, copy + LANES, [](float a, float b) { return a > b; });
    return copy[k - 1];
  }

  template <class F>
  DEVICE float sum(int n, F f) {
    float part[LANES];
    for (int l = 0; l < LANES; l++) part[l] = 0.0f;
    int full = n / LANES * LANES;
    for (int base = 0; base < full; base += LANES)
      for (int l = 0; l < LANES; l++) part[l] = part[l] + f(base + l);
    for (int i = full; i < n; i++) part[i - full] = part[i - full] + f(i);
    for (int half = LANES / 2; half; half >>= 1)
      for (int l = 0; l < half; l++) part[l] = part[l] + part[l + half];
    return part[0];
  }

  // Sum of mass(f(i)).
  template <class F>
  DEVICE u64 total_mass(int n, F f) {
    u64 total = 0;
    for (int base = 0; base < n; base += CHUNK) total += mass_between(base, std::min(n, base + CHUNK), f);
    return total;
  }

  // The same over at most CHUNK elements. Weights are split in 16 high and 24 low bits, so that 32-bit lanes hold the
  // sums of a chunk and no 64-bit conversion is needed: (high << 24) + low is mass(e) exactly.
  template <class F>
  DEVICE u64 mass_between(int begin, int end, F f) {
    constexpr int WIDTH = 32;
    u32 high[WIDTH] = {}, low[WIDTH] = {};
    u64 total = 0;
    int i = begin;
    for (; i + WIDTH <= end; i += WIDTH)
      for (int l = 0; l < WIDTH; l++) {
        float scaled = positive_part(f(i + l)) * 65536.0f;
        int whole = (int)scaled;
        high[l] += (u32)whole;
        low[l] += (u32)(int)((scaled - (float)whole) * 16777216.0f);
      }
    for (; i < end; i++) total += mass(f(i));
    for (int l = 0; l < WIDTH; l++) total += ((u64)high[l] << 24) + low[l];
    return total;
  }

  template <class F>
  DEVICE u64 max_u64(int n, F f) {
    u64 best = 0;
    for (int i = 0; i < n; i++) best = std::max<u64>(best, f(i));
    return best;
  }

  template <class P>
  DEVICE int count(int n, P p) {
    int total = 0;
    for (int i = 0; i < n; i++) total += p(i) ? 1 : 0;
    return total;
  }

  static constexpr int TILE = 64;

  // visit(i) for the i in begin..begin + TILE - 1 where p holds, in order. The flags vectorise; the visits are scalar.
  template <class P, class V>
  DEVICE void visit_tile(int begin, P p, V visit) {
    alignas(8) unsigned char flags[TILE];
    for (int j = 0; j < TILE; j++) flags[j] = p(begin + j) ? 1 : 0;
    for (int j = 0; j < TILE; j += 8) {
      u64 word;
      memcpy(&word, flags + j, 8);
      if (word == 0x0101010101010101ull) {
        for (int k = 0; k < 8; k++) visit(begin + j + k);
        continue;
      }
      for (; word; word &= word - 1) visit(begin + j + (__builtin_ctzll(word) >> 3));
    }
  }

  // The first i where p holds, or n.
  template <class P>
  DEVICE int first(int n, P p) {
    int i = 0;
    for (; i + TILE <= n; i += TILE) {
      u32 any = 0;
      for (int j = 0; j < TILE; j++) any |= p(i + j) ? 1u : 0u;
      if (any) break;
    }
    while (i < n && !p(i)) i++;
    return i;
  }

  // emit(i, position) for every i where p holds, in order, for the first `limit`; returns how many hold (some number
  // above limit where there are more).
  template <class P, class E>
  DEVICE int compact(int n, int limit, P p, E emit) {
    int found = 0, i = 0;
    auto take = [&](int at) {
      if (found < limit) emit(at, found);
      found++;
    };
    for (; i + TILE <= n && found <= limit; i += TILE) visit_tile(i, p, take);
    for (; i < n && found <= limit; i++)
      if (p(i)) take(i);
    return found;
  }

  // table[b] = sum of mass(f(i)) over the i with bin(i) == b; bin(i) < 0 skips i.
  template <class N, class F>
  DEVICE void histogram(int n, int bins, N bin, F f) {
    u64* table = s->table;
    memset(table, 0, sizeof(u64) * bins);
    int at[TILE];
    int i = 0;
    for (; i + TILE <= n; i += TILE) {
      for (int j = 0; j < TILE; j++) at[j] = bin(i + j);
      const int base = i, *bins_of = at - base;
      visit_tile(base, [=](int k) { return bins_of[k] >= 0; }, [=](int k) { table[bins_of[k]] += mass(f(k)); });
    }
    for (; i < n; i++)
      if (int b = bin(i); b >= 0) table[b] += mass(f(i));
  }

  // The first i in 0..n-1 (n <= TABLE) where the running sum of value reaches need; *before is the sum up to i - 1.
  // Some i must reach it, and need >= 1.
  template <class F>
  DEVICE int crossing(int n, F value, u64 need, u64* before) {
    u64 running = 0;
    int i = 0;
    for (; i < n - 1; i++) {
      u64 v = value(i);
      if (running + v >= need) break;
      running += v;
    }
    *before = running;
    return i;
  }

  // Mass of f over each CHUNK of consecutive elements into the table; returns the whole sum.
  template <class F>
  DEVICE u64 chunk_masses(int n, F f) {
    u64 total = 0;
    for (int c = 0, base = 0; base < n; c++, base += CHUNK)
      total += s->table[c] = mass_between(base, std::min(n, base + CHUNK), f);
    return total;
  }

  // After chunk_masses(n, f): the first i where the running mass of f reaches need.
  template <class F>
  DEVICE int find_in_chunks(int n, F f, u64 need) {
    const u64* table = s->table;
    u64 before;
    int base = CHUNK * crossing((n + CHUNK - 1) / CHUNK, [=](int c) { return table[c]; }, need, &before);
    float value[CHUNK];
    const int end = std::min(n - base, CHUNK);
    for (int j = 0; j < end; j++) value[j] = f(base + j);
    const float* values = value;
    return base + crossing(end, [=](int j) { return mass(values[j]); }, need - before, &before);
  }
};
