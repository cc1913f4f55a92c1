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
  constexpr int kChains = 8;
  veci chains[kChains];
  for (int c = 0; c < kChains; ++c) chains[c] = splat_lanes(c);
  const veci factor = splat_lanes(0x00030002);
  veci from = splat_lanes((int32_t)*result);
  for (int64_t r = 0; r < rounds; ++r) {
    pin(from);  // so that the product is computed anew
#pragma GCC unroll 8
    for (int c = 0; c < kChains; ++c) {
      veci product = pair_products(from, factor);
      pin(product);
      add_to(chains[c], product);
    }
  }
  for (int c = 1; c < kChains; ++c) chains[0] += chains[c];
  for (int i = 0; i < kLanes; ++i) *result += (float)chains[0][i];
  return rounds * kChains * kLanes * 4;
}

}  // namespace
