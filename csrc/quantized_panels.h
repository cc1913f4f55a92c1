// Quantised panels (layout in kernels.h): putting a row's codes and scales into their places, reading rows back, and
// unpacking units into 16-bit pairs for products. Included by each instruction set's file.
#pragma once

#include "kernels.h"
#include "panels.h"
#include "register_tile.h"
#include "simd.h"

namespace {

using octavo::kUnit;
using octavo::QuantizedFormat;
using octavo::Scales;

typedef uint16_t vecw __attribute__((vector_size(sizeof(vec))));  // 16-bit words: pairs of codes

template <int Bits>
constexpr int kMiddle = Bits == 4 ? 8 : Bits == 5 ? 16 : 0;
OCTAVO_INLINE int middle_of(int bits) { return bits == 4 ? 8 : bits == 5 ? 16 : 0; }

OCTAVO_INLINE int64_t group_bytes(const QuantizedFormat& f) {
  return octavo::header_bytes(f.scales) + f.group / kUnit * octavo::unit_bytes(f.bits);
}

// ---- One row in, one row out ----------------------------------------------------------------------------------------

OCTAVO_INLINE void put_word(uint8_t* at, unsigned word) {
  const uint16_t w = (uint16_t)word;
  memcpy(at, &w, 2);
}
OCTAVO_INLINE unsigned word_at(const uint8_t* at) {
  uint16_t w;
  memcpy(&w, at, 2);
  return w;
}

// 32 codes of output j into their places in a unit.
OCTAVO_INLINE void put_unit(uint8_t* unit, int bits, int64_t j, const uint8_t* c) {
  if (bits == 8) {
    for (int p = 0; p < 16; ++p) unit[p * 32 + 2 * j] = c[2 * p], unit[p * 32 + 2 * j + 1] = c[2 * p + 1];
    return;
  }
  for (int e = 0; e < 2; ++e, ++c) {
    uint8_t* at = unit + (2 * j + e) * 2;
    for (int q = 0; q < 4; ++q) {
      unsigned word = 0;
      for (int i = 0; i < 4; ++i) word |= (unsigned)(c[8 * q + 2 * i] & 15) << 4 * i;
      put_word(at + q * 64, word);
    }
    unsigned high = 0;
    if (bits == 5) {
      for (int p = 0; p < 16; ++p) high |= (unsigned)(c[2 * p] >> 4 & 1) << p;
      put_word(at + 256, high);
    } else if (bits == 6) {
      for (int b = 0; b < 2; ++b, high = 0) {
        for (int p = 0; p < 8; ++p) high |= (unsigned)(c[16 * b + 2 * p] >> 4 & 3) << 2 * p;
        put_word(at + 256 + b * 64, high);
      }
    }
  }
}

OCTAVO_INLINE void get_unit(const uint8_t* unit, int bits, int64_t j, uint8_t* c) {
  if (bits == 8) {
    for (int p = 0; p < 16; ++p) c[2 * p] = unit[p * 32 + 2 * j], c[2 * p + 1] = unit[p * 32 + 2 * j + 1];
    return;
  }
  for (int e = 0; e < 2; ++e, ++c) {
    const uint8_t* at = unit + (2 * j + e) * 2;
    for (int p = 0; p < 16; ++p) {
      unsigned code = word_at(at + p / 4 * 64) >> p % 4 * 4 & 15;
      if (bits == 5) code |= (word_at(at + 256) >> p & 1) << 4;
      if (bits == 6) code |= (word_at(at + 256 + p / 8 * 64) >> p % 8 * 2 & 3) << 4;
      c[2 * p] = (uint8_t)code;
    }
  }
}

// The codes [k] of one row of a weight; whatever follows in the last unit is padding that meets zeros.
void put_codes(const QuantizedFormat& f, char* panels, int64_t row, int64_t k, const uint8_t* codes) {
  uint8_t* at = (uint8_t*)panels + row / kPanel * octavo::panel_bytes(f, k);
  const int64_t per = f.group / kUnit, units = octavo::units_of(k);
  for (int64_t u = 0; u < units; ++u) {
    uint8_t* unit = at + u / per * group_bytes(f) + octavo::header_bytes(f.scales) + u % per * octavo::unit_bytes(f.bits);
    if ((u + 1) * kUnit <= k) {
      put_unit(unit, f.bits, row % kPanel, codes + u * kUnit);
    } else {
      uint8_t last[kUnit] = {};
      memcpy(last, codes + u * kUnit, (size_t)(k - u * kUnit));
      put_unit(unit, f.bits, row % kPanel, last);
    }
  }
}

OCTAVO_INLINE uint8_t* header_of(const QuantizedFormat& f, void* panels, int64_t row, int64_t k, int64_t group) {
  return (uint8_t*)panels + row / kPanel * octavo::panel_bytes(f, k) + group * group_bytes(f);
}

// Scale and zero of one group (any header but those of k_min and k_signed).
void put_scale(const QuantizedFormat& f, void* panels, int64_t row, int64_t k, int64_t group, float scale, float zero) {
  uint8_t* at = header_of(f, panels, row, k, group);
  const int64_t j = row % kPanel;
  if (f.scales == Scales::half || f.scales == Scales::half_zero || f.scales == Scales::half_fine) {
    f16 half;
    narrow(scale, &half);
    memcpy(at + 2 * j, &half, 2);
    if (f.scales == Scales::half_zero) at[32 + j] = (uint8_t)zero;
    if (f.scales == Scales::half_fine) at[32 + j] = (uint8_t)(zero * 16);
  } else {
    memcpy(at + 4 * j, &scale, 4);
    if (f.scales == Scales::wide_zero) memcpy(at + 64 + 4 * j, &zero, 4);
  }
}

void pack_codes(const octavo::PackCodesArgs& a) {
  const int64_t given = (a.k + a.group_size - 1) / a.group_size, groups = (a.k + a.format.group - 1) / a.format.group;
  for (int64_t r = 0; r < a.count; ++r) {
    put_codes(a.format, (char*)a.panels, a.first + r, a.k, a.codes + r * a.k);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t from = r * given + g * a.format.group / a.group_size;
      put_scale(a.format, a.panels, a.first + r, a.k, g, a.scales[from], a.zeros ? a.zeros[from] : 0);
    }
  }
}

