// y = x W^T + b over quantised panels on the byte tiles of AMX; linear_quantized.h for few rows.
//
// Sums are of integers and exact, and what becomes of them is what linear_words.h and linear_bytes.h make of theirs, in
// the same order. So the bits are those of all other instruction sets, and from how many rows on tiles are used is a
// question of speed alone.
//
// A span of a panel is unpacked into rows of tiles, [inputs / 4][16 outputs][4] bytes, and meets some tiles of 16 rows of
// x, whose span stays in the first-level cache while some panels pass. Sums are finished a tile of rows late: stores of
// tiles take their time.
#pragma once

#include "amx.h"
#include "linear_amx.h"
#include "linear_quantized.h"
#include "shares.h"

namespace {

static_assert(kParts == 1, "a row of a tile of sums is one vector");

constexpr int64_t kTileSums = 16 * kPanel;  // numbers of a tile of sums: 16 rows, 16 outputs
constexpr int64_t kTileBlocks = 4;          // most tiles of rows that a span of a panel meets in one go
constexpr int64_t kTilePanels = 8;          // most panels that a span of those rows meets in one go

// Tiles 0 to 3: sums; 4 and 5: Step inputs of 16 rows; 6 and 7: Step inputs of 16 outputs.
template <int64_t Step>
struct ByteTileScope {
  ByteTileScope() {
    TileConfig config;
    for (int t = 0; t < 4; ++t) config.rows[t] = 16, config.bytes[t] = 64;
    for (int t = 4; t < 6; ++t) config.rows[t] = 16, config.bytes[t] = Step;
    for (int t = 6; t < 8; ++t) config.rows[t] = Step / 4, config.bytes[t] = 64;
    load_config(config);
  }
  ~ByteTileScope() { release_tiles(); }
  ByteTileScope(const ByteTileScope&) = delete;
  ByteTileScope& operator=(const ByteTileScope&) = delete;
};

// ---- Codes of eight bits: inputs of 16, as two tiles of bytes --------------------------------------------------------

// Two pairs of inputs of 16 outputs, [2][16][2] -> [16][4].
OCTAVO_INLINE void pairs_to_fours(const uint8_t* from, uint8_t* to) {
#if defined(__AVX512BW__)
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(order), _mm512_loadu_si512(from)));
#else
  for (int j = 0; j < kPanel; ++j) memcpy(to + 4 * j, from + 2 * j, 2), memcpy(to + 4 * j + 2, from + 32 + 2 * j, 2);
#endif
}

// Sixteen-bit integers as two rows of bytes, the low ones unsigned: x = 256 * high + low.
OCTAVO_INLINE void split_words(const int16_t* x, int64_t count, uint8_t* low, uint8_t* high) {
  for (int64_t i = 0; i < count; ++i) low[i] = (uint8_t)x[i], high[i] = (uint8_t)(x[i] >> 8);
}

// Step: inputs of a tile, all of one fold.
template <Scales S, int64_t Step>
class WordTiles {
 public:
  using Scope = ByteTileScope<Step>;
  struct Slice {
    alignas(64) uint8_t codes[kSpan * kPanel];
    alignas(64) float factors[kSpanUnits * kPanel], offsets[kSpanUnits * kPanel];
  };
  static constexpr int64_t kSums = 2 * kSpan / (Step == kUnit ? kUnit : 2 * kUnit);  // low and high of each fold

  ~WordTiles() { free(rows_), free(tiles_); }
  // False: out of memory.
  bool prepare(const LinearArgs& a, const QuantizedFormat& f) {
    blocks_ = (a.m + 15) / 16;
    rows_ = integer_rows(a, f.group / kUnit, x_);
    tiles_ = rows_ ? (uint8_t*)aligned_alloc(64, (size_t)(x_.spans * blocks_ * kBlock)) : nullptr;
    if (!tiles_) return false;
    while (x_.fold >> (step_bits_ + 1) >= Step / kUnit) ++step_bits_;
#pragma omp parallel for schedule(static) if (a.threaded && a.m * a.k > 65536)
    for (int64_t b = 0; b < blocks_; ++b)
      for (int64_t r = b * 16; r < least(a.m, b * 16 + 16); ++r)
        for (int64_t span = 0; span < x_.spans; ++span) split(r, span);
    return true;
  }
  int64_t spans() const { return x_.spans; }
  int64_t steps(int64_t span) const { return (units(span) * kUnit + Step - 1) / Step; }

