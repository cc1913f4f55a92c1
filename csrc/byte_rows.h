// Rows of x as 8-bit integers for products with codes of four to six bits. Included by linear_bytes.h.
//
// The inputs of a row are rounded, a unit of 32 at a time, to integers -127 … 127 of a step of their own (largest / 127):
// what other engines do for such weights too. The rounding is of the order of 1/16 of what four bits cost a weight, and
// a product of bytes takes twice the inputs per instruction that one of 16-bit integers takes.
//
// Knows nothing of panels but the middle of the codes, which a row's sums start from. Invariant: integers, steps and sums
// are the same on every instruction set.
#pragma once

#include "integer_lanes.h"
#include "kernels.h"
#include "linear.h"

namespace {

using octavo::kUnit;

constexpr int64_t kUnitsOfRecord = 8, kRecord = kUnitsOfRecord * kUnit;
constexpr int kQuads = kUnit / 4;  // fours of inputs, whose products a lane takes at once

// 256 inputs of a row. starts: minus the middle of the codes times the inputs of a unit, as sums hold them; of half a
// unit and of its other half where those are summed apart.
struct ByteSpan {
  int8_t codes[kRecord];
  float steps[kUnitsOfRecord], sums[kUnitsOfRecord];  // sums: of a unit's integers, times its step
  int32_t starts[2 * kUnitsOfRecord];
};

// spans [spans][rows]: the rows of a tile lie together, whatever k is.
struct ByteRows {
  ByteSpan* memory;
  int64_t rows, units, spans;
  const ByteSpan* at(int64_t row, int64_t span) const { return memory + span * rows + row; }
};

// Largest magnitude of 32 numbers, as bits: infinities and NaNs are the largest of all.
OCTAVO_INLINE int32_t largest_bits(const f8 (&x)[4]) {
  const i8 sign = splat_int(0x7FFFFFFF);
  const i8 a = as_int(x[0]) & sign, b = as_int(x[1]) & sign, c = as_int(x[2]) & sign, d = as_int(x[3]) & sign;
  const i8 low = a > b ? a : b, high = c > d ? c : d, most = low > high ? low : high;
#if defined(__AVX2__)
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)most), _mm256_extracti128_si256((__m256i)most, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
#else
  int32_t bits = 0;
  for (int i = 0; i < 8; ++i) bits = most[i] > bits ? most[i] : bits;
  return bits;
#endif
}

// 32 rounded numbers as bytes, and sums of them.
OCTAVO_INLINE void put_bytes(const i8 (&q)[4], int8_t* to, int32_t (&low)[2], int32_t (&high)[2]) {
#if defined(__AVX2__)
  const __m256i front = _mm256_packs_epi32((__m256i)q[0], (__m256i)q[1]);
  const __m256i back = _mm256_packs_epi32((__m256i)q[2], (__m256i)q[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(front, back), order);
  _mm256_storeu_si256((__m256i*)to, bytes);
  __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
  sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0x4E));
  sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0xB1));
  low[0] = (int16_t)_mm256_extract_epi16(sums, 0), high[0] = (int16_t)_mm256_extract_epi16(sums, 1);
  low[1] = (int16_t)_mm256_extract_epi16(sums, 8), high[1] = (int16_t)_mm256_extract_epi16(sums, 9);
#else
  for (int h = 0; h < 2; ++h) low[h] = high[h] = 0;
  for (int i = 0; i < kUnit; ++i) {
    to[i] = (int8_t)q[i / 8][i % 8];
    (i % 4 < 2 ? low : high)[i / 16] += to[i];
  }
#endif
}

// Unit `u` of a span. middle: of the codes it will meet; halves: whether half units are summed apart.
template <bool Halves>
OCTAVO_INLINE void byte_unit(const float* from, int64_t u, int32_t middle, ByteSpan& to) {
  f8 x[4];
  i8 q[4];
  for (int i = 0; i < 4; ++i) x[i] = load(from + 8 * i);
  const int32_t bits = largest_bits(x);
  float largest;
  memcpy(&largest, &bits, 4);
  const bool finite = bits < 0x7F800000, some = finite && largest > 1e-30f;
  const f8 inverse = splat(some ? 127.0f / largest : 0);
  for (int i = 0; i < 4; ++i) q[i] = some ? to_int(round_small(x[i] * inverse)) : splat_int(0);
  int32_t low[2], high[2];  // of each half: the sums of inputs 4i and 4i + 1, and of the others
  put_bytes(q, to.codes + u * kUnit, low, high);
  const int32_t lows = low[0] + low[1], highs = high[0] + high[1], total = lows + highs;
  to.starts[2 * u] = Halves ? quad_start(-middle * low[0], -middle * high[0]) : quad_start(-middle * lows, -middle * highs);
  to.starts[2 * u + 1] = quad_start(-middle * low[1], -middle * high[1]);
  to.steps[u] = some ? largest / 127.0f : finite ? 0 : __builtin_nanf("");  // NaN: the whole row
  to.sums[u] = to.steps[u] * (float)total;
}

template <bool Halves, class In>
void byte_row(const In* x, int64_t k, int32_t middle, const ByteRows& to, int64_t row) {
  float part[kUnit];
  for (int64_t u = 0; u < to.units; ++u) {
    const int64_t from = u * kUnit, inputs = least(kUnit, k - from);
    ByteSpan& span = to.memory[u / kUnitsOfRecord * to.rows + row];
    if (inputs == kUnit && __is_same(In, float)) {
      byte_unit<Halves>((const float*)x + from, u % kUnitsOfRecord, middle, span);
      continue;
    }
    for (int64_t i = 0; i < kUnit; ++i) part[i] = i < inputs ? widen(x[from + i]) : 0;
    byte_unit<Halves>(part, u % kUnitsOfRecord, middle, span);
  }
}

// The rows of a.x; null: out of memory. Else what is to be freed.
template <bool Halves>
void* byte_rows(const LinearArgs& a, int32_t middle, ByteRows& to) {
  to.rows = a.m, to.units = octavo::units_of(a.k), to.spans = (to.units + kUnitsOfRecord - 1) / kUnitsOfRecord;
  // Matrix tiles of 16 rows read, but do not use, what is behind the last row.
  char* memory = (char*)malloc((size_t)(a.m * to.spans + 15) * sizeof(ByteSpan) + 64);
  if (!memory) return nullptr;
  to.memory = (ByteSpan*)(((uintptr_t)memory + 63) / 64 * 64);
#pragma omp parallel for schedule(static) if (a.threaded && a.m * a.k > 65536)
  for (int64_t r = 0; r < a.m; ++r) {
    switch (a.x_type) {
      case DType::f32: byte_row<Halves>((const float*)a.x + r * a.ldx, a.k, middle, to, r); break;
      case DType::bf16: byte_row<Halves>((const bf16*)a.x + r * a.ldx, a.k, middle, to, r); break;
      case DType::f16: byte_row<Halves>((const f16*)a.x + r * a.ldx, a.k, middle, to, r); break;
    }
  }
  return memory;
}

}  // namespace
