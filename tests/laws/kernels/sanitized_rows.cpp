// Runs the row algorithms of csrc/ops under the sanitizers that it is compiled with.
//
// Every buffer is exactly as long as a row algorithm may touch. Beside the lanes of the CPU runs a
// block of CUDA threads played by one thread: the same spans, packs and order of elements, without
// synchronisation. Both have to agree.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "activation_rows.h"
#include "adamw_rows.h"
#include "attention_rows.h"
#include "dropout_rows.h"
#include "loss_rows.h"
#include "norm_rows.h"
#include "paged_rows.h"
#include "product_rows.h"
#include "rotary_rows.h"

using namespace megatron;
using namespace megatron::OPS_TARGET;

static int failures = 0;

static void expect(bool holds, const char* what, double found) {
  if (holds) return;
  std::fprintf(stderr, "%s: %.9g\n", what, found);
  ++failures;
}

// The order of elements of BlockLanes, thread by thread.
template <int W>
struct StripedLanes {
  static constexpr int kThreads = 64;

  bool is_first() const { return true; }

  template <class A, class F, class... Spans>
  void each(int64_t n, F f, Spans... spans) const {
    for (int64_t thread = 0; thread < kThreads; ++thread)
      for (int64_t i = thread * W; i < n; i += int64_t(kThreads) * W) visit<A, W>(i, f, spans...);
  }

  template <class A, class F, class... Spans>
  A sum(int64_t n, F f, Spans... spans) const {
    A total = 0;
    for (int64_t thread = 0; thread < kThreads; ++thread) {
      A value = 0;
      for (int64_t i = thread * W; i < n; i += int64_t(kThreads) * W)
        value += visit_sum<A, W>(i, f, spans...);
      total += value;
    }
    return total;
  }

  template <class A, class F, class... Spans>
  ExpSum<A> sum_exp(int64_t n, F f, Spans... spans) const {
    ExpSum<A> total = no_exponentials<A>();
    for (int64_t thread = 0; thread < kThreads; ++thread) {
      ExpSum<A> value = no_exponentials<A>();
      for (int64_t i = thread * W; i < n; i += int64_t(kThreads) * W)
        value = both(value, visit_sum_exp<A, W>(i, f, spans...));
      total = both(total, value);
    }
    return total;
  }
};

// A buffer on the heap, aligned as CUDA's are, of exactly `count` elements.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count, bool is_random = true) : count_(count) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 32, count * sizeof(T) + (count == 0)) != 0) std::abort();
    data_.reset(static_cast<T*>(memory));
    if constexpr (std::is_same_v<T, int64_t>) return;
    else if constexpr (std::is_integral_v<T>)
      for (int64_t i = 0; i < count; ++i) data_.get()[i] = T(i * (sizeof(T) == 1 ? 37 : 30011));
    else for (int64_t i = 0; i < count; ++i)
      round_to(
          Accumulator<T>(is_random ? std::rand() / double(RAND_MAX) * 2 - 0.5 : NAN), data_.get()[i]);
  }
  T* get() { return data_.get(); }
  double at(int64_t i) { return to_accumulator(data_.get()[i]); }
  int64_t size() const { return count_; }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  int64_t count_;
  std::unique_ptr<T, Free> data_;
};

template <class T>
static void expect_close(Buffer<T>& found, Buffer<T>& expected, const char* what, double ulp) {
  for (int64_t i = 0; i < found.size(); ++i) {
    const double error = std::fabs(found.at(i) - expected.at(i));
    expect(error <= 64 * ulp * (1 + std::fabs(expected.at(i))), what, error);
  }
}

template <class X, class Y, bool kCentered>
struct Results {
  using A = Accumulator<X>;
  Buffer<Y> out;
  Buffer<X> sum, grad_x;
  Buffer<A> mean, rstd, grad_weight, grad_bias;

  Results(int64_t rows, int64_t n)
      : out(rows * n, false), sum(rows * n, false), grad_x(rows * n, false), mean(rows, false),
        rstd(rows, false), grad_weight(n, false), grad_bias(n, false) {}

