// y = x W^T + b on the tiles of AMX, for bfloat16 weights whose input size is a multiple of 32; linear.h for the rest.
//
// x is rounded to bfloat16 once, into tiles of 16 rows and 32 inputs that lie in a KiB each. A pair panel (kernels.h) is
// a run of weight tiles as it lies: 16 pairs of inputs times 16 outputs. Up to 16 rows wait for memory: panels go by one
// after the other. More rows wait for the tile unit: a tile of them is loaded for two panels.
//
// Invariant: every output is one sum, tile step by tile step in the order of the inputs, whatever the number of rows or
// threads: a row alone and the same row among 512 have the same bits. (They differ from those of the other instruction
// sets, which do not round x.)
#pragma once

#include "amx.h"
#include "linear.h"
#include "scratch.h"
#include "wide_math.h"

namespace {

constexpr int64_t kStepInputs = 32;            // inputs of a tile step
constexpr int64_t kAmxColumn = 16;             // most rows that a panel meets one by one
constexpr int64_t kAmxBlockBytes = 768 << 10;  // of rounded rows that pass a run of panels: they stay in the second-level cache

// Rounded rows, [blocks of 16][steps][16][32]; of those below the last row nothing is read.
struct AmxRows {
  const LinearArgs* args;
  bf16* tiles;
  int64_t steps, blocks;
  OCTAVO_INLINE const bf16* at(int64_t block) const { return tiles + block * steps * kTileNumbers; }
  OCTAVO_INLINE const bf16* panel(int64_t p) const { return (const bf16*)args->weight + p * steps * kTileNumbers; }
};

template <class In>
void round_rows(const AmxRows& x) {
  const LinearArgs& a = *x.args;
#pragma omp parallel for schedule(dynamic, 2) if (a.threaded && a.m * a.k > 65536)
  for (int64_t b = 0; b < x.blocks; ++b) {
    bf16* to = x.tiles + b * x.steps * kTileNumbers;
    for (int64_t r = 0; r < 16 && b * 16 + r < a.m; ++r) {
      const In* from = (const In*)a.x + (b * 16 + r) * a.ldx;
      for (int64_t s = 0; s < x.steps; ++s)
        round32(from + s * kStepInputs, to + s * kTileNumbers + r * kStepInputs);
    }
  }
}

// ---- What is done with sums, [16 rows][16 outputs] each ---------------------------------------------------------------

OCTAVO_INLINE vec biased(const LinearArgs& a, int64_t panel, vec sums) {
  if (!a.bias) return sums;
  return sums + join_halves(bias_at(a.bias, panel * kPanel, a.n), bias_at(a.bias, panel * kPanel + 8, a.n));
}

// Sixteen outputs of a row.
OCTAVO_INLINE void put_row(const LinearArgs& a, int64_t row, int64_t panel, const float* sums) {
  const int64_t column = panel * kPanel, columns = a.n - column;
  const vec v = biased(a, panel, load_wide(sums));
  if (a.best) {
    octavo::Best& best = a.best[panel / octavo::panels_of_a_run(a.m, a.k, a.weight_type) * a.m + row];
    if (any_above_wide(v, best.value)) keep_best(best, column, columns, low_half(&v), high_half(&v));
  } else if (a.y_type == DType::f32 && columns >= kPanel) {
    store_wide((float*)a.y + row * a.ldy + column, v);
  } else {
    put(a, row, column, low_half(&v), high_half(&v));
  }
}

// The place of a row's outputs of a panel in rounded rows of `outputs` numbers.
OCTAVO_INLINE bf16* in_tiles(void* tiles, int64_t outputs, int64_t row, int64_t panel) {
  return (bf16*)tiles + octavo::place_in_tiles(row, panel / 2 * kStepInputs, outputs) + panel % 2 * kPanel;
}

// up: of the panel `twin` panels on.
OCTAVO_INLINE void put_gated_row(const LinearArgs& a, octavo::Activation kind, int64_t row, int64_t panel, int64_t twin,
                                 const float* sums, const float* up) {
  const vec gate = activate_wide(biased(a, panel, load_wide(sums)), kind);
  const vec gated = gate * biased(a, panel + twin, load_wide(up));
  if (a.y_tiles)
    round16(gated, in_tiles(a.y, a.n / 2, row, panel));
  else
    store_wide((float*)a.y + row * a.ldy + panel * kPanel, gated);
}

// ---- Few rows: memory sets the pace ------------------------------------------------------------------------------------

// Memory that is wanted next, asked for a few lines at a time between other instructions: a core that asks for many at
// once waits for them, and does nothing else meanwhile.
struct Coming {
  const char *at = nullptr, *end = nullptr;
  template <int Lines>
  OCTAVO_INLINE void ask() {
    if (Lines == 0 || at >= end) return;
#pragma GCC unroll 4
    for (int i = 0; i < Lines; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
    at += 64 * Lines;
  }
};

// One tile of rows times a panel: sums [16][16]. next: where the weights go on behind the panel.
OCTAVO_INLINE void column(const AmxRows& x, const bf16* w, const bf16* next, float* sums) {
  constexpr int64_t kAheadSteps = 8;
  zero_tile(0);
  for (int64_t s = 0; s < x.steps; ++s) {
    const int64_t then = s + kAheadSteps;
    const bf16* ahead = then < x.steps ? w + then * kTileNumbers : next + (then - x.steps) * kTileNumbers;
    Coming coming = {(const char*)ahead, (const char*)(ahead + kTileNumbers)};
    coming.ask<4>();
    load_tile(4, x.tiles + s * kTileNumbers, 64);
    coming.ask<4>();
    load_tile(6, w + s * kTileNumbers, 64);
    coming.ask<4>();
    multiply_tiles(0, 4, 6);
    coming.ask<4>();
  }
  store_tile(0, sums, 64);
}

void few_amx(const AmxRows& x, int64_t begin, int64_t end) {
  alignas(64) float sums[256];
  for (int64_t p = begin; p < end; ++p) {
    column(x, x.panel(p), x.panel(p + 1), sums);
    for (int64_t r = 0; r < x.args->m; ++r) put_row(*x.args, r, p, sums + r * kPanel);
  }
}

void few_gated(const AmxRows& x, int64_t begin, int64_t end, int64_t twin, octavo::Activation kind) {
  alignas(64) float sums[256], up[256];
  for (int64_t p = begin; p < end; ++p) {
    column(x, x.panel(p), x.panel(p + twin), sums);
    column(x, x.panel(p + twin), x.panel(p + 1), up);
    for (int64_t r = 0; r < x.args->m; ++r)
      put_gated_row(*x.args, kind, r, p, twin, sums + r * kPanel, up + r * kPanel);
  }
}

// ---- Many rows: the tile unit sets the pace ------------------------------------------------------------------------------

// Two panels, and those that come next, which are asked for meanwhile.
struct PanelPair {
  int64_t number;  // of the first
  const bf16 *w, *w2, *next, *next2;
};

// Sums of up to four tiles of rows and two panels, [4][2 panels][16][16]: of `rows` rows from `row` on, of which `done` are
// finished.
struct PairSums {
  static constexpr int64_t kBlocks = 4;
  int64_t row = 0, rows = 0, done = 0, panel = 0;
  alignas(64) float at[kBlocks * 512];

