// Arguments of AdamW: what the operator hands to the kernels of a machine.
#pragma once

#include "number_type.h"

namespace megatron {

// One step of AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) over several tensors, in rows of
// kWidth elements. It is passed to a CUDA kernel by value, which takes up to 4,096 bytes.
struct AdamwCall {
  static constexpr int64_t kWidth = 4096;
  static constexpr int kTensors = 48;  // of one call

  struct Slot {
    void* weight;      // or the lower halves of weights, int16, whose upper ones are published
    const void* grad;
    void *mean, *square;  // moving averages of gradients and of their squares
    void* published;      // the weight in half precision, or null
    int64_t elements;
    int64_t first_row;
  };

  NumberType weight_type, grad_type, mean_type, square_type, published_type;
  bool is_split;
  int tensors;
  int64_t rows;
  double rate, beta1, beta2, epsilon, decay;
  // float64: the factor on gradients, whether the step counts, 1 - beta1^t, sqrt(1 - beta2^t).
  const double* scalars;
  Slot slots[kTensors];
};
static_assert(sizeof(AdamwCall) <= 4096 - 64);

// Kernels of one instruction set. Calls with disjoint ranges may run at the same time.
struct AdamwKernels {
  void (*step)(const AdamwCall&, int64_t first_row, int64_t last_row);
};

namespace plain {
extern const AdamwKernels adamw_kernels;
}
namespace avx2 {
extern const AdamwKernels adamw_kernels;
}
namespace avx512 {
extern const AdamwKernels adamw_kernels;
}

namespace cuda {
// Return null, or what CUDA says is wrong. `stream` is a cudaStream_t.
const char* adamw_step(const AdamwCall&, int device, void* stream);
}  // namespace cuda

}  // namespace megatron
