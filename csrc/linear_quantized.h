// y = x W^T + b over quantised panels. Included by each instruction set's file, after linear.h.
//
// The inputs of a row are rounded, 32 at a time, to 16-bit integers of a step of their own (largest / 32767), so that the
// products of a unit are exact sums of integers, with twice the products per instruction that floats have. The rounding
// is 256 times finer than that of eight-bit activations: about 1e-5 of an output, which keeps greedy text.
//
// Invariant: an output is a chain over units in order, total = fma(factor, step * sum, total) and, where a format has
// offsets, total = fma(-offset, step * sum of inputs, total). Sums of a unit are exact, so no tile, row count or thread
// changes a bit.
#pragma once

#include "linear.h"
#include "quantized_panels.h"

namespace {

// Rows of x as integers. Row r: codes + r * width; steps, sums, shifts + r * units.
struct IntegerRows {
  int16_t* codes;
  float *steps, *sums;  // step of a unit; step * (sum of its codes)
  int32_t* shifts;      // middle * (sum of its codes)
  int64_t units, width;
};

OCTAVO_INLINE veci input_pair(const int16_t* p) {
  int32_t pair;
  memcpy(&pair, p, 4);
#if defined(OCTAVO_WIDE)
  const i8 half = splat_int(pair);
  union {
    i8 half[2];
    veci whole;
  } both = {{half, half}};
  return both.whole;
#else
  return splat_int(pair);
#endif
}

// Per 32-bit lane: a.low * b.low + a.high * b.high of signed 16-bit words.
OCTAVO_INLINE veci pair_products(veci a, veci b) {
#if defined(OCTAVO_WIDE) && defined(__AVX512BW__)
  return (veci)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(OCTAVO_WIDE)
  return (veci)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  union Both {
    veci whole;
    __m256i half[2];
  } x = {a}, y = {b};
  x.half[0] = _mm256_madd_epi16(x.half[0], y.half[0]), x.half[1] = _mm256_madd_epi16(x.half[1], y.half[1]);
  return x.whole;
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// acc + v, in this order: left alone, compilers turn chains of integer sums into trees and run out of registers.
OCTAVO_INLINE void add_to(veci& acc, veci v) {
  acc += v;
#if defined(__AVX512BW__) && defined(OCTAVO_WIDE)
  __asm__("" : "+v"(acc));
#elif defined(__AVX2__) && !defined(OCTAVO_WIDE)
  __asm__("" : "+x"(acc));
#endif
}

OCTAVO_INLINE vec float_of(veci v) {
#if defined(OCTAVO_WIDE) && defined(__AVX512F__)
  return (vec)_mm512_cvtepi32_ps((__m512i)v);
#elif defined(__AVX2__) && !defined(OCTAVO_WIDE)
  return (vec)_mm256_cvtepi32_ps((__m256i)v);
#else
  return __builtin_convertvector(v, vec);
#endif
}

// ---- x ----------------------------------------------------------------------------------------------------------------

OCTAVO_INLINE void integer_unit(const float* x, int middle, const IntegerRows& to, int64_t row, int64_t unit) {
  f8 v[4];
  i8 most = splat_int(0);
  for (int i = 0; i < 4; ++i) {
    v[i] = load(x + 8 * i);
    const i8 size = as_int(v[i]) & splat_int(0x7FFFFFFF);  // as integers: a NaN is larger than infinity
    most = (most > size) ? most : size;
  }
  int32_t bits = 0;
  for (int i = 0; i < 8; ++i) bits = most[i] > bits ? most[i] : bits;
  float largest;
  memcpy(&largest, &bits, 4);
  const bool finite = bits < 0x7F800000;
  const float inverse = finite && largest > 1e-30f ? 32767.0f / largest : 0;
  i8 total = splat_int(0);
  int16_t* codes = to.codes + row * to.width + unit * kUnit;
  for (int i = 0; i < 4; ++i) {
    const i8 q = inverse > 0 ? to_int(round_small(v[i] * splat(inverse))) : splat_int(0);
    total += q;
    for (int j = 0; j < 8; ++j) codes[8 * i + j] = (int16_t)q[j];
  }
  int32_t sum = 0;
  for (int i = 0; i < 8; ++i) sum += total[i];
  // What is not finite makes the whole row NaN.
  const float step = finite ? (inverse > 0 ? largest / 32767.0f : 0) : __builtin_nanf("");
  const int64_t at = row * to.units + unit;
  to.steps[at] = step, to.sums[at] = step * (float)sum, to.shifts[at] = middle * sum;
}

template <class In>
void integer_row(const In* x, int64_t k, int middle, const IntegerRows& to, int64_t row) {
  float part[kUnit];
  for (int64_t u = 0; u < to.units; ++u) {
    const int64_t count = least(kUnit, k - u * kUnit);
    if (count == kUnit && __is_same(In, float)) {
      integer_unit((const float*)x + u * kUnit, middle, to, row, u);
      continue;
    }
    for (int i = 0; i < kUnit; ++i) part[i] = i < count ? widen(x[u * kUnit + i]) : 0;
    integer_unit(part, middle, to, row, u);
  }
}

void integer_rows(const LinearArgs& a, int middle, const IntegerRows& to) {
#pragma omp parallel for schedule(static) if (a.threaded && a.m * a.k > 65536)
  for (int64_t r = 0; r < a.m; ++r) {
    switch (a.x_type) {
      case DType::f32: integer_row((const float*)a.x + r * a.ldx, a.k, middle, to, r); break;
      case DType::bf16: integer_row((const bf16*)a.x + r * a.ldx, a.k, middle, to, r); break;
      case DType::f16: integer_row((const f16*)a.x + r * a.ldx, a.k, middle, to, r); break;
    }
  }
}

// ---- One row: panels go from memory straight into registers -------------------------------------------------------------

template <int Bits>
OCTAVO_INLINE void fetch_unit(const uint8_t* at) {
  for (int b = 0; b < octavo::unit_bytes(Bits); b += 64) __builtin_prefetch(at + b, 0, 3);
}

template <int Bits, Scales S>
constexpr bool kShifts = kMiddle<Bits> != 0 && !kHasOffset<S>;

template <int Bits, Scales S, int P>
OCTAVO_INLINE void pairs_from(const int16_t* x, const uint8_t* unit, veci (&acc)[kParts]) {
  const veci a = input_pair(x + 2 * P);
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v)
    add_to(acc[v], pair_products(a, pair_codes<Bits, S == Scales::k_signed, P>(unit, v)));
  constexpr int kStop = S == Scales::k_signed ? 7 : 15;  // a scale of k_signed serves half a unit
  if constexpr (P != 15 && P != kStop) pairs_from<Bits, S, P + 1>(x, unit, acc);
}

// A panel at a time: then memory is read in one go from front to back, and sums of integers take a cycle each, so two
// chains of them are enough.
template <int Bits, Scales S>
OCTAVO_INLINE void one_row(const LinearArgs& a, const QuantizedFormat& f, const IntegerRows& x, int64_t panel) {
  vec total[kParts];
  for (int v = 0; v < kParts; ++v) total[v] = splat_wide(0);
  const int64_t per = f.group / kUnit;
  const uint8_t* at = (const uint8_t*)a.weight + panel * octavo::panel_bytes(f, a.k);
  for (int64_t first = 0; first < x.units; first += per) {
    const uint8_t* header = at;
    at += octavo::header_bytes(S);
    const int64_t count = least(per, x.units - first);
    for (int64_t sub = 0; sub < count; ++sub, at += octavo::unit_bytes(Bits)) {
      const int64_t u = first + sub;
      fetch_unit<Bits>(at + 3 * kAhead);
      veci acc[kParts];
      const veci start = kShifts<Bits, S> ? (veci)splat_wide(0) - x.shifts[u] : (veci)splat_wide(0);
      for (int v = 0; v < kParts; ++v) acc[v] = start;
      const int16_t* codes = x.codes + u * kUnit;
      pairs_from<Bits, S, 0>(codes, at, acc);
      const vec step = splat_wide(x.steps[u]), sum = splat_wide(x.sums[u]);
      for (int v = 0; v < kParts; ++v) {
        total[v] = fma(factor_at<S>(header, sub, 0, v), step * float_of(acc[v]), total[v]);
        if constexpr (kHasOffset<S>) total[v] = fma(splat_wide(0) - offset_at<S>(header, sub, v), sum, total[v]);
      }
      if constexpr (S == Scales::k_signed) {
        for (int v = 0; v < kParts; ++v) acc[v] = (veci)splat_wide(0);
        pairs_from<Bits, S, 8>(codes, at, acc);
        for (int v = 0; v < kParts; ++v)
          total[v] = fma(factor_at<S>(header, sub, 1, v), step * float_of(acc[v]), total[v]);
      }
    }
  }
  const int64_t column = panel * kPanel;
  f8 low = low_half(total), high = high_half(total);
  if (a.bias) low = low + bias_at(a.bias, column, a.n), high = high + bias_at(a.bias, column + 8, a.n);
  put(a, 0, column, low, high);
}

// ---- Several rows: a slice of a panel is unpacked once, for all of them ---------------------------------------------------

constexpr int kSliceUnits = 8;  // 256 inputs: 8 KiB of words, in the first-level cache with a tile of x
// Sums of a unit, two words of codes, one of x and a product must fit 16 registers (or 32).
constexpr int kIntegerTile = kParts == 1 ? 12 : 5;

struct Slice {
  alignas(64) int16_t words[kSliceUnits * kUnit * kPanel];
  alignas(64) float factors[2 * kSliceUnits * kPanel], offsets[kSliceUnits * kPanel];
};

template <int Bits, Scales S, int P>
OCTAVO_INLINE void widen_pairs(const uint8_t* unit, int16_t* to) {
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) {
    const veci w = pair_codes<Bits, S == Scales::k_signed, P>(unit, v);
    memcpy(to + P * 2 * kPanel + v * 2 * kLanes, &w, sizeof w);
  }
  if constexpr (P != 15) widen_pairs<Bits, S, P + 1>(unit, to);
}

