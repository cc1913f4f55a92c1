#!/bin/sh
# Builds the native kernels in place (src/octavo/kernels/cpu/_native*.so), for work in a checkout.
# Needs cmake, ninja, a C++ compiler and nanobind in the current Python. Extra arguments go to cmake.
set -eu
cd "$(dirname "$0")/.."
build="${BUILD_DIR:-build/native}"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v python3)" "$@" >/dev/null
cmake --build "$build"
# A new inode instead of an overwrite: a process that has the old file mapped keeps it.
for file in "$build"/_native*.so; do
  cp "$file" "src/octavo/kernels/cpu/.new" && mv "src/octavo/kernels/cpu/.new" "src/octavo/kernels/cpu/$(basename "$file")"
done
