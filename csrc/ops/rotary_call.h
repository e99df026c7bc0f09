// Arguments of rotations by position: what the operator hands to the kernels of a machine.
#pragma once

#include "number_type.h"

namespace megatron {

// x [length, batch, groups, heads, width] has rows of neighbouring elements and any strides beside
// them; out is contiguous.
struct RotaryCall {
  NumberType type;
  bool back;  // by the opposite angle
  int64_t length, batch, groups, heads, width;
  int64_t half;              // pairs of channels that rotate: 2 half <= width
  int64_t stride[4];         // elements from one index of x to the next, before the last
  int64_t rows_of_position;  // of the tables: batch, or 1 for the whole batch

  const void* x;
  const void *cos, *sin;  // [length, rows_of_position, half]
  void* out;              // as x
};

// Kernels of one instruction set. Calls with disjoint ranges may run at the same time.
struct RotaryKernels {
  // A token is one of length * batch.
  void (*rotate)(const RotaryCall&, int64_t first_token, int64_t last_token);
};

namespace plain {
extern const RotaryKernels rotary_kernels;
}
namespace avx2 {
extern const RotaryKernels rotary_kernels;
}
namespace avx512 {
extern const RotaryKernels rotary_kernels;
}

namespace cuda {
// Return null, or what CUDA says is wrong. `stream` is a cudaStream_t.
const char* rotate(const RotaryCall&, int device, void* stream);
}  // namespace cuda

}  // namespace megatron
