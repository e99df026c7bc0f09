// Vectors of float32, as wide as those of the instruction set, for what is no loop over one row.
#pragma once

#include "numbers.h"

namespace megatron::OPS_TARGET {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfWords __attribute__((vector_size(2 * kLanes)));

typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

template <class V>
LANE_FN V load_vector(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <class V>
LANE_FN void store_vector(void* to, V value) {
  __builtin_memcpy(to, &value, sizeof value);
}

LANE_FN Floats load_floats(const float* from) { return load_vector<Floats>(from); }

LANE_FN Floats load_floats(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(load_vector<HalfWords>(from), Words) << 16);
}

// The smaller of two vectors' elements is dropped; NaN is dropped too.
LANE_FN Floats largest_of(Floats a, Floats b) { return a > b ? a : b; }

LANE_FN float largest_of(Floats values) {
  float found[kLanes];
  store_vector(found, values);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) found[i] = found[i] > found[i + half] ? found[i] : found[i + half];
  return found[0];
}

}  // namespace megatron::OPS_TARGET
