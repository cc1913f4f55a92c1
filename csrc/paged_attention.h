// `Attention`: a pool of blocks, the plan of one step over it, and the calls of the kernels that read and write it.
//
// It checks what only it knows: lengths, slots, layers; the kernels check block ids as they read them. Types, shapes and
// strides are the caller's. It knows neither Python nor whether its caller holds the interpreter lock.
#pragma once

#include "kernels.h"
#include "module.h"
#include "planner.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace octavo {

struct CacheShape {
  int64_t num_blocks, layers;
  int32_t num_kv_heads, block_size, head_dim;
};

struct LayerPlace {
  int group;
  int64_t place;
  int window;
};

struct GroupStep {
  const int32_t* table;
  int64_t table_stride;
  const int64_t* slots;
};

class Attention {
 public:
  Attention(uintptr_t kv, int kv_type, int64_t num_blocks, int64_t layers, int32_t num_kv_heads, int32_t block_size,
            int32_t head_dim, int32_t num_heads, float scale, float softcap, const std::vector<int32_t>& windows,
            int key_bits, int value_bits)
      : shape_{num_blocks, layers, num_kv_heads, block_size, head_dim} {
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
    planner_.emplace(num_heads / num_kv_heads, num_kv_heads, head_dim, made_for_.query_rows(args_));
    args_.max_rows = planner_->max_rows();
    args_.work_stride = (made_for_.attention_work(args_) + 15) / 16 * 16;
    for (int32_t w : windows) plans_.emplace_back().window = w;
  }