  void widen(const uint8_t* panel, const QuantizedFormat& f, int64_t span, Slice& to) const {
    UnitPlace at(panel, f, span * kSpanUnits);
    for (int64_t i = 0; i < units(span); ++i, at.next(f)) {
      fetch_unit<8>(at.unit);
#pragma GCC unroll 8
      for (int q = 0; q < kQuads; ++q) pairs_to_fours(at.unit + q * 64, to.codes + (i * kQuads + q) * 64);
      if (i & (x_.fold - 1)) continue;
      const int64_t fold = (i >> fold_bits()) * kPanel;
      store_wide(to.factors + fold, factor_at<S>(at.header, at.sub, 0));
      if constexpr (kHasOffset<S>) store_wide(to.offsets + fold, splat_wide(0) - offset_at<8, S>(at.header, at.sub, 0));
    }
  }

  // Inputs behind the last unit are zeros, whatever the slice holds there.
  OCTAVO_INLINE void multiply(int64_t block, int64_t span, int64_t step, const Slice& slice, int32_t* sums) const {
    const int64_t each = int64_t{1} << step_bits_, of_fold = step & (each - 1);
    const uint8_t* x = tiles_ + (span * blocks_ + block) * kBlock + step * 2 * kTile;
    if (of_fold == 0) {
      zero_tile(0);
      zero_tile(1);
    }
    load_tile(6, slice.codes + step * Step * kPanel, 64);
    load_tile(4, x, Step);
    multiply_unsigned_tiles(0, 4, 6);
    load_tile(5, x + kTile, Step);
    multiply_byte_tiles(1, 5, 6);
    if (of_fold + 1 == each || step + 1 == steps(span)) {
      int32_t* to = sums + (step >> step_bits_) * 2 * kTileSums;
      store_tile(0, to, 64);
      store_tile(1, to + kTileSums, 64);
    }
  }

  // sums [folds][low, high][16 rows][16 outputs] of `rows` rows from `row` on, into their totals.
  void finish(int64_t row, int64_t rows, int64_t span, const Slice& slice, const int32_t* sums, float* totals) const {
    const int64_t folds = ((units(span) - 1) >> fold_bits()) + 1;
    for (int64_t r = 0; r < rows; ++r, ++row, sums += kPanel, totals += kPanel) {
      const float* of_inputs = x_.sums + row * x_.folds + (span * kSpanUnits >> fold_bits());
      vec part = splat_wide(0);
      for (int64_t g = 0; g < folds; ++g) {
        const int32_t* low = sums + 2 * g * kTileSums;
        const veci sum = lanes_at(low) + (lanes_at(low + kTileSums) << 8);
        part = fma(load_wide(slice.factors + g * kPanel), float_of(sum), part);
        if constexpr (kHasOffset<S>) part = fma(load_wide(slice.offsets + g * kPanel), splat_wide(of_inputs[g]), part);
      }
      store_wide(totals, fma(splat_wide(x_.steps[row * x_.spans + span]), part, load_wide(totals)));
    }
  }

 private:
  static constexpr int64_t kTile = 16 * Step, kBlock = 2 * 16 * kSpan;  // bytes: of a tile; of a span of 16 rows

  int64_t units(int64_t span) const { return least(kSpanUnits, x_.units - span * kSpanUnits); }
  OCTAVO_INLINE int fold_bits() const { return step_bits_ + (Step == 2 * kUnit); }  // 1 << fold_bits() units
  void split(int64_t row, int64_t span) {
    const int16_t* codes = x_.at(row, span);
    uint8_t* to = tiles_ + (span * blocks_ + row / 16) * kBlock + row % 16 * Step;
    int64_t left = units(span) * kUnit;
    for (int64_t s = 0; s < steps(span); ++s, codes += Step, to += 2 * kTile, left -= Step) {
      if (left < Step) memset(to + left, 0, (size_t)(Step - left)), memset(to + kTile + left, 0, (size_t)(Step - left));
      split_words(codes, least(Step, left), to, to + kTile);
    }
  }

  IntegerRows x_;
  void* rows_ = nullptr;
  uint8_t* tiles_ = nullptr;  // [spans][blocks of 16 rows][steps][low, high][16][Step]
  int64_t blocks_ = 0;
  int step_bits_ = 0;  // a fold takes 1 << step_bits_ steps
};

// ---- Codes of four and five bits: inputs of bytes ----------------------------------------------------------------------

