// Arguments of products of rows with a packed weight: what the operators hand to the kernels.
#pragma once

#include "number_type.h"

namespace megatron {

// A weight [outputs, inputs] is packed into panels, each of the weights of `panel` outputs, input
// after input; outputs that are missing in the last one are zeros. Each 32 bits have one weight of an
// output, or those of 2 or 4 inputs that follow each other, zeros behind the last one. Products with
// weights in int8 are multiplied by the scale of their output.
struct ProductCall {
  NumberType type;  // of scales, bias, product and, where it is not int8, weight: 32 or 16 bits
  bool is_int8;     // of the weight
  int64_t rows, inputs, outputs;
  const float* x;  // [rows, inputs]
  const void* scales;  // [outputs], of int8
  const void* bias;
  const void* weight;  // [outputs, inputs], to be packed
  void* packed;
  void* out;  // [rows, outputs]
};

// Kernels of one instruction set, over ranges of panels. Calls with disjoint ranges may run at the
// same time.
struct ProductKernels {
  int64_t panel;
  void (*pack)(const ProductCall&, int64_t first, int64_t last);
  void (*multiply)(const ProductCall&, int64_t first, int64_t last);
};

namespace plain {
extern const ProductKernels product_kernels;
}
namespace avx2 {
extern const ProductKernels product_kernels;
}
namespace avx512 {
extern const ProductKernels product_kernels;
}

}  // namespace megatron