  template <class Lanes>
  void compute(NormCall call, const Lanes& lanes) {
    call.out = out.get();
    call.sum = sum.get();
    call.mean = mean.get();
    call.rstd = rstd.get();
    call.grad_x = grad_x.get();
    for (int64_t row = 0; row < call.rows; ++row)
      NormRows<X, Y, kCentered>{call}.forward(lanes, row);
    if (call.residual != nullptr) call.x = sum.get();
    NormRows<X, Y, kCentered>{call}.backward(
        lanes, 0, call.rows, grad_weight.get(), grad_bias.get());
  }
};

template <class X, class Y, bool kCentered>
static void compare(int64_t rows, int64_t n, bool has_residual) {
  Buffer<X> x(rows * n), residual(rows * n), grad_sum(rows * n);
  Buffer<Y> weight(n), bias(n), grad(rows * n);
  NormCall call{};
  call.rows = rows;
  call.width = n;
  call.epsilon = 1e-3;
  call.x = x.get();
  call.weight = weight.get();
  call.bias = bias.get();
  call.grad = grad.get();
  if (has_residual) {
    call.residual = residual.get();
    call.grad_sum = grad_sum.get();
  }
  Results<X, Y, kCentered> thread(rows, n), block(rows, n);
  thread.compute(call, ThreadLanes());
  constexpr int kWide = NormRows<X, Y, kCentered>::kWide;
  if (n % kWide == 0)
    block.compute(call, StripedLanes<kWide>());
  else
    block.compute(call, StripedLanes<1>());
  const double ulp = sizeof(X) == 8 ? 1e-15 : 1e-6;
  const double of_x = sizeof(X) == 2 ? 1e-2 / 64 : ulp, of_y = sizeof(Y) == 2 ? 1e-2 / 64 : ulp;
  expect_close(block.out, thread.out, "out", of_y);
  expect_close(block.grad_x, thread.grad_x, "grad_x", of_x);
  expect_close(block.rstd, thread.rstd, "rstd", ulp);
  expect_close(block.grad_weight, thread.grad_weight, "grad_weight", ulp);
  if (has_residual) expect_close(block.sum, thread.sum, "sum", 0);
  if (kCentered) {
    expect_close(block.mean, thread.mean, "mean", ulp);
    expect_close(block.grad_bias, thread.grad_bias, "grad_bias", ulp);
  }
}

template <class X, class Y>
static void compare_shapes() {
  for (int64_t rows : {1, 3})
    for (int64_t n : {1, 2, 7, 8, 31, 32, 512, 520, 1031, 4097})
      for (bool has_residual : {false, true}) {
        compare<X, Y, false>(rows, n, has_residual);
        compare<X, Y, true>(rows, n, has_residual);
      }
}

template <class X>
struct Losses {
  Buffer<Accumulator<X>> statistics;
  Buffer<X> gradient;

  template <class Lanes>
  Losses(LossCall call, Buffer<X>& logits, const Lanes& lanes)
      : statistics(3 * call.rows, false), gradient(logits.size(), false) {
    call.statistics = statistics.get();
    call.logits = logits.get();
    for (int64_t row = 0; row < call.rows; ++row) LossRows<X>{call}.statistics(lanes, row);
    for (int64_t i = 0; i < logits.size(); ++i) gradient.get()[i] = logits.get()[i];
    call.logits = gradient.get();
    for (int64_t row = 0; row < call.rows; ++row) LossRows<X>{call}.gradient(lanes, row);
  }
};

template <class X>
static void compare_losses(int64_t rows, int64_t n, int64_t true_width) {
  using A = Accumulator<X>;
  Buffer<X> logits(rows * n);
  Buffer<A> shift(rows), scale(rows), at_label(rows);
  Buffer<int64_t> label(rows, false);
  for (int64_t row = 0; row < rows; ++row) {
    label.get()[row] = row - 1 + (row > 1) * (n - 2);  // none, the first, the last
    if (row == 1) scale.get()[row] = at_label.get()[row] = 0;
  }
  LossCall call{};
  call.rows = rows;
  call.width = n;
  call.true_width = true_width;
  call.label = label.get();
  call.shift = shift.get();
  call.scale = scale.get();
  call.at_label = at_label.get();
  Losses<X> thread(call, logits, ThreadLanes());
  constexpr int kWide = LossRows<X>::kWide;
  Losses<X> block = n % kWide == 0 ? Losses<X>(call, logits, StripedLanes<kWide>())
                                   : Losses<X>(call, logits, StripedLanes<1>());
  for (int64_t i = 0; i < 3 * rows; ++i)
    if (std::isinf(thread.statistics.at(i)) && thread.statistics.at(i) == block.statistics.at(i))
      thread.statistics.get()[i] = block.statistics.get()[i] = 0;
  expect_close(block.statistics, thread.statistics, "loss statistics", sizeof(A) == 8 ? 1e-15 : 1e-6);
  expect_close(block.gradient, thread.gradient, "loss gradient", 0);
}

