// Row algorithm of the gradient of a softmax whose log-sum-exp is known, over lanes.
#pragma once

#include "attention_call.h"
#include "lanes.h"

namespace megatron::OPS_TARGET {

template <class X>
struct AttentionRows {
  using A = Accumulator<X>;
  AttentionCall call;

  template <class Lanes>
  LANE_FN void gradient(const Lanes& lanes, int64_t row) const {
    X* scores = static_cast<X*>(call.scores) + row * call.keys;
    X* slopes = static_cast<X*>(call.slopes) + row * call.keys;
    const int64_t seen = call.first + row % call.rows / call.queries + 1;
    const int64_t kept = call.causal && seen < call.keys ? seen : call.keys;
    const A scale = A(call.scale), share = 1 / sqrt(A(kept));
    lanes.template each<A>(
        kept,
        [scale, share](A& score, A& slope) {
          score = exponential(score * scale) * share;
          slope *= score * scale;
        },
        InOut<X>{scores}, InOut<X>{slopes});
    lanes.template each<A>(
        call.keys - kept, [](A& score, A& slope) { score = slope = 0; }, Out<X>{scores + kept},
        Out<X>{slopes + kept});
  }
};

// Call `use` with AttentionRows for the type of `call`.
template <class Use>
void with_attention(const AttentionCall& call, const Use& use) {
  switch (call.type) {
    case NumberType::float32:
      return use(AttentionRows<float>{call});
    case NumberType::float64:
      return use(AttentionRows<double>{call});
    case NumberType::bfloat16:
      return use(AttentionRows<BFloat16>{call});
    case NumberType::float16:
      return use(AttentionRows<Float16>{call});
  }
}

}  // namespace megatron::OPS_TARGET
