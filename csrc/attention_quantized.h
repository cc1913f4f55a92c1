// Exact attention over quantised blocks: rows are widened to 16-bit integers on their way into the registers, and all
// products are pairs of 16-bit integers summed in 32 bits, twice as many per instruction as with floats. Queries and
// softmax weights become 16-bit integers too, with a scale for each row (and tile): an error of 2^-16 of the largest (2^-15
// against int4), beside 2^-8 or more of the stored numbers. Softmax, segments and totals are those of attention_float.h.
//
// Where a row's parts lie: octavo/core/kv_format.py. What they mean: octavo/kernels/quantized_kv.py, whose bytes
// `write` repeats bit for bit.
//
// Invariant: as in attention_float.h. Sums of integers are exact, scales of queries and weights come from one query row
// alone, and few rows and many take the same steps, so the bits of a row depend on its own tokens only.
#pragma once

#include "attention_float.h"
#include "kernels.h"
#include "quantized_math.h"
#include "quantized_rows.h"
#include "simd.h"

#include <omp.h>

namespace {

using octavo::AttentionArgs;
using octavo::AttentionItem;
using octavo::kSegment;
using octavo::QuantizedHalf;

constexpr int kStageRows = 8;  // from this many query rows on, a tile is widened to 16 bits first

// Where the rows [begin, end) of one tile lie: keys in half 0, values in half 1. A run is the part of a block in it.
struct TileQ {
  const char* data[2][kQuantizedTile];
  const char *scales[2][kQuantizedTile], *multipliers[2][kQuantizedTile];  // of each run's first row
  int32_t ends[kQuantizedTile], runs;                                     // one past each run's last row
  int32_t begin, end;
};

// As `locate` in attention_float.h; also asks for the lines of the scales, which are read when the tile is worked on.
bool locate_quantized(const AttentionArgs& a, const int32_t* table, int32_t head, int32_t begin, int32_t limit,
                      TileQ& tile) {
  tile.begin = begin, tile.runs = 0;
  tile.end = begin < limit ? smaller(limit, (begin / kQuantizedTile + 1) * kQuantizedTile) : begin;
  int n = 0;
  for (int32_t k = begin; k < tile.end;) {
    const int32_t logical = k / a.block_size, stop = smaller(tile.end, (logical + 1) * a.block_size);
    const int32_t block = table[logical], offset = k - logical * a.block_size, run = tile.runs++;
    if (block < 0 || block >= a.num_blocks) return false;
    for (int half = 0; half < 2; ++half) {
      const QuantizedHalf& h = a.halves[half];
      const char* slab = (const char*)a.kv + block * a.block_stride + h.first + head * h.slab;
      const char* row = slab + offset * h.data;
      for (int32_t i = n; i < n + stop - k; ++i, row += h.data) tile.data[half][i] = row;
      const char* scales = tile.scales[half][run] = slab + h.scales + offset * 2;
      tile.multipliers[half][run] = slab + h.multipliers + offset * h.groups;
      const int64_t bytes = tile.multipliers[half][run] + (stop - k) * h.groups - scales;
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(scales + i, 0, 2);
    }
    tile.ends[run] = n += stop - k, k = stop;
  }
  for (; n && n < kQuantizedTile; ++n) tile.data[0][n] = tile.data[0][n - 1], tile.data[1][n] = tile.data[1][n - 1];
  return true;
}

// Scales as floats (zero in columns without a key) and multipliers as int4 rows want them.
void read_scales(const AttentionArgs& a, const TileQ& tile, const WorkQ& q) {
  const int32_t column = tile.begin % kQuantizedTile;
  for (int half = 0; half < 2; ++half) {
    float* to = half ? q.value_scale : q.key_scale;
    const int32_t groups = (int32_t)a.halves[half].groups;
    int32_t* spread = q.multipliers + half * kQuantizedTile * groups_of(a.head_dim);
    for (int c = 0; c < column; ++c) *to++ = 0;
    int c = 0;
    for (int run = 0; run < tile.runs; ++run) {
      const int first = c, end = tile.ends[run];
      const char* from = tile.scales[half][run];
      for (; c + 8 <= end; c += 8, from += 16) store(to + c, load((const bf16*)from));
      for (; c < end; ++c, from += 2) {
        bf16 scale;
        memcpy(&scale, from, sizeof scale);
        to[c] = widen(scale);
      }
      spread_multipliers(tile.multipliers[half][run], (end - first) * groups, spread + first * groups);
    }
    for (; column + c < kQuantizedTile; ++c) to[c] = 0;
  }
}

// A half of a tile as 16-bit integers in `to`. Rows lie kStagePad apart: at a power of two they would share few cache sets.
template <class T>
Rows<Wide<T::kSmall>> stage(const Rows<T>& rows, int count, int d, int16_t* to, const char** out) {
  for (int c = 0; c < count; ++c, to += d + kStagePad) {
    for (int j = 0; j < d; j += 16) store_words(to + j, rows.load(c, j));
    out[c] = (const char*)to;
  }
  return {out, nullptr, 0};
}

// Scores of a tile. Few query rows read the keys where they lie and ask for the values; many widen them first.
template <class T>
void score_half(const AttentionArgs& a, const WorkQ& q, const TileQ& tile, int first, int last) {
  const int d = a.head_dim, count = tile.end - tile.begin, column = tile.begin % kQuantizedTile;
  const Rows<T> keys = {tile.data[0], q.multipliers, (int32_t)a.halves[0].groups};
  if (last - first < kStageRows) {
    dot_tile<true>(q, first, last, keys, Ahead{tile.data[1], a.halves[1].bits}, column, count, d);
  } else {
    const char* wide[kQuantizedTile];
    dot_tile<false>(q, first, last, stage(keys, count, d, q.wide, wide), Ahead{nullptr, 8}, column, count, d);
  }
}

template <class T>
void weigh_half(const AttentionArgs& a, const WorkQ& q, const TileQ& tile, const TileQ& next, int first, int last) {
  const int d = a.head_dim, count = tile.end - tile.begin, column = tile.begin % kQuantizedTile;
  const Rows<T> values = {tile.data[1], q.multipliers + kQuantizedTile * groups_of(d), (int32_t)a.halves[1].groups};
  if (last - first >= kStageRows) {
    const char* wide[kQuantizedTile];
    const auto staged = stage(values, count, d, q.wide + kQuantizedTile * (d + kStagePad), wide);
    weigh_tile_levels<false>(q, first, last, staged, Ahead{nullptr, 8}, column, count, d);
  } else if (next.begin < next.end) {
    weigh_tile_levels<true>(q, first, last, values, Ahead{next.data[0], a.halves[0].bits}, column, count, d);
  } else {
    weigh_tile_levels<false>(q, first, last, values, Ahead{nullptr, 8}, column, count, d);
  }
}

// The rows [first, last), all of which see some of the tile's keys, against them.
void attend_tile_quantized(const AttentionArgs& a, const WorkQ& q, const View& view, const TileQ& tile,
                           const TileQ& next, int first, int last) {
  const int32_t origin = tile.begin / kQuantizedTile * kQuantizedTile;
  const auto low = [&](int r) { return greater(view.low(r), tile.begin) - origin; };
  const auto high = [&](int r) { return smaller(view.high(r), tile.end) - origin; };
  read_scales(a, tile, q);
  if (a.halves[0].bits == 8)
    score_half<Int8>(a, q, tile, first, last);
  else
    score_half<Int4>(a, q, tile, first, last);
  const float levels = a.halves[1].bits == 8 ? kLevels : kFewerLevels;
  for (int r = first; r < last; r += kTogether)
    soften_levels(q, r, smaller(r + kTogether, last), a.softcap, levels, low, high);
  if (a.halves[1].bits == 8)
    weigh_half<Int8>(a, q, tile, next, first, last);
  else
    weigh_half<Int4>(a, q, tile, next, first, last);
}

// As `attend_item` in attention_float.h.
template <class IO>
bool attend_item_quantized(const AttentionArgs& a, const AttentionItem& it, float* memory) {
  const auto [view, rows, begin, limit] = range_of(a, it);
  const int d = a.head_dim, group = view.group;
  const WorkQ q = carve_quantized(memory, a.max_rows, d);
  const Work& w = q.w;
  const int32_t token = a.rows[it.row].query_start + it.first_query;
  const int32_t* table = a.table + it.row * a.table_stride;
  load_queries<float, IO>(a, token, it.head, group, rows, w.query);
  for (int r = 0; r < rows; ++r)
    q.query_scale[r] = a.scale * to_levels(w.query + (int64_t)r * d, d, q.query + (int64_t)r * d);
  clear_total(w, rows, d);
  clear_segment(w, rows, d);
  TileQ tiles[2];
  int at = 0, first = 0, last = 0;
  if (!locate_quantized(a, table, it.head, begin, limit, tiles[0])) return false;
  while (tiles[at].begin < tiles[at].end) {
    const TileQ& tile = tiles[at];
    TileQ& next = tiles[1 - at];
    if (!locate_quantized(a, table, it.head, tile.end, limit, next)) return false;
    while (first < rows && view.high(first) <= tile.begin) ++first;
    while (last < rows && view.low(last) < tile.end) ++last;
    attend_tile_quantized(a, q, view, tile, next, first, last);
    if (tile.end % kSegment == 0 || tile.end == limit) {
      put_segment(a, it, w, tile.begin / kSegment, rows);
      clear_segment(w, rows, d);
    }
    at = 1 - at;
  }
  if (it.slot < 0) store_rows<float, IO>(a, token, it.head, group, rows, w);
  return true;
}

}  // namespace
