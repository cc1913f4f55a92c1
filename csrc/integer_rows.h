// Rows of x as 16-bit integers for products with codes of eight bits. Included by linear_words.h.
//
// The inputs of a row are rounded, a span of 256 at a time, to integers of a step of their own (largest / 32767). Sums
// of a span's products with codes of eight bits fit 32 bits, so they are exact, with twice the products per instruction
// that floats have. The rounding is of the order of 3e-5 of an output: far below that of the codes, which bytes
// (byte_rows.h) would not be, and the products of two bytes of eight bits do not fit 16.
//
// Knows nothing of panels but how many units share a scale (`fold`).
#pragma once

#include "kernels.h"
#include "linear.h"

namespace {

using octavo::kUnit;

constexpr int64_t kSpanUnits = 8, kSpan = kSpanUnits * kUnit;  // 256 * 128 * 32767 < 2^31

// codes [spans][rows][kSpan]: the rows of a tile lie together, whatever k is (rows a power of two apart would share
// cache sets); steps [rows][spans]; sums of the codes of a fold [rows][folds].
struct IntegerRows {
  int16_t* codes;
  float *steps, *sums;
  int64_t rows, units, spans, fold, folds;  // fold: units whose products are one sum of integers, a divisor of a span

  const int16_t* at(int64_t row, int64_t span) const { return codes + (span * rows + row) * kSpan; }
};

// How many units are summed as integers: those of a group, as far as they lie in one span.
OCTAVO_INLINE int64_t fold_of(int64_t group_units, int64_t units) {
  if (group_units >= units) return kSpanUnits;
  int64_t fold = kSpanUnits;
  while (group_units % fold) fold /= 2;
  return fold;
}

// Thirty-two integers of 16 bits to `to`; returns their sum.
OCTAVO_INLINE int32_t put_unit_codes(const float* x, float inverse, int16_t* to) {
  i8 q[kUnit / 8], total = splat_int(0);
  for (int i = 0; i < kUnit / 8; ++i) {
    q[i] = to_int(round_small(load(x + 8 * i) * splat(inverse)));
    total += q[i];
  }
#if defined(__AVX2__)
  for (int i = 0; i < kUnit / 16; ++i) {
    const __m256i both = _mm256_packs_epi32((__m256i)q[2 * i], (__m256i)q[2 * i + 1]);
    _mm256_storeu_si256((__m256i*)(to + 16 * i), _mm256_permute4x64_epi64(both, 0xD8));
  }
#else
  for (int i = 0; i < kUnit; ++i) to[i] = (int16_t)q[i / 8][i % 8];
#endif
  int32_t sum = 0;
  for (int i = 0; i < 8; ++i) sum += total[i];
  return sum;
}

// `count` units (whole ones) of a row, the span `span` of it.
void integer_span(const float* x, int64_t count, const IntegerRows& to, int64_t row, int64_t span) {
  i8 most = splat_int(0);
  for (int64_t i = 0; i < count * kUnit; i += 8) {
    const i8 size = as_int(load(x + i)) & splat_int(0x7FFFFFFF);  // as integers: a NaN is larger than infinity
    most = (most > size) ? most : size;
  }
  int32_t bits = 0;
  for (int i = 0; i < 8; ++i) bits = most[i] > bits ? most[i] : bits;
  float largest;
  memcpy(&largest, &bits, 4);
  const bool finite = bits < 0x7F800000, some = finite && largest > 1e-30f;
  const int64_t first = span * kSpanUnits;
  int16_t* codes = to.codes + (span * to.rows + row) * kSpan;
  float* sums = to.sums + row * to.folds + first / to.fold;
  to.steps[row * to.spans + span] = some ? largest / 32767.0f : finite ? 0 : __builtin_nanf("");  // NaN: the whole row
  if (!some) memset(codes, 0, (size_t)(count * kUnit) * sizeof *codes);
  for (int64_t u = 0; u < count; u += to.fold) {
    int32_t sum = 0;
    for (int64_t i = u; some && i < least(count, u + to.fold); ++i)
      sum += put_unit_codes(x + i * kUnit, 32767.0f / largest, codes + i * kUnit);
    *sums++ = (float)sum;
  }
}

template <class In>
void integer_row(const In* x, int64_t k, const IntegerRows& to, int64_t row) {
  float part[kSpan];
  for (int64_t s = 0; s < to.spans; ++s) {
    const int64_t from = s * kSpan, count = least(kSpanUnits, to.units - s * kSpanUnits);
    const int64_t inputs = least(count * kUnit, k - from);
    if (inputs == count * kUnit && __is_same(In, float)) {
      integer_span((const float*)x + from, count, to, row, s);
      continue;
    }
    for (int64_t i = 0; i < inputs; ++i) part[i] = widen(x[from + i]);
    for (int64_t i = inputs; i < count * kUnit; ++i) part[i] = 0;
    integer_span(part, count, to, row, s);
  }
}

// The rows of a.x; null: out of memory. Else what is to be freed.
void* integer_rows(const LinearArgs& a, int64_t group_units, IntegerRows& to) {
  to.rows = a.m, to.units = octavo::units_of(a.k);
  to.fold = fold_of(group_units, to.units), to.folds = (to.units + to.fold - 1) / to.fold;
  to.spans = (to.units + kSpanUnits - 1) / kSpanUnits;
  char* memory = (char*)malloc((size_t)(a.m * (to.spans * (kSpan * 2 + 4) + to.folds * 4)) + 64);
  if (!memory) return nullptr;
  to.codes = (int16_t*)(((uintptr_t)memory + 63) / 64 * 64);
  to.steps = (float*)(to.codes + a.m * to.spans * kSpan), to.sums = to.steps + a.m * to.spans;
#pragma omp parallel for schedule(static) if (a.threaded && a.m * a.k > 65536)
  for (int64_t r = 0; r < a.m; ++r) {
    switch (a.x_type) {
      case DType::f32: integer_row((const float*)a.x + r * a.ldx, a.k, to, r); break;
      case DType::bf16: integer_row((const bf16*)a.x + r * a.ldx, a.k, to, r); break;
      case DType::f16: integer_row((const f16*)a.x + r * a.ldx, a.k, to, r); break;
    }
  }
  return memory;
}

}  // namespace
