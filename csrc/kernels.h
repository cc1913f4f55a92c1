// The seam between the binding (module.cpp) and the kernels, which are compiled once per instruction set.
//
// Everything here is plain data: a kernel file sees raw pointers and sizes and returns nothing but a status, so one
// more instruction set is one more file that fills one more KernelTable. Kernel files must not instantiate templates
// or inline functions of the standard library: the linker keeps one copy of those, and it could be the copy compiled
// for the wider instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

inline constexpr int element_size(DType t) { return t == DType::f32 ? 4 : 2; }

// Weights are cut into panels of 16 outputs: [ceil(n / 16)][k][16], the last panel padded with zeros. In bfloat16, two
// inputs of an output lie side by side, [ceil(n / 16)][ceil(k / 2)][16][2]: what matrix units and pair-wise products
// load, and what a shift and a mask widen just as well.
inline constexpr int kPanel = 16;
inline constexpr int64_t panel_depth(int64_t k, DType t) { return t == DType::bf16 ? (k + 1) / 2 * 2 : k; }
// Keys are scored in tiles and reduced in segments, both at absolute multiples of these counts from the start of a
// sequence. That fixes the order of every sum whatever the block size, the chunking or the thread count.
inline constexpr int kTile = 64;
inline constexpr int kQuantizedTile = 128;  // of quantised blocks, whose rows are half as long
inline constexpr int kSegment = 256;

// The largest output of a row within a run of panels: the first index of it; a NaN counts as largest.
struct Best {
  float value;
  int32_t index;  // -1: none yet, all were minus infinity
};

// Quantised weights: panels of 16 outputs as above, cut along the inputs into groups that start with a header of scales,
// and within a group into units of 32 inputs. A panel is one run of bytes, read once from front to back.
//
//   panel:  header of group 0, its units, header of group 1, …   (the last group may have fewer units)
//   unit:   bits 16: [16 pairs of inputs][16 outputs][2]  int16, of 14 bits (linear_fixed.h)
//           bits 8:  the same of int8
//           else:   [4][16 outputs][4] bytes, of which byte [b][j][i] holds inputs 4b + i (low four bits) and 16 + 4b + i;
//                   then the higher bits: bits 5: [16][4] bytes, bit q of byte [j][i] for input 4q + i; bits 6: two
//                   blocks of [16][4] bytes, the two bits at 2q of block b for input 16b + 4q + i
//   header: half       f16 scale[16]                                    value = scale * (code - middle)
//           half_zero  f16 scale[16], u8 zero[16]                       value = scale * (code - zero)
//           half_fine  f16 scale[16], u8 zero[16]                       value = scale * (code - zero / 16)
//           wide       f32 scale[16]                                    value = scale * (code - middle)
//           wide_zero  f32 scale[16], f32 zero[16]                      value = scale * (code - zero)
//           k_min      f16 d[16], f16 dmin[16], u8 sub[8][16], u8 low[8][16]   value = d * sub * code - dmin * low
//           k_signed   f16 d[16], i8 sub[16][16]                        value = d * sub * (code - 32), a sub per 16 inputs
// middle: 0 for 8 and 16 bits (codes are signed), 8 for 4, 16 for 5.
inline constexpr int kUnit = 32, kFixedSpan = 128;  // the latter: the group of codes of 16 bits
enum class Scales : int { half = 0, half_zero = 1, wide = 2, wide_zero = 3, k_min = 4, k_signed = 5, half_fine = 6 };
struct QuantizedFormat {
  int bits = 0;  // 0: floats, see DType
  Scales scales = Scales::half;
  int64_t group = kUnit;  // inputs per header, a multiple of kUnit
};
inline constexpr int64_t unit_bytes(int bits) { return int64_t{kUnit} * kPanel * bits / 8; }
inline constexpr int64_t header_bytes(Scales s) {
  switch (s) {
    case Scales::half: return 32;
    case Scales::half_zero:
    case Scales::half_fine: return 48;
    case Scales::wide: return 64;
    case Scales::wide_zero: return 128;
    case Scales::k_min: return 64 + 16 * kPanel;
    default: return 32 + 16 * kPanel;
  }
}
inline constexpr int64_t units_of(int64_t k) { return (k + kUnit - 1) / kUnit; }
inline constexpr int64_t panel_bytes(const QuantizedFormat& f, int64_t k) {
  return (k + f.group - 1) / f.group * header_bytes(f.scales) + units_of(k) * unit_bytes(f.bits);
}

