// The Python binding: `octavo.kernels.cpu._native`.
//
// It takes addresses and sizes as integers: a call costs a fraction of a microsecond and needs no torch headers. The
// Python side (octavo/kernels/cpu) checks types, shapes and strides; what is only known here (block ids, slots, lengths)
// is checked here. Threads come from the OpenMP runtime that torch has loaded: this module is not linked to one.
#include "kernels.h"
#include "loading.h"
#include "memory.h"
#include "planner.h"
#include "processor.h"
#include "sampling.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <omp.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace octavo {
namespace {

const KernelTable* kernels = nullptr;

std::vector<std::string> instruction_sets() {  // best first
  std::vector<std::string> names;
  for (const InstructionSet& set : available_sets()) names.push_back(set.name);
  return names;
}

void use(const std::string& name) {
  for (const InstructionSet& set : available_sets()) {
    if (name != set.name) continue;
    kernels = &set.kernels();
    return;
  }
  throw std::invalid_argument("instruction set " + name + " is not built in or not on this processor");
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Other Python threads may run during long calls only: getting the lock back can cost milliseconds.
constexpr double kLongCall = 2e8;  // arithmetic operations

class PackedWeight {
 public:
  // Panels of `dtype` for a weight [n, k], to be filled.
  PackedWeight(int dtype, int64_t n, int64_t k) : type_(static_cast<DType>(dtype)), n_(n), k_(k) {
    bytes_ = static_cast<size_t>((n + kPanel - 1) / kPanel * kPanel * panel_depth(k, type_) * element_size(type_));
    memory_ = weight_memory(bytes_);
  }

  // From a weight in memory, of the same type.
  void pack(uintptr_t weight, int64_t stride) {
    nb::gil_scoped_release release;
    const int64_t panels = (n_ + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t first = p * kPanel;
      kernels->pack_rows(at<const char>(weight) + first * stride * element_size(type_), type_, stride, first,
                         std::min<int64_t>(kPanel, n_ - first), n_, k_, memory_.data);
    }
  }

  // Rows [first, first + count) as a file holds them (`kind`: GGUF's type number), put on a queue.
  LoadArgs load_args(uintptr_t source, int kind, int64_t first, int64_t count) const {
    const StoredType stored = stored_type(kind);
    if (stored.block == 0 || k_ % stored.block)
      throw std::invalid_argument("rows of " + std::to_string(k_) + " numbers of type " + std::to_string(kind));
    if (first < 0 || count < 1 || first + count > n_)
      throw std::out_of_range("rows " + std::to_string(first) + " to " + std::to_string(first + count) +
                              " of a weight with " + std::to_string(n_));
    return {at<const void>(source), kind, k_ / stored.block * stored.bytes, first, count, n_, k_, type_, memory_.data,
            nullptr};
  }

  void run(uintptr_t x, int x_type, int64_t ldx, int64_t m, uintptr_t y, int y_type, uintptr_t bias) const {
    multiply({memory_.data, type_, at<const float>(bias), at<const void>(x), static_cast<DType>(x_type), ldx,
              at<void>(y), static_cast<DType>(y_type), n_, m, n_, k_, false, nullptr});
  }

  // First index and value of the largest output of each row, without the outputs; a NaN counts as largest.
  void argmax(uintptr_t x, int x_type, int64_t ldx, int64_t m, uintptr_t ids, uintptr_t values, uintptr_t bias) const {
    const int64_t runs = argmax_runs(m, n_, k_, type_);
    std::vector<Best> best(static_cast<size_t>(runs * m), Best{-std::numeric_limits<float>::infinity(), -1});
    multiply({memory_.data, type_, at<const float>(bias), at<const void>(x), static_cast<DType>(x_type), ldx, nullptr,
              DType::f32, 0, m, n_, k_, false, best.data()});
    for (int64_t r = 0; r < m; ++r) {
      Best top = best[static_cast<size_t>(r)];
      for (int64_t i = 1; i < runs && top.value == top.value; ++i) {
        const Best& next = best[static_cast<size_t>(i * m + r)];
        if (!(next.value <= top.value)) top = next;
      }
      at<int64_t>(ids)[r] = std::max<int64_t>(top.index, 0);
      at<float>(values)[r] = top.value;
    }
  }

  void multiply(LinearArgs a) const {
    const int64_t m = a.m;
    const double work = 2.0 * static_cast<double>(m) * static_cast<double>(n_) * static_cast<double>(k_);
    a.threaded = omp_get_max_threads() > 1 && (bytes_ > 65536 || work > 500000);
    std::optional<nb::gil_scoped_release> release;
    if (work > kLongCall) release.emplace();
    if (!kernels->linear(a)) throw std::bad_alloc();
  }

  void rows(uintptr_t ids, int64_t count, uintptr_t out, int out_type) const {
    for (int64_t i = 0; i < count; ++i) {
      if (at<const int64_t>(ids)[i] < 0 || at<const int64_t>(ids)[i] >= n_)
        throw std::out_of_range("row " + std::to_string(at<const int64_t>(ids)[i]) + " of a weight with " +
                                std::to_string(n_) + " rows");
    }
    kernels->unpack_rows(memory_.data, type_, k_, at<const int64_t>(ids), count, at<void>(out),
                         static_cast<DType>(out_type));
  }

  size_t bytes() const { return bytes_; }

 private:
  Memory memory_;
  DType type_;
  int64_t n_, k_;
  size_t bytes_ = 0;
};

struct CacheShape {
  int64_t num_blocks, layers;
  int32_t num_kv_heads, block_size, head_dim;
};

class Attention {
 public:
  Attention(uintptr_t kv, int kv_type, int64_t num_blocks, int64_t layers, int32_t num_kv_heads, int32_t block_size,
            int32_t head_dim, int32_t num_heads, float scale, float softcap, const std::vector<int32_t>& windows,
            int key_bits, int value_bits)
      : shape_{num_blocks, layers, num_kv_heads, block_size, head_dim},
        planner_(num_heads / num_kv_heads, num_kv_heads, head_dim) {
    base_ = at<char>(kv);
    args_.kv_type = static_cast<DType>(kv_type);
    args_.head_stride = static_cast<int64_t>(block_size) * head_dim;
    args_.value_offset = num_kv_heads * args_.head_stride;
    args_.block_stride = layers * 2 * args_.value_offset;
    layer_bytes_ = 2 * args_.value_offset * element_size(args_.kv_type);
    block_bytes_ = layers * layer_bytes_;
    if (key_bits) quantize(key_bits, value_bits);
    args_.num_blocks = num_blocks;
    args_.block_size = block_size, args_.head_dim = head_dim;
    args_.num_heads = num_heads, args_.num_kv_heads = num_kv_heads;
    args_.scale = scale, args_.softcap = softcap;
    args_.max_rows = planner_.max_rows();
    const int64_t floats = attention_work_floats(args_.max_rows, head_dim);
    args_.work_stride = (floats + (key_bits ? quantized_work_floats(args_.max_rows, head_dim) : 0) + 15) / 16 * 16;
    for (int32_t w : windows) plans_.emplace_back().window = w;
  }

  // query_start int32 [rows + 1], context_len int32 [rows]; capacity: positions a table row has room for.
  void plan(uintptr_t query_start, uintptr_t context_len, int64_t rows, int64_t capacity) {
    const int32_t *start = at<const int32_t>(query_start), *context = at<const int32_t>(context_len);
    std::vector<Row> next(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t length = start[r + 1] - start[r];
      if (start[0] != 0 || length < 0 || context[r] < length || context[r] > capacity)
        throw std::invalid_argument("row " + std::to_string(r) + ": " + std::to_string(length) + " new tokens from " +
                                    std::to_string(start[r]) + ", context " + std::to_string(context[r]) +
                                    ", room in the table for " + std::to_string(capacity));
      next[static_cast<size_t>(r)] = {start[r], length, context[r]};
    }
    rows_ = std::move(next);
    tokens_ = rows ? start[rows] : 0;
    threads_ = omp_get_max_threads();
    int64_t slots = 0;
    for (WindowPlan& p : plans_) {
      planner_.fill(p, rows_, threads_);
      slots = std::max(slots, p.slots);
    }
    grow(scratch_, slots * (shape_.head_dim + 2));
    grow(work_, args_.work_stride * threads_ + kAlign / 4);
  }

  void attend(int64_t layer, int window_index, uintptr_t table, int64_t table_stride, uintptr_t query,
              int64_t query_stride, uintptr_t out, int io_type) {
    const WindowPlan& p = plans_.at(static_cast<size_t>(window_index));
    AttentionArgs a = args_;
    a.kv = layer_base(layer);
    a.window = p.window;
    a.rows = rows_.data();
    a.table = at<const int32_t>(table), a.table_stride = table_stride;
    a.query = at<const void>(query), a.query_stride = query_stride;
    a.out = at<void>(out), a.io_type = static_cast<DType>(io_type);
    a.items = p.items.data(), a.num_items = static_cast<int64_t>(p.items.size());
    a.merges = p.merges.data(), a.num_merges = static_cast<int64_t>(p.merges.size());
    a.scratch = scratch_.data(), a.work = aligned(work_.data());
    a.threads = p.worth_threads ? threads_ : 1;
    const int64_t bad = kernels->attend(a);
    if (bad >= 0)
      throw std::out_of_range("block table row " + std::to_string(bad) + " names a block outside the pool of " +
                              std::to_string(shape_.num_blocks) + " blocks within the keys it reads");
  }

  void write(int64_t layer, uintptr_t slots, int64_t tokens, uintptr_t key, int64_t key_stride, uintptr_t value,
             int64_t value_stride, int io_type) const {
    const int64_t limit = shape_.num_blocks * shape_.block_size;
    for (int64_t t = 0; t < tokens; ++t) {
      if (at<const int64_t>(slots)[t] < 0 || at<const int64_t>(slots)[t] >= limit)
        throw std::out_of_range("slot " + std::to_string(at<const int64_t>(slots)[t]) + " of token " +
                                std::to_string(t) + " lies outside the pool of " + std::to_string(limit) + " slots");
    }
    WriteArgs a{layer_base(layer), args_.kv_type, args_.block_stride, args_.head_stride, args_.value_offset,
                shape_.block_size, shape_.head_dim, shape_.num_kv_heads, at<const int64_t>(slots), tokens,
                at<const void>(key), at<const void>(value), key_stride, value_stride, static_cast<DType>(io_type),
                false, {args_.halves[0], args_.halves[1]}};
    a.threaded = omp_get_max_threads() > 1 && tokens * shape_.num_kv_heads * shape_.head_dim > 65536;
    kernels->write(a);
  }

  // pairs: source, destination, source, destination, … in order: a later pair may read what an earlier one wrote.
  void copy_blocks(const std::vector<int64_t>& pairs) const {
    const size_t bytes = static_cast<size_t>(block_bytes_);
    for (int64_t id : pairs) {
      if (id < 0 || id >= shape_.num_blocks)
        throw std::out_of_range("block " + std::to_string(id) + " lies outside the pool of " +
                                std::to_string(shape_.num_blocks) + " blocks");
    }
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
      if (pairs[i] == pairs[i + 1]) continue;
      std::memcpy(base_ + static_cast<size_t>(pairs[i + 1]) * bytes, base_ + static_cast<size_t>(pairs[i]) * bytes,
                  bytes);
    }
  }

  int64_t tokens() const { return tokens_; }
  int64_t split_items(int window_index) const {
    return static_cast<int64_t>(plans_.at(static_cast<size_t>(window_index)).merges.size());
  }

 private:
  char* layer_base(int64_t layer) const {
    if (layer < 0 || layer >= shape_.layers)
      throw std::out_of_range("layer " + std::to_string(layer) + " of a block with " + std::to_string(shape_.layers));
    return base_ + layer * layer_bytes_;
  }
  // Vectors that straddle cache lines cost two loads each.
  static constexpr uintptr_t kAlign = 64;
  static float* aligned(float* p) {
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + kAlign - 1) / kAlign * kAlign);
  }
  static void grow(std::vector<float>& v, int64_t floats) {
    if (static_cast<int64_t>(v.size()) < floats) v.resize(static_cast<size_t>(floats));
  }

  // Places in a quantised block; strides become bytes.
  void quantize(int key_bits, int value_bits) {
    int64_t first = 0;
    for (int half = 0; half < 2; ++half) {
      QuantizedHalf& h = args_.halves[half];
      h.bits = half ? value_bits : key_bits;
      h.first = first;
      h.data = shape_.head_dim * h.bits / 8;
      h.groups = h.bits == 4 ? groups_of(shape_.head_dim) : 0;
      h.scales = shape_.block_size * h.data;
      h.multipliers = h.scales + 2 * shape_.block_size;
      h.slab = h.multipliers + shape_.block_size * h.groups;
      first += shape_.num_kv_heads * h.slab;
    }
    layer_bytes_ = first;
    block_bytes_ = args_.block_stride = shape_.layers * first;
  }

  char* base_;
  int64_t layer_bytes_ = 0, block_bytes_ = 0;
  CacheShape shape_;
  Planner planner_;
  AttentionArgs args_{};
  std::vector<WindowPlan> plans_;
  std::vector<Row> rows_;
  std::vector<float> scratch_, work_;
  int64_t tokens_ = 0;
  int threads_ = 1;
};

