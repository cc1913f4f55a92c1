// Exact attention over blocks of floats, without gathering them, and what quantised blocks share of it.
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

#include "attention_math.h"
#include "kernels.h"
#include "simd.h"

#include <omp.h>

namespace {

using octavo::AttentionArgs;
using octavo::AttentionItem;
using octavo::DType;
using octavo::kSegment;
using octavo::Merge;
using octavo::Row;

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
    widen_rows(tile.keys, count, d, w.rest, keys);
    widen_rows(tile.values, count, d, w.rest + kTile * d, values);
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

// What an item's rows may see, and the keys [begin, limit) that it reads.
struct ItemRange {
  View view;
  int32_t rows, begin, limit;
};
OCTAVO_INLINE ItemRange range_of(const AttentionArgs& a, const AttentionItem& it) {
  const Row& row = a.rows[it.row];
  const int32_t group = a.num_heads / a.num_kv_heads, rows = (it.end_query - it.first_query) * group;
  const View view = {row.context_len - row.query_len + it.first_query, group, a.window};
  return {view, rows, greater(view.low(0), it.first_segment * kSegment),
          smaller(view.high(rows - 1), it.end_segment * kSegment)};
}

template <class T, class IO>
bool attend_item(const AttentionArgs& a, const AttentionItem& it, float* memory) {
  const auto [view, rows, begin, limit] = range_of(a, it);
  const int d = a.head_dim, group = view.group;
  const Work w = carve(memory, a.max_rows, d, kTile);
  const int32_t token = a.rows[it.row].query_start + it.first_query;
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
  const Work w = carve(memory, a.max_rows, d, kTile);
  clear_total(w, rows, d);
  for (int32_t s = 0; s < m.segments; ++s) {
    for (int r = 0; r < rows; ++r) {
      const float* state = a.scratch + (m.slot + (int64_t)s * rows + r) * (d + 2);
      join(w.total_max + r, w.total_sum + r, w.total + (int64_t)r * d, state[0], state[1], state + 2, d);
    }
  }
  store_rows<T, IO>(a, a.rows[m.row].query_start + m.first_query, m.head, group, rows, w);
}

}  // namespace
