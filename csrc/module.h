// What the parts of the Python binding share: the kernels in use and how addresses become pointers.
#pragma once

#include "kernels.h"

#include <nanobind/nanobind.h>

#include <cstdint>

namespace octavo {

extern const KernelTable* kernels;  // of the instruction set in use

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_weights(nanobind::module_& m);    // module_weights.cpp
void bind_attention(nanobind::module_& m);  // module_attention.cpp

}  // namespace octavo
