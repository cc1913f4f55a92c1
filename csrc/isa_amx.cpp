// The kernels, compiled for AVX-512 and the bfloat16 tiles of AMX. See kernels.h for what a kernel file must not do.
#define OCTAVO_WIDE

#include "attention.h"
#include "dequantize.h"
#include "elementwise.h"
#include "kernels.h"
#include "linear_amx.h"
#include "linear_quantized.h"
#include "quantize.h"
#include "vocabulary.h"

namespace octavo {

const KernelTable& amx_kernels() {
  static constexpr KernelTable table = {"amx", pack_rows, load_rows, unpack_rows, linear_amx, quantized_linear, pack_codes, unpack_codes, attend, write, norm, rotary, gate, argmax, block_max, exp_sums, exps};
  return table;
}

}  // namespace octavo
