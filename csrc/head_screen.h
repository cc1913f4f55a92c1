// `HeadScreen`: the largest output of each row of a large product, without reading all of its weights.
//
// A second copy in six or eight bits (screen_panels.h, screen_amx.h) says of every panel of 16 outputs how large they are
// at most: by Cauchy
// and Schwarz, an output is no further from what the copy gives than |x| |w - w'| + |x - x'| |w'|, where x' and w' are
// what the copy multiplies. The weights themselves are read only for panels that could hold the largest output.
//
// Invariant: index and value are those of `PackedWeight::argmax`, bit for bit. It knows no model.
#pragma once

#include "kernels.h"
#include "memory.h"
#include "module.h"
#include "packed_weight.h"

#include <nanobind/nanobind.h>

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace octavo {

class HeadScreen {
 public:
  // head: floats; outlives this. bias: float32 [n] or 0.
  HeadScreen(const PackedWeight& head, uintptr_t bias)
      : head_(head), bias_(at<const float>(bias)), panels_((head.outputs() + kPanel - 1) / kPanel) {
    if (head.quantized()) throw std::invalid_argument("a screen of a quantised weight");
    const int64_t padded = screen_blocks(panels_) * kScreenBlock;
    sizes_.assign(static_cast<size_t>(padded), 0), errors_.assign(static_cast<size_t>(padded), 0);
    bytes_ = static_cast<size_t>(panels_ * made_by_.screen_panel_bytes(head.inputs()));
    memory_ = weight_memory(bytes_);
    {
      nb::gil_scoped_release release;
      fill();
    }
    double most = 0;
    for (size_t p = 0; p < sizes_.size(); ++p) largest_ = larger(largest_, double{sizes_[p]} + double{errors_[p]});
    for (int64_t i = 0; bias_ && i < head.outputs(); ++i) most = larger(most, std::abs(double{bias_[i]}));
    rounding_ = most * 0x1p-22 + 1e-30;
    usable_ = std::isfinite(largest_) && std::isfinite(most);
  }

  bool usable() const { return usable_; }  // false: the weight holds a number that is not finite
  size_t bytes() const { return bytes_ + (sizes_.size() + errors_.size()) * sizeof(float); }

  // As `PackedWeight::argmax`. Returns how many rows had to be left to the whole product.
  int64_t argmax(uintptr_t x, int x_type, int64_t ldx, int64_t m, uintptr_t ids, uintptr_t values) {
    nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(busy_);
    const DType type = static_cast<DType>(x_type);
    int64_t left = 0;
    for (int64_t first = 0; first < m; first += kScreenRows)
      left += part(x + static_cast<uintptr_t>(first * ldx * element_size(type)), type, ldx,
                   std::min(kScreenRows, m - first), at<int64_t>(ids) + first, at<float>(values) + first);
    return left;
  }

 private:
  // What the screen says of a row.
  struct CeilingsOfRow {
    const float* ceilings;  // blocks of kScreenBlock, `stride` floats apart
    int64_t stride;
    const float* tops;  // [blocks]
    int64_t blocks, panels;
  };

  void fill() {
    const int64_t k = head_.inputs();
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels_; ++p) {
      const size_t i = static_cast<size_t>(p);
      made_by_.screen_panel(
          {head_.panel(p), head_.type(), k, memory_.data + p * made_by_.screen_panel_bytes(k), &sizes_[i], &errors_[i]});
    }
  }

  int64_t part(uintptr_t x, DType type, int64_t ldx, int64_t m, int64_t* ids, float* values) {
    const int64_t blocks = screen_blocks(panels_);
    ceilings_.resize(sizes_.size() * static_cast<size_t>(m));
    tops_.resize(static_cast<size_t>(blocks * m));
    float row_sizes[kScreenRows];
    if (!made_by_.screen({memory_.data, head_.type(), bias_, at<const void>(x), type, ldx, m, head_.outputs(), head_.inputs(),
                          sizes_.data(), errors_.data(), rounding_of(), ceilings_.data(), tops_.data(), row_sizes,
                          omp_get_max_threads() > 1}))
      throw std::bad_alloc();
    // Panels for one thread: with many rows each has others to go on with.
    const int64_t alone = panels_ / (m > 2 * omp_get_max_threads() ? 8 : 64) + 1;
    int64_t waiting[kScreenRows];  // panels that could still hold a row's largest output; kTooMany: no end of them
    Best found[kScreenRows] = {};
    const auto row_at = [&](int64_t r) { return x + static_cast<uintptr_t>(r * ldx * element_size(type)); };
    const auto ceilings_of = [&](int64_t r) {
      return CeilingsOfRow{ceilings_.data() + r * kScreenBlock, m * kScreenBlock, tops_.data() + r * blocks, blocks, panels_};
    };
#pragma omp parallel for schedule(dynamic, 1) if (m > 1)
    for (int64_t r = 0; r < m; ++r) {
      // Or is not a number.
      const bool small = double{row_sizes[r]} * largest_ < 1e30;
      waiting[r] = small ? settle(ceilings_of(r), row_at(r), type, alone, found[r]) : kTooMany;
    }
    // The whole product serves all rows at once, at the price of all panels.
    const bool whole = 4 * std::accumulate(waiting, waiting + m, int64_t{0}) > 3 * panels_;
    bool open[kScreenRows];
    for (int64_t r = 0; r < m; ++r) {
      open[r] = waiting[r] && (whole || !settle_together(ceilings_of(r), row_at(r), type, waiting[r], found[r]));
      ids[r] = found[r].index, values[r] = found[r].value;
    }
    const int64_t left = std::count(open, open + m, true);
    if (left) multiply_whole(x, type, ldx, m, open, left, ids, values);
    return left;
  }

  // Rounding of the sums: of the copy's, a chain over half units of numbers up to |x| + |x'|, and of the product's,
  // chains of at most 256 and one over those. 16: what is done with both.
  double rounding_of() const {
    const int64_t k = head_.inputs();
    const auto steps = static_cast<double>(4 * units_of(k) + std::min<int64_t>(k, 256) + k / 256 + 16);
    return steps * 0x1p-24;
  }

  // The largest output of a row, from the panels that could hold it; returns 0. If those are more than `alone`: how many,
  // with `best` that of one of them.
  int64_t settle(const CeilingsOfRow& row, uintptr_t x, DType type, int64_t alone, Best& best) const {
    const int64_t first = highest(row);
    if (!exact(x, type, first, best)) return kTooMany;
    std::vector<int32_t> found(static_cast<size_t>(alone));
    const int64_t count = panels_above(row, bar(best), found.data(), alone);
    if (count > alone) return count;
    found.resize(static_cast<size_t>(count));
    highest_first(row, found);
    for (int32_t p : found) {
      if (p == first) continue;
      if (ceiling(row, p) < bar(best)) break;
      if (!look_into(x, type, p, best)) return kTooMany;
    }
    return 0;
  }

  // The rest of it, `count` panels, on all threads. False: no memory is left.
  bool settle_together(const CeilingsOfRow& row, uintptr_t x, DType type, int64_t count, Best& best) const {
    std::vector<int32_t> found(static_cast<size_t>(count));
    panels_above(row, bar(best), found.data(), count);
    highest_first(row, found);
    bool fine = true;
#pragma omp parallel
    {
      Best own = best;
      bool own_fine = true;
#pragma omp for schedule(static, 1) nowait
      for (int64_t i = 0; i < count; ++i) {
        const int32_t p = found[static_cast<size_t>(i)];
        if (own_fine && !(ceiling(row, p) < bar(own))) own_fine = look_into(x, type, p, own);
      }
#pragma omp critical
      {
        fine = fine && own_fine;
        if (before(own, best)) best = own;
      }
    }
    return fine;
  }

  // The panels whose ceiling is not below `least`, as far as there is room; returns how many there are.
  static int64_t panels_above(const CeilingsOfRow& row, float least, int32_t* found, int64_t room) {
    int64_t count = 0;
    for (int64_t b = 0; b < row.blocks; ++b) {
      if (row.tops[b] < least) continue;
      for (int64_t p = b * kScreenBlock; p < std::min((b + 1) * kScreenBlock, row.panels); ++p) {
        if (ceiling(row, static_cast<int32_t>(p)) < least) continue;
        if (count < room) found[count] = static_cast<int32_t>(p);
        ++count;
      }
    }
    return count;
  }

  static void highest_first(const CeilingsOfRow& row, std::vector<int32_t>& found) {
    std::sort(found.begin(), found.end(), [&](int32_t a, int32_t b) { return ceiling(row, a) > ceiling(row, b); });
  }
  static float ceiling(const CeilingsOfRow& row, int32_t p) {
    return row.ceilings[p / kScreenBlock * row.stride + p % kScreenBlock];
  }
  // The panel with the highest ceiling: where the largest output most likely is.
  static int64_t highest(const CeilingsOfRow& row) {
    const int64_t block = std::max_element(row.tops, row.tops + row.blocks) - row.tops;
    const float* at = row.ceilings + block * row.stride;
    return block * kScreenBlock + (std::max_element(at, at + kScreenBlock) - at);
  }
  static bool before(const Best& a, const Best& b) {
    return a.value > b.value || (a.value == b.value && a.index < b.index);
  }

  // best: that of a panel if it is better. False: no memory is left.
  bool look_into(uintptr_t x, DType type, int64_t panel, Best& best) const {
    Best next;
    if (!exact(x, type, panel, next)) return false;
    if (before(next, best)) best = next;
    return true;
  }

  // What a ceiling must not be below, so that nothing that could be as large is left out.
  float bar(const Best& best) const {
    return static_cast<float>(best.value - rounding_ - 1e-6 * std::abs(double{best.value}));
  }
  static double larger(double a, double b) { return a == a && !(b <= a) ? b : a; }  // a NaN stays

  // The largest output within a panel, as the whole product has it. False: out of memory.
  bool exact(uintptr_t x, DType type, int64_t panel, Best& best) const {
    best = {-std::numeric_limits<float>::infinity(), -1};
    const int64_t first = panel * kPanel;
    const int64_t columns = std::min<int64_t>(kPanel, head_.outputs() - first);
    if (!made_by_.linear({head_.panel(panel), head_.type(), bias_ ? bias_ + first : nullptr, at<const void>(x), type, 0,
                          nullptr, DType::f32, 0, 1, columns, head_.inputs(), false, &best}))
      return false;
    best.index = static_cast<int32_t>(std::max<int64_t>(best.index, 0) + first);
    return true;
  }

  void multiply_whole(uintptr_t x, DType type, int64_t ldx, int64_t m, const bool* open, int64_t left, int64_t* ids,
                      float* values) const {
    const size_t bytes = static_cast<size_t>(head_.inputs() * element_size(type));
    std::vector<char> rows(static_cast<size_t>(left) * bytes);
    std::vector<int64_t> found(static_cast<size_t>(left));
    std::vector<float> value(static_cast<size_t>(left));
    int64_t i = 0;
    for (int64_t r = 0; r < m; ++r) {
      const char* from = at<char>(x) + r * ldx * element_size(type);
      if (open[r]) std::memcpy(&rows[static_cast<size_t>(i++) * bytes], from, bytes);
    }
    head_.find_best(rows.data(), type, head_.inputs(), left, found.data(), value.data(), bias_);
    i = 0;
    for (int64_t r = 0; r < m; ++r)
      if (open[r]) ids[r] = found[static_cast<size_t>(i)], values[r] = value[static_cast<size_t>(i++)];
  }

  static constexpr int64_t kTooMany = int64_t{1} << 40;

  const KernelTable& made_by_ = *kernels;  // who made the copy reads it
  const PackedWeight& head_;
  const float* bias_;
  int64_t panels_;
  Memory memory_;
  size_t bytes_ = 0;
  std::vector<float> sizes_, errors_;  // of each panel, see ScreenPanelArgs
  double largest_ = 0, rounding_ = 0;  // largest norm of an output; how far adding a bias and numbers near zero may err
  bool usable_ = false;
  std::mutex busy_;  // for what follows
  std::vector<float> ceilings_, tops_;
};

}  // namespace octavo
