// Attention over bfloat16 blocks on the tiles of AMX, for head sizes that are multiples of 32; attention.h for the rest.
// attention_tiles.h has the arithmetic; here are items, segments and where keys lie. Items hold more rows than those of
// other instruction sets: reading and pairing a segment is then shared by more of them.
//
// Invariant: every row takes this way, decoding rows too, segment by segment from left to right; see attention_tiles.h.
#pragma once

#include "attention.h"
#include "attention_tiles.h"

namespace {

constexpr int32_t kAmxQueryRows = 128;  // of an item

bool on_tiles(const AttentionArgs& a) { return !a.halves[0].bits && a.kv_type == DType::bf16 && a.head_dim % 32 == 0; }

int32_t query_rows_amx(const AttentionArgs& a) { return on_tiles(a) ? kAmxQueryRows : query_rows(a); }

TileWork carve_tiles(float* p, int64_t rows, int64_t d) {
  const int64_t whole = octavo::whole_rows(rows);
  TileWork w;
  const auto take = [&](int64_t floats) {
    float* at = p;
    p += (floats + 15) / 16 * 16;
    return at;
  };
  w.total = take(whole * d), w.total_max = take(whole), w.total_sum = take(whole);
  w.acc = take(kMostRows * d), w.max = take(kMostRows), w.sum = take(kMostRows);
  w.scores = take(kMostRows * kSegment);
  w.weights = (bf16*)take(kMostRows * kSegment / 2), w.query = (bf16*)take(whole * d / 2);
  w.values = (bf16*)take(kSegment * d / 2), w.keys = (bf16*)take(kSegment * d / 2);
  return w;
}

int64_t attention_work_amx(const AttentionArgs& a) {
  if (!on_tiles(a)) return attention_work(a);
  const int64_t rows = octavo::whole_rows(a.max_rows), d = a.head_dim;
  return rows * (d + d / 2 + 2) + kMostRows * (d + kSegment + kSegment / 2 + 2) + kSegment * d + 16 * 11;
}

// The part [begin, end) of a segment that an item reads.
struct Segment {
  int32_t origin, begin, end;
  const bf16* keys[kRuns];       // runs of 16 keys, at absolute multiples; those outside repeat one inside
  const bf16* values[kSegment];  // of each key that exists
  bool paired;                   // values are in `TileWork::values`
};

// False when the table names a block outside the pool.
bool place_segment(const AttentionArgs& a, const int32_t* table, int32_t head, const TileWork& w, Segment& s) {
  const bf16* base = (const bf16*)a.kv + head * a.head_stride;
  const int d = a.head_dim;
  const bf16* at[kSegment];
  for (int32_t k = s.begin; k < s.end;) {
    const int32_t logical = k / a.block_size, stop = smaller(s.end, (logical + 1) * a.block_size);
    const int32_t block = table[logical];
    if (block < 0 || block >= a.num_blocks) return false;
    const bf16* from = base + block * a.block_stride + (int64_t)(k - logical * a.block_size) * d;
    for (; k < stop; ++k, from += d) at[k - s.origin] = from, s.values[k - s.origin] = from + a.value_offset;
  }
  const int low = s.begin - s.origin, high = s.end - s.origin;
  for (int run = low / kRunKeys; run * kRunKeys < high; ++run) {
    const int from = greater(low, run * kRunKeys), to = smaller(high, run * kRunKeys + kRunKeys);
    if (a.block_size % kRunKeys == 0) {  // what lies around the keys that exist is in the same block
      s.keys[run] = at[from] - (int64_t)(from - run * kRunKeys) * d;
      continue;
    }
    bf16* copy = w.keys + (int64_t)run * kRunKeys * d;
    for (int k = run * kRunKeys; k < run * kRunKeys + kRunKeys; ++k)
      memcpy(copy + (int64_t)(k - run * kRunKeys) * d, at[k < from ? from : k < to ? k : to - 1], (size_t)d * 2);
    s.keys[run] = copy;
  }
  const int first = low / kRunKeys, last = (high - 1) / kRunKeys;
  for (int run = 0; run < kRuns; ++run)
    if (run < first || run > last) s.keys[run] = s.keys[run < first ? first : last];
  return true;
}

// Its values in pairs, zeros around those that exist: what is multiplied by zero must be finite. (For few rows too, in one
// go: pairs of 32 columns at a time would stay in the first-level cache, but values read in such pieces come slower.)
void pair_segment(const TileWork& w, const Segment& s, int d) {
  const int low = s.begin - s.origin, high = s.end - s.origin;
  const auto value = [&](int k) { return k >= low && k < high ? s.values[k] : nullptr; };
  for (int k = low / kStepKeys * kStepKeys; k < (high + kStepKeys - 1) / kStepKeys * kStepKeys; k += 2) {
    pair_values(value(k), value(k + 1), d,
                w.values + (int64_t)(k / kStepKeys) * d / 16 * kTileNumbers + k % kStepKeys / 2 * kStepKeys);
  }
}

// The keys or values (`offset` numbers behind the keys) of [key, end), to be asked for.
Asker asker_of(const AttentionArgs& a, int32_t row, int32_t head, int64_t offset, int32_t key, int32_t end) {
  Asker s;
  s.base = (const bf16*)a.kv + head * a.head_stride + offset, s.table = a.table + row * a.table_stride;
  s.block_stride = a.block_stride, s.num_blocks = a.num_blocks, s.block_size = a.block_size, s.head_dim = a.head_dim;
  s.key = key, s.end = end;
  return s;
}

// The keys that an item reads in its first segment.
Asker first_keys(const AttentionArgs& a, const AttentionItem& it) {
  const ItemRange range = range_of(a, it);
  return asker_of(a, it.row, it.head, 0, range.begin, smaller(range.limit, (range.begin / kSegment + 1) * kSegment));
}

// (max, sum, acc) of a segment joined to the total before it: `join` in wide vectors.
void join_wide(float* max, float* sum_, float* total, float max2, float sum2, const float* acc, int d) {
  if (max2 == kMinusInf) return;
  if (*max == kMinusInf) {
    *max = max2, *sum_ = sum2;
    memcpy(total, acc, (size_t)d * sizeof(float));
    return;
  }
  const float top = *max > max2 ? *max : max2;
  const float before = *max == top ? 1.0f : exp_down(splat(*max - top))[0];
  const float now = max2 == top ? 1.0f : exp_down(splat(max2 - top))[0];
  for (int j = 0; j < d; j += 16)
    store_wide(total + j, fma(load_wide(acc + j), splat_wide(now), load_wide(total + j) * splat_wide(before)));
  *sum_ = fma(splat(sum2), splat(now), splat(*sum_ * before))[0];
  *max = top;
}

// Rows [first, first + count), up to 32, of an item against a segment: sums in `w`. False: none of them sees any of it.
// keys: what is needed after it.
bool attend_rows(const AttentionArgs& a, const AttentionItem& it, const TileWork& w, const View& view, Segment& s,
                 Asker& keys, int first, int count) {
  const int d = a.head_dim;
  const int32_t seen = greater(view.low(first), s.begin), until = smaller(view.high(first + count - 1), s.end);
  if (seen >= until) return false;
  const int from = (seen - s.origin) / kStepKeys, to = (until - s.origin + kStepKeys - 1) / kStepKeys;
  const bf16* query = w.query + (int64_t)first * d;
  // Few rows wait for memory: while scores are computed, values are on their way, and then the keys that come next.
  Asker values = s.paired ? Asker() : asker_of(a, it.row, it.head, a.value_offset, s.begin, s.end);
  for (int step = from; step < to; ++step) {
    for (int t = 0; t * kTileRows < count; ++t)
      score_tile(query + (int64_t)t * kTileRows * d, s.keys[2 * step], s.keys[2 * step + 1], d, values,
                 w.scores + t * kTileRows * kSegment + step * kStepKeys);
  }
  for (int r = 0; r < count; ++r) {
    const int low = greater(view.low(first + r), s.begin) - s.origin;
    const int high = smaller(view.high(first + r), s.end) - s.origin;
    bf16* weights = w.weights + r / kTileRows * kSteps * kTileNumbers + r % kTileRows * kStepKeys;
    soften_row(a, w.scores + r * kSegment, low, high, from, to, weights, w.max[r], w.sum[r]);
  }
  if (!s.paired) pair_segment(w, s, d), s.paired = true;
  // Rows of a tile that do not exist: their sums are not read, whatever they are.
  for (int t = 0; t * kTileRows < count; ++t) weigh_tile(w, t, d, from, to, keys);
  return true;
}

// What `attend_rows` left, to the rows' totals, or to where a split item keeps its segments, `states` [rows][d + 2].
void put_rows(const TileWork& w, int first, int count, int d, float* states) {
  for (int r = 0; r < count; ++r) {
    const float* acc = w.acc + (int64_t)r * d;
    const int row = first + r;
    if (states) {
      float* state = states + (int64_t)row * (d + 2);
      state[0] = w.max[r], state[1] = w.sum[r];
      memcpy(state + 2, acc, (size_t)d * sizeof(float));
    } else {
      join_wide(w.total_max + row, w.total_sum + row, w.total + (int64_t)row * d, w.max[r], w.sum[r], acc, d);
    }
  }
}

void put_nothing(int first, int count, int d, float* states) {
  for (float* state = states + (int64_t)first * (d + 2); count > 0; --count, state += d + 2) {
    memset(state, 0, (size_t)(d + 2) * sizeof(float));
    state[0] = kMinusInf;
  }
}

// Totals need no zeros: the first segment that a row sees is copied to them.
void start_totals(const TileWork& w, int rows) {
  for (int r = 0; r < rows; ++r) w.total_max[r] = kMinusInf, w.total_sum[r] = 0;
}

// Weighted values of rows [first, first + count) of an item, [count][d], by what their weights sum up to. A row whose
// scores are all minus infinity has none: NaN, as 0 / 0.
template <class IO>
void finish_tiles(const AttentionArgs& a, int32_t token, int32_t head, int group, int first, int count, const float* values,
                  const float* max, const float* sums) {
  const int d = a.head_dim;
  for (int r = 0; r < count; ++r) {
    const int row = first + r;
    IO* to = (IO*)a.out + ((int64_t)(token + row / group) * a.num_heads + head * group + row % group) * d;
    if (max[r] == kMinusInf)
      for (int j = 0; j < d; j += 8) store(to + j, splat(__builtin_nanf("")));
    else
      store_columns(values + (int64_t)r * d, d, 1.0f / sums[r], to);
  }
}

// next: the item that this thread gets next, as far as one can tell; or null.
template <class IO>
bool attend_item_amx(const AttentionArgs& a, const AttentionItem& it, const AttentionItem* next, float* memory) {
  const auto [view, rows, begin, limit] = range_of(a, it);
  const int d = a.head_dim, group = view.group;
  const TileWork w = carve_tiles(memory, a.max_rows, d);
  const int32_t token = a.rows[it.row].query_start + it.first_query;
  const auto query_of = [&](int r) {
    return (const IO*)a.query + (token + r / group) * a.query_stride + (int64_t)(it.head * group + r % group) * d;
  };
  pack_queries<IO>(rows, d, w.query, query_of);
  start_totals(w, rows);
  const bool single = it.slot < 0 && begin / kSegment == (limit - 1) / kSegment;
  for (int32_t segment = begin / kSegment; segment * kSegment < limit; ++segment) {
    Segment s;
    s.origin = segment * kSegment, s.begin = greater(begin, s.origin), s.end = smaller(limit, s.origin + kSegment);
    s.paired = false;
    if (!place_segment(a, a.table + it.row * a.table_stride, it.head, w, s)) return false;
    Asker keys = s.end < limit ? asker_of(a, it.row, it.head, 0, s.end, smaller(limit, s.end + kSegment))
                 : next        ? first_keys(a, *next)
                               : Asker();
    float* states = it.slot < 0 ? nullptr : a.scratch + (it.slot + (int64_t)(segment - it.first_segment) * rows) * (d + 2);
    for (int first = 0; first < rows; first += kMostRows) {
      const int count = smaller(kMostRows, rows - first);
      const bool seen = attend_rows(a, it, w, view, s, keys, first, count);
      if (seen && single)
        finish_tiles<IO>(a, token, it.head, group, first, count, w.acc, w.max, w.sum);
      else if (seen)
        put_rows(w, first, count, d, states);
      else if (states)
        put_nothing(first, count, d, states);
    }
  }
  if (it.slot < 0 && !single)
    finish_tiles<IO>(a, token, it.head, group, 0, rows, w.total, w.total_max, w.total_sum);
  return true;
}

template <class IO>
void merge_item_amx(const AttentionArgs& a, const Merge& m, float* memory) {
  const int d = a.head_dim, group = a.num_heads / a.num_kv_heads, rows = (m.end_query - m.first_query) * group;
  const TileWork w = carve_tiles(memory, a.max_rows, d);
  start_totals(w, rows);
  for (int32_t s = 0; s < m.segments; ++s) {
    for (int r = 0; r < rows; ++r) {
      const float* state = a.scratch + (m.slot + (int64_t)s * rows + r) * (d + 2);
      join_wide(w.total_max + r, w.total_sum + r, w.total + (int64_t)r * d, state[0], state[1], state + 2, d);
    }
  }
  finish_tiles<IO>(a, a.rows[m.row].query_start + m.first_query, m.head, group, 0, rows, w.total, w.total_max,
                   w.total_sum);
}

template <class IO>
int64_t attend_amx_io(const AttentionArgs& a) {
  int64_t bad = -1;
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    float* memory = a.work + omp_get_thread_num() * a.work_stride;
    {
      const TileScope scope;
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < a.num_items; ++i) {
        const AttentionItem* next = i + a.threads < a.num_items ? a.items + i + a.threads : nullptr;
        if (!attend_item_amx<IO>(a, a.items[i], next, memory)) {
#pragma omp atomic write
          bad = a.items[i].row;
        }
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a.num_merges; ++i) merge_item_amx<IO>(a, a.merges[i], memory);
  }
  return bad;
}

int64_t attend_amx(const AttentionArgs& a) {
  if (!on_tiles(a)) return attend(a);
  switch (a.io_type) {
    case DType::bf16: return attend_amx_io<bf16>(a);
    case DType::f16: return attend_amx_io<f16>(a);
    default: return attend_amx_io<float>(a);
  }
}

}  // namespace
