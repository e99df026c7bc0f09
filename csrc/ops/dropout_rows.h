// Row algorithm of dropout with a residual, over lanes. The mask is drawn again where it is needed.
#pragma once

#include "dropout_call.h"
#include "lanes.h"
#include "philox.h"

namespace megatron::OPS_TARGET {

template <class X, class R>
struct DropoutRows {
  using A = Accumulator<X>;
  static constexpr int kWide = sizeof(X) == 8 || sizeof(R) == 8 ? 2 : 4;  // elements of one move
  static constexpr int64_t kQuarter = DropoutCall::kQuarter;
  DropoutCall call;

  // The mask of a row: what elements are multiplied by.
  struct Factors {
    uint32_t low, high, key, other_key, threshold;
    A scale;

    LANE_FN FourWords words(int32_t index) const {
      return philox({low + uint32_t(index), high, 0, 0}, key, other_key);
    }
    LANE_FN A of(uint32_t word) const { return word < threshold ? A(0) : scale; }
  };

  LANE_FN Factors factors(int64_t row) const {
    const uint64_t counter = uint64_t(row) * kQuarter, seed = uint64_t(*call.seed);
    return {uint32_t(counter), uint32_t(counter >> 32), uint32_t(seed), uint32_t(seed >> 32),
            call.threshold,    A(call.scale)};
  }

  template <class Lanes>
  LANE_FN void add(const Lanes& lanes, int64_t row) const {
    if (call.residual == nullptr)
      add_to(lanes, row, [](int64_t) { return Nothing(); });
    else
      add_to(lanes, row, [this](int64_t begin) {
        return In<R>{static_cast<const R*>(call.residual) + begin};
      });
  }

 private:
  template <class Lanes, class At>
  LANE_FN void add_to(const Lanes& lanes, int64_t row, const At& residual) const {
    const Factors mask = factors(row);
    const int64_t begin = row * DropoutCall::kWidth, left = call.elements - begin;
    const X* x = static_cast<const X*>(call.x) + begin;
    R* out = static_cast<R*>(call.out) + begin;
    if (left >= DropoutCall::kWidth) {
      lanes.template each<A>(
          kQuarter,
          [mask](int32_t i, A x0, A x1, A x2, A x3, A r0, A r1, A r2, A r3, A& y0, A& y1, A& y2,
                 A& y3) {
            const FourWords drawn = mask.words(i);
            y0 = r0 + x0 * mask.of(drawn.first);
            y1 = r1 + x1 * mask.of(drawn.second);
            y2 = r2 + x2 * mask.of(drawn.third);
            y3 = r3 + x3 * mask.of(drawn.fourth);
          },
          Index(), In<X>{x}, In<X>{x + kQuarter}, In<X>{x + 2 * kQuarter}, In<X>{x + 3 * kQuarter},
          residual(begin), residual(begin + kQuarter), residual(begin + 2 * kQuarter),
          residual(begin + 3 * kQuarter), Out<R>{out}, Out<R>{out + kQuarter},
          Out<R>{out + 2 * kQuarter}, Out<R>{out + 3 * kQuarter});
      return;
    }
    for (int quarter = 0; quarter * kQuarter < left; ++quarter) {
      const int64_t from = quarter * kQuarter;
      lanes.template each<A>(
          left - from < kQuarter ? left - from : kQuarter,
          [mask, quarter](int32_t i, A v, A r, A& y) {
            const FourWords drawn = mask.words(i);
            const uint32_t low = quarter == 0 ? drawn.first : drawn.second;
            const uint32_t high = quarter == 2 ? drawn.third : drawn.fourth;
            y = r + v * mask.of(quarter < 2 ? low : high);
          },
          Index(), In<X>{x + from}, residual(begin + from), Out<R>{out + from});
    }
  }
};

// Call `use` with DropoutRows for the types of `call`: one type, or a residual in fp32.
template <class Use>
void with_dropout(const DropoutCall& call, const Use& use) {
  const bool is_wide = call.residual_type == NumberType::float32;
  switch (call.x_type) {
    case NumberType::float32:
      return use(DropoutRows<float, float>{call});
    case NumberType::float64:
      return use(DropoutRows<double, double>{call});
    case NumberType::bfloat16:
      return is_wide ? use(DropoutRows<BFloat16, float>{call})
                     : use(DropoutRows<BFloat16, BFloat16>{call});
    case NumberType::float16:
      return is_wide ? use(DropoutRows<Float16, float>{call})
                     : use(DropoutRows<Float16, Float16>{call});
  }
}

}  // namespace megatron::OPS_TARGET