enum class Activation : int { silu = 0, gelu_tanh = 1, gelu = 2 };

struct LinearArgs {
  const void* weight;  // panels, see kPanel
  DType weight_type;
  const float* bias;  // [n] or null
  const void* x;      // [m, k], row stride ldx elements
  DType x_type;
  int64_t ldx;
  void* y;  // [m, n], row stride ldy elements
  DType y_type;
  int64_t ldy;
  int64_t m, n, k;
  bool threaded;
  Best* best;  // not null: nothing is written to y, but the best of each row and run: [argmax_runs(m, n, k, type), m]
  // x, or what a gated product writes to y, as `takes_tiles` describes it; only where it is true of x's (y's) weight.
  bool x_tiles = false, y_tiles = false;
};

// Panels that one thread multiplies in one go for m rows of a weight [n, k]; runs start at multiples of it.
inline constexpr int64_t kFewRows = 48;  // up to this many rows, weights go from memory straight into registers
inline constexpr int64_t panels_of_a_run(int64_t m, int64_t k, DType weight_type) {
  if (m > kFewRows) return 8;
  const int64_t chunk = (int64_t{128} << 10) / (k * kPanel * element_size(weight_type)) & ~int64_t{3};
  return chunk < 4 ? 4 : chunk;  // matrix tiles (AMX) take several panels at once, other products one after the other
}
inline int64_t argmax_runs(int64_t m, int64_t n, int64_t k, DType weight_type) {
  const int64_t panels = (n + kPanel - 1) / kPanel, run = panels_of_a_run(m, k, weight_type);
  return (panels + run - 1) / run;
}

struct Row {  // one sequence of a step
  int32_t query_start, query_len, context_len;
};

// A run of segments of one (row, kv head, tile of queries). slot < 0: the item covers all keys and writes the output.
// Otherwise it stores each segment's (max, sum, accumulator) in scratch, from `slot` on, for a Merge.
struct AttentionItem {
  int32_t row, head, first_query, end_query, first_segment, end_segment;
  int64_t slot;
};

struct Merge {
  int32_t row, head, first_query, end_query, segments;
  int64_t slot;
};

// Where the keys (or values) of a layer lie in a quantised block: bytes, see octavo/core/kv_format.py. bits 0: floats.
struct QuantizedHalf {
  int32_t bits;
  int64_t first, slab, data, scales, multipliers, groups;
};
inline constexpr int kMostQuantizedDim = 512;  // beyond it the 32-bit sums of int4 products could overflow
inline constexpr int64_t groups_of(int64_t head_dim) { return (head_dim + 31) / 32; }

struct AttentionArgs {
  const void* kv;  // this layer's first byte in block 0
  DType kv_type;
  int64_t block_stride, head_stride, value_offset;  // elements
  int64_t num_blocks;
  int32_t block_size, head_dim, num_heads, num_kv_heads;
  float scale, softcap;  // softcap 0: none
  int32_t window;        // 0: none
  const Row* rows;
  const int32_t* table;  // [rows, table_stride]
  int64_t table_stride;
  const void* query;  // [tokens, num_heads, head_dim], token stride query_stride
  int64_t query_stride;
  void* out;  // contiguous
  DType io_type;
  const AttentionItem* items;
  int64_t num_items;
  const Merge* merges;
  int64_t num_merges;
  float* scratch;      // split states: slot * (head_dim + 2) floats from here
  float* work;         // [threads, work_stride], see `attention_work`
  int64_t work_stride;
  int32_t max_rows;  // most query rows (tokens * heads per kv head) of an item
  int threads;
  QuantizedHalf halves[2];  // keys, values; strides above are then bytes
};