// About 20 microseconds of work per thread before a second one is woken.
bool worth_threads(int64_t values) { return values > 32768 && omp_get_max_threads() > 1; }

void norm(uintptr_t x, int64_t x_stride, uintptr_t residual, uintptr_t sum, uintptr_t out, int64_t rows, int64_t dim,
          uintptr_t weight, float eps, int type) {
  kernels->norm({at<const void>(x), at<const void>(residual), at<void>(sum), at<void>(out), x_stride, rows, dim,
                 at<const float>(weight), eps, static_cast<DType>(type), rows > 1 && worth_threads(rows * dim)});
}

void rotary(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t tokens, int64_t heads, int64_t dim, uintptr_t cos,
            uintptr_t sin, uintptr_t weight, float eps, int type) {
  kernels->rotary({at<const void>(x), at<void>(out), x_stride, tokens, heads, dim, at<const float>(cos),
                   at<const float>(sin), at<const float>(weight), eps, static_cast<DType>(type),
                   tokens > 1 && worth_threads(tokens * heads * dim)});
}

void gate(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t rows, int64_t dim, int kind, int type) {
  kernels->gate({at<const void>(x), at<void>(out), x_stride, rows, dim, static_cast<Activation>(kind),
                 static_cast<DType>(type), rows > 1 && worth_threads(rows * dim * 4)});
}

