// What the parts of the Python binding share: the kernels in use and how addresses become pointers.
#pragma once

#include "kernels.h"

#include <nanobind/nanobind.h>

#include <omp.h>

#include <cstdint>

namespace octavo {

extern const KernelTable* kernels;  // of the instruction set in use

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// About 20 microseconds of work per thread before a second one is woken.
inline bool worth_threads(int64_t values) { return values > 32768 && omp_get_max_threads() > 1; }

void bind_weights(nanobind::module_& m);    // module_weights.cpp
void bind_attention(nanobind::module_& m);  // module_attention.cpp
void bind_stack(nanobind::module_& m);      // module_stack.cpp
void bind_limits(nanobind::module_& m);     // module_limits.cpp

}  // namespace octavo
