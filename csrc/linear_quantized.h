// y = x W^T + b over quantised panels. Included by each instruction set's file, after linear.h.
//
// Inputs are 16-bit integers, a step per span of 256 (integer_rows.h), codes at most eight bits: the products of a fold
// (the units of a span that share a scale) are an exact sum of integers.
//
// Invariant: an output is a chain over spans in order, total = fma(step, part, total), and a part one over the folds of
// its span, part = fma(factor, sum, part) and, where a format has offsets, part = fma(-offset, sum of inputs, part).
// Integer zeros and middles are in the sum. Sums of a fold are exact, so no tile, row count or thread changes a bit.
#pragma once

#include "integer_rows.h"
#include "linear.h"
#include "quantized_panels.h"

namespace {

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

// ---- A few rows: panels go from memory straight into registers ------------------------------------------------------

template <int Bits>
OCTAVO_INLINE void fetch_unit(const uint8_t* at) {  // and the line after it: a header may follow
  for (int b = 0; b <= octavo::unit_bytes(Bits); b += 64) __builtin_prefetch(at + 4 * kAhead + b, 0, 3);
}

// What a sum of products starts from: minus the zero of each output times the sum of the inputs.
template <int Bits, Scales S>
OCTAVO_INLINE veci start_of(const uint8_t* header, int v, int32_t sum) {
  const veci none = (veci)splat_wide(0);
  if constexpr (S == Scales::half_zero) return none - whole_bytes_at(header + 32, v) * (none + sum);
  if constexpr (kHasMiddle<Bits, S>) return none - kMiddle<Bits> * sum;
  return none;
}

// The pairs from P on, of a unit or of half of one.
template <int Bits, Scales S, int MR, int P>
OCTAVO_INLINE void pairs_from(const int16_t* x, const uint8_t* unit, veci (&acc)[MR][kParts]) {
  veci w[kParts];
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) w[v] = pair_codes<Bits, S == Scales::k_signed, P>(unit, v);
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r) {
    const veci a = input_pair(x + r * kSpan + 2 * P);
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) add_to(acc[r][v], pair_products(a, w[v]));
  }
  constexpr int kStop = S == Scales::k_signed ? 7 : 15;  // a scale of k_signed serves half a unit
  if constexpr (P != 15 && P != kStop) pairs_from<Bits, S, MR, P + 1>(x, unit, acc);
}

template <Scales S, int MR>
OCTAVO_INLINE void add_fold(const uint8_t* header, int64_t sub, int half, const float* sums, int64_t folds,
                            const veci (&acc)[MR][kParts], vec (&part)[MR][kParts]) {
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) {
    const vec factor = factor_at<S>(header, sub, half, v);
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) part[r][v] = fma(factor, float_of(acc[r][v]), part[r][v]);
    if constexpr (kHasOffset<S>) {
      const vec offset = splat_wide(0) - offset_at<S>(header, sub, v);
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) part[r][v] = fma(offset, splat_wide(sums[r * folds]), part[r][v]);
    }
  }
}

