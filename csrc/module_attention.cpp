// The Python binding of paged attention: `Attention`, see paged_attention.h and module.cpp.
#include "module.h"
#include "paged_attention.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>

namespace nb = nanobind;

namespace octavo {
namespace {

void attend(Attention& a, int64_t place, int window_index, uintptr_t table, int64_t table_stride, uintptr_t query,
            int64_t query_stride, uintptr_t out, int io_type) {
  a.attend(place, window_index, at<const int32_t>(table), table_stride, at<const void>(query), query_stride,
           at<void>(out), static_cast<DType>(io_type));
}

void check_tokens(const Attention& a, int64_t tokens) {
  if (tokens != a.tokens())
    throw std::invalid_argument(std::to_string(tokens) + " tokens in a step planned for " + std::to_string(a.tokens()));
}

void write(const Attention& a, int64_t place, uintptr_t slots, int64_t tokens, uintptr_t key, int64_t key_stride,
           uintptr_t value, int64_t value_stride, int io_type) {
  check_tokens(a, tokens);
  a.write(place, at<const int64_t>(slots), 0, tokens, true, at<const void>(key), key_stride, at<const void>(value), value_stride,
          static_cast<DType>(io_type));
}

// norms: of queries and keys, null without; query_out is contiguous.
void rotary_write(const Attention& a, int64_t place, uintptr_t slots, int64_t tokens, uintptr_t query,
                  int64_t query_stride, uintptr_t key, int64_t key_stride, uintptr_t value, int64_t value_stride,
                  uintptr_t query_out, uintptr_t cos, uintptr_t sin, uintptr_t query_norm, uintptr_t key_norm, float eps,
                  int io_type) {
  check_tokens(a, tokens);
  RotaryArgs q{};
  q.x = at<const void>(query), q.x_stride = query_stride, q.out = at<void>(query_out);
  q.cos = at<const float>(cos), q.sin = at<const float>(sin);
  q.norm = at<const float>(query_norm), q.eps = eps, q.type = static_cast<DType>(io_type);
  q.tokens = tokens, q.heads = a.num_heads(), q.dim = a.shape().head_dim;
  q.threaded = tokens > 1 && worth_threads(tokens * (q.heads + a.shape().num_kv_heads) * q.dim);
  a.rotary_write(place, at<const int64_t>(slots), 0, q, at<const float>(key_norm), at<const void>(key), key_stride,
                 at<const void>(value), value_stride);
}

void set_places(Attention& a, const std::vector<std::tuple<int, int64_t, int>>& layers) {
  std::vector<LayerPlace> places;
  for (const auto& [group, place, window] : layers) places.push_back({group, place, window});
  a.set_places(std::move(places));
}

void set_groups(Attention& a, const std::vector<std::tuple<uintptr_t, int64_t, uintptr_t>>& groups) {
  std::vector<GroupStep> steps;
  for (const auto& [table, stride, slots] : groups)
    steps.push_back({at<const int32_t>(table), stride, at<const int64_t>(slots)});
  a.set_groups(std::move(steps));
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<Attention>(m, "Attention")
      .def(nb::init<uintptr_t, int, int64_t, int64_t, int32_t, int32_t, int32_t, int32_t, float, float,
                    const std::vector<int32_t>&, int, int>())
      .def("plan", &Attention::plan)
      .def("attend", &attend)
      .def("write", &write)
      .def("rotary_write", &rotary_write)
      .def("set_places", &set_places)
      .def("set_groups", &set_groups)
      .def("copy_blocks", &Attention::copy_blocks)
      .def("split_items", &Attention::split_items)
      .def_prop_ro("tokens", &Attention::tokens);
}

}  // namespace octavo
