// The arithmetic of attention on one tile of quantised keys: scores and weighted values as sums of integer products, and
// the steps of the softmax that lie between. It knows pointers to rows, as attention_math.h does.
#pragma once

#include "attention_math.h"
#include "kernels.h"
#include "quantized_rows.h"
#include "simd.h"

namespace {

using octavo::kQuantizedTile;

constexpr float kLevels = 32767.0f;  // of queries, and of softmax weights against int8 values
// Against int4 values, which are up to 8 * 127 as integers: a tile of them times as many levels still fits 32 bits.
constexpr float kFewerLevels = 16383.0f;
static_assert(1016.0 * kFewerLevels * kQuantizedTile < 2147483648.0 && 127.0 * kLevels * octavo::kMostQuantizedDim < 2147483648.0);
constexpr int kLevelStride = kQuantizedTile + 16;  // of rows of weights; those past the end are zero
constexpr int kTogether = 4;  // rows whose softmax is taken in step

constexpr int64_t kStagePad = 32;  // numbers between two widened rows

// Floats of a `WorkQ`, rounded up for alignment.
inline int64_t quantized_work_floats(int64_t rows, int64_t d) {
  const int64_t common = rows * (3 * d + kQuantizedTile + 5), levels = rows * (d / 2 + kQuantizedTile / 2 + 8 + 2);
  return common + levels + kQuantizedTile * (2 + 2 * octavo::groups_of(d) + d + kStagePad) + 16 * 18;
}

// A thread's working memory for R query rows.
struct WorkQ {
  Work w;
  int16_t *query, *weights;           // [R, d], [R, kLevelStride]
  float *query_scale, *weight_scale;  // [R] each
  float *key_scale, *value_scale;     // [kQuantizedTile] each, by column of the tile
  int32_t* multipliers;               // [2, kQuantizedTile, groups]
  int16_t* wide;                      // [2, kQuantizedTile, d + kStagePad]
};

WorkQ carve_quantized(float* p, int64_t rows, int64_t d) {
  WorkQ q;
  q.w = carve(p, rows, d, kQuantizedTile);
  p = q.w.rest;
  const auto take = [&p](int64_t floats) {
    float* at = p;
    p += (floats + 15) / 16 * 16;
    return at;
  };
  q.query = (int16_t*)take(rows * d / 2), q.weights = (int16_t*)take(rows * kLevelStride / 2);
  q.query_scale = take(rows), q.weight_scale = take(rows);
  q.key_scale = take(kQuantizedTile), q.value_scale = take(kQuantizedTile);
  q.multipliers = (int32_t*)take(2 * kQuantizedTile * octavo::groups_of(d));
  q.wide = (int16_t*)take(kQuantizedTile * (d + kStagePad));
  return q;
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

// ---- Scores ---------------------------------------------------------------------------------------------------------

// Sums of 8 = NQ * NK dot products, one per lane as in `score`: lane r * NK + c is query r against key c.
template <int NQ, int NK, bool Ask, class T>
OCTAVO_INLINE void dot(const int16_t* query, const Rows<T>& keys, Ahead next, int d, float* out) {
  i8 acc[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) acc[i] = splat_int(0);
  const char* at[NK];
  for (int c = 0; c < NK; ++c) at[c] = keys.data[c];
  const auto add = [&](int j) __attribute__((always_inline)) {
    words k[NK];
#pragma GCC unroll 8
    for (int c = 0; c < NK; ++c) k[c] = T::load(at[c], keys.multipliers + c * keys.groups, j);
#pragma GCC unroll 4
    for (int r = 0; r < NQ; ++r) {
      words q = load_words(query + (int64_t)r * d + j);
      if (NQ > 1) keep(q);
#pragma GCC unroll 8
      for (int c = 0; c < NK; ++c) {
        acc[r * NK + c] = add_pairs(acc[r * NK + c], q, k[c]);
        keep(acc[r * NK + c]);
      }
    }
  };
  const auto ask = [&](int j) {
    for (int c = 0; Ask && c < NK; ++c) next.ask(c, j);
  };
  int j = 0;
  for (; j + 64 <= d; j += 64) ask(j), add(j), add(j + 16), add(j + 32), add(j + 48);
  for (; j < d; j += 16) ask(j), add(j);
  const f8 s = total8<T::kSmall>(acc);
  for (int r = 0; r < NQ; ++r) memcpy(out + r * kQuantizedTile, (const float*)&s + r * NK, NK * sizeof(float));
}

template <int NQ, int NK, bool Ask, class T>
OCTAVO_INLINE void dot_run(const int16_t* query, const Rows<T>& keys, Ahead next, int count, int d, float* out) {
  int c = 0;
  for (; c + NK <= count; c += NK) dot<NQ, NK, Ask>(query, keys.from(c), next.from(c), d, out + c);
  if (c == count) return;
  const char* tail[NK];  // repeat the last key; its extra sums land in a buffer of the same shape
  int32_t many[NK * kMostGroups];
  const Rows<T> last = keys.repeat_last(c, count, NK, tail, many);
  float extra[NQ * kQuantizedTile];
  dot<NQ, NK, false>(query, last, next, d, extra);
  for (int r = 0; r < NQ; ++r) memcpy(out + r * kQuantizedTile + c, extra + r * kQuantizedTile, (size_t)(count - c) * sizeof(float));
}

// Raw sums for rows [begin, end) and `count` keys -> q.w.scores from column `column` on. next: rows to ask for meanwhile.
template <bool Ask, class T>
void dot_tile(const WorkQ& q, int begin, int end, const Rows<T>& keys, Ahead next, int column,
              int count, int d) {
  for (int c = 0; c < count; c += kSubTile) {
    const int some = smaller(kSubTile, count - c);
    const Rows<T> k = keys.from(c);
    float* out = q.w.scores + column + c;
    int r = begin;
    const auto query = [&](int row) { return q.query + (int64_t)row * d; };
    for (; r + 4 <= end; r += 4) dot_run<4, 2, Ask>(query(r), k, next.from(c), some, d, out + r * kQuantizedTile);
    for (; r + 2 <= end; r += 2) dot_run<2, 4, Ask>(query(r), k, next.from(c), some, d, out + r * kQuantizedTile);
    if (r < end) dot_run<1, 8, Ask>(query(r), k, next.from(c), some, d, out + r * kQuantizedTile);
  }
}

// ---- Softmax --------------------------------------------------------------------------------------------------------

// Weights times the values' scales, in `x` -> 16-bit integers; most: the largest. Returns what makes them weights again.
OCTAVO_INLINE float weights_to_levels(const float* x, float most, float levels, int16_t* to) {
  const f8 inverse = splat(most > 0x1p-110f ? levels / most : 0.0f);
  for (int c = 0; c < kQuantizedTile; c += 16)
    store_words16(to + c, to_int(round_small(load(x + c) * inverse)), to_int(round_small(load(x + c + 8) * inverse)));
  memset(to + kQuantizedTile, 0, (kLevelStride - kQuantizedTile) * sizeof(int16_t));
  return most / levels;
}

// Raw sums of the rows [begin, end), at most kTogether -> levels of weights, for which the row sees the columns
// [low(r), high(r)). Not finite anywhere: the weights' scale is NaN.
template <class Low, class High>
void soften_levels(const WorkQ& q, int begin, int end, float softcap, float levels, Low low, High high) {
  float shift[kTogether], most[kTogether], bad[kTogether];
  const auto row = [&](int r) { return q.w.scores + r * kQuantizedTile; };
  for (int r = begin; r < end; ++r) {
    const f8 scale = splat(q.query_scale[r]);
    const auto scaled = [&](f8 s, int v) { return s * (load(q.key_scale + v * 8) * scale); };
    const float top = top_score<kQuantizedTile>(row(r), low(r), high(r), softcap, scaled);
    q.w.factors[r] = raise(top, q.w.max[r], shift[r - begin]);
  }
  for (int r = begin; r < end; ++r) {
    f8 top = splat(0), zero = splat(0);
    const auto put = [&](int v, f8 p) {
      const f8 x = p * load(q.value_scale + v * 8);
      store(row(r) + v * 8, x);
      top = larger(x, top), zero = zero + x * splat(0);
    };
    const float part = exponentials<kQuantizedTile>(row(r), low(r), high(r), shift[r - begin], put);
    q.w.sum[r] = q.w.sum[r] * q.w.factors[r] + part;
    most[r - begin] = largest(top), bad[r - begin] = sum(zero);
  }
  for (int r = begin; r < end; ++r) {
    int16_t* to = q.weights + r * kLevelStride;
    q.weight_scale[r] = weights_to_levels(row(r), most[r - begin], levels, to) + bad[r - begin];
  }
}

// ---- Weighted values ------------------------------------------------------------------------------------------------

// acc[r][columns j ..] = acc * factor + scale * sum over keys of weight * value, for NQ rows and NP times 16 columns.
template <int NQ, int NP, bool Ask, class T>
OCTAVO_INLINE void weigh_levels(float* acc, const int16_t* weights, const float* factors, const float* scales,
                                const Rows<T>& values, int count, Ahead next, int d, int j) {
  i8 sums[NQ][2 * NP];
#pragma GCC unroll 6
  for (int r = 0; r < NQ; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * NP; ++v) sums[r][v] = splat_int(0);
  const auto add = [&](int c, int second) __attribute__((always_inline)) {
    words low[NP], high[NP];
#pragma GCC unroll 4
    for (int v = 0; v < NP; ++v)
      interleave(values.load(c, j + 16 * v), values.load(second, j + 16 * v), low[v], high[v]);
#pragma GCC unroll 6
    for (int r = 0; r < NQ; ++r) {
      const words p = splat_pair(weights + r * kLevelStride + c);
#pragma GCC unroll 4
      for (int v = 0; v < NP; ++v) {
        sums[r][2 * v] = add_pairs(sums[r][2 * v], p, low[v]);
        sums[r][2 * v + 1] = add_pairs(sums[r][2 * v + 1], p, high[v]);
        keep(sums[r][2 * v]), keep(sums[r][2 * v + 1]);
      }
    }
  };
  int c = 0;
  for (; c + 8 <= count; c += 8) {
    if (Ask) next.ask_share(c, j, 16 * NP);
    add(c, c + 1), add(c + 2, c + 3), add(c + 4, c + 5), add(c + 6, c + 7);
  }
  for (; c < count; c += 2) add(c, c + 1 < count ? c + 1 : c);  // the weight of the second is zero then
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

// column: that of the first value.
template <bool Ask, class T>
void weigh_tile_levels(const WorkQ& q, int begin, int end, const Rows<T>& values, Ahead next, int column, int count,
                       int d) {
  int j = 0;
  const Work& w = q.w;
  const auto at = [&](int row) { return w.acc + (int64_t)row * d; };
  const auto weights = [&](int row) { return q.weights + row * kLevelStride + column; };
  if (end - begin <= 2)  // few rows: wide columns keep more chains going
    for (; j + 32 <= d; j += 32)
      for (int r = begin; r < end; ++r)
        weigh_levels<1, 2, Ask>(at(r), weights(r), w.factors + r, q.weight_scale + r, values, count, next, d, j);
  for (; j < d; j += 16) {
    int r = begin;
    for (; r + 6 <= end; r += 6)
      weigh_levels<6, 1, Ask>(at(r), weights(r), w.factors + r, q.weight_scale + r, values, count, next, d, j);
    for (; r + 4 <= end; r += 4)
      weigh_levels<4, 1, Ask>(at(r), weights(r), w.factors + r, q.weight_scale + r, values, count, next, d, j);
    for (; r + 2 <= end; r += 2)
      weigh_levels<2, 1, Ask>(at(r), weights(r), w.factors + r, q.weight_scale + r, values, count, next, d, j);
    if (r < end)
      weigh_levels<1, 1, Ask>(at(r), weights(r), w.factors + r, q.weight_scale + r, values, count, next, d, j);
  }
}

}  // namespace
