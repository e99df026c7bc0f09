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
static const char* launch_rows(const LossCall& call, int device, const F& launch) {
  if (const char* error = error_of(cudaSetDevice(device))) return error;
  const auto is_wide = [&](int elements) {
    return call.width % elements == 0 && is_aligned(call.logits);
  };
  with_loss(call, [&](auto rows) { with_width(rows, is_wide, launch); });
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
