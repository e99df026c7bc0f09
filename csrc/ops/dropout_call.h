// Arguments of dropout: what the operator hands to the kernels of a machine.
#pragma once

#include "number_type.h"

namespace megatron {

// Elements are contiguous, in rows of `width`. Word q of the random words of counter i of a row, below
// `quarter`, is of element q * quarter + i of the row.
struct DropoutCall {
  // A fourth of the width, rounded up for whole vectors.
  static constexpr int64_t quarter_of(int64_t width) { return (width + 63) / 64 * 16; }

  NumberType x_type, residual_type;      // out is of the latter
  int64_t rows, width, quarter;
  uint32_t threshold;  // words below it drop their element
  double scale;        // of the elements that are kept

  const int64_t* seed;     // where x is
  const int64_t* numbers;  // one for each row: rows of one number, and one seed, have one mask
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
