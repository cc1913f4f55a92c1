// Working memory of a thread, kept from one product or screen to the next. Included by the instruction sets that have one.
#pragma once

#include <cstddef>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

// Memory of a thread that grows with the largest request, on huge pages where there is much of it: rows pass once for
// every two panels, and would need thousands of small ones. Null: none is left.
struct Scratch {
  static constexpr size_t kHugePage = size_t{2} << 20;
  char* memory = nullptr;
  size_t room = 0;
  ~Scratch() { free(memory); }
  void* take(size_t bytes) {
    if (bytes > room) {
      free(memory);
      const size_t page = bytes < kHugePage ? 4096 : kHugePage;
      room = (bytes + page - 1) / page * page;
      memory = (char*)aligned_alloc(page, room);
      if (!memory) room = 0;
#if defined(__linux__)
      if (room >= kHugePage) madvise(memory, room, MADV_HUGEPAGE);  // advice: a refusal costs speed only
#endif
    }
    return memory;
  }
};

// One for all products and screens of a thread, which do not call one another. Given back after each, megabytes would be
// cleared by the system again and again.
Scratch& scratch() {
  static thread_local Scratch memory;
  return memory;
}

}  // namespace
