// Attention of a step: items dealt to threads, and the writing of new keys and values. Included by each instruction
// set's file. The work itself, and why its bits do not depend on the dealing: attention_float.h.
#pragma once

#include "attention_float.h"
#include "attention_quantized.h"

namespace {

using octavo::WriteArgs;

struct Quantized {};  // stands where the element type of the cache stands otherwise

template <class T, class IO>
struct Item {
  static bool run(const AttentionArgs& a, const AttentionItem& it, float* memory) {
    return attend_item<T, IO>(a, it, memory);
  }
};
template <class IO>
struct Item<Quantized, IO> {
  static bool run(const AttentionArgs& a, const AttentionItem& it, float* memory) {
    return attend_item_quantized<IO>(a, it, memory);
  }
};

template <class T, class IO>
int64_t attend_typed(const AttentionArgs& a) {
  int64_t bad = -1;
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    float* memory = a.work + omp_get_thread_num() * a.work_stride;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a.num_items; ++i) {
      if (!Item<T, IO>::run(a, a.items[i], memory)) {
#pragma omp atomic write
        bad = a.items[i].row;
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a.num_merges; ++i) merge_item<T, IO>(a, a.merges[i], memory);
  }
  return bad;
}

// Enough to reuse a key tile often, few enough for the caches.
int32_t query_rows(const AttentionArgs&) { return 48; }

int64_t attention_work(const AttentionArgs& a) {
  return a.halves[0].bits ? quantized_work_floats(a.max_rows, a.head_dim) : float_work_floats(a.max_rows, a.head_dim);
}

template <class T>
int64_t attend_io(const AttentionArgs& a) {
  switch (a.io_type) {
    case DType::bf16: return attend_typed<T, bf16>(a);
    case DType::f16: return attend_typed<T, f16>(a);
    default: return attend_typed<T, float>(a);
  }
}

int64_t attend(const AttentionArgs& a) {
  if (a.halves[0].bits) return attend_io<Quantized>(a);
  switch (a.kv_type) {
    case DType::bf16: return attend_io<bf16>(a);
    case DType::f16: return attend_io<f16>(a);
    default: return attend_io<float>(a);
  }
}

// A token's keys and values into its slot. keys(h): the key of a head, where it lies or as it is made.
template <class T, class IO, class Keys>
OCTAVO_INLINE void write_token(const WriteArgs& a, int64_t t, Keys keys) {
  T* base = (T*)a.kv + a.slots[t] / a.block_size * a.block_stride + a.slots[t] % a.block_size * a.head_dim;
  for (int h = 0; h < a.num_kv_heads; ++h) {
    T *key = base + h * a.head_stride, *value = key + a.value_offset;
    const IO *k = keys(h), *v = (const IO*)a.value + t * a.value_stride + (int64_t)h * a.head_dim;
    for (int j = 0; j < a.head_dim; j += 8) store(key + j, load(k + j)), store(value + j, load(v + j));
  }
}

template <class T, class IO>
void write_typed(const WriteArgs& a) {
#pragma omp parallel for schedule(static) if (a.threaded)
  for (int64_t t = 0; t < a.num_tokens; ++t)
    write_token<T, IO>(a, t, [&](int h) { return (const IO*)a.key + t * a.key_stride + (int64_t)h * a.head_dim; });
}

template <class T>
void write_io(const WriteArgs& a) {
  switch (a.io_type) {
    case DType::bf16: return write_typed<T, bf16>(a);
    case DType::f16: return write_typed<T, f16>(a);
    default: return write_typed<T, float>(a);
  }
}

// A row of any type as floats.
template <class IO>
OCTAVO_INLINE const float* as_floats(const IO* from, int d, float* to) {
  for (int j = 0; j < d; j += 8) store(to + j, load(from + j));
  return to;
}

void encode_row(const QuantizedHalf& h, const float* x, int d, char* slab, int64_t offset) {
  char *data = slab + offset * h.data, *scale = slab + h.scales + offset * 2;
  if (h.bits == 8)
    encode_int8(x, d, data, scale);
  else
    encode_int4(x, d, data, scale, slab + h.multipliers + offset * h.groups);
}

template <class IO, class Keys>
OCTAVO_INLINE void write_token_quantized(const WriteArgs& a, int64_t t, Keys keys) {
  const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
  char* base = (char*)a.kv + block * a.block_stride;
  float row[kMostQuantizedDim];
  const QuantizedHalf &key = a.halves[0], &value = a.halves[1];
  for (int h = 0; h < a.num_kv_heads; ++h) {
    const IO *k = keys(h), *v = (const IO*)a.value + t * a.value_stride + (int64_t)h * a.head_dim;
    encode_row(key, as_floats(k, a.head_dim, row), a.head_dim, base + key.first + h * key.slab, offset);
    encode_row(value, as_floats(v, a.head_dim, row), a.head_dim, base + value.first + h * value.slab, offset);
  }
}

template <class IO>
void write_quantized(const WriteArgs& a) {
#pragma omp parallel for schedule(static) if (a.threaded)
  for (int64_t t = 0; t < a.num_tokens; ++t)
    write_token_quantized<IO>(a, t, [&](int h) { return (const IO*)a.key + t * a.key_stride + (int64_t)h * a.head_dim; });
}

void write(const WriteArgs& a) {
  if (a.halves[0].bits) {
    switch (a.io_type) {
      case DType::bf16: return write_quantized<bf16>(a);
      case DType::f16: return write_quantized<f16>(a);
      default: return write_quantized<float>(a);
    }
  }
  switch (a.kv_type) {
    case DType::bf16: return write_io<bf16>(a);
    case DType::f16: return write_io<f16>(a);
    default: return write_io<float>(a);
  }
}

}  // namespace
