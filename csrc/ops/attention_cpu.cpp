// The gradient of attention on the CPU, for the instruction set that OPS_TARGET names.
//
// Includes nothing whose inline functions another copy of this file, or torch, has as well.
#include "attention_rows.h"

namespace megatron::OPS_TARGET {

static void gradient(const AttentionCall& call, int64_t first, int64_t last) {
  with_attention(call, [=](auto rows) {
    for (int64_t row = first; row < last; ++row) rows.gradient(ThreadLanes(), row);
  });
}

const AttentionKernels attention_kernels{gradient};

}  // namespace megatron::OPS_TARGET