void argmax(uintptr_t x, int64_t x_stride, uintptr_t out, int64_t rows, int64_t dim) {
  kernels->argmax({at<const float>(x), at<int64_t>(out), x_stride, rows, dim, rows > 1 && worth_threads(rows * dim)});
}

std::vector<double> uniforms(const std::vector<uint64_t>& seeds, const std::vector<uint32_t>& samples,
                             const std::vector<uint32_t>& positions, uint32_t stream) {
  if (seeds.size() != samples.size() || seeds.size() != positions.size())
    throw std::invalid_argument("seeds, samples and positions differ in length");
  std::vector<double> out;
  for (size_t i = 0; i < seeds.size(); ++i) out.push_back(uniform_at(seeds[i], samples[i], positions[i], stream));
  return out;
}

// Draws from rows of logits: see sampling.h. Addresses of float32 rows [vocabulary] that stay until the next scan.
class Sampling {
 public:
  explicit Sampling(int64_t vocabulary) : vocabulary_(vocabulary) {}

  std::pair<std::vector<int64_t>, std::vector<float>> scan(const std::vector<uintptr_t>& rows) {
    std::vector<const float*> addresses;
    for (uintptr_t row : rows) addresses.push_back(at<const float>(row));
    std::pair<std::vector<int64_t>, std::vector<float>> found;
    vocabulary_.scan(*kernels, addresses, found.first, found.second);
    return found;
  }

