// Exact attention over blocks, without gathering them. Included by each instruction set's file.
//
// One routine serves decode rows, prompt chunks and verification rows: an item is up to a few dozen query rows (tokens
// times the query heads that share a key head) against a range of keys, read tile by tile through the block table.
// Softmax is online (Milakov and Gimelshein 2018; Dao et al. 2022), in two levels: tiles of 64 keys within segments of
// 256, segments merged from left to right.
//
// Invariant: tiles and segments start at absolute multiples from the start of the sequence, dot products sum eight
// lanes in one order, and a key that a row may not see contributes exactly nothing. So the bits of a row depend on its
// own tokens only: not on neighbours, block size, chunking, or how segments were dealt to threads.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "simd.h"

#include <omp.h>

namespace {

using octavo::AttentionArgs;
using octavo::AttentionItem;
using octavo::kSegment;
using octavo::kTile;
using octavo::Merge;
using octavo::Row;
using octavo::WriteArgs;

constexpr int kSubTile = 16;     // keys whose rows stay in the first-level cache while all queries pass
constexpr int kWidenRows = 8;    // from this many query rows on, 16-bit keys and values are widened once per tile
const float kMinusInf = -__builtin_inff();

OCTAVO_INLINE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
OCTAVO_INLINE int32_t greater(int32_t a, int32_t b) { return a > b ? a : b; }

// A thread's working memory for R query rows of d, in float32. acc, max, sum: the segment at hand; total_*: before it.
struct Work {
  float *query, *scores, *acc, *total;                       // [R, d], [R, kTile], [R, d], [R, d]
  float *max, *sum, *total_max, *total_sum, *factors, *wide;  // [R] each; [2, kTile, d]
};

Work carve(float* p, int64_t rows, int64_t d) {
  Work w;
  float** const parts[] = {&w.query, &w.acc, &w.total, &w.scores, &w.max, &w.sum, &w.total_max, &w.total_sum,
                           &w.factors, &w.wide};
  const int64_t sizes[] = {rows * d, rows * d, rows * d, rows * kTile, rows, rows, rows, rows, rows, 0};
  for (int i = 0; i < 10; ++i) {
    *parts[i] = p;
    p += (sizes[i] + 15) / 16 * 16;
  }
  return w;
}

// What an item's query rows may see: row r is token first + r / group; keys [low(r), high(r)).
struct View {
  int32_t first_position, group, window;
  OCTAVO_INLINE int32_t high(int32_t r) const { return first_position + r / group + 1; }
  OCTAVO_INLINE int32_t low(int32_t r) const { return window ? greater(0, high(r) - window) : 0; }
};

// Scores of NQ queries (d apart) against NK keys, NQ * NK = 8, times scale.
template <int NQ, int NK, class T>
OCTAVO_INLINE void score(const float* query, const T* const* keys, int d, float scale, float* out) {
  f8 acc[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) acc[i] = splat(0);
  for (int j = 0; j < d; j += 8) {
    f8 k[NK];
#pragma GCC unroll 8
    for (int c = 0; c < NK; ++c) k[c] = load(keys[c] + j);
#pragma GCC unroll 4
    for (int r = 0; r < NQ; ++r) {
      const f8 q = load(query + (int64_t)r * d + j);
#pragma GCC unroll 8
      for (int c = 0; c < NK; ++c) acc[r * NK + c] = fma(q, k[c], acc[r * NK + c]);
    }
  }
  const f8 s = sum8(acc) * splat(scale);
  for (int r = 0; r < NQ; ++r) memcpy(out + r * kTile, (const float*)&s + r * NK, NK * sizeof(float));
}

template <int NQ, int NK, class T>
OCTAVO_INLINE void score_run(const float* query, const T* const* keys, int count, int d, float scale, float* out) {
  int c = 0;
  for (; c + NK <= count; c += NK) score<NQ, NK>(query, keys + c, d, scale, out + c);
  if (c == count) return;
  const T* tail[NK];  // repeat the last key; its extra scores land in a buffer of the same shape
  float extra[NQ * kTile];
  for (int i = 0; i < NK; ++i) tail[i] = keys[c + i < count ? c + i : count - 1];
  score<NQ, NK>(query, tail, d, scale, extra);
  for (int r = 0; r < NQ; ++r) memcpy(out + r * kTile + c, extra + r * kTile, (size_t)(count - c) * sizeof(float));
}

// scores[r][c] for rows [begin, end) and the `count` keys from column `column` of the tile on.
template <class T>
void score_tile(const Work& w, int begin, int end, const T* const* keys, int column, int count, int d, float scale) {
  for (int c = 0; c < count; c += kSubTile) {
    const int some = smaller(kSubTile, count - c);
    int r = begin;
    for (; r + 4 <= end; r += 4)
      score_run<4, 2>(w.query + (int64_t)r * d, keys + c, some, d, scale, w.scores + r * kTile + column + c);
    if (r + 2 <= end) {
      score_run<2, 4>(w.query + (int64_t)r * d, keys + c, some, d, scale, w.scores + r * kTile + column + c);
      r += 2;
    }
    if (r < end) score_run<1, 8>(w.query + (int64_t)r * d, keys + c, some, d, scale, w.scores + r * kTile + column + c);
  }
}

// One row of scores -> weights e^(s - max), unseen keys 0; updates max and sum; returns the factor for the old sums.
float soften(float* scores, int32_t low, int32_t high, float softcap, float& max, float& sum_so_far) {
  const int first = low / 8, last = (high + 7) / 8;  // [low, high): seen columns of this tile
  f8 top = splat(kMinusInf);
  for (int v = first; v < last; ++v) {
    f8 s = load(scores + v * 8);
    if (softcap > 0) s = tanh8(s / splat(softcap)) * splat(softcap);
    const i8 column = lanes() + splat_int(v * 8);
    s = select((column >= splat_int(low)) & (column < splat_int(high)), s, splat(kMinusInf));
    store(scores + v * 8, s);
    top = larger(s, top);
  }
  const float new_max = largest(top) > max ? largest(top) : max;
  const float shift = new_max == kMinusInf ? 0.0f : new_max;  // all seen scores minus infinity: weights 0, not NaN
  f8 part = splat(0);
  for (int v = 0; v < kTile / 8; ++v) {
    const f8 p = v < first || v >= last ? splat(0) : exp8(load(scores + v * 8) - splat(shift));
    store(scores + v * 8, p);
    part = part + p;
  }
  const float factor = max == new_max ? 1.0f : exp8(splat(max - shift))[0];
  sum_so_far = sum_so_far * factor + sum(part);
  max = new_max;
  return factor;
}

// acc[r][columns j ..] = acc * factor + sum over keys of weight * value, for NQ rows and NV vectors.
template <int NQ, int NV, class T>
OCTAVO_INLINE void weigh(float* acc, const float* weights, const float* factors, const T* const* values, int count,
                         int d, int j) {
  f8 a[NQ][NV];
#pragma GCC unroll 4
  for (int r = 0; r < NQ; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) a[r][v] = load(acc + (int64_t)r * d + j + 8 * v) * splat(factors[r]);
  for (int c = 0; c < count; ++c) {
    f8 value[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) value[v] = load(values[c] + j + 8 * v);
#pragma GCC unroll 4
    for (int r = 0; r < NQ; ++r) {
      const f8 p = splat(weights[r * kTile + c]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) a[r][v] = fma(p, value[v], a[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < NQ; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store(acc + (int64_t)r * d + j + 8 * v, a[r][v]);
}

template <int NV, class T>
void weigh_columns(const Work& w, const float* factors, int begin, int end, const T* const* values, int column,
                   int count, int d, int j) {
  int r = begin;
  for (; r + 4 <= end; r += 4)
    weigh<4, NV>(w.acc + (int64_t)r * d, w.scores + r * kTile + column, factors + r, values, count, d, j);
  if (r + 2 <= end) {
    weigh<2, NV>(w.acc + (int64_t)r * d, w.scores + r * kTile + column, factors + r, values, count, d, j);
    r += 2;
  }
  if (r < end) weigh<1, NV>(w.acc + (int64_t)r * d, w.scores + r * kTile + column, factors + r, values, count, d, j);
}

template <class T>
void weigh_tile(const Work& w, const float* factors, int begin, int end, const T* const* values, int column, int count,
                int d) {
  int j = 0;
  if (end - begin <= 2)  // few rows: wide columns keep eight chains going
    for (; j + 32 <= d; j += 32) weigh_columns<4>(w, factors, begin, end, values, column, count, d, j);
  for (; j + 16 <= d; j += 16) weigh_columns<2>(w, factors, begin, end, values, column, count, d, j);
  for (; j < d; j += 8) weigh_columns<1>(w, factors, begin, end, values, column, count, d, j);
}

// (max, sum, acc) of a segment joined to the total before it, per row.
void join(float* max, float* sum_, float* acc, float max2, float sum2, const float* acc2, int d) {
  if (max2 == kMinusInf) return;
  const float top = *max > max2 ? *max : max2;
  const float a = *max == top ? 1.0f : (*max == kMinusInf ? 0.0f : exp8(splat(*max - top))[0]);
  const float b = max2 == top ? 1.0f : exp8(splat(max2 - top))[0];
  for (int j = 0; j < d; j += 8) store(acc + j, fma(load(acc2 + j), splat(b), load(acc + j) * splat(a)));
  *sum_ = fma(splat(sum2), splat(b), splat(*sum_ * a))[0];
  *max = top;
}

template <class Out>
OCTAVO_INLINE void finish(Out* out, const float* acc, float sum_, int d) {
  const f8 share = splat(sum_);
  for (int j = 0; j < d; j += 8) store(out + j, load(acc + j) / share);
}

// Row pointers of keys and values [begin, end); false when the table names a block outside the pool.
template <class T>
bool locate(const AttentionArgs& a, const int32_t* table, int32_t head, int32_t begin, int32_t end, const T** keys,
            const T** values) {
  const T* base = (const T*)a.kv + head * a.head_stride;
  for (int32_t k = begin; k < end;) {
    const int32_t logical = k / a.block_size, stop = smaller(end, (logical + 1) * a.block_size);
    const int32_t block = table[logical];
    if (block < 0 || block >= a.num_blocks) return false;
    const T* at = base + block * a.block_stride + (int64_t)(k - logical * a.block_size) * a.head_dim;
    for (; k < stop; ++k, at += a.head_dim) *keys++ = at, *values++ = at + a.value_offset;
  }
  return true;
}

template <class T>
void widen_rows(const T* const* rows, int count, int d, float* to, const float** out) {
  for (int c = 0; c < count; ++c, to += d) {
    for (int j = 0; j < d; j += 8) store(to + j, load(rows[c] + j));
    out[c] = to;
  }
}

// Keys [begin, end) of one tile against the rows [first, last), all of which see some of them.
template <class T>
void attend_tile(const AttentionArgs& a, const Work& w, const View& view, const T* const* keys, const T* const* values,
                 int32_t begin, int32_t end, int first, int last) {
  const int32_t origin = begin / kTile * kTile, column = begin - origin, count = end - begin;
  score_tile(w, first, last, keys, column, count, a.head_dim, a.scale);
  for (int r = first; r < last; ++r) {
    const int32_t low = greater(view.low(r), begin) - origin, high = smaller(view.high(r), end) - origin;
    w.factors[r] = soften(w.scores + r * kTile, low, high, a.softcap, w.max[r], w.sum[r]);
  }
  weigh_tile(w, w.factors, first, last, values, column, count, a.head_dim);
}

// Keys [begin, end) of one segment: fills acc, max, sum of all rows.
template <class T>
bool attend_segment(const AttentionArgs& a, const Work& w, const View& view, const int32_t* table, int32_t head,
                    int32_t begin, int32_t end, int rows) {
  const int d = a.head_dim;
  memset(w.acc, 0, (size_t)rows * d * sizeof(float));
  for (int r = 0; r < rows; ++r) w.max[r] = kMinusInf, w.sum[r] = 0;
  const T *keys[kTile], *values[kTile];
  const float *wide_keys[kTile], *wide_values[kTile];
  int first = 0, last = 0;
  for (int32_t k = begin; k < end;) {
    const int32_t stop = smaller(end, (k / kTile + 1) * kTile);
    while (first < rows && view.high(first) <= k) ++first;
    while (last < rows && view.low(last) < stop) ++last;
    if (!locate(a, table, head, k, stop, keys, values)) return false;
    if (sizeof(T) < sizeof(float) && last - first >= kWidenRows) {
      widen_rows(keys, stop - k, d, w.wide, wide_keys);
      widen_rows(values, stop - k, d, w.wide + kTile * d, wide_values);
      attend_tile(a, w, view, wide_keys, wide_values, k, stop, first, last);
    } else {
      attend_tile(a, w, view, keys, values, k, stop, first, last);
    }
    k = stop;
  }
  return true;
}

template <class IO>
void load_queries(const AttentionArgs& a, int32_t token, int32_t head, int group, int rows, float* to) {
  for (int r = 0; r < rows; ++r, to += a.head_dim) {
    const IO* from = (const IO*)a.query + (token + r / group) * a.query_stride +
                     (int64_t)(head * group + r % group) * a.head_dim;
    for (int j = 0; j < a.head_dim; j += 8) store(to + j, load(from + j));
  }
}

template <class IO>
void store_rows(const AttentionArgs& a, int32_t token, int32_t head, int group, int rows, const Work& w) {
  const int d = a.head_dim;
  for (int r = 0; r < rows; ++r) {
    IO* to = (IO*)a.out + ((int64_t)(token + r / group) * a.num_heads + head * group + r % group) * d;
    const f8 share = splat(w.total_sum[r]);
    for (int j = 0; j < d; j += 8) store(to + j, load(w.total + (int64_t)r * d + j) / share);
  }
}

void clear_total(const Work& w, int rows, int d) {
  memset(w.total, 0, (size_t)rows * d * sizeof(float));
  for (int r = 0; r < rows; ++r) w.total_max[r] = kMinusInf, w.total_sum[r] = 0;
}

template <class T, class IO>
bool attend_item(const AttentionArgs& a, const AttentionItem& it, float* memory) {
  const int d = a.head_dim, group = a.num_heads / a.num_kv_heads;
  const int rows = (it.end_query - it.first_query) * group;
  const Row& row = a.rows[it.row];
  const View view = {row.context_len - row.query_len + it.first_query, group, a.window};
  const Work w = carve(memory, a.max_rows, d);
  const int32_t token = row.query_start + it.first_query, lowest = view.low(0), highest = view.high(rows - 1);
  load_queries<IO>(a, token, it.head, group, rows, w.query);
  clear_total(w, rows, d);
  for (int32_t s = it.first_segment; s < it.end_segment; ++s) {
    const int32_t begin = greater(lowest, s * kSegment), end = smaller(highest, (s + 1) * kSegment);
    if (!attend_segment<T>(a, w, view, a.table + it.row * a.table_stride, it.head, begin, end, rows)) return false;
    for (int r = 0; r < rows; ++r) {
      const float* acc = w.acc + (int64_t)r * d;
      if (it.slot < 0) {
        join(w.total_max + r, w.total_sum + r, w.total + (int64_t)r * d, w.max[r], w.sum[r], acc, d);
      } else {
        float* state = a.scratch + (it.slot + (int64_t)(s - it.first_segment) * rows + r) * (d + 2);
        state[0] = w.max[r], state[1] = w.sum[r];
        memcpy(state + 2, acc, d * sizeof(float));
      }
    }
  }
  if (it.slot < 0) store_rows<IO>(a, token, it.head, group, rows, w);
  return true;
}

template <class IO>
void merge_item(const AttentionArgs& a, const Merge& m, float* memory) {
  const int d = a.head_dim, group = a.num_heads / a.num_kv_heads, rows = (m.end_query - m.first_query) * group;
  const Work w = carve(memory, a.max_rows, d);
  clear_total(w, rows, d);
  for (int32_t s = 0; s < m.segments; ++s) {
    for (int r = 0; r < rows; ++r) {
      const float* state = a.scratch + (m.slot + (int64_t)s * rows + r) * (d + 2);
      join(w.total_max + r, w.total_sum + r, w.total + (int64_t)r * d, state[0], state[1], state + 2, d);
    }
  }
  store_rows<IO>(a, a.rows[m.row].query_start + m.first_query, m.head, group, rows, w);
}

template <class T, class IO>
int64_t attend_typed(const AttentionArgs& a) {
  int64_t bad = -1;
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    float* memory = a.work + omp_get_thread_num() * a.work_stride;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a.num_items; ++i) {
      if (!attend_item<T, IO>(a, a.items[i], memory)) {
#pragma omp atomic write
        bad = a.items[i].row;
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a.num_merges; ++i) merge_item<IO>(a, a.merges[i], memory);
  }
  return bad;
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
  switch (a.kv_type) {
    case DType::bf16: return attend_io<bf16>(a);
    case DType::f16: return attend_io<f16>(a);
    default: return attend_io<float>(a);
  }
}

template <class T, class IO>
void write_typed(const WriteArgs& a) {
#pragma omp parallel for schedule(static) if (a.threaded)
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    T* base = (T*)a.kv + a.slots[t] / a.block_size * a.block_stride + a.slots[t] % a.block_size * a.head_dim;
    for (int h = 0; h < a.num_kv_heads; ++h) {
      T *key = base + h * a.head_stride, *value = key + a.value_offset;
      const IO* k = (const IO*)a.key + t * a.key_stride + (int64_t)h * a.head_dim;
      const IO* v = (const IO*)a.value + t * a.value_stride + (int64_t)h * a.head_dim;
      for (int j = 0; j < a.head_dim; j += 8) store(key + j, load(k + j)), store(value + j, load(v + j));
    }
  }
}

template <class T>
void write_io(const WriteArgs& a) {
  switch (a.io_type) {
    case DType::bf16: return write_typed<T, bf16>(a);
    case DType::f16: return write_typed<T, f16>(a);
    default: return write_typed<T, float>(a);
  }
}

void write(const WriteArgs& a) {
  switch (a.kv_type) {
    case DType::bf16: return write_io<bf16>(a);
    case DType::f16: return write_io<f16>(a);
    default: return write_io<float>(a);
  }
}

}  // namespace
