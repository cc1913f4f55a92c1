// Drawing from rows of logits without sorting or storing a distribution: the rules of octavo/runner/filters.py.
//
// A row is known by the maxima of its blocks (kVocabBlock values each), found in one pass that also finds the argmax;
// a second pass sums exponentials by block. Everything else touches only the few blocks that can matter: the k-th
// largest value lies above the k-th largest maximum, a nucleus above a weight that all below cannot make up for.
//
// Invariant: a draw depends on its own row, parameters and uniform number. Blocks are computed one by one whoever
// computes them, and what follows is sequential, so threads and neighbours change no bit. Rows hold finite values and
// -inf; the caller looks at `highest` first (NaN and +inf show there). Ties go to the lower id.
#pragma once

#include "kernels.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace octavo {

struct DrawParams {
  int64_t row;
  float temperature;
  int64_t top_k;  // 0: off
  double top_p, min_p, uniform;
};

// The number in [0, 1) behind one token: Philox4x32-10, keyed by the seed, at (position, sample, stream, 0). The same
// bits as octavo/runner/noise.py, which says why.
inline double uniform_at(uint64_t seed, uint32_t sample, uint32_t position, uint32_t stream) {
  uint32_t c[4] = {position, sample, stream, 0};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c[0]) * 0xD2511F53u, b = static_cast<uint64_t>(c[2]) * 0xCD9E8D57u;
    c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0;
    c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1;
    c[1] = static_cast<uint32_t>(b), c[3] = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return static_cast<double>((static_cast<uint64_t>(c[0] >> 5) << 26) | (c[1] >> 6)) * 0x1p-53;
}

struct RowLogprobs {
  double normaliser = 0;
  int64_t rank = 0;
  std::vector<int64_t> ids;  // the chosen token (if any), then the most likely ones
  std::vector<float> values;
};

class Vocabulary {
 public:
  explicit Vocabulary(int64_t size) : size_(size), blocks_((size + kVocabBlock - 1) / kVocabBlock) {}

  // Look at rows [size] at these addresses, which must stay until the next scan. best: first index of the largest.
  void scan(const KernelTable& k, const std::vector<const float*>& rows, std::vector<int64_t>& best,
            std::vector<float>& highest) {
    rows_ = rows;
    const int64_t count = static_cast<int64_t>(rows.size());
    maxima_.resize(static_cast<size_t>(count * blocks_));
    by_chunks(count, [&](int64_t r, int64_t first, int64_t values) {
      k.block_max(rows_[r] + first * kVocabBlock, values, maxima(r) + first);
    });
    best.assign(rows.size(), 0);
    highest_.assign(rows.size(), 0);
    for (int64_t r = 0; r < count; ++r) find_best(r, best[r], highest_[r]);
    highest = highest_;
  }

  std::vector<int64_t> draw(const KernelTable& k, const std::vector<DrawParams>& draws) const {
    const int64_t count = static_cast<int64_t>(draws.size());
    std::vector<float> sums(static_cast<size_t>(count * blocks_));
    by_chunks(count, [&](int64_t i, int64_t first, int64_t values) {
      const DrawParams& d = draws[i];
      if (d.top_k || (d.top_p >= 1 && d.min_p > 0)) return;  // needs no sum over the whole vocabulary
      k.exp_sums(rows_[d.row] + first * kVocabBlock, values, highest_[d.row], d.temperature,
                 sums.data() + i * blocks_ + first);
    });
    std::vector<int64_t> tokens(draws.size());
#pragma omp parallel for schedule(dynamic, 1) if (worth_threads(count * 8))
    for (int64_t i = 0; i < count; ++i) {
      const DrawParams& d = draws[i];
      const float* own = sums.data() + i * blocks_;
      const bool filters = d.top_k || d.top_p < 1 || d.min_p > 0;
      tokens[i] = filters ? draw_filtered(k, d, own) : draw_any(k, d, own);
    }
    return tokens;
  }