  // (row, temperature, top_k, top_p, min_p, uniform) per draw.
  std::vector<int64_t> draw(const std::vector<std::tuple<int64_t, float, int64_t, double, double, double>>& draws) const {
    std::vector<DrawParams> params;
    for (const auto& [row, temperature, top_k, top_p, min_p, uniform] : draws) {
      check_row(row);
      params.push_back({row, temperature, top_k, top_p, min_p, uniform});
    }
    return vocabulary_.draw(*kernels, params);
  }

  // (ids, log-probabilities, rank) per row: the token (if not -1) in front, then the `count` most likely.
  std::vector<std::tuple<std::vector<int64_t>, std::vector<float>, int64_t>> logprobs(
      const std::vector<int64_t>& rows, const std::vector<int64_t>& tokens, const std::vector<int64_t>& counts) const {
    if (rows.size() != tokens.size() || rows.size() != counts.size())
      throw std::invalid_argument("rows, tokens and counts differ in length");
    for (size_t i = 0; i < rows.size(); ++i) {
      check_row(rows[i]);
      if (tokens[i] < -1 || tokens[i] >= vocabulary_.size())
        throw std::out_of_range("token " + std::to_string(tokens[i]) + " is outside the vocabulary");
    }
    std::vector<std::tuple<std::vector<int64_t>, std::vector<float>, int64_t>> out;
    for (RowLogprobs& entry : vocabulary_.logprobs(*kernels, rows, tokens, counts))
      out.emplace_back(std::move(entry.ids), std::move(entry.values), entry.rank);
    return out;
  }

