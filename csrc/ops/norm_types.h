// From the types of a call to the types of C++, for the kernels of the CPU and of CUDA.
#pragma once

#include "norm_rows.h"

namespace megatron::OPS_TARGET {

template <class X, class Y, class F>
void call_norm(const NormCall& call, const F& f) {
  if (call.centered)
    f(NormRows<X, Y, true>{call});
  else
    f(NormRows<X, Y, false>{call});
}

// Call `f` with NormRows for the types of `call`. The type of the weight is that of x, or one of
// the two is float32; the operators refuse every other pair before.
template <class F>
void with_norm(const NormCall& call, const F& f) {
  constexpr auto f32 = NumberType::float32, bf16 = NumberType::bfloat16;
  constexpr auto f16 = NumberType::float16, f64 = NumberType::float64;
  const auto is = [&](NumberType x, NumberType y) { return call.x_type == x && call.y_type == y; };
  if (is(f32, f32)) call_norm<float, float>(call, f);
  if (is(f64, f64)) call_norm<double, double>(call, f);
  if (is(bf16, bf16)) call_norm<BFloat16, BFloat16>(call, f);
  if (is(f16, f16)) call_norm<Float16, Float16>(call, f);
  if (is(f32, bf16)) call_norm<float, BFloat16>(call, f);
  if (is(f32, f16)) call_norm<float, Float16>(call, f);
  if (is(bf16, f32)) call_norm<BFloat16, float>(call, f);
  if (is(f16, f32)) call_norm<Float16, float>(call, f);
}

}  // namespace megatron::OPS_TARGET
