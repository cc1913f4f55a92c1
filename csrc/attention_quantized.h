// Exact attention over quantised blocks: rows are widened to 16-bit integers on their way into the registers, and all
// products are pairs of 16-bit integers summed in 32 bits, twice as many per instruction as with floats. Queries and
// softmax weights become 16-bit integers too, with a scale for each row (and tile): an error of 2^-16 of the largest,
// beside 2^-8 or more of the stored numbers. Softmax, segments and totals are those of attention_float.h.
//
// Where a row's parts lie: octavo/core/kv_format.py. What they mean: octavo/kernels/quantized_kv.py, whose bytes
// `write` repeats bit for bit.
//
// Invariant: as in attention_float.h. Sums of integers are exact, scales of queries and weights come from one query row
// alone, and few rows and many take the same steps, so the bits of a row depend on its own tokens only.
#pragma once

#include "attention_float.h"
#include "kernels.h"
#include "quantized_rows.h"
#include "simd.h"

#include <omp.h>

namespace {

using octavo::AttentionArgs;
using octavo::AttentionItem;
using octavo::kSegment;
using octavo::QuantizedHalf;

constexpr float kLevels = 32767.0f;  // of queries and of softmax weights
constexpr int kStageRows = 8;        // from this many query rows on, a tile is widened to 16 bits first

// A thread's working memory beyond `Work`, for R query rows; see `quantized_work_floats`.
struct WorkQ {
  int16_t *query, *weights;           // [R, d], [R, kTile]
  float *query_scale, *weight_scale;  // [R] each
  float *key_scale, *value_scale;     // [kTile] each
  int32_t* multipliers;               // [2, kTile, groups]
  int16_t* wide;                      // [2, kTile, d]
};

WorkQ carve_quantized(float* p, int64_t rows, int64_t d) {
  WorkQ w;
  const auto take = [&p](int64_t floats) {
    float* at = p;
    p += (floats + 15) / 16 * 16;
    return at;
  };
  w.query = (int16_t*)take(rows * d / 2), w.weights = (int16_t*)take(rows * kTile / 2);
  w.query_scale = take(rows), w.weight_scale = take(rows);
  w.key_scale = take(kTile), w.value_scale = take(kTile);
  w.multipliers = (int32_t*)take(2 * kTile * ((d + 31) / 32));
  w.wide = (int16_t*)take(kTile * d);
  return w;
}

// Where the rows [begin, end) of one tile lie: keys in half 0, values in half 1. A run is the part of a block in it.
struct TileQ {
  const char* data[2][kTile];
  const char *scales[2][kTile], *multipliers[2][kTile];  // of each run's first row
  int32_t ends[kTile], runs;                             // one past each run's last row
  int32_t begin, end;
};

// As `locate` in attention_float.h; also asks for the lines of the scales, which are read when the tile is worked on.
bool locate_quantized(const AttentionArgs& a, const int32_t* table, int32_t head, int32_t begin, int32_t limit,
                      TileQ& tile) {
  tile.begin = begin, tile.runs = 0;
  tile.end = begin < limit ? smaller(limit, (begin / kTile + 1) * kTile) : begin;
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
  for (; n && n < kTile; ++n) tile.data[0][n] = tile.data[0][n - 1], tile.data[1][n] = tile.data[1][n - 1];
  return true;
}

// Scales as floats (zero past the end) and multipliers as int4 rows want them.
void read_scales(const AttentionArgs& a, const TileQ& tile, const WorkQ& w) {
  for (int half = 0; half < 2; ++half) {
    float* to = half ? w.value_scale : w.key_scale;
    const int32_t groups = (int32_t)a.halves[half].groups;
    int32_t* spread = w.multipliers + half * kTile * groups_of(a.head_dim);
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
    for (; c < kTile; ++c) to[c] = 0;
  }
}

// One row of floats -> 16-bit integers of at most kLevels; returns the scale. Not finite anywhere: the scale is NaN.
float to_levels(const float* from, int n, int16_t* to) {
  f8 top = splat(0), bad = splat(0);
  for (int j = 0; j < n; j += 8) {
    const f8 x = load(from + j);
    top = larger(as_float(as_int(x) & splat_int(0x7FFFFFFF)), top);
    bad = bad + x * splat(0);
  }
  const float most = largest(top), inverse = most > 0x1p-110f ? kLevels / most : 0.0f;
  for (int j = 0; j < n; j += 8) {
    store_words8(to + j, to_int(round_small(load(from + j) * splat(inverse))));
  }
  return most / kLevels + sum(bad);
}

// Sums of 8 = NQ * NK dot products, one per lane as in `score`: lane r * NK + c is query r against key c.
template <int NQ, int NK, bool Ask, class T>
OCTAVO_INLINE void dot(const int16_t* query, const Rows<T>& keys, Ahead next, int d, float* out) {
  i8 acc[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) acc[i] = splat_int(0);
  const char* at[NK];
  for (int c = 0; c < NK; ++c) at[c] = keys.data[c];
  for (int j = 0; j < d; j += 16) {
    words k[NK];
#pragma GCC unroll 8
    for (int c = 0; c < NK; ++c) {
      if (Ask) next.ask(c, j);
      k[c] = T::load(at[c], keys.multipliers + c * keys.groups, j);
    }
#pragma GCC unroll 4
    for (int r = 0; r < NQ; ++r) {
      words q = load_words(query + (int64_t)r * d + j);
      if (NK > 1 && NK < 8) keep(q);
#pragma GCC unroll 8
      for (int c = 0; c < NK; ++c) acc[r * NK + c] = add_pairs(acc[r * NK + c], q, k[c]);
    }
  }
  f8 lanes[8];
  for (int i = 0; i < 8; ++i) lanes[i] = to_float(acc[i]);
  const f8 s = sum8(lanes);
  for (int r = 0; r < NQ; ++r) memcpy(out + r * kTile, (const float*)&s + r * NK, NK * sizeof(float));
}

template <int NQ, int NK, bool Ask, class T>
OCTAVO_INLINE void dot_run(const int16_t* query, const Rows<T>& keys, Ahead next, int count, int d, float* out) {
  int c = 0;
  for (; c + NK <= count; c += NK) dot<NQ, NK, Ask>(query, keys.from(c), next.from(c), d, out + c);
  if (c == count) return;
  const char* tail[NK];  // repeat the last key; its extra sums land in a buffer of the same shape
  int32_t many[NK * kMostGroups];
  const Rows<T> last = keys.repeat_last(c, count, NK, tail, many);
  float extra[NQ * kTile];
  dot<NQ, NK, false>(query, last, next, d, extra);
  for (int r = 0; r < NQ; ++r) memcpy(out + r * kTile + c, extra + r * kTile, (size_t)(count - c) * sizeof(float));
}

// Raw sums for rows [begin, end) and `count` keys -> w.scores from column `column` on. next: rows to ask for meanwhile.
template <bool Ask, class T>
void dot_tile(const Work& w, const WorkQ& q, int begin, int end, const Rows<T>& keys, Ahead next, int column,
              int count, int d) {
  for (int c = 0; c < count; c += kSubTile) {
    const int some = smaller(kSubTile, count - c);
    const Rows<T> k = keys.from(c);
    float* out = w.scores + column + c;
    int r = begin;
    const auto query = [&](int row) { return q.query + (int64_t)row * d; };
    for (; r + 4 <= end; r += 4) dot_run<4, 2, Ask>(query(r), k, next.from(c), some, d, out + r * kTile);
    for (; r + 2 <= end; r += 2) dot_run<2, 4, Ask>(query(r), k, next.from(c), some, d, out + r * kTile);
    if (r < end) dot_run<1, 8, Ask>(query(r), k, next.from(c), some, d, out + r * kTile);
  }
}

// sums * (scale of the query * scale of the key).
void apply_scales(float* scores, int count, float row_scale, const float* key_scale) {
  int c = 0;
  for (; c + 8 <= count; c += 8) store(scores + c, load(scores + c) * (load(key_scale + c) * splat(row_scale)));
  for (; c < count; ++c) scores[c] = scores[c] * (key_scale[c] * row_scale);
}

// Softmax weights times the values' scales -> 16-bit integers; returns the factor that makes them weights again.
float weights_to_levels(const float* weights, const float* value_scale, int count, int16_t* to) {
  float scaled[kTile];
  int c = 0;
  for (; c + 8 <= count; c += 8) store(scaled + c, load(weights + c) * load(value_scale + c));
  for (; c < count; ++c) scaled[c] = weights[c] * value_scale[c];
  for (; c < (count + 15) / 16 * 16; ++c) scaled[c] = 0;
  return to_levels(scaled, c, to);
}

// acc[r][columns j ..] = acc * factor + scale * sum over keys of weight * value, for NQ rows and NP times 16 columns.
template <int NQ, int NP, class T>
OCTAVO_INLINE void weigh_levels(float* acc, const int16_t* weights, const float* factors, const float* scales,
                                const Rows<T>& values, int count, Ahead next, int d, int j) {
  i8 sums[NQ][2 * NP];
#pragma GCC unroll 6
  for (int r = 0; r < NQ; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * NP; ++v) sums[r][v] = splat_int(0);
  const bool asking = next.wants(j);
  for (int c = 0; c < count; c += 2) {
    const int second = c + 1 < count ? c + 1 : c;  // its weight is zero
    words low[NP], high[NP];
    if (asking) next.ask(c, j), next.ask(c + 1, j);
#pragma GCC unroll 4
    for (int v = 0; v < NP; ++v)
      interleave(values.load(c, j + 16 * v), values.load(second, j + 16 * v), low[v], high[v]);
#pragma GCC unroll 6
    for (int r = 0; r < NQ; ++r) {
      const words p = splat_pair(weights + r * kTile + c);
#pragma GCC unroll 4
      for (int v = 0; v < NP; ++v) {
        sums[r][2 * v] = add_pairs(sums[r][2 * v], p, low[v]);
        sums[r][2 * v + 1] = add_pairs(sums[r][2 * v + 1], p, high[v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < NQ; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NP; ++v) {
      float* to = acc + (int64_t)r * d + j + 16 * v;
      i8 first, second;
      in_order(sums[r][2 * v], sums[r][2 * v + 1], first, second);
      const f8 factor = splat(factors[r]), scale = splat(scales[r]);
      store(to, fma(to_float(first), scale, load(to) * factor));
      store(to + 8, fma(to_float(second), scale, load(to + 8) * factor));
    }
}

template <class T>
void weigh_tile_levels(const Work& w, const WorkQ& q, int begin, int end, const Rows<T>& values,
                       Ahead next, int count, int d) {
  int j = 0;
  const auto at = [&](int row) { return w.acc + (int64_t)row * d; };
  const auto weights = [&](int row) { return q.weights + row * kTile; };
  if (end - begin <= 2)  // few rows: wide columns keep more chains going
    for (; j + 32 <= d; j += 32)
      for (int r = begin; r < end; ++r)
        weigh_levels<1, 2>(at(r), weights(r), w.factors + r, q.weight_scale + r, values, count, next, d, j);
  for (; j < d; j += 16) {
    int r = begin;
    for (; r + 6 <= end; r += 6)
      weigh_levels<6, 1>(at(r), weights(r), w.factors + r, q.weight_scale + r, values, count, next, d, j);
    for (; r + 4 <= end; r += 4)
      weigh_levels<4, 1>(at(r), weights(r), w.factors + r, q.weight_scale + r, values, count, next, d, j);
    for (; r + 2 <= end; r += 2)
      weigh_levels<2, 1>(at(r), weights(r), w.factors + r, q.weight_scale + r, values, count, next, d, j);
    if (r < end)
      weigh_levels<1, 1>(at(r), weights(r), w.factors + r, q.weight_scale + r, values, count, next, d, j);
  }
}

// A half of a tile as 16-bit integers in `to` [count, d].
template <class T>
Rows<Wide> stage(const Rows<T>& rows, int count, int d, int16_t* to, const char** out) {
  for (int c = 0; c < count; ++c) {
    for (int j = 0; j < d; j += 16) store_words(to + (int64_t)c * d + j, rows.load(c, j));
    out[c] = (const char*)(to + (int64_t)c * d);
  }
  return {out, nullptr, 0};
}

// Scores of a tile. Few query rows read the keys where they lie and ask for the values; many widen them first.
template <class T>
void score_half(const AttentionArgs& a, const Work& w, const WorkQ& q, const TileQ& tile, int first, int last) {
  const int d = a.head_dim, count = tile.end - tile.begin, column = tile.begin % kTile;
  const Rows<T> keys = {tile.data[0], q.multipliers, (int32_t)a.halves[0].groups};
  if (last - first < kStageRows) {
    dot_tile<true>(w, q, first, last, keys, Ahead{tile.data[1], a.halves[1].bits}, column, count, d);
  } else {
    const char* wide[kTile];
    dot_tile<false>(w, q, first, last, stage(keys, count, d, q.wide, wide), Ahead{nullptr, 8}, column, count, d);
  }
}

template <class T>
void weigh_half(const AttentionArgs& a, const Work& w, const WorkQ& q, const TileQ& tile, const TileQ& next, int first,
                int last) {
  const int d = a.head_dim, count = tile.end - tile.begin;
  const Rows<T> values = {tile.data[1], q.multipliers + kTile * groups_of(d), (int32_t)a.halves[1].groups};
  if (last - first < kStageRows) {
    const Ahead ahead = {next.begin < next.end ? next.data[0] : nullptr, a.halves[0].bits};
    weigh_tile_levels(w, q, first, last, values, ahead, count, d);
  } else {
    const char* wide[kTile];
    const Rows<Wide> staged = stage(values, count, d, q.wide + kTile * d, wide);
    weigh_tile_levels(w, q, first, last, staged, Ahead{nullptr, 8}, count, d);
  }
}

// The rows [first, last), all of which see some of the tile's keys, against them.
void attend_tile_quantized(const AttentionArgs& a, const Work& w, const WorkQ& q, const View& view, const TileQ& tile,
                           const TileQ& next, int first, int last) {
  const int32_t origin = tile.begin / kTile * kTile, column = tile.begin - origin, count = tile.end - tile.begin;
  read_scales(a, tile, q);
  if (a.halves[0].bits == 8)
    score_half<Int8>(a, w, q, tile, first, last);
  else
    score_half<Int4>(a, w, q, tile, first, last);
  for (int r = first; r < last; ++r) {
    float* scores = w.scores + r * kTile;
    const int32_t low = greater(view.low(r), tile.begin) - origin, high = smaller(view.high(r), tile.end) - origin;
    apply_scales(scores + column, count, q.query_scale[r], q.key_scale);
    w.factors[r] = soften(scores, low, high, a.softcap, w.max[r], w.sum[r]);
    q.weight_scale[r] = weights_to_levels(scores + column, q.value_scale, count, q.weights + r * kTile);
  }
  if (a.halves[1].bits == 8)
    weigh_half<Int8>(a, w, q, tile, next, first, last);
  else
    weigh_half<Int4>(a, w, q, tile, next, first, last);
}

// As `attend_item` in attention_float.h.
template <class IO>
bool attend_item_quantized(const AttentionArgs& a, const AttentionItem& it, float* memory) {
  const int d = a.head_dim, group = a.num_heads / a.num_kv_heads;
  const int rows = (it.end_query - it.first_query) * group;
  const Row& row = a.rows[it.row];
  const View view = {row.context_len - row.query_len + it.first_query, group, a.window};
  const Work w = carve(memory, a.max_rows, d);
  const WorkQ q = carve_quantized(memory + octavo::attention_work_floats(a.max_rows, d), a.max_rows, d);
  const int32_t token = row.query_start + it.first_query;
  const int32_t begin = greater(view.low(0), it.first_segment * kSegment);
  const int32_t limit = smaller(view.high(rows - 1), it.end_segment * kSegment);
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
    attend_tile_quantized(a, w, q, view, tile, next, first, last);
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
