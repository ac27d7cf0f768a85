// One step of the model: any mix of decode rows and prefill chunks, on the device's own threads.
//
// Rules of this file: a row's bits come from its own token, position and KV alone. In every layer the KV of all rows is
// written (one phase) before any row attends (the next). Which thread does what never shows in a result.
#pragma once
#include <initializer_list>
#include <vector>

#include "attention_plan.h"
#include "attention_rows.h"
#include "step_base.h"
#include "step_layers.h"
#include "step_memory.h"

namespace offbook {

template <class Config>
class StepOf final : public Step {
  using Mode = typename Config::Mode;
  using Activation = typename Mode::Activation;
  using Element = typename Config::Kv::Element;
  using Forms = typename Inputs<Config>::Forms;
  static constexpr int kPanelsTogether = 4;  // handed out at once, at most: nobody waits long for the last to end
  static constexpr int kOwnRows = 2;         // up to here every thread norms the rows for itself: cheaper than a phase
  static constexpr int kLayerPhases = 11;    // at most: five, each prepared in one of its own, and partitions merged

  struct alignas(64) Thread {
    PanelScratch panel;
    Buffer<float> attention, normed;
    Inputs<Config> inputs;
  };

 public:
  StepOf(const Model& model, Pool& pool)
      : model_(model), pool_(pool), threads_(pool.threads()), phases_(kLayerPhases * model.n_layers + 4) {
    widest_ = std::max({model.hidden_padded, model.ffn_padded, 32 * model.layers[0].o.blocks});
    for (auto& t : threads_) {
      t.attention.reserve(Attention<Config>::scratch_floats(model));
      t.normed.reserve(model.hidden_padded);
      t.inputs.reserve(kOwnRows, widest_);
    }
  }

  void forward(const Batch& batch) override {
    reserve(batch.rows, batch.logit_rows);
    plan_.cut(model_, batch, pool_.threads());
    start([&](Crew& crew) {
      copy_blocks(crew, batch);
      crew.run(batch.rows, spread(crew, batch.rows),
               [&](int r) { dense_row(model_.embedding, batch.tokens[r], x_row(r)); });
      for (int l = 0; l < model_.n_layers; l++) layer(crew, batch, l);
      crew.run(batch.logit_rows, spread(crew, batch.logit_rows),
               [&](int i) { norm(crew, batch.logit_row[i], model_.output_norm, final_, i, {&model_.head}); });
    });
  }

  void head(int begin, int end, float* logits) override {
    const int64_t vocabulary = model_.vocabulary;
    start([&](Crew& crew) {
      product(
          crew, {&model_.head}, final_, model_.hidden_padded, begin, end - begin, [] {},
          [&](int row, int rows, int panel, const float* acc) {
            const int64_t column = int64_t{32} * panel, n = std::min<int64_t>(32, vocabulary - column);
            for (int r = 0; r < rows; r++)
              if (n > 0) std::memcpy(logits + (row + r) * vocabulary + column, acc + r * 32, n * sizeof(float));
          });
    });
  }

 private:
  template <class Job>
  void start(Job&& job) {
    for (auto& phase : phases_) {
      phase.next.store(0, std::memory_order_relaxed);
      phase.done.store(0, std::memory_order_relaxed);
    }
    pool_.run([&](int thread) {
      const FlushDenormals guard;
      Crew crew(phases_.data(), pool_.threads(), thread);
      job(crew);
    });
  }

  float* x_row(int64_t row) const { return x_.get() + row * model_.hidden_padded; }
  static int spread(const Crew& crew, int items) { return std::max(1, items / (crew.threads() * 4)); }

  void reserve(int64_t rows, int64_t logit_rows) {
    const auto& layer = model_.layers[0];
    qkv_width_ = 32 * (layer.q.panels + layer.k.panels + layer.v.panels);
    heads_width_ = 32 * layer.o.blocks;
    x_.reserve(rows * model_.hidden_padded);
    qkv_.reserve(rows * qkv_width_);
    q_.reserve(rows * heads_width_);
    attended_.reserve(rows * heads_width_);
    gated_.reserve(rows * model_.ffn_padded);
    inputs_.reserve(rows, widest_);
    final_.reserve(logit_rows, model_.hidden_padded);
  }

