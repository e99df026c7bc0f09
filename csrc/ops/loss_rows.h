// Row algorithms of the cross entropy, over lanes.
#pragma once

#include "lanes.h"
#include "loss_call.h"

namespace megatron::OPS_TARGET {

template <class X>
struct LossRows {
  using A = Accumulator<X>;
  static constexpr int kWide = sizeof(X) == 8 ? 1 : 16 / sizeof(X);  // elements of one move
  LossCall call;

  template <class Lanes>
  LANE_FN void statistics(const Lanes& lanes, int64_t row) const {
    const X* logits = static_cast<const X*>(call.logits) + row * call.width;
    const int32_t true_width = int32_t(call.true_width);
    const ExpSum<A> total = lanes.template sum_exp<A>(
        call.width, [=](A x, int32_t column) { return column < true_width ? x : -A(INFINITY); },
        In<X>{logits}, Index{});
    if (!lanes.is_first()) return;
    const int64_t label = call.label[row];
    A* out = static_cast<A*>(call.statistics) + row;
    out[0] = total.largest;
    out[call.rows] = total.sum;
    out[2 * call.rows] =
        label >= 0 && label < true_width ? to_accumulator(logits[label]) : -A(INFINITY);
  }

  template <class Lanes>
  LANE_FN void gradient(const Lanes& lanes, int64_t row) const {
    X* logits = static_cast<X*>(call.logits) + row * call.width;
    const A shift = static_cast<const A*>(call.shift)[row];
    const A scale = static_cast<const A*>(call.scale)[row];
    const A at_label = static_cast<const A*>(call.at_label)[row];
    const int64_t wanted = call.label[row];
    const int32_t true_width = int32_t(call.true_width);
    const int32_t label = wanted >= 0 && wanted < true_width ? int32_t(wanted) : -1;
    if (scale == 0 && at_label == 0) {  // nothing to predict
      lanes.template each<A>(call.width, [](A& x) { x = 0; }, Out<X>{logits});
      return;
    }
    lanes.template each<A>(
        call.width,
        [=](A& x, int32_t column) {
          const A slope = exponential(x - shift) * scale - (column == label ? at_label : A(0));
          x = column < true_width ? slope : A(0);
        },
        InOut<X>{logits}, Index{});
  }
};

// Call `f` with LossRows for the type of the logits.
template <class F>
void with_loss(const LossCall& call, const F& f) {
  switch (call.type) {
    case NumberType::float32:
      return f(LossRows<float>{call});
    case NumberType::float64:
      return f(LossRows<double>{call});
    case NumberType::bfloat16:
      return f(LossRows<BFloat16>{call});
    case NumberType::float16:
      return f(LossRows<Float16>{call});
  }
}

}  // namespace megatron::OPS_TARGET
