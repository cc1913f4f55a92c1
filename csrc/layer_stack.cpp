// See layer_stack.h.
#include "layer_stack.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace octavo {

namespace {

constexpr int64_t kLine = 16;  // floats of a cache line
int64_t whole_lines(int64_t floats) { return (floats + kLine - 1) / kLine * kLine; }

// Rows `places`, ascending, to the front.
void move_to_front(const std::vector<int32_t>& places, float* rows, int64_t dim) {
  for (size_t i = 0; i < places.size(); ++i)
    std::memmove(rows + static_cast<int64_t>(i) * dim, rows + places[i] * dim, static_cast<size_t>(4 * dim));
}

}  // namespace

void LayerStack::add(StackLayer layer) {
  size_t bytes = 0;
  for (const Product* p : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) {
    weights_ += p->inputs() * p->outputs();
    for (const Product::Part& part : p->parts) bytes += part.weight->bytes();
  }
  layer_bytes_ = std::max(layer_bytes_, bytes);
  qkv_width_ = layer.qkv.outputs();
  query_width_ = layer.out.inputs();
  key_width_ = (qkv_width_ - query_width_) / 2;
  layers_.push_back(std::move(layer));
}

void LayerStack::run(Attention& attention, const StackStep& step) {
  const std::lock_guard<std::mutex> lock(busy_);
  prepare(step.tokens, attention.partly_wanted() ? static_cast<int64_t>(attention.wanted().size()) : 0);
  layers(attention, step);
}

// ---- Strips ----------------------------------------------------------------------------------------------------------

// A multiple of the threads where there is more than one, so that none waits long for the last. Every strip reads all
// weights of a layer: where those are many, threads share products instead, which read them once for more rows.
LayerStack::Strips LayerStack::strips_of(int64_t tokens) const {
  constexpr int64_t kHeight = 128, kWorth = 192;  // measured: fewer rows wait for weights, more leave the cache
  constexpr size_t kMostBytes = size_t{48} << 20;  // measured: 31 MB gain an eighth by strips, 94 MB lose a tenth
  const int64_t threads = omp_get_max_threads();
  if (layer_bytes_ > kMostBytes || tokens < std::max<int64_t>(2, threads) * kWorth) return {1, tokens, 1};
  const int64_t count = ((tokens + kHeight - 1) / kHeight + threads - 1) / threads * threads;
  const int64_t height = ((tokens + count - 1) / count + kPanel - 1) / kPanel * kPanel;
  return {(tokens + height - 1) / height, height, threads};
}

int64_t LayerStack::input_floats(int64_t height, int64_t dim, int64_t stride) {
  return whole_lines(std::max(height * stride, whole_rows(height) * dim / 2));
}

int64_t LayerStack::strip_floats(int64_t height) const {
  const int64_t attention = whole_lines(height * qkv_width_) + whole_lines(height * key_width_);
  const int64_t mlp = whole_lines(height * 2 * shape_.inner) + input_floats(height, shape_.inner, gated_stride());
  const int64_t hidden = shape_.hidden;
  return input_floats(height, hidden, hidden) + whole_lines(height * hidden) + std::max(attention, mlp);
}

void LayerStack::prepare(int64_t tokens, int64_t wanted) {
  const auto floats = [&](const Strips& strips) { return strips.owners * strip_floats(strips.height); };
  const int64_t queries = whole_lines(tokens * query_width_);
  const int64_t end = 2 * queries + std::max(floats(strips_of(tokens)), floats(strips_of(wanted)));
  if (room_ < end) {
    memory_.reset();  // the old one first: both together would be a peak
    memory_ = std::make_unique<Region>(static_cast<size_t>(end) * sizeof(float));
    room_ = end;
  }
  query_ = reinterpret_cast<float*>(memory_->start());
  attended_ = query_ + queries, strips_ = attended_ + queries;
}

Strip LayerStack::strip(const Strips& strips, int64_t index, int64_t owner, int64_t tokens) const {
  Strip s{};
  s.first = index * strips.height, s.tokens = std::min(strips.height, tokens - s.first);
  s.threaded = strips.count == 1;
  s.normed = strips_ + owner * strip_floats(strips.height);
  s.mixed = s.normed + input_floats(strips.height, shape_.hidden, shape_.hidden);
  s.qkv = s.gate_up = s.mixed + whole_lines(strips.height * shape_.hidden);
  s.key = s.qkv + whole_lines(strips.height * qkv_width_);
  s.gated = s.gate_up + whole_lines(strips.height * 2 * shape_.inner);
  if (watched_) s.last = Clock::now();
  return s;
}

