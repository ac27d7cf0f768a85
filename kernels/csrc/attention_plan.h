// What a step's attention is cut into: tiles of rows, and their partitions where whole tiles would leave threads idle.
//
// Rules of this file: a cut decides who computes what, never what is computed (attention.h merges in one order anyway).
#pragma once
#include <algorithm>
#include <vector>

#include "attention.h"
#include "step.h"
#include "step_memory.h"

namespace offbook {

// Rows first..first+count-1 of one sequence, which share a walk over its KV.
struct QueryTile {
  int first, count, partitions;
  int64_t parts;  // how many heads' partials lie before its own
};

struct Piece {
  int tile, partition;
};

class AttentionPlan {
 public:
  void cut(const Model& model, const Batch& batch, int threads) {
    tiles_.clear();
    pieces_.clear();
    for (int r = 0; r < batch.rows; r++) {
      const int partitions = batch.positions[r] / kPartition + 1;
      if (tiles_.empty() || tiles_.back().count == kTileQueries || batch.row_sequence[r] != batch.row_sequence[r - 1])
        tiles_.push_back({r, 0, 0, 0});
      tiles_.back().count++;
      tiles_.back().partitions = std::max(tiles_.back().partitions, partitions);
    }
    if (count() * model.kv_heads >= kEnough * threads) return;
    int64_t heads = 0;
    for (int t = 0; t < count(); t++) {
      tiles_[t].parts = heads;
      heads += int64_t{tiles_[t].partitions} * tiles_[t].count * model.heads;
      for (int p = 0; p < tiles_[t].partitions; p++) pieces_.push_back({t, p});
    }
    if (pieces_.size() == tiles_.size()) return pieces_.clear();
    parts_.reserve(heads * Partial::floats(model.head_dim));
  }

  int count() const { return static_cast<int>(tiles_.size()); }
  const QueryTile& tile(int i) const { return tiles_[i]; }
  const std::vector<Piece>& pieces() const { return pieces_; }  // of one KV head; none where tiles stay whole

  // Room for partition p of a tile and KV head, [row][head of the KV head]; the next partition's follows.
  Partial parts(const Model& model, const QueryTile& tile, int kv_head, int p) const {
    const int64_t rows = (int64_t{kv_head} * tile.partitions + p) * tile.count;
    return Partial{parts_.get(), model.head_dim}.head(tile.parts + rows * (model.heads / model.kv_heads));
  }

 private:
  static constexpr int kEnough = 8;  // whole tiles a thread, above which no cutting is needed
  std::vector<QueryTile> tiles_;
  std::vector<Piece> pieces_;
  Buffer<float> parts_;
};

}  // namespace offbook
