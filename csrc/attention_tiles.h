// The arithmetic of attention on the tiles of AMX, for up to 32 query rows against a segment of 256 keys: scores, softmax
// weights, weighted values. It knows pointers to runs of keys, not blocks or sequences; attention_amx.h for those.
//
// Scores come out transposed, keys x queries, so that keys go in as they lie in a block; values are copied once for all
// rows, the two keys of a pair side by side. The softmax of a row sees the whole segment at once: nothing has to be scaled
// again on the way, and weighted values are summed in tile registers from the first key to the last. Queries and weights
// are rounded to bfloat16, as the inputs of tiles are.
//
// Invariant: a row's sums run over absolute steps of 32 keys in one order, and a key that it does not see has weight zero;
// so its bits depend on its own tokens only.
#pragma once

#include "amx.h"
#include "attention_math.h"
#include "kernels.h"
#include "wide_math.h"

namespace {

using octavo::AttentionArgs;
using octavo::kSegment;

constexpr int kTileRows = 16, kMostRows = 32;  // rows of a tile; rows that pass a segment together
constexpr int kStepKeys = 32, kSteps = kSegment / kStepKeys;  // keys of a step of weighted values
constexpr int kRunKeys = 16, kRuns = kSegment / kRunKeys;     // keys of a tile of them

// What a thread needs, cut from its working memory; sizes in `attention_work_amx`.
struct TileWork {
  float *total, *total_max, *total_sum;  // [rows, d], [rows], [rows]: the segments before
  float* acc;                            // [32, d]: of the segment at hand, in the order of `pair_values`
  float *max, *sum;                      // [32]
  float* scores;                         // [32, 256]
  bf16* weights;                         // [2][8 steps][16 rows][32 keys]
  bf16* query;                           // [rows / 16][d / 32][16 pairs of inputs][16 rows][2]
  bf16* values;                          // [8 steps][d / 16][16 pairs of keys][16 columns][2]
  bf16* keys;                            // [256, d], for runs of keys that do not lie in one piece
};

// ---- Moving numbers ------------------------------------------------------------------------------------------------------

// to[c][r] = from[r][c] for 16 x 16 floats.
OCTAVO_INLINE void transpose16(const float* from, float* to, int64_t to_stride) {
#if defined(__AVX512F__)
  __m512 v[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = _mm512_load_ps(from + 16 * i);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]), t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44), v[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xEE);
    v[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44), v[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // column 4q + i of rows 4g to 4g + 3 is quarter q of v[4g + i]
    t[i] = _mm512_shuffle_f32x4(v[i], v[4 + i], 0x88), t[4 + i] = _mm512_shuffle_f32x4(v[i], v[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_f32x4(v[8 + i], v[12 + i], 0x88), t[12 + i] = _mm512_shuffle_f32x4(v[8 + i], v[12 + i], 0xDD);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_ps(to + i * to_stride, _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88));
    _mm512_storeu_ps(to + (8 + i) * to_stride, _mm512_shuffle_f32x4(t[i], t[8 + i], 0xDD));
    _mm512_storeu_ps(to + (4 + i) * to_stride, _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88));
    _mm512_storeu_ps(to + (12 + i) * to_stride, _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xDD));
  }
#else
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < 16; ++c) to[c * to_stride + r] = from[16 * r + c];
#endif
}

// Values of two keys (null: zeros) as pairs: of 32 columns, 0-3, 8-11, 16-19, 24-27 go to one tile, the others to the next:
// the order in which they come apart. [d / 16] tiles, of which `to` is the pair's row in the first.
OCTAVO_INLINE void pair_values(const bf16* even, const bf16* odd, int d, bf16* to) {
  for (int j = 0; j < d; j += 32, to += 2 * kTileNumbers) {
#if defined(__AVX512BW__)
    const __m512i none = _mm512_setzero_si512();
    const __m512i e = even ? _mm512_loadu_si512(even + j) : none, o = odd ? _mm512_loadu_si512(odd + j) : none;
    _mm512_store_si512(to, _mm512_unpacklo_epi16(e, o));
    _mm512_store_si512(to + kTileNumbers, _mm512_unpackhi_epi16(e, o));
#else
    for (int c = 0; c < 32; ++c) {
      bf16* at = to + (c % 8 < 4 ? 0 : kTileNumbers) + (c / 8 * 4 + c % 4) * 2;
      at[0] = even ? even[j + c] : bf16{0}, at[1] = odd ? odd[j + c] : bf16{0};
    }
#endif
  }
}

// Columns in the order of `pair_values` -> in their own, times `share`.
template <class IO>
OCTAVO_INLINE void store_columns(const float* from, int d, float share, IO* to) {
  for (int j = 0; j < d; j += 32) {
    const vec one = load_wide(from + j) * splat_wide(share), other = load_wide(from + j + 16) * splat_wide(share);
    alignas(64) float part[32];
#if defined(__AVX512F__)
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const vec first = (vec)_mm512_permutex2var_ps((__m512)one, low, (__m512)other);
    const vec second = (vec)_mm512_permutex2var_ps((__m512)one, high, (__m512)other);
    if constexpr (__is_same(IO, float)) {
      store_wide(to + j, first), store_wide(to + j + 16, second);
      continue;
    }
    store_wide(part, first), store_wide(part + 16, second);
#else
    for (int c = 0; c < 32; ++c) part[c] = (c % 8 < 4 ? one : other)[c / 8 * 4 + c % 4];
#endif
    for (int i = 0; i < 32; i += 8) store(to + j + i, load(part + i));
  }
}