// Units [first, first + count) of a panel.
template <int Bits, Scales S>
void widen_slice(const uint8_t* panel, const QuantizedFormat& f, int64_t first, int64_t count, Slice& to) {
  const int64_t per = f.group / kUnit;
  constexpr int kHalves = S == Scales::k_signed ? 2 : 1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t u = first + i, sub = u % per;
    const uint8_t* header = panel + u / per * group_bytes(f);
    const uint8_t* unit = header + octavo::header_bytes(S) + sub * octavo::unit_bytes(Bits);
    fetch_unit<Bits>(unit + 4 * kAhead);
    widen_pairs<Bits, S, 0>(unit, to.words + i * kUnit * kPanel);
    for (int v = 0; v < kParts; ++v) {
      for (int h = 0; h < kHalves; ++h)
        store_wide(to.factors + (i * kHalves + h) * kPanel + v * kLanes, factor_at<S>(header, sub, h, v));
      if constexpr (kHasOffset<S>)
        store_wide(to.offsets + i * kPanel + v * kLanes, splat_wide(0) - offset_at<S>(header, sub, v));
    }
  }
}

enum class Form { plain, shifted, offset, halves };  // of a unit's sum, see the module
template <int Bits, Scales S>
constexpr Form kForm = kHasOffset<S>              ? Form::offset
                       : S == Scales::k_signed    ? Form::halves
                       : kShifts<Bits, S>         ? Form::shifted
                                                  : Form::plain;

