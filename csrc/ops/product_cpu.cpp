// Products of rows with a packed weight on the CPU, for the instruction set that OPS_TARGET names.
//
// Includes nothing whose inline functions another copy of this file, or torch, has as well.
#include "product_rows.h"

namespace megatron::OPS_TARGET {

static void pack(const ProductCall& call, int64_t first, int64_t last) {
  with_products(call, [=](auto rows) {
    for (int64_t panel = first; panel < last; ++panel) rows.pack(panel);
  });
}

static void multiply(const ProductCall& call, int64_t first, int64_t last) {
  with_products(call, [=](auto rows) {
    for (int64_t panel = first; panel < last; ++panel) rows.multiply(panel);
  });
}

const ProductKernels product_kernels{kPanel, pack, multiply};

}  // namespace megatron::OPS_TARGET
