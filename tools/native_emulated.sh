#!/bin/sh
# Runs the native kernel tests on the AVX-512 and AMX kernels where the processor has neither: the same sources, with
# vectors of sixteen lanes as pairs of eight (AVX2) and tiles in memory (csrc/amx.h). Checks their arithmetic and indices,
# not the instructions themselves, and says nothing about speed.
set -eu
cd "$(dirname "$0")/.."
build=build/emulated
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DOCTAVO_EMULATE=ON \
  -DPython_EXECUTABLE="$(command -v python3)" >/dev/null
cmake --build "$build"
# A copy of the package around the emulating module, so that the installed one stays untouched.
rm -rf "$build/site"
mkdir -p "$build/site"
cp -r src/octavo "$build/site/octavo"
rm -f "$build"/site/octavo/kernels/cpu/_native*
cp "$build"/_native*.so "$build/site/octavo/kernels/cpu/"
for isa in avx512 amx; do
  echo "== $isa, emulated"
  # An editable install's import hook would win over PYTHONPATH.
  OCTAVO_ISA="$isa" PYTHONPATH="$build/site:tests" python3 -c '
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
import pytest
from octavo.kernels.cpu.loader import native
assert "/emulated/" in native().__file__, native().__file__
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "tests/cpu/test_native_attention.py", "tests/cpu/test_native_ops.py", "tests/cpu/test_native_rotary_write.py",
                      "tests/cpu/test_native_sampling.py", "tests/cpu/test_native_loading.py",
                      "tests/cpu/test_native_quantized.py", "tests/cpu/test_native_stack.py"]))
'
done