// work(strip) for all rows of a step. What a thread throws is thrown here.
template <class F>
void LayerStack::each_strip(int64_t tokens, const F& work) {
  const Strips strips = strips_of(tokens);
  if (strips.count == 1) {  // outside of any parallel region: its kernels open their own
    Strip s = strip(strips, 0, 0, tokens);
    work(s);
    add_seconds(s, 1);
    return;
  }
  std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < strips.count; ++i) {
    Strip s = strip(strips, i, omp_get_thread_num(), tokens);
    std::exception_ptr thrown;
    try {
      work(s);
    } catch (...) {
      thrown = std::current_exception();
    }
#pragma omp critical(octavo_strip)
    {
      if (thrown && !failure) failure = thrown;
      add_seconds(s, std::min(strips.owners, strips.count));
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void LayerStack::count(Part part, Strip& s) const {
  if (!watched_) return;
  const Clock::time_point now = Clock::now();
  s.seconds[static_cast<size_t>(part)] += std::chrono::duration<double>(now - s.last).count();
  s.last = now;
}

// ---- Layers ----------------------------------------------------------------------------------------------------------

void LayerStack::layers(Attention& attention, const StackStep& step) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    try {
      if (i + 1 == layers_.size() && attention.partly_wanted()) return last_layer(attention, step);
      each_strip(step.tokens, [&](Strip& s) {
        if (i) after_attention(i - 1, s, step);
        before_attention(i, s, attention, step);
      });
      const Clock::time_point start = Clock::now();
      const LayerPlace& at = attention.place_of(i);
      const GroupStep& group = attention.group_of(i);
      attention.attend(at.place, at.window, group.table, group.table_stride, query_, query_width_, attended_,
                       DType::f32);
      add_seconds(Part::attention, start);
    } catch (const std::out_of_range& error) {
      throw std::out_of_range("layer " + std::to_string(i) + ": " + error.what());
    }
  }
  each_strip(step.tokens, [&](Strip& s) { after_attention(layers_.size() - 1, s, step); });
}

// The last layer where only some tokens' output is read: keys and values of all, and everything else of those.
void LayerStack::last_layer(Attention& attention, const StackStep& step) {
  const size_t last = layers_.size() - 1;
  const StackLayer& l = layers_[last];
  const int64_t hidden = shape_.hidden;
  each_strip(step.tokens, [&](Strip& s) {
    if (last) after_attention(last - 1, s, step);
    multiply_range(l.qkv, first_norm(last, last != 0, s, step), s.qkv, qkv_width_, query_width_, qkv_width_, s);
    write(last, s, attention, step, {nullptr, 0});
  });
  const std::vector<int32_t>& wanted = attention.wanted();
  std::vector<int64_t> positions;
  for (const int32_t t : wanted) positions.push_back(step.positions[t]);
  StackStep kept = step;
  kept.tokens = static_cast<int64_t>(wanted.size()), kept.positions = positions.data();
  if (kept.tokens) {
    move_to_front(wanted, step.residual, hidden);
    each_strip(kept.tokens, [&](Strip& s) { query_wanted(s, kept); });
    const Clock::time_point start = Clock::now();
    const GroupStep& group = attention.group_of(last);
    attention.attend_tails(group.table, group.table_stride, query_, query_width_, attended_, DType::f32);
    add_seconds(Part::attention, start);
    each_strip(kept.tokens, [&](Strip& s) { after_attention(last, s, kept); });
  }
  // To their places from behind: none is overwritten before it was moved. Whoever reads a state that was not asked for
  // shall see it.
  int64_t end = step.tokens;
  const auto none = [&](int64_t from) {
    std::fill(step.out + from * hidden, step.out + end * hidden, std::numeric_limits<float>::quiet_NaN());
  };
  for (size_t i = wanted.size(); i-- > 0;) {
    none(wanted[i] + 1);
    std::memmove(step.out + wanted[i] * hidden, step.out + static_cast<int64_t>(i) * hidden,
                 static_cast<size_t>(4 * hidden));
    end = wanted[i];
  }
  none(0);
}

