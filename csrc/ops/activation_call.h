// Arguments of activations and gated units: what the operators hand to the kernels of a machine.
#pragma once

#include "number_type.h"

namespace megatron {

// In the order of megatron/ops/activation.py.
enum class ActivationKind { gelu_tanh, silu, relu, squared_relu, identity };

// Rows are contiguous. A gated unit has rows [gate; up] of 2 width elements.
struct ActivationCall {
  NumberType type;
  ActivationKind kind;
  bool gated;
  int64_t rows, width;  // width of the output

  const void* x;     // [rows, width], or [rows, 2 width] of a gated unit
  void* out;         // [rows, width]
  const void* grad;  // [rows, width]
  void* grad_x;      // as x
};

// Kernels of one instruction set. Calls with disjoint ranges may run at the same time.
struct ActivationKernels {
  void (*forward)(const ActivationCall&, int64_t first_row, int64_t last_row);
  void (*backward)(const ActivationCall&, int64_t first_row, int64_t last_row);
};

namespace plain {
extern const ActivationKernels activation_kernels;
}
namespace avx2 {
extern const ActivationKernels activation_kernels;
}
namespace avx512 {
extern const ActivationKernels activation_kernels;
}

namespace cuda {
// Return null, or what CUDA says is wrong. `stream` is a cudaStream_t.
const char* activation_forward(const ActivationCall&, int device, void* stream);
const char* activation_backward(const ActivationCall&, int device, void* stream);
}  // namespace cuda

}  // namespace megatron
