// The Python binding, part four: how fast memory is read and numbers are multiplied at most, on all threads.
#include "memory.h"
#include "module.h"

#include <nanobind/stl/pair.h>

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace octavo {
namespace {

constexpr int kFixed = 3;  // beyond the DTypes

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Best and median of `amounts[i] / times[i]`.
std::pair<double, double> rates(std::vector<double> found) {
  std::sort(found.begin(), found.end());
  return {found.back(), found[found.size() / 2]};
}

// Bytes per second of passes over `bytes` of memory on huge pages, for about `seconds`: of the best pass, of the median.
// Passes with and without prefetch take turns, and those count whose median is better.
std::pair<double, double> read_rate(int64_t bytes, double seconds) {
  if (bytes < 1 << 20) throw std::invalid_argument("less than 1 MiB would be read from the caches");
  constexpr int64_t kPrefetch[] = {0, 4096};
  const Memory memory = weight_memory(static_cast<size_t>(bytes));
  const int64_t numbers = bytes / 4;
  std::memset(memory.data, 0, static_cast<size_t>(bytes));
  const float* from = reinterpret_cast<const float*>(memory.data);
  std::vector<double> found[2];
  float sum = 0;
  const Clock::time_point begin = Clock::now();
  do {
    for (int way = 0; way < 2; ++way) {
      const Clock::time_point pass = Clock::now();
#pragma omp parallel reduction(+ : sum)
      {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t first = numbers * thread / threads, end = numbers * (thread + 1) / threads;
        sum += kernels->read_once(from + first, end - first, kPrefetch[way]);
      }
      found[way].push_back(static_cast<double>(bytes) / since(pass));
    }
  } while (since(begin) < seconds);
  if (sum != 0) throw std::runtime_error("a sum of zeros is not zero");
  const std::pair<double, double> plain = rates(std::move(found[0])), ahead = rates(std::move(found[1]));
  return plain.second > ahead.second ? plain : ahead;
}

// Operations per second that products of `type` (kFixed: of fixed-point numbers) could reach, for about `seconds`: best,
// median.
std::pair<double, double> arithmetic_rate(int type, int64_t rounds, double seconds) {
  if (rounds < 1) throw std::invalid_argument("rounds must be at least 1");
  std::vector<double> found;
  float result = 0;
  const Clock::time_point begin = Clock::now();
  do {
    double done = 0;
    const Clock::time_point pass = Clock::now();
#pragma omp parallel reduction(+ : result, done)
    done += static_cast<double>(type == kFixed ? kernels->multiply_pairs(rounds, &result)
                                               : kernels->multiply_adds(static_cast<DType>(type), rounds, &result));
    found.push_back(done / since(pass));
  } while (since(begin) < seconds);
  return rates(std::move(found));
}

}  // namespace

void bind_limits(nb::module_& m) {
  m.def("read_rate", &read_rate, nb::call_guard<nb::gil_scoped_release>());
  m.def("arithmetic_rate", &arithmetic_rate, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace octavo
