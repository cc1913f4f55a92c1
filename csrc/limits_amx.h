// The arithmetic limit of AMX for bfloat16: products of tiles that stay in registers. limits.h for the rest.
#pragma once

#include "amx.h"
#include "limits.h"

namespace {

int64_t multiply_adds_amx(DType type, int64_t rounds, float* result) {
  if (type != DType::bf16) return multiply_adds(type, rounds, result);
  const TileScope scope;
  alignas(64) float sums[16 * 16] = {*result};
  load_tile(4, sums, 64);  // as pairs of bfloat16: zeros, but for the first
  load_tile(5, sums, 64);
  load_tile(6, sums, 64);
  load_tile(7, sums, 64);
  zero_tile(0);
  zero_tile(1);
  zero_tile(2);
  zero_tile(3);
  for (int64_t r = 0; r < rounds; ++r) {
    multiply_tiles(0, 4, 6);
    multiply_tiles(1, 4, 7);
    multiply_tiles(2, 5, 6);
    multiply_tiles(3, 5, 7);
  }
  store_tile(3, sums, 64);
  *result += sums[0];
  return rounds * 4 * 16 * 16 * 32 * 2;
}

}  // namespace
