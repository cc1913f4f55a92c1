// Work shared out to threads: each has a share of neighbouring items of its own, so that it reads one run of memory
// from front to back, and helps with the others' when its own is done. Included by each instruction set's file.
//
// Invariant: every item runs once, whatever the number of threads that come.
#pragma once

#include "simd.h"

#include <omp.h>

namespace {

constexpr int kMostShares = 64;  // threads beyond that help

struct alignas(64) Share {
  int64_t next, end;
};

struct NoScope {};

// Scope: what a thread holds while it works.
template <class Scope = NoScope, class F>
void share_out(int64_t items, bool threaded, F run) {
  if (!threaded || items < 2) {
    [[maybe_unused]] const Scope scope;
    for (int64_t i = 0; i < items; ++i) run(i);
    return;
  }
  const int threads = omp_get_max_threads(), count = threads < kMostShares ? threads : kMostShares;
  Share shares[kMostShares];
  for (int s = 0; s < count; ++s) shares[s] = {items * s / count, items * (s + 1) / count};
#pragma omp parallel
  {
    [[maybe_unused]] const Scope scope;
    for (int s = 0; s < count; ++s) {
      Share& share = shares[(omp_get_thread_num() + s) % count];
      for (;;) {
        const int64_t i = __atomic_fetch_add(&share.next, 1, __ATOMIC_RELAXED);
        if (i >= share.end) break;
        run(i);
      }
    }
  }
}

}  // namespace
