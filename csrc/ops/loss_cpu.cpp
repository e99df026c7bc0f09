// The cross entropy on the CPU, for the instruction set that OPS_TARGET names.
//
// Includes nothing whose inline functions another copy of this file, or torch, has as well.
#include "loss_rows.h"

namespace megatron::OPS_TARGET {

static void statistics(const LossCall& call, int64_t first, int64_t last) {
  with_loss(call, [=](auto rows) {
    for (int64_t row = first; row < last; ++row) rows.statistics(ThreadLanes(), row);
  });
}

static void gradient(const LossCall& call, int64_t first, int64_t last) {
  with_loss(call, [=](auto rows) {
    for (int64_t row = first; row < last; ++row) rows.gradient(ThreadLanes(), row);
  });
}

const LossKernels loss_kernels{statistics, gradient};

}  // namespace megatron::OPS_TARGET