  // query_start int32 [rows + 1], context_len int32 [rows]; capacity: positions a table row has room for. wanted int32
  // [rows]: of how many of a row's last tokens the model's output is read; null: of all.
  void plan(uintptr_t query_start, uintptr_t context_len, int64_t rows, int64_t capacity, uintptr_t wanted) {
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
      planner_->fill(p, rows_, threads_);
      slots = std::max(slots, p.slots);
    }
    plan_tails(at<const int32_t>(wanted));
    slots = std::max(slots, tail_plan_.slots);
    grow(scratch_, slots * (shape_.head_dim + 2));
    grow(work_, args_.work_stride * threads_ + kAlign / 4);
  }

  // A place is that of a layer in its block. query: [tokens, heads, dim] with contiguous tokens; out: contiguous.
  void attend(int64_t place, int window_index, const int32_t* table, int64_t table_stride, const void* query,
              int64_t query_stride, void* out, DType io_type) {
    attend_rows(rows_, plans_.at(static_cast<size_t>(window_index)), place, table, table_stride, query, query_stride,
                out, io_type);
  }

  // The same in the last layer, for the wanted tokens alone: query and out hold nothing else.
  void attend_tails(const int32_t* table, int64_t table_stride, const void* query, int64_t query_stride, void* out,
                    DType io_type) {
    attend_rows(tails_, tail_plan_, places_.back().place, table, table_stride, query, query_stride, out, io_type);
  }

  // Keys and values of tokens [first, first + tokens) of the step to their slots; slots: of all.
  void write(int64_t place, const int64_t* slots, int64_t first, int64_t tokens, bool threaded, const void* key,
             int64_t key_stride, const void* value, int64_t value_stride, DType io_type) const {
    WriteArgs a = write_args(place, slots, first, tokens, key, key_stride, value, value_stride, io_type);
    a.threaded = threaded && omp_get_max_threads() > 1 && tokens * shape_.num_kv_heads * shape_.head_dim > 65536;
    kernels->write(a);
  }

  // Norm (unless q.norm and key_norm are null), rotation and write of q.tokens tokens from `first` on; q.dim is the
  // cache's. No q.x: keys and values alone.
  void rotary_write(int64_t place, const int64_t* slots, int64_t first, const RotaryArgs& q, const float* key_norm,
                    const void* key, int64_t key_stride, const void* value, int64_t value_stride) const {
    kernels->rotary_write(
        {q, key_norm, write_args(place, slots, first, q.tokens, key, key_stride, value, value_stride, q.type)});
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

  // Where each layer of a model lies: its group, its place in a block and the index of its window.
  void set_places(std::vector<LayerPlace> places) { places_ = std::move(places); }
  // Per group, what the planned step reads and writes. It must stay until the next call.
  void set_groups(std::vector<GroupStep> groups) { groups_ = std::move(groups); }
  const LayerPlace& place_of(size_t layer) const { return places_.at(layer); }
  const GroupStep& group_of(size_t layer) const { return groups_.at(static_cast<size_t>(places_.at(layer).group)); }

  const CacheShape& shape() const { return shape_; }
  int32_t num_heads() const { return args_.num_heads; }
  size_t layers() const { return places_.size(); }
  int64_t tokens() const { return tokens_; }
  // Whether there are tokens of the step whose output nobody reads, and the places of the others, ascending.
  bool partly_wanted() const { return partly_wanted_; }
  const std::vector<int32_t>& wanted() const { return wanted_; }
  int64_t split_items(int window_index) const {
    return static_cast<int64_t>(plans_.at(static_cast<size_t>(window_index)).merges.size());
  }

 private:
  void attend_rows(const std::vector<Row>& rows, const WindowPlan& p, int64_t place, const int32_t* table,
                   int64_t table_stride, const void* query, int64_t query_stride, void* out, DType io_type) {
    AttentionArgs a = args_;
    a.kv = layer_base(place);
    a.window = p.window;
    a.rows = rows.data();
    a.table = table, a.table_stride = table_stride;
    a.query = query, a.query_stride = query_stride;
    a.out = out, a.io_type = io_type;
    a.items = p.items.data(), a.num_items = static_cast<int64_t>(p.items.size());
    a.merges = p.merges.data(), a.num_merges = static_cast<int64_t>(p.merges.size());
    a.scratch = scratch_.data(), a.work = aligned(work_.data());
    a.threads = p.worth_threads ? threads_ : 1;
    const int64_t bad = made_for_.attend(a);
    if (bad >= 0)
      throw std::out_of_range("block table row " + std::to_string(bad) + " names a block outside the pool of " +
                              std::to_string(shape_.num_blocks) + " blocks within the keys it reads");
  }
  // The last layer's attention where not all tokens are wanted: rows whose queries are the wanted ones.
  void plan_tails(const int32_t* wanted) {
    partly_wanted_ = wanted != nullptr, tail_plan_.slots = 0;
    if (!wanted) return;
    tails_.clear(), wanted_.clear();
    for (size_t r = 0; r < rows_.size(); ++r) {
      const Row& row = rows_[r];
      if (wanted[r] < 0 || wanted[r] > row.query_len)
        throw std::invalid_argument("row " + std::to_string(r) + ": " + std::to_string(wanted[r]) + " of " +
                                    std::to_string(row.query_len) + " new tokens are wanted");
      tails_.push_back({static_cast<int32_t>(wanted_.size()), wanted[r], row.context_len});
      for (int32_t i = row.query_len - wanted[r]; i < row.query_len; ++i) wanted_.push_back(row.query_start + i);
    }
    tail_plan_.window = plans_.at(static_cast<size_t>(places_.back().window)).window;
    planner_->fill(tail_plan_, tails_, threads_);
  }
  WriteArgs write_args(int64_t place, const int64_t* slots, int64_t first, int64_t tokens, const void* key,
                       int64_t key_stride, const void* value, int64_t value_stride, DType io_type) const {
    const int64_t limit = shape_.num_blocks * shape_.block_size;
    for (int64_t t = first; t < first + tokens; ++t) {
      if (slots[t] < 0 || slots[t] >= limit)
        throw std::out_of_range("slot " + std::to_string(slots[t]) + " of token " + std::to_string(t) +
                                " lies outside the pool of " + std::to_string(limit) + " slots");
    }
    return {layer_base(place), args_.kv_type, args_.block_stride, args_.head_stride, args_.value_offset,
            shape_.block_size, shape_.head_dim, shape_.num_kv_heads, slots + first, tokens,
            key, value, key_stride, value_stride, io_type,
            false, {args_.halves[0], args_.halves[1]}};
  }
  char* layer_base(int64_t place) const {
    if (place < 0 || place >= shape_.layers)
      throw std::out_of_range("layer " + std::to_string(place) + " of a block with " + std::to_string(shape_.layers));
    return base_ + place * layer_bytes_;
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
  const KernelTable& made_for_ = *kernels;  // whose items and memory these are
  std::optional<Planner> planner_;
  AttentionArgs args_{};
  std::vector<WindowPlan> plans_;
  std::vector<Row> rows_, tails_;
  WindowPlan tail_plan_;
  std::vector<int32_t> wanted_;
  bool partly_wanted_ = false;
  std::vector<LayerPlace> places_;
  std::vector<GroupStep> groups_;
  std::vector<float> scratch_, work_;
  int64_t tokens_ = 0;
  int threads_ = 1;
};

}  // namespace octavo