// MR rows from `row` on. A panel at a time: then memory is read in one go from front to back, and sums of integers take
// a cycle each, so two chains of them are enough.
template <int Bits, Scales S, int MR>
void straight_rows(const LinearArgs& a, const QuantizedFormat& f, const IntegerRows x, int64_t row, int64_t panel) {
  vec total[MR][kParts];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < kParts; ++v) total[r][v] = splat_wide(0);
  const int64_t per = f.group / kUnit;
  const uint8_t *at = (const uint8_t*)a.weight + panel * octavo::panel_bytes(f, a.k), *header = at;
  const float* float_sums = x.float_sums + row * x.folds;
  const int32_t* sums = x.sums + row * x.folds;
  int64_t sub = per;  // unit within its group
  for (int64_t span = 0, u = 0; span < x.spans; ++span) {
    const int16_t* codes = x.at(row, span);
    vec part[MR][kParts];
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < kParts; ++v) part[r][v] = splat_wide(0);
    for (const int64_t end = least(x.units, u + kSpanUnits); u < end; ++sums, ++float_sums) {
      if (sub == per) header = at, at += octavo::header_bytes(S), sub = 0;
      veci acc[MR][kParts];
      for (int v = 0; v < kParts; ++v)
        for (int r = 0; r < MR; ++r) acc[r][v] = start_of<Bits, S>(header, v, sums[r * x.folds]);
      const int64_t first = sub;
      for (const int64_t last = least(end, u + x.fold); u < last; ++u, ++sub, codes += kUnit) {
        fetch_unit<Bits>(at);
        pairs_from<Bits, S, MR, 0>(codes, at, acc);
        if constexpr (S == Scales::k_signed) {
          add_fold<S, MR>(header, sub, 0, float_sums, x.folds, acc, part);
          for (int r = 0; r < MR; ++r)
            for (int v = 0; v < kParts; ++v) acc[r][v] = (veci)splat_wide(0);
          pairs_from<Bits, S, MR, 8>(codes, at, acc);
        }
        at += octavo::unit_bytes(Bits);
      }
      add_fold<S, MR>(header, first, 1, float_sums, x.folds, acc, part);
    }
    for (int r = 0; r < MR; ++r) {
      const vec step = splat_wide(x.steps[(row + r) * x.spans + span]);
      for (int v = 0; v < kParts; ++v) total[r][v] = fma(step, part[r][v], total[r][v]);
    }
  }
  const int64_t column = panel * kPanel;
  f8 low = splat(0), high = splat(0);
  if (a.bias) low = bias_at(a.bias, column, a.n), high = bias_at(a.bias, column + 8, a.n);
  for (int r = 0; r < MR; ++r) {
    const f8 l = low_half(total[r]), h = high_half(total[r]);
    put(a, row + r, column, a.bias ? l + low : l, a.bias ? h + high : h);
  }
}

// ---- More rows: a span of a panel is unpacked once, for all of them -------------------------------------------------

// Sums of a fold, two words of codes, one of x and a product must fit 16 registers (or 32).
constexpr int kIntegerTile = kParts == 1 ? 12 : 5;

struct Slice {  // a span of a panel: 8 KiB of words, in the first-level cache with a tile of x
  alignas(64) int16_t words[kSpan * kPanel];  // less their zeros, where those are integers
  alignas(64) float factors[2 * kSpanUnits * kPanel], offsets[kSpanUnits * kPanel];
};

template <int Bits, Scales S, int P>
OCTAVO_INLINE void widen_pairs(const uint8_t* unit, const veci (&zeros)[kParts], int16_t* to) {
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) {
    veci w = pair_codes<Bits, S == Scales::k_signed, P>(unit, v);
    if constexpr (S == Scales::half_zero || kHasMiddle<Bits, S>) w = (veci)((vecw)w - (vecw)zeros[v]);
    memcpy(to + P * 2 * kPanel + v * 2 * kLanes, &w, sizeof w);
  }
  if constexpr (P != 15) widen_pairs<Bits, S, P + 1>(unit, zeros, to);
}

// Units [first, first + count) of a panel.
template <int Bits, Scales S>
void widen_slice(const uint8_t* panel, const QuantizedFormat& f, int64_t fold, int64_t first, int64_t count,
                 Slice& to) {
  const int64_t per = f.group / kUnit;
  constexpr int kHalves = S == Scales::k_signed ? 2 : 1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t u = first + i, sub = u % per;
    const uint8_t* header = panel + u / per * group_bytes(f);
    const uint8_t* unit = header + octavo::header_bytes(S) + sub * octavo::unit_bytes(Bits);
    fetch_unit<Bits>(unit);
    veci zeros[kParts];
    for (int v = 0; v < kParts; ++v) {
      zeros[v] = (veci)splat_wide(0) + kMiddle<Bits>;
      if constexpr (S == Scales::half_zero) zeros[v] = whole_bytes_at(header + 32, v);
      zeros[v] |= zeros[v] << 16;
    }
    widen_pairs<Bits, S, 0>(unit, zeros, to.words + i * kUnit * kPanel);
    if (i % fold) continue;
    const int64_t at = i / fold;
    for (int v = 0; v < kParts; ++v) {
      for (int h = 0; h < kHalves; ++h)
        store_wide(to.factors + (at * kHalves + h) * kPanel + v * kLanes, factor_at<S>(header, sub, h, v));
      if constexpr (kHasOffset<S>)
        store_wide(to.offsets + at * kPanel + v * kLanes, splat_wide(0) - offset_at<S>(header, sub, v));
    }
  }
}