  void copy_blocks(Crew& crew, const Batch& batch) {
    const int64_t bytes =
        int64_t{2} * kBlockTokens * model_.head_dim * model_.kv_heads * static_cast<int64_t>(sizeof(Element));
    crew.run(batch.copies ? model_.n_layers : 0, 1, [&](int l) {
      uint8_t* kv = reinterpret_cast<uint8_t*>(layer_kv(l));
      for (int c = 0; c < batch.copies; c++)
        std::memcpy(kv + batch.copy_pairs[2 * c + 1] * bytes, kv + batch.copy_pairs[2 * c] * bytes, bytes);
    });
  }

  Element* layer_kv(int64_t l) const {
    return reinterpret_cast<Element*>(model_.kv) +
           l * model_.kv_blocks * model_.kv_heads * 2 * kBlockTokens * model_.head_dim;
  }

  // Every panel of the matrices, for rows of `width` inputs from `first` on, in chunks: done(row counted from `first`,
  // rows, panel counted over all matrices, acc).
  template <class Setup, class Done>
  void product(Crew& crew, std::initializer_list<const Matrix*> matrices, const Inputs<Config>& inputs, int64_t width,
               int first, int rows, Setup&& setup, Done&& done) {
    int panels = 0;
    for (const Matrix* m : matrices) panels += m->panels;
    const int chunks = (rows + kChunkRows - 1) / kChunkRows;
    const int together = rows > kTileRows ? 1 : std::clamp(panels / (crew.threads() * 5), 1, kPanelsTogether);
    crew.run(panels * chunks, together, setup, [&](int i) {
      const int chunk = i / panels, begin = static_cast<int>(int64_t{rows} * chunk / chunks);
      const int n = static_cast<int>(int64_t{rows} * (chunk + 1) / chunks) - begin, panel = i % panels;
      int local = panel;
      const Matrix* const* m = matrices.begin();
      while (local >= (*m)->panels) local -= (*m++)->panels;
      PanelScratch& scratch = threads_[crew.thread()].panel;
      inputs.multiply(**m, local, width, first + begin, n, scratch);
      done(begin, n, panel, scratch.acc);
    });
  }

  // The same for rows that set(row, inputs) prepares: in a phase of their own, or by every thread for itself.
  template <class Set, class Done>
  void prepared_product(Crew& crew, std::initializer_list<const Matrix*> matrices, int64_t width, int rows, Set&& set,
                        Done&& done) {
    const bool alone = rows <= kOwnRows;
    Inputs<Config>& inputs = alone ? threads_[crew.thread()].inputs : inputs_;
    if (!alone) crew.run(rows, spread(crew, rows), [&](int r) { set(r, inputs); });
    auto setup = [&] {
      for (int r = 0; alone && r < rows; r++) set(r, inputs);
    };
    product(crew, matrices, inputs, width, 0, rows, setup, done);
  }

  // Row `row` of the residual, normed: row `at` of `to`.
  void norm(Crew& crew, int row, const float* weight, Inputs<Config>& to, int at, Forms forms) {
    const int n = model_.hidden_padded;
    float* normed = threads_[crew.thread()].normed.get();
    rms_norm(x_row(row), weight, model_.hidden, n, model_.norm_epsilon, normed);
    to.set(at, n, normed, forms);
  }

  template <class Done>
  void normed_product(Crew& crew, std::initializer_list<const Matrix*> matrices, int rows, const float* weight,
                      Done&& done) {
    auto set = [&](int r, Inputs<Config>& to) { norm(crew, r, weight, to, r, matrices); };
    prepared_product(crew, matrices, model_.hidden_padded, rows, set, done);
  }

  // A product of rows that lie in `x`, added to the residual.
  void residual_product(Crew& crew, const Matrix& matrix, int rows, const float* x) {
    const int64_t width = int64_t{32} * matrix.blocks;
    auto set = [&](int r, Inputs<Config>& to) { to.set(r, width, x + r * width, {&matrix}); };
    prepared_product(crew, {&matrix}, width, rows, set, [&](int row, int count, int panel, const float* acc) {
      for (int r = 0; r < count; r++) {
        float* to = x_row(row + r) + 32 * panel;
        for (int s = 0; s < 32; s += 16) store(to + s, add(load(to + s), load(acc + r * 32 + s)));
      }
    });
  }