template <class X, class F>
static void compare_activations(int64_t rows, int64_t n, bool gated) {
  Buffer<X> x(rows * n * (gated ? 2 : 1)), grad(rows * n);
  const auto compute = [&](const auto& lanes, Buffer<X>& out, Buffer<X>& grad_x) {
    ActivationCall call{};
    call.gated = gated;
    call.rows = rows;
    call.width = n;
    call.x = x.get();
    call.out = out.get();
    call.grad = grad.get();
    call.grad_x = grad_x.get();
    for (int64_t row = 0; row < rows; ++row) {
      ActivationRows<X, F>{call}.forward(lanes, row);
      ActivationRows<X, F>{call}.backward(lanes, row);
    }
  };
  Buffer<X> out(rows * n, false), grad_x(x.size(), false), same(rows * n, false),
      same_x(x.size(), false);
  constexpr int kWide = ActivationRows<X, F>::kWide;
  compute(ThreadLanes(), out, grad_x);
  if (n % kWide == 0)
    compute(StripedLanes<kWide>(), same, same_x);
  else
    compute(StripedLanes<1>(), same, same_x);
  expect_close(same, out, "activation", 0);
  expect_close(same_x, grad_x, "gradient of an activation", 0);
}

template <class X>
static void compare_attentions(int64_t rows, int64_t keys, int64_t first, bool causal) {
  AttentionCall call{};
  call.causal = causal;
  call.heads = 2;
  call.rows = rows;
  call.keys = keys;
  call.first = first;
  call.queries = 2;
  call.scale = 0.5;
  const int64_t elements = call.heads * rows * keys;
  const auto compute = [&](const auto& lanes, Buffer<X>& scores, Buffer<X>& slopes) {
    call.scores = scores.get();
    call.slopes = slopes.get();
    for (int64_t row = 0; row < call.heads * rows; ++row)
      AttentionRows<X>{call}.gradient(lanes, row);
  };
  Buffer<X> scores(elements), slopes(elements), same(elements), same_slopes(elements);
  std::copy_n(scores.get(), elements, same.get());
  std::copy_n(slopes.get(), elements, same_slopes.get());
  compute(ThreadLanes(), scores, slopes);
  compute(StripedLanes<1>(), same, same_slopes);
  expect_close(same, scores, "probabilities", 0);
  expect_close(same_slopes, slopes, "slopes of scores", 0);
}

// Rows with a packed weight: all at once, and one by one.
template <class W, class Y>
static void compare_products(int64_t rows, int64_t inputs, int64_t outputs) {
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
  Buffer<float> x(rows * inputs);
  Buffer<W> weight(outputs * inputs);
  Buffer<Y> scales(outputs), bias(outputs), out(rows * outputs), alone(rows * outputs);
  using Rows = ProductRows<W, Y>;
  Buffer<W> packed(panels * Rows::panel_size(inputs), false);
  Buffer<float> wide(inputs * kPanel, false);
  bool is_widened = false;
  ProductCall call{};
  call.inputs = inputs;
  call.outputs = outputs;
  call.bias = bias.get();
  if (sizeof(W) == 1) call.scales = scales.get();
  call.weight = weight.get();
  call.packed = packed.get();
  for (int64_t panel = 0; panel < panels; ++panel) Rows{call}.pack(panel);
  const auto multiply = [&](int64_t first, int64_t count, Y* to) {
    call.rows = count;
    call.x = x.get() + first * inputs;
    call.out = to + first * outputs;
    for (int64_t panel = 0; panel < panels; ++panel)
      Rows{call}.multiply(panel, is_widened ? wide.get() : nullptr);
  };
  multiply(0, rows, out.get());
  for (int64_t row = 0; row < rows; ++row) multiply(row, 1, alone.get());
  expect_close(alone, out, "products", 0);
  if (sizeof(W) == 4) return;
  is_widened = true;
  multiply(0, rows, alone.get());
  expect_close(alone, out, "products with widened weights", 0);
}