  // What is done with outputs: finish.put(row, panel, sums, sums of the second panel).
  template <class Finish>
  OCTAVO_INLINE void finish_until(int64_t end, const Finish& finish) {
    for (end = least(end, rows); done < end; ++done) {
      const float* sums = at + done / 16 * 512 + done % 16 * kPanel;
      finish.put(row + done, panel, sums, sums + 256);
    }
  }
};

// Blocks of rows times pairs of panels, a tile of rows times two panels at a time. (Two tiles of rows would share their
// loads; but a core that two threads share then multiplies a third slower: measured, more than two tiles of sums at work
// in each thread cost that.) A run of steps of the panels stays in the first-level cache while up to four tiles of rows
// pass. While the tile unit multiplies, the vector units finish the sums before, and memory is asked for what comes: the
// panels of the next pair, and the lines that outputs go to, without which every row of outputs would wait for its own
// (finish.ask).
template <class Finish>
class Pairs {
 public:
  Pairs(const AmxRows& x, const Finish& finish) : x_(x), finish_(finish) {}

  // Blocks [first, last).
  void multiply(int64_t first, int64_t last, const PanelPair& pair) {
    const int64_t bytes = x_.steps * 1024, blocks = last - first;
    coming_ = {(const char*)pair.next, (const char*)pair.next + bytes};
    coming2_ = {(const char*)pair.next2, (const char*)pair.next2 + bytes};
    if (blocks >= 8)
      pass<1>(first, last, pair);
    else if (blocks >= 4)
      pass<2>(first, last, pair);
    else
      pass<4>(first, last, pair);
  }
  // What the last pair left.
  void finish() { before_->finish_until(before_->rows, finish_); }

