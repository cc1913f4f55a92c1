// Between the q/k/v product and attention, in one pass: norm and rotation of queries and keys, keys and values into
// their slots. The same bits as `rotary` on queries and on keys and then `write`: a turned key is rounded to the type of
// the activations before it is stored.
#pragma once

#include "attention.h"
#include "elementwise.h"

namespace {

using octavo::kMostRotaryDim;
using octavo::RotaryWriteArgs;

template <class T, class IO>
void rotary_write_typed(const RotaryWriteArgs& a) {
  const RotaryArgs& q = a.query;
  const WriteArgs& w = a.write;
#pragma omp parallel for schedule(dynamic, 8) if (q.threaded)
  for (int64_t t = 0; t < q.tokens; ++t) {
    const float *cos = q.cos + q.turn(t), *sin = q.sin + q.turn(t);
    for (int64_t h = 0; h < q.heads; ++h)
      rotary_head((const IO*)q.x + t * q.x_stride + h * q.dim, (IO*)q.out + (t * q.heads + h) * q.dim, q.dim, cos, sin,
                  q.norm, q.eps);
    IO turned[kMostRotaryDim];
    const auto keys = [&](int h) {
      const IO* key = (const IO*)w.key + t * w.key_stride + (int64_t)h * w.head_dim;
      rotary_head(key, turned, q.dim, cos, sin, a.key_norm, q.eps);
      return (const IO*)turned;
    };
    if constexpr (__is_same(T, Quantized))
      write_token_quantized<IO>(w, t, keys);
    else
      write_token<T, IO>(w, t, keys);
  }
}

template <class T>
void rotary_write_io(const RotaryWriteArgs& a) {
  switch (a.query.type) {
    case DType::bf16: return rotary_write_typed<T, bf16>(a);
    case DType::f16: return rotary_write_typed<T, f16>(a);
    default: return rotary_write_typed<T, float>(a);
  }
}

void rotary_write(const RotaryWriteArgs& a) {
  if (a.write.halves[0].bits) return rotary_write_io<Quantized>(a);
  switch (a.write.kv_type) {
    case DType::bf16: return rotary_write_io<bf16>(a);
    case DType::f16: return rotary_write_io<f16>(a);
    default: return rotary_write_io<float>(a);
  }
}

}  // namespace