// The numbers of a row, rounded as the definition rounds them (kernels/quantized_weights.py, and GGUF's for k_*).
void get_row(const QuantizedFormat& f, const char* panels, int64_t row, int64_t k, float* out) {
  const int64_t j = row % kPanel, per = f.group / kUnit;
  for (int64_t u = 0; u < octavo::units_of(k); ++u) {
    const uint8_t* header = header_of(f, (void*)panels, row, k, u / per);
    uint8_t c[kUnit];
    get_unit(header + octavo::header_bytes(f.scales) + u % per * octavo::unit_bytes(f.bits), f.bits, j, c);
    f16 d, low;
    float scale, zero = (float)middle_of(f.bits);
    memcpy(&d, header + 2 * j, 2), memcpy(&low, header + 32 + 2 * j, 2);
    if (f.scales == Scales::wide || f.scales == Scales::wide_zero)
      memcpy(&scale, header + 4 * j, 4);
    else
      scale = widen(d);
    if (f.scales == Scales::half_zero) zero = (float)header[32 + j];
    if (f.scales == Scales::half_fine) zero = (float)header[32 + j] / 16;
    if (f.scales == Scales::wide_zero) memcpy(&zero, header + 64 + 4 * j, 4);
    const int64_t count = least(kUnit, k - u * kUnit), sub = u % per;
    for (int64_t i = 0; i < count; ++i, ++out) {
      const float code = f.bits == 8 ? (float)(int8_t)c[i] : (float)c[i];
      if (f.scales == Scales::k_min)
        *out = scale * (float)header[64 + sub * 16 + j] * code - widen(low) * (float)header[192 + sub * 16 + j];
      else if (f.scales == Scales::k_signed)
        *out = scale * (float)(int8_t)header[32 + (2 * sub + i / 16) * 16 + j] * (code - 32);
      else
        *out = scale * (code - zero);
    }
  }
}

void unpack_codes(const void* panels, const QuantizedFormat& f, int64_t k, const int64_t* ids, int64_t count, void* out,
                  DType type) {
  float* wide = type == DType::f32 ? nullptr : (float*)malloc((size_t)k * sizeof(float));
  for (int64_t r = 0; r < count; ++r) {
    if (type == DType::f32) {
      get_row(f, (const char*)panels, ids[r], k, (float*)out + r * k);
      continue;
    }
    get_row(f, (const char*)panels, ids[r], k, wide);
    for (int64_t i = 0; i < k; ++i) {
      if (type == DType::bf16) narrow(wide[i], (bf16*)out + r * k + i);
      else narrow(wide[i], (f16*)out + r * k + i);
    }
  }
  free(wide);
}

// ---- Units as 16-bit pairs ------------------------------------------------------------------------------------------

