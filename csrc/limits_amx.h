// The arithmetic limit of AMX for bfloat16: products of tiles that stay in registers. limits.h for the rest.
#pragma once

#include "amx.h"
#include "limits.h"

namespace {

int64_t multiply_adds_amx(DType type, int64_t rounds, float* result) {
  if (type != DType::bf16) return multiply_adds(type, rounds, result);
  const TileScope scope;
  // Numbers near one: a processor that saves power multiplies zeros a fifth faster than weights.
  alignas(64) uint16_t numbers[kTileNumbers];
  for (int i = 0; i < kTileNumbers; ++i) numbers[i] = (uint16_t)(0x3F00 + i * 37 % 256 + (*result > 0));
  alignas(64) float sums[16 * 16];
  load_tile(4, numbers, 64);
  load_tile(5, numbers, 64);
  load_tile(6, numbers, 64);
  load_tile(7, numbers, 64);
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
