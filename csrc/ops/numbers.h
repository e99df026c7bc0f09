// Number types of tensors and their conversion to the type that sums are kept in.
//
// Everything is in a namespace named after the instruction set (OPS_TARGET): one source is compiled
// several times, and the linker must never take a function of one copy for that of another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define LANE_FN __device__ __forceinline__
#else
#define LANE_FN inline __attribute__((always_inline))
#endif

#ifndef OPS_TARGET
#define OPS_TARGET plain
#endif

namespace megatron::OPS_TARGET {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// The type of statistics and sums over elements of type T.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

LANE_FN float to_accumulator(float value) { return value; }
LANE_FN float to_accumulator(int8_t value) { return value; }
LANE_FN float to_accumulator(int16_t value) { return value; }
LANE_FN double to_accumulator(double value) { return value; }
LANE_FN void round_to(float value, float& out) { out = value; }
LANE_FN void round_to(double value, double& out) { out = value; }
LANE_FN void round_to(float value, int16_t& out) { out = int16_t(value); }  // of whole numbers

LANE_FN double exponential(double x) { return ::exp(x); }
LANE_FN float squareroot(float x) { return ::sqrtf(x); }
LANE_FN double squareroot(double x) { return ::sqrt(x); }

#ifdef __CUDACC__

LANE_FN uint32_t bits_of(float value) { return __float_as_uint(value); }
LANE_FN float float_of(uint32_t bits) { return __uint_as_float(bits); }

LANE_FN float to_accumulator(BFloat16 value) { return __uint_as_float(uint32_t(value.bits) << 16); }
LANE_FN float to_accumulator(Float16 value) { return __half2float(__ushort_as_half(value.bits)); }
LANE_FN void round_to(float value, BFloat16& out) {
  out.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
LANE_FN void round_to(float value, Float16& out) {
  out.bits = __half_as_ushort(__float2half_rn(value));
}

LANE_FN float exponential(float x) { return ::expf(x); }

#else

LANE_FN uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

LANE_FN float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

LANE_FN float to_accumulator(BFloat16 value) { return float_of(uint32_t(value.bits) << 16); }

// Without branches, so that loops over it vectorise without instructions for half precision.
LANE_FN float to_accumulator(Float16 value) {
  const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13;
  // Exponents of fp32 are biased by 112 more; the product is exact for subnormal values too.
  const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // infinity and NaN
  return float_of(finite | special | uint32_t(value.bits & 0x8000) << 16);
}

// Round to nearest, ties to even.
LANE_FN void round_to(float value, BFloat16& out) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = uint16_t(is_nan ? 0x7fc0 : rounded);
}

LANE_FN void round_to(float value, Float16& out) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
  const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000u) >> 13;
  // In [0.5, 1) the last bit of fp32 is worth 2^-24, the last bit of a subnormal fp16.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  uint32_t rounded = magnitude < 0x38800000 ? subnormal : normal;  // 2^-14
  rounded = magnitude >= 0x477ff000 ? 0x7c00 : rounded;            // 65520 and above: infinity
  rounded = magnitude > 0x7f800000 ? 0x7e00 : rounded;
  out.bits = uint16_t(rounded | (bits >> 16 & 0x8000));
}

// Return e^x of x <= 88, within one unit in the last place; zero of x < -87, NaN of NaN.
//
// With k the integer next to x / ln 2, e^x = 2^k e^r for r = x - k ln 2, and e^r = 1 + r + r^2 q(r)
// where q has the least relative error of its degree for |r| <= ln 2 / 2 (3e-9).
LANE_FN float exponential(float x) {
  constexpr float kShift = 0x1.8p23f;  // the sum of it and x is rounded to an integer
  const float shifted = x * 0x1.715476p0f + kShift;
  const float k = shifted - kShift;
  const float r = (x - k * 0x1.62e4p-1f) - k * 0x1.7f7d1cp-20f;  // ln 2, its first part exact in k
  const float q =
      0.49999994f +
      r * (0.1666652f + r * (0.041668393f + r * (0.008368781f + r * 0.0013814467f)));
  const float scale = float_of((bits_of(shifted) << 23) + bits_of(1.0f));
  const float power = (1.0f + (r + r * r * q)) * scale;
  return x < -87.0f ? 0.0f : power;
}

#endif

}  // namespace megatron::OPS_TARGET