// `Pairs` pairs of MR rows, from words of 16 outputs; sums start as they are.
template <int MR, int Pairs>
OCTAVO_INLINE void integer_tile(const int16_t* x, int64_t width, const int16_t* words, veci (&acc)[MR][kParts]) {
#pragma GCC unroll 2
  for (int p = 0; p < Pairs; ++p) {
    veci w[kParts];
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) memcpy(&w[v], words + p * 2 * kPanel + v * 2 * kLanes, sizeof w[v]);
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      const veci a = input_pair(x + r * width + 2 * p);
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) add_to(acc[r][v], pair_products(a, w[v]));
    }
  }
}

// `x` by value: as a reference it could alias the totals, and every store would mean loading its pointers again.
template <int MR, Form F>
void slice_rows_tile(const IntegerRows x, int64_t row, int64_t first, int64_t count, const Slice& slice,
                     float* __restrict totals) {
  const int64_t width = x.width, units = x.units, start = row * units + first;
  const int16_t* __restrict codes = x.codes + row * width + first * kUnit;
  const float *__restrict steps = x.steps + start, *__restrict sums = x.sums + start;
  const int32_t* __restrict shifts = x.shifts + start;
  const int16_t* __restrict words = slice.words;
  const float *__restrict factors = slice.factors, *__restrict offsets = slice.offsets;
  constexpr int kHalves = F == Form::halves ? 2 : 1;
  for (int64_t i = 0; i < count; ++i, ++steps, ++sums, ++shifts, offsets += kPanel) {
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h, factors += kPanel) {
      veci acc[MR][kParts];
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kParts; ++v)
          acc[r][v] = F == Form::shifted ? (veci)splat_wide(0) - shifts[r * units] : (veci)splat_wide(0);
      integer_tile<MR, 16 / kHalves>(codes, width, words, acc);
      codes += kUnit / kHalves, words += kUnit / kHalves * kPanel;
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) {
        const vec factor = load_wide(factors + v * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < MR; ++r) {
          float* to = totals + r * kPanel + v * kLanes;
          vec total = fma(factor, splat_wide(steps[r * units]) * float_of(acc[r][v]), load_wide(to));
          if constexpr (F == Form::offset)
            total = fma(load_wide(offsets + v * kLanes), splat_wide(sums[r * units]), total);
          store_wide(to, total);
        }
      }
    }
  }
}

