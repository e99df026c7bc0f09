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

// Call launch(rows, constant of the elements that a thread moves at once).
template <class F>
static const char* launch_rows(const LossCall& call, int device, const F& launch) {
  if (const char* error = error_of(cudaSetDevice(device))) return error;
  with_loss(call, [&](auto rows) {
    constexpr int kWide = decltype(rows)::kWide;
    if (call.width % kWide == 0 && is_aligned(call.logits))
      launch(rows, std::integral_constant<int, kWide>());
    else
      launch(rows, std::integral_constant<int, 1>());
  });
  return error_of(cudaGetLastError());
}

const char* loss_statistics(const LossCall& call, int device, void* stream) {
  return launch_rows(call, device, [&](auto rows, auto wide) {
    constexpr int W = decltype(wide)::value;
    loss_statistics_kernel<W>
        <<<call.rows, threads_for(call.width, W), 0, cudaStream_t(stream)>>>(rows);
  });
}

const char* loss_gradient(const LossCall& call, int device, void* stream) {
  return launch_rows(call, device, [&](auto rows, auto wide) {
    constexpr int W = decltype(wide)::value;
    loss_gradient_kernel<W>
        <<<call.rows, threads_for(call.width, W), 0, cudaStream_t(stream)>>>(rows);
  });
}

}  // namespace megatron::OPS_TARGET