// A sequence whose blocks lie in reverse order: all tokens at once, and one by one.
template <class X>
static void compare_blocks(int64_t tokens, int64_t queries, int64_t width, int64_t window) {
  constexpr int64_t kBlock = 16;
  const int64_t blocks = (tokens + kBlock - 1) / kBlock, heads = tokens * queries * width;
  Buffer<X> q(heads), k(tokens * width), v(tokens * width), out(heads), alone(heads);
  Buffer<X> keys(blocks * kBlock * width), values(blocks * kBlock * width);
  Buffer<int64_t> slots(tokens), tables(blocks);
  for (int64_t at = 0; at < blocks; ++at) tables.get()[at] = blocks - 1 - at;
  for (int64_t at = 0; at < tokens; ++at)
    slots.get()[at] = tables.get()[at / kBlock] * kBlock + at % kBlock;
  PagedCall call{};
  call.tokens = call.stored = tokens;
  call.groups = 1;
  call.queries = queries;
  call.width = width;
  call.block = kBlock;
  call.window = window;
  call.query = q.get();
  call.query_token = queries * width;
  call.query_query = width;
  call.key = k.get();
  call.value = v.get();
  call.key_token = call.value_token = width;
  call.keys = keys.get();
  call.values = values.get();
  call.slots = slots.get();
  call.tables = tables.get();
  call.out = out.get();
  for (int64_t token = 0; token < tokens; ++token) PagedRows<X>{call}.store(token);
  for (int64_t row = 0; row < tokens * queries; row += kTileRows) {
    const int64_t left = tokens * queries - row, rows = left < kTileRows ? left : kTileRows;
    PagedRows<X>{call}.attend(PagedTile{0, 0, row, rows, 0, 0}, 0);
  }
  call.out = alone.get();
  for (int64_t token = 0; token < tokens; ++token)
    PagedRows<X>{call}.attend(PagedTile{token, token, 0, queries, 0, 0}, 0);
  expect_close(alone, out, "attention to blocks", 0);
}

template <class X>
static void compare_rotations(int64_t groups, int64_t heads, int64_t width, int64_t half) {
  RotaryCall call{};
  call.length = 3;
  call.rows_of_position = call.batch = 2;
  call.groups = groups;
  call.width = width;
  call.half = half;
  // Queries and values of groups that have a key between them, sequences before positions.
  const int64_t tokens = call.length * call.batch, in_group = heads + 2;
  Buffer<X> x(tokens * groups * in_group * width), cos(tokens * half), sin(tokens * half);
  call.cos = cos.get();
  call.sin = sin.get();
  call.part_count = 2;
  for (RotaryPart& part : call.parts) {
    const bool is_value = &part != call.parts;
    part.x = x.get() + (is_value ? heads + 1 : 0) * width;
    part.heads = is_value ? 1 : heads;
    part.half = is_value ? 0 : half;
    part.stride[3] = part.out_stride[3] = width;
    part.stride[2] = in_group * width;
    part.stride[1] = call.length * groups * in_group * width;
    part.stride[0] = groups * in_group * width;
    part.out_stride[2] = part.heads * width;
    part.out_stride[1] = groups * part.out_stride[2];
    part.out_stride[0] = call.batch * part.out_stride[1];
  }
  const int64_t elements = tokens * groups * heads * width, values = tokens * groups * width;
  const auto compute = [&](const auto& lanes, bool back, Buffer<X>& out, Buffer<X>& copied) {
    call.back = back;
    call.parts[0].out = out.get();
    call.parts[1].out = copied.get();
    const RotaryRows<X> rows{call};
    for (int64_t token = 0; token < tokens; ++token)
      for (int number = 0; number < call.part_count; ++number) {
        const RotaryPart& part = call.parts[number];
        const auto at = rows.token(token / call.batch, token % call.batch);
        for (int64_t head = 0; head < groups * part.heads; ++head)
          rows.rotate(lanes, part, at, head / part.heads, head % part.heads);
      }
  };
  constexpr int kWide = RotaryRows<X>::kWide;
  for (bool back : {false, true}) {
    Buffer<X> out(elements, false), same(elements, false);
    Buffer<X> copied(values, false), same_copied(values, false);
    compute(ThreadLanes(), back, out, copied);
    if (width % kWide == 0 && half % kWide == 0)
      compute(StripedLanes<kWide>(), back, same, same_copied);
    else
      compute(StripedLanes<1>(), back, same, same_copied);
    expect_close(same, out, "rotation", 0);
    expect_close(same_copied, copied, "copied heads", 0);
  }
}