  // tokens: the chosen one of each row, or -1; counts: how many of the most likely to list.
  std::vector<RowLogprobs> logprobs(const KernelTable& k, const std::vector<int64_t>& rows,
                                    const std::vector<int64_t>& tokens, const std::vector<int64_t>& counts) const {
    const int64_t count = static_cast<int64_t>(rows.size());
    std::vector<float> sums(static_cast<size_t>(count * blocks_));
    by_chunks(count, [&](int64_t i, int64_t first, int64_t values) {
      k.exp_sums(rows_[rows[i]] + first * kVocabBlock, values, highest_[rows[i]], 1.0f,
                 sums.data() + i * blocks_ + first);
    });
    std::vector<RowLogprobs> out(rows.size());
#pragma omp parallel for schedule(dynamic, 1) if (worth_threads(count * 8))
    for (int64_t i = 0; i < count; ++i) {
      RowLogprobs& entry = out[i];
      const float* row = rows_[rows[i]];
      double total = 0;
      for (int64_t b = 0; b < blocks_; ++b) total += static_cast<double>(sums[i * blocks_ + b]);
      entry.normaliser = static_cast<double>(highest_[rows[i]]) + std::log(total);
      if (tokens[i] >= 0) {
        entry.rank = 1 + count_above(rows[i], row[tokens[i]]);
        entry.ids.push_back(tokens[i]);
      }
      for (int64_t id : largest(rows[i], counts[i])) entry.ids.push_back(id);
      for (int64_t id : entry.ids) entry.values.push_back(static_cast<float>(static_cast<double>(row[id]) - entry.normaliser));
    }
    return out;
  }

  int64_t size() const { return size_; }
  int64_t scanned() const { return static_cast<int64_t>(rows_.size()); }

 private:
  static constexpr int64_t kChunk = 32;         // blocks of a thread's turn: 64 KiB of logits
  static constexpr size_t kSortAtMost = 2048;   // more candidates are thinned out before they are sorted
  static constexpr int kBins = 0x3F81;          // upper halves of the floats 0 to 1

  struct Candidates {
    std::vector<int64_t> ids;
    std::vector<float> weights;
    void add(int64_t id, float w) { ids.push_back(id), weights.push_back(w); }
    // Keep those for which keep[i].
    void filter(const std::vector<char>& keep) {
      size_t n = 0;
      for (size_t i = 0; i < ids.size(); ++i)
        if (keep[i]) ids[n] = ids[i], weights[n] = weights[i], ++n;
      ids.resize(n), weights.resize(n);
    }
  };

  const float* maxima(int64_t r) const { return maxima_.data() + r * blocks_; }
  float* maxima(int64_t r) { return maxima_.data() + r * blocks_; }
  int64_t values_of(int64_t block) const { return std::min<int64_t>(kVocabBlock, size_ - block * kVocabBlock); }
  bool worth_threads(int64_t blocks) const { return blocks > 64 && omp_get_max_threads() > 1; }

  // f(row, first block, number of values) over all rows, a chunk of blocks at a time, on all threads.
  template <class F>
  void by_chunks(int64_t count, const F& f) const {
    const int64_t chunks = (blocks_ + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(dynamic, 1) if (worth_threads(count * blocks_))
    for (int64_t i = 0; i < count * chunks; ++i) {
      const int64_t first = i % chunks * kChunk;
      f(i / chunks, first, std::min<int64_t>(kChunk * kVocabBlock, size_ - first * kVocabBlock));
    }
  }

  void find_best(int64_t r, int64_t& best, float& highest) const {
    int64_t block = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      if (maxima(r)[b] != maxima(r)[b]) {
        block = b;
        break;
      }
      if (maxima(r)[b] > maxima(r)[block]) block = b;
    }
    highest = maxima(r)[block];
    const float* x = rows_[r] + block * kVocabBlock;
    int64_t i = 0;
    while (highest == highest ? x[i] != highest : x[i] == x[i]) ++i;
    best = block * kVocabBlock + i;
  }

  // A value that at least k values of the row reach; -inf where the blocks are too few to tell.
  float bound_for(int64_t r, int64_t k) const {
    const int64_t whole = size_ / kVocabBlock;
    if (k > whole / 4) return -std::numeric_limits<float>::infinity();
    std::vector<float> top(maxima(r), maxima(r) + whole);
    std::nth_element(top.begin(), top.begin() + (k - 1), top.end(), std::greater<float>());
    return top[static_cast<size_t>(k - 1)];
  }

