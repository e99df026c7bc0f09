// Arguments of the norms as plain pointers: what the operators hand to the kernels of a machine.
#pragma once

#include "number_type.h"

namespace megatron {

// LayerNorm where `centered`, else RMSNorm. Rows are contiguous. Statistics are fp32, or fp64 where x is.
struct NormCall {
  bool centered;
  NumberType x_type;  // of x, residual, sum, grad_sum, grad_x
  NumberType y_type;  // of weight, bias, out, grad and the gradients of weight and bias
  int64_t rows, width;

  const void* x;
  const void* weight;
  void* mean;  // [rows], of LayerNorm only
  void* rstd;  // [rows]

  // forward
  double epsilon;
  const void* residual;  // may be null; then `sum` is not written
  void* sum;
  const void* bias;  // of LayerNorm only
  void* out;

  // backward
  const void* grad;
  const void* grad_sum;  // may be null
  void* grad_x;
  void* grad_weight;
  void* grad_bias;  // of LayerNorm only
  int64_t chunks;   // of rows, each summed into one row of the partial gradients
  void* partials;   // [1 or 2, chunks, width], of the type of statistics: of weight, then of bias
};

// Kernels of one instruction set. Calls with disjoint ranges may run at the same time.
struct NormKernels {
  void (*forward)(const NormCall&, int64_t first_row, int64_t last_row);
  void (*backward)(const NormCall&, int64_t first_chunk, int64_t last_chunk);
  void (*sum_partials)(const NormCall&, int64_t first_column, int64_t last_column);
};

namespace plain {
extern const NormKernels norm_kernels;
}
namespace avx2 {
extern const NormKernels norm_kernels;
}
namespace avx512 {
extern const NormKernels norm_kernels;
}

namespace cuda {
// Return null, or what CUDA says is wrong. `stream` is a cudaStream_t.
const char* norm_forward(const NormCall&, int device, void* stream);
const char* norm_backward(const NormCall&, int device, void* stream);
int64_t norm_chunks(const NormCall&, int device);  // a good number of chunks
}  // namespace cuda

}  // namespace megatron