template <class X, class R>
static void compare_dropouts(int64_t width, bool has_residual) {
  const int64_t rows = 3, elements = rows * width;
  Buffer<X> x(elements);
  Buffer<R> residual(elements), out(elements, false), same(elements, false);
  Buffer<int64_t> seed(1), numbers(rows);
  *seed.get() = 0x299f31d0a4093822;
  for (int64_t row = 0; row < rows; ++row) numbers.get()[row] = row << 31;
  DropoutCall call{};
  call.rows = rows;
  call.width = width;
  call.quarter = DropoutCall::quarter_of(width);
  call.threshold = 0x60000000;
  call.scale = 1.6;
  call.seed = seed.get();
  call.numbers = numbers.get();
  call.x = x.get();
  if (has_residual) call.residual = residual.get();
  const auto compute = [&](const auto& lanes, Buffer<R>& to) {
    call.out = to.get();
    for (int64_t row = 0; row < call.rows; ++row) DropoutRows<X, R>{call}.add(lanes, row);
  };
  constexpr int kWide = DropoutRows<X, R>::kWide;
  compute(ThreadLanes(), out);
  if (width % kWide == 0)
    compute(StripedLanes<kWide>(), same);
  else
    compute(StripedLanes<1>(), same);
  expect_close(same, out, "dropout", 0);
}

static AdamwCall some_update(const double* scalars) {
  AdamwCall call{};
  call.published_type = NumberType::bfloat16;
  call.rate = 0.1;
  call.beta1 = 0.9;
  call.beta2 = 0.95;
  call.epsilon = 1e-8;
  call.decay = 0.01;
  call.scalars = scalars;
  return call;
}

template <class W, class G, class M>
static void compare_updates(int64_t elements) {
  Buffer<W> weight(elements), square(elements), same_weight(elements, false), same_square(elements, false);
  Buffer<G> grad(elements), published(elements, false), same_published(elements, false);
  Buffer<M> mean(elements), same_mean(elements, false);
  double scalars[] = {0.5, 1, 0.3, 0.4};
  for (int64_t i = 0; i < elements; ++i) {
    square.get()[i] *= square.get()[i];
    same_weight.get()[i] = weight.get()[i];
    same_square.get()[i] = square.get()[i];
    same_mean.get()[i] = mean.get()[i];
  }
  const AdamwCall call = some_update(scalars);
  const auto step = [&](const auto& lanes, Buffer<W>& w, Buffer<M>& m, Buffer<W>& v, Buffer<G>& p) {
    void* half = std::is_same_v<G, BFloat16> ? p.get() : nullptr;
    const AdamwCall::Slot slot{w.get(), grad.get(), m.get(), v.get(), half, elements, 0};
    for (int64_t row = 0; row * AdamwCall::kWidth < elements; ++row)
      AdamwRows<W, G, M, W>::step(lanes, call, slot, row);
  };
  step(ThreadLanes(), weight, mean, square, published);
  constexpr int kWide = AdamwRows<W, G, M, W>::kWide;
  if (elements % kWide == 0)
    step(StripedLanes<kWide>(), same_weight, same_mean, same_square, same_published);
  else
    step(StripedLanes<1>(), same_weight, same_mean, same_square, same_published);
  expect_close(same_weight, weight, "weight", 1e-7);
  expect_close(same_mean, mean, "mean", sizeof(M) == 2 ? 1e-4 : 1e-7);
  expect_close(same_square, square, "square", 1e-7);
  if (std::is_same_v<G, BFloat16>) expect_close(same_published, published, "published", 1e-4);
}