  // Ids (ascending) of the values that are at least `bound`.
  void at_least(int64_t r, float bound, std::vector<int64_t>& ids) const {
    for (int64_t b = 0; b < blocks_; ++b) {
      if (!(maxima(r)[b] >= bound)) continue;
      const float* x = rows_[r] + b * kVocabBlock;
      for (int64_t i = 0, n = values_of(b); i < n; ++i)
        if (x[i] >= bound) ids.push_back(b * kVocabBlock + i);
    }
  }

  int64_t count_above(int64_t r, float value) const {
    int64_t count = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      if (!(maxima(r)[b] > value)) continue;
      const float* x = rows_[r] + b * kVocabBlock;
      for (int64_t i = 0, n = values_of(b); i < n; ++i) count += x[i] > value;
    }
    return count;
  }

  std::vector<int64_t> largest(int64_t r, int64_t k) const {
    k = std::min(k, size_);
    std::vector<int64_t> ids;
    if (k <= 0) return ids;
    at_least(r, bound_for(r, k), ids);
    const float* x = rows_[r];
    const auto before = [x](int64_t a, int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
    std::partial_sort(ids.begin(), ids.begin() + k, ids.end(), before);
    ids.resize(static_cast<size_t>(k));
    return ids;
  }

  // First index whose running sum exceeds target; where rounding left none, the first that reaches the total.
  static int64_t first_above(const std::vector<double>& cumulative, double target) {
    auto found = std::upper_bound(cumulative.begin(), cumulative.end(), target);
    if (found == cumulative.end()) found = std::lower_bound(cumulative.begin(), cumulative.end(), cumulative.back());
    return found - cumulative.begin();
  }

  template <class T>
  static std::vector<double> running_sum(const T* x, int64_t n) {
    std::vector<double> out(static_cast<size_t>(n));
    double total = 0;
    for (int64_t i = 0; i < n; ++i) out[static_cast<size_t>(i)] = total += static_cast<double>(x[i]);
    return out;
  }

  // Invert the cumulative distribution: first by block, then inside it.
  int64_t draw_any(const KernelTable& k, const DrawParams& d, const float* sums) const {
    const std::vector<double> blocks = running_sum(sums, blocks_);
    const double target = d.uniform * blocks.back();
    const int64_t block = first_above(blocks, target);
    const double before = block ? blocks[static_cast<size_t>(block - 1)] : 0.0;
    float weights[kVocabBlock];
    const int64_t n = values_of(block);
    k.exps(rows_[d.row] + block * kVocabBlock, n, highest_[d.row], d.temperature, weights);
    const std::vector<double> inside = running_sum(weights, n);
    // The block's own sum is rounded to float32, its running sum is not: measure the rest on the latter's scale.
    const double rest = (target - before) / (blocks[static_cast<size_t>(block)] - before) * inside.back();
    return block * kVocabBlock + first_above(inside, rest);
  }

  int64_t draw_filtered(const KernelTable& k, const DrawParams& d, const float* sums) const {
    Candidates c;
    double total = 0;
    if (d.top_k) {
      total = top_k_candidates(k, d, c);
    } else {
      for (int64_t b = 0; d.top_p < 1 && b < blocks_; ++b) total += static_cast<double>(sums[b]);
      double floor = d.min_p;
      // Tokens below this have, all together, less than the mass that top_p cuts: none of them survives. Halved, so that
      // rounding of the total can never exclude a token that should be seen.
      if (d.top_p < 1) floor = std::max(floor, 0.5 * (1.0 - d.top_p) * total / static_cast<double>(size_));
      heavy_candidates(k, d, static_cast<float>(floor), c);
    }
    if (d.top_p < 1) nucleus(c, d.top_p * total);
    if (d.min_p > 0) {
      std::vector<char> likely(c.ids.size());
      for (size_t i = 0; i < c.ids.size(); ++i) likely[i] = c.weights[i] >= static_cast<float>(d.min_p);
      c.filter(likely);
    }
    const std::vector<double> cumulative = running_sum(c.weights.data(), static_cast<int64_t>(c.weights.size()));
    return c.ids[static_cast<size_t>(first_above(cumulative, d.uniform * cumulative.back()))];
  }

  // Every token as likely as the k-th; a banned one (-inf) is no candidate. Returns the sum of the weights.
  double top_k_candidates(const KernelTable& k, const DrawParams& d, Candidates& c) const {
    at_least(d.row, std::max(bound_for(d.row, d.top_k), std::numeric_limits<float>::lowest()), c.ids);
    std::vector<float> values(c.ids.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = rows_[d.row][c.ids[i]];
    if (static_cast<int64_t>(values.size()) > d.top_k) {
      std::vector<float> order = values;
      std::nth_element(order.begin(), order.begin() + (d.top_k - 1), order.end(), std::greater<float>());
      const float kth = order[static_cast<size_t>(d.top_k - 1)];
      size_t n = 0;
      for (size_t i = 0; i < values.size(); ++i)
        if (values[i] >= kth) values[n] = values[i], c.ids[n] = c.ids[i], ++n;
      values.resize(n), c.ids.resize(n);
    }
    c.weights.resize(values.size());
    k.exps(values.data(), static_cast<int64_t>(values.size()), highest_[d.row], d.temperature, c.weights.data());
    double total = 0;
    for (float w : c.weights) total += static_cast<double>(w);
    return total;
  }

  // Every token whose weight is at least `floor`.
  void heavy_candidates(const KernelTable& k, const DrawParams& d, float floor, Candidates& c) const {
    std::vector<float> tops(static_cast<size_t>(blocks_));
    k.exps(maxima(d.row), blocks_, highest_[d.row], d.temperature, tops.data());
    const float near = floor * 0.9999f;  // whether e^x is monotonic to the last bit must not matter
    float weights[kVocabBlock];
    for (int64_t b = 0; b < blocks_; ++b) {
      if (!(tops[static_cast<size_t>(b)] >= near)) continue;
      const int64_t n = values_of(b);
      k.exps(rows_[d.row] + b * kVocabBlock, n, highest_[d.row], d.temperature, weights);
      for (int64_t i = 0; i < n; ++i)
        if (weights[i] >= floor) c.add(b * kVocabBlock + i, weights[i]);
    }
  }

  // The largest weights, as long as the mass before them is below `limit`; ties by id. Sums over the upper halves of
  // the bit patterns (positive floats order like them) tell which are surely in; only the band at the border is sorted.
  static void nucleus(Candidates& c, double limit) {
    const size_t n = c.ids.size();
    std::vector<char> in(n, 0);
    std::vector<size_t> band;
    double above = 0;
    if (n > kSortAtMost) {
      std::vector<double> bins(kBins, 0.0);
      for (size_t i = 0; i < n; ++i) bins[upper_half(c.weights[i])] += static_cast<double>(c.weights[i]);
      int top = kBins - 1;
      while (top > 0 && bins[static_cast<size_t>(top)] == 0) --top;
      int border = top;
      double mass = 0;
      for (; border > 0; --border) {
        const double next = mass + bins[static_cast<size_t>(border)];
        if (next >= limit) break;
        mass = next;
      }
      above = mass;
      for (size_t i = 0; i < n; ++i) {
        const int bits = upper_half(c.weights[i]);
        if (bits > border) in[i] = 1;
        if (bits == border) band.push_back(i);
      }
    } else {
      band.resize(n);
      for (size_t i = 0; i < n; ++i) band[i] = i;
    }
    std::stable_sort(band.begin(), band.end(), [&](size_t a, size_t b) { return c.weights[a] > c.weights[b]; });
    double mass = 0;
    for (size_t i : band) {
      const double w = static_cast<double>(c.weights[i]);
      mass += w;
      in[i] = (above + mass) - w < limit;
    }
    c.filter(in);
  }

  static int upper_half(float w) {
    uint32_t bits;
    std::memcpy(&bits, &w, 4);
    return static_cast<int>(bits >> 16);
  }

  int64_t size_, blocks_;
  std::vector<const float*> rows_;
  std::vector<float> maxima_, highest_;
};

}  // namespace octavo