template <int Bits, Scales S>
class CodeTiles {
 public:
  using Scope = ByteTileScope<kUnit>;
  using Slice = ByteSlice;
  static constexpr int64_t kSums = kUnitsOfRecord;

  ~CodeTiles() { free(memory_); }
  bool prepare(const LinearArgs& a, const QuantizedFormat&) {
    memory_ = byte_rows<false>(a, 0, x_);
    return memory_ != nullptr;
  }
  int64_t spans() const { return x_.spans; }
  int64_t steps(int64_t span) const { return units(span); }

  void widen(const uint8_t* panel, const QuantizedFormat& f, int64_t span, Slice& to) const {
    widen_bytes<Bits, S, true>(panel, f, span * kUnitsOfRecord, units(span), to);
  }

  OCTAVO_INLINE void multiply(int64_t block, int64_t span, int64_t step, const Slice& slice, int32_t* sums) const {
    const int8_t* x = x_.at(block * 16, span)->codes + step * kUnit;
    const uint8_t* codes = slice.codes + step * kUnit * kPanel;
    int32_t* to = sums + step * kTileSums;
    if (step % 2) {
      zero_tile(1);
      load_tile(5, x, sizeof(ByteSpan));
      load_tile(7, codes, 64);
      multiply_byte_tiles(1, 5, 7);
      store_tile(0, to - kTileSums, 64);
    } else {
      zero_tile(0);
      load_tile(4, x, sizeof(ByteSpan));
      load_tile(6, codes, 64);
      multiply_byte_tiles(0, 4, 6);
      if (step) store_tile(1, to - kTileSums, 64);
    }
    if (step + 1 == steps(span)) {
      if (step % 2) store_tile(1, to, 64);
      else store_tile(0, to, 64);
    }
  }

  // sums [units][16 rows][16 outputs] of `rows` rows from `row` on, into their totals.
  void finish(int64_t row, int64_t rows, int64_t span, const Slice& slice, const int32_t* sums, float* totals) const {
    if (units(span) == kUnitsOfRecord)
      finish_units<kUnitsOfRecord>(x_.at(row, span), rows, kUnitsOfRecord, slice, sums, totals);
    else
      finish_units<1>(x_.at(row, span), rows, units(span), slice, sums, totals);
  }

 private:
  int64_t units(int64_t span) const { return least(kUnitsOfRecord, x_.units - span * kUnitsOfRecord); }
  // Of `units` units, a multiple of Together, whose factors stay in registers.
  template <int Together>
  OCTAVO_INLINE static void finish_units(const ByteSpan* x, int64_t rows, int64_t units, const Slice& slice,
                                         const int32_t* __restrict sums, float* __restrict totals) {
    for (int64_t first = 0; first < units; first += Together) {
      vec factors[Together], offsets[Together];
#pragma GCC unroll 8
      for (int i = 0; i < Together; ++i) {
        factors[i] = load_wide(slice.factors + (first + i) * kPanel);
        if constexpr (kHasOffset<S>) offsets[i] = load_wide(slice.offsets + (first + i) * kPanel);
        else offsets[i] = splat_wide(0);
      }
#pragma GCC unroll 2
      for (int64_t r = 0; r < rows; ++r) {
        vec total = load_wide(totals + r * kPanel);
#pragma GCC unroll 8
        for (int i = 0; i < Together; ++i) {
          const veci sum = lanes_at(sums + (first + i) * kTileSums + r * kPanel);
          total = add_unit<kHasOffset<S>>(total, sum, factors[i], offsets[i], x[r], first + i);
        }
        store_wide(totals + r * kPanel, total);
      }
    }
  }

  ByteRows x_;
  void* memory_ = nullptr;
};

// ---- A block of rows, and all of them --------------------------------------------------------------------------------

// Sums of a tile of rows with a span of a panel, on their way to its totals.
template <class Kind>
struct SpanSums {
  const typename Kind::Slice* slice;
  int64_t row, rows = 0, span;
  float* totals;
  alignas(64) int32_t at[Kind::kSums * kTileSums];

  OCTAVO_INLINE void finish(const Kind& by) {
    if (rows) by.finish(row, rows, span, *slice, at, totals);
    rows = 0;
  }
};

template <class Kind>
class PanelProducts {
 public:
  PanelProducts(const LinearArgs& a, const QuantizedFormat& f, const Kind& by) : a_(a), f_(f), by_(by) {}

