// See layer_stack.h.
#include "layer_stack.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace octavo {

namespace {

// Rows of a table of cos and sin, at `to`: [2, count, dim].
CosSin turns_at(const CosSin& table, const int64_t* positions, int64_t count, int64_t dim, float* to) {
  for (int64_t t = 0; t < count; ++t) {
    std::memcpy(to + t * dim, table.cos + positions[t] * dim, static_cast<size_t>(4 * dim));
    std::memcpy(to + (count + t) * dim, table.sin + positions[t] * dim, static_cast<size_t>(4 * dim));
  }
  return {to, to + count * dim};
}

// Rows `places`, ascending, to the front.
void move_to_front(const std::vector<int32_t>& places, float* rows, int64_t dim) {
  for (size_t i = 0; i < places.size(); ++i)
    std::memmove(rows + static_cast<int64_t>(i) * dim, rows + places[i] * dim, static_cast<size_t>(4 * dim));
}

}  // namespace

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
    turns_.push_back(turns_at(step.tables[i], step.positions, tokens, dim, at));
  }
}

void LayerStack::layer(size_t index, Attention& attention, const StackStep& step) {
  const StackLayer& l = layers_[index];
  const bool last = index + 1 == layers_.size();
  if (last && attention.partly_wanted()) return last_layer(attention, step);
  attend(index, attention, step.tokens, l.attention_norm ? normed_ : step.residual);
  mlp(l, step, last ? final_norm_ : layers_[index + 1].attention_norm, last ? step.out : normed_);
}

// The last layer where only some tokens' output is read: keys and values of all, and everything else of those.
void LayerStack::last_layer(Attention& attention, const StackStep& step) {
  const StackLayer& l = layers_.back();
  const std::vector<int32_t>& wanted = attention.wanted();
  const int64_t hidden = shape_.hidden;
  const float* x = l.attention_norm ? normed_ : step.residual;
  multiply_range(l.qkv, x, hidden, qkv_, qkv_width_, step.tokens, query_width_, qkv_width_);
  write(layers_.size() - 1, attention, step.tokens, {nullptr, 0});
  std::vector<int64_t> positions;
  for (const int32_t t : wanted) positions.push_back(step.positions[t]);
  StackStep kept = step;
  kept.tokens = static_cast<int64_t>(wanted.size()), kept.positions = positions.data(), kept.out = normed_;
  if (kept.tokens) {
    move_to_front(wanted, step.residual, hidden);
    if (l.attention_norm) move_to_front(wanted, normed_, hidden);
    attend_wanted(attention, kept, x);
    mlp(l, kept, final_norm_, kept.out);
  }
  // Whoever reads a state that was not asked for shall see it.
  std::fill(step.out, step.out + step.tokens * hidden, std::numeric_limits<float>::quiet_NaN());
  for (size_t i = 0; i < wanted.size(); ++i)
    std::memcpy(step.out + wanted[i] * hidden, kept.out + static_cast<int64_t>(i) * hidden,
                static_cast<size_t>(4 * hidden));
  count(Part::small);
}

void LayerStack::attend(size_t index, Attention& attention, int64_t tokens, const float* normed) {
  const LayerPlace& at = attention.place_of(index);
  const GroupStep& group = attention.group_of(index);
  multiply(layers_[index].qkv, normed, shape_.hidden, qkv_, tokens);
  const TokenRows query = write(index, attention, tokens, {qkv_, qkv_width_});
  attention.attend(at.place, at.window, group.table, group.table_stride, query.at, query.stride, attended_, DType::f32);
  count(Part::attention);
  multiply(layers_[index].out, attended_, query_width_, mixed_, tokens);
}

