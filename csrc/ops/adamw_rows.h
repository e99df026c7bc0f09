// Row algorithm of AdamW, over lanes.
#pragma once

#include "adamw_call.h"
#include "lanes.h"

namespace megatron::OPS_TARGET {

// W of the weight, G of the gradient, M of its moving average, V of that of its square.
template <class W, class G, class M, class V>
struct AdamwRows {
  using A = Accumulator<W>;
  static constexpr int kWide = sizeof(W) == 8 ? 2 : 4;  // elements of one move

  template <class Lanes>
  LANE_FN static void step(
      const Lanes& lanes, const AdamwCall& call, const AdamwCall::Slot& slot, int64_t row) {
    if (call.scalars[1] == 0) return;
    const int64_t begin = (row - slot.first_row) * AdamwCall::kWidth;
    const int64_t left = slot.elements - begin;
    const int64_t n = left < AdamwCall::kWidth ? left : AdamwCall::kWidth;
    const A factor = call.scalars[0], kept = 1 - call.rate * call.decay;
    const A beta2 = call.beta2, rest1 = 1 - call.beta1, rest2 = 1 - call.beta2;
    const A rate = call.rate / call.scalars[2], spread = call.scalars[3], epsilon = call.epsilon;
    W* const weight = static_cast<W*>(slot.weight) + begin;
    lanes.template each<A>(
        n,
        [=](A grad, A& w, A& mean, A& square) {
          const A g = grad * factor;
          mean += rest1 * (g - mean);
          square = beta2 * square + rest2 * g * g;
          w = w * kept - rate * mean / (squareroot(square) / spread + epsilon);
        },
        In<G>{static_cast<const G*>(slot.grad) + begin}, InOut<W>{weight},
        InOut<M>{static_cast<M*>(slot.mean) + begin},
        InOut<V>{static_cast<V*>(slot.square) + begin});
    if (slot.published == nullptr) return;
    if (call.published_type == NumberType::bfloat16)
      publish(lanes, n, weight, static_cast<BFloat16*>(slot.published) + begin);
    else
      publish(lanes, n, weight, static_cast<Float16*>(slot.published) + begin);
  }

 private:
  template <class Lanes, class P>
  LANE_FN static void publish(const Lanes& lanes, int64_t n, const W* weight, P* published) {
    lanes.template each<A>(n, [](A w, A& p) { p = w; }, In<W>{weight}, Out<P>{published});
  }
};

template <class W, class G, class M, class Use>
void with_square(const AdamwCall& call, const Use& use) {
  if (call.square_type == NumberType::bfloat16)
    use(AdamwRows<W, G, M, BFloat16>());
  else
    use(AdamwRows<W, G, M, W>());
}

template <class W, class G, class Use>
void with_mean(const AdamwCall& call, const Use& use) {
  if (call.mean_type == NumberType::bfloat16)
    with_square<W, G, BFloat16>(call, use);
  else
    with_square<W, G, W>(call, use);
}

// Call `use` with AdamwRows for the types of `call`: state is of the weight's type or bfloat16.
template <class Use>
void with_adamw(const AdamwCall& call, const Use& use) {
  switch (call.grad_type) {
    case NumberType::float32:
      return with_mean<float, float>(call, use);
    case NumberType::float64:
      return with_mean<double, double>(call, use);
    case NumberType::bfloat16:
      return with_mean<float, BFloat16>(call, use);
    case NumberType::float16:
      return with_mean<float, Float16>(call, use);
  }
}

}  // namespace megatron::OPS_TARGET