enum class Form { plain, offset, halves };  // of a fold, see the module
template <Scales S>
constexpr Form kForm = kHasOffset<S> ? Form::offset : S == Scales::k_signed ? Form::halves : Form::plain;

// `pairs` (even) pairs of MR rows, from words of 16 outputs; sums start as they are.
template <int MR>
OCTAVO_INLINE void integer_tile(const int16_t* x, const int16_t* words, int64_t pairs, veci (&acc)[MR][kParts]) {
  for (const int16_t* end = x + 2 * pairs; x < end; x += 4) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p, words += 2 * kPanel) {
      veci w[kParts];
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) memcpy(&w[v], words + v * 2 * kLanes, sizeof w[v]);
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r) {
        const veci a = input_pair(x + r * kSpan + 2 * p);
#pragma GCC unroll 2
        for (int v = 0; v < kParts; ++v) add_to(acc[r][v], pair_products(a, w[v]));
      }
    }
  }
}

// `count` units of MR rows. `x` by value: as a reference it could alias the totals, and every store would mean loading
// its pointers again.
template <int MR, Form F>
void slice_rows_tile(const IntegerRows x, int64_t row, int64_t span, int64_t count, const Slice& slice,
                     float* __restrict totals) {
  constexpr int kHalves = F == Form::halves ? 2 : 1;
  const int64_t folds = x.folds, fold = x.fold;
  const int16_t *__restrict codes = x.at(row, span), *__restrict words = slice.words;
  const float* __restrict sums = x.float_sums + row * folds + span * kSpanUnits / fold;
  const float *__restrict factors = slice.factors, *__restrict offsets = slice.offsets;
  alignas(64) float part[MR * kPanel] = {};
  for (int64_t done = 0; done < count; done += fold, ++sums, offsets += kPanel) {
    const int64_t inputs = least(fold, count - done) * (kUnit / kHalves);
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h, factors += kPanel, codes += inputs, words += inputs * kPanel) {
      veci acc[MR][kParts];
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kParts; ++v) acc[r][v] = (veci)splat_wide(0);
      integer_tile<MR>(codes, words, inputs / 2, acc);
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) {
        const vec factor = load_wide(factors + v * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < MR; ++r) {
          float* to = part + r * kPanel + v * kLanes;
          vec sum = fma(factor, float_of(acc[r][v]), load_wide(to));
          if constexpr (F == Form::offset)
            sum = fma(load_wide(offsets + v * kLanes), splat_wide(sums[r * folds]), sum);
          store_wide(to, sum);
        }
      }
    }
  }
  for (int r = 0; r < MR; ++r, totals += kPanel) {
    const vec step = splat_wide(x.steps[(row + r) * x.spans + span]);
    for (int v = 0; v < kParts; ++v)
      store_wide(totals + v * kLanes,
                 fma(step, load_wide(part + r * kPanel + v * kLanes), load_wide(totals + v * kLanes)));
  }
}

