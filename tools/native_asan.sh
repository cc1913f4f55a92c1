#!/bin/sh
# Runs the native kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer, on the AVX2 and the portable kernels
# or on those named as arguments (tools/native_asan.sh avx512). torch's own allocations are intercepted too, so a read
# past a tensor is caught. Leaks are not looked for. The tests: kernel_tests in native_variant.sh, whole; a finding ends
# the run, with its stack on the terminal.
set -eu
. "$(dirname "$0")/native_variant.sh"
if [ $# -eq 0 ]; then
  set -- portable
  if grep -qw avx2 /proc/cpuinfo 2>/dev/null; then set -- avx2 portable; fi
fi
wanted=" $* "
has() { case "$wanted" in *" $1 "*) echo ON ;; *) echo OFF ;; esac; }
# Only what will run is compiled: instrumented kernels take long.
build_variant asan -DCMAKE_BUILD_TYPE=None -DOCTAVO_SANITIZE=ON -DOCTAVO_AVX2_FLAGS="$(has avx2)" \
  -DOCTAVO_AVX512_FLAGS="$(has avx512)" -DOCTAVO_AMX_FLAGS="$(has amx)"
preload="$(${CXX:-c++} -print-file-name=libasan.so):$(${CXX:-c++} -print-file-name=libubsan.so)"
# Python and torch keep memory on purpose: no leak check.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
for isa; do
  test_variant "$isa"
done
