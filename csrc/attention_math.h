// The arithmetic of attention on one tile of keys: scores, softmax weights, weighted values, and the joining of
// segments. It knows pointers to rows, not blocks, sequences or threads; attention.h says why the order of its sums
// is fixed.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using octavo::kTile;

constexpr int kSubTile = 16;     // keys whose rows stay in the first-level cache while all queries pass
constexpr int kWidenRows = 8;    // from this many query rows on, 16-bit keys and values are widened once per tile
const float kMinusInf = -__builtin_inff();

OCTAVO_INLINE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
OCTAVO_INLINE int32_t greater(int32_t a, int32_t b) { return a > b ? a : b; }

// A thread's working memory for R query rows of d, in float32. acc, max, sum: the segment at hand; total_*: before it.
struct Work {
  float *query, *scores, *acc, *total;                      // [R, d], [R, tile], [R, d], [R, d]
  float *max, *sum, *total_max, *total_sum, *factors, *rest;  // [R] each; what follows
};

Work carve(float* p, int64_t rows, int64_t d, int64_t tile) {
  Work w;
  float** const parts[] = {&w.query, &w.acc, &w.total, &w.scores, &w.max, &w.sum, &w.total_max, &w.total_sum,
                           &w.factors, &w.rest};
  const int64_t sizes[] = {rows * d, rows * d, rows * d, rows * tile, rows, rows, rows, rows, rows, 0};
  for (int i = 0; i < 10; ++i) {
    *parts[i] = p;
    p += (sizes[i] + 15) / 16 * 16;
  }
  return w;
}

// Floats of it, rounded up for alignment.
inline int64_t float_work_floats(int64_t rows, int64_t d) { return rows * (3 * d + kTile + 5) + 2 * kTile * d + 16 * 10; }

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

// The softmax of one row over a tile of N keys, in three steps, so that a caller with several rows can do each step for
// all of them: a row's steps wait for one another, those of different rows do not.

// The largest score of the columns [low, high), those the row sees; the others become minus infinity. scaled(s, v): the
// scores of vector v, from what lies there.
template <int N, class Scaled>
OCTAVO_INLINE float top_score(float* scores, int32_t low, int32_t high, float softcap, Scaled scaled) {
  const bool whole = low == 0 && high == N && softcap == 0;
  f8 top = splat(kMinusInf);
  for (int v = low / 8; v < (high + 7) / 8; ++v) {
    f8 s = scaled(load(scores + v * 8), v);
    if (!whole) {
      if (softcap > 0) s = tanh8(s / splat(softcap)) * splat(softcap);
      const i8 column = lanes() + splat_int(v * 8);
      s = select((column >= splat_int(low)) & (column < splat_int(high)), s, splat(kMinusInf));
    }
    store(scores + v * 8, s);
    top = larger(s, top);
  }
  return largest(top);
}

// Takes a tile's largest score into the row's; returns the factor for its old sums. shift: what weights are relative to.
OCTAVO_INLINE float raise(float tile_max, float& max, float& shift) {
  const float new_max = tile_max > max ? tile_max : max;
  shift = new_max == kMinusInf ? 0.0f : new_max;  // all seen scores minus infinity: weights 0, not NaN
  const float factor = max == new_max ? 1.0f : exp_down(splat(max - shift))[0];
  max = new_max;
  return factor;
}

// put(v, weights) for each vector: e^(score - shift), unseen columns 0. Returns the weights' sum.
template <int N, class Put>
OCTAVO_INLINE float exponentials(const float* scores, int32_t low, int32_t high, float shift, Put put) {
  const int first = low / 8, last = (high + 7) / 8;
  f8 part = splat(0);
  for (int v = 0; v < N / 8; ++v) {
    const f8 p = v < first || v >= last ? splat(0) : exp_down(load(scores + v * 8) - splat(shift));
    put(v, p);
    part = part + p;
  }
  return sum(part);
}

// One row of scores -> weights e^(s - max), unseen keys 0; updates max and sum; returns the factor for the old sums.
float soften(float* scores, int32_t low, int32_t high, float softcap, float& max, float& sum_so_far) {
  float shift;
  const float factor = raise(top_score<kTile>(scores, low, high, softcap, [](f8 s, int) { return s; }), max, shift);
  const float part = exponentials<kTile>(scores, low, high, shift, [&](int v, f8 p) { store(scores + v * 8, p); });
  sum_so_far = sum_so_far * factor + part;
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

}  // namespace
