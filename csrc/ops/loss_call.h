// Arguments of the cross entropy of rows of logits: what the operators hand to the kernels.
#pragma once

#include "number_type.h"

namespace megatron {

// Rows are contiguous. The type A of statistics and factors is fp32, or fp64 where the logits are.
struct LossCall {
  NumberType type;      // of the logits
  int64_t rows, width;  // width below 2^31
  int64_t true_width;   // columns from here on are padding
  void* logits;         // overwritten by the gradient
  const int64_t* label; // [rows] the column, or a number that is none
  void* statistics;     // [3, rows] largest logit, sum of e^(logit - largest), logit of the label

  // the gradient of column j is e^(logit_j - shift) * scale, minus at_label where j is the label's
  const void* shift;     // [rows]
  const void* scale;     // [rows]
  const void* at_label;  // [rows]
};

// Kernels of one instruction set. Calls with disjoint ranges may run at the same time.
struct LossKernels {
  void (*statistics)(const LossCall&, int64_t first_row, int64_t last_row);
  void (*gradient)(const LossCall&, int64_t first_row, int64_t last_row);
};

namespace plain {
extern const LossKernels loss_kernels;
}
namespace avx2 {
extern const LossKernels loss_kernels;
}
namespace avx512 {
extern const LossKernels loss_kernels;
}

namespace cuda {
// Return null, or what CUDA says is wrong. `stream` is a cudaStream_t.
const char* loss_statistics(const LossCall&, int device, void* stream);
const char* loss_gradient(const LossCall&, int device, void* stream);
}  // namespace cuda

}  // namespace megatron
