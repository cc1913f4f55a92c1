// Attention over bfloat16 blocks on the tiles of AMX, for head sizes that are multiples of 32; attention.h for the rest.
//
// The tile of 64 keys that attention_float.h reads row by row is copied once, values with the two keys of a pair side by
// side; both products then run on matrix tiles for 16 query rows at a time: scores transposed, keys x queries, so that
// keys go in as they lie, and weights x values. Softmax, segments and merges are those of attention_float.h, in float32;
// queries and weights are rounded to bfloat16, as the inputs of the tiles are.
//
// Invariant: every row takes this way, decoding rows too (the copy hides behind memory), and a row's sums run over
// absolute tiles in one order; so here as well its bits depend on its own tokens only.
#pragma once

#include "amx.h"
#include "attention.h"

namespace {

constexpr int kAmxQueries = 16;  // query rows of a matrix tile
constexpr int kPairs = kTile / 2;

// What a thread needs, cut from its working memory; sizes in octavo::amx_work_floats.
struct AmxWork {
  Work w;        // acc and total are [whole, d], whole: rows rounded up to 16
  bf16* query;   // [whole / 16][d / 32][16 pairs of inputs][16 rows][2]
  bf16* keys;    // [kTile, d]
  bf16* values;  // [2][d / 16][16 pairs of keys][16 columns][2]
};

AmxWork carve_amx(float* p, int64_t whole, int64_t d) {
  AmxWork m;
  m.w = carve(p, whole, d, kTile);
  m.keys = (bf16*)m.w.rest;
  m.values = m.keys + kTile * d;
  m.query = m.values + kTile * d;
  return m;
}

template <class IO>
void pack_queries(const AttentionArgs& a, int32_t token, int32_t head, int group, int rows, bf16* to) {
  const int d = a.head_dim, whole = (rows + kAmxQueries - 1) / kAmxQueries * kAmxQueries;
  for (int r = 0; r < whole; ++r) {
    bf16* row = to + (int64_t)(r / kAmxQueries) * kAmxQueries * d + r % kAmxQueries * 2;
    const IO* from = nullptr;
    if (r < rows) from = (const IO*)a.query + (token + r / group) * a.query_stride + (int64_t)(head * group + r % group) * d;
    for (int j = 0; j < d; j += 8) {
      bf16 part[8];
      store(part, from ? load(from + j) : splat(0));
      for (int i = 0; i < 8; i += 2) memcpy(row + (int64_t)(j + i) * kAmxQueries, part + i, 4);
    }
  }
}

// Keys of the tile in rows `column` on, zeros around them: what is multiplied must be finite, seen or not.
void copy_keys(const Tile<bf16>& tile, int column, int count, int d, bf16* to) {
  memset(to, 0, (size_t)column * d * 2);
  for (int c = 0; c < count; ++c) memcpy(to + (int64_t)(column + c) * d, tile.keys[c], (size_t)d * 2);
  memset(to + (int64_t)(column + count) * d, 0, (size_t)(kTile - column - count) * d * 2);
}

// The same of values, pairs of keys interleaved.
void pair_values(const Tile<bf16>& tile, int column, int count, int d, bf16* to) {
  for (int p = 0; p < kPairs; ++p) {
    const int first = 2 * p - column;
    const bf16* even = first >= 0 && first < count ? tile.values[first] : nullptr;
    const bf16* odd = first + 1 >= 0 && first + 1 < count ? tile.values[first + 1] : nullptr;
    bf16* out = to + (int64_t)(p / 16) * 32 * d + p % 16 * 32;
    for (int j = 0; j < d; j += 16, out += 16 * 32) {
      __m256i e = _mm256_setzero_si256(), o = e;
      if (even) e = _mm256_loadu_si256((const __m256i*)(even + j));
      if (odd) o = _mm256_loadu_si256((const __m256i*)(odd + j));
      const __m256i low = _mm256_unpacklo_epi16(e, o), high = _mm256_unpackhi_epi16(e, o);
      _mm256_store_si256((__m256i*)out, _mm256_permute2x128_si256(low, high, 0x20));
      _mm256_store_si256((__m256i*)(out + 16), _mm256_permute2x128_si256(low, high, 0x31));
    }
  }
}

// to[c][r] = from[r][c] for 8 x 8 floats.
OCTAVO_INLINE void transpose8(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  __m256 v[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) v[i] = _mm256_loadu_ps(from + i * from_stride);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) t[2 * i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]), t[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    v[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    v[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
    v[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    v[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(v[i], v[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
  }
}

// scores [16 rows][kTile] of one tile of queries.
void score_amx(const AmxWork& m, const bf16* query, int d, float scale, float* scores) {
  alignas(64) float turned[kTile * kAmxQueries];
  const int64_t stride = (int64_t)d * 2;
  zero_tile(0);
  zero_tile(1);
  zero_tile(2);
  zero_tile(3);
  for (int j = 0; j < d; j += 32) {
    load_tile(4, query + (int64_t)j * kAmxQueries, 64);
    load_tile(5, m.keys + j, stride);
    multiply_tiles(0, 5, 4);
    load_tile(6, m.keys + 16 * d + j, stride);
    multiply_tiles(1, 6, 4);
    load_tile(5, m.keys + 32 * d + j, stride);
    multiply_tiles(2, 5, 4);
    load_tile(6, m.keys + 48 * d + j, stride);
    multiply_tiles(3, 6, 4);
  }
  store_tile(0, turned, 64);
  store_tile(1, turned + 16 * kAmxQueries, 64);
  store_tile(2, turned + 32 * kAmxQueries, 64);
  store_tile(3, turned + 48 * kAmxQueries, 64);
  for (int c = 0; c < kTile; c += 8)
    for (int r = 0; r < kAmxQueries; r += 8) transpose8(turned + c * kAmxQueries + r, kAmxQueries, scores + r * kTile + c, kTile);
  for (int i = 0; i < kAmxQueries * kTile; i += 8) store(scores + i, load(scores + i) * splat(scale));
}

// acc [16 rows][d] += weights [16, kTile] x values.
void weigh_amx(const AmxWork& m, const bf16* weights, float* acc, int d) {
  const int64_t stride = (int64_t)d * 4, half = (int64_t)32 * d;
  load_tile(4, weights, kTile * 2);
  load_tile(5, weights + 32, kTile * 2);
  for (int j = 0; j < d; j += 32) {
    const bf16* v = m.values + (int64_t)j * 32;
    load_tile(0, acc + j, stride);
    load_tile(6, v, 64);
    multiply_tiles(0, 4, 6);
    load_tile(1, acc + j + 16, stride);
    load_tile(7, v + 16 * 32, 64);
    multiply_tiles(1, 4, 7);
    load_tile(6, v + half, 64);
    multiply_tiles(0, 5, 6);
    load_tile(7, v + half + 16 * 32, 64);
    multiply_tiles(1, 5, 7);
    store_tile(0, acc + j, stride);
    store_tile(1, acc + j + 16, stride);
  }
}

// The rows [first, last), all of which see some of the tile's keys, against them.
void attend_tile_amx(const AttentionArgs& a, const AmxWork& m, const View& view, const Tile<bf16>& tile, int first, int last) {
  const int d = a.head_dim, origin = tile.begin / kTile * kTile, column = tile.begin - origin, count = tile.end - tile.begin;
  copy_keys(tile, column, count, d, m.keys);
  pair_values(tile, column, count, d, m.values);
  for (int block = first / kAmxQueries * kAmxQueries; block < last; block += kAmxQueries) {
    alignas(64) bf16 weights[kAmxQueries * kTile];
    float* scores = m.w.scores + (int64_t)block * kTile;
    score_amx(m, m.query + (int64_t)block * d, d, a.scale, scores);
    for (int i = 0; i < kAmxQueries; ++i) {
      const int r = block + i;
      if (r < first || r >= last) {
        memset(weights + i * kTile, 0, kTile * 2);
        continue;
      }
      const int32_t low = greater(view.low(r), tile.begin) - origin, high = smaller(view.high(r), tile.end) - origin;
      const float factor = soften(scores + i * kTile, low, high, a.softcap, m.w.max[r], m.w.sum[r]);
      for (int c = 0; c < kTile; c += 8) store(weights + i * kTile + c, load(scores + i * kTile + c));
      float* acc = m.w.acc + (int64_t)r * d;
      if (factor != 1.0f)
        for (int j = 0; j < d; j += 8) store(acc + j, load(acc + j) * splat(factor));
    }
    weigh_amx(m, weights, m.w.acc + (int64_t)block * d, d);
  }
}

// Asks for the rows of the tile that comes next: the work on this one hides their way here.
void ask_tile(const Tile<bf16>& tile, int d) {
  for (int c = 0; c < tile.end - tile.begin; ++c)
    for (int j = 0; j < d; j += 32) __builtin_prefetch(tile.keys[c] + j, 0, 2), __builtin_prefetch(tile.values[c] + j, 0, 2);
}

template <class IO>
bool attend_item_amx(const AttentionArgs& a, const AttentionItem& it, float* memory) {
  const int d = a.head_dim, group = a.num_heads / a.num_kv_heads;
  const int rows = (it.end_query - it.first_query) * group;
  const int whole = (rows + kAmxQueries - 1) / kAmxQueries * kAmxQueries;
  const Row& row = a.rows[it.row];
  const View view = {row.context_len - row.query_len + it.first_query, group, a.window};
  const AmxWork m = carve_amx(memory, octavo::whole_rows(a.max_rows), d);
  const int32_t token = row.query_start + it.first_query;
  const int32_t begin = greater(view.low(0), it.first_segment * kSegment);
  const int32_t limit = smaller(view.high(rows - 1), it.end_segment * kSegment);
  const int32_t* table = a.table + it.row * a.table_stride;
  pack_queries<IO>(a, token, it.head, group, rows, m.query);
  clear_total(m.w, rows, d);
  clear_segment(m.w, whole, d);
  Tile<bf16> tiles[2];
  int at = 0, first = 0, last = 0;
  if (!locate(a, table, it.head, begin, limit, tiles[0])) return false;
  while (tiles[at].begin < tiles[at].end) {
    const Tile<bf16>& tile = tiles[at];
    Tile<bf16>& next = tiles[1 - at];
    if (!locate(a, table, it.head, tile.end, limit, next)) return false;
    ask_tile(next, d);
    while (first < rows && view.high(first) <= tile.begin) ++first;
    while (last < rows && view.low(last) < tile.end) ++last;
    attend_tile_amx(a, m, view, tile, first, last);
    if (tile.end % kSegment == 0 || tile.end == limit) {
      put_segment(a, it, m.w, tile.begin / kSegment, rows);
      clear_segment(m.w, whole, d);
    }
    at = 1 - at;
  }
  // Rows are in the order of the columns here, not in that of Order<bf16>.
  if (it.slot < 0) store_rows<float, IO>(a, token, it.head, group, rows, m.w);
  return true;
}

template <class IO>
int64_t attend_amx_io(const AttentionArgs& a) {
  int64_t bad = -1;
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    float* memory = a.work + omp_get_thread_num() * a.work_stride;
    TileConfig config;
    for (int t = 0; t < 8; ++t) config.rows[t] = 16, config.bytes[t] = 64;
    load_config(config);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a.num_items; ++i) {
      if (!attend_item_amx<IO>(a, a.items[i], memory)) {
#pragma omp atomic write
        bad = a.items[i].row;
      }
    }
    release_tiles();
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a.num_merges; ++i) merge_item<float, IO>(a, a.merges[i], memory);
  }
  return bad;
}

int64_t attend_amx(const AttentionArgs& a) {
  if (a.halves[0].bits || a.kv_type != DType::bf16 || a.head_dim % 32) return attend(a);
  switch (a.io_type) {
    case DType::bf16: return attend_amx_io<bf16>(a);
    case DType::f16: return attend_amx_io<f16>(a);
    default: return attend_amx_io<float>(a);
  }
}

}  // namespace