 private:
  void check_row(int64_t row) const {
    if (row < 0 || row >= vocabulary_.scanned())
      throw std::out_of_range("row " + std::to_string(row) + " was not scanned");
  }
  Vocabulary vocabulary_;
};

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
  using namespace octavo;
  // A process may end while a daemon thread (the server's engine) still holds packed weights. The interpreter does not
  // unwind such threads, so nanobind would list them as leaks at every exit. The system frees them; nothing is lost.
  nb::set_leak_warnings(false);
  m.def("instruction_sets", &instruction_sets);
  m.def("use", &use);
  m.def("in_use", [] { return std::string(kernels->name); });
  m.def("norm", &norm);
  m.def("rotary", &rotary);
  m.def("gate", &gate);
  m.def("argmax", &argmax);
  m.def("uniforms", &uniforms);
  nb::class_<PackedWeight>(m, "PackedWeight")
      .def(nb::init<int, int64_t, int64_t>())
      .def("pack", &PackedWeight::pack)
      .def("run", &PackedWeight::run)
      .def("argmax", &PackedWeight::argmax)
      .def("rows", &PackedWeight::rows)
      .def_prop_ro("bytes", &PackedWeight::bytes);
  m.def("can_load", [](int kind, int64_t k) {
    const StoredType stored = stored_type(kind);
    return stored.block != 0 && k % stored.block == 0;
  });
  nb::class_<LoadQueue>(m, "LoadQueue")
      .def(nb::init<>())
      .def("add",
           [](LoadQueue& q, const PackedWeight& weight, uintptr_t source, int kind, int64_t first, int64_t count,
              bool release) { q.add(weight.load_args(source, kind, first, count), release); })
      .def("run", [](LoadQueue& q, bool threaded, double share) { q.run(*kernels, threaded, share); }, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("done", &LoadQueue::done)
      .def_prop_ro("total", &LoadQueue::total);
  nb::class_<Sampling>(m, "Sampling")
      .def(nb::init<int64_t>())
      .def("scan", &Sampling::scan)
      .def("draw", &Sampling::draw)
      .def("logprobs", &Sampling::logprobs);
  nb::class_<Attention>(m, "Attention")
      .def(nb::init<uintptr_t, int, int64_t, int64_t, int32_t, int32_t, int32_t, int32_t, float, float,
                    const std::vector<int32_t>&, int, int>())
      .def("plan", &Attention::plan)
      .def("attend", &Attention::attend)
      .def("write", &Attention::write)
      .def("copy_blocks", &Attention::copy_blocks)
      .def("split_items", &Attention::split_items)
      .def_prop_ro("tokens", &Attention::tokens);
  use(instruction_sets().front());
}