// Query rows rounded up to those of a matrix tile.
inline constexpr int64_t whole_rows(int64_t rows) { return (rows + 15) / 16 * 16; }

struct WriteArgs {
  void* kv;  // this layer's first byte in block 0
  DType kv_type;
  int64_t block_stride, head_stride, value_offset;
  int32_t block_size, head_dim, num_kv_heads;
  const int64_t* slots;
  int64_t num_tokens;
  const void *key, *value;
  int64_t key_stride, value_stride;
  DType io_type;
  bool threaded;
  QuantizedHalf halves[2];
};

struct NormArgs {
  const void* x;         // [rows, dim], row stride x_stride
  const void* residual;  // null: plain norm; else the sum x + residual is stored in `sum` and then normalised
  void* sum;
  void* out;  // contiguous
  int64_t x_stride, rows, dim;
  const float* weight;
  float eps;
  DType type;
  bool threaded;
  const float* first = nullptr;  // with a residual: x goes through a norm of this weight before it is added
  bool tiles = false;            // of floats: `out` as products with tiles take it, see `KernelTable::takes_tiles`
};

struct RotaryArgs {
  const void* x;  // [tokens, heads, dim], token stride x_stride
  void* out;      // contiguous
  int64_t x_stride, tokens, heads, dim;
  const float *cos, *sin;  // [tokens, dim], or where `places` are given its rows of them
  const float* norm;       // [dim] or null
  float eps;
  DType type;
  bool threaded;
  const int64_t* places = nullptr;  // [tokens]
  constexpr int64_t turn(int64_t token) const { return (places ? places[token] : token) * dim; }
};

// Where number `j`, the first of 32, of a row of `k` lies in tiles.
inline constexpr int64_t place_in_tiles(int64_t row, int64_t j, int64_t k) {
  return row / 16 * 16 * k + j / 32 * 512 + row % 16 * 32;
}

// Queries as in `query`; keys are turned alike, with a norm of their own, on their way into the cache.
inline constexpr int kMostRotaryDim = 1024;
struct RotaryWriteArgs {
  RotaryArgs query;
  const float* key_norm;  // [dim] or null
  WriteArgs write;        // its key is as the product gave it
};

struct GateArgs {
  const void* x;  // [rows, 2 * dim], row stride x_stride: gate, up
  void* out;      // [rows, dim]
  int64_t x_stride, rows, dim;
  Activation kind;
  DType type;
  bool threaded;
};

struct ArgmaxArgs {
  const float* x;  // [rows, dim], row stride x_stride
  int64_t* out;
  int64_t x_stride, rows, dim;
  bool threaded;
};

// Sampling looks at a row of logits in blocks of this many: 512 maxima and 512 sums stand for 262,144 values.
inline constexpr int kVocabBlock = 512;

// Rows [first, first + count) of a weight [n, k] as a file holds them -> their places in panels of `type`.
struct LoadArgs {
  const void* source;  // row `first`
  int kind;            // GGUF's type number
  int64_t row_bytes, first, count, n, k;
  DType type;
  void* panels;
  float* scratch;  // load_scratch_floats(k)
  QuantizedFormat format;  // bits not 0: what the panels are instead of `type`
};
inline int64_t load_scratch_floats(int64_t k) { return 2 * kPanel * (k + 256); }

// Codes and scales in memory -> panels. codes [count, k] one byte each; scales, zeros float32 [count, groups] of
// `group_size` inputs (zeros null: none).
struct PackCodesArgs {
  const uint8_t* codes;
  const float *scales, *zeros;
  int64_t group_size, first, count, n, k;
  QuantizedFormat format;
  void* panels;
};

// A head's screen (screen_panels.h, screen_amx.h): what it says of panels lies in blocks, [blocks][rows][kScreenBlock].
inline constexpr int kScreenBlock = 16;
inline constexpr int64_t screen_blocks(int64_t panels) { return (panels + kScreenBlock - 1) / kScreenBlock; }
inline constexpr int64_t kScreenRows = 96;  // most rows of one call

