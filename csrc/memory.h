// Memory for packed weights and activations: 2 MiB-aligned regions for which huge pages are asked (many systems grant
// them only to those who ask, and a page walk per 4 KiB costs a third of the read bandwidth). Small weights share one.
//
// Invariant: a region lives as long as any weight in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#else
#include <cstdlib>
#endif

namespace octavo {

// Memory that somebody has mapped and cleared beforehand, taken from its front. Guarded by the GIL, as regions are.
struct Room {
  char *next = nullptr, *end = nullptr;  // multiples of 2 MiB

  char* take(size_t bytes) {
    if (static_cast<size_t>(end - next) < bytes) return nullptr;
    char* at = next;
    next += bytes;
    return at;
  }
  void leave() {
#if defined(__linux__)
    if (end > next) munmap(next, static_cast<size_t>(end - next));
#endif
    next = end = nullptr;
  }
  void adopt(char* at, size_t bytes) {
    leave();
    next = at, end = at + bytes;
  }
};

inline Room& room() {
  static Room only;
  return only;
}

class Region {
 public:
  explicit Region(size_t bytes) : bytes_(bytes) {
#if defined(__linux__)
    mapped_ = (bytes + kHuge - 1) / kHuge * kHuge;
    if (char* at = room().take(mapped_)) {
      base_ = start_ = at;
      return;
    }
    mapped_ = bytes + kHuge;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    start_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base_) + kHuge - 1) / kHuge * kHuge);
    madvise(start_, bytes, MADV_HUGEPAGE);  // advice: a refusal costs speed only
#else
    base_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!base_) throw std::bad_alloc();
    start_ = static_cast<char*>(base_);
#endif
  }
  ~Region() {
#if defined(__linux__)
    munmap(base_, mapped_);
#else
    std::free(base_);
#endif
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  char* take(size_t bytes) {  // null when full
    const size_t rounded = (bytes + 63) / 64 * 64;
    if (used_ + rounded > bytes_) return nullptr;
    char* at = start_ + used_;
    used_ += rounded;
    return at;
  }

  char* start() const { return start_; }

  static constexpr size_t kHuge = size_t{2} << 20;

 private:
  size_t bytes_, used_ = 0, mapped_ = 0;
  void* base_ = nullptr;
  char* start_ = nullptr;
};

struct Memory {
  std::shared_ptr<Region> region;
  char* data = nullptr;
};

inline Memory weight_memory(size_t bytes) {
  constexpr size_t kShared = size_t{32} << 20;
  if (bytes > kShared / 2) {
    auto own = std::make_shared<Region>(bytes + 64);
    char* at = own->take(bytes);
    return {std::move(own), at};
  }
  static std::weak_ptr<Region> current;  // guarded by the GIL: weights are packed from Python
  auto region = current.lock();
  char* at = region ? region->take(bytes) : nullptr;
  if (!at) {
    region = std::make_shared<Region>(kShared);
    current = region;
    at = region->take(bytes);
  }
  return {std::move(region), at};
}

}  // namespace octavo
