// Row algorithm of rotations by position, over lanes: a row is a head of a token.
#pragma once

#include "lanes.h"
#include "rotary_call.h"

namespace megatron::OPS_TARGET {

template <class X>
struct RotaryRows {
  using A = Accumulator<X>;
  static constexpr int kWide = sizeof(X) == 8 ? 1 : 16 / sizeof(X);  // elements of one move
  RotaryCall call;

  // All heads of one token have the same angles.
  struct Token {
    int64_t position, sequence;
    const X *cos, *sin;
  };

  LANE_FN Token token(int64_t position, int64_t sequence) const {
    const int64_t of_table =
        position * call.rows_of_position + (call.rows_of_position == 1 ? 0 : sequence);
    return {
        position, sequence, static_cast<const X*>(call.cos) + of_table * call.half,
        static_cast<const X*>(call.sin) + of_table * call.half};
  }

  LANE_FN static int64_t offset(
      const int64_t (&stride)[4], const Token& at, int64_t group, int64_t head) {
    return at.position * stride[0] + at.sequence * stride[1] + group * stride[2] + head * stride[3];
  }

  // Channel i of the first half that rotates is paired with channel i of the second.
  template <class Lanes>
  LANE_FN void rotate(
      const Lanes& lanes, const RotaryPart& part, const Token& at, int64_t group,
      int64_t head) const {
    const X* x = static_cast<const X*>(part.x) + offset(part.stride, at, group, head);
    X* out = static_cast<X*>(part.out) + offset(part.out_stride, at, group, head);
    const A sign = call.back ? -1 : 1;
    lanes.template each<A>(
        part.half,
        [sign](A first, A second, A cos, A sin, A& turned_first, A& turned_second) {
          turned_first = first * cos - second * (sign * sin);
          turned_second = second * cos + first * (sign * sin);
        },
        In<X>{x}, In<X>{x + part.half}, In<X>{at.cos}, In<X>{at.sin}, Out<X>{out},
        Out<X>{out + part.half});
    const int64_t turned = 2 * part.half;
    lanes.template each<A>(
        call.width - turned, [](A kept, A& y) { y = kept; }, In<X>{x + turned},
        Out<X>{out + turned});
  }
};

// Call `use` with RotaryRows for the type of `call`.
template <class Use>
void with_rotary(const RotaryCall& call, const Use& use) {
  switch (call.type) {
    case NumberType::float32:
      return use(RotaryRows<float>{call});
    case NumberType::float64:
      return use(RotaryRows<double>{call});
    case NumberType::bfloat16:
      return use(RotaryRows<BFloat16>{call});
    case NumberType::float16:
      return use(RotaryRows<Float16>{call});
  }
}

}  // namespace megatron::OPS_TARGET
