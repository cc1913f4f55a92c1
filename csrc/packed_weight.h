// `PackedWeight`: a matrix in panels, floats or quantised, and the products over it.
//
// Invariant: panels are filled once, before the first product. It knows no model.
#pragma once

#include "kernels.h"
#include "loading.h"
#include "memory.h"
#include "module.h"

#include <nanobind/nanobind.h>

#include <omp.h>

#include <algorithm>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace octavo {

namespace nb = nanobind;

// Other Python threads may run during long calls only: getting the lock back can cost milliseconds.
constexpr double kLongCall = 2e8;  // arithmetic operations

class PackedWeight {
 public:
  // Panels of `dtype` for a weight [n, k], to be filled.
  PackedWeight(int dtype, int64_t n, int64_t k) : type_(static_cast<DType>(dtype)), n_(n), k_(k) {
    bytes_ = static_cast<size_t>((n + kPanel - 1) / kPanel * bytes_of_panel());
    memory_ = weight_memory(bytes_);
  }

  // Quantised panels, to be filled.
  PackedWeight(int bits, int scales, int64_t group, int64_t n, int64_t k)
      : type_(DType::bf16), format_{bits, static_cast<Scales>(scales), group}, n_(n), k_(k) {
    if (bits == 16 && (format_.scales != Scales::wide || group != kFixedSpan))
      throw std::invalid_argument("fixed-point weights share a step among " + std::to_string(kFixedSpan));
    bytes_ = static_cast<size_t>((n + kPanel - 1) / kPanel * bytes_of_panel());
    memory_ = weight_memory(bytes_);
  }

