// Row algorithms of LayerNorm and RMSNorm, forward and backward, over lanes.
#pragma once

#include <cmath>

#include "lanes.h"
#include "norm_call.h"

namespace megatron::OPS_TARGET {

template <class X, class Y, bool kCentered>
struct NormRows {
  using A = Accumulator<X>;
  using YType = Y;
  // Elements of the wider type that one instruction of 16 bytes moves; fp64 is for tests only.
  static constexpr int kWide =
      sizeof(X) == 8 ? 1 : 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
  static constexpr bool kIsCentered = kCentered;
  NormCall call;

  template <class T>
  LANE_FN const T* row_of(const void* data, int64_t row) const {
    return static_cast<const T*>(data) + row * call.width;
  }
  template <class T>
  LANE_FN T* row_of(void* data, int64_t row) const {
    return static_cast<T*>(data) + row * call.width;
  }

  // Normalise one row. With a residual the statistics are those of the rounded sum, which is what
  // the backward pass reads.
  template <class Lanes>
  LANE_FN void forward(const Lanes& lanes, int64_t row) const {
    const int64_t n = call.width;
    const X* x = row_of<X>(call.x, row);
    if (call.residual != nullptr) {
      X* sum = row_of<X>(call.sum, row);
      lanes.template each<A>(
          n, [](A a, A b, A& out) { out = a + b; }, In<X>{x},
          In<X>{row_of<X>(call.residual, row)}, Out<X>{sum});
      x = sum;
    }
    A mean = 0;
    if constexpr (kCentered) mean = lanes.template sum<A>(n, [](A v) { return v; }, In<X>{x}) / n;
    const A squares = lanes.template sum<A>(
        n, [mean](A v) { return (v - mean) * (v - mean); }, In<X>{x});
    const A rstd = A(1) / sqrt(squares / n + A(call.epsilon));
    const In<Y> weight{static_cast<const Y*>(call.weight)};
    const Out<Y> out{row_of<Y>(call.out, row)};
    if constexpr (kCentered) {
      lanes.template each<A>(
          n, [=](A v, A w, A b, A& y) { y = (v - mean) * rstd * w + b; }, In<X>{x}, weight,
          In<Y>{static_cast<const Y*>(call.bias)}, out);
    } else {
      lanes.template each<A>(n, [=](A v, A w, A& y) { y = v * rstd * w; }, In<X>{x}, weight, out);
    }
    if (lanes.is_first()) {
      if constexpr (kCentered) static_cast<A*>(call.mean)[row] = mean;
      static_cast<A*>(call.rstd)[row] = rstd;
    }
  }

  // Write the input gradients of some rows, and their sums for weight and bias to `grad_weight` and
  // `grad_bias`. The order of these sums is the order of the rows.
  template <class Lanes>
  LANE_FN void backward(
      const Lanes& lanes, int64_t first, int64_t last, A* grad_weight, A* grad_bias) const {
    const auto zero = [](A& value) { value = 0; };
    lanes.template each<A>(call.width, zero, Out<A>{grad_weight});
    if constexpr (kCentered) lanes.template each<A>(call.width, zero, Out<A>{grad_bias});
    for (int64_t row = first; row < last; ++row) {
      if (call.grad_sum != nullptr)
        backward_row(lanes, row, In<X>{row_of<X>(call.grad_sum, row)}, grad_weight, grad_bias);
      else
        backward_row(lanes, row, Nothing{}, grad_weight, grad_bias);
    }
  }

 private:
  // With h = (x - mean) * rstd and d = grad * weight, the input gradient is
  // rstd * (d - mean(d) - h * mean(d * h)) plus that of the sum; RMSNorm has no mean(d).
  template <class Lanes, class GradSum>
  LANE_FN void backward_row(
      const Lanes& lanes, int64_t row, GradSum grad_sum, A* grad_weight, A* grad_bias) const {
    const int64_t n = call.width;
    const In<X> x{row_of<X>(call.x, row)};
    const In<Y> grad{row_of<Y>(call.grad, row)}, weight{static_cast<const Y*>(call.weight)};
    const Out<X> grad_x{row_of<X>(call.grad_x, row)};
    const A rstd = static_cast<const A*>(call.rstd)[row];
    A mean = 0, mean_d = 0;
    if constexpr (kCentered) {
      mean = static_cast<const A*>(call.mean)[row];
      mean_d = lanes.template sum<A>(n, [](A g, A w) { return g * w; }, grad, weight) / n;
    }
    const A mean_dh = lanes.template sum<A>(
        n, [=](A g, A w, A v) { return g * w * ((v - mean) * rstd); }, grad, weight, x) / n;
    // In two passes: packs of all spans at once would not fit into the registers of a GPU.
    lanes.template each<A>(
        n,
        [=](A g, A w, A v, A extra, A& dx) {
          dx = rstd * (g * w - mean_d - (v - mean) * rstd * mean_dh) + extra;
        },
        grad, weight, x, grad_sum, grad_x);
    const InOut<A> dw{grad_weight};
    if constexpr (kCentered) {
      lanes.template each<A>(
          n,
          [=](A g, A v, A& sum_dw, A& sum_db) {
            sum_dw += g * ((v - mean) * rstd);
            sum_db += g;
          },
          grad, x, dw, InOut<A>{grad_bias});
    } else {
      lanes.template each<A>(n, [=](A g, A v, A& sum_dw) { sum_dw += g * (v * rstd); }, grad, x, dw);
    }
  }
};

}  // namespace megatron::OPS_TARGET