template <Form F>
void slice_all_rows(const IntegerRows& x, int64_t row, int64_t rows, int64_t first, int64_t count, const Slice& slice,
                    float* totals) {
  const int64_t tiles = (rows + kIntegerTile - 1) / kIntegerTile;
  for (int64_t t = 0; t < tiles; ++t) {  // equal tiles: six rows are three and three, not five and one
    const int64_t from = rows * t / tiles, height = rows * (t + 1) / tiles - from;
    float* to = totals + from * kPanel;
    switch (height) {
      case 1: slice_rows_tile<1, F>(x, row + from, first, count, slice, to); break;
      case 2: slice_rows_tile<2, F>(x, row + from, first, count, slice, to); break;
      case 3: slice_rows_tile<3, F>(x, row + from, first, count, slice, to); break;
      case 4: slice_rows_tile<4, F>(x, row + from, first, count, slice, to); break;
      case 5: slice_rows_tile<5, F>(x, row + from, first, count, slice, to); break;
#if defined(OCTAVO_WIDE)
      case 6: slice_rows_tile<6, F>(x, row + from, first, count, slice, to); break;
      case 7: slice_rows_tile<7, F>(x, row + from, first, count, slice, to); break;
      case 8: slice_rows_tile<8, F>(x, row + from, first, count, slice, to); break;
      case 9: slice_rows_tile<9, F>(x, row + from, first, count, slice, to); break;
      case 10: slice_rows_tile<10, F>(x, row + from, first, count, slice, to); break;
      case 11: slice_rows_tile<11, F>(x, row + from, first, count, slice, to); break;
      default: slice_rows_tile<12, F>(x, row + from, first, count, slice, to);
#endif
    }
  }
}