OCTAVO_INLINE vecw words_at(const uint8_t* p) {
  vecw v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Sixteen (or thirty-two) signed bytes as 16-bit words.
OCTAVO_INLINE vecw widen_bytes(const uint8_t* p) {
#if defined(OCTAVO_WIDE) && defined(__AVX512BW__)
  return (vecw)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif !defined(OCTAVO_WIDE) && defined(__AVX2__)
  return (vecw)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
  vecw v;
  for (int i = 0; i < (int)(sizeof(vec) / 2); ++i) v[i] = (uint16_t)(int16_t)(int8_t)p[i];
  return v;
#endif
}

// Pair P of a unit, part V of the panel: codes as signed 16-bit words, two inputs of an output side by side.
template <int Bits, bool Centred, int P>
OCTAVO_INLINE veci pair_codes(const uint8_t* unit, int v) {
  constexpr int kBytes = sizeof(vec);
  if constexpr (Bits == 8) return (veci)widen_bytes(unit + P * 32 + v * (kBytes / 2));
  vecw w = words_at(unit + P / 4 * 64 + v * kBytes) >> (P % 4 * 4);
  if constexpr (P % 4 != 3) w &= (uint16_t)15;
  if constexpr (Bits == 5) {
    const vecw high = words_at(unit + 256 + v * kBytes);
    w |= (P < 4 ? high << (P < 4 ? 4 - P : 0) : high >> (P < 4 ? 0 : P - 4)) & (uint16_t)16;
  }
  if constexpr (Bits == 6) {
    constexpr int kAt = P % 8 * 2;
    const vecw high = words_at(unit + 256 + P / 8 * 64 + v * kBytes);
    w |= (kAt < 4 ? high << (kAt < 4 ? 4 - kAt : 0) : high >> (kAt < 4 ? 0 : kAt - 4)) & (uint16_t)48;
  }
  if constexpr (Centred) w -= (uint16_t)32;
  return (veci)w;
}

// Sixteen bytes or halves of a header as floats, the part v of them.
OCTAVO_INLINE vec halves_at(const uint8_t* p, int v) { return load_wide((const f16*)p + v * kLanes); }
OCTAVO_INLINE f8 eight_bytes(const uint8_t* p) {
#if defined(__AVX2__)
  return (f8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  f8 r;
  for (int i = 0; i < 8; ++i) r[i] = (float)p[i];
  return r;
#endif
}
OCTAVO_INLINE f8 eight_signed(const uint8_t* p) {
#if defined(__AVX2__)
  return (f8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  f8 r;
  for (int i = 0; i < 8; ++i) r[i] = (float)(int8_t)p[i];
  return r;
#endif
}
#if defined(OCTAVO_WIDE)
OCTAVO_INLINE vec bytes_at(const uint8_t* p, int) { return Halves{.half = {eight_bytes(p), eight_bytes(p + 8)}}.whole; }
OCTAVO_INLINE vec signed_at(const uint8_t* p, int) { return Halves{.half = {eight_signed(p), eight_signed(p + 8)}}.whole; }
#else
OCTAVO_INLINE vec bytes_at(const uint8_t* p, int v) { return eight_bytes(p + 8 * v); }
OCTAVO_INLINE vec signed_at(const uint8_t* p, int v) { return eight_signed(p + 8 * v); }
#endif

// Factor of unit `sub` of a group (half `h` of it for k_signed), and what is subtracted per unit of summed inputs.
template <Scales S>
OCTAVO_INLINE vec factor_at(const uint8_t* header, int64_t sub, int h, int v) {
  if constexpr (S == Scales::half || S == Scales::half_zero || S == Scales::half_fine) return halves_at(header, v);
  if constexpr (S == Scales::wide || S == Scales::wide_zero) return load_wide((const float*)header + v * kLanes);
  if constexpr (S == Scales::k_min) return halves_at(header, v) * bytes_at(header + 64 + sub * 16, v);
  return halves_at(header, v) * signed_at(header + 32 + (2 * sub + h) * 16, v);
}
template <Scales S>
OCTAVO_INLINE vec offset_at(const uint8_t* header, int64_t sub, int v) {
  if constexpr (S == Scales::half_fine)
    return halves_at(header, v) * (bytes_at(header + 32, v) * splat_wide(1.0f / 16));
  if constexpr (S == Scales::wide_zero)
    return load_wide((const float*)header + v * kLanes) * load_wide((const float*)(header + 64) + v * kLanes);
  return halves_at(header + 32, v) * bytes_at(header + 192 + sub * 16, v);  // k_min
}
template <Scales S>
constexpr bool kHasOffset = S == Scales::half_fine || S == Scales::wide_zero || S == Scales::k_min;  // others: integers
template <int Bits, Scales S>
constexpr bool kHasMiddle = kMiddle<Bits> != 0 && (S == Scales::half || S == Scales::wide);

// Sixteen bytes of a header as integers, the part v of them.
OCTAVO_INLINE veci whole_bytes_at(const uint8_t* p, int v) {
#if defined(__AVX512F__) && defined(OCTAVO_WIDE)
  return (veci)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(p + kLanes * v)));
#elif defined(__AVX2__) && !defined(OCTAVO_WIDE)
  return (veci)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * v)));
#else
  veci r;
  for (int i = 0; i < kLanes; ++i) r[i] = p[kLanes * v + i];
  return r;
#endif
}

}  // namespace
