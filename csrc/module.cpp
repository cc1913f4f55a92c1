// The Python binding: `octavo.kernels.cpu._native`.
//
// It takes addresses and sizes as integers: a call costs a fraction of a microsecond and needs no torch headers. The
// Python side (octavo/kernels/cpu) checks types, shapes and strides; what is only known here (block ids, slots, lengths)
// is checked here. Weights are bound in module_weights.cpp, attention in module_attention.cpp, whole layers in
// module_stack.cpp, yardsticks in module_limits.cpp. Threads come from the OpenMP runtime that torch has loaded: this
// module is not linked to one.
#include "kernels.h"
#include "module.h"
#include "processor.h"
#include "sampling.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <omp.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace octavo {

const KernelTable* kernels = nullptr;

namespace {

std::vector<std::string> instruction_sets() {  // best first
  std::vector<std::string> names;
  for (const InstructionSet& set : available_sets()) names.push_back(set.name);
  return names;
}

void use(const std::string& name) {
  for (const InstructionSet& set : available_sets()) {
    if (name != set.name) continue;
    kernels = &set.kernels();
    return;
  }
  throw std::invalid_argument("instruction set " + name + " is not built in or not on this processor");
}

void norm(uintptr_t x, int64_t x_stride, uintptr_t residual, uintptr_t sum, uintptr_t out, int64_t rows, int64_t dim,
          uintptr_t weight, float eps, int type) {
  kernels->norm({at<const void>(x), at<const void>(residual), at<void>(sum), at<void>(out), x_stride, rows, dim,
                 at<const float>(weight), eps, static_cast<DType>(type), rows > 1 && worth_threads(rows * dim)});
}

void rotary(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t tokens, int64_t heads, int64_t dim, uintptr_t cos,
            uintptr_t sin, uintptr_t weight, float eps, int type) {
  kernels->rotary({at<const void>(x), at<void>(out), x_stride, tokens, heads, dim, at<const float>(cos),
                   at<const float>(sin), at<const float>(weight), eps, static_cast<DType>(type),
                   tokens > 1 && worth_threads(tokens * heads * dim)});
}

void gate(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t rows, int64_t dim, int kind, int type) {
  kernels->gate({at<const void>(x), at<void>(out), x_stride, rows, dim, static_cast<Activation>(kind),
                 static_cast<DType>(type), rows > 1 && worth_threads(rows * dim * 4)});
}

void argmax(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t rows, int64_t dim) {
  kernels->argmax({at<const float>(x), at<int64_t>(out), x_stride, rows, dim, rows > 1 && worth_threads(rows * dim)});
}

std::vector<double> uniforms(const std::vector<uint64_t>& seeds, const std::vector<uint32_t>& samples,
                             const std::vector<uint32_t>& positions, uint32_t stream) {
  if (seeds.size() != samples.size() || seeds.size() != positions.size())
    throw std::invalid_argument("seeds, samples and positions differ in length");
  std::vector<double> out;
  for (size_t i = 0; i < seeds.size(); ++i) out.push_back(uniform_at(seeds[i], samples[i], positions[i], stream));
  return out;
}

// Draws from rows of logits: see sampling.h. Addresses of float32 rows [vocabulary] that stay until the next scan.
class Sampling {
 public:
  explicit Sampling(int64_t vocabulary) : vocabulary_(vocabulary) {}

  std::pair<std::vector<int64_t>, std::vector<float>> scan(const std::vector<uintptr_t>& rows) {
    std::vector<const float*> addresses;
    for (uintptr_t row : rows) addresses.push_back(at<const float>(row));
    std::pair<std::vector<int64_t>, std::vector<float>> found;
    vocabulary_.scan(*kernels, addresses, found.first, found.second);
    return found;
  }

  // (row, temperature, top_k, top_p, min_p, uniform) per draw.
  std::vector<int64_t> draw(const std::vector<std::tuple<int64_t, float, int64_t, double, double, double>>& draws) const {
    std::vector<DrawParams> params;
    for (const auto& [row, temperature, top_k, top_p, min_p, uniform] : draws) {
      check_row(row);
      params.push_back({row, temperature, top_k, top_p, min_p, uniform});
    }
    return vocabulary_.draw(*kernels, params);
  }

  // (ids, log-probabilities, rank) per row: the token (if not -1) in front, then the `count` most likely.
  std::vector<std::tuple<std::vector<int64_t>, std::vector<float>, int64_t>> logprobs(
      const std::vector<int64_t>& rows, const std::vector<int64_t>& tokens, const std::vector<int64_t>& counts) const {
    if (rows.size() != tokens.size() || rows.size() != counts.size())
      throw std::invalid_argument("rows, tokens and counts differ in length");
    for (size_t i = 0; i < rows.size(); ++i) {
      check_row(rows[i]);
      if (tokens[i] < -1 || tokens[i] >= vocabulary_.size())
        throw std::out_of_range("token " + std::to_string(tokens[i]) + " is outside the vocabulary");
    }
    std::vector<std::tuple<std::vector<int64_t>, std::vector<float>, int64_t>> out;
    for (RowLogprobs& entry : vocabulary_.logprobs(*kernels, rows, tokens, counts))
      out.emplace_back(std::move(entry.ids), std::move(entry.values), entry.rank);
    return out;
  }

 private:
  void check_row(int64_t row) const {
    if (row < 0 || row >= vocabulary_.scanned())
      throw std::out_of_range("row " + std::to_string(row) + " was not scanned");
  }
  Vocabulary vocabulary_;
};

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
  using namespace octavo;
  // A process may end while a daemon thread (the server's engine) still holds packed weights. The interpreter does not
  // unwind such threads, so nanobind would list them as leaks at every exit. The system frees them; nothing is lost.
  nb::set_leak_warnings(false);
  m.def("instruction_sets", &instruction_sets);
  m.def("use", &use);
  m.def("in_use", [] { return std::string(kernels->name); });
  m.def("norm", &norm);
  m.def("rotary", &rotary);
  m.def("gate", &gate);
  m.def("argmax", &argmax);
  m.def("uniforms", &uniforms);
  bind_weights(m);
  nb::class_<Sampling>(m, "Sampling")
      .def(nb::init<int64_t>())
      .def("scan", &Sampling::scan)
      .def("draw", &Sampling::draw)
      .def("logprobs", &Sampling::logprobs);
  bind_attention(m);
  bind_stack(m);
  bind_limits(m);
  use(instruction_sets().front());
}
