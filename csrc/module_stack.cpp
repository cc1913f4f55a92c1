// The Python binding of `LayerStack`, see layer_stack.h and module.cpp. Addresses and sizes are checked by the Python
// side (octavo/kernels/cpu/stack.py), which also keeps what they point to.
#include "layer_stack.h"
#include "module.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

namespace octavo {
namespace {

// Getting the interpreter lock back can cost milliseconds; a step that takes longer lets other Python threads run.
constexpr double kLongStep = 3e8;  // arithmetic operations

using Parts = std::vector<std::tuple<const PackedWeight*, uintptr_t>>;

Product product_of(const Parts& parts) {
  if (parts.empty()) throw std::invalid_argument("a product without weights");
  Product product;
  for (const auto& [weight, bias] : parts) product.parts.push_back({weight, at<const float>(bias)});
  return product;
}

// norms: attention, MLP, after attention, after the MLP, query, key; 0 where there is none. products: qkv, out, gate_up,
// down, each as its weights and their biases.
void add(LayerStack& stack, const std::array<uintptr_t, 6>& norms, const std::array<Parts, 4>& products, int table) {
  const auto weight = [&](size_t i) { return at<const float>(norms[i]); };
  stack.add({weight(0), weight(1), weight(2), weight(3), weight(4), weight(5), product_of(products[0]),
             product_of(products[1]), product_of(products[2]), product_of(products[3]), table});
}

// tables: cos, sin, rows of each. False, and nothing done, where a position lies past the rows.
bool run(LayerStack& stack, Attention& attention, int64_t tokens, uintptr_t positions,
         const std::vector<std::tuple<uintptr_t, uintptr_t, int64_t>>& tables, uintptr_t residual, uintptr_t out) {
  if (tokens != attention.tokens())
    throw std::out_of_range(std::to_string(tokens) + " tokens in a step planned for " +
                            std::to_string(attention.tokens()));
  StackStep step{tokens, attention.shape().head_dim, at<const int64_t>(positions), {}, at<float>(residual), at<float>(out)};
  for (const auto& [cos, sin, rows] : tables) {
    step.tables.push_back({at<const float>(cos), at<const float>(sin)});
    for (int64_t t = 0; t < tokens; ++t) {
      if (step.positions[t] < 0)
        throw std::out_of_range("position " + std::to_string(step.positions[t]) + " of token " + std::to_string(t));
      if (step.positions[t] >= rows) return false;
    }
  }
  std::optional<nb::gil_scoped_release> release;
  if (stack.operations(tokens) > kLongStep) release.emplace();
  stack.run(attention, step);
  return true;
}

}  // namespace

void bind_stack(nb::module_& m) {
  nb::class_<LayerStack>(m, "LayerStack")
      .def("__init__",
           [](LayerStack* self, int64_t hidden, int64_t inner, float eps, float residual_scale, bool whole_norms,
              int activation, uintptr_t final_norm) {
             new (self) LayerStack({hidden, inner, eps, residual_scale, whole_norms,
                                    static_cast<Activation>(activation)},
                                   at<const float>(final_norm));
           })
      .def("add", &add)
      .def("run", &run)
      .def("watch", &LayerStack::watch)
      .def_prop_ro("seconds", &LayerStack::seconds);
}

}  // namespace octavo