// What the products before attention read: the residual, where a layer has no norm there. made: the norm is in `normed`,
// where the layer before has left it.
Inputs LayerStack::first_norm(size_t index, bool made, Strip& s, const StackStep& step) const {
  const StackLayer& l = layers_[index];
  const float* residual = step.residual + s.first * shape_.hidden;
  if (!l.attention_norm) return {residual, shape_.hidden, false};
  const bool tiles = l.qkv.takes_tiles();
  if (!made) norm(residual, shape_.hidden, shape_.hidden, l.attention_norm, s.normed, s, tiles);
  count(Part::small, s);
  return {s.normed, shape_.hidden, tiles};
}

void LayerStack::before_attention(size_t index, Strip& s, const Attention& attention, const StackStep& step) {
  multiply(layers_[index].qkv, first_norm(index, index != 0, s, step), s.qkv, s);
  write(index, s, attention, step, {s.qkv, qkv_width_});
}

// Keys and values from `qkv` into the cache; a query, where there is one, is normed and turned on its way to `query_`.
void LayerStack::write(size_t index, Strip& s, const Attention& attention, const StackStep& step, TokenRows query) {
  const StackLayer& l = layers_[index];
  const int64_t place = attention.place_of(index).place;
  const int64_t* slots = attention.group_of(index).slots;
  float* turned = query_ + s.first * query_width_;
  TokenRows key = {s.qkv + query_width_, qkv_width_};
  const TokenRows value = {key.at + key_width_, qkv_width_};
  if (shape_.whole_norms) {
    if (query.at) {
      norm(query.at, query.stride, query_width_, l.query_norm, turned, s);
      query = {turned, query_width_};
    }
    norm(key.at, key.stride, key_width_, l.key_norm, s.key, s);
    key = {s.key, key_width_};
    count(Part::small, s);
  }
  if (l.table < 0) {
    for (int64_t t = 0; query.at && query.at != turned && t < s.tokens; ++t)
      std::memcpy(turned + t * query_width_, query.at + t * query.stride, static_cast<size_t>(4 * query_width_));
    attention.write(place, slots, s.first, s.tokens, s.threaded, key.at, key.stride, value.at, value.stride,
                    DType::f32);
  } else {
    RotaryArgs q = rotary_args(l, s, step, query);
    q.heads = query.at ? query_width_ / q.dim : 0;
    q.threaded = s.threaded && s.tokens > 1 && worth_threads(s.tokens * (qkv_width_ - key_width_));
    attention.rotary_write(place, slots, s.first, q, shape_.whole_norms ? nullptr : l.key_norm, key.at, key.stride,
                           value.at, value.stride);
  }
  count(Part::rotation, s);
}

// Queries of the last layer's wanted tokens. step: of those alone.
void LayerStack::query_wanted(Strip& s, const StackStep& step) {
  const StackLayer& l = layers_.back();
  float* query = query_ + s.first * query_width_;
  multiply_range(l.qkv, first_norm(layers_.size() - 1, false, s, step), query, query_width_, 0, query_width_, s);
  if (shape_.whole_norms) norm(query, query_width_, query_width_, l.query_norm, query, s);
  count(Part::small, s);
  if (l.table >= 0) {
    RotaryArgs q = rotary_args(l, s, step, {query, query_width_});
    q.heads = query_width_ / q.dim;
    q.threaded = s.threaded && s.tokens > 1 && worth_threads(s.tokens * query_width_);
    kernels->rotary(q);
  }
  count(Part::rotation, s);
}

// Into `query_`. Heads are turned one by one, each read before it is written: in place where a query lies there.
RotaryArgs LayerStack::rotary_args(const StackLayer& layer, const Strip& s, const StackStep& step,
                                   TokenRows query) const {
  const CosSin& table = step.tables[static_cast<size_t>(layer.table)];
  RotaryArgs q{};
  q.x = query.at, q.x_stride = query.stride, q.out = query_ + s.first * query_width_, q.eps = shape_.eps;
  q.type = DType::f32, q.tokens = s.tokens, q.dim = step.head_dim;
  q.cos = table.cos, q.sin = table.sin, q.places = step.positions + s.first;
  q.norm = shape_.whole_norms ? nullptr : layer.query_norm;
  return q;
}

