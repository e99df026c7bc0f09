// The dtypes that kernels are compiled for.
#pragma once

#include <cstdint>

namespace megatron {

enum class NumberType { float32, bfloat16, float16, float64 };

}  // namespace megatron