template <Form F>
void slice_all_rows(const IntegerRows& x, int64_t row, int64_t rows, int64_t span, int64_t count, const Slice& slice,
                    float* totals) {
  const int64_t tiles = (rows + kIntegerTile - 1) / kIntegerTile;
  for (int64_t t = 0; t < tiles; ++t) {  // equal tiles: six rows are three and three, not five and one
    const int64_t from = rows * t / tiles, height = rows * (t + 1) / tiles - from;
    float* to = totals + from * kPanel;
    switch (height) {
      case 1: slice_rows_tile<1, F>(x, row + from, span, count, slice, to); break;
      case 2: slice_rows_tile<2, F>(x, row + from, span, count, slice, to); break;
      case 3: slice_rows_tile<3, F>(x, row + from, span, count, slice, to); break;
      case 4: slice_rows_tile<4, F>(x, row + from, span, count, slice, to); break;
      case 5: slice_rows_tile<5, F>(x, row + from, span, count, slice, to); break;
#if defined(OCTAVO_WIDE)
      case 6: slice_rows_tile<6, F>(x, row + from, span, count, slice, to); break;
      case 7: slice_rows_tile<7, F>(x, row + from, span, count, slice, to); break;
      case 8: slice_rows_tile<8, F>(x, row + from, span, count, slice, to); break;
      case 9: slice_rows_tile<9, F>(x, row + from, span, count, slice, to); break;
      case 10: slice_rows_tile<10, F>(x, row + from, span, count, slice, to); break;
      case 11: slice_rows_tile<11, F>(x, row + from, span, count, slice, to); break;
      default: slice_rows_tile<12, F>(x, row + from, span, count, slice, to);
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
  for (int64_t span = 0; span < x.spans; ++span) {
    const int64_t first = span * kSpanUnits, count = least(kSpanUnits, x.units - first);
    widen_slice<Bits, S>(at, f, x.fold, first, count, slice);
    slice_all_rows<kForm<S>>(x, row, rows, span, count, slice, totals);
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
constexpr int64_t kStraightRows = 4;
#else
constexpr int64_t kStraightRows = 0;  // portable code is bound by arithmetic, so one form will do
#endif

// Panels [begin, end) times all rows, of which there are at most kStraightRows.
template <int Bits, Scales S>
void straight_range(const LinearArgs& a, const QuantizedFormat& f, const IntegerRows& x, int64_t begin, int64_t end) {
  for (int64_t p = begin; p < end; ++p) {
    switch (a.m) {
      case 1: straight_rows<Bits, S, 1>(a, f, x, 0, p); break;
      case 2: straight_rows<Bits, S, 2>(a, f, x, 0, p); break;
      case 3: straight_rows<Bits, S, 3>(a, f, x, 0, p); break;
      default: straight_rows<Bits, S, 4>(a, f, x, 0, p);
    }
  }
}

// Panels that a thread takes at a time. Few rows are bound by memory, which gives half a MiB in one go a quarter faster
// than pieces of 40 KiB; many are bound by arithmetic, and small pieces end together.
int64_t panels_of_a_task(const LinearArgs& a, const QuantizedFormat& f, int64_t panels, int64_t run) {
  if (a.m > kIntegerTile) return run;
  const int64_t most = (int64_t{512} << 10) / octavo::panel_bytes(f, a.k), task = least(panels / 8, most) / run * run;
  return task < run ? run : task;
}

template <int Bits, Scales S>
void quantized_typed(const LinearArgs& a, const QuantizedFormat& f, const IntegerRows& x) {
  const int64_t panels = (a.n + kPanel - 1) / kPanel, run = octavo::panels_of_a_run(a.m, a.k, a.weight_type);
  const int64_t task = panels_of_a_task(a, f, panels, run), tasks = (panels + task - 1) / task;
  const int64_t blocks = (a.m + kRowBlock - 1) / kRowBlock;
#pragma omp parallel for schedule(dynamic, 1) if (a.threaded && blocks * tasks > 1)
  for (int64_t i = 0; i < blocks * tasks; ++i) {
    const int64_t begin = i / blocks * task, end = least(panels, begin + task);
    const int64_t row = a.m * (i % blocks) / blocks, rows = a.m * (i % blocks + 1) / blocks - row;
    if constexpr (kStraightRows > 0) {
      if (a.m <= kStraightRows) {
        straight_range<Bits, S>(a, f, x, begin, end);
        continue;
      }
    }
    for (int64_t p = begin; p < end; ++p) several_rows<Bits, S>(a, f, x, row, rows, p);
  }
}

// a.weight_type: any; it only says how many panels make a run.
bool quantized_linear(const LinearArgs& a, const QuantizedFormat& f) {
  IntegerRows x{};
  const bool shared = f.scales != Scales::k_min && f.scales != Scales::k_signed;  // else a scale per unit
  void* memory = integer_rows(a, shared ? f.group / kUnit : 1, x);
  if (!memory) return false;
  switch (f.bits * 8 + (int)f.scales) {
    case 8 * 8 + (int)Scales::half: quantized_typed<8, Scales::half>(a, f, x); break;
    case 8 * 8 + (int)Scales::wide: quantized_typed<8, Scales::wide>(a, f, x); break;
    case 8 * 8 + (int)Scales::wide_zero: quantized_typed<8, Scales::wide_zero>(a, f, x); break;
    case 4 * 8 + (int)Scales::half: quantized_typed<4, Scales::half>(a, f, x); break;
    case 4 * 8 + (int)Scales::half_zero: quantized_typed<4, Scales::half_zero>(a, f, x); break;
    case 4 * 8 + (int)Scales::half_fine: quantized_typed<4, Scales::half_fine>(a, f, x); break;
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
