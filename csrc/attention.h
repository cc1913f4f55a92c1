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

// Ask for the line that holds p[j .. j + 15], once per line. Decoding waits for memory: while one half of a tile is
// worked on, the other half is on its way, spread evenly so that the requests do not queue up in front of the loads.
template <class T>
OCTAVO_INLINE void ask(const T* p, int j) {
  if (sizeof(T) == 4 || j % 32 == 0) __builtin_prefetch(p + j, 0, 2);
}

// Scores of NQ queries (d apart) against NK keys, NQ * NK = 8, times scale. Ask: fetch `values` meanwhile.
template <int NQ, int NK, bool Ask, class T>
OCTAVO_INLINE void score(const float* query, const T* const* keys, const T* const* values, int d, float scale,
                         float* out) {
  f8 acc[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) acc[i] = splat(0);
  int j = 0;
  for (; j + 16 <= d; j += 16) {
    f8 k[2][NK];
#pragma GCC unroll 8
    for (int c = 0; c < NK; ++c) {
      if (Ask) ask(values[c], j);
      load16(keys[c] + j, k[0][c], k[1][c]);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
      for (int r = 0; r < NQ; ++r) {
        f8 q = load(query + (int64_t)r * d + j + 8 * half);
        if (NK > 1 && NK < 8) keep(q);
#pragma GCC unroll 8
        for (int c = 0; c < NK; ++c) acc[r * NK + c] = fma(q, k[half][c], acc[r * NK + c]);
      }
    }
  }
  if (j < d) {
#pragma GCC unroll 4
    for (int r = 0; r < NQ; ++r) {
      const f8 q = load(query + (int64_t)r * d + j);
#pragma GCC unroll 8
      for (int c = 0; c < NK; ++c) acc[r * NK + c] = fma(q, load(keys[c] + j), acc[r * NK + c]);
    }
  }
  const f8 s = sum8(acc) * splat(scale);
  for (int r = 0; r < NQ; ++r) memcpy(out + r * kTile, (const float*)&s + r * NK, NK * sizeof(float));
}

template <int NQ, int NK, bool Ask, class T>
OCTAVO_INLINE void score_run(const float* query, const T* const* keys, const T* const* values, int count, int d,
                             float scale, float* out) {
  int c = 0;
  for (; c + NK <= count; c += NK) score<NQ, NK, Ask>(query, keys + c, values + c, d, scale, out + c);
  if (c == count) return;
  const T* tail[NK];  // repeat the last key; its extra scores land in a buffer of the same shape
  float extra[NQ * kTile];
  for (int i = 0; i < NK; ++i) tail[i] = keys[c + i < count ? c + i : count - 1];
  score<NQ, NK, false>(query, tail, tail, d, scale, extra);
  for (int r = 0; r < NQ; ++r) memcpy(out + r * kTile + c, extra + r * kTile, (size_t)(count - c) * sizeof(float));
}

// scores[r][c] for rows [begin, end) and the `count` keys from column `column` of the tile on.
template <bool Ask, class T>
void score_tile(const Work& w, int begin, int end, const T* const* keys, const T* const* values, int column, int count,
                int d, float scale) {
  for (int c = 0; c < count; c += kSubTile) {
    const int some = smaller(kSubTile, count - c);
    const T *const *k = keys + c, *const *v = values + c;
    float* out = w.scores + column + c;
    int r = begin;
    const auto query = [&](int row) { return w.query + (int64_t)row * d; };
    for (; r + 4 <= end; r += 4) score_run<4, 2, Ask>(query(r), k, v, some, d, scale, out + r * kTile);
    for (; r + 2 <= end; r += 2) score_run<2, 4, Ask>(query(r), k, v, some, d, scale, out + r * kTile);
    if (r < end) score_run<1, 8, Ask>(query(r), k, v, some, d, scale, out + r * kTile);
  }
}

