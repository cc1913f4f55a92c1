// What this processor and its memory can do at most, by the plainest loops: the yardsticks of `octavo bench`. Included by
// each instruction set's file, because the widest loads and multiply-adds differ.
//
// Invariant: a loop does nothing beside what it measures, and nothing of it can be left out by the compiler.
#pragma once

#include "integer_lanes.h"
#include "register_tile.h"

namespace {

// Numbers [from, from + n) read once, in one run of addresses as weights are; their sum, so that they are read. ahead:
// bytes of prefetch, or 0: which is faster depends on the processor and on its neighbours.
float read_once(const float* from, int64_t n, int64_t ahead) {
  constexpr int kSums = 8;
  vec sums[kSums];
  for (vec& sum : sums) sum = splat_wide(0);
  const int64_t whole = n / (kSums * kLanes) * (kSums * kLanes);
  for (int64_t i = 0; i < whole; i += kSums * kLanes) {
    for (int at = 0; ahead && at < kSums * kLanes * 4; at += 64)
      __builtin_prefetch((const char*)(from + i) + ahead + at, 0, 2);
    for (int s = 0; s < kSums; ++s) sums[s] += load_wide(from + i + s * kLanes);
  }
  float total = 0;
  for (int64_t i = whole; i < n; ++i) total += from[i];
  for (int s = 1; s < kSums; ++s) sums[0] += sums[s];
  for (int i = 0; i < kLanes; ++i) total += sums[0][i];
  return total;
}

// Independent chains of multiply-adds in registers, as many as hide their latency; how many operations that was.
int64_t multiply_adds(DType, int64_t rounds, float* result) {
  constexpr int kChains = 12;
  vec chains[kChains];
  for (int c = 0; c < kChains; ++c) chains[c] = splat_wide((float)c);
  const vec factor = splat_wide(0.5f), addend = splat_wide(*result);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chains[c] = fma(chains[c], factor, addend);
  }
  for (int c = 1; c < kChains; ++c) chains[0] += chains[c];
  for (int i = 0; i < kLanes; ++i) *result += chains[0][i];
  return rounds * kChains * kLanes * 2;
}

// The same of products of 16-bit integers, two to a lane, and the additions that fixed-point products need beside them.
int64_t multiply_pairs(int64_t rounds, float* result) {
  constexpr int kRows = 4, kColumns = 2;
  veci sums[kRows][kColumns], rows[kRows], columns[kColumns];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    rows[r] = splat_lanes(r + (int32_t)*result);
#pragma GCC unroll 2
    for (int c = 0; c < kColumns; ++c) sums[r][c] = splat_lanes(0), columns[c] = splat_lanes(c);
  }
  pin(columns[0]), pin(columns[1]);  // or products with them would be known
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      pin(rows[r]);  // so that its products are computed anew
#pragma GCC unroll 2
      for (int c = 0; c < kColumns; ++c) add_to(sums[r][c], pair_products(rows[r], columns[c]));
    }
  }
  veci sum = splat_lanes(0);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) sum += sums[r][0] + sums[r][1];
  for (int i = 0; i < kLanes; ++i) *result += (float)sum[i];
  return rounds * kRows * kColumns * kLanes * 4;
}

}  // namespace
