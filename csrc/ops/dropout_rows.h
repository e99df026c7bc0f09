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
  DropoutCall call;

  // The mask of a row: what elements are multiplied by.
  struct Factors {
    uint32_t low, high, key, other_key, threshold;
    A scale;

    LANE_FN FourWords words(int32_t index) const {
      return philox({uint32_t(index), low, high, 0}, key, other_key);
    }
    LANE_FN A of(uint32_t word) const { return word < threshold ? A(0) : scale; }
  };

  LANE_FN Factors factors(int64_t row) const {
    const uint64_t number = uint64_t(call.numbers[row]), seed = uint64_t(*call.seed);
    return {uint32_t(number), uint32_t(number >> 32), uint32_t(seed), uint32_t(seed >> 32),
            call.threshold,   A(call.scale)};
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
    const int64_t begin = row * call.width, quarter = call.quarter;
    const X* x = static_cast<const X*>(call.x) + begin;
    R* out = static_cast<R*>(call.out) + begin;
    // Elements of each quarter of which the last quarter has one too: their words are drawn once.
    const int64_t last = call.width - 3 * quarter, whole = last > 0 ? last : 0;
    lanes.template each<A>(
        whole,
        [mask](int32_t i, A x0, A x1, A x2, A x3, A r0, A r1, A r2, A r3, A& y0, A& y1, A& y2,
               A& y3) {
          const FourWords drawn = mask.words(i);
          y0 = r0 + x0 * mask.of(drawn.first);
          y1 = r1 + x1 * mask.of(drawn.second);
          y2 = r2 + x2 * mask.of(drawn.third);
          y3 = r3 + x3 * mask.of(drawn.fourth);
        },
        Index(), In<X>{x}, In<X>{x + quarter}, In<X>{x + 2 * quarter}, In<X>{x + 3 * quarter},
        residual(begin), residual(begin + quarter), residual(begin + 2 * quarter),
        residual(begin + 3 * quarter), Out<R>{out}, Out<R>{out + quarter}, Out<R>{out + 2 * quarter},
        Out<R>{out + 3 * quarter});
    if (whole == quarter) return;
    for (int part = 0; part < 3; ++part) {
      const int64_t from = part * quarter + whole;
      const int64_t end = call.width < (part + 1) * quarter ? call.width : (part + 1) * quarter;
      lanes.template each<A>(
          end - from,
          [mask, part, whole](int32_t i, A v, A r, A& y) {
            const FourWords drawn = mask.words(int32_t(whole) + i);
            const uint32_t word = part == 0 ? drawn.first : part == 1 ? drawn.second : drawn.third;
            y = r + v * mask.of(word);
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
