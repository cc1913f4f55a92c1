// `LayerStack`: all decoder layers of a step and the final norm in one call, over the kernels in use.
//
// A step of one token is a hundred products of a few microseconds each; between them nothing should happen but the next
// kernel. The layers are those that share one shape: RMS norms, one product for q, k and v, full rotation, a gated MLP.
// What a kernel is given is what the operations of octavo/kernels/cpu/ops.py give it one by one, so the bits are theirs.
//
// Many tokens go through a layer in strips: a thread takes some rows from what attention gave to the next layer's queries,
// keys and values, so that everything in between stays in its own second-level cache; threads meet at attention only. A
// strip reads all weights, so it must be high enough to be worth them, and they few enough. Else all tokens are one strip,
// whose kernels share its work among the threads.
//
// Invariant: weights, norms and biases are borrowed and outlive the stack; activations are float32, contiguous, in
// memory that is kept from step to step and grows with the largest. It knows no Python and no blocks.
#pragma once

#include "packed_weight.h"
#include "paged_attention.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace octavo {

// Weights of one input, whose outputs lie side by side: one, or several where a file keeps its parts in several formats.
struct Product {
  struct Part {
    const PackedWeight* weight;
    const float* bias;  // or null
  };
  std::vector<Part> parts;

  int64_t inputs() const { return parts.front().weight->inputs(); }
  int64_t outputs() const {
    int64_t sum = 0;
    for (const Part& part : parts) sum += part.weight->outputs();
    return sum;
  }
  bool takes_tiles() const { return parts.size() == 1 && parts.front().weight->takes_tiles(); }
};

// Norms are float32 weights, null where the layer has none. Without a norm before it, a product reads the residual.
struct StackLayer {
  const float *attention_norm, *mlp_norm, *post_attention_norm, *post_mlp_norm;
  const float *query_norm, *key_norm;  // of each head; whole_norms: of all heads together
  Product qkv, out, gate_up, down;
  int table;  // of cos and sin, -1: no positions
};

struct StackShape {
  int64_t hidden, inner;
  float eps, residual_scale;
  bool whole_norms;
  Activation activation;
};

struct CosSin {  // float32 [rows, head_dim] each
  const float *cos, *sin;
};

struct TokenRows {  // numbers of a token side by side, `stride` from one token to the next
  const float* at;
  int64_t stride;
};

// Rows [first, first + tokens) of a step, and memory for what becomes of them. Attention's part of it and that of the MLP
// are never used together.
struct Strip {
  int64_t first, tokens;
  bool threaded;  // whether its kernels may share their work
  float *normed, *mixed, *qkv, *key, *gate_up, *gated;
  std::chrono::steady_clock::time_point last{};
  std::array<double, 4> seconds{};
};

// What a product reads: rows of floats, or as tiles (`KernelTable::takes_tiles`).
struct Inputs {
  const float* at;
  int64_t stride;
  bool tiles;
};

struct StackStep {
  int64_t tokens, head_dim;
  const int64_t* positions;    // [tokens], rows of the tables
  std::vector<CosSin> tables;  // one for each `StackLayer::table`, rows of head_dim
  float* residual;             // [tokens, hidden], overwritten
  float* out;                  // [tokens, hidden], normed; NaN for tokens that the planned step does not want
};

enum class Part : int { products = 0, attention = 1, rotation = 2, small = 3 };

class LayerStack {
 public:
  LayerStack(const StackShape& shape, const float* final_norm) : shape_(shape), final_norm_(final_norm) {}

  void add(StackLayer layer);
  // `attention` is planned for this step. Throws what its calls throw, with the layer in front.
  void run(Attention& attention, const StackStep& step);
  double operations(int64_t tokens) const { return 2.0 * static_cast<double>(tokens * weights_); }
  size_t layers() const { return layers_.size(); }

  // Seconds spent in each part since `watch` was last called; nothing is counted before.
  void watch() { watched_ = true, seconds_ = {}; }
  const std::array<double, 4>& seconds() const { return seconds_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Strips {
    int64_t count, height, owners;  // owners: threads that have memory for one
  };
  Strips strips_of(int64_t tokens) const;
  template <class F>
  void each_strip(int64_t tokens, const F& work);
  Strip strip(const Strips& strips, int64_t index, int64_t owner, int64_t tokens) const;

  void prepare(int64_t tokens, int64_t wanted);
  // Of a strip's rows of `dim` inputs, `stride` apart or as tiles.
  static int64_t input_floats(int64_t height, int64_t dim, int64_t stride);
  int64_t strip_floats(int64_t height) const;
  void layers(Attention& attention, const StackStep& step);
  void last_layer(Attention& attention, const StackStep& step);
  Inputs first_norm(size_t index, bool made, Strip& s, const StackStep& step) const;
  void before_attention(size_t index, Strip& s, const Attention& attention, const StackStep& step);
  void write(size_t index, Strip& s, const Attention& attention, const StackStep& step, TokenRows query);
  void query_wanted(Strip& s, const StackStep& step);
  RotaryArgs rotary_args(const StackLayer& layer, const Strip& s, const StackStep& step, TokenRows query) const;
  void after_attention(size_t index, Strip& s, const StackStep& step);
  void multiply(const Product& product, const Inputs& x, float* y, Strip& s) const {
    multiply_range(product, x, y, product.outputs(), 0, product.outputs(), s);
  }
  void multiply_range(const Product& product, const Inputs& x, float* y, int64_t y_stride, int64_t first, int64_t last,
                      Strip& s) const;
  Inputs multiply_gated(const StackLayer& layer, const Inputs& x, Strip& s) const;
  void norm(const float* x, int64_t stride, int64_t dim, const float* weight, float* out, const Strip& s,
            bool tiles = false) const;
  Inputs add_norm(float* residual, const float* post_norm, const float* weight, float* out, bool tiles, Strip& s) const;
  void count(Part part, Strip& s) const;
  void add_seconds(Part part, Clock::time_point start);
  void add_seconds(const Strip& s, int64_t threads);

  // An odd number of cache lines, so that rows do not push each other out of the first-level cache.
  int64_t gated_stride() const { return ((shape_.inner + 15) / 16 | 1) * 16; }

  StackShape shape_;
  const float* final_norm_;
  std::vector<StackLayer> layers_;
  int64_t weights_ = 0;     // numbers in all products
  size_t layer_bytes_ = 0;  // of the largest layer's weights
  int64_t qkv_width_ = 0, query_width_ = 0, key_width_ = 0;

  std::mutex busy_;  // the memory below is one step's
  std::unique_ptr<Region> memory_;  // pages that no step has needed yet are not resident
  int64_t room_ = 0;                // floats
  float *query_ = nullptr, *attended_ = nullptr, *strips_ = nullptr;

  bool watched_ = false;
  std::array<double, 4> seconds_{};
};

}  // namespace octavo
