// See layer_stack.h.
#include "layer_stack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace octavo {

void LayerStack::add(StackLayer layer) {
  for (const Product* p : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) weights_ += p->inputs() * p->outputs();
  qkv_width_ = layer.qkv.outputs();
  query_width_ = layer.out.inputs();
  key_width_ = (qkv_width_ - query_width_) / 2;
  layers_.push_back(std::move(layer));
}

void LayerStack::run(Attention& attention, const StackStep& step) {
  const std::lock_guard<std::mutex> lock(busy_);
  if (watched_) last_ = Clock::now();
  prepare(attention, step);
  const float* first = layers_.front().attention_norm;
  if (first) norm(step.residual, shape_.hidden, step.tokens, shape_.hidden, first, normed_);
  count(Part::small);
  for (size_t i = 0; i < layers_.size(); ++i) {
    try {
      layer(i, attention, step);
    } catch (const std::out_of_range& error) {
      throw std::out_of_range("layer " + std::to_string(i) + ": " + error.what());
    }
  }
}

// Places of this step in the memory. Attention's buffers and those of the MLP are never used together.
void LayerStack::prepare(const Attention& attention, const StackStep& step) {
  constexpr int64_t kLine = 16;  // floats of a cache line
  const int64_t tokens = step.tokens, dim = attention.shape().head_dim;
  int64_t end = 0;
  const auto take = [&](int64_t floats) {
    const int64_t start = end;
    end += (floats + kLine - 1) / kLine * kLine;
    return start;
  };
  const int64_t normed = take(tokens * shape_.hidden), mixed = take(tokens * shape_.hidden), shared = end;
  const int64_t qkv = take(tokens * qkv_width_), query = take(tokens * query_width_), key = take(tokens * key_width_);
  const int64_t attended = take(tokens * query_width_), first_end = end;
  end = shared;
  const int64_t gate_up = take(tokens * 2 * shape_.inner), gated = take(tokens * gated_stride());
  end = std::max(end, first_end);
  const int64_t turns = take(2 * tokens * dim * static_cast<int64_t>(step.tables.size()));
  if (room_ < end) {
    memory_.reset();  // the old one first: both together would be a peak
    memory_ = std::make_unique<Region>(static_cast<size_t>(end) * sizeof(float));
    room_ = end;
  }
  float* base = reinterpret_cast<float*>(memory_->start());
  normed_ = base + normed, mixed_ = base + mixed, qkv_ = base + qkv, query_ = base + query, key_ = base + key;
  attended_ = base + attended, gate_up_ = base + gate_up, gated_ = base + gated;
  turns_.clear();
  for (size_t i = 0; i < step.tables.size(); ++i) {
    float* at = base + turns + 2 * tokens * dim * static_cast<int64_t>(i);
    turns_.push_back({at, at + tokens * dim});
    for (int64_t t = 0; t < tokens; ++t) {
      std::memcpy(at + t * dim, step.tables[i].cos + step.positions[t] * dim, static_cast<size_t>(4 * dim));
      std::memcpy(at + (tokens + t) * dim, step.tables[i].sin + step.positions[t] * dim, static_cast<size_t>(4 * dim));
    }
  }
}

void LayerStack::layer(size_t index, Attention& attention, const StackStep& step) {
  const StackLayer& l = layers_[index];
  const bool last = index + 1 == layers_.size();
  attend(index, attention, step.tokens, l.attention_norm ? normed_ : step.residual);
  const float* x = add_norm(step, l.post_attention_norm, l.mlp_norm, normed_);
  multiply(l.down, gated_, multiply_gated(l.gate_up, x, step.tokens), mixed_, step.tokens);
  add_norm(step, l.post_mlp_norm, last ? final_norm_ : layers_[index + 1].attention_norm, last ? step.out : normed_);
}

