// What each thread does in a step's attention, decided once per step from lengths only.
//
// Splitting changes who computes a segment, never what is summed with what: see attention.h.
#pragma once

#include "kernels.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace octavo {

struct WindowPlan {
  int32_t window = 0;  // 0: none
  std::vector<AttentionItem> items;
  std::vector<Merge> merges;
  int64_t slots = 0;
  bool worth_threads = false;
};

class Planner {
 public:
  // rows: query rows of an item.
  Planner(int32_t group, int32_t num_kv_heads, int32_t head_dim, int32_t rows)
      : group_(group), heads_(num_kv_heads), head_dim_(head_dim), tokens_(std::max(1, rows / group)) {}

  int32_t max_rows() const { return tokens_ * group_; }

  void fill(WindowPlan& plan, const std::vector<Row>& rows, int threads) const {
    plan.items.clear();
    plan.merges.clear();
    plan.slots = 0;
    std::vector<Piece> pieces;
    int64_t total = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      for (int32_t q = 0; q < rows[r].query_len; q += tokens_) {
        pieces.push_back(piece(rows[r], static_cast<int32_t>(r), q, plan.window));
        total += pieces.back().cost * heads_;
      }
    }
    // Longest first, so that the last item to start is a short one.
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
    plan.worth_threads = threads > 1 && total * head_dim_ > kWorthThreads;
    for (const Piece& p : pieces) add(plan, p, plan.worth_threads ? total / (4 * threads) + 1 : 0);
  }

 private:
  static constexpr int64_t kWorthThreads = 100000;

  struct Piece {
    int32_t row, first, end, first_segment, end_segment;
    int64_t cost;
  };

  Piece piece(const Row& row, int32_t index, int32_t first, int32_t window) const {
    const int32_t end = std::min(row.query_len, first + tokens_);
    const int32_t start = row.context_len - row.query_len;
    const int32_t low = window ? std::max(0, start + first + 1 - window) : 0, high = start + end;
    // The reading of a key costs about as much as four query rows do with it.
    const int64_t cost = static_cast<int64_t>(high - low) * ((end - first) * group_ + 4);
    return {index, first, end, low / kSegment, (high + kSegment - 1) / kSegment, cost};
  }

  void add(WindowPlan& plan, const Piece& p, int64_t target) const {
    const int32_t segments = p.end_segment - p.first_segment, rows = (p.end - p.first) * group_;
    int64_t runs = 1;
    if (target > 0 && p.cost > 2 * target) runs = std::min<int64_t>(segments, (p.cost + target - 1) / target);
    for (int32_t h = 0; h < heads_; ++h) {
      if (runs < 2) {
        plan.items.push_back({p.row, h, p.first, p.end, p.first_segment, p.end_segment, -1});
        continue;
      }
      for (int64_t i = 0; i < runs; ++i) {
        const int32_t from = static_cast<int32_t>(segments * i / runs);
        const int32_t to = static_cast<int32_t>(segments * (i + 1) / runs);
        plan.items.push_back({p.row, h, p.first, p.end, p.first_segment + from, p.first_segment + to,
                              plan.slots + static_cast<int64_t>(from) * rows});
      }
      plan.merges.push_back({p.row, h, p.first, p.end, segments, plan.slots});
      plan.slots += static_cast<int64_t>(segments) * rows;
    }
  }

  int32_t group_, heads_, head_dim_, tokens_;
};

}  // namespace octavo
