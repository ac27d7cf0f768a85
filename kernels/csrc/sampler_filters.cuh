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

// The smallest prefix, in order of falling key and then rising j, whose measure reaches need (1 <= need <= total).
// Three rounds of 11, 11 and 10 bits fix the key; then the ties are counted off in order. key(j) == 0 leaves j out.
template <class B, class Key, class Measure>
PROGRAM Cut find_cut(B& b, int n, Key key, Measure measure, u64 need) {
  u32 prefix = 0, known = 0;
  const u64* table = b.s->table;
  for (int shift = 21; shift >= 0; shift = shift > 10 ? shift - 11 : shift - 10) {
    const int bins = shift ? 2048 : 1024;
    const u32 want = prefix, mask = known;
    b.histogram(
        n, bins,
        [=](int j) {
          u32 k = key(j);
          return ((k & mask) == want && k != 0) ? (int)((k >> shift) & (u32)(bins - 1)) : -1;
        },
        measure);
    u64 before;
    int at = bins - 1 - b.crossing(bins, [=](int i) { return table[bins - 1 - i]; }, need, &before);
    need -= before;
    prefix |= (u32)at << shift;
    known |= (u32)(bins - 1) << shift;
    if (shift == 0) break;
  }
  const u32 edge = prefix;
  auto tied = [=](int j) { return key(j) == edge ? measure(j) : (u64)0; };
  b.chunk_masses(n, tied);
  return Cut{edge, b.find_in_chunks(n, tied, need)};
}

template <class B>
PROGRAM u64 alive_mass(B& b, TokenList t) {
  const float* e = t.e;
  return b.sum_u64(t.n, [=](int j) { return mass(e[j]); });
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

// Keeps the k most likely tokens.
template <class B>
PROGRAM void keep_top_k(B& b, TokenList t, int k) {
  const float *e = t.e, *y = t.y;
  if (b.count(t.n, [=](int j) { return e[j] >= 0.0f; }) <= k) return;
  auto key = [=](int j) { return e[j] >= 0.0f ? ordered_key(y[j]) : 0u; };
  drop_below(b, t, key, find_cut(b, t.n, key, [=](int) { return (u64)1; }, (u64)k));
}

// The mass that a share p of the total asks for, at least one unit.
DEVICE u64 share_of(double p, u64 total) {
  u64 need = (u64)(p * (double)total);
  need = need > total ? total : need;
  return need ? need : 1;
}

// Keeps the smallest set of most likely tokens whose mass reaches need.
template <class B>
PROGRAM void keep_top_mass(B& b, TokenList t, u64 need) {
  const float *e = t.e, *y = t.y;
  auto key = [=](int j) { return e[j] >= 0.0f ? ordered_key(y[j]) : 0u; };
  drop_below(b, t, key, find_cut(b, t.n, key, [=](int j) { return mass(e[j]); }, need));
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
  u64 weighted = b.sum_u64(t.n, [=](int j) { return e[j] > 0.0f ? mass(e[j] * gap(j)) : (u64)0; });
  const float mean = (float)((double)weighted / (double)total);
  auto key = [=](int j) {
    float distance = gap(j) - mean;
    return e[j] >= 0.0f ? ~(float_bits(distance) & 0x7fffffffu) : 0u;
  };
  drop_below(b, t, key, find_cut(b, t.n, key, [=](int j) { return mass(e[j]); }, share_of(p, total)));
}
