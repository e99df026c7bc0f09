// Arguments of rotations by position: what the operators hand to the kernels of a machine.
#pragma once

#include "number_type.h"

namespace megatron {

// Heads that are read in one place and written in another, both [length, batch, groups, heads,
// width] with neighbouring elements and any strides beside them.
struct RotaryPart {
  const void* x;
  void* out;
  int64_t heads;                    // of a group
  int64_t half;                     // pairs of channels that rotate: those of the tables, or none
  int64_t stride[4], out_stride[4];  // elements from one index to the next, before the last
};

struct RotaryCall {
  static constexpr int kMostParts = 3;

  NumberType type;
  bool back;  // by the opposite angle
  int64_t length, batch, groups, width;
  int64_t half;              // of the tables: 2 half <= width
  int64_t rows_of_position;  // of the tables: batch, or 1 for the whole batch
  const void *cos, *sin;     // [length, rows_of_position, half]

  int part_count;
  RotaryPart parts[kMostParts];
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
