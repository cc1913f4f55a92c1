// The kernels, compiled for AVX-512 (F, BW, DQ, VL): the products with sixteen lanes, the rest with more registers. See kernels.h for what a kernel file must not do.
#define OCTAVO_WIDE

#include "attention.h"
#include "dequantize.h"
#include "elementwise.h"
#include "kernels.h"
#include "limits.h"
#include "linear.h"
#include "linear_quantized.h"
#include "quantize.h"
#include "rotary_write.h"
#include "screen.h"
#include "vocabulary.h"

namespace octavo {

const KernelTable& avx512_kernels() {
  static constexpr KernelTable table = {
      "avx512", pack_rows, load_rows, unpack_rows, linear, gated_linear, takes_no_tiles, quantized_linear,
      gated_quantized, screen_panel_bytes, screen_panel, screen, pack_codes, unpack_codes,
      query_rows, attention_work, attend, write, norm, rotary, rotary_write, gate, argmax, block_max, exp_sums, exps,
      read_once, multiply_adds, multiply_pairs};
  return table;
}

}  // namespace octavo
