// The tile instructions of AMX, or the same in plain C++ (OCTAVO_EMULATE) where a processor has none: so that kernels
// written for them run in tests anywhere. Eight tiles, each up to 16 rows of 64 bytes.
#pragma once

#include "elementwise.h"
#include "register_tile.h"
#include "simd.h"

#include <cstdint>
#include <cstring>

#if !defined(OCTAVO_EMULATE)
#include <immintrin.h>
#else
#include <math.h>
#endif

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
};

#if defined(OCTAVO_EMULATE)

struct EmulatedTile {
  int rows = 0, bytes = 0;
  uint8_t data[16][64];
};
thread_local EmulatedTile tiles[8];

inline void load_config(const TileConfig& c) {
  for (int t = 0; t < 8; ++t) {
    tiles[t].rows = c.palette == 1 && c.rows[t] <= 16 ? c.rows[t] : 0;
    tiles[t].bytes = c.bytes[t] <= 64 ? c.bytes[t] : 0;
    memset(tiles[t].data, 0xA5, sizeof tiles[t].data);
  }
}
inline void release_tiles() {
  for (EmulatedTile& t : tiles) t.rows = t.bytes = 0;
}
inline void zero_tile(int t) { memset(tiles[t].data, 0, sizeof tiles[t].data); }
inline void load_tile(int t, const void* from, int64_t stride) {
  for (int r = 0; r < tiles[t].rows; ++r) memcpy(tiles[t].data[r], (const char*)from + r * stride, tiles[t].bytes);
}
inline void stream_tile(int t, const void* from, int64_t stride) { load_tile(t, from, stride); }
inline void store_tile(int t, void* to, int64_t stride) {
  for (int r = 0; r < tiles[t].rows; ++r) memcpy((char*)to + r * stride, tiles[t].data[r], tiles[t].bytes);
}
inline float emulated_bf16(const uint8_t* p) {
  uint16_t half;
  memcpy(&half, p, 2);
  const uint32_t bits = (uint32_t)half << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
// Even and odd inputs in two chains of fused multiply-adds from zero; their sum is added to the tile (Intel's manual).
inline void multiply_tiles(int c, int a, int b) {
  for (int m = 0; m < tiles[c].rows; ++m) {
    for (int n = 0; n < tiles[c].bytes / 4; ++n) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < tiles[a].bytes / 4; ++k) {
        even = fmaf(emulated_bf16(tiles[a].data[m] + 4 * k), emulated_bf16(tiles[b].data[k] + 4 * n), even);
        odd = fmaf(emulated_bf16(tiles[a].data[m] + 4 * k + 2), emulated_bf16(tiles[b].data[k] + 4 * n + 2), odd);
      }
      memcpy(&sum, tiles[c].data[m] + 4 * n, 4);
      sum += even + odd;
      memcpy(tiles[c].data[m] + 4 * n, &sum, 4);
    }
  }
}

// Fours of bytes: In's of a, signed ones of b.
template <class In>
inline void multiply_bytes(int c, int a, int b) {
  for (int m = 0; m < tiles[c].rows; ++m) {
    for (int n = 0; n < tiles[c].bytes / 4; ++n) {
      int32_t sum;
      memcpy(&sum, tiles[c].data[m] + 4 * n, 4);
      for (int k = 0; k < tiles[a].bytes; ++k) sum += (In)tiles[a].data[m][k] * (int8_t)tiles[b].data[k / 4][4 * n + k % 4];
      memcpy(tiles[c].data[m] + 4 * n, &sum, 4);
    }
  }
}
inline void multiply_byte_tiles(int c, int a, int b) { multiply_bytes<int8_t>(c, a, b); }
inline void multiply_unsigned_tiles(int c, int a, int b) { multiply_bytes<uint8_t>(c, a, b); }

#else

inline void load_config(const TileConfig& c) {
  // Some compilers (GCC 12) believe that the instruction reads eight bytes only, and drop the stores of the others.
  __asm__ volatile("" : : "r"(&c), "m"(c) : "memory");
  _tile_loadconfig(&c);
}
inline void release_tiles() { _tile_release(); }
// Tile numbers are part of the instruction: macros, so that they stay constants without optimisation too.
#define zero_tile(t) _tile_zero(t)
#define load_tile(t, from, stride) _tile_loadd(t, from, stride)
#define stream_tile(t, from, stride) _tile_stream_loadd(t, from, stride)
#define store_tile(t, to, stride) _tile_stored(t, to, stride)
#define multiply_tiles(c, a, b) _tile_dpbf16ps(c, a, b)
#define multiply_byte_tiles(c, a, b) _tile_dpbssd(c, a, b)
#define multiply_unsigned_tiles(c, a, b) _tile_dpbusd(c, a, b)

#endif

constexpr int64_t kTileNumbers = 16 * 32;  // of bfloat16 in a tile: one KiB

// A thread's tiles, for as long as it works: all of them 16 rows of 64 bytes.
struct TileScope {
  TileScope() {
    TileConfig config;
    for (int t = 0; t < 8; ++t) config.rows[t] = 16, config.bytes[t] = 64;
    load_config(config);
  }
  ~TileScope() { release_tiles(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// 32 numbers of any type, rounded to bfloat16.
OCTAVO_INLINE void round32(const float* from, bf16* to) { store_pair(to, load_wide(from), load_wide(from + 16)); }
OCTAVO_INLINE void round32(const bf16* from, bf16* to) { memcpy(to, from, 64); }
OCTAVO_INLINE void round32(const f16* from, bf16* to) {
  for (int i = 0; i < 32; i += 8) store(to + i, load(from + i));
}

OCTAVO_INLINE void round16(vec from, bf16* to) {
#if !defined(__AVX512BF16__)
  store(to, low_half(&from)), store(to + 8, high_half(&from));
#else
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)from);
  memcpy(to, &rounded, sizeof rounded);
#endif
}

}  // namespace
