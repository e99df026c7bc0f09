// Arguments of dropout: what the operator hands to the kernels of a machine.
#pragma once

#include "number_type.h"

namespace megatron {

// Elements are contiguous and in rows of kWidth; the last row may be shorter. Word q of the random
// words of counter row * kQuarter + i is of element q * kQuarter + i of the row.
struct DropoutCall {
  static constexpr int64_t kQuarter = 1024, kWidth = 4 * kQuarter;
  NumberType x_type, residual_type;  // out is of the latter
  int64_t elements, rows;
  uint32_t threshold;  // words below it drop their element
  double scale;        // of the elements that are kept

  const int64_t* seed;  // where x is
  const void* x;
  const void* residual;  // or null
  void* out;
};

// Kernels of one instruction set. Calls with disjoint ranges may run at the same time.
struct DropoutKernels {
  void (*add)(const DropoutCall&, int64_t first_row, int64_t last_row);
};

namespace plain {
extern const DropoutKernels dropout_kernels;
}
namespace avx2 {
extern const DropoutKernels dropout_kernels;
}
namespace avx512 {
extern const DropoutKernels dropout_kernels;
}

namespace cuda {
// Return null, or what CUDA says is wrong. `stream` is a cudaStream_t.
const char* dropout_add(const DropoutCall&, int device, void* stream);
}  // namespace cuda

}  // namespace megatron