// One row of scores -> weights e^(s - max), unseen keys 0; updates max and sum; returns the factor for the old sums.
float soften(float* scores, int32_t low, int32_t high, float softcap, float& max, float& sum_so_far) {
  const int first = low / 8, last = (high + 7) / 8;  // [low, high): seen columns of this tile
  const bool whole = low == 0 && high == kTile && softcap == 0;
  f8 top = splat(kMinusInf);
  for (int v = first; v < last; ++v) {
    f8 s = load(scores + v * 8);
    if (!whole) {
      if (softcap > 0) s = tanh8(s / splat(softcap)) * splat(softcap);
      const i8 column = lanes() + splat_int(v * 8);
      s = select((column >= splat_int(low)) & (column < splat_int(high)), s, splat(kMinusInf));
      store(scores + v * 8, s);
    }
    top = larger(s, top);
  }
  const float tile_max = largest(top), new_max = tile_max > max ? tile_max : max;
  const float shift = new_max == kMinusInf ? 0.0f : new_max;  // all seen scores minus infinity: weights 0, not NaN
  f8 part = splat(0);
  for (int v = 0; v < kTile / 8; ++v) {
    const f8 p = v < first || v >= last ? splat(0) : exp_down(load(scores + v * 8) - splat(shift));
    store(scores + v * 8, p);
    part = part + p;
  }
  const float factor = max == new_max ? 1.0f : exp_down(splat(max - shift))[0];
  sum_so_far = sum_so_far * factor + sum(part);
  max = new_max;
  return factor;
}