// The same behind the keys and values of the last layer. step, normed: of the wanted tokens alone.
void LayerStack::attend_wanted(Attention& attention, const StackStep& step, const float* normed) {
  const StackLayer& l = layers_.back();
  const GroupStep& group = attention.group_of(layers_.size() - 1);
  const int64_t tokens = step.tokens, dim = attention.shape().head_dim;
  multiply_range(l.qkv, normed, shape_.hidden, query_, query_width_, tokens, 0, query_width_);
  if (shape_.whole_norms) norm(query_, query_width_, tokens, query_width_, l.query_norm, query_);
  count(Part::small);
  if (l.table >= 0) {  // where keys and values were there is room
    const CosSin turns = turns_at(step.tables[static_cast<size_t>(l.table)], step.positions, tokens, dim, qkv_);
    RotaryArgs q = rotary_args(l, {query_, query_width_}, turns);
    q.tokens = tokens, q.heads = query_width_ / dim, q.dim = dim;
    q.threaded = tokens > 1 && worth_threads(tokens * query_width_);
    kernels->rotary(q);
  }
  count(Part::rotation);
  attention.attend_tails(group.table, group.table_stride, query_, query_width_, attended_, DType::f32);
  count(Part::attention);
  multiply(l.out, attended_, query_width_, mixed_, tokens);
}

// Keys and values from `qkv_` into the cache; a query, where there is one, is normed and turned on the way. Returns it.
TokenRows LayerStack::write(size_t index, Attention& attention, int64_t tokens, TokenRows query) {
  const StackLayer& l = layers_[index];
  const int64_t place = attention.place_of(index).place;
  const int64_t* slots = attention.group_of(index).slots;
  TokenRows key = {qkv_ + query_width_, qkv_width_};
  const TokenRows value = {key.at + key_width_, qkv_width_};
  if (shape_.whole_norms) {
    if (query.at) {
      norm(query.at, query.stride, tokens, query_width_, l.query_norm, query_);
      query = {query_, query_width_};
    }
    norm(key.at, key.stride, tokens, key_width_, l.key_norm, key_);
    key = {key_, key_width_};
    count(Part::small);
  }
  if (l.table < 0) {
    attention.write(place, slots, key.at, key.stride, value.at, value.stride, DType::f32);
  } else {
    const RotaryArgs q = rotary_args(l, query, turns_[static_cast<size_t>(l.table)]);
    attention.rotary_write(place, slots, q, shape_.whole_norms ? nullptr : l.key_norm, key.at, key.stride, value.at,
                           value.stride);
    query = {query_, query_width_};
  }
  count(Part::rotation);
  return query;
}

// Into `query_`. Heads are turned one by one, each read before it is written: in place where a query lies there.
RotaryArgs LayerStack::rotary_args(const StackLayer& layer, TokenRows query, const CosSin& turns) const {
  RotaryArgs q{};
  q.x = query.at, q.x_stride = query.stride, q.out = query_, q.eps = shape_.eps, q.type = DType::f32;
  q.cos = turns.cos, q.sin = turns.sin;
  q.norm = shape_.whole_norms ? nullptr : layer.query_norm;
  return q;
}

// From what attention gave, in `mixed_`, to what the next layer reads.
void LayerStack::mlp(const StackLayer& layer, const StackStep& step, const float* next_norm, float* out) {
  const float* x = add_norm(step, layer.post_attention_norm, layer.mlp_norm, normed_);
  multiply(layer.down, gated_, multiply_gated(layer.gate_up, x, step.tokens), mixed_, step.tokens);
  add_norm(step, layer.post_mlp_norm, next_norm, out);
}

// Outputs [first, last) into their places in rows of y. Up to fifteen before them may be written too: a weight's panels
// are not cut.
void LayerStack::multiply_range(const Product& product, const float* x, int64_t stride, float* y, int64_t y_stride,
                                int64_t tokens, int64_t first, int64_t last) {
  for (const Product::Part& part : product.parts) {
    const int64_t outputs = part.weight->outputs();
    const int64_t from = std::max<int64_t>(first, 0) / kPanel * kPanel, to = std::min(last, outputs);
    if (from < to) part.weight->multiply_floats(x, stride, tokens, y + from, y_stride, part.bias, from, to);
    y += outputs, first -= outputs, last -= outputs;
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
