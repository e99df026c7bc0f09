// Products of rows with a packed weight on the CPU, for the instruction set that OPS_TARGET names.
//
// Includes nothing whose inline functions another copy of this file, or torch, has as well.
#include "product_rows.h"

#include <cstdlib>

namespace megatron::OPS_TARGET {

static void pack(const ProductCall& call, int64_t first, int64_t last) {
  with_products(call, [=](auto rows) {
    for (int64_t panel = first; panel < last; ++panel) rows.pack(panel);
  });
}

static void multiply(const ProductCall& call, int64_t first, int64_t last) {
  with_products(call, [=](auto rows) {
    const bool is_narrow = call.is_int8 || call.type != NumberType::float32;
    const bool is_widened = is_narrow && call.rows >= kWidened;
    // Without room, weights are widened for each row: slower, with the same results.
    float* wide = is_widened
                      ? static_cast<float*>(std::malloc(call.inputs * kPanel * sizeof(float)))
                      : nullptr;
    for (int64_t panel = first; panel < last; ++panel) rows.multiply(panel, wide);
    std::free(wide);
  });
}

const ProductKernels product_kernels{kPanel, pack, multiply};

}  // namespace megatron::OPS_TARGET
