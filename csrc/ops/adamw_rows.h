// Row algorithm of AdamW, over lanes.
#pragma once

#include "adamw_call.h"
#include "lanes.h"

namespace megatron::OPS_TARGET {

// A weight whose upper half, rounded to nearest with ties to even, is a bfloat16, and whose lower
// one is the rest in units of its own last place, below 2^15. The one number with which this does
// not work is halfway between two: rounded down to an even one, it is 2^15 above. It gives way to
// the next one towards zero.
LANE_FN float joined(float upper, float lower) {
  return float_of(bits_of(upper) + uint32_t(int32_t(lower)));
}

LANE_FN float between_halves(float weight) {
  const uint32_t bits = bits_of(weight);
  return float_of(bits - ((bits & 0x1ffff) == 0x8000 ? 1 : 0));
}

LANE_FN void split(float weight, float& upper, float& lower) {
  const uint32_t bits = weight != weight ? 0x7fc00000 : bits_of(between_halves(weight));  // NaN
  const uint32_t rounded = (bits + 0x8000) & 0xffff0000;
  upper = float_of(rounded);
  lower = float(int32_t(bits - rounded));
}

// W of the weight, G of the gradient, M of its moving average, V of that of its square.
template <class W, class G, class M, class V, bool kSplit = false>
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
    const auto update = [=](A grad, A& w, A& mean, A& square) {
      const A g = grad * factor;
      mean += rest1 * (g - mean);
      square = beta2 * square + rest2 * g * g;
      w = w * kept - rate * mean / (squareroot(square) / spread + epsilon);
    };
    const In<G> grad{static_cast<const G*>(slot.grad) + begin};
    const InOut<M> mean{static_cast<M*>(slot.mean) + begin};
    const InOut<V> square{static_cast<V*>(slot.square) + begin};
    if constexpr (kSplit) {
      lanes.template each<A>(
          n,
          [=](A g, A& upper, A& lower, A& m, A& s) {
            A w = joined(upper, lower);
            update(g, w, m, s);
            split(w, upper, lower);
          },
          grad, InOut<BFloat16>{static_cast<BFloat16*>(slot.published) + begin},
          InOut<int16_t>{static_cast<int16_t*>(slot.weight) + begin}, mean, square);
    } else {
      W* const weight = static_cast<W*>(slot.weight) + begin;
      lanes.template each<A>(n, update, grad, InOut<W>{weight}, mean, square);
      if (slot.published == nullptr) return;
      if (call.published_type == NumberType::bfloat16)
        publish(lanes, n, weight, static_cast<BFloat16*>(slot.published) + begin);
      else
        publish(lanes, n, weight, static_cast<Float16*>(slot.published) + begin);
    }
  }

 private:
  template <class Lanes>
  LANE_FN static void publish(const Lanes& lanes, int64_t n, W* weight, BFloat16* published) {
    lanes.template each<A>(
        n,
        [](A& w, A& p) {
          if constexpr (sizeof(W) == 4) w = between_halves(w);  // the bits of split weights
          p = w;
        },
        InOut<W>{weight}, Out<BFloat16>{published});
  }

  template <class Lanes>
  LANE_FN static void publish(const Lanes& lanes, int64_t n, W* weight, Float16* published) {
    lanes.template each<A>(n, [](A w, A& p) { p = w; }, In<W>{weight}, Out<Float16>{published});
  }
};

template <class W, class G, class M, class V, class Use>
void with_halves(const AdamwCall& call, const Use& use) {
  if constexpr (sizeof(W) == 4)
    if (call.is_split) return use(AdamwRows<W, G, M, V, true>());
  use(AdamwRows<W, G, M, V>());
}

template <class W, class G, class M, class Use>
void with_square(const AdamwCall& call, const Use& use) {
  if (call.square_type == NumberType::bfloat16)
    with_halves<W, G, M, BFloat16>(call, use);
  else
    with_halves<W, G, M, W>(call, use);
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
