// Activations on the CPU, for the instruction set that OPS_TARGET names.
//
// Includes nothing whose inline functions another copy of this file, or torch, has as well.
#include "activation_rows.h"

namespace megatron::OPS_TARGET {

static void forward(const ActivationCall& call, int64_t first, int64_t last) {
  with_activation(call, [=](auto rows) {
    for (int64_t row = first; row < last; ++row) rows.forward(ThreadLanes(), row);
  });
}

static void backward(const ActivationCall& call, int64_t first, int64_t last) {
  with_activation(call, [=](auto rows) {
    for (int64_t row = first; row < last; ++row) rows.backward(ThreadLanes(), row);
  });
}

const ActivationKernels activation_kernels{forward, backward};

}  // namespace megatron::OPS_TARGET
