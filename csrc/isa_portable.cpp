// The kernels, compiled for any processor the compiler targets. See kernels.h for what a kernel file must not do.
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

const KernelTable& portable_kernels() {
  static constexpr KernelTable table = {
      "portable", pack_rows, load_rows, unpack_rows, linear, gated_linear, takes_no_tiles, quantized_linear,
      gated_quantized, screen_panel_bytes, screen_panel, screen, pack_codes, unpack_codes,
      query_rows, attention_work, attend, write, norm, rotary, rotary_write, gate, argmax, block_max, exp_sums, exps,
      read_once, multiply_adds, multiply_pairs};
  return table;
}

}  // namespace octavo