// Query rows as tiles, rows below the last one zeros. A pair of inputs is moved as if it were a float.
template <class IO, class At>
void pack_queries(int rows, int d, bf16* to, const At& row_at) {
  alignas(64) float pairs[256];
  for (int first = 0; first < rows; first += kTileRows, to += (int64_t)kTileRows * d) {
    const int count = smaller(kTileRows, rows - first);
    memset(pairs + count * 16, 0, (size_t)(kTileRows - count) * 64);
    for (int j = 0; j < d; j += 32) {
      for (int r = 0; r < count; ++r) round32(row_at(first + r) + j, (bf16*)(pairs + r * 16));
      transpose16(pairs, (float*)(to + (int64_t)j * kTileRows), 16);
    }
  }
}

// Memory to ask for, a little at a time beside the products: keys [key, end) of a head, or their values.
struct Asker {
  const bf16* base = nullptr;
  const int32_t* table = nullptr;
  int64_t block_stride = 0, num_blocks = 0, left = 0;  // left: bytes of the block at hand
  int32_t block_size = 0, head_dim = 0, key = 0, end = 0;
  const char* at = nullptr;

  // Two KiB, what a step over 32 inputs uses up of 32 keys.
  OCTAVO_INLINE void ask() {
    constexpr int64_t kPart = 2048;
    if (!left) {
      if (key >= end) return;
      const int32_t block = table[key / block_size], offset = key % block_size;
      const int32_t count = smaller(end - key, block_size - offset);
      key += count;
      if (block < 0 || block >= num_blocks) return;  // others complain
      at = (const char*)(base + block * block_stride + (int64_t)offset * head_dim);
      left = (int64_t)count * head_dim * 2;
    }
    const int64_t part = left < kPart ? left : kPart;
    for (int64_t i = 0; i < part; i += 64) __builtin_prefetch(at + i, 0, 2);
    at += part, left -= part;
  }
};

// ---- Scores ------------------------------------------------------------------------------------------------------------

// Two runs of 16 keys times a tile of queries. (Two tiles of sums and not four, see `Pairs` in linear_amx.h.)
OCTAVO_INLINE void score_tile(const bf16* query, const bf16* keys, const bf16* keys2, int d, Asker& asker, float* scores) {
  alignas(64) float turned[2 * 256];
  const int64_t stride = (int64_t)d * 2;
  zero_tile(0);
  zero_tile(1);
  for (int j = 0; j < d; j += 32) {
    load_tile(6, query + (int64_t)j * kTileRows, 64);
    load_tile(4, keys + j, stride);
    load_tile(5, keys2 + j, stride);
    multiply_tiles(0, 4, 6);
    multiply_tiles(1, 5, 6);
    asker.ask();
  }
  store_tile(0, turned, 64);
  store_tile(1, turned + 256, 64);
  transpose16(turned, scores, kSegment);
  transpose16(turned + 256, scores + kRunKeys, kSegment);
}

// ---- Softmax -----------------------------------------------------------------------------------------------------------

// One row of scores against the keys [low, high) of the segment -> weights e^(s - max) for steps [from, to), [step][.][32],
// unseen keys 0; its max and sum.
OCTAVO_INLINE void soften_row(const AttentionArgs& a, float* scores, int low, int high, int from, int to, bf16* weights,
                              float& max, float& sum_of_weights) {
  max = kMinusInf, sum_of_weights = 0;
  if (low >= high) {
    for (int s = from; s < to; ++s) memset(weights + s * kTileNumbers, 0, kStepKeys * sizeof(bf16));
    return;
  }
  vec top = splat_wide(kMinusInf);
  const int first = low / 16, last = (high + 15) / 16;
  for (int v = first; v < last; ++v) {
    vec s = load_wide(scores + v * 16) * splat_wide(a.scale);
    if (a.softcap > 0) s = capped(s, a.softcap);
    if (v * 16 < low || v * 16 + 16 > high) s = masked(s, low - v * 16, high - v * 16);
    store_wide(scores + v * 16, s);
    top = larger_wide(s, top);
  }
  max = largest_wide(top);
  const vec shift = splat_wide(max == kMinusInf ? 0.0f : max);  // all seen scores minus infinity: weights 0, not NaN
  vec total = splat_wide(0);
  for (int s = from; s < to; ++s) {
    alignas(64) float part[kStepKeys];
    for (int h = 0; h < 2; ++h) {
      const int v = 2 * s + h;
      const vec p = v < first || v >= last ? splat_wide(0) : exp_down_wide(load_wide(scores + v * 16) - shift);
      store_wide(part + 16 * h, p);
      total = total + p;
    }
    round32(part, weights + s * kTileNumbers);
  }
  sum_of_weights = sum(low_half(&total) + high_half(&total));
}

// ---- Values ------------------------------------------------------------------------------------------------------------

// acc [16][d] of tile `t` of rows = weights x values, steps [from, to).
OCTAVO_INLINE void weigh_tile(const TileWork& w, int t, int d, int from, int to, Asker& asker) {
  const int64_t stride = (int64_t)d * 4, depth = (int64_t)d / 16 * kTileNumbers;
  const bf16* weights = w.weights + t * kSteps * kTileNumbers;
  float* acc = w.acc + (int64_t)t * kTileRows * d;
  for (int j = 0; j < d; j += 32) {
    zero_tile(0);
    zero_tile(1);
    const bf16* v = w.values + (int64_t)j / 16 * kTileNumbers;
    for (int s = from; s < to; ++s) {
      load_tile(4, weights + s * kTileNumbers, 64);
      load_tile(6, v + s * depth, 64);
      load_tile(7, v + s * depth + kTileNumbers, 64);
      multiply_tiles(0, 4, 6);
      multiply_tiles(1, 4, 7);
      asker.ask();
    }
    store_tile(0, acc + j, stride);
    store_tile(1, acc + j + 16, stride);
  }
}

}  // namespace