// Weights whose halves lie apart have the bits of whole ones.
static void compare_split_updates(int64_t elements) {
  Buffer<float> weight(elements), square(elements), grad(elements), mean(elements);
  Buffer<BFloat16> published(elements, false), upper(elements), same_upper(elements);
  Buffer<int16_t> lower(elements), same_lower(elements);
  Buffer<float> of_split[2] = {Buffer<float>(elements), Buffer<float>(elements)};
  Buffer<float> of_striped[2] = {Buffer<float>(elements), Buffer<float>(elements)};
  double scalars[] = {0.5, 1, 0.3, 0.4};
  for (int64_t i = 0; i < elements; ++i) {
    weight.get()[i] = joined(upper.at(i), lower.at(i));
    same_upper.get()[i] = upper.get()[i];
    square.get()[i] *= square.get()[i];
    of_split[0].get()[i] = of_striped[0].get()[i] = mean.get()[i];
    of_split[1].get()[i] = of_striped[1].get()[i] = square.get()[i];
  }
  const AdamwCall call = some_update(scalars);
  const auto step = [&](auto rows, const auto& lanes, void* w, float* m, float* v, BFloat16* p) {
    const AdamwCall::Slot slot{w, grad.get(), m, v, p, elements, 0};
    for (int64_t row = 0; row * AdamwCall::kWidth < elements; ++row)
      decltype(rows)::step(lanes, call, slot, row);
  };
  const AdamwRows<float, float, float, float> whole;
  const AdamwRows<float, float, float, float, true> halves;
  step(whole, ThreadLanes(), weight.get(), mean.get(), square.get(), published.get());
  step(halves, ThreadLanes(), lower.get(), of_split[0].get(), of_split[1].get(), upper.get());
  step(
      halves, StripedLanes<1>(), same_lower.get(), of_striped[0].get(), of_striped[1].get(),
      same_upper.get());
  expect_close(upper, published, "upper half", 0);
  expect_close(same_upper, published, "upper half", 0);
  expect_close(same_lower, lower, "lower half", 0);
  for (int64_t i = 0; i < elements; ++i)
    expect(
        joined(upper.at(i), lower.at(i)) == weight.get()[i], "halves of a weight", weight.get()[i]);
}

// Against an answer that the authors of Philox publish with it.
static void check_philox() {
  const FourWords found = philox(
      {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0);
  expect(
      found.first == 0xd16cfe09 && found.second == 0x94fdcceb && found.third == 0x5001e420 &&
          found.fourth == 0x24126ea1,
      "Philox", found.first);
}

// Within one unit in the last place of every number from where powers are normal to one.
static void check_exponential() {
  for (float x = -87.0f; x < 1.0f; x += 0x1p-12f) {
    const double exact = std::exp(double(x)), error = std::fabs(exponential(x) - exact);
    expect(error <= exact * 0x1p-23, "exponential", x);
  }
  expect(exponential(0.0f) == 1.0f, "exponential", 0);
  expect(exponential(-87.5f) == 0.0f && exponential(-INFINITY) == 0.0f, "exponential", -INFINITY);
  expect(std::isnan(exponential(float(NAN))), "exponential", NAN);
}

// Every half-precision number survives the way to fp32 and back, and what lies between two of them
// goes to the nearer one, or half way to the even one.
template <class T>
static void check_conversion(uint16_t infinity, double least) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const T number{uint16_t(bits)};
    const float value = to_accumulator(number);
    T back;
    round_to(value, back);
    if ((bits & 0x7fff) > infinity)
      expect(std::isnan(value) && std::isnan(to_accumulator(back)), "NaN", bits);
    else
      expect(back.bits == bits, "there and back", bits);
    if ((bits & 0x7fff) >= infinity) continue;
    const T next{uint16_t(bits + 1)};
    if ((next.bits & 0x7fff) == infinity) continue;  // see below
    const double middle = (double(value) + double(to_accumulator(next))) / 2;
    round_to(float(middle), back);
    const uint16_t even = bits % 2 == 0 ? bits : bits + 1;
    expect(back.bits == even || std::fabs(middle) < least, "half way", bits);
    round_to(std::nextafterf(float(middle), value), back);
    expect(back.bits == bits || std::fabs(middle) < least, "nearer to this", bits);
    round_to(std::nextafterf(float(middle), to_accumulator(next)), back);
    expect(back.bits == next.bits || std::fabs(middle) < least, "nearer to the next", bits);
  }
  const T largest{uint16_t(infinity - 1)}, before{uint16_t(infinity - 2)};
  const double gap = double(to_accumulator(largest)) - double(to_accumulator(before));
  const float border = float(to_accumulator(largest) + gap / 2);
  T rounded;
  round_to(border, rounded);
  expect(rounded.bits == infinity, "overflow", rounded.bits);
  round_to(std::nextafterf(border, 0), rounded);
  expect(rounded.bits == largest.bits, "largest", rounded.bits);
  for (float sign : {1.0f, -1.0f}) {
    round_to(sign * INFINITY, rounded);
    expect(rounded.bits == (infinity | (sign < 0 ? 0x8000 : 0)), "infinity", rounded.bits);
  }
}

