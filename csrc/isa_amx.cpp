// The kernels, compiled for AVX-512 and the bfloat16 tiles of AMX. See kernels.h for what a kernel file must not do.
#define OCTAVO_WIDE

#include "attention_amx.h"
#include "dequantize.h"
#include "elementwise.h"
#include "kernels.h"
#include "limits_amx.h"
#include "linear_amx.h"
#include "linear_quantized_amx.h"
#include "quantize.h"
#include "rotary_write.h"
#include "screen_amx.h"
#include "vocabulary.h"

namespace octavo {

const KernelTable& amx_kernels() {
  static constexpr KernelTable table = {
      "amx", pack_rows, load_rows, unpack_rows, linear_amx, gated_linear_amx, rounds_inputs_amx, quantized_linear_amx,
      gated_quantized, screen_panel_bytes_amx, screen_panel_amx, screen_amx, pack_codes,
      unpack_codes, query_rows_amx, attention_work_amx, attend_amx, write, norm, rotary, rotary_write, gate, argmax,
      block_max, exp_sums, exps, read_once, multiply_adds_amx, multiply_pairs};
  return table;
}

}  // namespace octavo
