// Dropout on the CPU, for the instruction set that OPS_TARGET names.
//
// Includes nothing whose inline functions another copy of this file, or torch, has as well.
#include "dropout_rows.h"

namespace megatron::OPS_TARGET {

static void add(const DropoutCall& call, int64_t first, int64_t last) {
  with_dropout(call, [=](auto rows) {
    for (int64_t row = first; row < last; ++row) rows.add(ThreadLanes(), row);
  });
}

const DropoutKernels dropout_kernels{add};

}  // namespace megatron::OPS_TARGET
