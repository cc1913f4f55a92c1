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
    by_chunks(count, 1, [&](int64_t r, int64_t first, int64_t values) {
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
    by_chunks(count, 4, [&](int64_t i, int64_t first, int64_t values) {
      const DrawParams& d = draws[i];
      if (d.top_k || (d.top_p >= 1 && d.min_p > 0)) return;  // needs no sum over the whole vocabulary
      k.exp_sums(rows_[d.row] + first * kVocabBlock, values, highest_[d.row], d.temperature,
                 sums.data() + i * blocks_ + first);
    });
    std::vector<int64_t> tokens(draws.size());
#pragma omp parallel for schedule(dynamic, 1) if (worth_threads(count * kFinish))
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
    by_chunks(count, 4, [&](int64_t i, int64_t first, int64_t values) {
      k.exp_sums(rows_[rows[i]] + first * kVocabBlock, values, highest_[rows[i]], 1.0f,
                 sums.data() + i * blocks_ + first);
    });
    std::vector<RowLogprobs> out(rows.size());
#pragma omp parallel for schedule(dynamic, 1) if (worth_threads(count * kFinish))
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
  static constexpr int64_t kChunk = 64;  // blocks of a thread's turn: 128 KiB of logits
  static constexpr int64_t kFinish = 300;  // what is left after the sums of a draw, in blocks' time
  static constexpr int kBins = 0x3F81;  // upper halves of the floats 0 to 1

  // Ids (ascending) and their weights. Room for all is made once, and elements are written before it is known whether
  // they count: a branch on random values costs more than a store.
  struct Candidates {
    std::vector<int32_t> ids;
    std::vector<float> weights;
    int64_t count = 0;

    void reserve(int64_t n) {
      if (static_cast<int64_t>(ids.size()) < n) ids.resize(static_cast<size_t>(n)), weights.resize(static_cast<size_t>(n));
    }
    template <class Keep>
    void filter(const Keep& keep) {
      int64_t n = 0;
      for (int64_t i = 0; i < count; ++i) {
        const float w = weights[i];
        ids[n] = ids[i], weights[n] = w;
        n += keep(w);
      }
      count = n;
    }
  };

  const float* maxima(int64_t r) const { return maxima_.data() + r * blocks_; }
  float* maxima(int64_t r) { return maxima_.data() + r * blocks_; }
  int64_t values_of(int64_t block) const { return std::min<int64_t>(kVocabBlock, size_ - block * kVocabBlock); }
  // Waking a thread costs about as much as reading a thousand blocks.
  static bool worth_threads(int64_t blocks) { return blocks > 1024 && omp_get_max_threads() > 1; }

  // cost: of a block, in times of reading it. f(row, first block, number of values) over all rows, a chunk of blocks at a time, on all threads.
  template <class F>
  void by_chunks(int64_t count, int64_t cost, const F& f) const {
    const int64_t chunks = (blocks_ + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(dynamic, 1) if (worth_threads(count * blocks_ * cost))
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
    static thread_local Candidates c;
    c.count = 0;
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
    const float least = static_cast<float>(d.min_p);
    if (least > 0) c.filter([least](float w) { return w >= least; });
    return c.ids[static_cast<size_t>(pick(c.weights.data(), c.count, d.uniform))];
  }

  // The first index whose running sum exceeds uniform times the total, by groups, then inside one.
  static int64_t pick(const float* weights, int64_t count, double uniform) {
    constexpr int64_t kGroup = 256;
    std::vector<double> groups;
    double total = 0;
    for (int64_t i = 0; i < count; i += kGroup) {
      double part[4] = {0, 0, 0, 0};
      for (int64_t j = i; j < std::min(count, i + kGroup); ++j) part[j & 3] += static_cast<double>(weights[j]);
      groups.push_back(total += (part[0] + part[1]) + (part[2] + part[3]));
    }
    const double target = uniform * total;
    const int64_t group = first_above(groups, target), first = group * kGroup;
    const double before = group ? groups[static_cast<size_t>(group - 1)] : 0.0;
    const std::vector<double> inside = running_sum(weights + first, std::min(kGroup, count - first));
    return first + first_above(inside, target - before);
  }

  // Every token as likely as the k-th; a banned one (-inf) is no candidate. Returns the sum of the weights.
  double top_k_candidates(const KernelTable& k, const DrawParams& d, Candidates& c) const {
    std::vector<int64_t> ids;
    at_least(d.row, std::max(bound_for(d.row, d.top_k), std::numeric_limits<float>::lowest()), ids);
    std::vector<float> values(ids.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = rows_[d.row][ids[i]];
    float kth = std::numeric_limits<float>::lowest();
    if (static_cast<int64_t>(values.size()) > d.top_k) {
      std::vector<float> order = values;
      std::nth_element(order.begin(), order.begin() + (d.top_k - 1), order.end(), std::greater<float>());
      kth = order[static_cast<size_t>(d.top_k - 1)];
    }
    c.reserve(static_cast<int64_t>(values.size()));
    for (size_t i = 0; i < values.size(); ++i) {
      if (!(values[i] >= kth)) continue;
      values[static_cast<size_t>(c.count)] = values[i];
      c.ids[static_cast<size_t>(c.count++)] = static_cast<int32_t>(ids[i]);
    }
    k.exps(values.data(), c.count, highest_[d.row], d.temperature, c.weights.data());
    double total = 0;
    for (int64_t i = 0; i < c.count; ++i) total += static_cast<double>(c.weights[static_cast<size_t>(i)]);
    return total;
  }

  // Every token whose weight is at least `floor`.
  void heavy_candidates(const KernelTable& k, const DrawParams& d, float floor, Candidates& c) const {
    std::vector<float> tops(static_cast<size_t>(blocks_));
    k.exps(maxima(d.row), blocks_, highest_[d.row], d.temperature, tops.data());
    const float near = floor * 0.9999f;  // whether e^x is monotonic to the last bit must not matter
    c.reserve(size_ + 1);
    float weights[kVocabBlock];
    int32_t* ids = c.ids.data();
    float* kept = c.weights.data();
    int64_t count = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      if (!(tops[static_cast<size_t>(b)] >= near)) continue;
      const int64_t n = values_of(b), first = b * kVocabBlock;
      k.exps(rows_[d.row] + first, n, highest_[d.row], d.temperature, weights);
      for (int64_t i = 0; i < n; ++i) {
        ids[count] = static_cast<int32_t>(first + i), kept[count] = weights[i];
        count += weights[i] >= floor;
      }
    }
    c.count = count;
  }

  // The largest weights, as long as the mass before them is below `limit`; ties by id. Nothing is sorted: positive floats
  // order like their bit patterns, so sums over the upper 16 bits, then the next 8, then the last 8 of those that share
  // the border's upper bits close in on the border's exact value.
  static void nucleus(Candidates& c, double limit) {
    static thread_local std::vector<double> bins;
    bins.assign(kBins, 0.0);
    const float* w = c.weights.data();
    for (int64_t i = 0; i < c.count; ++i) bins[bits_of(w[i]) >> 16] += static_cast<double>(w[i]);
    double above = 0;
    uint32_t border = border_bin(bins.data(), kBins, limit, above);
    for (int shift = 8; shift >= 0; shift -= 8) {
      double part[256] = {};
      for (int64_t i = 0; i < c.count; ++i)
        if (bits_of(w[i]) >> (shift + 8) == border) part[bits_of(w[i]) >> shift & 255] += static_cast<double>(w[i]);
      border = border << 8 | border_bin(part, 256, limit, above);
    }
    float value;
    std::memcpy(&value, &border, 4);
    double mass = above;  // before the next of the equal weights at the border
    c.filter([value, limit, &mass](float weight) {
      if (weight != value) return weight > value;
      const bool in = mass < limit;
      mass += static_cast<double>(value);
      return in;
    });
  }

  // From the top, the bin in which the mass reaches `limit`, or the lowest that holds something; adds the bins over it.
  static uint32_t border_bin(const double* bins, int count, double limit, double& above) {
    uint32_t last = 0;
    double before_last = above;
    for (int bin = count - 1; bin >= 0; --bin) {
      if (bins[bin] == 0) continue;
      last = static_cast<uint32_t>(bin), before_last = above;
      if (above + bins[bin] >= limit) break;
      above += bins[bin];
    }
    above = before_last;
    return last;
  }

  static uint32_t bits_of(float w) {
    uint32_t bits;
    std::memcpy(&bits, &w, 4);
    return bits;
  }

  int64_t size_, blocks_;
  std::vector<const float*> rows_;
  std::vector<float> maxima_, highest_;
};

}  // namespace octavo
