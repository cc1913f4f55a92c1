// Quantised rows of keys and values: widened to 16-bit integers on their way into registers, and encoded from floats.
// The formats: octavo/core/kv_format.py; the rules of encoding: octavo/kernels/quantized_kv.py. It knows no blocks.
//
// Invariant: everything here is exact in integers, or takes the same float operations on every instruction set; so a
// row's bytes and its integers are the same everywhere.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using octavo::groups_of;
using octavo::kMostQuantizedDim;

typedef int16_t words __attribute__((vector_size(32)));

constexpr int kGroup = 32;  // numbers of an int4 row that share a multiplier
constexpr int kMostGroups = kMostQuantizedDim / kGroup;

OCTAVO_INLINE words load_words(const int16_t* p) {
  words v;
  memcpy(&v, p, sizeof v);
  return v;
}
OCTAVO_INLINE void keep(words& v) {  // as for floats
#if defined(__AVX2__)
  __asm__("" : "+x"(v));
#else
  (void)v;
#endif
}
OCTAVO_INLINE void keep(i8& v) {  // left alone, compilers gather the sums of an unrolled loop and run out of registers
#if defined(__AVX2__)
  __asm__("" : "+x"(v));
#else
  (void)v;
#endif
}
OCTAVO_INLINE void store_words(int16_t* p, words v) { memcpy(p, &v, sizeof v); }
OCTAVO_INLINE void store_words8(int16_t* p, i8 v) {  // numbers that fit 16 bits
#if defined(__AVX2__)
  const __m256i packed = _mm256_packs_epi32((__m256i)v, (__m256i)v);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  for (int i = 0; i < 8; ++i) p[i] = (int16_t)v[i];
#endif
}

OCTAVO_INLINE void store_words16(int16_t* p, i8 first, i8 second) {
#if defined(__AVX2__)
  const __m256i packed = _mm256_packs_epi32((__m256i)first, (__m256i)second);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xD8));
#else
  store_words8(p, first), store_words8(p + 8, second);
#endif
}

// Two 16-bit numbers, over and over.
OCTAVO_INLINE words splat_pair(const int16_t* p) {
  int32_t both;
  memcpy(&both, p, sizeof both);
  return (words)splat_int(both);
}

// Lane i: sum + a[2i] * b[2i] + a[2i + 1] * b[2i + 1].
OCTAVO_INLINE i8 add_pairs(i8 sum, words a, words b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return (i8)_mm256_dpwssd_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  return sum + (i8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  for (int i = 0; i < 8; ++i) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return sum;
#endif
}

OCTAVO_INLINE f8 to_float(i8 v) {
#if defined(__AVX2__)
  return (f8)_mm256_cvtepi32_ps((__m256i)v);
#else
  return __builtin_convertvector(v, f8);
#endif
}

// Lane i: the sum of the lanes of v[i], as floats. Small: the sums fit 32 bits, so that they are taken before that.
template <bool Small>
OCTAVO_INLINE f8 total8(const i8* v) {
  if (!Small) {
    f8 lanes[8];
    for (int i = 0; i < 8; ++i) lanes[i] = to_float(v[i]);
    return sum8(lanes);
  }
#if defined(__AVX2__)
  __m256i t[4], u[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i a = (__m256i)v[2 * i], b = (__m256i)v[2 * i + 1];
    t[i] = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256i a = t[2 * i], b = t[2 * i + 1];
    u[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  }
  const __m256i low = _mm256_permute2x128_si256(u[0], u[1], 0x20), high = _mm256_permute2x128_si256(u[0], u[1], 0x31);
  return to_float((i8)_mm256_add_epi32(low, high));
#else
  i8 totals = splat_int(0);
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) totals[i] += v[i][j];
  return to_float(totals);
#endif
}

// Numbers of a and b side by side. low: columns 0-3 and 8-11, high: 4-7 and 12-15; `in_order` puts their sums right.
OCTAVO_INLINE void interleave(words a, words b, words& low, words& high) {
#if defined(__AVX2__)
  low = (words)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
  high = (words)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
#else
  for (int i = 0; i < 8; ++i) {
    const int column = i % 4 + i / 4 * 8;
    low[2 * i] = a[column], low[2 * i + 1] = b[column];
    high[2 * i] = a[column + 4], high[2 * i + 1] = b[column + 4];
  }
#endif
}
OCTAVO_INLINE void in_order(i8 low, i8 high, i8& first, i8& second) {
#if defined(__AVX2__)
  first = (i8)_mm256_permute2x128_si256((__m256i)low, (__m256i)high, 0x20);
  second = (i8)_mm256_permute2x128_si256((__m256i)low, (__m256i)high, 0x31);
#else
  for (int i = 0; i < 4; ++i) first[i] = low[i], first[4 + i] = high[i], second[i] = low[4 + i], second[4 + i] = high[4 + i];
#endif
}

// ---- Formats: how 16 numbers become 16-bit integers -----------------------------------------------------------------
// kSmall: a row of kMostQuantizedDim of them times as many 16-bit numbers fits 32 bits.

struct Int8 {
  static constexpr bool kSmall = true;
  OCTAVO_INLINE static words load(const char* data, const int32_t*, int j) {
#if defined(__AVX2__)
    return (words)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(data + j)));
#else
    words v;
    for (int i = 0; i < 16; ++i) v[i] = (int8_t)data[j + i];
    return v;
#endif
  }
};