// From what attention gave to what the next layer reads.
void LayerStack::after_attention(size_t index, Strip& s, const StackStep& step) {
  const StackLayer& l = layers_[index];
  const bool last = index + 1 == layers_.size();
  float* residual = step.residual + s.first * shape_.hidden;
  multiply(l.out, {attended_ + s.first * query_width_, query_width_, false}, s.mixed, s);
  const Inputs x = add_norm(residual, l.post_attention_norm, l.mlp_norm, s.normed, l.gate_up.takes_tiles(), s);
  multiply(l.down, multiply_gated(l, x, s), s.mixed, s);
  if (last)
    add_norm(residual, l.post_mlp_norm, final_norm_, step.out + s.first * shape_.hidden, false, s);
  else
    add_norm(residual, l.post_mlp_norm, layers_[index + 1].attention_norm, s.normed,
             layers_[index + 1].qkv.takes_tiles(), s);
}

// Outputs [first, last) into their places in rows of y. Up to fifteen before them may be written too: a weight's panels
// are not cut.
void LayerStack::multiply_range(const Product& product, const Inputs& x, float* y, int64_t y_stride, int64_t first,
                                int64_t last, Strip& s) const {
  for (const Product::Part& part : product.parts) {
    const int64_t outputs = part.weight->outputs();
    const int64_t from = std::max<int64_t>(first, 0) / kPanel * kPanel, to = std::min(last, outputs);
    if (from < to)
      part.weight->multiply_floats(x.at, x.stride, s.tokens, y + from, y_stride, part.bias, from, to, x.tiles,
                                   s.threaded);
    y += outputs, first -= outputs, last -= outputs;
  }
  count(Part::products, s);
}

// The MLP's first product and its gate, in one where a kernel does both, and then as the second product wants it.
Inputs LayerStack::multiply_gated(const StackLayer& layer, const Inputs& x, Strip& s) const {
  const Product& product = layer.gate_up;
  const Product::Part& first = product.parts.front();
  const int64_t inner = shape_.inner, apart = gated_stride();
  const bool tiles = layer.down.takes_tiles() && product.takes_tiles();
  if (product.parts.size() == 1 && first.weight->multiply_gated(x.at, x.stride, s.tokens, s.gated, apart, first.bias,
                                                                shape_.activation, x.tiles, tiles, s.threaded)) {
    count(Part::products, s);
    return {s.gated, apart, tiles};
  }
  multiply(product, x, s.gate_up, s);
  kernels->gate({s.gate_up, s.gated, 2 * inner, s.tokens, inner, shape_.activation, DType::f32,
                 s.threaded && s.tokens > 1 && worth_threads(s.tokens * inner * 4)});
  count(Part::small, s);
  return {s.gated, inner, false};
}

void LayerStack::norm(const float* x, int64_t stride, int64_t dim, const float* weight, float* out, const Strip& s,
                      bool tiles) const {
  kernels->norm({x, nullptr, nullptr, out, stride, s.tokens, dim, weight, shape_.eps, DType::f32,
                 s.threaded && s.tokens > 1 && worth_threads(s.tokens * dim), nullptr, tiles});
}

// residual += scale * (post norm of) mixed, and its norm in `out`. Returns what the next product reads.
Inputs LayerStack::add_norm(float* residual, const float* post_norm, const float* weight, float* out, bool tiles,
                            Strip& s) const {
  const int64_t rows = s.tokens, dim = shape_.hidden;
  const bool scaled = shape_.residual_scale != 1.0f;
  if (post_norm && (scaled || !weight)) norm(s.mixed, dim, dim, post_norm, s.mixed, s), post_norm = nullptr;
  if (scaled) {
    for (int64_t i = 0; i < rows * dim; ++i) s.mixed[i] *= shape_.residual_scale;
  }
  if (weight) {
    kernels->norm({s.mixed, residual, residual, out, dim, rows, dim, weight, shape_.eps, DType::f32,
                   s.threaded && rows > 1 && worth_threads(rows * dim), post_norm, tiles});
  } else {
    for (int64_t i = 0; i < rows * dim; ++i) residual[i] += s.mixed[i];
  }
  count(Part::small, s);
  return weight ? Inputs{out, dim, tiles} : Inputs{residual, dim, false};
}

void LayerStack::add_seconds(Part part, Clock::time_point start) {
  seconds_[static_cast<size_t>(part)] += std::chrono::duration<double>(Clock::now() - start).count();
}

// Of a strip beside which `threads` - 1 others ran.
void LayerStack::add_seconds(const Strip& s, int64_t threads) {
  for (size_t i = 0; i < seconds_.size(); ++i) seconds_[i] += s.seconds[i] / static_cast<double>(threads);
}

}  // namespace octavo
