// What the products of a step read: rows of activations in the forms that their matrices ask for.
#pragma once
#include <initializer_list>

#include "attention.h"
#include "step_memory.h"

namespace offbook {

// bf16: activations and KV rounded to bf16, or to 16-bit words where weights are codes. float32: neither is rounded.
struct Bf16Config {
#if OFFBOOK_PAIR_DOT
  using Mode = PairMode;
#else
  using Mode = FloatMode;
#endif
  using Kv = KvBf16;
  static constexpr bool kRound = true;
};
struct F32Config {
  using Mode = FloatMode;
  using Kv = KvF32;
  static constexpr bool kRound = false;
};

// Rows of `width` activations: as numbers (`x`) for matrices of numbers, as `words` for matrices of codes. Where the
// configuration rounds nothing, codes read `x` too.
template <class Config>
class Inputs {
 public:
  using Number = typename Config::Mode::Activation;

  struct Forms {  // which matrices will read the rows
    bool codes = false, numbers = false;
    Forms(std::initializer_list<const Matrix*> matrices) {
      for (const Matrix* m : matrices) (has_codes(*m) ? codes : numbers) = true;
    }
  };

  void reserve(int64_t rows, int64_t width) {
    x_.reserve(rows * width);
    if (Config::kRound) words_.reserve(rows * width);
    scales_.reserve(rows * (width / 32));
    sums_.reserve(rows * (width / 32));
  }

  // Row `row` of `width` floats.
  void set(int64_t row, int64_t width, const float* from, Forms forms) {
    Number* x = x_.get() + row * width;
    int16_t* words = words_.get() + row * width;
    float *scales = scales_.get() + row * (width / 32), *sums = sums_.get() + row * (width / 32);
    for (int64_t k = 0; k < width; k += 32) {
      if (forms.numbers || !Config::kRound)
        for (int64_t i = k; i < k + 32; i += 16) store_activation(x + i, activation<Config::kRound>(load(from + i)));
      if (!forms.codes) continue;
      if constexpr (Config::kRound)
        words_of(from + k, words + k, scales + k / 32, sums + k / 32);
      else
        sums[k / 32] = reduce_add(add(load(x + k), load(x + k + 16)));
    }
  }

  // scratch.acc = one panel of m for rows first..first+rows-1.
  void multiply(const Matrix& m, int panel, int64_t width, int64_t first, int rows, PanelScratch& scratch) const {
    if (!has_codes(m))
      multiply_numbers<typename Config::Mode>(m, panel, view(x_.get(), width).from(first), rows, scratch);
    else if constexpr (Config::kRound)
      multiply_codes<WordMode>(m, panel, view(words_.get(), width).from(first), rows, scratch);
    else
      multiply_codes<FloatMode>(m, panel, view(x_.get(), width).from(first), rows, scratch);
  }

 private:
  template <class T>
  Rows<T> view(const T* x, int64_t width) const {
    return {x, width, scales_.get(), sums_.get(), width / 32};
  }
  Buffer<Number> x_;
  Buffer<int16_t> words_;
  Buffer<float> scales_, sums_;
};

}  // namespace offbook