// Numbers i, i + 8, i + 16, i + 24 of a group are the four quarters of 16-bit word i. A quarter moved to the top of its
// word is the number times 4096, sign included; times 16 multipliers, the high half of the product is number * multiplier.
struct Int4 {
  static constexpr bool kSmall = false;
  OCTAVO_INLINE static words load(const char* data, const int32_t* multipliers, int j) {
    const int half = j & 16;
#if defined(__AVX2__)
    alignas(32) static constexpr int16_t up[2][16] = {
        {4096, 4096, 4096, 4096, 4096, 4096, 4096, 4096, 256, 256, 256, 256, 256, 256, 256, 256},
        {16, 16, 16, 16, 16, 16, 16, 16, 1, 1, 1, 1, 1, 1, 1, 1}};
    const __m256i group = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(data + j / 32 * 16)));
    const __m256i moved = _mm256_mullo_epi16(group, _mm256_load_si256((const __m256i*)up[half / 16]));
    const __m256i top = _mm256_and_si256(moved, _mm256_set1_epi16((int16_t)0xF000));
    return (words)_mm256_mulhi_epi16(top, _mm256_set1_epi32(multipliers[j / 32]));
#else
    words v;
    const int multiplier = (int16_t)multipliers[j / 32] / 16;
    for (int i = 0; i < 16; ++i) {
      const int byte = (uint8_t)data[j / 32 * 16 + i % 8 * 2 + half / 16];
      const int number = i < 8 ? byte & 15 : byte >> 4;
      v[i] = (int16_t)(((number ^ 8) - 8) * multiplier);
    }
    return v;
#endif
  }
};

template <bool Small>
struct Wide {  // widened before; lies in the caches
  static constexpr bool kSmall = Small;
  OCTAVO_INLINE static words load(const char* data, const int32_t*, int j) {
    return load_words((const int16_t*)data + j);
  }
};

// Rows of one tile, wherever they lie. multipliers: [rows, groups].
template <class T>
struct Rows {
  const char* const* data;
  const int32_t* multipliers;
  int32_t groups;
  OCTAVO_INLINE words load(int c, int j) const { return T::load(data[c], multipliers + c * groups, j); }
  OCTAVO_INLINE Rows from(int c) const { return {data + c, multipliers + c * groups, groups}; }
  // Rows c, c + 1, … up to `count`, then the last one again: n in all, in memory of the caller's.
  Rows repeat_last(int c, int count, int n, const char** to, int32_t* many) const {
    for (int i = 0; i < n; ++i) {
      const int row = c + i < count ? c + i : count - 1;
      to[i] = data[row];
      for (int g = 0; g < groups; ++g) many[i * groups + g] = multipliers[row * groups + g];
    }
    return {to, groups ? many : multipliers, groups};
  }
};

// Rows that will be read next, of numbers of 8 or 4 bits, to ask for meanwhile.
struct Ahead {
  const char* const* rows;
  int bits;
  // The line that holds number j of row c, once per line.
  OCTAVO_INLINE void ask(int c, int j) const {
    if ((j & (line() - 1)) == 0) want(c, j);
  }
  // For loops that pass all rows of a tile for a few columns at a time: each pass over some of a line's columns asks for
  // the lines of as large a share of the rows. Called for every eighth row c, before columns [j, j + columns).
  OCTAVO_INLINE void ask_share(int c, int j, int columns) const {
    const int first = (j & (line() - 1)) * octavo::kQuantizedTile / line(), each = 8 * columns / line();
    for (int i = 0; i < each; ++i) want(first + c / 8 * each + i, j);
  }
  OCTAVO_INLINE Ahead from(int c) const { return {rows ? rows + c : rows, bits}; }

 private:
  OCTAVO_INLINE int line() const { return 512 / bits; }
  OCTAVO_INLINE void want(int c, int j) const { __builtin_prefetch(rows[c] + j * bits / 8, 0, 2); }
};