 private:
  // Lines: of each panel to come, asked for twice in a step.
  template <int Lines>
  void pass(int64_t first, int64_t last, const PanelPair& pair) {
    for (; first < last; first += PairSums::kBlocks) few<Lines>(first, least(last, first + PairSums::kBlocks), pair);
  }

  template <int Lines>
  OCTAVO_INLINE void few(int64_t first, int64_t last, const PanelPair& pair) {
    constexpr int64_t kRunSteps = 20;  // 40 KiB of panels
    const int64_t runs = (x_.steps + kRunSteps - 1) / kRunSteps, length = (x_.steps + runs - 1) / runs;
    const int64_t begin = first * 16, end = least(last * 16, x_.args->m), total = (last - first) * x_.steps;
    const int64_t each = (before_->rows + total - 1) / total, each_ask = (end - begin + total - 1) / total;
    PairSums* now = before_ == sums_ ? sums_ + 1 : sums_;
    int64_t finished = 0, asked = begin;
    for (int64_t from = 0; from < x_.steps; from += length) {
      const int64_t to = least(x_.steps, from + length) * kTileNumbers;
      for (int64_t block = first; block < last; ++block) {
        float* sums = now->at + (block - first) * 512;
        const bf16* rows = x_.at(block);
        if (from) {
          load_tile(0, sums, 64);
          load_tile(1, sums + 256, 64);
        } else {
          zero_tile(0);
          zero_tile(1);
        }
        for (int64_t i = from * kTileNumbers; i < to; i += kTileNumbers) {
          stream_tile(4, rows + i, 64);
          load_tile(6, pair.w + i, 64);
          load_tile(7, pair.w2 + i, 64);
          multiply_tiles(0, 4, 6);
          coming_.ask<Lines>(), coming2_.ask<Lines>();
          multiply_tiles(1, 4, 7);
          coming_.ask<Lines>(), coming2_.ask<Lines>();
          before_->finish_until(finished += each, finish_);
          for (const int64_t until = least(asked + each_ask, end); asked < until; ++asked) finish_.ask(asked, pair.number);
        }
        store_tile(0, sums, 64);
        store_tile(1, sums + 256, 64);
      }
    }
    finish();
    now->row = begin, now->rows = end - begin, now->done = 0;
    now->panel = pair.number;
    before_ = now;
  }

  const AmxRows& x_;
  const Finish& finish_;
  Coming coming_, coming2_;  // the panels to come
  PairSums sums_[2];
  PairSums* before_ = sums_;
};

struct PutRows {
  const LinearArgs& a;
  int64_t end;  // of the panels
  bool plain;   // two panels of sums go to y as they are

