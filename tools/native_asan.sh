#!/bin/sh
# Runs the native kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer, on every instruction set that
# this processor has, or on those named as arguments (tools/native_asan.sh portable). torch's own allocations are
# intercepted too, so a read past a tensor is caught.
set -eu
cd "$(dirname "$0")/.."
build=build/asan
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DOCTAVO_SANITIZE=ON \
  -DPython_EXECUTABLE="$(command -v python3)" >/dev/null
cmake --build "$build"
# A copy of the package around the instrumented module, so that the installed one stays untouched.
rm -rf "$build/site"
mkdir -p "$build/site"
cp -r src/octavo "$build/site/octavo"
rm -f "$build"/site/octavo/kernels/cpu/_native*
cp "$build"/_native*.so "$build/site/octavo/kernels/cpu/"
preload="$(${CXX:-c++} -print-file-name=libasan.so):$(${CXX:-c++} -print-file-name=libubsan.so)"
if [ $# -eq 0 ]; then
  set -- portable
  grep -qw avx2 /proc/cpuinfo 2>/dev/null && set -- avx2 portable
fi
for isa in "$@"; do
  echo "== $isa"
  # Python and torch keep memory on purpose: no leak check. An editable install's import hook would win over PYTHONPATH.
  LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OCTAVO_ISA="$isa" \
    PYTHONPATH="$build/site:tests" python3 -c '
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
import pytest
from octavo.kernels.cpu.loader import native
assert "/asan/" in native().__file__, native().__file__
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "tests/cpu/test_native_attention.py", "tests/cpu/test_native_ops.py", "tests/cpu/test_native_rotary_write.py",
                      "tests/cpu/test_native_sampling.py", "tests/cpu/test_native_loading.py",
                      "tests/cpu/test_native_quantized.py", "tests/cpu/test_native_stack.py"]))
'
done