// Multipliers as `Int4::load` wants them: times 16, twice in a 32-bit word.
OCTAVO_INLINE void spread_multipliers(const char* from, int32_t count, int32_t* to) {
  for (int32_t i = 0; i < count; ++i) to[i] = (int32_t)(((uint32_t)((int8_t)from[i] * 16) & 0xFFFFu) * 0x10001u);
}

// ---- Encoding -------------------------------------------------------------------------------------------------------

constexpr float kSmallestScale = 0x1p-120f;
constexpr uint16_t kNotANumber = 0x7FC0;

OCTAVO_INLINE float round_even(float x) { return round_small(splat(x))[0]; }

// The scale as stored: bfloat16, rounded up. False: not finite.
bool scale_of(float ideal, char* to, float& scale) {
  uint32_t bits = 0;
  if (!(ideal < __builtin_inff())) {
    memcpy(to, &kNotANumber, 2);
    return false;
  }
  if (ideal >= kSmallestScale) {
    memcpy(&bits, &ideal, 4);
    bits = (bits + 0xFFFF) & 0xFFFF0000u;
  }
  memcpy(&scale, &bits, 4);
  const uint16_t half = (uint16_t)(bits >> 16);
  memcpy(to, &half, 2);
  return true;
}

// Largest magnitude of a row; NaN if a number is NaN.
float magnitude(const float* x, int d) {
  f8 top = splat(0), bad = splat(0);
  for (int j = 0; j < d; j += 8) {
    const f8 v = load(x + j);
    top = larger(as_float(as_int(v) & splat_int(0x7FFFFFFF)), top);
    bad = bad + v * splat(0);
  }
  return largest(top) + sum(bad);
}

void encode_int8(const float* x, int d, char* data, char* scale_at) {
  float scale;
  if (!scale_of(magnitude(x, d) / 127.0f, scale_at, scale)) {
    memset(data, 0, (size_t)d);
    return;
  }
  const f8 inverse = splat(scale == 0 ? 0.0f : 1.0f / scale);
  for (int j = 0; j < d; j += 8) {
    const i8 q = to_int(round_small(load(x + j) * inverse));
    for (int i = 0; i < 8; ++i) data[j + i] = (char)(q[i] > 127 ? 127 : q[i] < -127 ? -127 : q[i]);
  }
}

// The number of a group that becomes -8, over -8.
float extreme(const float* x) {
  f8 low = load(x), high = low;
  for (int j = 8; j < kGroup; j += 8) {
    low = splat(0) - larger(splat(0) - low, splat(0) - load(x + j));
    high = larger(high, load(x + j));
  }
  const float least = -largest(splat(0) - low), most = largest(high);
  return (-least > most ? least : most) / -8.0f;
}

void encode_int4(const float* x, int d, char* data, char* scale_at, char* multipliers) {
  float extremes[kMostGroups], scale, top = 0;
  const int groups = d / kGroup;
  for (int g = 0; g < groups; ++g) {
    extremes[g] = extreme(x + g * kGroup);
    const float size = extremes[g] < 0 ? -extremes[g] : extremes[g];
    top = size > top ? size : top;
  }
  const float all = magnitude(x, d);
  if (!scale_of(all < __builtin_inff() ? top / 127.0f : all, scale_at, scale) || scale == 0) {
    memset(data, 0, (size_t)d / 2);
    memset(multipliers, 0, (size_t)groups);
    return;
  }
  const float inverse = 1.0f / scale;
  for (int g = 0; g < groups; ++g) {
    float m = round_even(extremes[g] * inverse);
    if (m == 0) m = extremes[g] < 0 ? -1.0f : extremes[g] > 0 ? 1.0f : 0.0f;
    m = m > 127 ? 127 : m < -127 ? -127 : m;
    multipliers[g] = (char)(int8_t)m;
    const f8 step = splat(m == 0 ? 0.0f : 1.0f / (m * scale));
    i8 q[4];
    for (int k = 0; k < 4; ++k) {
      const f8 v = round_small(load(x + g * kGroup + 8 * k) * step);
      q[k] = to_int(select(v > splat(7), splat(7), select(v < splat(-8), splat(-8), v)));
    }
    for (int i = 0; i < 8; ++i) {
      data[g * 16 + 2 * i] = (char)((q[0][i] & 15) | (q[1][i] & 15) << 4);
      data[g * 16 + 2 * i + 1] = (char)((q[2][i] & 15) | (q[3][i] & 15) << 4);
    }
  }
}

}  // namespace