template <int Bits, Scales S>
void several_rows(const LinearArgs& a, const QuantizedFormat& f, const IntegerRows& x, int64_t row, int64_t rows,
                  int64_t panel) {
  Slice slice;
  alignas(64) float totals[kRowBlock * kPanel];
  memset(totals, 0, (size_t)rows * kPanel * sizeof(float));
  const uint8_t* at = (const uint8_t*)a.weight + panel * octavo::panel_bytes(f, a.k);
  // With few rows a unit at a time, so that memory is read while they are multiplied and not in bursts between.
  const int64_t most = rows <= 2 * kIntegerTile ? 1 : kSliceUnits;
  for (int64_t first = 0; first < x.units; first += most) {
    const int64_t count = least(most, x.units - first);
    widen_slice<Bits, S>(at, f, first, count, slice);
    slice_all_rows<kForm<Bits, S>>(x, row, rows, first, count, slice, totals);
  }
  const int64_t column = panel * kPanel;
  f8 low = splat(0), high = splat(0);
  if (a.bias) low = bias_at(a.bias, column, a.n), high = bias_at(a.bias, column + 8, a.n);
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = totals + r * kPanel;
    put(a, row + r, column, a.bias ? load(from) + low : load(from), a.bias ? load(from + 8) + high : load(from + 8));
  }
}

#if defined(__AVX2__)
constexpr bool kStraight = true;
#else
constexpr bool kStraight = false;  // portable code is bound by arithmetic, so one form will do
#endif

template <int Bits, Scales S>
void quantized_typed(const LinearArgs& a, const QuantizedFormat& f, const IntegerRows& x) {
  const int64_t panels = (a.n + kPanel - 1) / kPanel;
  const int64_t run = octavo::panels_of_a_run(a.m, a.k, a.weight_type), runs = (panels + run - 1) / run;
  const int64_t blocks = (a.m + kRowBlock - 1) / kRowBlock;
#pragma omp parallel for schedule(dynamic, 1) if (a.threaded && blocks * runs > 1)
  for (int64_t i = 0; i < blocks * runs; ++i) {
    const int64_t begin = i / blocks * run, end = least(panels, begin + run);
    const int64_t row = a.m * (i % blocks) / blocks, rows = a.m * (i % blocks + 1) / blocks - row;
    int64_t p = begin;
    if constexpr (kStraight) {
      for (; a.m == 1 && p < end; ++p) one_row<Bits, S>(a, f, x, p);
    }
    for (; p < end; ++p) several_rows<Bits, S>(a, f, x, row, rows, p);
  }
}

// a.weight_type: any; it only says how many panels make a run.
bool quantized_linear(const LinearArgs& a, const QuantizedFormat& f) {
  const int64_t units = octavo::units_of(a.k), width = units * kUnit;
  char* memory = (char*)malloc((size_t)(a.m * (width * 2 + units * 12)) + 64);
  if (!memory) return false;
  IntegerRows x{};
  x.units = units, x.width = width;
  x.codes = (int16_t*)(((uintptr_t)memory + 63) / 64 * 64);
  x.steps = (float*)(x.codes + a.m * width), x.sums = x.steps + a.m * units;
  x.shifts = (int32_t*)(x.sums + a.m * units);
  integer_rows(a, middle_of(f.bits), x);
  switch (f.bits * 8 + (int)f.scales) {
    case 8 * 8 + (int)Scales::half: quantized_typed<8, Scales::half>(a, f, x); break;
    case 8 * 8 + (int)Scales::wide: quantized_typed<8, Scales::wide>(a, f, x); break;
    case 8 * 8 + (int)Scales::wide_zero: quantized_typed<8, Scales::wide_zero>(a, f, x); break;
    case 4 * 8 + (int)Scales::half: quantized_typed<4, Scales::half>(a, f, x); break;
    case 4 * 8 + (int)Scales::half_zero: quantized_typed<4, Scales::half_zero>(a, f, x); break;
    case 4 * 8 + (int)Scales::wide: quantized_typed<4, Scales::wide>(a, f, x); break;
    case 4 * 8 + (int)Scales::wide_zero: quantized_typed<4, Scales::wide_zero>(a, f, x); break;
    case 4 * 8 + (int)Scales::k_min: quantized_typed<4, Scales::k_min>(a, f, x); break;
    case 5 * 8 + (int)Scales::half: quantized_typed<5, Scales::half>(a, f, x); break;
    case 5 * 8 + (int)Scales::k_min: quantized_typed<5, Scales::k_min>(a, f, x); break;
    case 6 * 8 + (int)Scales::k_signed: quantized_typed<6, Scales::k_signed>(a, f, x); break;
  }
  free(memory);
  return true;
}

}  // namespace