  // Rows [first, first + count): codes [count, k] a byte each, scales (and zeros, or 0) float32 [count, groups].
  void pack_codes(uintptr_t codes, uintptr_t scales, uintptr_t zeros, int64_t group_size, int64_t first,
                  int64_t count) const {
    if (format_.bits == 0 || format_.bits == 16 || group_size < kUnit || format_.group % kUnit || first < 0 || count < 1 || first + count > n_)
      throw std::invalid_argument("codes of rows " + std::to_string(first) + " to " + std::to_string(first + count));
    nb::gil_scoped_release release;
    const int64_t groups = (k_ + group_size - 1) / group_size;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < count; r += kPanel) {
      kernels->pack_codes({at<const uint8_t>(codes) + r * k_, at<const float>(scales) + r * groups,
                           zeros ? at<const float>(zeros) + r * groups : nullptr, group_size, first + r,
                           std::min<int64_t>(kPanel, count - r), n_, k_, format_, memory_.data});
    }
  }

  // From a weight in memory, of the same type.
  void pack(uintptr_t weight, int64_t stride) {
    nb::gil_scoped_release release;
    const int64_t panels = (n_ + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t first = p * kPanel;
      kernels->pack_rows(at<const char>(weight) + first * stride * element_size(type_), type_, stride, first,
                         std::min<int64_t>(kPanel, n_ - first), n_, k_, memory_.data);
    }
  }

  // Rows [first, first + count) as a file holds them (`kind`: GGUF's type number), put on a queue.
  LoadArgs load_args(uintptr_t source, int kind, int64_t first, int64_t count) const {
    const StoredType stored = stored_type(kind);
    if (stored.block == 0 || k_ % stored.block)
      throw std::invalid_argument("rows of " + std::to_string(k_) + " numbers of type " + std::to_string(kind));
    if (first < 0 || count < 1 || first + count > n_)
      throw std::out_of_range("rows " + std::to_string(first) + " to " + std::to_string(first + count) +
                              " of a weight with " + std::to_string(n_));
    return {at<const void>(source), kind, k_ / stored.block * stored.bytes, first, count, n_, k_, type_, memory_.data,
            nullptr, format_};
  }

  void run(uintptr_t x, int x_type, int64_t ldx, int64_t m, uintptr_t y, int y_type, uintptr_t bias) const {
    multiply({memory_.data, type_, at<const float>(bias), at<const void>(x), static_cast<DType>(x_type), ldx,
              at<void>(y), static_cast<DType>(y_type), n_, m, n_, k_, false, nullptr});
  }

  // First index and value of the largest output of each row, without the outputs; a NaN counts as largest.
  void argmax(uintptr_t x, int x_type, int64_t ldx, int64_t m, uintptr_t ids, uintptr_t values, uintptr_t bias) const {
    std::optional<nb::gil_scoped_release> release;
    if (operations(m) > kLongCall) release.emplace();
    find_best(at<const void>(x), static_cast<DType>(x_type), ldx, m, at<int64_t>(ids), at<float>(values),
              at<const float>(bias));
  }

  // The same; the caller may hold the interpreter lock or not.
  void find_best(const void* x, DType x_type, int64_t ldx, int64_t m, int64_t* ids, float* values,
                 const float* bias) const {
    const int64_t runs = argmax_runs(m, n_, k_, type_);
    std::vector<Best> best(static_cast<size_t>(runs * m), Best{-std::numeric_limits<float>::infinity(), -1});
    compute({memory_.data, type_, bias, x, x_type, ldx, nullptr, DType::f32, 0, m, n_, k_, false, best.data()});
    for (int64_t r = 0; r < m; ++r) {
      Best top = best[static_cast<size_t>(r)];
      for (int64_t i = 1; i < runs && top.value == top.value; ++i) {
        const Best& next = best[static_cast<size_t>(i * m + r)];
        if (!(next.value <= top.value)) top = next;
      }
      ids[r] = std::max<int64_t>(top.index, 0);
      values[r] = top.value;
    }
  }

  // Outputs [first, last), `first` being the first of a panel: x float32 [m, k], row stride ldx; y float32 [m, last -
  // first], row stride ldy. x_tiles: x is such, see `KernelTable::takes_tiles`. threaded: whether threads may share it.
  // The caller may hold the interpreter lock or not.
  void multiply_floats(const float* x, int64_t ldx, int64_t m, float* y, int64_t ldy, const float* bias, int64_t first,
                       int64_t last, bool x_tiles, bool threaded) const {
    compute({panel(first / kPanel), type_, bias ? bias + first : nullptr, x, DType::f32, ldx,
             y, DType::f32, ldy, m, last - first, k_, false, nullptr, x_tiles},
            threaded);
  }

  bool takes_tiles() const { return !format_.bits && kernels->takes_tiles(type_, k_); }

  // The same with the first half of the outputs gated by the second: y [m, n / 2], or y_tiles. False, and nothing done,
  // where no kernel does both.
  bool multiply_gated(const float* x, int64_t ldx, int64_t m, float* y, int64_t ldy, const float* bias,
                      Activation kind, bool x_tiles, bool y_tiles, bool threaded) const {
    LinearArgs a{memory_.data, type_, bias, x, DType::f32, ldx, y, DType::f32, ldy, m, n_, k_, false, nullptr, x_tiles, y_tiles};
    a.threaded = threaded && worth_sharing(m);
    return format_.bits ? kernels->gated_quantized(a, format_, kind) : kernels->gated_linear(a, kind);
  }

  bool quantized() const { return format_.bits != 0; }
  DType type() const { return type_; }
  const char* panel(int64_t p) const { return memory_.data + p * bytes_of_panel(); }
  int64_t inputs() const { return k_; }
  int64_t outputs() const { return n_; }

  void rows(uintptr_t ids, int64_t count, uintptr_t out, int out_type) const {
    for (int64_t i = 0; i < count; ++i) {
      if (at<const int64_t>(ids)[i] < 0 || at<const int64_t>(ids)[i] >= n_)
        throw std::out_of_range("row " + std::to_string(at<const int64_t>(ids)[i]) + " of a weight with " +
                                std::to_string(n_) + " rows");
    }
    if (format_.bits)
      return kernels->unpack_codes(memory_.data, format_, k_, at<const int64_t>(ids), count, at<void>(out),
                                   static_cast<DType>(out_type));
    kernels->unpack_rows(memory_.data, type_, k_, at<const int64_t>(ids), count, at<void>(out),
                         static_cast<DType>(out_type));
  }

  size_t bytes() const { return bytes_; }

 private:
  int64_t bytes_of_panel() const {
    return format_.bits ? panel_bytes(format_, k_) : kPanel * panel_depth(k_, type_) * element_size(type_);
  }
  double operations(int64_t m) const {
    return 2.0 * static_cast<double>(m) * static_cast<double>(n_) * static_cast<double>(k_);
  }
  void multiply(const LinearArgs& a) const {
    std::optional<nb::gil_scoped_release> release;
    if (operations(a.m) > kLongCall) release.emplace();
    compute(a);
  }
  bool worth_sharing(int64_t m) const {
    return omp_get_max_threads() > 1 && (bytes_ > 65536 || operations(m) > 500000);
  }
  void compute(LinearArgs a, bool threaded = true) const {
    a.threaded = threaded && worth_sharing(a.m);
    if (!(format_.bits ? kernels->quantized_linear(a, format_) : kernels->linear(a))) throw std::bad_alloc();
  }

  Memory memory_;
  DType type_;  // of quantised panels: bfloat16, which only says how many panels make a run
  QuantizedFormat format_;
  int64_t n_, k_;
  size_t bytes_ = 0;
};

}  // namespace octavo
