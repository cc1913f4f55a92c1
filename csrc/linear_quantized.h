// y = x W^T + b over quantised panels. Included by each instruction set's file, after linear.h.
//
// What the inputs are rounded to is decided by the format of the weight alone, never by the data: codes of eight bits
// meet 16-bit integers (linear_words.h), so do fixed-point weights of fourteen (linear_fixed.h), narrower ones meet bytes
// (linear_bytes.h). Here the panels are shared out.
//
// Invariant: a row's sums are the same however many rows there are, and whatever they are cut into.
#pragma once

#include "linear_bytes.h"
#include "linear_fixed.h"
#include "linear_words.h"

namespace {

#if defined(__AVX2__)
constexpr bool kStraight = true;
#else
constexpr bool kStraight = false;  // portable code is bound by arithmetic, so one form will do
#endif

// Panels [begin, end) times all rows, of which there are at most Products::kStraightRows.
template <class Products>
void straight_range(const LinearArgs& a, const QuantizedFormat& f, const Products& by, int64_t begin, int64_t end) {
  for (int64_t p = begin; p < end; ++p) {
    switch (a.m) {
      case 1: by.template straight<1>(a, f, p); break;
      case 2: by.template straight<2>(a, f, p); break;
      case 3: by.template straight<3>(a, f, p); break;
      case 4: by.template straight<4>(a, f, p); break;
      default: by.template straight<Products::kStraightRows>(a, f, p);
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

// False: out of memory.
template <class Products>
bool quantized_tasks(const LinearArgs& a, const QuantizedFormat& f) {
  Products by{};
  void* memory = by.prepare(a, f);
  if (!memory) return false;
  const int64_t panels = (a.n + kPanel - 1) / kPanel, run = octavo::panels_of_a_run(a.m, a.k, a.weight_type);
  const int64_t task = panels_of_a_task(a, f, panels, run), tasks = (panels + task - 1) / task;
  const int64_t blocks = (a.m + kRowBlock - 1) / kRowBlock;
#pragma omp parallel for schedule(dynamic, 1) if (a.threaded && blocks * tasks > 1)
  for (int64_t i = 0; i < blocks * tasks; ++i) {
    const int64_t begin = i / blocks * task, end = least(panels, begin + task);
    const int64_t row = a.m * (i % blocks) / blocks, rows = a.m * (i % blocks + 1) / blocks - row;
    if constexpr (kStraight) {
      if (a.m <= Products::kStraightRows) {
        straight_range(a, f, by, begin, end);
        continue;
      }
    }
    for (int64_t p = begin; p < end; ++p) by.many(a, f, row, rows, p);
  }
  free(memory);
  return true;
}

// run.words<scales>() for codes of eight bits, run.bytes<bits, scales>() for narrower ones.
template <class Run>
bool of_format(const QuantizedFormat& f, const Run& run) {
  switch (f.bits * 8 + (int)f.scales) {
    case 8 * 8 + (int)Scales::half: return run.template words<Scales::half>();
    case 8 * 8 + (int)Scales::wide: return run.template words<Scales::wide>();
    case 8 * 8 + (int)Scales::wide_zero: return run.template words<Scales::wide_zero>();
    case 4 * 8 + (int)Scales::half: return run.template bytes<4, Scales::half>();
    case 4 * 8 + (int)Scales::half_zero: return run.template bytes<4, Scales::half_zero>();
    case 4 * 8 + (int)Scales::half_fine: return run.template bytes<4, Scales::half_fine>();
    case 4 * 8 + (int)Scales::wide: return run.template bytes<4, Scales::wide>();
    case 4 * 8 + (int)Scales::wide_zero: return run.template bytes<4, Scales::wide_zero>();
    case 4 * 8 + (int)Scales::k_min: return run.template bytes<4, Scales::k_min>();
    case 5 * 8 + (int)Scales::half: return run.template bytes<5, Scales::half>();
    case 5 * 8 + (int)Scales::k_min: return run.template bytes<5, Scales::k_min>();
    default: return run.template bytes<6, Scales::k_signed>();
  }
}

struct OnVectors {
  const LinearArgs& a;
  const QuantizedFormat& f;
  template <Scales S>
  bool words() const { return quantized_tasks<WordProducts<S>>(a, f); }
  template <int Bits, Scales S>
  bool bytes() const { return quantized_tasks<ByteProducts<Bits, S>>(a, f); }
};

// a.weight_type: any; it only says how many panels make a run.
bool quantized_linear(const LinearArgs& a, const QuantizedFormat& f) {
  return f.bits == 16 ? fixed_linear(a) : of_format(f, OnVectors{a, f});
}

}  // namespace