  // Panels [begin, end), at most kTilePanels, times the tiles of rows [first, last), at most kTileBlocks. A span of the
  // rows stays in the first-level cache while the panels pass.
  void multiply(int64_t first, int64_t last, int64_t begin, int64_t end) {
    const int64_t rows = least(a_.m, last * 16) - first * 16;
    for (int64_t p = begin; p < end; ++p) memset(totals_[p - begin], 0, (size_t)(rows * kPanel) * sizeof(float));
    for (int64_t span = 0; span < by_.spans(); ++span)
      for (int64_t p = begin; p < end; ++p) add_span(first, last, p, span, totals_[p - begin]);
    before_->finish(by_);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t p = begin; p < end; ++p) put_row(a_, first * 16 + r, p, totals_[p - begin] + r * kPanel);
  }

 private:
  void add_span(int64_t first, int64_t last, int64_t panel, int64_t span, float* totals) {
    slice_ = slice_ == slices_ ? slices_ + 1 : slices_;  // sums of the one before may still want the other
    by_.widen((const uint8_t*)a_.weight + panel * octavo::panel_bytes(f_, a_.k), f_, span, *slice_);
    const int64_t steps = by_.steps(span);
    for (int64_t block = first; block < last; ++block) {
      SpanSums<Kind>* now = before_ == sums_ ? sums_ + 1 : sums_;
      for (int64_t s = 0; s < steps; ++s) by_.multiply(block, span, s, *slice_, now->at);
      before_->finish(by_);
      now->slice = slice_, now->span = span;
      now->row = block * 16, now->rows = least(16, a_.m - block * 16), now->totals = totals + (block - first) * kTileSums;
      before_ = now;
    }
  }

  const LinearArgs& a_;
  const QuantizedFormat& f_;
  const Kind& by_;
  typename Kind::Slice slices_[2];
  typename Kind::Slice* slice_ = slices_;
  SpanSums<Kind> sums_[2];
  SpanSums<Kind>* before_ = sums_;
  alignas(64) float totals_[kTilePanels][kTileBlocks * kTileSums];
};

// False: out of memory.
template <class Kind>
bool tile_tasks(const LinearArgs& a, const QuantizedFormat& f) {
  Kind by;
  if (!by.prepare(a, f)) return false;
  const int64_t panels = (a.n + kPanel - 1) / kPanel, run = octavo::panels_of_a_run(a.m, a.k, a.weight_type);
  const int64_t runs = (panels + run - 1) / run, blocks = (a.m + 15) / 16, parts = (blocks + kTileBlocks - 1) / kTileBlocks;
  share_out<typename Kind::Scope>(parts * runs, a.threaded, [&](int64_t i) {
    PanelProducts<Kind> products(a, f, by);
    const int64_t part = i / runs, end = least(panels, (i % runs + 1) * run);
    for (int64_t p = i % runs * run; p < end; p += kTilePanels)
      products.multiply(blocks * part / parts, blocks * (part + 1) / parts, p, least(end, p + kTilePanels));
  });
  return true;
}

// Whether codes of eight bits fill tiles of 64 inputs.
bool fills_tiles(const LinearArgs& a, const QuantizedFormat& f) {
  return f.bits == 8 && fold_of(f.group / kUnit, octavo::units_of(a.k)) > 1;
}

// Whether tiles pay, measured. Tiles of 32 inputs do so where rows fill them; k_signed, whose half units have factors of
// their own, would need tiles of 16.
bool worth_tiles(const LinearArgs& a, const QuantizedFormat& f) {
  if (f.bits == 16 || f.scales == Scales::k_signed) return false;
  return fills_tiles(a, f) ? a.m >= 6 : 4 * a.m >= 3 * ((a.m + 15) / 16 * 16);
}

struct OnTiles {
  const LinearArgs& a;
  const QuantizedFormat& f;
  template <Scales S>
  bool words() const {
    return fills_tiles(a, f) ? tile_tasks<WordTiles<S, 2 * kUnit>>(a, f) : tile_tasks<WordTiles<S, kUnit>>(a, f);
  }
  template <int Bits, Scales S>
  bool bytes() const {
    if constexpr (S == Scales::k_signed) return quantized_linear(a, f);  // see `worth_tiles`
    else return tile_tasks<CodeTiles<Bits, S>>(a, f);
  }
};

bool quantized_linear_amx(const LinearArgs& a, const QuantizedFormat& f) {
  return worth_tiles(a, f) ? of_format(f, OnTiles{a, f}) : quantized_linear(a, f);
}

}  // namespace