void LayerStack::attend(size_t index, Attention& attention, int64_t tokens, const float* normed) {
  const StackLayer& l = layers_[index];
  const LayerPlace& at = attention.place_of(index);
  const GroupStep& group = attention.group_of(index);
  multiply(l.qkv, normed, shape_.hidden, qkv_, tokens);
  const float *query = qkv_, *key = qkv_ + query_width_, *value = key + key_width_;
  int64_t query_stride = qkv_width_, key_stride = qkv_width_;
  if (shape_.whole_norms) {
    norm(query, qkv_width_, tokens, query_width_, l.query_norm, query_);
    norm(key, qkv_width_, tokens, key_width_, l.key_norm, key_);
    query = query_, key = key_, query_stride = query_width_, key_stride = key_width_;
    count(Part::small);
  }
  if (l.table < 0) {
    attention.write(at.place, group.slots, key, key_stride, value, qkv_width_, DType::f32);
  } else {
    RotaryArgs q{};
    // Heads are turned one by one, each read before it is written: in place where the norm left a copy.
    q.x = query, q.x_stride = query_stride, q.out = query_, q.eps = shape_.eps, q.type = DType::f32;
    q.cos = turns_[static_cast<size_t>(l.table)].cos, q.sin = turns_[static_cast<size_t>(l.table)].sin;
    q.norm = shape_.whole_norms ? nullptr : l.query_norm;
    attention.rotary_write(at.place, group.slots, q, shape_.whole_norms ? nullptr : l.key_norm, key, key_stride, value,
                           qkv_width_);
    query = query_, query_stride = query_width_;
  }
  count(Part::rotation);
  attention.attend(at.place, at.window, group.table, group.table_stride, query, query_stride, attended_, DType::f32);
  count(Part::attention);
  multiply(l.out, attended_, query_width_, mixed_, tokens);
}

void LayerStack::multiply(const Product& product, const float* x, int64_t stride, float* y, int64_t tokens) {
  const int64_t width = product.outputs();
  for (const Product::Part& part : product.parts) {
    part.weight->multiply_floats(x, stride, tokens, y, width, part.bias);
    y += part.weight->outputs();
  }
  count(Part::products);
}

// The MLP's first product and its gate, in one where a kernel does both. Returns the row stride of `gated_`.
int64_t LayerStack::multiply_gated(const Product& product, const float* x, int64_t tokens) {
  const Product::Part& first = product.parts.front();
  const int64_t inner = shape_.inner, hidden = shape_.hidden, apart = gated_stride();
  if (product.parts.size() == 1 &&
      first.weight->multiply_gated(x, hidden, tokens, gated_, apart, first.bias, shape_.activation)) {
    count(Part::products);
    return apart;
  }
  multiply(product, x, hidden, gate_up_, tokens);
  kernels->gate({gate_up_, gated_, 2 * inner, tokens, inner, shape_.activation, DType::f32,
                 tokens > 1 && worth_threads(tokens * inner * 4)});
  count(Part::small);
  return inner;
}

void LayerStack::norm(const float* x, int64_t stride, int64_t rows, int64_t dim, const float* weight, float* out) {
  kernels->norm({x, nullptr, nullptr, out, stride, rows, dim, weight, shape_.eps, DType::f32,
                 rows > 1 && worth_threads(rows * dim)});
}

// residual += scale * (post norm of) mixed, and its norm in `out`. Returns what the next product reads.
const float* LayerStack::add_norm(const StackStep& step, const float* post_norm, const float* weight, float* out) {
  const int64_t rows = step.tokens, dim = shape_.hidden;
  const bool scaled = shape_.residual_scale != 1.0f;
  if (post_norm && (scaled || !weight)) norm(mixed_, dim, rows, dim, post_norm, mixed_), post_norm = nullptr;
  if (scaled) {
    for (int64_t i = 0; i < rows * dim; ++i) mixed_[i] *= shape_.residual_scale;
  }
  if (weight) {
    kernels->norm({mixed_, step.residual, step.residual, out, dim, rows, dim, weight, shape_.eps, DType::f32,
                   rows > 1 && worth_threads(rows * dim), post_norm});
  } else {
    for (int64_t i = 0; i < rows * dim; ++i) step.residual[i] += mixed_[i];
  }
  count(Part::small);
  return weight ? out : step.residual;
}

void LayerStack::count(Part part) {
  if (!watched_) return;
  const Clock::time_point now = Clock::now();
  seconds_[static_cast<size_t>(part)] += std::chrono::duration<double>(now - last_).count();
  last_ = now;
}

}  // namespace octavo