// What the sanitizers have to stop: a read behind the end, and a pack that is not aligned.
static int run_wrongly(const std::string& error) {
  Buffer<float> in(16), out(16);
  const int64_t offset = error == "unaligned" ? 1 : 0, n = error == "overrun" ? 20 : 12;
  StripedLanes<4>().each<float>(
      n, [](float value, float& to) { to = value; }, In<float>{in.get() + offset},
      Out<float>{out.get() + offset});
  return 0;
}

int main(int count, char** arguments) {
  if (count > 1) return run_wrongly(arguments[1]);
  check_conversion<Float16>(0x7c00, 0);
  check_conversion<BFloat16>(0x7f80, 1e-45);  // the middle of its least numbers is none of fp32
  check_exponential();
  check_philox();
  for (int64_t elements : {1, 7, 64, 4096, 5000}) {
    compare_updates<float, BFloat16, BFloat16>(elements);
    compare_updates<float, float, float>(elements);
    compare_updates<double, double, double>(elements);
    compare_split_updates(elements);
  }
  for (int64_t width : {1, 7, 16, 20, 44, 64, 1000, 1024, 1500})
    for (bool has_residual : {false, true}) {
      compare_dropouts<BFloat16, float>(width, has_residual);
      compare_dropouts<double, double>(width, has_residual);
      compare_dropouts<Float16, Float16>(width, has_residual);
    }
  for (int64_t n : {1, 2, 7, 8, 31, 32, 512, 520, 1031, 4097})
    for (int64_t padding : {0, 3}) {
      const int64_t true_width = n > padding ? n - padding : 0;
      compare_losses<double>(3, n, true_width);
      compare_losses<BFloat16>(3, n, true_width);
      compare_losses<float>(3, n, true_width);
    }
  for (int64_t n : {1, 7, 8, 520})
    for (bool gated : {false, true}) {
      compare_activations<BFloat16, GeluTanh>(3, n, gated);
      compare_activations<double, Silu>(3, n, gated);
    }
  for (int64_t keys : {1, 5, 33})
    for (bool causal : {false, true}) {
      compare_attentions<BFloat16>(6, keys, 2, causal);
      compare_attentions<double>(6, keys, 2, causal);
    }
  for (int64_t half : {0, 1, 3, 8, 32})
    for (int64_t kept : {0, 1, 16}) {
      if (half + kept == 0) continue;
      compare_rotations<BFloat16>(2, 3, 2 * half + kept, half);
      compare_rotations<double>(1, 1, 2 * half + kept, half);
    }
  for (int64_t rows : {1, 5, 9})
    for (int64_t inputs : {1, 7, 8}) {
      compare_products<float, float>(rows, inputs, 2 * kPanel + 1);
      compare_products<BFloat16, BFloat16>(rows, inputs, kPanel);
      compare_products<int8_t, BFloat16>(rows, inputs, kPanel + 1);
    }
  for (int64_t window : {0, 3}) {
    compare_blocks<float>(35, 3, 16, window);
    compare_blocks<BFloat16>(16, 1, 32, window);
  }
  compare_shapes<double, double>();
  compare_shapes<BFloat16, BFloat16>();
  compare_shapes<float, Float16>();
  if (failures == 0) std::puts("all rows agree");
  return failures != 0;
}
