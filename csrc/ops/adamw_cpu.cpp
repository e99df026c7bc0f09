// AdamW on the CPU, for the instruction set that OPS_TARGET names.
//
// Includes nothing whose inline functions another copy of this file, or torch, has as well.
#include "adamw_rows.h"

namespace megatron::OPS_TARGET {

static void step(const AdamwCall& call, int64_t first, int64_t last) {
  with_adamw(call, [&](auto rows) {
    int tensor = 0;
    for (int64_t row = first; row < last; ++row) {
      while (tensor + 1 < call.tensors && call.slots[tensor + 1].first_row <= row) ++tensor;
      rows.step(ThreadLanes(), call, call.slots[tensor], row);
    }
  });
}

const AdamwKernels adamw_kernels{step};

}  // namespace megatron::OPS_TARGET
