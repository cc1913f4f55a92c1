// `LayerStack`: all decoder layers of a step and the final norm in one call, over the kernels in use.
//
// A step of one token is a hundred products of a few microseconds each; between them nothing should happen but the next
// kernel. The layers are those that share one shape: RMS norms, one product for q, k and v, full rotation, a gated MLP.
// What a kernel is given is what the operations of octavo/kernels/cpu/ops.py give it one by one, so the bits are theirs.
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

struct StackStep {
  int64_t tokens;
  const int64_t* positions;    // [tokens], rows of the tables
  std::vector<CosSin> tables;  // one for each `StackLayer::table`
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

  void prepare(const Attention& attention, const StackStep& step);
  void layer(size_t index, Attention& attention, const StackStep& step);
  void last_layer(Attention& attention, const StackStep& step);
  void attend(size_t index, Attention& attention, int64_t tokens, const float* normed);
  void attend_wanted(Attention& attention, const StackStep& step, const float* normed);
  TokenRows write(size_t index, Attention& attention, int64_t tokens, TokenRows query);
  RotaryArgs rotary_args(const StackLayer& layer, TokenRows query, const CosSin& turns) const;
  void mlp(const StackLayer& layer, const StackStep& step, const float* next_norm, float* out);
  void multiply(const Product& product, const float* x, int64_t stride, float* y, int64_t tokens) {
    multiply_range(product, x, stride, y, product.outputs(), tokens, 0, product.outputs());
  }
  void multiply_range(const Product& product, const float* x, int64_t stride, float* y, int64_t y_stride,
                      int64_t tokens, int64_t first, int64_t last);
  int64_t multiply_gated(const Product& product, const float* x, int64_t tokens);
  void norm(const float* x, int64_t stride, int64_t rows, int64_t dim, const float* weight, float* out);
  const float* add_norm(const StackStep& step, const float* post_norm, const float* weight, float* out);
  void count(Part part);

  // An odd number of cache lines, so that rows do not push each other out of the first-level cache.
  int64_t gated_stride() const { return ((shape_.inner + 15) / 16 | 1) * 16; }

  StackShape shape_;
  const float* final_norm_;
  std::vector<StackLayer> layers_;
  int64_t weights_ = 0;  // numbers in all products
  int64_t qkv_width_ = 0, query_width_ = 0, key_width_ = 0;

  std::mutex busy_;  // the memory below is one step's
  std::unique_ptr<Region> memory_;  // pages that no step has needed yet are not resident
  int64_t room_ = 0;                // floats
  std::vector<CosSin> turns_;  // of the tokens of a step
  float *normed_ = nullptr, *mixed_ = nullptr, *qkv_ = nullptr, *query_ = nullptr, *key_ = nullptr;
  float *attended_ = nullptr, *gate_up_ = nullptr, *gated_ = nullptr;

  bool watched_ = false;
  std::array<double, 4> seconds_{};
  Clock::time_point last_;
};

}  // namespace octavo
