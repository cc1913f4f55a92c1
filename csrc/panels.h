// The layout of packed weights (kPanel in kernels.h): where an element lies, filling panels from rows, reading rows back.
// Included by each instruction set's file.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using octavo::DType;
using octavo::kPanel;

OCTAVO_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Where the weight from input i to output j of a panel lies, in elements from the panel's start.
template <class W>
OCTAVO_INLINE int64_t place(int64_t i, int64_t j) { return i * kPanel + j; }
template <>
OCTAVO_INLINE int64_t place<bf16>(int64_t i, int64_t j) { return (i / 2 * kPanel + j) * 2 + i % 2; }

template <class W>
OCTAVO_INLINE int64_t panel_size(int64_t k) {
  return (__is_same(W, bf16) ? (k + 1) / 2 * 2 : k) * kPanel;
}

// to[i][j] = from[j][i] for 8 x 8 words of four bytes; rows lie `from_bytes` and `to_bytes` apart.
OCTAVO_INLINE void transpose8(const char* from, int64_t from_bytes, char* to, int64_t to_bytes) {
  i8 a[8], b[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) memcpy(a + j, from + j * from_bytes, sizeof(i8));
#pragma GCC unroll 4
  for (int j = 0; j < 8; j += 2) {
    b[j] = __builtin_shuffle(a[j], a[j + 1], i8{0, 8, 1, 9, 4, 12, 5, 13});
    b[j + 1] = __builtin_shuffle(a[j], a[j + 1], i8{2, 10, 3, 11, 6, 14, 7, 15});
  }
#pragma GCC unroll 2
  for (int j = 0; j < 8; j += 4) {
    a[j] = __builtin_shuffle(b[j], b[j + 2], i8{0, 1, 8, 9, 4, 5, 12, 13});
    a[j + 1] = __builtin_shuffle(b[j], b[j + 2], i8{2, 3, 10, 11, 6, 7, 14, 15});
    a[j + 2] = __builtin_shuffle(b[j + 1], b[j + 3], i8{0, 1, 8, 9, 4, 5, 12, 13});
    a[j + 3] = __builtin_shuffle(b[j + 1], b[j + 3], i8{2, 3, 10, 11, 6, 7, 14, 15});
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = __builtin_shuffle(a[i], a[i + 4], i8{0, 1, 2, 3, 8, 9, 10, 11});
    b[i + 4] = __builtin_shuffle(a[i], a[i + 4], i8{4, 5, 6, 7, 12, 13, 14, 15});
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) memcpy(to + i * to_bytes, b + i, sizeof(i8));
}

// A panel of 16 rows, eight words of four bytes at a time; returns how many inputs that were.
template <class W>
OCTAVO_INLINE int64_t pack_words(const W* rows, int64_t stride, int64_t k, W* panel) {
  if (__is_same(W, f16)) return 0;  // their places are two bytes wide
  constexpr int64_t kWord = 4, kBytes = kWord * kPanel;
  const int64_t words = k * (int64_t)sizeof(W) / kWord / 8 * 8, row = stride * (int64_t)sizeof(W);
  for (int64_t i = 0; i < words; i += 8) {
    const char* from = (const char*)rows + i * kWord;
    char* to = (char*)panel + i * kBytes;
    transpose8(from, row, to, kBytes);
    transpose8(from + 8 * row, row, to + 8 * kWord, kBytes);
  }
  return words * kWord / (int64_t)sizeof(W);
}

// Rows [first, first + count) of a weight into their places; rows beyond `n` of the last panel and the odd input that a
// pair lacks become zeros.
template <class W>
void pack_rows_typed(const W* weight, int64_t stride, int64_t first, int64_t count, int64_t n, int64_t k, W* panels) {
  constexpr int64_t kPart = 64;  // so that the part of the panel being filled stays in the first-level cache
  const int64_t last = first + count == n ? (n + kPanel - 1) / kPanel * kPanel : first + count;
  const int64_t depth = panel_size<W>(k) / kPanel;
  for (int64_t from = first; from < last;) {
    const int64_t to = least(last, (from / kPanel + 1) * kPanel);
    W* panel = panels + from / kPanel * panel_size<W>(k);
    const bool whole = to - from == kPanel && to <= n;
    const int64_t done = whole ? pack_words(weight + (from - first) * stride, stride, k, panel) : 0;
    for (int64_t start = done; start < depth; start += kPart) {
      const int64_t end = least(depth, start + kPart), full = least(k, end);
      for (int64_t row = from; row < to; ++row) {
        const int64_t j = row % kPanel;
        const W* source = weight + (row - first) * stride;
        int64_t i = row < n ? start : end;
        for (; i < full; ++i) panel[place<W>(i, j)] = source[i];
        for (i = row < n ? i : start; i < end; ++i) memset(panel + place<W>(i, j), 0, sizeof(W));
      }
    }
    from = to;
  }
}

template <class W, class Out>
void unpack(const W* panels, int64_t k, const int64_t* ids, int64_t count, Out* out) {
  for (int64_t r = 0; r < count; ++r) {
    const W* from = panels + ids[r] / kPanel * panel_size<W>(k);
    const int64_t j = ids[r] % kPanel;
    for (int64_t i = 0; i < k; ++i) narrow(widen(from[place<W>(i, j)]), out + r * k + i);
  }
}

void pack_rows(const void* rows, DType type, int64_t stride, int64_t first, int64_t count, int64_t n, int64_t k,
               void* panels) {
  switch (type) {
    case DType::f32: return pack_rows_typed((const float*)rows, stride, first, count, n, k, (float*)panels);
    case DType::bf16: return pack_rows_typed((const bf16*)rows, stride, first, count, n, k, (bf16*)panels);
    case DType::f16: return pack_rows_typed((const f16*)rows, stride, first, count, n, k, (f16*)panels);
  }
}

template <class W>
void unpack_typed(const void* panels, int64_t k, const int64_t* ids, int64_t count, void* out, DType out_type) {
  switch (out_type) {
    case DType::f32: return unpack((const W*)panels, k, ids, count, (float*)out);
    case DType::bf16: return unpack((const W*)panels, k, ids, count, (bf16*)out);
    case DType::f16: return unpack((const W*)panels, k, ids, count, (f16*)out);
  }
}

void unpack_rows(const void* panels, DType type, int64_t k, const int64_t* ids, int64_t count, void* out,
                 DType out_type) {
  switch (type) {
    case DType::f32: return unpack_typed<float>(panels, k, ids, count, out, out_type);
    case DType::bf16: return unpack_typed<bf16>(panels, k, ids, count, out, out_type);
    case DType::f16: return unpack_typed<f16>(panels, k, ids, count, out, out_type);
  }
}

}  // namespace
