// The filters, as steps over one list of tokens: what each leaves out gets weight DROPPED.
//
// Rules of this file: a list is either the whole row or the short list of candidates, always in id order, so that both
// give the same bits: order is (logit, then lowest id), mass is an integer, and every cut is found exactly by counting
// or weighing digits of the ordered key. No loop depends on the data for its end.
#pragma once

constexpr float DROPPED = -1.0f;

struct TokenList {
  int n;
  const int* id;   // null: token j is j itself
  const float* y;  // processed logits
  float* e;        // exp((y - largest) / temperature), or DROPPED
};

// Kept: key(j) > key, or key(j) == key and j <= index.
struct Cut {
  u32 key;
  int index;
};

// The smallest prefix, in order of falling key and then rising j, whose mass of f reaches need (1 <= need <= total).
// Digit by digit (3 of a long list, 4 smaller ones of a short list) the key is fixed; then the ties are counted off in
// order. key(j) == 0 leaves j out.
template <class B, class Key, class F>
PROGRAM Cut cut_by_digits(B& b, int n, Key key, F f, u64 need) {
  const u64* table = b.s->table;
  const int widest = n > 4096 ? 11 : 8;
  u32 prefix = 0, known = 0;
  for (int shift = 32; shift > 0;) {
    const int bits = shift < widest ? shift : widest, bins = 1 << bits;
    shift -= bits;
    const int down = shift;
    const u32 want = prefix, mask = known, digit = (u32)(bins - 1);
    auto bin = [=](int j) {
      const u32 k = key(j);
      return (int)(((k >> down) & digit) | ~(0u - (u32)(((k & mask) == want) & (k != 0))));
    };
    b.histogram(n, bins, bin, f);
    u64 before;
    const int from_top = b.crossing(bins, [=](int i) { return table[bins - 1 - i]; }, need, &before);
    need -= before;
    prefix |= (u32)(bins - 1 - from_top) << shift;
    known |= digit << shift;
  }
  const u32 edge = prefix;
  auto tied = [=](int j) { return bits_float(only_if(key(j) == edge, float_bits(f(j)))); };
  b.chunk_masses(n, tied);
  return Cut{edge, b.find_in_chunks(n, tied, need)};
}

// The same. Of a whole row only those that share the edge's first digit are looked at further, if the list holds them.
template <class B, class Key, class F>
PROGRAM Cut find_cut(B& b, TokenList t, Key key, F f, u64 need) {
  if (t.id || t.n <= CANDIDATES) return cut_by_digits(b, t.n, key, f, need);
  constexpr int BITS = 11, DOWN = 32 - BITS, BINS = 1 << BITS;
  const u64* table = b.s->table;
  b.histogram(t.n, BINS, [=](int j) { return (int)((key(j) >> DOWN) | (0u - (u32)(key(j) == 0))); }, f);
  u64 before;
  const u32 edge = (u32)(BINS - 1 - b.crossing(BINS, [=](int i) { return table[BINS - 1 - i]; }, need, &before));
  int* ids = b.s->id;
  const int members = b.compact(t.n, CANDIDATES, [=](int j) { return ((key(j) >> DOWN) == edge) & (key(j) != 0); },
                                [=](int j, int at) { ids[at] = j; });
  if (members > CANDIDATES) return cut_by_digits(b, t.n, key, f, need);
  const int* listed = ids;
  const Cut cut = cut_by_digits(b, members, [=](int i) { return key(listed[i]); },
                                [=](int i) { return f(listed[i]); }, need - before);
  return Cut{cut.key, listed[cut.index]};
}

template <class B>
PROGRAM u64 alive_mass(B& b, TokenList t) {
  const float* e = t.e;
  return b.total_mass(t.n, [=](int j) { return e[j]; });
}

template <class B, class Key>
PROGRAM void drop_below(B& b, TokenList t, Key key, Cut cut) {
  float* e = t.e;
  b.each(t.n, [=](int j) {
    u32 k = key(j);
    bool keep = k > cut.key || (k == cut.key && j <= cut.index);
    e[j] = keep ? e[j] : DROPPED;
  });
}

// Keeps the smallest set of best tokens, of those whose f is at least `least`, whose mass of f reaches need.
template <class B, class F>
PROGRAM void keep_best(B& b, TokenList t, F f, float least, u64 need) {
  const float* y = t.y;
  auto key = [=](int j) { return only_if(f(j) >= least, ordered_key(y[j])); };
  drop_below(b, t, key, find_cut(b, t, key, f, need));
}

// Keeps the k most likely tokens.
template <class B>
PROGRAM void keep_top_k(B& b, TokenList t, int k) {
  const float* e = t.e;
  if (b.count(t.n, [=](int j) { return e[j] >= 0.0f; }) <= k) return;
  keep_best(b, t, [=](int j) { return e[j] >= 0.0f ? 1.0f : DROPPED; }, 0.0f, (u64)k << 40);
}

// The mass that a share p of the total asks for, at least one unit.
DEVICE u64 share_of(double p, u64 total) {
  u64 need = (u64)(p * (double)total);
  need = need > total ? total : need;
  return need ? need : 1;
}

// Keeps the smallest set of most likely tokens whose mass reaches need: none of them is too light to have any.
template <class B>
PROGRAM void keep_top_mass(B& b, TokenList t, u64 need) {
  const float* e = t.e;
  keep_best(b, t, [=](int j) { return e[j]; }, MASS_UNIT, need);
}

// Keeps tokens at least min_p times as likely as the most likely one (whose weight is 1).
template <class B>
PROGRAM void keep_min_p(B& b, TokenList t, float min_p) {
  float* e = t.e;
  b.each(t.n, [=](int j) { e[j] = e[j] >= min_p ? e[j] : DROPPED; });
}

// Locally typical sampling (Meister et al., 2022): the smallest set, by rising distance of a token's surprise from the
// entropy, whose share of the mass reaches p. With g = -ln(weight), surprise - entropy = g - E[g]: no logarithm needed.
template <class B>
PROGRAM void keep_typical(B& b, TokenList t, float largest, float inverse_temperature, double p) {
  const float *e = t.e, *y = t.y;
  auto gap = [=](int j) { return (largest - y[j]) * inverse_temperature; };
  u64 total = alive_mass(b, t);
  u64 weighted = b.total_mass(t.n, [=](int j) { return bits_float(only_if(e[j] >= MASS_UNIT, float_bits(e[j] * gap(j)))); });
  const float mean = (float)((double)weighted / (double)total);
  auto key = [=](int j) {
    float distance = gap(j) - mean;
    return only_if(e[j] >= 0.0f, ~(float_bits(distance) & 0x7fffffffu));
  };
  drop_below(b, t, key, find_cut(b, t, key, [=](int j) { return e[j]; }, share_of(p, total)));
}
