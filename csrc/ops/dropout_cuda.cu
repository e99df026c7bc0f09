// Dropout on CUDA: a block for every row.
#include "block_lanes.cuh"
#include "dropout_rows.h"
#include "launch.cuh"

namespace megatron::OPS_TARGET {

template <int W, class Rows>
__global__ void __launch_bounds__(kMostThreads) dropout_kernel(Rows rows) {
  rows.add(BlockLanes<W>(), blockIdx.x);
}

const char* dropout_add(const DropoutCall& call, int device, void* stream) {
  return launch_rows(
      device, {call.width}, {call.x, call.residual, call.out},
      [&](const auto& use) { with_dropout(call, use); },
      [&](auto rows, auto wide) {
        constexpr int W = decltype(wide)::value;
        dropout_kernel<W>
            <<<call.rows, threads_for(call.quarter, W), 0, cudaStream_t(stream)>>>(rows);
      });
}

}  // namespace megatron::OPS_TARGET