  PutRows(const LinearArgs& args, int64_t end_panel) : a(args), end(end_panel) {
    plain = !a.best && !a.bias && a.y_type == DType::f32 && end * kPanel <= a.n && end % 2 == 0;
  }
  OCTAVO_INLINE void ask(int64_t row, int64_t panel) const {
    if (a.best) return;
    const char* y = (const char*)a.y + (row * a.ldy + panel * kPanel) * octavo::element_size(a.y_type);
    __builtin_prefetch(y, 1, 3);
    if (a.y_type == DType::f32) __builtin_prefetch(y + 64, 1, 3);
  }
  OCTAVO_INLINE void put(int64_t row, int64_t panel, const float* sums, const float* sums2) const {
    if (plain) {
      float* y = (float*)a.y + row * a.ldy + panel * kPanel;
      store_wide(y, load_wide(sums)), store_wide(y + kPanel, load_wide(sums2));
      return;
    }
    put_row(a, row, panel, sums);
    if (panel + 1 < end) put_row(a, row, panel + 1, sums2);
  }
};

void many_amx(const AmxRows& x, int64_t first, int64_t last, int64_t begin, int64_t end) {
  const PutRows put(*x.args, end);
  Pairs<PutRows> pairs(x, put);
  for (int64_t p = begin; p < end; p += 2)
    pairs.multiply(first, last, {p, x.panel(p), x.panel(p + 1 < end ? p + 1 : p), x.panel(p + 2), x.panel(p + 3)});
  pairs.finish();
}

struct PutGatedRows {
  const LinearArgs& a;
  octavo::Activation kind;
  int64_t twin;
  OCTAVO_INLINE void ask(int64_t row, int64_t panel) const {
    if (a.y_tiles)
      __builtin_prefetch(in_tiles(a.y, a.n / 2, row, panel), 1, 3);
    else
      __builtin_prefetch((const float*)a.y + row * a.ldy + panel * kPanel, 1, 3);
  }
  OCTAVO_INLINE void put(int64_t row, int64_t panel, const float* sums, const float* up) const {
    put_gated_row(a, kind, row, panel, twin, sums, up);
  }
};

void many_gated_amx(const AmxRows& x, int64_t first, int64_t last, int64_t begin, int64_t end, int64_t twin,
                    octavo::Activation kind) {
  const PutGatedRows put{*x.args, kind, twin};
  Pairs<PutGatedRows> pairs(x, put);
  for (int64_t p = begin; p < end; ++p)
    pairs.multiply(first, last, {p, x.panel(p), x.panel(p + twin), x.panel(p + 1), x.panel(p + 1 + twin)});
  pairs.finish();
}

// Calls run(rows) with the rounded rows of x. False: out of memory.
template <class F>
bool with_tiles(const LinearArgs& a, const F& run) {
  AmxRows x = {&a, (bf16*)a.x, a.k / kStepInputs, (a.m + 15) / 16};
  if (a.x_tiles) {
    run(x);
    return true;
  }
  x.tiles = (bf16*)scratch().take((size_t)(x.blocks * x.steps * kTileNumbers) * sizeof(bf16));
  if (!x.tiles) return false;
  switch (a.x_type) {
    case DType::f32: round_rows<float>(x); break;
    case DType::bf16: round_rows<bf16>(x); break;
    case DType::f16: round_rows<f16>(x); break;
  }
  run(x);
  return true;
}

// Panels of a run, an even number: so that threads get the same number of them, as near as it can be.
int64_t even_run(int64_t panels, bool threaded) {
  const int64_t threads = threaded ? omp_get_max_threads() : 1;
  int64_t best = 8, least_share = INT64_MAX;
  for (int64_t length = 12; length >= 4; length -= 2) {
    const int64_t runs = (panels + length - 1) / length, share = (runs + threads - 1) / threads * length;
    if (share < least_share) best = length, least_share = share;
  }
  return best;
}

// run(first block, last block, first panel, last panel) for blocks of rows times runs of `length` panels.
template <class Run>
void share_blocks(const AmxRows& x, int64_t panels, int64_t length, const Run& run) {
  const int64_t fit = kAmxBlockBytes / (x.steps * 1024), room = fit < 2 ? 2 : fit;
  const int64_t parts = (x.blocks + room - 1) / room, runs = (panels + length - 1) / length;
  const int64_t height = (x.blocks + parts - 1) / parts;
  share_out<TileScope>(parts * runs, x.args->threaded, [&](int64_t i) {
    // Rows stay in the second-level cache while all panels pass: those are read again for the next rows, but every run
    // of panels would read all rows again, and it is short.
    const int64_t begin = i % runs * length, first = i / runs * height;
    if (first < x.blocks) run(first, least(x.blocks, first + height), begin, least(panels, begin + length));
  });
}

// Whether inputs of products with weights of `type` are rounded to bfloat16.
bool rounds_inputs_amx(DType type, int64_t k) { return type == DType::bf16 && k % kStepInputs == 0; }

bool linear_amx(const LinearArgs& a) {
  if (!rounds_inputs_amx(a.weight_type, a.k)) return linear(a);
  const int64_t panels = (a.n + kPanel - 1) / kPanel, run = octavo::panels_of_a_run(a.m, a.k, a.weight_type);
  return with_tiles(a, [&](const AmxRows& x) {
    if (a.m <= kAmxColumn) {
      share_out<TileScope>((panels + run - 1) / run, a.threaded,
                           [&](int64_t i) { few_amx(x, i * run, least(panels, (i + 1) * run)); });
    } else {
      const int64_t length = a.best ? run : even_run(panels, a.threaded);
      share_blocks(x, panels, length, [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
        many_amx(x, first, last, begin, end);
      });
    }
  });
}

bool gated_linear_amx(const LinearArgs& a, octavo::Activation kind) {
  if (!rounds_inputs_amx(a.weight_type, a.k)) return gated_linear(a, kind);
  if (a.n % (2 * kPanel) || (a.y_tiles && a.n % (2 * kStepInputs)) || a.y_type != DType::f32 || a.best) return false;
  const int64_t twin = a.n / kPanel / 2;
  return with_tiles(a, [&](const AmxRows& x) {
    if (a.m <= kAmxColumn) {
      share_out<TileScope>((twin + 3) / 4, a.threaded,
                           [&](int64_t i) { few_gated(x, i * 4, least(twin, (i + 1) * 4), twin, kind); });
    } else {
      share_blocks(x, twin, 4, [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
        many_gated_amx(x, first, last, begin, end, twin, kind);
      });
    }
  });
}

}  // namespace