struct ScreenPanelArgs {
  const void* weights;  // a panel of floats
  DType type;
  int64_t k;
  void* panel;          // out: screen_panel_bytes(k)
  float *size, *error;  // out: the largest norm of an output as stored, and of what that leaves over (infinite: not finite)
};

struct ScreenArgs {
  const void* panels;
  DType type;         // of the weights that the panels stand for
  const float* bias;  // [n] or null
  const void* x;      // [m, k], row stride ldx elements
  DType x_type;
  int64_t ldx, m, n, k;
  const float *panel_sizes, *panel_errors;  // of ScreenPanelArgs, with zeros up to a whole block
  double rounding;                          // of sums, as a share of |x| |w|
  float* ceilings;  // out: what no output of a panel is above, for each row; minus infinity beyond the last panel
  float* tops;      // out, [m][blocks]: the highest ceiling of each block
  float* sizes;     // out, [m]: the norm of a row; NaN if it is not finite
  bool threaded;
};

struct KernelTable {
  const char* name;
  void (*pack_rows)(const void* rows, DType type, int64_t stride, int64_t first, int64_t count, int64_t n, int64_t k,
                    void* panels);
  bool (*load_rows)(const LoadArgs&);  // false: a number that is not finite cannot be quantised
  void (*unpack_rows)(const void* panels, DType type, int64_t k, const int64_t* ids, int64_t count, void* out,
                      DType out_type);
  bool (*linear)(const LinearArgs&);            // false: out of memory
  // y [m, n / 2] = activate(first half of the outputs) * second half. False, and nothing done: `linear` and `gate` then.
  bool (*gated_linear)(const LinearArgs&, Activation);
  // Whether products with weights of `type` round their inputs to tiles anyway, [rows / 16, up][k / 32][16][32] bfloat16, so
  // that who computes inputs may write them as such.
  bool (*takes_tiles)(DType type, int64_t k);
  bool (*quantized_linear)(const LinearArgs&, const QuantizedFormat&);
  bool (*gated_quantized)(const LinearArgs&, const QuantizedFormat&, Activation);  // as `gated_linear`
  // Screens have a layout of their own on each instruction set, and take a row as `linear` takes it.
  int64_t (*screen_panel_bytes)(int64_t k);
  void (*screen_panel)(const ScreenPanelArgs&);
  bool (*screen)(const ScreenArgs&);  // false: out of memory
  void (*pack_codes)(const PackCodesArgs&);
  void (*unpack_codes)(const void* panels, const QuantizedFormat&, int64_t k, const int64_t* ids, int64_t count,
                       void* out, DType out_type);
  int32_t (*query_rows)(const AttentionArgs&);      // rows that an item should have
  int64_t (*attention_work)(const AttentionArgs&);  // floats of working memory for a thread, given max_rows
  int64_t (*attend)(const AttentionArgs&);          // -1: fine; else a row whose table holds a block outside the pool
  void (*write)(const WriteArgs&);
  void (*norm)(const NormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*rotary_write)(const RotaryWriteArgs&);
  void (*gate)(const GateArgs&);
  void (*argmax)(const ArgmaxArgs&);
  // Per block of kVocabBlock: its largest value (NaN if there is one); the sum of e^((x - highest) / temperature).
  void (*block_max)(const float* x, int64_t n, float* maxima);
  void (*exp_sums)(const float* x, int64_t n, float highest, float temperature, float* sums);
  void (*exps)(const float* x, int64_t n, float highest, float temperature, float* out);
  // Yardsticks (limits.h): the sum of numbers read once; operations of rounds of multiply-adds for products of a type.
  float (*read_once)(const float* from, int64_t n, int64_t ahead);
  int64_t (*multiply_adds)(DType type, int64_t rounds, float* result);
  int64_t (*multiply_pairs)(int64_t rounds, float* result);
};

const KernelTable& portable_kernels();
#if defined(OCTAVO_HAVE_AVX2)
const KernelTable& avx2_kernels();
#endif
#if defined(OCTAVO_HAVE_AVX512)
const KernelTable& avx512_kernels();
#endif
#if defined(OCTAVO_HAVE_AMX)
const KernelTable& amx_kernels();
#endif

}  // namespace octavo
