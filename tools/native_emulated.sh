#!/bin/sh
# Runs the native kernel tests on the AVX-512 and AMX kernels where the processor has neither: the same sources, with
# vectors of sixteen lanes as pairs of eight (AVX2) and tiles in memory (csrc/amx.h). Checks their arithmetic and indices,
# not the instructions themselves, and says nothing about speed.
set -eu
. "$(dirname "$0")/native_variant.sh"
build_variant emulated -DCMAKE_BUILD_TYPE=Release -DOCTAVO_EMULATE=ON
for isa in avx512 amx; do
  test_variant "$isa"
done
