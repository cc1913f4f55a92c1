// Weights on their way from mapped files into panels: a queue of runs of rows that several threads empty together.
//
// Python fills the queue (it knows names and files) and lets it run without the interpreter lock, beside other work that
// needs the lock. Sources that are maps of a file are let go page by page, so that a model is never in memory twice.
//
// Invariant: units write disjoint rows. Two units may share a panel, never an element.
#pragma once

#include "kernels.h"

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace octavo {

struct StoredType {
  int block, bytes;  // numbers in a block and its size
};

// block 0: a kind that `load_rows` does not know.
inline StoredType stored_type(int kind) {
  switch (kind) {
    case 0: return {1, 4};
    case 1: case 30: return {1, 2};
    case 2: return {32, 18};
    case 6: return {32, 22};
    case 8: return {32, 34};
    case 12: return {256, 144};
    case 13: return {256, 176};
    case 14: return {256, 210};
    default: return {0, 0};
  }
}

class LoadQueue {
 public:
  // release: the source is a map of a file; its pages may be dropped once read.
  void add(LoadArgs job, bool release) {
    const int64_t step = std::max<int64_t>(kPanel, kUnitBytes / (job.row_bytes * kPanel) * kPanel);
    const int64_t end = job.first + job.count;
    const char* base = static_cast<const char*>(job.source) - job.first * job.row_bytes;
    widest_ = std::max(widest_, job.k);
    for (int64_t first = job.first; first < end;) {
      const int64_t next = std::min(end, (first / step + 1) * step);
      LoadArgs unit = job;
      unit.source = base + first * job.row_bytes, unit.first = first, unit.count = next - first;
      units_.push_back({unit, release});
      total_ += unit.count * unit.row_bytes;
      first = next;
    }
  }

  // Until nothing is left to begin, or `share` of the bytes is done. Others may run at the same time; what they began
  // may still be under way.
  void run(const KernelTable& kernels, bool threaded, double share) {
    const double limit = share * static_cast<double>(total_);
#pragma omp parallel if (threaded)
    {
      const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(load_scratch_floats(widest_))]);
      while (share >= 1 || static_cast<double>(done_) < limit) {
        const size_t i = next_++;
        if (i >= units_.size()) break;
        LoadArgs unit = units_[i].args;
        unit.scratch = scratch.get();
        if (!kernels.load_rows(unit)) finite_ = false;
        const int64_t bytes = unit.count * unit.row_bytes;
        if (units_[i].release) let_go(static_cast<const char*>(unit.source), bytes);
        done_ += bytes;
      }
    }
  }

  int64_t done() const { return done_; }
  int64_t total() const { return total_; }
  bool finite() const { return finite_; }  // false: a weight to be quantised held an infinity or a NaN

 private:
  static constexpr int64_t kUnitBytes = int64_t{1} << 20;
  struct Unit {
    LoadArgs args;
    bool release;
  };

  static void let_go(const char* from, int64_t bytes) {
#if defined(__linux__)
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(from) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(bytes)) / page * page;
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
#else
    (void)from, (void)bytes;
#endif
  }

  std::vector<Unit> units_;
  std::atomic<size_t> next_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> finite_{true};
  int64_t total_ = 0, widest_ = 0;
};

}  // namespace octavo