  void layer(Crew& crew, const Batch& batch, int l) {
    const Layer& layer = model_.layers[l];
    normed_product(crew, {&layer.q, &layer.k, &layer.v}, batch.rows, layer.attention_norm,
                   [&](int row, int rows, int panel, const float* acc) {
                     const float* bias = bias_of(layer, panel);
                     for (int r = 0; r < rows; r++) {
                       float* to = qkv_.get() + static_cast<int64_t>(row + r) * qkv_width_ + 32 * panel;
                       for (int s = 0; s < 32; s += 16)
                         store(to + s, bias ? add(load(acc + r * 32 + s), load(bias + s)) : load(acc + r * 32 + s));
                     }
                   });
    attention(crew, batch, layer, layer_kv(l));
    residual_product(crew, layer.o, batch.rows, attended_.get());
    normed_product(crew, {&layer.gate_up}, batch.rows, layer.ffn_norm,
                   [&](int row, int rows, int panel, const float* acc) {
                     for (int r = 0; r < rows; r++) {
                       const F16x gated = mul(silu(load(acc + r * 32)), load(acc + r * 32 + 16));
                       store(gated_.get() + static_cast<int64_t>(row + r) * model_.ffn_padded + 16 * panel, gated);
                     }
                   });
    residual_product(crew, layer.down, batch.rows, gated_.get());
  }

  static const float* bias_of(const Layer& layer, int panel) {
    if (panel < layer.q.panels) return layer.q_bias ? layer.q_bias + 32 * panel : nullptr;
    panel -= layer.q.panels;
    if (panel < layer.k.panels) return layer.k_bias ? layer.k_bias + 32 * panel : nullptr;
    return layer.v_bias ? layer.v_bias + 32 * (panel - layer.k.panels) : nullptr;
  }

  void attention(Crew& crew, const Batch& batch, const Layer& layer, Element* kv) {
    auto prepare = [&](int row, int kv_head) {
      float* q = qkv_.get() + static_cast<int64_t>(row) * qkv_width_;
      float* k = q + 32 * layer.q.panels;
      const int position = batch.positions[row];
      const int64_t block = table_of(batch, row)[position / kBlockTokens];
      prepare_head<Config>(model_, layer, q, k, k + 32 * layer.k.panels, kv_head, position,
                           q_.get() + static_cast<int64_t>(row) * heads_width_,
                           kv + (block * model_.kv_heads + kv_head) * 2 * kBlockTokens * model_.head_dim);
    };
    // Alone in one piece, a KV head's writer is its only reader.
    const bool single = batch.rows == 1 && plan_.pieces().empty();
    if (!single)
      crew.run(batch.rows, spread(crew, batch.rows), [&](int row) {
        for (int h = 0; h < model_.kv_heads; h++) prepare(row, h);
      });
    const int tiles = plan_.count(), items = tiles * model_.kv_heads, pieces = static_cast<int>(plan_.pieces().size());
    if (!pieces) {
      crew.run(items, std::max(1, items / (crew.threads() * 16)), [&](int i) {
        if (single) prepare(0, i);
        attention_of(crew, batch, kv, plan_.tile(i % tiles), i / tiles).run();
      });
      return;
    }
    crew.run(pieces * model_.kv_heads, 1, [&](int i) {
      const auto [t, partition] = plan_.pieces()[i % pieces];
      const int kv_head = i / pieces;
      const QueryTile& tile = plan_.tile(t);
      attention_of(crew, batch, kv, tile, kv_head).partition(partition, plan_.parts(model_, tile, kv_head, partition));
    });
    crew.run(items, 1, [&](int i) {
      const QueryTile& tile = plan_.tile(i % tiles);
      attention_of(crew, batch, kv, tile, i / tiles)
          .combine(tile.partitions, plan_.parts(model_, tile, i / tiles, 0));
    });
  }

  Attention<Config> attention_of(Crew& crew, const Batch& batch, const Element* kv, const QueryTile& tile,
                                 int kv_head) {
    const int64_t at = static_cast<int64_t>(tile.first) * heads_width_;
    return {model_, kv, kv_head,
            {tile.count, batch.positions + tile.first, table_of(batch, tile.first), q_.get() + at, attended_.get() + at,
             heads_width_},
            threads_[crew.thread()].attention.get()};
  }

  static const int32_t* table_of(const Batch& batch, int row) {
    return batch.block_tables + static_cast<int64_t>(batch.row_sequence[row]) * batch.table_width;
  }

  const Model& model_;
  Pool& pool_;
  std::vector<Thread> threads_;
  std::vector<Phase> phases_;
  AttentionPlan plan_;
  int64_t widest_ = 0, qkv_width_ = 0, heads_width_ = 0;
  Buffer<float> x_, qkv_, attended_, gated_;
  Buffer<Activation> q_;
  Inputs<Config> inputs_, final_;
};

}  // namespace offbook
