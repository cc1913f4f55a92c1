// Quantised panels (layout in kernels.h): putting a row's codes and scales into their places, reading rows back, and
// unpacking units for products. Included by each instruction set's file.
#pragma once

#include "kernels.h"
#include "panels.h"
#include "register_tile.h"
#include "simd.h"

namespace {

using octavo::kUnit;
using octavo::QuantizedFormat;
using octavo::Scales;

typedef uint16_t vecw __attribute__((vector_size(sizeof(vec))));  // 16-bit words

OCTAVO_INLINE int middle_of(int bits) { return bits == 4 ? 8 : bits == 5 ? 16 : 0; }

OCTAVO_INLINE int64_t group_bytes(const QuantizedFormat& f) {
  return octavo::header_bytes(f.scales) + f.group / kUnit * octavo::unit_bytes(f.bits);
}

// Unit number `u` of a panel, and those after it.
struct UnitPlace {
  const uint8_t *header, *unit;
  int64_t sub;  // within its group
  OCTAVO_INLINE UnitPlace(const uint8_t* panel, const QuantizedFormat& f, int64_t u) {
    const int64_t per = f.group / kUnit;
    header = panel + u / per * group_bytes(f), sub = u % per;
    unit = header + octavo::header_bytes(f.scales) + sub * octavo::unit_bytes(f.bits);
  }
  OCTAVO_INLINE void next(const QuantizedFormat& f) {
    unit += octavo::unit_bytes(f.bits);
    if (++sub * kUnit < f.group) return;
    header = unit, unit += octavo::header_bytes(f.scales), sub = 0;
  }
};

// ---- One row in, one row out ----------------------------------------------------------------------------------------

// Bytes of a code outside of panels.
OCTAVO_INLINE int64_t code_bytes(int bits) { return bits == 16 ? 2 : 1; }

// 32 codes of output j into their places in a unit.
OCTAVO_INLINE void put_unit(uint8_t* unit, int bits, int64_t j, const uint8_t* c) {
  if (bits == 16) {
    for (int p = 0; p < 16; ++p) memcpy(unit + p * 64 + 4 * j, c + 4 * p, 4);
    return;
  }
  if (bits == 8) {
    for (int p = 0; p < 16; ++p) unit[p * 32 + 2 * j] = c[2 * p], unit[p * 32 + 2 * j + 1] = c[2 * p + 1];
    return;
  }
  uint8_t* at = unit + 4 * j;
  for (int i = 0; i < 16; ++i) at[i / 4 * 64 + i % 4] = (uint8_t)((c[i] & 15) | c[i + 16] << 4);
  for (int i = 0; i < 4 && bits == 5; ++i) {
    unsigned high = 0;
    for (int q = 0; q < 8; ++q) high |= (unsigned)(c[4 * q + i] >> 4 & 1) << q;
    at[256 + i] = (uint8_t)high;
  }
  for (int i = 0; i < 8 && bits == 6; ++i) {
    unsigned high = 0;
    for (int q = 0; q < 4; ++q) high |= (unsigned)(c[i / 4 * 16 + 4 * q + i % 4] >> 4 & 3) << 2 * q;
    at[256 + i / 4 * 64 + i % 4] = (uint8_t)high;
  }
}

OCTAVO_INLINE void get_unit(const uint8_t* unit, int bits, int64_t j, uint8_t* c) {
  if (bits == 16) {
    for (int p = 0; p < 16; ++p) memcpy(c + 4 * p, unit + p * 64 + 4 * j, 4);
    return;
  }
  if (bits == 8) {
    for (int p = 0; p < 16; ++p) c[2 * p] = unit[p * 32 + 2 * j], c[2 * p + 1] = unit[p * 32 + 2 * j + 1];
    return;
  }
  const uint8_t* at = unit + 4 * j;
  for (int i = 0; i < kUnit; ++i) {
    const int quad = i / 4;
    unsigned code = at[quad % 4 * 64 + i % 4] >> quad / 4 * 4 & 15;
    if (bits == 5) code |= (at[256 + i % 4] >> quad & 1) << 4;
    if (bits == 6) code |= (at[256 + quad / 4 * 64 + i % 4] >> quad % 4 * 2 & 3) << 4;
    c[i] = (uint8_t)code;
  }
}

// The codes [k] of one row of a weight; whatever follows in the last unit is padding that meets zeros.
void put_codes(const QuantizedFormat& f, char* panels, int64_t row, int64_t k, const uint8_t* codes) {
  uint8_t* at = (uint8_t*)panels + row / kPanel * octavo::panel_bytes(f, k);
  const int64_t per = f.group / kUnit, units = octavo::units_of(k), bytes = code_bytes(f.bits);
  for (int64_t u = 0; u < units; ++u) {
    uint8_t* unit = at + u / per * group_bytes(f) + octavo::header_bytes(f.scales) + u % per * octavo::unit_bytes(f.bits);
    if ((u + 1) * kUnit <= k) {
      put_unit(unit, f.bits, row % kPanel, codes + u * kUnit * bytes);
    } else {
      uint8_t last[2 * kUnit] = {};
      memcpy(last, codes + u * kUnit * bytes, (size_t)((k - u * kUnit) * bytes));
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

OCTAVO_INLINE float word_at(const uint8_t* p) {
  int16_t word;
  memcpy(&word, p, 2);
  return (float)word;
}

// The numbers of a row, rounded as the definition rounds them (kernels/quantized_weights.py, and GGUF's for k_*).
void get_row(const QuantizedFormat& f, const char* panels, int64_t row, int64_t k, float* out) {
  const int64_t j = row % kPanel, per = f.group / kUnit;
  for (int64_t u = 0; u < octavo::units_of(k); ++u) {
    const uint8_t* header = header_of(f, (void*)panels, row, k, u / per);
    uint8_t c[2 * kUnit];
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
      const float code = f.bits == 16 ? word_at(c + 2 * i) : f.bits == 8 ? (float)(int8_t)c[i] : (float)c[i];
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

// ---- Units in registers ---------------------------------------------------------------------------------------------

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

// Pair P of a unit of eight-bit codes, part v of the panel: signed 16-bit words, two inputs of an output side by side.
template <int P>
OCTAVO_INLINE veci pair_codes(const uint8_t* unit, int v) {
  return (veci)widen_bytes(unit + P * 32 + v * ((int)sizeof(vec) / 2));
}

// Four Q of a unit of narrower codes: unsigned bytes, four inputs of an output side by side.
template <int Bits, int Q>
OCTAVO_INLINE veci quad_codes(const uint8_t* unit, int v) {
  constexpr int kBytes = sizeof(vec);
  vecw w = words_at(unit + Q % 4 * 64 + v * kBytes) >> (Q / 4 * 4) & (uint16_t)0x0F0F;
  if constexpr (Bits == 5) {
    const vecw high = words_at(unit + 256 + v * kBytes);
    w |= (Q < 4 ? high << (Q < 4 ? 4 - Q : 0) : high >> (Q < 4 ? 0 : Q - 4)) & (uint16_t)0x1010;
  }
  if constexpr (Bits == 6) {
    constexpr int kAt = Q % 4 * 2;
    const vecw high = words_at(unit + 256 + Q / 4 * 64 + v * kBytes);
    w |= (kAt < 4 ? high << (kAt < 4 ? 4 - kAt : 0) : high >> (kAt < 4 ? 0 : kAt - 4)) & (uint16_t)0x3030;
  }
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
#if defined(OCTAVO_WIDE)
OCTAVO_INLINE vec bytes_at(const uint8_t* p, int) { return join_halves(eight_bytes(p), eight_bytes(p + 8)); }
#else
OCTAVO_INLINE vec bytes_at(const uint8_t* p, int v) { return eight_bytes(p + 8 * v); }
#endif

// Middle of the codes as products take them, left out of a sum from its start; what zeros are beyond it is an offset.
template <int Bits, Scales S>
constexpr int kCentre = Bits == 6 ? 32 : Bits == 5 ? 16 : Bits == 4 && (S == Scales::half || S == Scales::wide) ? 8 : 0;

// Factor of unit `sub` of a group (k_signed: the group's, without that of half a unit).
template <Scales S>
OCTAVO_INLINE vec factor_at(const uint8_t* header, int64_t sub, int v) {
  if constexpr (S == Scales::wide || S == Scales::wide_zero) return load_wide((const float*)header + v * kLanes);
  if constexpr (S == Scales::k_min) return halves_at(header, v) * bytes_at(header + 64 + sub * 16, v);
  return halves_at(header, v);
}

// What is subtracted per unit of summed inputs.
template <Scales S>
constexpr bool kHasOffset = S != Scales::half && S != Scales::wide && S != Scales::k_signed;
template <int Bits, Scales S>
OCTAVO_INLINE vec offset_at(const uint8_t* header, int64_t sub, int v) {
  if constexpr (S == Scales::half_zero) return halves_at(header, v) * bytes_at(header + 32, v);
  if constexpr (S == Scales::half_fine)
    return halves_at(header, v) * (bytes_at(header + 32, v) * splat_wide(1.0f / 16));
  if constexpr (S == Scales::wide_zero)
    return load_wide((const float*)header + v * kLanes) * load_wide((const float*)(header + 64) + v * kLanes);
  const vec low = halves_at(header + 32, v) * bytes_at(header + 192 + sub * 16, v);  // k_min
  if constexpr (kCentre<Bits, S> == 0) return low;
  return low - factor_at<S>(header, sub, v) * splat_wide(kCentre<Bits, S>);
}

// k_signed: the factors of half `h` of unit `sub`, twice in a lane, as 16-bit integers.
OCTAVO_INLINE veci half_factors_at(const uint8_t* header, int64_t sub, int h, int v) {
  const uint8_t* p = header + 32 + (2 * sub + h) * 16 + v * kLanes;
#if defined(__AVX512F__) && defined(OCTAVO_WIDE)
  const veci w = (veci)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__) && !defined(OCTAVO_WIDE)
  const veci w = (veci)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  veci w;
  for (int i = 0; i < kLanes; ++i) w[i] = (int8_t)p[i];
#endif
  return (w & 0xFFFF) | w << 16;
}

}  // namespace
