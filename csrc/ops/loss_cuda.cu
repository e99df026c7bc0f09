// The cross entropy on CUDA: a block for every row.
#include "block_lanes.cuh"
#include "launch.cuh"
#include "loss_rows.h"

namespace megatron::OPS_TARGET {

template <int W, class Rows>
__global__ void __launch_bounds__(kMostThreads) loss_statistics_kernel(Rows rows) {
  rows.statistics(BlockLanes<W>(), blockIdx.x);
}

template <int W, class Rows>
__global__ void __launch_bounds__(kMostThreads) loss_gradient_kernel(Rows rows) {
  rows.gradient(BlockLanes<W>(), blockIdx.x);
}

template <class F>
static const char* launch(const LossCall& call, int device, const F& start) {
  return launch_rows(
      device, {call.width}, {call.logits}, [&](const auto& use) { with_loss(call, use); }, start);
}

const char* loss_statistics(const LossCall& call, int device, void* stream) {
  return launch(call, device, [&](auto rows, auto wide) {
    constexpr int W = decltype(wide)::value;
    loss_statistics_kernel<W>
        <<<call.rows, threads_for(call.width, W), 0, cudaStream_t(stream)>>>(rows);
  });
}

const char* loss_gradient(const LossCall& call, int device, void* stream) {
  return launch(call, device, [&](auto rows, auto wide) {
    constexpr int W = decltype(wide)::value;
    loss_gradient_kernel<W>
        <<<call.rows, threads_for(call.width, W), 0, cudaStream_t(stream)>>>(rows);
  });
}

}  // namespace megatron::OPS_TARGET
