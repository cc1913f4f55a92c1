# Sourced by native_asan.sh and native_emulated.sh: builds the native module in another way, beside the usual one, and
# runs the kernel tests on it, on one instruction set at a time. It does not know why; the callers say what they check.
cd "$(dirname "$0")/.."
kernel_tests="tests/cpu/test_native_attention.py tests/cpu/test_kv_quantized.py tests/cpu/test_native_ops.py
  tests/cpu/test_native_rotary_write.py tests/cpu/test_native_sampling.py tests/cpu/test_native_loading.py
  tests/cpu/test_native_quantized.py tests/cpu/test_native_stack.py tests/cpu/test_native_screen.py
  tests/cpu/test_native_fixed_point.py"

# build_variant NAME CMAKE-OPTION...: the module in build/NAME, and around it a copy of the package, build/NAME/site, so
# that the installed one stays untouched.
build_variant() {
  variant=$1 && shift
  build="build/$variant"
  cmake -S . -B "$build" -G Ninja -DPython_EXECUTABLE="$(command -v python3)" "$@" >/dev/null
  cmake --build "$build"
  rm -rf "$build/site"
  mkdir -p "$build/site"
  cp -r src/octavo "$build/site/octavo"
  rm -f "$build"/site/octavo/kernels/cpu/_native*
  cp "$build"/_native*.so "$build/site/octavo/kernels/cpu/"
}

# test_variant INSTRUCTION-SET PYTEST-ARGUMENT...: the kernel tests on the module built last, with that set of kernels.
test_variant() {
  isa=$1 && shift
  echo "== $variant, $isa"
  # An editable install's import hook would win over PYTHONPATH.
  # shellcheck disable=SC2086
  LD_PRELOAD="${preload:-}" OCTAVO_ISA="$isa" OCTAVO_VARIANT="/$variant/" PYTHONPATH="$build/site:tests${PYTHONPATH:+:$PYTHONPATH}" python3 -c '
import os, sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
import pytest
from octavo.kernels.cpu.loader import native
assert os.environ["OCTAVO_VARIANT"] in native().__file__, native().__file__
assert native().in_use() == os.environ["OCTAVO_ISA"], native().in_use()
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=sys", *sys.argv[1:]]))
' $kernel_tests "$@"
}