// acc[r][columns j ..] = acc * factor + sum over keys of weight * value, for NQ rows and NP times 16 columns.
// next: the keys that will be read next, one for each value, to fetch meanwhile; or null.
template <int NQ, int NP, class T>
OCTAVO_INLINE void weigh(float* acc, const float* weights, const float* factors, const T* const* values, int count,
                         const T* const* next, int d, int j) {
  f8 a[NQ][2 * NP];
#pragma GCC unroll 6
  for (int r = 0; r < NQ; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * NP; ++v) a[r][v] = load(acc + (int64_t)r * d + j + 8 * v) * splat(factors[r]);
  for (int c = 0; c < count; ++c) {
    f8 value[2 * NP];
#pragma GCC unroll 4
    for (int v = 0; v < NP; ++v) {
      if (next) ask(next[c], j + 16 * v);
      load16(values[c] + j + 16 * v, value[2 * v], value[2 * v + 1]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < NQ; ++r) {
      const f8 p = splat(weights[r * kTile + c]);
#pragma GCC unroll 8
      for (int v = 0; v < 2 * NP; ++v) a[r][v] = fma(p, value[v], a[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < NQ; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * NP; ++v) store(acc + (int64_t)r * d + j + 8 * v, a[r][v]);
}

// The last 8 columns of a head_dim that is an odd multiple of 8.
template <class T>
void weigh_tail(float* acc, const float* weights, float factor, const T* const* values, int count, int j) {
  f8 a = load(acc + j) * splat(factor);
  for (int c = 0; c < count; ++c) a = fma(splat(weights[c]), load(values[c] + j), a);
  store(acc + j, a);
}

template <class T>
void weigh_tile(const Work& w, int begin, int end, const T* const* values, const T* const* next, int column, int count,
                int d) {
  int j = 0;
  if (end - begin <= 2)  // few rows: wide columns keep eight chains going
    for (; j + 32 <= d; j += 32)
      for (int r = begin; r < end; ++r)
        weigh<1, 2>(w.acc + (int64_t)r * d, w.scores + r * kTile + column, w.factors + r, values, count, next, d, j);
  for (; j + 16 <= d; j += 16) {
    int r = begin;
    const auto at = [&](int row) { return w.acc + (int64_t)row * d; };
    const auto weights = [&](int row) { return w.scores + row * kTile + column; };
    for (; r + 6 <= end; r += 6) weigh<6, 1>(at(r), weights(r), w.factors + r, values, count, next, d, j);
    for (; r + 4 <= end; r += 4) weigh<4, 1>(at(r), weights(r), w.factors + r, values, count, next, d, j);
    for (; r + 2 <= end; r += 2) weigh<2, 1>(at(r), weights(r), w.factors + r, values, count, next, d, j);
    if (r < end) weigh<1, 1>(at(r), weights(r), w.factors + r, values, count, next, d, j);
  }
  if (j < d)
    for (int r = begin; r < end; ++r)
      weigh_tail(w.acc + (int64_t)r * d, w.scores + r * kTile + column, w.factors[r], values, count, j);
}

// (max, sum, acc) of a segment joined to the total before it, per row.
void join(float* max, float* sum_, float* acc, float max2, float sum2, const float* acc2, int d) {
  if (max2 == kMinusInf) return;
  const float top = *max > max2 ? *max : max2;
  const float a = *max == top ? 1.0f : (*max == kMinusInf ? 0.0f : exp_down(splat(*max - top))[0]);
  const float b = max2 == top ? 1.0f : exp_down(splat(max2 - top))[0];
  for (int j = 0; j < d; j += 8) store(acc + j, fma(load(acc2 + j), splat(b), load(acc + j) * splat(a)));
  *sum_ = fma(splat(sum2), splat(b), splat(*sum_ * a))[0];
  *max = top;
}

template <class Out>
OCTAVO_INLINE void finish(Out* out, const float* acc, float sum_, int d) {
  const f8 share = splat(sum_);
  for (int j = 0; j < d; j += 8) store(out + j, load(acc + j) / share);
}

// Where the keys and values [begin, end) of one tile lie.
template <class T>
struct Tile {
  const T *keys[kTile], *values[kTile];
  int32_t begin, end;
};

// The tile that starts at `begin`, up to `limit`. False when the table names a block outside the pool. Slots past the
// end repeat the last row: they may be asked for, never read.
template <class T>
bool locate(const AttentionArgs& a, const int32_t* table, int32_t head, int32_t begin, int32_t limit, Tile<T>& tile) {
  const T* base = (const T*)a.kv + head * a.head_stride;
  tile.begin = begin;
  tile.end = begin < limit ? smaller(limit, (begin / kTile + 1) * kTile) : begin;
  int n = 0;
  for (int32_t k = begin; k < tile.end;) {
    const int32_t logical = k / a.block_size, stop = smaller(tile.end, (logical + 1) * a.block_size);
    const int32_t block = table[logical];
    if (block < 0 || block >= a.num_blocks) return false;
    const T* at = base + block * a.block_stride + (int64_t)(k - logical * a.block_size) * a.head_dim;
    for (; k < stop; ++k, ++n, at += a.head_dim) tile.keys[n] = at, tile.values[n] = at + a.value_offset;
  }
  for (; n && n < kTile; ++n) tile.keys[n] = tile.keys[n - 1], tile.values[n] = tile.values[n - 1];
  return true;
}

// float32 copies, in Order<T>.
template <class T>
void widen_rows(const T* const* rows, int count, int d, float* to, const float** out) {
  for (int c = 0; c < count; ++c, to += d) {
    int j = 0;
    for (; j + 16 <= d; j += 16) {
      f8 a, b;
      load16(rows[c] + j, a, b);
      store(to + j, a), store(to + j + 8, b);
    }
    if (j < d) store(to + j, load(rows[c] + j));
    out[c] = to;
  }
}

// The rows [first, last), all of which see some of the tile's keys, against them. next: see `weigh`.
template <bool Ask, class T>
void attend_tile(const AttentionArgs& a, const Work& w, const View& view, const T* const* keys, const T* const* values,
                 const T* const* next, int32_t begin, int32_t end, int first, int last) {
  const int32_t origin = begin / kTile * kTile, column = begin - origin, count = end - begin;
  score_tile<Ask>(w, first, last, keys, values, column, count, a.head_dim, a.scale);
  for (int r = first; r < last; ++r) {
    const int32_t low = greater(view.low(r), begin) - origin, high = smaller(view.high(r), end) - origin;
    w.factors[r] = soften(w.scores + r * kTile, low, high, a.softcap, w.max[r], w.sum[r]);
  }
  weigh_tile(w, first, last, values, next, column, count, a.head_dim);
}

// Few rows read the tile where it lies and fetch what comes next; many rows widen 16-bit tiles first.
template <class T>
void attend_tile_best(const AttentionArgs& a, const Work& w, const View& view, const Tile<T>& tile, const Tile<T>& next,
                      int first, int last) {
  const int d = a.head_dim, count = tile.end - tile.begin;
  if (last - first < kWidenRows) {
    const T* const* then = next.begin < next.end ? next.keys : nullptr;
    attend_tile<true>(a, w, view, tile.keys, tile.values, then, tile.begin, tile.end, first, last);
  } else if (sizeof(T) == sizeof(float)) {
    attend_tile<false>(a, w, view, tile.keys, tile.values, (const T* const*)nullptr, tile.begin, tile.end, first, last);
  } else {
    const float *keys[kTile], *values[kTile];
    widen_rows(tile.keys, count, d, w.wide, keys);
    widen_rows(tile.values, count, d, w.wide + kTile * d, values);
    attend_tile<false>(a, w, view, keys, values, (const float* const*)nullptr, tile.begin, tile.end, first, last);
  }
}

// Work rows are kept in Order<T>, the order in which keys and values arrive; a permutation of the columns.
template <class T, class IO>
void load_queries(const AttentionArgs& a, int32_t token, int32_t head, int group, int rows, float* to) {
  const int d = a.head_dim, whole = d / 16 * 16;
  for (int r = 0; r < rows; ++r, to += d) {
    const IO* from = (const IO*)a.query + (token + r / group) * a.query_stride + (int64_t)(head * group + r % group) * d;
    for (int j = 0; j < whole; j += 16)
      for (int i = 0; i < 16; ++i) to[j + i] = widen(from[j + Order<T>::lane(i)]);
    if (whole < d) store(to + whole, load(from + whole));
  }
}

template <class T, class IO>
void store_rows(const AttentionArgs& a, int32_t token, int32_t head, int group, int rows, const Work& w) {
  const int d = a.head_dim, whole = d / 16 * 16;
  for (int r = 0; r < rows; ++r) {
    IO* to = (IO*)a.out + ((int64_t)(token + r / group) * a.num_heads + head * group + r % group) * d;
    const float* from = w.total + (int64_t)r * d;
    const f8 share = splat(w.total_sum[r]);
    for (int j = 0; j < whole; j += 16) {
      float part[16];
      store(part, load(from + j) / share), store(part + 8, load(from + j + 8) / share);
      for (int i = 0; i < 16; ++i) narrow(part[i], to + j + Order<T>::lane(i));
    }
    if (whole < d) store(to + whole, load(from + whole) / share);
  }
}

void clear_total(const Work& w, int rows, int d) {
  memset(w.total, 0, (size_t)rows * d * sizeof(float));
  for (int r = 0; r < rows; ++r) w.total_max[r] = kMinusInf, w.total_sum[r] = 0;
}

void clear_segment(const Work& w, int rows, int d) {
  memset(w.acc, 0, (size_t)rows * d * sizeof(float));
  for (int r = 0; r < rows; ++r) w.max[r] = kMinusInf, w.sum[r] = 0;
}

// A finished segment goes to the rows' totals, or to scratch for a merge.
void put_segment(const AttentionArgs& a, const AttentionItem& it, const Work& w, int32_t segment, int rows) {
  const int d = a.head_dim;
  for (int r = 0; r < rows; ++r) {
    const float* acc = w.acc + (int64_t)r * d;
    if (it.slot < 0) {
      join(w.total_max + r, w.total_sum + r, w.total + (int64_t)r * d, w.max[r], w.sum[r], acc, d);
    } else {
      float* state = a.scratch + (it.slot + (int64_t)(segment - it.first_segment) * rows + r) * (d + 2);
      state[0] = w.max[r], state[1] = w.sum[r];
      memcpy(state + 2, acc, d * sizeof(float));
    }
  }
}

template <class T, class IO>
bool attend_item(const AttentionArgs& a, const AttentionItem& it, float* memory) {
  const int d = a.head_dim, group = a.num_heads / a.num_kv_heads;
  const int rows = (it.end_query - it.first_query) * group;
  const Row& row = a.rows[it.row];
  const View view = {row.context_len - row.query_len + it.first_query, group, a.window};
  const Work w = carve(memory, a.max_rows, d);
  const int32_t token = row.query_start + it.first_query;
  const int32_t begin = greater(view.low(0), it.first_segment * kSegment);
  const int32_t limit = smaller(view.high(rows - 1), it.end_segment * kSegment);
  const int32_t* table = a.table + it.row * a.table_stride;
  load_queries<T, IO>(a, token, it.head, group, rows, w.query);
  clear_total(w, rows, d);
  clear_segment(w, rows, d);
  Tile<T> tiles[2];
  int at = 0, first = 0, last = 0;
  if (!locate(a, table, it.head, begin, limit, tiles[0])) return false;
  while (tiles[at].begin < tiles[at].end) {
    const Tile<T>& tile = tiles[at];
    Tile<T>& next = tiles[1 - at];
    if (!locate(a, table, it.head, tile.end, limit, next)) return false;
    while (first < rows && view.high(first) <= tile.begin) ++first;
    while (last < rows && view.low(last) < tile.end) ++last;
    attend_tile_best(a, w, view, tile, next, first, last);
    if (tile.end % kSegment == 0 || tile.end == limit) {
      put_segment(a, it, w, tile.begin / kSegment, rows);
      clear_segment(w, rows, d);
    }
    at = 1 - at;
  }
  if (it.slot < 0) store_rows<T, IO>(a, token, it.head, group, rows, w);
  return true;
}

template <class T, class IO>
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
  store_rows<T, IO>(a, a.rows[m.row].query_start + m.first_query, m.head, group, rows, w);
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
    for (int64_t i = 0; i < a.num_merges; ++i) merge_item<T, IO>(a, a.merges[i], memory);
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
